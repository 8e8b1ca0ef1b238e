"""What a SwiGLU of three converted layers computes, forward and backward, with little work for the CPU.

As ``kept_cast`` for a layer: counts and histories are brought up to date in place, by the kernels themselves where
Triton's serve; for torch.compile all of a forward is one operator, and all of a backward another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from kernel_pytorch.hardware_abstraction import dispatch
from kernel_pytorch.hardware_abstraction.registry import device_of, preferred_kernel
from kernel_pytorch.ops.fp8_cast.definition import FP8_CAST
from kernel_pytorch.ops.fp8_swiglu import GRAD_KERNEL_TRITON, KERNEL_TRITON, fp8_swiglu, fp8_swiglu_grad
from kernel_pytorch.ops.fp8_swiglu.definition import FP8_SWIGLU
from kernel_pytorch.ops.fp8_swiglu.grad_definition import FP8_SWIGLU_GRAD
from kernel_pytorch.precision.gathered_weight import transposed_codes
from kernel_pytorch.precision.kept_cast import NAMES, Kept, define_op, direct_cast, kept_cast, product

__all__ = ["Needs", "Saved", "swiglu_backward", "swiglu_backward_op", "swiglu_forward", "swiglu_forward_op"]


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
    dx = dx_of_up = dgate = dup = ddown = None
    dtype, h_inverse = NAMES[dy_MN.dtype], saved.h_inverse
    dy = kept_cast(dy_MN, formats[1], "tensor", needs.ddown, power_of_two, counts[2], 0, histories[2])
    # Nothing is kept longer than it is needed: most of a step's memory is taken now.
    dy_8, dy_t, dy_inverse, direct = dy.data, dy.data_t, dy.inverse, dy.direct
    del dy
    if needs.dh:
        dh_MF = product(dy_8, saved.down_t, dy_inverse, saved.down_inverse, dtype, dx_sums, direct)
        del dy_8
        g, g_t, g_inverse, u, u_t, u_inverse, h_t = _hidden_gradients(
            dh_MF, saved, h_inverse if needs.ddown else None, formats, power_of_two, counts[:2], histories[:2]
        )
        del dh_MF
        if needs.dx:
            dx = product(g, saved.gate_t, g_inverse, saved.gate_inverse, dtype, dx_sums, direct)
            dx_of_up = product(u, saved.up_t, u_inverse, saved.up_inverse, dtype, dx_sums, direct)
        del g, u
        if needs.dgate:
            dgate = product(g_t, saved.x_t, g_inverse, saved.x_inverse, dtype, "promoted", direct)
        del g_t
        if needs.dup:
            dup = product(u_t, saved.x_t, u_inverse, saved.x_inverse, dtype, "promoted", direct)
        del u_t
    elif needs.ddown:  # the layers before are frozen: h alone is needed once more
        h = fp8_swiglu(saved.gate, saved.up, formats[0], power_of_two=power_of_two)
        h_t, h_inverse = transposed_codes(h.data), h.inverse
    if needs.ddown:
        ddown = product(dy_t, h_t, dy_inverse, h_inverse, dtype, "promoted", direct)
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
    kind = (gate.shape, gate.stride(), up.stride(), number_format, length, power_of_two)
    cast = _direct(FP8_SWIGLU.name, gate, kind)
    if cast is not None:
        place, run = cast
        remembered = None if history is None else place(history, torch.float32)
        data, inverse = run(gate, up, place(counts, torch.int64), remembered)
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
    kind = (gate.shape, *strides, number_format, h_format, h_inverse is not None, length, power_of_two)
    cast = _direct(FP8_SWIGLU_GRAD.name, gate, kind)
    if cast is not None:
        place, run = cast
        remembered = [None if history is None else place(history, torch.float32) for history in histories]
        found: tuple[torch.Tensor, ...] = run(
            dh, gate, up, h_inverse, *(place(each, torch.int64) for each in counts), *remembered
        )
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


def _count(counts: torch.Tensor, lost: torch.Tensor, numbers: int) -> None:
    """Add the losses of an input or a gradient, the same in both copies."""
    counts[0, :, :3].add_(lost)
    counts[0, :, 3].add_(numbers)


def _direct(op: str, x: torch.Tensor, kind: tuple[Any, ...]) -> tuple[Any, Callable[..., Any]] | None:
    """Triton's casts of matrices of one kind, where its kernel would be chosen and nothing watches the call."""
    if torch.compiler.is_compiling() or not (x.is_cuda or x.is_xpu) or x.numel() == 0 or not dispatch.plain_call(x):
        return None
    return _prepared(op, x.device, kind)


@lru_cache(maxsize=4096)
def _prepared(op: str, where: torch.device, kind: tuple[Any, ...]) -> tuple[Any, Callable[..., Any]] | None:
    device = device_of(where)
    if preferred_kernel(device, op) not in (KERNEL_TRITON, GRAD_KERNEL_TRITON) or not device.supports("float64"):
        return None
    from kernel_pytorch.ops.fp8_swiglu import grad_triton_kernel, triton_kernel
    from kernel_pytorch.ops.triton_launch import Place

    module: Any = triton_kernel if op == FP8_SWIGLU.name else grad_triton_kernel
    return Place, dispatch.launched(where, module.prepared(device, *kind))


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
) -> tuple[torch.Tensor, ...]:
    """y, and what the backward needs."""
    options = (number_format, "tensor", True, power_of_two)
    x = direct_cast(x_MK, *options, gate_counts, 0, x_history)
    weights = ((gate, gate_counts), (up, up_counts), (down, down_counts))
    gate_8, up_8, down_8 = (direct_cast(weight, *options, counts, 1, None) for weight, counts in weights)
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


def _backward(
    dy_MN: torch.Tensor,
    saved: list[torch.Tensor],
    forward_format: str,
    gradient_format: str,
    dx_sums: str,
    power_of_two: bool,
    gate_counts: torch.Tensor,
    up_counts: torch.Tensor,
    down_counts: torch.Tensor,
    gate_history: torch.Tensor | None,
    up_history: torch.Tensor | None,
    down_history: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    counts, histories = (gate_counts, up_counts, down_counts), (gate_history, up_history, down_history)
    formats = (forward_format, gradient_format)
    return swiglu_backward(dy_MN, Saved(*saved), formats, dx_sums, power_of_two, Needs(), counts, histories)


def _backward_fake(dy_MN: torch.Tensor, saved: list[torch.Tensor], *_: Any) -> tuple[torch.Tensor, ...]:
    kept = Saved(*saved)
    (m, n), k, hidden = dy_MN.shape, kept.x_t.shape[0], kept.gate.shape[1]
    return tuple(dy_MN.new_empty(shape) for shape in ((m, k), (m, k), (hidden, k), (hidden, k), (n, hidden)))


swiglu_forward_op = define_op(
    "fp8_swiglu_mlp_forward(Tensor x, Tensor gate, Tensor up, Tensor down, str dtype, str number_format, "
    "bool power_of_two, Tensor(a!) gate_counts, Tensor(b!) up_counts, Tensor(c!) down_counts, "
    "Tensor(d!)? x_history, Tensor(e!)? h_history) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
    "Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
)
swiglu_backward_op = define_op(
    "fp8_swiglu_mlp_backward(Tensor dy, Tensor[] saved, str forward_format, str gradient_format, str dx_sums, "
    "bool power_of_two, Tensor(a!) gate_counts, Tensor(b!) up_counts, Tensor(c!) down_counts, "
    "Tensor(d!)? gate_history, Tensor(e!)? up_history, Tensor(f!)? down_history) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
