"""Replace RMSNorm modules of any library, recognised by their results, by ``kp.rms_norm``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from kernel_pytorch.ops.rms_norm import rms_norm
from kernel_pytorch.ops.rms_norm.definition import RMS_NORM as DEFINITION
from kernel_pytorch.optimization.candidate import Candidate, Context, Sites, Stage
from kernel_pytorch.optimization.candidates.modules import sites_of
from kernel_pytorch.optimization.edits import Edits, Forward
from kernel_pytorch.optimization.fallbacks import fell_back

__all__ = ["RMS_NORM", "Norm", "apply_norm", "recognised"]


@dataclass(frozen=True)
class Norm:
    """The parameters of an RMSNorm module's computation."""

    eps: float
    offset: float
    """Added to the weight: 1 in Gemma, 0 elsewhere."""


def recognised(module: nn.Module) -> Norm | None:
    """Return the parameters of a module if it is an RMSNorm over the last dimension, else None.

    A module qualifies if it has one weight vector and no other parameters or buffers, and equals the definition for
    small, large and ordinary inputs, in training and in evaluation mode.
    """
    weight = module._parameters.get("weight")
    alone = next(module.children(), None) is None and next(module.buffers(), None) is None
    if weight is None or weight.ndim != 1 or len(module._parameters) != 1 or not alone:
        return None
    if type(module) is nn.RMSNorm:
        return Norm(module.eps, 0.0) if module.eps is not None else None
    for eps in [value for value in vars(module).values() if type(value) is float and 0 < value < 1]:
        for offset in (0.0, 1.0):
            if _computes(module, weight.shape[0], Norm(eps, offset)):
                return Norm(eps, offset)
    return None


def _computes(module: nn.Module, width: int, norm: Norm) -> bool:
    training = module.training
    generator = torch.Generator().manual_seed(0)
    try:
        for mode in (True, False):
            module.train(mode)
            for size in (1.0, 300.0, math.sqrt(norm.eps)):  # inputs near sqrt(eps) are sensitive to a different eps
                weight = torch.randn(width, generator=generator)
                x = torch.randn(3, width, generator=generator) * size
                with torch.no_grad(), torch.autocast("cpu", enabled=False):
                    found = torch.func.functional_call(module, {"weight": weight}, (x,))
                expected = DEFINITION.reference(x.double(), weight.double() + norm.offset, norm.eps)[0].float()
                if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
                    return False
                if not torch.allclose(found, expected, rtol=1e-4, atol=1e-6):
                    return False
        return True
    except Exception:  # a module that raises here is not an RMSNorm
        return False
    finally:
        module.train(training)


def _forward(call: Forward, x: Any, *args: Any, **kwargs: Any) -> Any:
    weight: Any = call.module.weight
    compute, norm = call.settings
    served = isinstance(x, torch.Tensor) and not args and not kwargs
    if not served or weight.dtype not in (x.dtype, torch.float32) or x.is_complex():
        fell_back(f"{type(call.module).__name__}: a call with other arguments or dtypes runs the original norm")
        return call.original(x, *args, **kwargs)
    return compute(x, weight, norm)


def _kp_norm(x: torch.Tensor, weight: torch.Tensor, norm: Norm) -> torch.Tensor:
    if norm.offset:
        weight = weight.float() + norm.offset if x.dtype is not torch.float64 else weight + norm.offset
    return rms_norm(x, weight, norm.eps)


def _match(model: nn.Module, context: Context) -> Sites | str:
    return sites_of(
        model,
        lambda module: recognised(module) is not None,
        "the model has no RMSNorm that computes the definition",
    )


def apply_norm(
    compute: Callable[[torch.Tensor, torch.Tensor, Norm], Any],
    model: nn.Module,
    sites: tuple[str, ...],
    edits: Edits,
) -> None:
    """Let RMSNorm modules call ``compute(x, weight, norm)``, a module-level function."""
    for name in sites:
        module = model.get_submodule(name)
        norm = recognised(module)
        if norm is None:
            raise ValueError(f"module {name!r} ({type(module).__name__}) is not an RMSNorm")
        edits.replace_forward(module, _forward, (compute, norm))


RMS_NORM = Candidate(
    "rms-norm",
    "RMSNorm modules on kp.rms_norm",
    "exact",
    Stage.MODULE,
    _match,
    partial(apply_norm, _kp_norm),
)
