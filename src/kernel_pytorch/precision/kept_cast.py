"""A cast whose losses are counted and whose history is kept, in one call: what a layer does three times a step.

``fp8_cast`` gives counts and the next history as results, which a layer would then add and copy: more work for the
CPU than the cast itself. Here they are brought up to date in place, by the kernel itself where Triton's serves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from kernel_pytorch.hardware_abstraction import dispatch
from kernel_pytorch.hardware_abstraction.registry import backend, device_of
from kernel_pytorch.ops.fp8_cast import KERNEL_TRITON, fp8_cast
from kernel_pytorch.ops.fp8_cast.definition import FP8_CAST

__all__ = ["Kept", "kept_cast"]

_HISTORY_OF = {0: 0, 2: 1}
"""The row of the state for a tensor of the counts: the input's and the gradient's; a weight has none."""


class Kept(NamedTuple):
    """A matrix in an 8-bit format, as ``fp8_cast`` gives it."""

    data: torch.Tensor
    data_t: torch.Tensor
    inverse: torch.Tensor
    inverse_t: torch.Tensor


def kept_cast(
    x_RC: torch.Tensor,
    number_format: str,
    granularity: str,
    transposed: bool,
    power_of_two: bool,
    counts: torch.Tensor | None,
    state: torch.Tensor | None,
    tensor: int,
) -> Kept:
    """``fp8_cast``, with what it lost added to ``counts[tensor]``, by the history in ``state`` where there is one.

    Args:
        counts: of shape ``COUNTS_SHAPE``, or None.
        state: of shape ``STATE_SHAPE`` for delayed scaling, or None.
        tensor: 0 for an input, 1 for a weight, 2 for a gradient.
    """
    arguments = (x_RC, number_format, granularity, transposed, power_of_two, counts, state, tensor)
    found = _op(*arguments) if torch.compiler.is_compiling() else _cast(*arguments)
    data, data_t, inverse, inverse_t = found
    return Kept(data, data_t, inverse, inverse if transposed and granularity == "tensor" else inverse_t)


def _cast(
    x_RC: torch.Tensor,
    number_format: str,
    granularity: str,
    transposed: bool,
    power_of_two: bool,
    counts: torch.Tensor | None,
    state: torch.Tensor | None,
    tensor: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    history = None if state is None or tensor not in _HISTORY_OF else state[_HISTORY_OF[tensor]]
    direct = _served_by_triton(x_RC)
    if direct is not None:
        into = x_RC.new_zeros((2, 4), dtype=torch.int64) if counts is None else counts[tensor]
        data, data_t, inverse, inverse_t, _ = direct(
            x_RC.detach(), number_format, granularity, transposed, history, power_of_two, into
        )
        return data, data_t, inverse, inverse_t
    cast = fp8_cast(
        x_RC, number_format, granularity, transposed=transposed, history=history, power_of_two=power_of_two
    )
    if counts is not None:
        counts[tensor].add_(cast.counts)
    if history is not None:
        history.copy_(cast.next_history)
    # Results of a custom op must not be the same memory.
    inverse_t = cast.inverse.new_empty(0) if cast.inverse_t is cast.inverse else cast.inverse_t
    return cast.data, cast.data_t, cast.inverse, inverse_t


def _served_by_triton(x_RC: torch.Tensor) -> Callable[..., Any] | None:
    """Triton's cast, where its kernel would be chosen and nothing watches the call."""
    if x_RC.device.type not in ("cuda", "xpu") or not dispatch.plain_call(x_RC):
        return None
    return _triton_cast(x_RC.device)


@lru_cache
def _triton_cast(where: torch.device) -> Callable[..., Any] | None:
    device = device_of(where)
    kernels = [kernel for kernel in backend(device.backend).kernels if kernel.op == FP8_CAST.name]
    if kernels[0] is not KERNEL_TRITON or not device.supports("float64"):
        return None
    from kernel_pytorch.ops.fp8_cast import triton_kernel

    return dispatch.placed(where, partial(triton_kernel.cast, device))


_op = torch.library.custom_op(
    "kernel_pytorch::fp8_kept_cast",
    _cast,
    mutates_args=("counts", "state"),
    schema="(Tensor x_RC, str number_format, str granularity, bool transposed, bool power_of_two, "
    "Tensor(a!)? counts, Tensor(b!)? state, int tensor) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_op.register_fake
def _fake(
    x_RC: torch.Tensor,
    number_format: str,
    granularity: str,
    transposed: bool,
    power_of_two: bool,
    counts: torch.Tensor | None,  # noqa: ARG001
    state: torch.Tensor | None,  # noqa: ARG001
    tensor: int,  # noqa: ARG001
) -> tuple[torch.Tensor, ...]:
    return FP8_CAST.fake(x_RC, number_format, granularity, transposed, None, power_of_two)[:4]
