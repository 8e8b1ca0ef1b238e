"""Transpose of FP8 data in Triton: each element is read once and written once."""

# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_pytorch.ops.fp8_cast.triton_tiles import store_turned
from kernel_pytorch.ops.triton_launch import Launches, Place, empty

__all__ = ["PreparedTurn"]

_TILE = (128, 128, 4)
_ARGUMENTS = ("data", "data_t", "rows", "columns")


@triton.jit
def _quarter(data, i, j, k, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A quarter of the codes of tile (i, j), in the layout of ``triton_tiles``."""
    corner = data + i.to(tl.int64) * ROWS * columns + j.to(tl.int64) * COLUMNS
    row, column = tl.arange(0, ROWS // 4) * 4 + k, tl.arange(0, COLUMNS)
    inside = (row < rows - i * ROWS)[:, None] & (column < columns - j * COLUMNS)[None, :]
    return tl.load(corner + row[:, None] * columns + column[None, :], mask=inside, other=0).to(tl.uint32)


@triton.jit
def _turn(
    data, data_t, rows, columns, WORDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    word = _quarter(data, i, j, 0, rows, columns, ROWS, COLUMNS)
    word |= _quarter(data, i, j, 1, rows, columns, ROWS, COLUMNS) << 8
    word |= _quarter(data, i, j, 2, rows, columns, ROWS, COLUMNS) << 16
    word |= _quarter(data, i, j, 3, rows, columns, ROWS, COLUMNS) << 24
    store_turned(data_t, word, i, j, rows, columns, WORDS, ROWS, COLUMNS)


class PreparedTurn:
    """The transpose of contiguous, non-empty matrices of one shape on one GPU."""

    def __init__(self, shape: tuple[int, int]) -> None:
        rows, columns = self.sizes = shape
        height, width, warps = _TILE
        words = rows % 4 == 0
        self.turned_as = torch.int32 if words else torch.uint8
        grid = (-(-rows // height) * -(-columns // width),)
        constants = {"WORDS": words, "ROWS": height, "COLUMNS": width, "num_warps": warps}
        self.launches = Launches([(_turn, grid, constants)], _ARGUMENTS, (shape,))

    def __call__(self, codes: torch.Tensor) -> torch.Tensor:
        turned = empty(codes, self.sizes[::-1], codes.dtype)
        self.launches(
            codes.get_device(),
            (codes.data_ptr() % 16,),
            (codes.data_ptr(), turned.data_ptr(), *self.sizes),
            lambda: (Place(codes, torch.uint8), Place(turned, self.turned_as), *self.sizes),
        )
        return turned
