"""Triton casts prepared once per kind of call, which update counts and the amax history in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernel_pytorch.hardware_abstraction.device import Device

__all__ = ["CastSpec", "TransposeSpec", "prepare"]

_ROW_BYTES = 64
"""Bytes of one row of the counts, int64 (2, 4)."""


class CastSpec(NamedTuple):
    """A kind of cast. A NamedTuple, because it is hashed in every call."""

    shape: torch.Size
    stride: tuple[int, ...]
    number_format: str
    granularity: str
    transposed: bool
    history_length: int
    """0 without delayed scaling."""
    power_of_two: bool
    reuse_scale: bool
    """Whether to try the scale of the last cast with the same counts first. For weights: they are read once if the
    power of two has not changed."""


class TransposeSpec(NamedTuple):
    """A kind of transpose of quantized data."""

    shape: torch.Size


def prepare(device: Device, spec: CastSpec | TransposeSpec) -> Callable[..., Any] | None:
    """Return a function that casts, or transposes quantized data, as ``spec`` says; None if no kernel can.

    A cast takes ``(x, counts, row, history)``, adds to ``counts[row]``, updates the history, and returns data,
    data_t, inverse and inverse_t. A transpose takes the data.
    """
    if isinstance(spec, TransposeSpec):
        from kernel_pytorch.ops.fp8_cast.triton_turn import PreparedTurn

        return PreparedTurn(spec.shape)  # type: ignore[arg-type]
    from kernel_pytorch.ops.fp8_cast import refusal
    from kernel_pytorch.ops.fp8_cast.triton_kernel import PreparedCast
    from kernel_pytorch.ops.triton_launch import Place, number_beside

    if refusal(device, spec.shape, spec.granularity) is not None:
        return None
    matrix: Any = spec[:5]
    prepared: Any = PreparedCast
    cast = prepared(device, *matrix, spec.history_length, spec.power_of_two)

    def run(x: torch.Tensor, counts: torch.Tensor, row: int, history: torch.Tensor | None) -> Any:
        amax_history = None if history is None else Place(history, torch.float32)
        return cast(x, Place(counts, torch.int64, _ROW_BYTES * row), amax_history)

    if not spec.reuse_scale:
        return run
    retrying = prepared(device, *matrix, 1, spec.power_of_two, True)

    def run_with_last_scale(x: torch.Tensor, counts: torch.Tensor, row: int, history: None) -> Any:
        last = number_beside(counts)
        if last is None:
            return run(x, counts, row, history)
        return retrying(x, Place(counts, torch.int64, _ROW_BYTES * row), last)

    return run_with_last_scale
