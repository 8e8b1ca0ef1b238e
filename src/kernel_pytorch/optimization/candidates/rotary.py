"""Replace the rotary position embedding of attention modules by ``kp.rope``, without patching their Python module.

Model files of transformers call their own global function ``apply_rotary_pos_emb``. A rewritten module runs its
class's forward with a copy of those globals in which this name refers to another function. The model file, its
classes and all other models of the process are unchanged.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from kernel_pytorch.ops.rope import rope
from kernel_pytorch.ops.rope.definition import ROPE as DEFINITION
from kernel_pytorch.optimization.candidate import Candidate, Context, Sites, Stage
from kernel_pytorch.optimization.candidates.modules import sites_of
from kernel_pytorch.optimization.edits import Edits, Forward
from kernel_pytorch.optimization.fallbacks import fell_back

__all__ = ["ROPE", "Rotate", "apply_rotation", "rotation_sites"]

_NAME = "apply_rotary_pos_emb"

Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool], Any]
"""Function that rotates q and k by cos and sin; the last argument is whether pairs are interleaved."""


def _kp_rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> Any:
    return rope(q, k, cos, sin, interleaved=interleaved)


class _Rotated:
    """The forward of a class with another rotary function, which copies and pickles rebuild."""

    def __init__(self, kind: type[nn.Module], rotate: Rotate) -> None:
        self.kind, self.rotate = kind, rotate
        self._forward: Callable[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_forward": None}

    def forward(self) -> Callable[..., Any]:
        if self._forward is None:
            self._forward = _with_rotation(self.kind, self.rotate)
        return self._forward


def _with_rotation(kind: type[nn.Module], rotate: Rotate) -> Callable[..., Any]:
    forward: Any = kind.forward
    original = forward.__globals__[_NAME]
    interleaved = _interleaved(original)
    if interleaved is None:
        raise ValueError(f"{kind.__name__}: {_NAME} of its file is no longer the rotation that kp.rope computes")

    def rotary(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        served = q.ndim == k.ndim == 4 and cos.ndim in (2, 3)
        served = served and q.dtype == k.dtype == cos.dtype  # other dtypes are promoted, as under autocast
        served = served and not args and kwargs in ({}, {"unsqueeze_dim": 1})
        if not served or cos.requires_grad:
            fell_back(f"{kind.__name__}: a call with other shapes or dtypes runs the model's own rotary embedding")
            return original(q, k, cos, sin, *args, **kwargs)
        return rotate(q, k, cos, sin, interleaved)

    # Without __name__, because torch.compile would look up globals in the module of that name.
    scope = {name: value for name, value in forward.__globals__.items() if name != "__name__"}
    made = types.FunctionType(
        forward.__code__, {**scope, _NAME: rotary}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


@functools.cache
def _interleaved(function: Callable[..., Any]) -> bool | None:
    """Return whether a rope function uses interleaved pairs; None if it does not equal the definition of rope."""
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(shape, generator=generator) for shape in ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8))
    )
    try:
        found = function(q.clone(), k.clone(), cos, sin)
        for interleaved in (False, True):
            expected = DEFINITION.reference(q, k, cos, sin, interleaved)
            if all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, expected, strict=True)):
                return interleaved
    except Exception:  # a function that raises here is a different one
        return None
    return None


def _wanted(module: nn.Module) -> str | bool:
    forward: Any = type(module).forward
    code = getattr(forward, "__code__", None)
    if code is None or _NAME not in getattr(forward, "__globals__", {}):
        return False
    if hasattr(forward, "__wrapped__"):
        return f"the forward of {type(module).__name__} is decorated" if _calls(forward.__wrapped__) else False
    if not _calls(forward):
        return False
    if _interleaved(forward.__globals__[_NAME]) is None:
        return f"{_NAME} of its file is not the rotation that kp.rope computes"
    return True


def _calls(forward: Any) -> bool:
    return _NAME in getattr(getattr(forward, "__code__", None), "co_names", ())


def rotation_sites(model: nn.Module) -> Sites | str:
    """Return the modules whose forward calls a rotary function that ``kp.rope`` can replace."""
    return sites_of(model, _wanted, f"the model has no module that calls {_NAME}")


def _forward(call: Forward, *args: Any, **kwargs: Any) -> Any:
    return call.settings.forward()(call.module, *args, **kwargs)


def apply_rotation(rotate: Rotate, model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    """Let modules call ``rotate``, a module-level function."""
    for name in sites:
        module = model.get_submodule(name)
        if "forward" in vars(module):
            raise ValueError(f"module {name!r}: its forward was replaced by another step")
        rotated = _Rotated(type(module), rotate)
        rotated.forward()
        edits.replace_forward(module, _forward, rotated)


def _match(model: nn.Module, context: Context) -> Sites | str:
    return rotation_sites(model)


ROPE = Candidate(
    "rope",
    "rotary embedding of attention modules on kp.rope",
    "exact",
    Stage.MODULE,
    _match,
    partial(apply_rotation, _kp_rope),
    conflicts=frozenset({"liger-rope"}),
)
