"""What a SwiGLU of three converted layers computes, forward and backward, with little work for the CPU.

As ``kept_cast`` for a layer: counts and histories are brought up to date in place, by the kernels themselves where
Triton's serve; for torch.compile all of a forward is one operator. A backward is two: after the first, which gives
the gradients between the layers in 8 bits, gate and up are needed no more.

Most of a step's memory is taken in that first half of a backward. So where it is much, dh is made for some rows after
others, and the transposed copies of its gradients later.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kernel_pytorch.fp8.kept_cast import (
    NAMES,
    Kept,
    cast_of_norm,
    cast_weight,
    define_op,
    kept_cast,
    product,
    transposed_codes,
)
from kernel_pytorch.hardware_abstraction import dispatch
from kernel_pytorch.ops.fp8_cast.definition import FP8_CAST
from kernel_pytorch.ops.fp8_swiglu import fp8_swiglu, fp8_swiglu_grad
from kernel_pytorch.ops.fp8_swiglu.definition import FP8_SWIGLU
from kernel_pytorch.ops.fp8_swiglu.grad_definition import FP8_SWIGLU_GRAD
from kernel_pytorch.ops.fp8_swiglu.prepared import SwiGLUGradSpec, SwiGLUSpec

__all__ = [
    "Needs",
    "Saved",
    "in_parts",
    "swiglu_backward",
    "swiglu_backward_hidden_op",
    "swiglu_backward_products_op",
    "swiglu_forward",
    "swiglu_forward_op",
]

_PART_ROWS = 4096
"""Of a part of dh: many enough to keep the matrix units busy."""
_LARGE = 1 << 27
"""How many numbers a dh must have to be made in parts."""


class Saved(NamedTuple):
    """What a backward takes."""

    gate: torch.Tensor
    up: torch.Tensor
    h_inverse: torch.Tensor
    x_inverse: torch.Tensor
    x_t: torch.Tensor
    gate_inverse: torch.Tensor
    gate_t: torch.Tensor
    up_inverse: torch.Tensor
    up_t: torch.Tensor
    down_inverse: torch.Tensor
    down_t: torch.Tensor


class Needs(NamedTuple):
    """Which gradients somebody asks for."""

    dx: bool = True
    dh: bool = True
    dgate: bool = True
    dup: bool = True
    ddown: bool = True


def swiglu_forward(
    x: Kept,
    gate: Kept,
    up: Kept,
    down: Kept,
    dtype: str,
    number_format: str,
    power_of_two: bool,
    counts: torch.Tensor,
    history: torch.Tensor | None,
) -> tuple[torch.Tensor, Saved]:
    """y of casts of x and of the weights; counts and history are those of the input of the down layer."""
    gate_MF = product(x.data, gate.data, x.inverse, gate.inverse, dtype, "fast", x.direct)
    up_MF = product(x.data, up.data, x.inverse, up.inverse, dtype, "fast", x.direct)
    data, inverse = _hidden(gate_MF, up_MF, number_format, power_of_two, counts, history)
    y = product(data, down.data, inverse, down.inverse, dtype, "fast", x.direct)
    weights = (gate.inverse, gate.data_t, up.inverse, up.data_t, down.inverse, down.data_t)
    return y, Saved(gate_MF, up_MF, inverse, x.inverse, x.data_t, *weights)


class Between(NamedTuple):
    """What the first half of a backward leaves to the second."""

    dy_t: torch.Tensor
    """Or dy itself, where the transposed copies have yet to be made; those of dgate and dup are then empty."""
    dy_inverse: torch.Tensor
    dgate: torch.Tensor
    dgate_t: torch.Tensor
    dgate_inverse: torch.Tensor
    dup: torch.Tensor
    dup_t: torch.Tensor
    dup_inverse: torch.Tensor
    h_t: torch.Tensor


def _parted(between: Between) -> bool:
    return between.dgate_t.numel() != between.dgate.numel()


def in_parts(gate: torch.Tensor, history: torch.Tensor | None) -> bool:
    """Whether dh, of gate's shape, is made in parts: only a history has a scale before all of it is there."""
    rows, columns = gate.shape
    # Rows that torch.compile does not know stay any number: nothing may depend on them.
    large = statically_known_true(rows > _PART_ROWS) and statically_known_true(rows * columns >= _LARGE)
    return large and history is not None


def swiglu_backward(
    dy_MN: torch.Tensor,
    saved: Saved,
    formats: tuple[str, str],
    dx_sums: str,
    power_of_two: bool,
    needs: Needs,
    counts: tuple[torch.Tensor, ...],
    histories: tuple[torch.Tensor | None, ...],
) -> tuple[torch.Tensor | None, ...]:
    """The two parts that dx is the sum of, and the gradients of the three weights.

    Args:
        formats: of the forward, and of the gradients.
        dx_sums: how the gradients of the inputs of the layers are added up, as a recipe says.
        counts: of dgate, of dup, and of dy.
        histories: of dgate, of dup, and of dy.
    """
    dtype = NAMES[dy_MN.dtype]
    if needs.dh:
        parted = not torch.compiler.is_compiling() and in_parts(saved.gate, histories[0])
        between = _backward_hidden(
            dy_MN, saved, formats, dx_sums, power_of_two, parted, needs.ddown, counts, histories
        )
        return _backward_products(between, saved, dtype, dx_sums, needs)
    ddown = None
    if needs.ddown:  # the layers before are frozen: h alone is needed once more
        dy = kept_cast(dy_MN, formats[1], "tensor", True, power_of_two, counts[2], 0, histories[2])
        h = fp8_swiglu(saved.gate, saved.up, formats[0], power_of_two=power_of_two)
        ddown = product(dy.data_t, transposed_codes(h.data), dy.inverse, h.inverse, dtype, "promoted", dy.direct)
    return None, None, None, None, ddown


def _backward_hidden(
    dy_MN: torch.Tensor,
    saved: Saved,
    formats: tuple[str, str],
    dx_sums: str,
    power_of_two: bool,
    parted: bool,
    needs_ddown: bool,
    counts: tuple[torch.Tensor, ...],
    histories: tuple[torch.Tensor | None, ...],
) -> list[torch.Tensor]:
    """What ``Between`` lists."""
    dtype = NAMES[dy_MN.dtype]
    dy = kept_cast(dy_MN, formats[1], "tensor", needs_ddown, power_of_two, counts[2], 0, histories[2])
    data, data_t, inverse, direct = dy.data, dy.data_t, dy.inverse, dy.direct
    del dy
    if parted:
        data_t = data  # to be turned once more when there is memory

    h_inverse = saved.h_inverse if needs_ddown else None
    options = (saved, h_inverse, formats, power_of_two, counts[:2], histories[:2])
    factors = (saved.down_t, inverse, saved.down_inverse, dtype, dx_sums, direct)
    hidden = _hidden_gradients_in_parts(partial(_rows_of_product, data, factors), *options) if parted else None
    if hidden is None:
        dh = product(data, *factors)
        del data  # nothing is kept longer than it is needed
        g, g_t, g_inverse, u, u_t, u_inverse, h_t = _hidden_gradients(dh, *options)
    else:
        g, g_inverse, u, u_inverse, h_t = hidden
    if parted:  # results of an operator must not be the same memory
        g_t, u_t = g.new_empty((0, 0)), u.new_empty((0, 0))
    return [data_t, inverse, g, g_t, g_inverse, u, u_t, u_inverse, h_t]


def _rows_of_product(a: torch.Tensor, factors: tuple[Any, ...], first: int, last: int) -> torch.Tensor:
    return product(a[first:last], *factors)


def _backward_products(
    between: list[torch.Tensor], saved: Saved, dtype: str, dx_sums: str, needs: Needs
) -> tuple[torch.Tensor | None, ...]:
    """The rest. Gate and up are not read."""
    dx = dx_of_up = dgate = dup = ddown = None
    parted = _parted(Between(*between))
    dy_t, dy_inverse, g, g_t, g_inverse, u, u_t, u_inverse, h_t = between
    between.clear()
    direct = not torch.compiler.is_compiling() and dispatch.plain_call(g)
    if needs.ddown:
        dy_t = transposed_codes(dy_t) if parted else dy_t
        ddown = product(dy_t, h_t, dy_inverse, saved.h_inverse, dtype, "promoted", direct)
    del dy_t, h_t
    if needs.dx:
        dx = product(g, saved.gate_t, g_inverse, saved.gate_inverse, dtype, dx_sums, direct)
    if needs.dgate:
        g_t = transposed_codes(g) if parted else g_t
        del g
        dgate = product(g_t, saved.x_t, g_inverse, saved.x_inverse, dtype, "promoted", direct)
    g = g_t = g_inverse  # what was of gate is let go before it is up's turn
    if needs.dx:
        dx_of_up = product(u, saved.up_t, u_inverse, saved.up_inverse, dtype, dx_sums, direct)
    if needs.dup:
        u_t = transposed_codes(u) if parted else u_t
        del u
        dup = product(u_t, saved.x_t, u_inverse, saved.x_inverse, dtype, "promoted", direct)
    return dx, dx_of_up, dgate, dup, ddown


# Counted and remembered.


def _hidden(
    gate: torch.Tensor,
    up: torch.Tensor,
    number_format: str,
    power_of_two: bool,
    counts: torch.Tensor,
    history: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``fp8_swiglu``, with what it lost added to ``counts[0]``, and by the history, where there is one."""
    length = 0 if history is None else history.shape[0]
    spec = SwiGLUSpec(gate.shape, gate.stride(), up.stride(), number_format, length, power_of_two)
    cast = dispatch.prepared(FP8_SWIGLU, spec, gate)
    if cast is not None:
        data, inverse = cast(gate, up, counts, history)
        return data, inverse
    h = fp8_swiglu(gate, up, number_format, history=history, power_of_two=power_of_two)
    _count(counts, h.counts, h.data.numel())
    if history is not None:
        history.copy_(h.next_history)
    return h.data, h.inverse


def _hidden_gradients(
    dh: torch.Tensor,
    saved: Saved,
    h_inverse: torch.Tensor | None,
    formats: tuple[str, str],
    power_of_two: bool,
    counts: tuple[torch.Tensor, ...],
    histories: tuple[torch.Tensor | None, ...],
) -> tuple[torch.Tensor, ...]:
    """``fp8_swiglu_grad``, with what it lost added to the first row of each of the counts, and by the histories."""
    gate, up = saved.gate, saved.up
    h_format, number_format = formats
    gate_history, up_history = histories
    length = 0 if gate_history is None else gate_history.shape[0]
    strides = (dh.stride(), gate.stride(), up.stride())
    spec = SwiGLUGradSpec(
        gate.shape, *strides, number_format, h_format, h_inverse is not None, length, power_of_two
    )
    cast = dispatch.prepared(FP8_SWIGLU_GRAD, spec, gate)
    if cast is not None:
        found: tuple[torch.Tensor, ...] = cast(dh, gate, up, h_inverse, counts, histories)
        return found
    hidden = fp8_swiglu_grad(
        dh,
        gate,
        up,
        number_format,
        h_format,
        h_inverse=h_inverse,
        gate_history=gate_history,
        up_history=up_history,
        power_of_two=power_of_two,
    )
    for each, lost in zip(counts, hidden.counts, strict=True):
        _count(each, lost, gate.numel())
    if gate_history is not None and up_history is not None:
        gate_history.copy_(hidden.gate_next_history)
        up_history.copy_(hidden.up_next_history)
    dgate, dup = (
        (hidden.dgate, hidden.dgate_t, hidden.dgate_inverse),
        (hidden.dup, hidden.dup_t, hidden.dup_inverse),
    )
    return *dgate, *dup, hidden.h_t


def _hidden_gradients_in_parts(
    dh_of: Callable[[int, int], torch.Tensor],
    saved: Saved,
    h_inverse: torch.Tensor | None,
    formats: tuple[str, str],
    power_of_two: bool,
    counts: tuple[torch.Tensor, ...],
    histories: tuple[torch.Tensor | None, ...],
) -> tuple[torch.Tensor, ...] | None:
    """The same of a dh that is given for some rows after others, without transposed copies; None if it cannot be."""
    gate, up = saved.gate, saved.up
    h_format, number_format = formats
    assert histories[0] is not None
    length = histories[0].shape[0]
    strides = (None, gate.stride(), up.stride())
    spec = SwiGLUGradSpec(
        gate.shape, *strides, number_format, h_format, h_inverse is not None, length, power_of_two, _PART_ROWS
    )
    cast = dispatch.prepared(FP8_SWIGLU_GRAD, spec, gate)
    if cast is None:
        return None
    found: tuple[torch.Tensor, ...] = cast(dh_of, gate, up, h_inverse, counts, histories)
    return found


def _count(counts: torch.Tensor, lost: torch.Tensor, numbers: int) -> None:
    """Add the losses of an input or a gradient, the same in both copies."""
    counts[0, :, :3].add_(lost)
    counts[0, :, 3].add_(numbers)


# For torch.compile.


def _forward(
    x_MK: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    dtype: str,
    number_format: str,
    power_of_two: bool,
    gate_counts: torch.Tensor,
    up_counts: torch.Tensor,
    down_counts: torch.Tensor,
    x_history: torch.Tensor | None,
    h_history: torch.Tensor | None,
    rstd: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """y of x, or of its norm, and what the backward needs."""
    options = (number_format, "tensor", True, power_of_two)
    x = cast_of_norm(x_MK, rstd, norm_weight, number_format, "tensor", power_of_two, gate_counts, x_history)
    weights = ((gate, gate_counts), (up, up_counts), (down, down_counts))
    gate_8, up_8, down_8 = (cast_weight(weight, *options, counts) for weight, counts in weights)
    y, saved = swiglu_forward(x, gate_8, up_8, down_8, dtype, number_format, power_of_two, down_counts, h_history)
    return y, *saved


def _forward_fake(
    x_MK: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    dtype: str,
    number_format: str,
    power_of_two: bool,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    given = getattr(torch, dtype)
    m, hidden = x_MK.shape[0], gate.shape[0]
    found = [x_MK.new_empty((m, size), dtype=given) for size in (down.shape[0], hidden, hidden)]
    found.append(x_MK.new_empty((), dtype=torch.float32))
    for matrix in (x_MK, gate, up, down):
        cast = FP8_CAST.fake(matrix, number_format, "tensor", True, None, power_of_two)
        found += [cast[2], cast[1]]
    return tuple(found)


def _hidden_op(
    dy_MN: torch.Tensor,
    saved: list[torch.Tensor],
    forward_format: str,
    gradient_format: str,
    dx_sums: str,
    power_of_two: bool,
    parted: bool,
    gate_counts: torch.Tensor,
    up_counts: torch.Tensor,
    down_counts: torch.Tensor,
    gate_history: torch.Tensor | None,
    up_history: torch.Tensor | None,
    down_history: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    counts, histories = (gate_counts, up_counts, down_counts), (gate_history, up_history, down_history)
    formats = (forward_format, gradient_format)
    return tuple(
        _backward_hidden(dy_MN, Saved(*saved), formats, dx_sums, power_of_two, parted, True, counts, histories)
    )


def _hidden_fake(
    dy_MN: torch.Tensor,
    saved: list[torch.Tensor],
    forward_format: str,
    gradient_format: str,
    dx_sums: str,  # noqa: ARG001
    power_of_two: bool,
    parted: bool,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    kept = Saved(*saved)
    dy = FP8_CAST.fake(dy_MN, gradient_format, "tensor", True, None, power_of_two)
    dh, formats = kept.gate, (gradient_format, forward_format)
    found = FP8_SWIGLU_GRAD.fake(dh, kept.gate, kept.up, *formats, kept.h_inverse, None, None, power_of_two)
    empty = [dy[0].new_empty((0, 0)) for _ in range(2)]
    turned = empty if parted else [found[1], found[4]]
    return dy[0] if parted else dy[1], dy[2], found[0], turned[0], found[2], found[3], turned[1], found[5], found[6]


def _without_gate_and_up(others: list[torch.Tensor]) -> Saved:
    """What is saved, but for the first two, which nothing may hold on to any longer."""
    return Saved(others[0], others[0], *others)


def _products_op(
    between: list[torch.Tensor], saved: list[torch.Tensor], dtype: str, dx_sums: str
) -> tuple[torch.Tensor | None, ...]:
    return _backward_products([*between], _without_gate_and_up(saved), dtype, dx_sums, Needs())


def _products_fake(
    between: list[torch.Tensor],
    saved: list[torch.Tensor],
    dtype: str,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    made, kept, given = Between(*between), _without_gate_and_up(saved), getattr(torch, dtype)
    (m, hidden), k = made.dgate.shape, kept.x_t.shape[0]
    n = made.dy_t.shape[1 if _parted(made) else 0]
    shapes = ((m, k), (m, k), (hidden, k), (hidden, k), (n, hidden))
    return tuple(made.dgate.new_empty(shape, dtype=given) for shape in shapes)


swiglu_forward_op = define_op(
    "fp8_swiglu_mlp_forward(Tensor x, Tensor gate, Tensor up, Tensor down, str dtype, str number_format, "
    "bool power_of_two, Tensor(a!) gate_counts, Tensor(b!) up_counts, Tensor(c!) down_counts, "
    "Tensor(d!)? x_history, Tensor(e!)? h_history, Tensor? rstd, Tensor? norm_weight) "
    f"-> ({', '.join(['Tensor'] * (1 + len(Saved._fields)))})",
    _forward,
    _forward_fake,
)
swiglu_backward_hidden_op = define_op(
    "fp8_swiglu_mlp_backward_hidden(Tensor dy, Tensor[] saved, str forward_format, str gradient_format, str dx_sums, "
    "bool power_of_two, bool parted, Tensor(a!) gate_counts, Tensor(b!) up_counts, Tensor(c!) down_counts, "
    "Tensor(d!)? gate_history, Tensor(e!)? up_history, Tensor(f!)? down_history) "
    f"-> ({', '.join(['Tensor'] * len(Between._fields))})",
    _hidden_op,
    _hidden_fake,
)
swiglu_backward_products_op = define_op(
    "fp8_swiglu_mlp_backward_products(Tensor[] between, Tensor[] saved, str dtype, str dx_sums) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _products_op,
    _products_fake,
)
