"""fp8_rms_norm in Triton, one source for NVIDIA and AMD.

Memory-bound: x is read for its sums of squares, and again by tiles, the last rows first and so partly from the cache,
to write y and, with a history, its data in both layouts: y is not read. Without a history the scale depends on all of
y, so fp8_cast's kernel then reads y to quantize it. If y does not fit the delayed scale, fp8_cast's ``settle`` kernel
requantizes it; otherwise that kernel only stores the statistics.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.formats import FORMATS
from kernel_pytorch.ops.fp8_cast import torch_kernel as fp8_cast
from kernel_pytorch.ops.fp8_cast.triton_kernel import cast_whole, settle
from kernel_pytorch.ops.fp8_cast.triton_tiles import (
    SCRATCH,
    SCRATCH_LARGEST,
    SCRATCH_TRIED,
    cast_tile,
    encoding,
    largest_remembered,
    load_quarter,
    load_tile,
    magnitudes,
    offer,
    quarter_of_matrix,
    scale_from_amax,
    tile_of_program,
)
from kernel_pytorch.ops.fp8_rms_norm.definition import without_cast
from kernel_pytorch.ops.triton_launch import Launches, Place, empty, zeros

# Rows, columns and warps of a tile, as in fp8_cast.
_TILE = (32, 128, 4)
_SQUARES_TILE = (4, 1024, 4)


# The norm.


@triton.jit
def _squares(
    given, rstd, rows, columns, given_row, given_column,
    EPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute rstd of a tile of rows."""
    i = tl.program_id(0)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in range(tl.cdiv(columns, COLUMNS)):
        values = load_tile(
            given, i, tl.full((), 0, tl.int32) + step, rows, columns, given_row, given_column, ROWS, COLUMNS
        )
        total += values * values
    row = i * ROWS + tl.arange(0, ROWS)
    tl.store(rstd + row, tl.rsqrt(tl.sum(total, axis=1) / columns + EPS), mask=row < rows)


@triton.jit
def _normal(
    given, factors, y, rstd, i, j, k, rows, columns, given_row, given_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store a quarter of tile (i, j) of y, and return the rounded values as float32; zeros outside the matrix."""
    row, column = tl.arange(0, ROWS // 4) * 4 + k, tl.arange(0, COLUMNS)
    inside = (row < rows - i * ROWS)[:, None] & (column < columns - j * COLUMNS)[None, :]
    values = load_quarter(given, i, j, k, rows, columns, given_row, given_column, ROWS, COLUMNS)
    of_row = tl.load(rstd + i * ROWS + row, mask=row < rows - i * ROWS, other=0.0)
    rounded = (values * of_row[:, None] * factors).to(y.dtype.element_ty)
    corner = y + i.to(tl.int64) * ROWS * columns + j.to(tl.int64) * COLUMNS
    tl.store(corner + row[:, None] * columns + column[None, :], rounded, mask=inside)
    # Outside the matrix a non-finite weight has turned zeros into NaN, which must not be counted.
    return tl.where(inside, rounded.to(tl.float32), 0.0)


@triton.jit
def _norm(
    given, weight, x, rstd, data, data_t, amax, tried, history,
    rows, columns, given_row, given_column, history_length,
    HAS_WEIGHT: tl.constexpr, CAST: tl.constexpr,
    TURNED: tl.constexpr, WORDS: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y; with a HISTORY also its data in both layouts. Computes the amax if it must CAST."""
    i, j = tile_of_program(tl.cdiv(columns, COLUMNS), True)
    strides = (given_row, given_column)
    factors = 1.0
    if HAS_WEIGHT:
        column = j * COLUMNS + tl.arange(0, COLUMNS)
        factors = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    v_0 = _normal(given, factors, x, rstd, i, j, 0, rows, columns, *strides, ROWS, COLUMNS)
    v_1 = _normal(given, factors, x, rstd, i, j, 1, rows, columns, *strides, ROWS, COLUMNS)
    v_2 = _normal(given, factors, x, rstd, i, j, 2, rows, columns, *strides, ROWS, COLUMNS)
    v_3 = _normal(given, factors, x, rstd, i, j, 3, rows, columns, *strides, ROWS, COLUMNS)
    if HISTORY > 0:
        before = largest_remembered(history, history_length, HISTORY)
        scale = scale_from_amax(before, LARGEST, POWER_OF_TWO) * 0.5
        if tl.program_id(0) == 0:
            tl.store(amax + 1, before.to(tl.int32, bitcast=True))
        largest = cast_tile(
            v_0, v_1, v_2, v_3, scale, quarter_of_matrix, (x, columns, 1), data, data_t, tried, i, j, rows, columns,
            TURNED, WORDS, False, LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
        )  # fmt: skip
        offer(amax, largest)
    elif CAST:
        m_01 = tl.maximum(magnitudes(v_0), magnitudes(v_1))
        m_23 = tl.maximum(magnitudes(v_2), magnitudes(v_3))
        offer(amax, tl.max(tl.max(tl.maximum(m_01, m_23), axis=1), axis=0))


# Launching.

# The arguments of the kernels, in the order of PreparedNorm.__call__. fp8_cast's kernels take y as their x.
_ARGUMENTS = (
    "given", "weight", "x", "rstd", "data", "data_t", "inverse", "amax", "tried", "final_amax", "counts",
    "own_counts", "history", "rows", "columns", "given_row", "given_column", "row_stride", "column_stride",
    "history_length",
)  # fmt: skip


class PreparedNorm:
    """The norm of matrices of one kind, with grids, constants and launches computed once.

    Called with a non-empty matrix, a contiguous weight, the ``Place`` of contiguous counts to add to and that of an
    amax history of this length to update; returns y, rstd, data, data_t and inverse. The matrix must be on the
    current GPU.
    """

    def __init__(
        self,
        device: Device,
        shape: tuple[int, int],
        strides: tuple[int, int],
        eps: float,
        number_format: str | None,
        transposed: bool,
        length: int,
        power_of_two: bool,
    ) -> None:
        rows, columns = self.shape = shape
        # Without a cast the format is not used, but the kernels' constants need one.
        chosen = FORMATS[number_format or "e4m3fn"]
        self.dtype, self.casts = chosen.dtype, number_format is not None
        self.turned = (columns, rows) if transposed else (0, 0)
        self.turned_as = torch.int32 if rows % 4 == 0 and transposed else torch.uint8
        self.length = length
        self.sizes = (rows, columns, *strides, columns, 1, length)
        height, width, warps = _TILE
        common: dict[str, Any] = {
            "TURNED": transposed,
            "WORDS": rows % 4 == 0,
            "POWER_OF_TWO": power_of_two,
            "ROWS": height,
            "COLUMNS": width,
            "num_warps": warps,
            **encoding(device, chosen),
        }
        history = {"HISTORY": triton.next_power_of_2(length) if length else 0}
        of_cast = {**history, "GUESSED": False}
        tiles = -(-rows // height) * -(-columns // width)
        below, beside, many = _SQUARES_TILE
        of_squares = {"EPS": eps, "ROWS": below, "COLUMNS": beside, "num_warps": many}
        key = (shape, strides, eps, number_format, transposed, power_of_two, length)

        def launches(has_weight: bool) -> Launches:
            of_norm = {"HAS_WEIGHT": has_weight, "CAST": self.casts, **history, **common}
            kernels = [(_squares, (-(-rows // below),), of_squares), (_norm, (tiles,), of_norm)]
            if length:
                kernels.append((settle, (min(tiles, 4 * device.compute_units),), {**of_cast, **common}))
            elif self.casts:
                kernels.append((cast_whole, (tiles,), {**of_cast, **common}))
            return Launches(kernels, _ARGUMENTS, (*key, has_weight))

        self.launches = {has_weight: launches(has_weight) for has_weight in (True, False)}

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        counts: Place | None = None,
        history: Place | None = None,
        amax: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        y = empty(x, self.shape, x.dtype)
        rstd = empty(x, self.shape[:1], torch.float32)
        data = empty(x, self.shape if self.casts else (0, 0), self.dtype)
        data_t = empty(x, self.turned, self.dtype)
        inverse = empty(x, (), torch.float32)
        # Without a cast: valid addresses for arguments that nothing is written to.
        shared = zeros(x, SCRATCH) if self.casts else Place(rstd, torch.int32)
        from_x, found, squares, scale = x.data_ptr(), shared.data_ptr(), rstd.data_ptr(), inverse.data_ptr()
        from_weight = from_x if weight is None else weight.data_ptr()
        to_counts = squares if counts is None else counts.data_ptr()
        remembered = squares if history is None else history.data_ptr()
        largest = found + SCRATCH_LARGEST if amax is None else amax.data_ptr()

        tried = found + SCRATCH_TRIED

        def typed() -> tuple[Any, ...]:
            first_try = shared.at(SCRATCH_TRIED, torch.int64) if self.casts else rstd
            given = rstd if counts is None else counts
            return (
                x, x if weight is None else weight, y, rstd, Place(data, torch.uint8), Place(data_t, self.turned_as),
                inverse, shared, first_try,
                rstd if not self.casts else shared.at(SCRATCH_LARGEST, torch.float32) if amax is None else amax,
                given, first_try if self.length else given, rstd if history is None else history, *self.sizes,
            )  # fmt: skip

        aligned = tuple(address % 16 for address in (from_x, from_weight, to_counts, remembered, largest))
        self.launches[weight is not None](
            x.get_device(),
            (x.dtype, None if weight is None else weight.dtype, *aligned),
            (
                from_x, from_weight, y.data_ptr(), squares, data.data_ptr(), data_t.data_ptr(), scale, found,
                tried, largest, to_counts, tried if self.length else to_counts, remembered, *self.sizes,
            ),
            typed,
        )  # fmt: skip
        return y, rstd, data, data_t, inverse


prepared = lru_cache(maxsize=4096)(PreparedNorm)


def forward(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    number_format: str | None,
    transposed: bool,
    history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    length = 0 if history is None else history.shape[0]
    run = prepared(
        device, x.shape, x.stride(), float(eps), number_format,
        transposed and number_format is not None, length, power_of_two,
    )  # fmt: skip
    weight = None if weight is None else weight.contiguous()
    if x.numel() == 0:
        y, rstd = x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)
        if number_format is None:
            return (y, rstd, *without_cast(x))
        data, data_t, inverse, _, amax, counts, next_history = fp8_cast.forward(
            device, y, number_format, "tensor", transposed, history, power_of_two
        )
        return y, rstd, data, data_t, inverse, amax, counts, next_history
    if number_format is None:
        y, rstd, *_ = run(x, weight)
        return (y, rstd, *without_cast(x))
    counts = x.new_zeros((2, 4), dtype=torch.int64)
    amax = x.new_zeros((), dtype=torch.float32)
    next_history = amax.new_empty(0) if history is None else history.clone()
    remembered = None if history is None else Place(next_history, torch.float32)
    found = run(x, weight, Place(counts, torch.int64), remembered, amax)
    return (*found, amax, counts, next_history)
