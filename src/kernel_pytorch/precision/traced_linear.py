"""The linear function in 8 bits inside torch.compile, which takes tensors and constants one by one."""

from __future__ import annotations

import math
from typing import Any

import torch

from kernel_pytorch.precision.gathered_weight import transposed_codes
from kernel_pytorch.precision.kept_cast import Kept, linear_backward_op, linear_forward_op
from kernel_pytorch.precision.linear import (
    Memory,
    Products,
    backward_products,
    cast_of_input,
    cast_of_weight,
    forward_products,
)
from kernel_pytorch.precision.recipe import Recipe

__all__ = ["traced_linear"]


def traced_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    products: Products,
    memory: Memory,
    weight_cast: Kept | None,
) -> torch.Tensor:
    """As ``checked_linear``."""
    x_MK = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y: torch.Tensor
    if bias is None and products.all_in_8 and weight_cast is None:
        y = _Whole.apply(x_MK, weight, *memory, recipe.weight, *products)  # type: ignore[no-untyped-call]
    else:
        turned_x, turned_weight = products.needs_dw and products.dw_in_8, products.needs_dx and products.dx_in_8
        x_cast = None
        if products.y_in_8:
            x_cast = cast_of_input(x, recipe, products.forward_format, transposed=turned_x, memory=memory)
        if weight_cast is None and (products.y_in_8 or turned_weight):
            weight_cast = cast_of_weight(
                weight, recipe, products.forward_format, transposed=turned_weight, counts=memory.counts
            )
        y = _Traced.apply(  # type: ignore[no-untyped-call]
            x_MK,
            weight,
            bias,
            memory.gradient_counts,
            memory.gradient_history,
            *_tensors(x_cast),
            *_tensors(weight_cast),
            *products,
        )
    return y if x.ndim == 2 else y.view(*x.shape[:-1], weight.shape[0])


def _tensors(cast: Kept | None) -> tuple[torch.Tensor | None, ...]:
    """Of a cast, each once, as torch.compile wants them: data and inverse; data_t and inverse_t if others."""
    if cast is None:
        return (None,) * 4
    data_t = None if cast.data_t is cast.data else cast.data_t
    return (cast.data, cast.inverse, data_t, None if cast.inverse_t is cast.inverse else cast.inverse_t)


def _kept(
    data: torch.Tensor | None,
    inverse: torch.Tensor | None,
    data_t: torch.Tensor | None,
    inverse_t: torch.Tensor | None,
) -> Kept | None:
    """The cast that ``_tensors`` took apart."""
    if data is None or inverse is None:
        return None
    return Kept(data, data if data_t is None else data_t, inverse, inverse if inverse_t is None else inverse_t)


class _Traced(torch.autograd.Function):
    """Some of the products, or with a bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        counts: torch.Tensor | None,
        history: torch.Tensor | None,
        x_8: torch.Tensor | None,
        x_inverse: torch.Tensor | None,
        x_8t: torch.Tensor | None,
        x_inverse_t: torch.Tensor | None,
        weight_8: torch.Tensor | None,
        weight_inverse: torch.Tensor | None,
        weight_8t: torch.Tensor | None,
        weight_inverse_t: torch.Tensor | None,
        *products: Any,
    ) -> torch.Tensor:
        x = _kept(x_8, x_inverse, x_8t, x_inverse_t)
        weight_cast = _kept(weight_8, weight_inverse, weight_8t, weight_inverse_t)
        y, saved = forward_products(Products(*products), x_MK, weight, bias, x, weight_cast)
        ctx.save_for_backward(*saved)
        ctx.products, ctx.counts, ctx.history = products, counts, history
        ctx.dtypes = (x_MK.dtype, weight.dtype, None if bias is None else bias.dtype)
        how = Products(*products)
        ctx.to_turn = how.needs_dx and how.dx_in_8 and weight_8 is not None and weight_8t is None
        return y

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor) -> Any:
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        dtypes = (x_dtype, weight_dtype, bias_dtype if ctx.needs_input_grad[2] else None)
        saved = ctx.saved_tensors
        if ctx.to_turn:
            saved = (transposed_codes(saved[0]), *saved[1:])
        gradients = backward_products(Products(*ctx.products), dtypes, saved, dy_MN, ctx.counts, ctx.history)
        return (*gradients, *[None] * 21)


class _Whole(torch.autograd.Function):
    """All three products: as few operators as can be, for a compiled step may wait for each of them."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: torch.Tensor,
        weight: torch.Tensor,
        counts: torch.Tensor | None,
        history: torch.Tensor | None,
        gradient_counts: torch.Tensor | None,
        gradient_history: torch.Tensor | None,
        weight_granularity: str,
        *products: Any,
    ) -> torch.Tensor:
        how = Products(*products)
        y, *saved = linear_forward_op(
            x_MK, weight, how.dtype, how.forward_format, how.input_granularity, weight_granularity, how.power_of_two,
            counts, history,
        )  # fmt: skip
        ctx.save_for_backward(*saved)
        ctx.products, ctx.counts, ctx.history = products, gradient_counts, gradient_history
        ctx.dtypes = (x_MK.dtype, weight.dtype)
        found: torch.Tensor = y
        return found

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor) -> Any:
        how = Products(*ctx.products)
        x_dtype, weight_dtype = ctx.dtypes
        dx, dweight = linear_backward_op(
            dy_MN, *ctx.saved_tensors, how.gradient_format, how.gradient_granularity, how.power_of_two,
            ctx.counts, ctx.history,
        )  # fmt: skip
        return (dx.to(x_dtype), dweight.to(weight_dtype), *[None] * 16)
