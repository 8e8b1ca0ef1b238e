"""Quantize the output of an RMSNorm from the norm's input and rstd, without writing the output in high precision.

For torch.compile, which computes rstd fused with the operators before the norm. Like ``fp8_cast``: one pass with the
delayed scale, and another if the output does not fit it; byte for byte the cast of the output.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.formats import FORMATS
from kernel_pytorch.ops.fp8_cast.triton_tiles import (
    SCRATCH,
    SCRATCH_TRIED,
    cast_again,
    cast_tile,
    encoding,
    load_quarter,
    offer,
    quarters,
    tile_of_program,
)
from kernel_pytorch.ops.fp8_swiglu.triton_kernel import scale_to_try, settle
from kernel_pytorch.ops.triton_launch import Launches, Place, empty, zeros

__all__ = ["PreparedNormCast"]

# Rows, columns and warps of a tile, as in fp8_cast.
_TILE = (32, 128, 4)


@triton.jit
def _quarter(i, j, k, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, arguments):
    """Compute a quarter of tile (i, j) of the output, rounded to its dtype, and its scale."""
    scale, source = arguments
    x, rstd, weight, row_stride, column_stride, HAS_WEIGHT = source
    values = load_quarter(x, i, j, k, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
    row, column = i * ROWS + tl.arange(0, ROWS // 4) * 4 + k, j * COLUMNS + tl.arange(0, COLUMNS)
    normal = values * tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
    if HAS_WEIGHT:
        normal *= tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    rounded = normal.to(x.dtype.element_ty).to(tl.float32)
    # Outside the matrix a non-finite weight or rstd has turned zeros into NaN, which must not be counted.
    return tl.where((row < rows)[:, None] & (column < columns)[None, :], rounded, 0.0), scale


@triton.jit
def _cast(
    x, rstd, weight, data, data_t, inverse, amax, tried, history,
    rows, columns, row_stride, column_stride, history_length,
    HAS_WEIGHT: tl.constexpr, WORDS: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantize one tile with the delayed scale."""
    i, j = tile_of_program(tl.cdiv(columns, COLUMNS), True)
    source = (x, rstd, weight, row_stride, column_stride, HAS_WEIGHT)
    v_0, v_1, v_2, v_3 = quarters(_quarter, i, j, rows, columns, ROWS, COLUMNS, source)
    scale = scale_to_try(
        amax, inverse, tried, history, history_length, rows, columns, LARGEST, POWER_OF_TWO, HISTORY
    )  # fmt: skip
    largest = cast_tile(
        v_0, v_1, v_2, v_3, scale, _quarter, source, data, data_t, tried, i, j, rows, columns, True, WORDS, False,
        LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip
    offer(amax, largest)


@triton.jit
def _settle(
    x, rstd, weight, data, data_t, inverse, amax, tried, counts, history,
    rows, columns, row_stride, column_stride, history_length,
    HAS_WEIGHT: tl.constexpr, WORDS: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """After all tiles: requantize all of them if the amax does not fit the delayed scale."""
    scale, again, exceeded = settle(
        amax, inverse, tried, counts, history, history, history_length, rows, columns,
        LARGEST, BIAS, POWER_OF_TWO, HISTORY,
    )  # fmt: skip
    if again:
        source = (x, rstd, weight, row_stride, column_stride, HAS_WEIGHT)
        across = tl.cdiv(columns, COLUMNS)
        tiles = across * tl.cdiv(rows, ROWS)
        for step in range(tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))):
            tile = tl.program_id(0) + step * tl.num_programs(0)
            cast_again(
                _quarter, source, scale, exceeded, data, data_t, counts, tile // across, tile % across,
                rows, columns, True, WORDS, True,
                LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
            )  # fmt: skip


_ARGUMENTS = (
    "x", "rstd", "weight", "data", "data_t", "inverse", "amax", "tried", "counts", "history",
    "rows", "columns", "row_stride", "column_stride", "history_length",
)  # fmt: skip


class PreparedNormCast:
    """The cast for matrices of one kind, see ``fp8_cast``'s ``PreparedCast``.

    Called with the input of a norm, its contiguous rstd, the norm's contiguous weight or None, and the places of
    counts and of the history; returns data, data_t and inverse of the output.
    """

    def __init__(
        self,
        device: Device,
        shape: tuple[int, int],
        strides: tuple[int, int],
        number_format: str,
        length: int,
        power_of_two: bool,
        has_weight: bool,
    ) -> None:
        rows, columns = self.shape = shape
        chosen = FORMATS[number_format]
        self.dtype = chosen.dtype
        self.turned_as = torch.int32 if rows % 4 == 0 else torch.uint8
        self.sizes = (rows, columns, *strides, length)
        height, width, warps = _TILE
        constants: dict[str, Any] = {
            "HAS_WEIGHT": has_weight,
            "WORDS": rows % 4 == 0,
            "POWER_OF_TWO": power_of_two,
            "HISTORY": triton.next_power_of_2(length),
            "ROWS": height,
            "COLUMNS": width,
            "num_warps": warps,
            **encoding(device, chosen),
        }
        tiles = -(-rows // height) * -(-columns // width)
        kernels = [
            (_cast, (tiles,), constants),
            (_settle, (min(tiles, 4 * device.compute_units),), constants),
        ]
        key = (shape, strides, number_format, length, power_of_two, has_weight)
        self.launches = Launches(kernels, _ARGUMENTS, key)

    def __call__(
        self, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None, counts: Place, history: Place
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        data = empty(x, self.shape, self.dtype)
        data_t = empty(x, self.shape[::-1], self.dtype)
        inverse = empty(x, (), torch.float32)
        shared = zeros(x, SCRATCH)
        weight = rstd if weight is None else weight
        found = shared.data_ptr()
        given = (x.data_ptr(), rstd.data_ptr(), weight.data_ptr())
        kept = (counts.data_ptr(), history.data_ptr())

        def typed() -> tuple[Any, ...]:
            return (
                x, rstd, weight, Place(data, torch.uint8), Place(data_t, self.turned_as), inverse, shared,
                shared.at(SCRATCH_TRIED, torch.int64), counts, history, *self.sizes,
            )  # fmt: skip

        self.launches(
            x.get_device(),
            (x.dtype, weight.dtype, *[address % 16 for address in (*given, *kept)]),
            (
                *given, data.data_ptr(), data_t.data_ptr(), inverse.data_ptr(), found, found + SCRATCH_TRIED, *kept,
                *self.sizes,
            ),
            typed,
        )  # fmt: skip
        return data, data_t, inverse
