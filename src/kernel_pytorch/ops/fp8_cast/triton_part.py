"""The two passes of Triton's tensorwise cast, amax and quantization, as separate launches for shards."""

from __future__ import annotations

from typing import Any

import torch

from kernel_pytorch.ops.fp8_cast.triton_kernel import PreparedCast
from kernel_pytorch.ops.triton_launch import Place

__all__ = ["amax", "cast_by_amax"]


def amax(cast: PreparedCast, x: torch.Tensor) -> torch.Tensor:
    """Return the amax of the finite elements."""
    found = x.new_zeros((), dtype=torch.float32)
    place = Place(found, torch.int32)
    _launch(cast, 0, (), x=x, amax=place)
    return found


def cast_by_amax(cast: PreparedCast, x: torch.Tensor, amax: torch.Tensor, counts: Place) -> torch.Tensor:
    """Quantize with the scale of this amax, and add to the counts."""
    data = x.new_empty(cast.shape, dtype=cast.dtype)
    codes, known = Place(data, torch.uint8), Place(amax, torch.int32)
    unread = x.new_empty(1, dtype=torch.float32)
    aligned = (amax.data_ptr() % 16, counts.data_ptr() % 16)
    _launch(
        cast, 1, aligned, x=x, data=codes, data_t=codes, inverse=unread, amax=known, final_amax=unread,
        own_counts=counts, history=unread,
    )  # fmt: skip
    return data


def _launch(cast: PreparedCast, number: int, aligned: tuple[int, ...], **arguments: Any) -> None:
    """Launch one of the kernels of a tensorwise cast."""
    names = ("rows", "columns", "row_stride", "column_stride", "history_length")
    arguments.update(zip(names, cast.sizes, strict=True))
    x = arguments["x"]
    cast.launches.one(number, (x.device, x.dtype, x.data_ptr() % 16, *aligned), arguments)
