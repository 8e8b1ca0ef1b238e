"""The FP8 linear function, forward and backward: three quantized operands and three GEMMs.

Shapes: M rows (all leading dimensions of x), K inputs, N outputs. The backward saves the transposed quantized x for
dW and the transposed quantized weight for dx, or x and the weight themselves where that GEMM is in high precision,
and nothing for a gradient that is not needed.

``_Linear`` is the autograd of eager mode and of torch.compile. Eager calls quantize first, which layers that take the
same tensor share, and then call it. torch.compile calls it through ``operators.linear_in_graph``; where all three
GEMMs are in FP8, quantize and GEMM are then one operator forward and one backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernel_pytorch._compat.compiler import constant_in_graph
from kernel_pytorch.fp8.quantize import (
    INPUT,
    NAMES,
    WEIGHT,
    QuantizeSpec,
    ScaledTensor,
    cache_cast,
    cached_cast,
    output_accumulation,
    quantize,
    scaled_matmul,
    transpose_data,
    weight_spec,
)
from kernel_pytorch.fp8.recipe import Recipe, recipe_named
from kernel_pytorch.fp8.rms_norm import NormInputs, input_key, norm_inputs
from kernel_pytorch.fp8.transforms import refuse_compiled_transforms, refuse_transforms
from kernel_pytorch.hardware_abstraction.formats import E4M3FN, E5M2, FormatPair, for_device
from kernel_pytorch.hardware_abstraction.registry import device_of
from kernel_pytorch.ops.fp8_cast import fp8_cast
from kernel_pytorch.ops.fp8_cast.definition import HISTORY

__all__ = [
    "COUNTS_SHAPE",
    "STATE_SHAPE",
    "Buffers",
    "GemmSpec",
    "backward_gemms",
    "quantize_input",
    "quantize_layer_weight",
    "quantize_of",
    "check_linear",
    "checked_linear",
    "formats_on",
    "forward_gemms",
    "fp8_linear",
    "gemm_spec_for",
    "gemm_spec_of",
    "refuse_double_backward",
    "traced_linear",
    "compute_dtype",
]

COUNTS_SHAPE = (3, 2, 4)
"""Counts: (input, weight, gradient), (data, data_t), (saturated, underflowed, non-finite, all elements)."""
STATE_SHAPE = (2, HISTORY)
"""Amax histories of delayed scaling: of the input and of the gradient."""


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    recipe: str | Recipe = "tensorwise",
    *,
    counts: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    quantized_weight: ScaledTensor | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.linear`` with its three GEMMs in FP8; ``Recipe`` has the equations.

    A NaN or infinite element of x, weight or a gradient makes every element of the results that depends on it NaN.

    Args:
        x: (..., K), float32, float16 or bfloat16, any strides, may be empty.
        weight: (N, K), in any of these formats.
        bias: (N), or None.
        recipe: one of ``RECIPES`` by name, or a ``Recipe``.
        counts: int64 of shape ``COUNTS_SHAPE`` on x's device, or None. The forward and the backward add their
            saturated, underflowed and non-finite counts to it on the device, without synchronizing. A forward that
            activation checkpointing recomputes is counted twice.
        state: float32 of shape ``STATE_SHAPE`` on x's device, zeros before the first call: the amax histories of a
            delayed recipe, updated in place by the forward and the backward.
        quantized_weight: the result of ``quantize_layer_weight``, to reuse it; None to quantize the weight.

    Returns:
        (..., N) in x's dtype, or in that of ``torch.autocast``. Gradients flow to x, weight and bias.

    Example:
        >>> import torch
        >>> x, weight = torch.randn(6, 4, 32), torch.randn(16, 32, requires_grad=True)
        >>> counts = torch.zeros(COUNTS_SHAPE, dtype=torch.int64)
        >>> y = fp8_linear(x, weight, recipe="rowwise", counts=counts)
        >>> y.sum().backward()
        >>> y.shape, weight.grad.shape, counts[:, :, 2].sum().item()
        (torch.Size([6, 4, 16]), torch.Size([16, 32]), 0)
    """
    chosen = recipe_named(recipe)
    if torch.compiler.is_compiling():
        refuse_compiled_transforms()
    else:
        refuse_transforms(x, weight, bias)  # before check_linear, whose shape checks fail under torch.jit.trace
    check_linear(x, weight, bias)
    _check_memory(x, chosen, counts, state)
    buffers = Buffers()
    if counts is not None:
        buffers = buffers._replace(counts=counts[:2], gradient_counts=counts[2:])
    if state is not None and chosen.delayed:
        buffers = buffers._replace(history=state[0], gradient_history=state[1])
    return checked_linear(x, weight, bias, chosen, gemm_spec_of(x, weight, chosen), buffers, quantized_weight)


class Buffers(NamedTuple):
    """Counts and amax histories that a layer's calls update in place: two in the forward, two in the backward.

    They are separate tensors because torch.compile copies a tensor that both graphs mutate, twice a step.
    """

    counts: torch.Tensor | None = None
    """int64 (2, 2, 4): input and weight."""
    history: torch.Tensor | None = None
    gradient_counts: torch.Tensor | None = None
    """int64 (1, 2, 4)."""
    gradient_history: torch.Tensor | None = None


class GemmSpec(NamedTuple):
    """Dtypes, formats and granularities of a layer's three GEMMs, and which of them run, for calls of one kind."""

    dtype: str
    forward_format: str
    gradient_format: str
    input_granularity: str
    weight_granularity: str
    gradient_granularity: str
    dx_sums: str
    power_of_two: bool
    y_fp8: bool
    dx_fp8: bool
    dw_fp8: bool
    needs_dx: bool
    needs_dw: bool

    @property
    def x_spec(self) -> QuantizeSpec:
        """How x is quantized; the weight gradient GEMM reads its transposed data."""
        transposed = self.needs_dw and self.dw_fp8
        return QuantizeSpec(self.forward_format, self.input_granularity, transposed, self.power_of_two)

    @property
    def weight_spec(self) -> QuantizeSpec:
        """How the weight is quantized; the input gradient GEMM reads its transposed data."""
        transposed = self.needs_dx and self.dx_fp8
        return weight_spec(self.forward_format, self.weight_granularity, transposed, self.power_of_two)

    @property
    def gradient_spec(self) -> QuantizeSpec:
        """How dy is quantized; the weight gradient GEMM reads its transposed data."""
        transposed = self.needs_dw and self.dw_fp8
        return QuantizeSpec(self.gradient_format, self.gradient_granularity, transposed, self.power_of_two)

    @property
    def all_fp8(self) -> bool:
        """Whether all three GEMMs are needed, and in FP8."""
        return self.y_fp8 and self.dx_fp8 and self.dw_fp8 and self.needs_dx and self.needs_dw


def gemm_spec_of(x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> GemmSpec:
    """Return the spec of calls with such tensors."""
    recording = torch.is_grad_enabled()
    return gemm_spec_for(
        x.device.type,
        x.device.index,
        compute_dtype(x),
        recording and x.requires_grad,
        recording and weight.requires_grad,
        recipe,
    )


def gemm_spec_for(
    kind: str, index: int | None, dtype: torch.dtype, needs_dx: bool, needs_dw: bool, recipe: Recipe
) -> GemmSpec:
    """Return the spec of calls on a device that compute in ``dtype``."""
    forward_format, gradient_format = formats_on(kind, index, recipe.gradient_format)
    return GemmSpec(
        dtype=NAMES.get(dtype, str(dtype)),  # check_linear has an error for any other
        forward_format=forward_format,
        gradient_format=gradient_format,
        input_granularity=recipe.input,
        weight_granularity=recipe.weight,
        gradient_granularity=recipe.gradient,
        dx_sums=recipe.dx_sums,
        power_of_two=recipe.power_of_two,
        y_fp8="y" not in recipe.high_precision,
        dx_fp8="dx" not in recipe.high_precision,
        dw_fp8="dW" not in recipe.high_precision,
        needs_dx=needs_dx,
        needs_dw=needs_dw,
    )


def checked_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    gemms: GemmSpec,
    buffers: Buffers,
    quantized_weight: ScaledTensor | None,
) -> torch.Tensor:
    """``fp8_linear`` without checks of its arguments."""
    y: torch.Tensor
    if torch.compiler.is_compiling():
        from kernel_pytorch.fp8.operators import linear_in_graph, revision

        gathered = (None, None) if quantized_weight is None else (quantized_weight.data, quantized_weight.inverse)
        y = linear_in_graph(revision(), x, weight, *gathered, *buffers, *gemms)
        # Outside linear_in_graph: torch 2.11 loses all gradients of a function that adds to its result in place.
        return y if bias is None else (y + bias).to(y.dtype)
    x_MK = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    x_quantized = None
    if gemms.y_fp8:
        transposed = gemms.needs_dw and gemms.dw_fp8
        x_quantized = quantize_input(x, recipe, gemms.forward_format, transposed=transposed, buffers=buffers)
    if quantized_weight is None:
        transposed = gemms.needs_dx and gemms.dx_fp8
        if gemms.y_fp8 or transposed:
            quantized_weight = quantize_layer_weight(
                weight, recipe, gemms.forward_format, transposed=transposed, counts=buffers.counts
            )
    y = _Linear.apply(x_MK, weight, bias, gemms, buffers, x_quantized, quantized_weight)  # type: ignore[no-untyped-call]
    return y if x.ndim == 2 else y.view(*x.shape[:-1], weight.shape[0])


def check_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Raise an error that names the argument of ``fp8_linear`` that is not valid."""
    for name, value in (("x", x), ("weight", weight), ("bias", bias)):
        if value is None and name == "bias":
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}={value!r}: expected a tensor")
        if value.dtype not in NAMES:
            raise TypeError(f"{name} has dtype {value.dtype}: use float32, float16 or bfloat16")
        if value.device != x.device:
            raise ValueError(f"{name} is on {value.device} and x on {x.device}: move one with .to()")
    if weight.ndim != 2:
        raise ValueError(f"weight has shape {list(weight.shape)}: expected a matrix")
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x has shape {list(x.shape)} and weight {list(weight.shape)}: the last dimension of x must be the "
            f"last of weight"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(
            f"bias has shape {list(bias.shape)}: weight of shape {list(weight.shape)} takes [{weight.shape[0]}]"
        )


def _check_memory(x: torch.Tensor, recipe: Recipe, counts: torch.Tensor | None, state: torch.Tensor | None) -> None:
    if recipe.delayed and state is None:
        raise ValueError(
            f"state=None with the recipe {recipe.name!r}, which uses the amax of earlier steps: pass a tensor that "
            f"starts as torch.zeros({STATE_SHAPE}), or use kp.fp8.convert, which keeps one for each layer"
        )
    for name, kept, dtype, shape in (
        ("counts", counts, torch.int64, COUNTS_SHAPE),
        ("state", state, torch.float32, STATE_SHAPE),
    ):
        if kept is None:
            continue
        if not isinstance(kept, torch.Tensor) or kept.dtype != dtype or tuple(kept.shape) != shape:
            raise ValueError(f"{name}={kept!r}: use torch.zeros({shape}, dtype={dtype}), or None")
        if not kept.is_contiguous():
            raise ValueError(f"{name} has strides {kept.stride()}: use a contiguous tensor")
        if kept.device != x.device:
            raise ValueError(f"{name} is on {kept.device} and x on {x.device}: move one with .to()")


@constant_in_graph
def formats_on(kind: str, index: int | None, gradient_family: str) -> tuple[str, str]:
    """Return the names of the FP8 formats of forward tensors and of gradients on a device."""
    device = torch.device(kind) if index is None else torch.device(kind, index)
    pair = FormatPair(E4M3FN, E5M2) if kind == "meta" else for_device(device_of(device))
    return pair.e4m3.name, (pair.e4m3 if gradient_family == "e4m3" else pair.e5m2).name


# Quantized operands, with their counts and histories.


def quantize_input(
    x: torch.Tensor,
    recipe: Recipe,
    number_format: str,
    *,
    transposed: bool,
    buffers: Buffers,
) -> ScaledTensor:
    """Quantize the input of a layer, or return the quantized data that another layer or an RMSNorm has put on it."""
    key = None
    if shareable(x):
        key = input_key(x, recipe, transposed)
        shared = cached_cast(x, key)
        if shared is not None:
            return shared
    x_MK = x if x.ndim == 2 else x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])
    spec = QuantizeSpec(number_format, recipe.input, transposed, recipe.power_of_two)
    cast = quantize(x_MK, spec, buffers.counts, INPUT, buffers.history)
    if key:
        cache_cast(x, key, cast)
    return cast


def shareable(x: torch.Tensor) -> bool:
    """Return whether quantized data may be cached on the tensor: only on non-leaf tensors."""
    return x.grad_fn is not None and type(x) is torch.Tensor


def quantize_layer_weight(
    weight: torch.Tensor,
    recipe: Recipe,
    number_format: str,
    *,
    transposed: bool,
    counts: torch.Tensor | None = None,
) -> ScaledTensor:
    """Quantize a weight, with the transposed data that dx needs if ``transposed``."""
    spec = weight_spec(number_format, recipe.weight, transposed, recipe.power_of_two)
    return quantize(weight, spec, counts, WEIGHT)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of the output: the input's, or that of ``torch.autocast``."""
    kind = "cuda" if x.is_cuda else x.device.type  # is_cuda takes less host time than device.type
    mixed = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if mixed else x.dtype


def forward_gemms(
    gemms: GemmSpec,
    x_MK: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x: ScaledTensor | None,
    quantized_weight: ScaledTensor | None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return y and the tensors that the backward saves."""
    if gemms.y_fp8:
        assert x is not None
        assert quantized_weight is not None
        sums = output_accumulation(gemms.input_granularity)
        y = scaled_matmul(
            x.data, quantized_weight.data, x.inverse, quantized_weight.inverse, gemms.dtype, sums, x.direct
        )
    else:
        compute = getattr(torch, gemms.dtype)
        y = torch.mm(x_MK.to(compute), weight.to(compute).t())
    saved: list[torch.Tensor] = []
    if gemms.needs_dx:
        saved += (
            (quantized_weight.data_t, quantized_weight.inverse_t)
            if gemms.dx_fp8 and quantized_weight is not None
            else (weight,)
        )
    if gemms.needs_dw:
        saved += (x.data_t, x.inverse_t) if gemms.dw_fp8 and x is not None else (x_MK,)
    return (y if bias is None else y.add_(bias)), saved


def backward_gemms(
    gemms: GemmSpec,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    saved: tuple[torch.Tensor, ...],
    dy_MN: torch.Tensor,
    counts: torch.Tensor | None,
    history: torch.Tensor | None,
    traced: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return dx, dweight and dbias; dbias is None if its dtype is."""
    dx_fp8, dw_fp8 = gemms.needs_dx and gemms.dx_fp8, gemms.needs_dw and gemms.dw_fp8
    x_dtype, weight_dtype, bias_dtype = dtypes
    left = list(saved)
    dx = dweight = dbias = None
    name = NAMES[dy_MN.dtype]
    if dx_fp8 or dw_fp8:
        dy = quantize_of(traced)(dy_MN, gemms.gradient_spec, counts, INPUT, history)
    if dx_fp8:
        weight_t, inverse_t = left.pop(0), left.pop(0)
        dx = scaled_matmul(dy.data, weight_t, dy.inverse, inverse_t, name, gemms.dx_sums, dy.direct)
    elif gemms.needs_dx:
        dx = torch.mm(dy_MN, left.pop(0).to(dy_MN.dtype))
    if dw_fp8:
        if gemms.y_fp8:
            x_t, x_inverse_t = left
        else:  # the forward did not quantize x
            x = fp8_cast(
                left[0], gemms.forward_format, gemms.input_granularity, transposed=True,
                power_of_two=gemms.power_of_two,
            )  # fmt: skip
            x_t, x_inverse_t = x.data_t, x.inverse_t
        dweight = scaled_matmul(dy.data_t, x_t, dy.inverse_t, x_inverse_t, name, "promoted", dy.direct)
    elif gemms.needs_dw:
        dweight = torch.mm(dy_MN.t(), left[0].to(dy_MN.dtype))
    if dx is not None and x_dtype != dy_MN.dtype:
        dx = dx.to(x_dtype)
    if dweight is not None and weight_dtype != dy_MN.dtype:
        dweight = dweight.to(weight_dtype)
    if bias_dtype is not None:
        dbias = dy_MN.sum(dim=0, dtype=torch.float32).to(bias_dtype)
    return dx, dweight, dbias


_NO_GRADIENTS = (None,) * 6
"""Number of arguments of ``_Linear`` after x, weight and bias: they have no gradients."""


class _Linear(torch.autograd.Function):
    """Return y; while torch.compile traces all three GEMMs in FP8, also the quantized x that this call has made."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gemms: GemmSpec,
        buffers: Buffers,
        x: ScaledTensor | None,
        quantized_weight: ScaledTensor | None,
        traced: bool = False,
        norm: NormInputs | None = None,
    ) -> Any:
        ctx.gemms, ctx.counts, ctx.history = gemms, buffers.gradient_counts, buffers.gradient_history
        ctx.dtypes = (x_MK.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.traced, ctx.fused = traced, norm is not None
        if traced:
            from kernel_pytorch.fp8.operators import linear_forward, skip_version_check

            skip_version_check(*buffers)  # a recomputation updates the forward's once more
            if norm is not None:
                y, read, made = linear_forward(x_MK, weight, gemms, buffers, x, norm)
                ctx.save_for_backward(*read)
                ctx.transpose_weight = False
                ctx.mark_non_differentiable(*made)
                return y, *made
        y, saved = forward_gemms(gemms, x_MK, weight, bias, x, quantized_weight)
        ctx.save_for_backward(*saved)
        in_8 = gemms.needs_dx and gemms.dx_fp8 and quantized_weight is not None
        ctx.transpose_weight = in_8 and quantized_weight.data_t is quantized_weight.data  # type: ignore[union-attr]
        return y

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor, *_: Any) -> Any:
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        saved = ctx.saved_tensors
        if ctx.fused:
            from kernel_pytorch.fp8.operators import linear_backward

            dx, dweight = linear_backward(dy_MN, saved, ctx.gemms, ctx.counts, ctx.history)
            return dx.to(x_dtype), dweight.to(weight_dtype), None, *_NO_GRADIENTS
        dtypes = (x_dtype, weight_dtype, bias_dtype if ctx.needs_input_grad[2] else None)
        if ctx.transpose_weight:
            saved = (transpose_data(saved[0]), *saved[1:])
        gradients = backward_gemms(ctx.gemms, dtypes, saved, dy_MN, ctx.counts, ctx.history, ctx.traced)
        if torch.is_grad_enabled() and not ctx.traced:  # create_graph=True
            gradients = tuple(refuse_double_backward(gradient, dy_MN) for gradient in gradients)
        return *gradients, *_NO_GRADIENTS


def traced_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    gathered: ScaledTensor | None,
    buffers: Buffers,
    gemms: GemmSpec,
) -> torch.Tensor:
    """Compute the linear function without a bias, while torch.compile traces it."""
    key = (x._version, gemms.x_spec, buffers.history is None)
    shared = cached_cast(x, key)
    x_MK = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y: torch.Tensor
    if gemms.all_fp8 and gathered is None:
        norm = norm_inputs(x, buffers.history) if shared is None else NormInputs()
        y, *made = _Linear.apply(x_MK, weight, None, gemms, buffers, shared, None, True, norm)  # type: ignore[no-untyped-call]
        cast = None
        if made:
            data, inverse, data_t, *inverse_t = made
            cast = ScaledTensor(data, data_t, inverse, *(inverse_t or [inverse]))
    else:
        from kernel_pytorch.fp8.operators import traced_quantize

        cast = shared
        if gemms.y_fp8 and cast is None:
            cast = traced_quantize(x_MK.detach(), gemms.x_spec, buffers.counts, INPUT, buffers.history)
        if gathered is None and (gemms.y_fp8 or gemms.weight_spec.transposed):
            gathered = traced_quantize(weight.detach(), gemms.weight_spec, buffers.counts, WEIGHT)
        y = _Linear.apply(x_MK, weight, None, gemms, buffers, cast, gathered, True)  # type: ignore[no-untyped-call]
    if x.grad_fn is not None and cast is not None:  # not on graph inputs, which the caller may write to
        cache_cast(x, key, cast)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], weight.shape[0])


def quantize_of(traced: bool) -> Callable[..., ScaledTensor]:
    """Return ``quantize``, or ``operators.traced_quantize`` while torch.compile traces."""
    if not traced:
        return quantize
    from kernel_pytorch.fp8.operators import traced_quantize

    return traced_quantize


def refuse_double_backward(gradient: torch.Tensor | None, dy_MN: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient; differentiating it raises an error."""
    if gradient is None:
        return None
    refusing: torch.Tensor = _Refusing.apply(gradient.detach().requires_grad_(), dy_MN)  # type: ignore[no-untyped-call]
    return refusing


class _Refusing(torch.autograd.Function):
    """Identity whose backward raises an error, instead of a second derivative of zero."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, dy_MN: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            "fp8_linear has no second derivative: leave out create_graph=True, or use torch.nn.functional.linear"
        )
