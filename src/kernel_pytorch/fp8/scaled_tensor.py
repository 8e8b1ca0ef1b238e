"""A matrix in an FP8 format with its inverse scales, in both layouts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["ScaledTensor", "unflatten"]


class ScaledTensor(NamedTuple):
    """``data * inverse`` approximates a matrix, ``data_t * inverse_t`` its transpose: results of ``fp8_cast``."""

    data: torch.Tensor
    """(rows, columns), contiguous."""
    data_t: torch.Tensor
    """(columns, rows), contiguous; (0, 0) if not requested; ``data`` itself if the backward is to transpose it."""
    inverse: torch.Tensor
    """float32, one over the scales of ``data``, shaped for ``torch._scaled_mm``."""
    inverse_t: torch.Tensor
    """The same for ``data_t``; ``inverse`` itself with tensorwise scaling."""
    direct: bool = False
    """Whether a prepared kernel made it: nothing watches this call, so its matmuls may be prepared too."""


def unflatten(values: tuple[Any, ...], *records: Any) -> list[Any]:
    """Rebuild NamedTuples from their values in a row: functions in a graph of torch.compile take no records."""
    found = []
    for record in records:
        count = len(record._fields)
        found.append(record(*values[:count]))
        values = values[count:]
    return found
