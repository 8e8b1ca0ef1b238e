"""RMSNorm that also quantizes its output for the FP8 layer behind it, in one pass.

A module is fused if it is an ``nn.RMSNorm`` over the last dimension, or has only a weight and computes the same
function. The layer behind says whether and how the output is quantized: ``matching`` has how in eager mode,
``compiled`` inside torch.compile.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from kernel_pytorch._compat.compiler import constant_in_graph
from kernel_pytorch._compat.modes import forward_ad_active, transform_active
from kernel_pytorch.fp8.autograd import recomputing
from kernel_pytorch.fp8.fusion.matching import (
    SETTINGS,
    CastingNorm,
    CastRequest,
    input_key,
    module_settings,
    unchanged,
)
from kernel_pytorch.fp8.module import Float8Linear
from kernel_pytorch.fp8.quantize import NAMES
from kernel_pytorch.fp8.recipe import Recipe
from kernel_pytorch.fp8.scaled_tensor import ScaledTensor
from kernel_pytorch.fp8.transforms import compiled_transforms_active
from kernel_pytorch.hardware_abstraction import dispatch
from kernel_pytorch.ops.fp8_rms_norm import fp8_rms_norm
from kernel_pytorch.ops.fp8_rms_norm.definition import FP8_RMS_NORM
from kernel_pytorch.ops.fp8_rms_norm.prepared import NormSpec
from kernel_pytorch.ops.rms_norm.definition import RMS_NORM

__all__ = ["fuse_norms", "norms_in", "unfuse_norms"]

_CASTER = "_fp8_norm"
"""The attribute of a module that is fused."""
_PLAIN = (torch.Tensor, nn.Parameter)


# Finding them.


def fuse_norms(model: nn.Module, recipe: Recipe, auto: bool) -> list[str]:
    """Give every RMSNorm that may stand before a converted layer the fused forward; their names."""
    if recipe.input != "tensor" or "y" in recipe.high_precision:
        return []
    widths = {layer.in_features for layer in model.modules() if isinstance(layer, Float8Linear)}
    found = []
    for name, module in model.named_modules():
        if "forward" in module.__dict__:
            continue
        # Only a history has a scale before all of a norm is there, and auto leaves norms as they are at first.
        caster = _caster(module, auto, recipe.delayed and not auto)
        if caster is not None and caster.width in widths:
            setattr(module, SETTINGS, module_settings(module, caster.eps))
            setattr(module, _CASTER, caster)
            module.forward = partial(_forward, module)
            found.append(name)
    return found


def unfuse_norms(model: nn.Module) -> None:
    """Give the modules their own forward back."""
    for module in model.modules():
        if hasattr(module, _CASTER):
            delattr(module, _CASTER)
            delattr(module, SETTINGS)
            module.__dict__.pop("forward", None)


def norms_in(model: nn.Module) -> dict[str, nn.Module | None]:
    """The names of the fused norms, each with the layer that it casts for, or None."""
    return {
        name: getattr(module, _CASTER).layer() for name, module in model.named_modules() if hasattr(module, _CASTER)
    }


def _caster(module: nn.Module, auto: bool, traced: bool) -> CastingNorm | None:
    """How a module computes that is an RMSNorm; None for any other."""
    if type(module) is nn.RMSNorm:
        one = len(module.normalized_shape) == 1
        return CastingNorm(module.normalized_shape[0], "eps", True, auto, traced) if one else None
    names = [name for name, _ in module.named_parameters()]
    nothing_else = next(module.children(), None) is None and next(module.buffers(), None) is None
    weight = module._parameters.get("weight")
    if names != ["weight"] or not nothing_else or weight is None or weight.ndim != 1:
        return None
    width = weight.shape[0]
    for name, eps in vars(module).items():
        if type(eps) is float and 0 < eps < 1 and _computes(module, width, eps):
            return CastingNorm(width, name, False, auto, traced)
    return None


def _computes(module: nn.Module, width: int, eps: float) -> bool:
    """Whether the module gives the formula's result, in training and outside, for elements of all magnitudes."""
    training = module.training
    try:
        # Of the size of sqrt(eps), every other eps gives something else.
        sizes = (1.0, 300.0, math.sqrt(eps))
        return all(_agrees(module.train(mode), width, eps, size) for mode in (True, False) for size in sizes)
    except Exception:  # whatever it needs that is not there, it is no RMSNorm
        return False
    finally:
        module.train(training)


def _agrees(module: nn.Module, width: int, eps: float, size: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width, generator=generator)
    x = torch.randn(3, width, generator=generator) * size
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        found = torch.func.functional_call(module, {"weight": weight}, (x,))
    expected = RMS_NORM.reference(x.double(), weight.double(), eps)[0].float()
    same_shape = isinstance(found, torch.Tensor) and found.shape == expected.shape
    return same_shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


@lru_cache
def _default_eps(dtype: torch.dtype) -> float:
    """The eps of an ``nn.RMSNorm`` that has none: of the dtype, or of the float32 that it computes in."""
    x = torch.full((1, 1), 2.0**-12, dtype=dtype)
    found = float(nn.functional.rms_norm(x, (1,)))
    known = {torch.finfo(kind).eps: 0.0 for kind in (torch.float32, dtype)}
    return min(known, key=lambda eps: abs(found - 2.0**-12 / math.sqrt(2.0**-24 + eps)))


@constant_in_graph
def _constant_default_eps(dtype: torch.dtype) -> float:
    """The same, which a compiler does not look into."""
    return _default_eps(dtype)


# Running them.


def _forward(module: Any, *others: Any, **named: Any) -> Any:
    """The forward of a fused norm: by our op where that is the same function, else its own."""
    if torch.compiler.is_compiling():
        return _traced(module, *others, **named)
    caster: CastingNorm = getattr(module, _CASTER)
    again = recomputing()
    given = (*others, *named.values())
    x = given[0] if len(given) == 1 else None
    weight = module.weight
    if not unchanged(getattr(module, SETTINGS)):
        return type(module).forward(module, *others, **named)
    if not caster.used():
        y: torch.Tensor = type(module).forward(module, *others, **named)
        if type(y) is torch.Tensor and y.requires_grad:
            if caster.declined and not _takes(caster, x, weight):
                caster.forget()
            else:
                caster.mark(y, again, None)
        return y
    if x is None or not _takes(caster, x, weight):
        caster.declined = True
        return type(module).forward(module, *others, **named)
    recording = torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
    eps = getattr(module, caster.eps)
    eps = _default_eps(x.dtype) if eps is None else float(eps)
    if not recording:
        return _norm(x, weight, eps, None)[0]
    request = caster.request(x, again)
    casts: list[ScaledTensor | None] = []
    y = _Norm.apply(x, weight, eps, request, casts)  # type: ignore[no-untyped-call]
    (cast,) = casts
    if request is not None and cast is not None:
        y._fp8_cast = (input_key(y, request.recipe, request.transposed), cast)  # type: ignore[attr-defined]
    caster.mark(y, again, request)
    return y


def _traced(module: Any, *others: Any, **named: Any) -> Any:
    """Inside torch.compile: ``traced_norm``, where it is the same function and the layers behind it could gain."""
    caster: CastingNorm = getattr(module, _CASTER)
    given, weight = (*others, *named.values()), module.weight
    known = len(given) == 1 and caster.traced and unchanged(getattr(module, SETTINGS))
    if not known or compiled_transforms_active() or not _is_the_norm_of(caster, given[0], weight):
        return type(module).forward(module, *others, **named)
    from kernel_pytorch.fp8.fusion.compiled import revision, rms_norm_in_graph

    x, eps = given[0], getattr(module, caster.eps)
    return rms_norm_in_graph(revision(), x, weight, _constant_default_eps(x.dtype) if eps is None else float(eps))


def _takes(caster: CastingNorm, x: Any, weight: torch.Tensor | None) -> bool:
    """Whether our op computes what the module would."""
    if not _is_the_norm_of(caster, x, weight):
        return False
    # What transforms functions must see torch's own operators.
    return not transform_active() and not forward_ad_active()


def _is_the_norm_of(caster: CastingNorm, x: Any, weight: torch.Tensor | None) -> bool:
    """Whether the module computes what the formula gives in x's dtype."""
    if type(x) not in _PLAIN or x.dtype not in NAMES or x.ndim == 0 or x.shape[-1] != caster.width or x.is_meta:
        return False
    if weight is not None:
        if type(weight) not in _PLAIN or weight.device != x.device or weight.shape != x.shape[-1:]:
            return False
        rounds = caster.rounds_to_input and weight.dtype == torch.float32
        if weight.dtype != x.dtype and not rounds:
            return False
    # Autocast may let a norm of 16 bits give 32.
    return bool(x.dtype == torch.float32 or not torch.is_autocast_enabled(x.device.type))


def _norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, request: CastRequest | None
) -> tuple[torch.Tensor, torch.Tensor, ScaledTensor | None]:
    """Return y, rstd and the requested cast, whose counts are added to those of the layer behind.

    Where no gradient is recorded.
    """
    x_RH = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    weight_H = weight if weight is None or weight.is_contiguous() else weight.contiguous()
    number_format, transposed, power_of_two, counts, history = None, False, False, None, None
    layer = None if request is None else request.layer()
    if request is not None and layer is not None:
        number_format, transposed, power_of_two = (
            request.number_format,
            request.transposed,
            request.recipe.power_of_two,
        )
        counts, history, _, _ = layer.fp8_buffers(request.recipe)
    length = 0 if history is None else history.shape[0]
    spec = NormSpec(x_RH.shape, x_RH.stride(), eps, number_format, transposed, length, power_of_two)
    run = dispatch.prepared(FP8_RMS_NORM, spec, x)
    if run is not None:
        y, rstd, data, data_t, inverse = run(x_RH, weight_H, counts, history)
    else:
        found = fp8_rms_norm(
            x_RH, weight_H, eps, number_format, transposed=transposed, history=history, power_of_two=power_of_two
        )
        y, rstd, data, data_t, inverse = found.y, found.rstd, found.data, found.data_t, found.inverse
        if counts is not None:
            counts[0].add_(found.counts)
        if history is not None:
            history.copy_(found.next_history)
    cast = None
    if number_format is not None:
        cast = ScaledTensor(data, data_t, inverse, inverse if transposed else inverse.new_empty(0), run is not None)
    if x.ndim != 2:  # no view, so that whoever is given y may change it in place
        y = torch.ops.aten._unsafe_view.default(y, x.shape)
    return y, rstd, cast


class _Norm(torch.autograd.Function):
    """With or without a cast the same is saved: what a backward repeats may differ in that."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        request: CastRequest | None,
        casts: list[ScaledTensor | None],
    ) -> torch.Tensor:
        y, rstd, cast = _norm(x, weight, eps, request)
        casts.append(cast)
        ctx.save_for_backward(x, weight, rstd)
        ctx.policy = dispatch.effective_policy("rms_norm", None)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        policy, values = ctx.policy, (dy, x, weight, rstd)
        if not torch.is_grad_enabled() and dispatch.plain_call(dy):
            dx, dweight = dispatch.function_of(RMS_NORM).run("backward", values, policy)
        else:  # the operator refuses a second derivative by name
            dx, dweight = torch.ops.kernel_pytorch.rms_norm_backward.default(*values, policy)
        needs_dx, needs_dweight, *_ = ctx.needs_input_grad
        return dx if needs_dx else None, dweight if needs_dweight else None, None, None, None
