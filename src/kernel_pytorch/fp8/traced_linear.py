"""The linear function in 8 bits inside torch.compile, which takes tensors and constants one by one.

Layers that are given the very same tensor share its cast here too. Dynamo would not keep a cast on a tensor between
two calls, so it puts ``_whole`` into its graph as it is; the next stage then runs it on tensors that stand for those
of the graph, the same for the same, and these keep attributes.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from kernel_pytorch.fp8.in_graph import kept_unchecked, revision
from kernel_pytorch.fp8.kept_cast import (
    Kept,
    linear_backward_op,
    linear_forward_by_parts_op,
    linear_forward_op,
    linear_of_cast_op,
    transposed_codes,
)
from kernel_pytorch.fp8.linear import (
    Memory,
    Products,
    backward_products,
    cast_of_input,
    cast_of_weight,
    forward_products,
)
from kernel_pytorch.fp8.recipe import Recipe
from kernel_pytorch.fp8.traced_norm import Unwritten, unwritten

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
    y: torch.Tensor
    if products.all_in_8 and weight_cast is None:
        y = _whole(revision(), x, weight, *memory, recipe.weight, *products)
    else:
        turned_x, turned_weight = products.needs_dw and products.dw_in_8, products.needs_dx and products.dx_in_8
        x_cast = None
        if products.y_in_8:
            x_cast = cast_of_input(x, recipe, products.forward_format, transposed=turned_x, memory=memory)
        if weight_cast is None and (products.y_in_8 or turned_weight):
            kind = (weight, recipe, products.forward_format)
            weight_cast = cast_of_weight(*kind, transposed=turned_weight, counts=memory.counts)
        y = _Traced.apply(  # type: ignore[no-untyped-call]
            x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1]),
            weight,
            memory.gradient_counts,
            memory.gradient_history,
            *_tensors(x_cast),
            *_tensors(weight_cast),
            *products,
        )
        y = y if x.ndim == 2 else y.view(*x.shape[:-1], weight.shape[0])
    # Not by the functions: torch 2.11 loses every gradient of one that adds to its result in place.
    return y if bias is None else (y + bias).to(y.dtype)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _whole(
    _: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: torch.Tensor | None,
    history: torch.Tensor | None,
    gradient_counts: torch.Tensor | None,
    gradient_history: torch.Tensor | None,
    weight_granularity: str,
    *products: Any,
) -> torch.Tensor:
    """All three products in 8 bits, without a bias."""
    how = Products(*products)
    key = (x._version, how.forward_format, how.input_granularity, how.power_of_two, history is None)
    kept_key, *cast = getattr(x, "_fp8_cast", (None,))
    shared = cast if kept_key == key else [None] * 4
    x_MK = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    norm = unwritten(x, history) if shared[0] is None else Unwritten()
    y: torch.Tensor
    y, *cast = _Whole.apply(  # type: ignore[no-untyped-call]
        x_MK, weight, *shared, counts, history, gradient_counts, gradient_history, *norm, weight_granularity,
        *products,
    )  # fmt: skip
    if x.grad_fn is not None and kept_key != key:  # nobody else writes to what a graph has computed
        x._fp8_cast = (key, *cast)  # type: ignore[attr-defined]
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
    """Some of the products, or of a weight that was cast before."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: torch.Tensor,
        weight: torch.Tensor,
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
        y, saved = forward_products(Products(*products), x_MK, weight, None, x, weight_cast)
        ctx.save_for_backward(*saved)
        ctx.products, ctx.counts, ctx.history = products, counts, history
        ctx.dtypes = (x_MK.dtype, weight.dtype, None)
        how = Products(*products)
        ctx.to_turn = how.needs_dx and how.dx_in_8 and weight_8 is not None and weight_8t is None
        return y

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        if ctx.to_turn:
            saved = (transposed_codes(saved[0]), *saved[1:])
        dx, dweight, _ = backward_products(
            Products(*ctx.products), ctx.dtypes, saved, dy_MN, ctx.counts, ctx.history
        )
        return (dx, dweight, *[None] * 22)


class _Whole(torch.autograd.Function):
    """All three products: as few operators as can be, for a compiled step may wait for each of them.

    Gives y, and the cast of x if it made one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: torch.Tensor,
        weight: torch.Tensor,
        x_8: torch.Tensor | None,
        x_inverse: torch.Tensor | None,
        x_8t: torch.Tensor | None,
        x_inverse_t: torch.Tensor | None,
        counts: torch.Tensor | None,
        history: torch.Tensor | None,
        gradient_counts: torch.Tensor | None,
        gradient_history: torch.Tensor | None,
        norm_x: torch.Tensor | None,
        rstd: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        weight_granularity: str,
        *products: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        how = Products(*products)
        made: list[torch.Tensor | None] = []
        kept_unchecked(counts, history)  # a checkpoint's repetition brings them up to date once more
        if x_8 is None:
            op = linear_forward_op if how.input_granularity == "tensor" else linear_forward_by_parts_op
            y, weight_8t, weight_inverse_t, x_8, x_inverse, x_8t, *other = op(
                x_MK if norm_x is None else norm_x, weight, how.dtype, how.forward_format, how.input_granularity,
                weight_granularity, how.power_of_two, counts, history, rstd, norm_weight,
            )  # fmt: skip
            x_inverse_t = other[0] if other else None
            made = [x_8, x_inverse, x_8t, x_inverse_t]
        else:
            y, weight_8t, weight_inverse_t = linear_of_cast_op(
                x_8, x_inverse, weight, how.dtype, how.forward_format, weight_granularity, how.power_of_two, counts
            )
        inverse_t = x_inverse if x_inverse_t is None else x_inverse_t
        ctx.save_for_backward(x_8t, inverse_t, weight_8t, weight_inverse_t)
        ctx.products, ctx.dtypes = products, (x_MK.dtype, weight.dtype)
        ctx.counts, ctx.history = kept_unchecked(gradient_counts, gradient_history)
        ctx.mark_non_differentiable(*(tensor for tensor in made if tensor is not None))
        return y, *made

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor, *_: Any) -> Any:
        how = Products(*ctx.products)
        x_dtype, weight_dtype = ctx.dtypes
        dx, dweight = linear_backward_op(
            dy_MN, *ctx.saved_tensors, how.gradient_format, how.gradient_granularity, how.dx_sums,
            how.power_of_two, ctx.counts, ctx.history,
        )  # fmt: skip
        return (dx.to(x_dtype), dweight.to(weight_dtype), *[None] * 24)
