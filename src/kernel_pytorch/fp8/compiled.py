"""The FP8 linear function inside torch.compile.

Layers that take the same tensor share its quantized data here too. Dynamo drops attributes of tensors, so it puts
``linear_in_graph`` into its graph without tracing it; AOTAutograd then calls it with tensors that keep attributes.
Imported while compiling only: ``allow_in_graph`` imports ``torch._dynamo``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kernel_pytorch.fp8.autograd import (
    Buffers,
    GemmSpec,
    backward_gemms,
    forward_gemms,
    quantize_input,
    quantize_layer_weight,
)
from kernel_pytorch.fp8.fusion.compiled import NormInputs, norm_inputs
from kernel_pytorch.fp8.operators import (
    linear_backward_op,
    linear_forward_op,
    linear_of_quantized_op,
    quantize_op,
    revision,
    skip_version_check,
)
from kernel_pytorch.fp8.quantize import transpose_data
from kernel_pytorch.fp8.recipe import Recipe
from kernel_pytorch.fp8.scaled_tensor import ScaledTensor, unflatten

__all__ = ["compiled_linear", "linear_in_graph", "quantize_in_graph", "revision"]


def compiled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    gemms: GemmSpec,
    buffers: Buffers,
    quantized_weight: ScaledTensor | None,
) -> torch.Tensor:
    """``checked_linear`` while torch.compile traces it."""
    y: torch.Tensor
    if gemms.all_fp8 and quantized_weight is None:
        y = linear_in_graph(revision(), x, weight, recipe.weight, *buffers, *gemms)
    else:
        x_quantized = None
        if gemms.y_fp8:
            x_quantized = quantize_input(
                x, recipe, gemms.forward_format, transposed=gemms.x_transposed, buffers=buffers
            )
        if quantized_weight is None and (gemms.y_fp8 or gemms.weight_transposed):
            kind = (weight, recipe, gemms.forward_format)
            quantized_weight = quantize_layer_weight(
                *kind, transposed=gemms.weight_transposed, counts=buffers.counts
            )
        x_MK = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        operands: Any = (*_flat(x_quantized), *_flat(quantized_weight))
        of_gradient: Any = (buffers.gradient_counts, buffers.gradient_history)
        saved = _Traced(*operands, *of_gradient)
        y = _TracedLinear.apply(x_MK, weight, *saved, *gemms)  # type: ignore[no-untyped-call]
        y = y if x.ndim == 2 else y.view(*x.shape[:-1], weight.shape[0])
    # Not inside the functions: torch 2.11 loses every gradient of one that adds to its result in place.
    return y if bias is None else (y + bias).to(y.dtype)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def quantize_in_graph(
    _: str, x_RC: torch.Tensor, number_format: str, granularity: str, transposed: bool, power_of_two: bool,
    counts: torch.Tensor | None, row: int, history: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """``quantize_op``, whose counts and history the backward may read later."""
    skip_version_check(counts, history)
    found: tuple[torch.Tensor, ...] = quantize_op(
        x_RC, number_format, granularity, transposed, power_of_two, counts, row, history
    )
    return found


# All three GEMMs in FP8: one operator for the forward, one for the backward.


@dataclass(frozen=True)
class _Call:
    """What ``_Linear`` takes besides x and the weight."""

    gemms: GemmSpec
    weight_granularity: str
    buffers: Buffers
    shared: tuple[torch.Tensor | None, ...] | None
    """Data, inverse, data_t and inverse_t of x, if another layer has quantized it."""
    norm: NormInputs


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def linear_in_graph(
    _: str, x: torch.Tensor, weight: torch.Tensor, weight_granularity: str, *values: Any
) -> torch.Tensor:
    """Compute all three GEMMs in FP8, without a bias; ``values`` are those of ``Buffers`` and ``GemmSpec``."""
    buffers, gemms = unflatten(values, Buffers, GemmSpec)
    key = (
        x._version,
        gemms.forward_format,
        gemms.input_granularity,
        gemms.power_of_two,
        buffers.history is None,
    )
    kept_key, *kept = getattr(x, "_fp8_cast", (None,))
    shared = tuple(kept) if kept_key == key else None
    norm = norm_inputs(x, buffers.history) if shared is None else NormInputs()
    x_MK = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y: torch.Tensor
    y, *made = _Linear.apply(x_MK, weight, _Call(gemms, weight_granularity, buffers, shared, norm))  # type: ignore[no-untyped-call]
    if x.grad_fn is not None and kept_key != key:  # nobody else writes to what a graph has computed
        x._fp8_cast = (key, *made)  # type: ignore[attr-defined]
    return y if x.ndim == 2 else y.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """Return y, and the quantized x if this call has quantized it."""

    @staticmethod
    def forward(ctx: Any, x_MK: torch.Tensor, weight: torch.Tensor, call: _Call) -> tuple[torch.Tensor | None, ...]:
        gemms, buffers, norm = call.gemms, call.buffers, call.norm
        made: list[torch.Tensor | None] = []
        skip_version_check(buffers.counts, buffers.history)  # a recomputation updates them once more
        if call.shared is None:
            y, weight_t, weight_inverse_t, data, inverse, data_t, *other = linear_forward_op(gemms.input_granularity)(
                x_MK if norm.x is None else norm.x, weight, gemms.dtype, gemms.forward_format,
                gemms.input_granularity, call.weight_granularity, gemms.power_of_two, buffers.counts,
                buffers.history, norm.rstd, norm.weight,
            )  # fmt: skip
            inverse_t = other[0] if other else None
            made = [data, inverse, data_t, inverse_t]
        else:
            data, inverse, data_t, inverse_t = call.shared
            y, weight_t, weight_inverse_t = linear_of_quantized_op(
                data, inverse, weight, gemms.dtype, gemms.forward_format, call.weight_granularity,
                gemms.power_of_two, buffers.counts,
            )  # fmt: skip
        ctx.save_for_backward(data_t, inverse if inverse_t is None else inverse_t, weight_t, weight_inverse_t)
        ctx.gemms, ctx.dtypes = gemms, (x_MK.dtype, weight.dtype)
        ctx.counts, ctx.history = skip_version_check(buffers.gradient_counts, buffers.gradient_history)
        ctx.mark_non_differentiable(*(tensor for tensor in made if tensor is not None))
        return y, *made

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor, *_: Any) -> Any:
        gemms, (x_dtype, weight_dtype) = ctx.gemms, ctx.dtypes
        dx, dweight = linear_backward_op(
            dy_MN, *ctx.saved_tensors, gemms.gradient_format, gemms.gradient_granularity, gemms.dx_sums,
            gemms.power_of_two, ctx.counts, ctx.history,
        )  # fmt: skip
        return dx.to(x_dtype), dweight.to(weight_dtype), None


# Some of the GEMMs in FP8, or a weight that FSDP2 has gathered in FP8: traced by Dynamo, which takes no records.


class _Traced(NamedTuple):
    """Quantized operands and the gradient's buffers; data_t and inverse_t are None where they are data and inverse:
    torch.compile wants each tensor once."""

    x_data: torch.Tensor | None
    x_inverse: torch.Tensor | None
    x_data_t: torch.Tensor | None
    x_inverse_t: torch.Tensor | None
    weight_data: torch.Tensor | None
    weight_inverse: torch.Tensor | None
    weight_data_t: torch.Tensor | None
    weight_inverse_t: torch.Tensor | None
    gradient_counts: torch.Tensor | None
    gradient_history: torch.Tensor | None


def _flat(found: ScaledTensor | None) -> tuple[torch.Tensor | None, ...]:
    if found is None:
        return (None,) * 4
    data_t = None if found.data_t is found.data else found.data_t
    return found.data, found.inverse, data_t, None if found.inverse_t is found.inverse else found.inverse_t


def _scaled(
    data: torch.Tensor | None,
    inverse: torch.Tensor | None,
    data_t: torch.Tensor | None,
    inverse_t: torch.Tensor | None,
) -> ScaledTensor | None:
    if data is None or inverse is None:
        return None
    data_t, inverse_t = data if data_t is None else data_t, inverse if inverse_t is None else inverse_t
    return ScaledTensor(data, data_t, inverse, inverse_t)


class _TracedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: torch.Tensor, weight: torch.Tensor, *values: Any) -> torch.Tensor:
        given, gemms = unflatten(values, _Traced, GemmSpec)
        x = _scaled(given.x_data, given.x_inverse, given.x_data_t, given.x_inverse_t)
        w = _scaled(given.weight_data, given.weight_inverse, given.weight_data_t, given.weight_inverse_t)
        y, saved = forward_gemms(gemms, x_MK, weight, None, x, w)
        ctx.save_for_backward(*saved)
        ctx.gemms, ctx.counts, ctx.history = tuple(gemms), given.gradient_counts, given.gradient_history
        ctx.dtypes = (x_MK.dtype, weight.dtype, None)
        ctx.transpose_weight = (
            gemms.weight_transposed and given.weight_data is not None and given.weight_data_t is None
        )
        return y

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        if ctx.transpose_weight:
            saved = (transpose_data(saved[0]), *saved[1:])
        dx, dweight, _ = backward_gemms(GemmSpec(*ctx.gemms), ctx.dtypes, saved, dy_MN, ctx.counts, ctx.history)
        return (dx, dweight, *[None] * len(_Traced._fields + GemmSpec._fields))
