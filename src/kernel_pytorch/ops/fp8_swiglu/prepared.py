"""Triton SwiGLU casts prepared once per kind of call, which update counts and amax histories in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernel_pytorch.hardware_abstraction.device import Device

__all__ = ["SwiGLUGradSpec", "SwiGLUSpec", "prepare"]


class SwiGLUSpec(NamedTuple):
    """A kind of ``fp8_swiglu``."""

    shape: torch.Size
    gate_stride: tuple[int, ...]
    up_stride: tuple[int, ...]
    number_format: str
    history_length: int
    power_of_two: bool


class SwiGLUGradSpec(NamedTuple):
    """A kind of ``fp8_swiglu_grad``, of all rows at once or of row chunks."""

    shape: torch.Size
    dh_stride: tuple[int, ...] | None
    """None for row chunks, which are contiguous."""
    gate_stride: tuple[int, ...]
    up_stride: tuple[int, ...]
    number_format: str
    h_format: str
    with_h: bool
    history_length: int
    power_of_two: bool
    chunk_rows: int | None = None


def prepare(device: Device, spec: SwiGLUSpec | SwiGLUGradSpec) -> Callable[..., Any] | None:
    """Return a function for calls of the kind ``spec``; None if no kernel can serve them.

    The forward takes ``(gate, up, counts, history)`` and returns data and inverse. The gradient takes
    ``(dh, gate, up, h_inverse, counts, histories)``, with dh as a function of the first and last row for row chunks,
    and returns the results of ``PreparedGradients`` or, for row chunks, of ``PreparedParts``.
    """
    from kernel_pytorch.ops.fp8_swiglu import grad_triton_kernel, triton_kernel, triton_parts
    from kernel_pytorch.ops.triton_launch import Place

    if not device.supports("float64"):
        return None
    arguments: Any = tuple(spec)
    if isinstance(spec, SwiGLUSpec):
        forward = triton_kernel.prepared(device, *arguments)

        def run(gate: torch.Tensor, up: torch.Tensor, counts: torch.Tensor, history: torch.Tensor | None) -> Any:
            amax_history = None if history is None else Place(history, torch.float32)
            return forward(gate, up, Place(counts, torch.int64), amax_history)

        return run
    grad: Callable[..., Any]
    if spec.chunk_rows is None:
        grad = grad_triton_kernel.prepared(device, *arguments[:-1])
    else:
        grad = triton_parts.PreparedParts(device, spec.shape, *arguments[2:])  # type: ignore[arg-type]

    def run_grad(
        dh: Any, gate: torch.Tensor, up: torch.Tensor, h_inverse: torch.Tensor | None, counts: Any, histories: Any
    ) -> Any:
        amax_histories = (None if history is None else Place(history, torch.float32) for history in histories)
        return grad(dh, gate, up, h_inverse, *(Place(each, torch.int64) for each in counts), *amax_histories)

    return run_grad
