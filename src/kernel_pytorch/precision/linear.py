"""The linear function in 8 bits, forward and backward, by a recipe: three casts and three products.

Shapes: M rows (all leading dimensions of x), K inputs, N outputs. Saved for the backward is what it needs and no
more: the 8-bit transposed copy of x for dW (x itself where dW is computed in high precision), the 8-bit transposed
copy of the weight for dx; nothing for a gradient that nobody asked for.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from kernel_pytorch.hardware_abstraction.registry import device_of
from kernel_pytorch.ops.fp8_cast import fp8_cast
from kernel_pytorch.ops.fp8_matmul import fp8_matmul
from kernel_pytorch.precision.formats import E4M3FN, E5M2, FormatPair, for_device
from kernel_pytorch.precision.recipe import Recipe, recipe_named

__all__ = ["COUNTS_SHAPE", "fp8_linear"]

COUNTS_SHAPE = (3, 2, 3)
"""Of the counts: input, weight, gradient; the copy as it is, its transpose; saturated, underflowed, not finite."""
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    recipe: str | Recipe = "tensorwise",
    *,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.linear`` with its three matrix products in 8 bits; ``Recipe`` has the equations.

    What is not finite in x, in the weight or in a gradient is NaN in every number that it is part of.

    Args:
        x: (..., K), float32, float16 or bfloat16, any strides, also no numbers at all.
        weight: (N, K), in any of these formats.
        bias: (N), or None.
        recipe: one of ``RECIPES`` by name, or a ``Recipe``.
        counts: int64 of shape ``COUNTS_SHAPE`` on x's device, or None. What the casts of this call lost is added
            to it: forward and backward, on the device and without waiting for it, so it may be read at any time
            later. What activation checkpointing computes twice is counted twice.

    Returns:
        (..., N) in x's format, or in that of ``torch.autocast``. Gradients flow to x, weight and bias.

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
    _check(x, weight, bias, counts)
    kind = x.device.type
    mixed = kind != "meta" and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if mixed else x.dtype
    recording = torch.is_grad_enabled()
    forward_format, gradient_format = _formats(kind, x.device.index, chosen.gradient_format)
    x_MK = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y_MN = _Linear.apply(  # type: ignore[no-untyped-call]
        x_MK,
        weight,
        bias,
        counts,
        _NAMES[dtype],
        forward_format,
        gradient_format,
        chosen.input,
        chosen.weight,
        chosen.gradient,
        chosen.power_of_two,
        chosen.high_precision_weight_gradient,
        recording and x.requires_grad,
        recording and weight.requires_grad,
    )
    y: torch.Tensor = y_MN.reshape(*x.shape[:-1], weight.shape[0])
    return y


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, counts: torch.Tensor | None) -> None:
    for name, value in (("x", x), ("weight", weight), ("bias", bias)):
        if value is None and name == "bias":
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}={value!r}: expected a tensor")
        if value.dtype not in _NAMES:
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
    if counts is None:
        return
    if not isinstance(counts, torch.Tensor) or counts.dtype != torch.int64 or tuple(counts.shape) != COUNTS_SHAPE:
        raise ValueError(f"counts={counts!r}: use torch.zeros({COUNTS_SHAPE}, dtype=torch.int64), or None")
    if counts.device != x.device:
        raise ValueError(f"counts is on {counts.device} and x on {x.device}: move one with .to()")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _formats(kind: str, index: int | None, gradient_family: str) -> tuple[str, str]:
    """The names of the formats of x and weight, and of the gradient, for a device; a constant to torch.compile."""
    device = torch.device(kind) if index is None else torch.device(kind, index)
    pair = FormatPair(E4M3FN, E5M2) if kind == "meta" else for_device(device_of(device))
    return pair.e4m3.name, (pair.e4m3 if gradient_family == "e4m3" else pair.e5m2).name


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        counts: torch.Tensor | None,
        dtype: str,
        forward_format: str,
        gradient_format: str,
        input_granularity: str,
        weight_granularity: str,
        gradient_granularity: str,
        power_of_two: bool,
        high_precision: bool,
        needs_dx: bool,
        needs_dweight: bool,
    ) -> torch.Tensor:
        x_8 = fp8_cast(
            x_MK,
            forward_format,
            input_granularity,
            transposed=needs_dweight and not high_precision,
            power_of_two=power_of_two,
        )
        weight_8 = fp8_cast(
            weight, forward_format, weight_granularity, transposed=needs_dx, power_of_two=power_of_two
        )
        y = fp8_matmul(x_8.data, weight_8.data, x_8.inverse, weight_8.inverse, dtype)
        saved = []
        if needs_dx:
            saved += [weight_8.data_t, weight_8.inverse_t]
        if needs_dweight:
            saved += [x_MK] if high_precision else [x_8.data_t, x_8.inverse_t]
        ctx.save_for_backward(*saved)
        if counts is not None:
            counts[0].add_(x_8.counts)
            counts[1].add_(weight_8.counts)
        ctx.counts = counts
        ctx.gradient = (gradient_format, gradient_granularity, power_of_two)
        ctx.needs = (needs_dx, needs_dweight, high_precision)
        ctx.dtypes = (x_MK.dtype, weight.dtype, None if bias is None else bias.dtype)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor) -> Any:
        needs_dx, needs_dweight, high_precision = ctx.needs
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        saved = list(ctx.saved_tensors)
        dx = dweight = dbias = None
        eight_bits = needs_dweight and not high_precision
        if needs_dx or eight_bits:
            number_format, granularity, power_of_two = ctx.gradient
            dy_8 = fp8_cast(dy_MN, number_format, granularity, transposed=eight_bits, power_of_two=power_of_two)
            if ctx.counts is not None:
                ctx.counts[2].add_(dy_8.counts)
        if needs_dx:
            weight_t, inverse_t = saved.pop(0), saved.pop(0)
            dx = fp8_matmul(dy_8.data, weight_t, dy_8.inverse, inverse_t, _NAMES[x_dtype])
        if eight_bits:
            dweight = fp8_matmul(dy_8.data_t, saved[0], dy_8.inverse_t, saved[1], _NAMES[weight_dtype])
        elif needs_dweight:
            dweight = torch.mm(dy_MN.t(), saved[0].to(dy_MN.dtype)).to(weight_dtype)
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            dbias = dy_MN.sum(dim=0, dtype=torch.float32).to(bias_dtype)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            dx, dweight, dbias = (_refuse_second(gradient, dy_MN) for gradient in (dx, dweight, dbias))
        return (dx, dweight, dbias, *[None] * 11)


def _refuse_second(gradient: torch.Tensor | None, dy_MN: torch.Tensor) -> torch.Tensor | None:
    if gradient is None:
        return None
    refusing: torch.Tensor = _Refusing.apply(gradient.detach().requires_grad_(), dy_MN)  # type: ignore[no-untyped-call]
    return refusing


class _Refusing(torch.autograd.Function):
    """A gradient as it is; differentiating it is an error instead of a zero."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, dy_MN: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            "fp8_linear has no second derivative: leave out create_graph=True, or use torch.nn.functional.linear"
        )
