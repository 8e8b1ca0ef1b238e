"""For a part of a matrix, each of the two readings of Triton's cast alone."""

from __future__ import annotations

import torch

from kernel_pytorch.ops.fp8_cast import triton_kernel
from kernel_pytorch.ops.fp8_cast.triton_kernel import PreparedCast
from kernel_pytorch.ops.triton_launch import Place, launch

__all__ = ["amax", "cast_by_amax"]


def amax(cast: PreparedCast, x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude among the finite numbers."""
    found = x.new_zeros((), dtype=torch.float32)
    place = Place(found, torch.int32)
    key = ("part", x.dtype, x.device, x.data_ptr() % 16, *cast.key)
    launch(triton_kernel._amax, cast.amax_grid, key, x, place, place, place, *cast.sizes, **cast.amax_constants)
    return found


def cast_by_amax(cast: PreparedCast, x: torch.Tensor, amax: torch.Tensor, counts: Place) -> torch.Tensor:
    """The codes with the scale that this amax gives; what is lost is added to the counts."""
    data = x.new_empty(cast.shape, dtype=cast.dtype)
    inverse = x.new_empty(1, dtype=torch.float32)
    known, codes = Place(amax, torch.int32), Place(data, torch.uint8)
    aligned = (x.data_ptr() % 16, amax.data_ptr() % 16, counts.data_ptr() % 16)
    key = ("part", x.dtype, x.device, *aligned, *cast.key)
    launch(
        triton_kernel._cast_whole, cast.grid, key,
        x, codes, codes, inverse, known, inverse, counts, inverse, *cast.sizes, 0, **cast.constants,
    )  # fmt: skip
    return data
