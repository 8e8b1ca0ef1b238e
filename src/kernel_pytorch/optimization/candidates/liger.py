"""Candidates with Liger's kernels: norms, SwiGLU and GeGLU, rotary embedding, linear cross-entropy.

Liger's own ``apply_liger_kernel_to_llama`` replaces classes and functions in the whole process. Here its kernels are
called from the modules of one model only, so that the change can be undone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kernel_pytorch.optimization.candidate import Candidate, Context, Sites, Stage
from kernel_pytorch.optimization.candidates.linear_cross_entropy import CHUNKED_CROSS_ENTROPY, apply_loss
from kernel_pytorch.optimization.candidates.modules import has_hooks, sites_of, unusable
from kernel_pytorch.optimization.candidates.norms import RMS_NORM, Norm, apply_norm
from kernel_pytorch.optimization.candidates.rotary import apply_rotation, rotation_sites
from kernel_pytorch.optimization.edits import Edits, Forward

__all__ = [
    "LIGER_CROSS_ENTROPY",
    "LIGER_GATED_MLP",
    "LIGER_LAYER_NORM",
    "LIGER_RMS_NORM",
    "LIGER_ROPE",
    "gated_roles",
]

_REQUIRES = frozenset({"liger-kernel"})
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "liger_swiglu": functional.silu,
    "liger_geglu": partial(functional.gelu, approximate="tanh"),
}


def _liger() -> Any:
    # An import statement: torch.compile breaks the graph at importlib.import_module.
    from liger_kernel.transformers import functional as liger

    return liger


def _matching(find: Callable[[nn.Module, Context], Sites | str], model: nn.Module, context: Context) -> Sites | str:
    return unusable("liger_kernel", "liger-kernel", context) or find(model, context)


# RMSNorm.


def _norm(x: torch.Tensor, weight: torch.Tensor, norm: Norm) -> Any:
    return _liger().liger_rms_norm(x, weight, norm.eps, norm.offset, "gemma" if norm.offset else "llama", False)


LIGER_RMS_NORM = Candidate(
    "liger-rms-norm",
    "RMSNorm modules on Liger",
    "exact",
    Stage.MODULE,
    partial(_matching, RMS_NORM.match),
    partial(apply_norm, _norm),
    conflicts=frozenset({"rms-norm", "quack-rms-norm"}),
    requires=_REQUIRES,
)


# LayerNorm. PyTorch's own is already a single kernel, so there is no candidate with ours.


def _layer_norm_forward(call: Forward, x: Any) -> Any:
    module: Any = call.module
    if not isinstance(x, torch.Tensor) or x.dtype != module.weight.dtype:
        return call.original(x)
    return _liger().liger_layer_norm(x, module.weight, module.bias, module.eps)


def _find_layer_norm(model: nn.Module, context: Context) -> Sites | str:
    def wanted(module: nn.Module) -> str | bool:
        if type(module) is not nn.LayerNorm:
            return False
        if module.weight is None or module.bias is None or len(module.normalized_shape) != 1:
            return "it has no weight, no bias or several dimensions"
        return True

    return sites_of(model, wanted, "the model has no nn.LayerNorm with weight and bias over one dimension")


def _apply_layer_norm(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    for site in sites:
        edits.replace_forward(model.get_submodule(site), _layer_norm_forward)


LIGER_LAYER_NORM = Candidate(
    "liger-layer-norm",
    "nn.LayerNorm on Liger",
    "exact",
    Stage.MODULE,
    partial(_matching, _find_layer_norm),
    _apply_layer_norm,
    requires=_REQUIRES,
)


# SwiGLU and GeGLU.


def gated_roles(module: nn.Module) -> tuple[str, str, str, str] | None:
    """Return Liger's function and the names of the gate, up and down layers of a gated MLP; None for other modules.

    A module qualifies if it has three ``nn.Linear`` without bias and no other weights, and returns
    ``down(activation(gate(x)) * up(x))`` for small and large inputs, in training and in evaluation mode.
    """
    linears = [name for name, child in module.named_children() if type(child) is nn.Linear]
    weights = [name for name, _ in module.named_parameters()]
    drops = any("Dropout" in type(child).__name__ for child in module.modules())
    if len(linears) != 3 or drops or sorted(weights) != sorted(f"{name}.weight" for name in linears):
        return None
    if any(has_hooks(child) or "forward" in vars(child) for child in module.children()):
        return None
    for gate, up, down in itertools.permutations(linears):
        for name, activation in _ACTIVATIONS.items():
            if _is_gated(module, activation, gate, up, down):
                return name, gate, up, down
    return None


def _is_gated(
    module: nn.Module, activation: Callable[[torch.Tensor], torch.Tensor], gate: str, up: str, down: str
) -> bool:
    generator = torch.Generator().manual_seed(0)
    shapes = {gate: (12, 8), up: (12, 8), down: (8, 12)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    modes = {child: child.training for child in module.modules()}
    try:
        for training, size in itertools.product((True, False), (1.0, 100.0)):
            module.train(training)
            x = torch.randn(3, 8, generator=generator) * size
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                given = {f"{name}.weight": weight for name, weight in weights.items()}
                found = torch.func.functional_call(module, given, (x,))
            hidden = activation(x @ weights[gate].t()) * (x @ weights[up].t())
            if not torch.allclose(found, hidden @ weights[down].t(), rtol=1e-4, atol=1e-4):
                return False
        return True
    except Exception:  # a module that raises here is not a gated MLP
        return False
    finally:
        for child, mode in modes.items():
            child.training = mode


def _gated_forward(call: Forward, x: Any, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not isinstance(x, torch.Tensor):
        return call.original(x, *args, **kwargs)
    name, gate, up, down = call.settings
    children = call.module._modules
    hidden = getattr(_liger(), name)(children[gate](x), children[up](x))  # type: ignore[misc]
    return children[down](hidden)  # type: ignore[misc]


def _find_gated(model: nn.Module, context: Context) -> Sites | str:
    return sites_of(
        model,
        lambda module: gated_roles(module) is not None,
        "the model has no module that computes SwiGLU or GeGLU of three nn.Linear without bias",
    )


def _apply_gated(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    for site in sites:
        module = model.get_submodule(site)
        roles = gated_roles(module)
        if roles is None:
            raise ValueError(f"module {site!r} ({type(module).__name__}) is not a gated MLP")
        edits.replace_forward(module, _gated_forward, roles)


LIGER_GATED_MLP = Candidate(
    "liger-swiglu",
    "SwiGLU and GeGLU of gated MLPs on Liger",
    "exact",
    Stage.MODULE,
    partial(_matching, _find_gated),
    _apply_gated,
    requires=_REQUIRES,
)


# Rotary embedding.


def _rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> Any:
    if interleaved:
        raise NotImplementedError("Liger's rotary embedding has no interleaved pairs")
    return _liger().liger_rope(q, k, cos, sin)


LIGER_ROPE = Candidate(
    "liger-rope",
    "rotary embedding of attention modules on Liger",
    "exact",
    Stage.MODULE,
    partial(_matching, lambda model, _: rotation_sites(model)),
    partial(apply_rotation, _rotate),
    conflicts=frozenset({"rope"}),
    requires=_REQUIRES,
)


# Linear cross-entropy. Its loss is wrong under torch.compile, which verification detects.


def _loss(x_RH: torch.Tensor, weight_VH: torch.Tensor, target_R: torch.Tensor, ignore_index: int) -> Any:
    return _liger().liger_fused_linear_cross_entropy(
        x_RH, weight_VH, target_R, ignore_index=ignore_index, reduction="sum"
    )


LIGER_CROSS_ENTROPY = Candidate(
    "liger-cross-entropy",
    "language-model head and cross-entropy on Liger, logits never whole",
    "exact",
    Stage.MODULE,
    partial(_matching, CHUNKED_CROSS_ENTROPY.match),
    partial(apply_loss, _loss),
    goals=CHUNKED_CROSS_ENTROPY.goals,
    conflicts=frozenset({"chunked-cross-entropy"}),
    drops=CHUNKED_CROSS_ENTROPY.drops,
    requires=_REQUIRES | CHUNKED_CROSS_ENTROPY.requires,
)
