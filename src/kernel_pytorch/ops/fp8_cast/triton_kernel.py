"""fp8_cast in Triton, one source for NVIDIA and AMD: byte for byte as defined.

Memory-bound: an element of x is read once and written once or twice (both layouts from one tile, which is transposed
in shared memory). Only tensorwise and rowwise scales need the amax first, which reads x a second time, partly from
the cache. Block scales depend on one tile only, and delayed scales are known before. A power-of-two scale may be
guessed from an earlier cast; if the guess was wrong, x is quantized again.
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
from kernel_pytorch.ops.fp8_cast import torch_kernel
from kernel_pytorch.ops.fp8_cast.definition import empty_inverse
from kernel_pytorch.ops.fp8_cast.triton_tiles import (
    COPY,
    SCRATCH,
    SCRATCH_LARGEST,
    SCRATCH_TRIED,
    add_count,
    add_numbers,
    cast_again,
    cast_tile,
    counted,
    emit,
    encoding,
    is_finite,
    largest_remembered,
    load_quarter,
    load_tile,
    magnitudes,
    needs_own_scale,
    offer,
    quarter_of_matrix,
    quarters,
    reciprocal,
    remember,
    scale_from_amax,
    tile_of_program,
)
from kernel_pytorch.ops.triton_launch import Launches, Place, empty, zeros

# Rows, columns and warps of a tile: the fastest of a sweep on an H200.
_TILE = (64, 64, 4)
_ROW_TILE = (128, 64, 4)
_PART_TILE = (128, 128, 8)  # one 128x128 block
_AMAX_TILE = (8, 1024, 4, 2)
_ROW_AMAX_TILE = (32, 128, 4, 8)  # and the number of tiles of a program, one below the other


# The first pass: amax.


@triton.jit
def _amax(
    x, amax, rows, columns, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The amax of TILES tiles, one below the other."""
    across = tl.cdiv(columns, COLUMNS)
    first, j = tile_of_program(across, True)
    first *= TILES
    largest = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for below in tl.static_range(TILES):  # unrolled, so that all loads are issued first
        values = load_tile(x, first + below, j, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
        largest = tl.maximum(largest, tl.abs(values))  # the GPU's maximum ignores NaN
    found = tl.max(tl.max(largest, axis=0), axis=0)
    if not is_finite(found):
        largest = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for step in range(TILES):
            values = load_tile(x, first + step, j, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
            largest = tl.maximum(largest, magnitudes(values))
        found = tl.max(tl.max(largest, axis=0), axis=0)
    offer(amax, found)


@triton.jit
def _amax_of_rows(
    x, amax, row_amax, rows, columns, row_stride, column_stride,
    BY_COLUMN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Row and column amax of TILES tiles, one below the other: more tiles mean fewer atomics per column."""
    across = tl.cdiv(columns, COLUMNS)
    i, j = tile_of_program(across, True)
    i *= TILES
    largest = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(TILES):
        magnitude = magnitudes(load_tile(x, i, j, rows, columns, row_stride, column_stride, ROWS, COLUMNS))
        row = i * ROWS + tl.arange(0, ROWS)
        of_row = tl.max(magnitude, axis=1).to(tl.int32, bitcast=True)
        tl.atomic_max(row_amax + row, of_row, mask=row < rows, sem="relaxed")
        largest = tl.maximum(largest, magnitude)
        i += 1
    of_column = tl.max(largest, axis=0)
    if BY_COLUMN:
        column = j * COLUMNS + tl.arange(0, COLUMNS)
        bits = of_column.to(tl.int32, bitcast=True)
        tl.atomic_max(row_amax + rows + column, bits, mask=column < columns, sem="relaxed")
    offer(amax, tl.max(of_column, axis=0))


@triton.jit
def _scales_of_rows(
    row_amax, amax, final_amax, inverse, inverse_t, rows, columns,
    LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, TURNED: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Convert the amax of rows, then of columns, to scales: once, instead of in every tile."""
    place = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    inside = place < rows + (columns if TURNED else 0)
    found = tl.load(row_amax + place, mask=inside, other=0).to(tl.float32, bitcast=True)
    scale = scale_from_amax(found, LARGEST, POWER_OF_TWO)
    tl.store(row_amax + place, scale.to(tl.int32, bitcast=True), mask=inside)
    tl.store(inverse + place, reciprocal(scale), mask=place < rows)
    if TURNED:
        tl.store(inverse_t + place - rows, reciprocal(scale), mask=inside & (place >= rows))
    if tl.program_id(0) == 0:
        tl.store(final_amax, tl.load(amax).to(tl.float32, bitcast=True))


# The second pass: quantization.


@triton.jit
def _scale_to_try(before, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, GUESSED: tl.constexpr):
    """The scale of the amax of earlier casts: with headroom, unless it is GUESSED to be this tensor's amax."""
    return scale_from_amax(before, LARGEST, POWER_OF_TWO) * (1.0 if GUESSED else 0.5)


@triton.jit
def cast_whole(
    x, data, data_t, inverse, amax, final_amax, own_counts, history,
    rows, columns, row_stride, column_stride, history_length,
    TURNED: tl.constexpr, WORDS: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
    GUESSED: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantize one tile with the tensorwise scale: from its amax, or from a HISTORY, computing the amax."""
    i, j = tile_of_program(tl.cdiv(columns, COLUMNS), HISTORY > 0)
    source = (x, row_stride, column_stride)
    v_0, v_1, v_2, v_3 = quarters(quarter_of_matrix, i, j, rows, columns, ROWS, COLUMNS, source)
    if HISTORY > 0:
        before = largest_remembered(history, history_length, HISTORY)
        scale = _scale_to_try(before, LARGEST, POWER_OF_TWO, GUESSED)
        if tl.program_id(0) == 0:
            tl.store(amax + 1, before.to(tl.int32, bitcast=True))
    else:
        add_numbers(own_counts, rows, columns, TURNED)
        known = tl.load(amax).to(tl.float32, bitcast=True)
        scale = scale_from_amax(known, LARGEST, POWER_OF_TWO)
        if tl.program_id(0) == 0:
            tl.store(inverse, reciprocal(scale))
            tl.store(final_amax, known)
    largest = cast_tile(
        v_0, v_1, v_2, v_3, scale, quarter_of_matrix, source, data, data_t, own_counts, i, j, rows, columns,
        TURNED, WORDS, TURNED and HISTORY == 0,
        LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip
    if HISTORY > 0:
        offer(amax, largest)


@triton.jit
def settle(
    x, data, data_t, inverse, amax, final_amax, tried, counts, history,
    rows, columns, row_stride, column_stride, history_length,
    TURNED: tl.constexpr, WORDS: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
    GUESSED: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """After a cast with the delayed scale: requantize all of it if the amax does not fit that scale.

    With a GUESSED scale: if the guess was not the scale of the amax.
    """
    add_numbers(counts, rows, columns, TURNED)
    largest = tl.load(amax).to(tl.float32, bitcast=True)
    before = tl.load(amax + 1).to(tl.float32, bitcast=True)  # another program may update the history meanwhile
    remembered = _scale_to_try(before, LARGEST, POWER_OF_TWO, GUESSED)
    scale = scale_from_amax(largest, LARGEST, POWER_OF_TWO)
    if GUESSED:
        again, exceeded = scale != remembered, 0.0
    else:
        again, exceeded = needs_own_scale(before, largest, remembered, LARGEST, BIAS)
        scale = tl.where(again, scale, remembered)
    if tl.program_id(0) == 0:
        tl.store(inverse, reciprocal(scale))
        tl.store(final_amax, largest)
        remember(history, history, history_length, largest, HISTORY)
        if not again:
            add_count(counts + 1, tl.load(tried + 1), TURNED)
            add_count(counts + 2, tl.load(tried + 2), TURNED)
    if again:
        source = (x, row_stride, column_stride)
        across = tl.cdiv(columns, COLUMNS)
        tiles = across * tl.cdiv(rows, ROWS)
        for step in range(tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))):
            tile = tl.program_id(0) + step * tl.num_programs(0)
            cast_again(
                quarter_of_matrix, source, scale, exceeded, data, data_t, counts, tile // across, tile % across,
                rows, columns, TURNED, WORDS, TURNED,
                LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
            )  # fmt: skip


@triton.jit
def _scales_of_parts(of_part, inverse, number, part, numbers, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scales of the rows, 1x128 blocks or 128x128 block of a tile; stores their reciprocals."""
    scale = scale_from_amax(of_part, LARGEST, POWER_OF_TWO)
    tl.store(inverse + part.to(tl.int64) * numbers + number, reciprocal(scale), mask=number < numbers)
    return scale


@triton.jit
def _scale_of_quarter(
    values, row_scale, inverse, i, j, k, rows,
    BLOCKS: tl.constexpr, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The scales of a quarter's rows, or of their blocks in this tile, as a column."""
    row = i * ROWS + tl.arange(0, ROWS // 4) * 4 + k
    if BLOCKS:
        of_row = tl.max(magnitudes(values), axis=1)
        scale = _scales_of_parts(of_row, inverse, row, j, rows, LARGEST, POWER_OF_TWO)
    else:
        scale = tl.load(row_scale + row, mask=row < rows, other=0).to(tl.float32, bitcast=True)
    return scale[:, None]


@triton.jit
def _quarter_by_row(i, j, k, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, arguments):
    x, row_stride, column_stride, row_scale, inverse, BLOCKS, LARGEST, POWER_OF_TWO = arguments
    values = load_quarter(x, i, j, k, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
    return values, _scale_of_quarter(values, row_scale, inverse, i, j, k, rows, BLOCKS, LARGEST, POWER_OF_TWO, ROWS)


@triton.jit
def _cast_parts(
    x, data, data_t, inverse, inverse_t, amax, row_scale, counts,
    rows, columns, row_stride, column_stride,
    GRANULARITY: tl.constexpr, TURNED: tl.constexpr, WORDS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantize one tile with rowwise, 1x128 or 128x128 block scaling."""
    add_numbers(counts, rows, columns, TURNED)
    across, down = tl.cdiv(columns, COLUMNS), tl.cdiv(rows, ROWS)
    i, j = tile_of_program(across, GRANULARITY != "row")
    BLOCKS: tl.constexpr = GRANULARITY == "block"
    source = (x, row_stride, column_stride)
    v_0, v_1, v_2, v_3 = quarters(quarter_of_matrix, i, j, rows, columns, ROWS, COLUMNS, source)
    if GRANULARITY != "row":
        largest = tl.maximum(
            tl.maximum(magnitudes(v_0), magnitudes(v_1)), tl.maximum(magnitudes(v_2), magnitudes(v_3))
        )
        of_column = tl.max(largest, axis=0)
        of_tile = tl.max(of_column, axis=0)
        offer(amax, of_tile)
    if GRANULARITY == "square":
        scale = scale_from_amax(of_tile, LARGEST, POWER_OF_TWO)
        tl.store(inverse + i * across + j, reciprocal(scale))
        if TURNED:
            tl.store(inverse_t + j * down + i, reciprocal(scale))
        cast_tile(
            v_0, v_1, v_2, v_3, scale, quarter_of_matrix, source, data, data_t, counts, i, j, rows, columns,
            TURNED, WORDS, TURNED, LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        s_0 = _scale_of_quarter(v_0, row_scale, inverse, i, j, 0, rows, BLOCKS, LARGEST, POWER_OF_TWO, ROWS)
        s_1 = _scale_of_quarter(v_1, row_scale, inverse, i, j, 1, rows, BLOCKS, LARGEST, POWER_OF_TWO, ROWS)
        s_2 = _scale_of_quarter(v_2, row_scale, inverse, i, j, 2, rows, BLOCKS, LARGEST, POWER_OF_TWO, ROWS)
        s_3 = _scale_of_quarter(v_3, row_scale, inverse, i, j, 3, rows, BLOCKS, LARGEST, POWER_OF_TWO, ROWS)
        found = emit(
            v_0, v_1, v_2, v_3, s_0, s_1, s_2, s_3, data, data_t, i, j, rows, columns,
            True, False, WORDS, LARGEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
        )  # fmt: skip
        if TURNED:
            column = j * COLUMNS + tl.arange(0, COLUMNS)
            if BLOCKS:
                scale_t = _scales_of_parts(of_column, inverse_t, column, i, columns, LARGEST, POWER_OF_TWO)
            else:
                scale_t = tl.load(row_scale + rows + column, mask=column < columns, other=0)
                scale_t = scale_t.to(tl.float32, bitcast=True)
            s_t = scale_t[None, :]
            found_t = emit(
                v_0, v_1, v_2, v_3, s_t, s_t, s_t, s_t, data, data_t, i, j, rows, columns,
                False, True, WORDS, LARGEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
            )  # fmt: skip
            counted(
                found_t, quarter_of_matrix, (s_t, source), data, data_t, counts + COPY, i, j, rows, columns,
                False, True, False, HALF_SMALLEST, NAN, ROWS, COLUMNS,
            )  # fmt: skip
        arguments = (x, row_stride, column_stride, row_scale, inverse, BLOCKS, LARGEST, POWER_OF_TWO)
        counted(
            found, _quarter_by_row, arguments, data, data_t, counts, i, j, rows, columns,
            True, False, False, HALF_SMALLEST, NAN, ROWS, COLUMNS,
        )  # fmt: skip


# Launching.

# The arguments of the kernels, in the order of PreparedCast.__call__. The buffer of row amaxes becomes that of row
# scales. Counts under a delayed scale go to a buffer of their own, since a requantization discards them.
_ARGUMENTS = (
    "x", "data", "data_t", "inverse", "inverse_t", "amax", "tried", "final_amax", "row_amax", "row_scale", "counts",
    "own_counts", "history", "rows", "columns", "row_stride", "column_stride", "history_length",
)  # fmt: skip


def forward(
    device: Device,
    x: torch.Tensor,
    number_format: str,
    granularity: str,
    transposed: bool,
    history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    if x.numel() == 0:
        return torch_kernel.forward(device, x, number_format, granularity, transposed, history, power_of_two)
    counts = x.new_zeros((2, 4), dtype=torch.int64)
    amax = x.new_zeros((), dtype=torch.float32)
    next_history = amax.new_empty(0) if history is None else history.clone()
    remembered = None if history is None else Place(next_history, torch.float32)
    length = next_history.shape[0]
    cast = prepared(device, x, number_format, granularity, transposed, length, power_of_two)
    data, data_t, inverse, inverse_t = cast(x, Place(counts, torch.int64), remembered, Place(amax, torch.float32))
    if inverse_t is inverse:  # the results of a custom op must not alias
        inverse_t = inverse.new_empty(0)
    return data, data_t, inverse, inverse_t, amax, counts, next_history


class PreparedCast:
    """The cast of matrices of one kind, with grids, constants and launches computed once.

    Called with a non-empty matrix, the ``Place`` of contiguous counts to add to, that of an amax history of this
    length to update, and optionally one for the amax; returns data, data_t, inverse and inverse_t. The matrix must be
    on the current GPU. A layer makes three such calls a step and its GPU may wait for them, so the only call of torch
    is the allocation.

    Args:
        guessed: whether the history is one element, the amax of an earlier cast, used as a guess. The scale usually
            is the same power of two as then, and x is read once; if not, x is requantized. The result is the cast
            without a history, whatever the guess.
    """

    def __init__(
        self,
        device: Device,
        shape: tuple[int, int],
        strides: tuple[int, int],
        number_format: str,
        granularity: str,
        transposed: bool,
        length: int,
        power_of_two: bool,
        guessed: bool = False,
    ) -> None:
        rows, columns = self.shape = shape
        chosen = FORMATS[number_format]
        self.dtype = chosen.dtype
        self.granularity, self.transposed, self.length = granularity, transposed, length
        self.sizes = (rows, columns, *strides, length)
        self.turned = (columns, rows) if transposed else (0, 0)
        self.turned_as = torch.int32 if rows % 4 == 0 and transposed else torch.uint8
        by_row, whole = granularity == "row", granularity == "tensor"
        self.shared = SCRATCH + (4 * (rows + columns) if by_row else 0)
        height, width, warps = {"tensor": _TILE, "row": _ROW_TILE}.get(granularity, _PART_TILE)
        tiles = -(-rows // height) * -(-columns // width)
        of_scales = {"TURNED": transposed, "POWER_OF_TWO": power_of_two}
        constants: dict[str, Any] = {
            "WORDS": rows % 4 == 0,
            "ROWS": height,
            "COLUMNS": width,
            "num_warps": warps,
            **of_scales,
            **encoding(device, chosen),
        }
        kernels: list[tuple[Any, tuple[int], dict[str, Any]]] = []
        if length == 0 and (whole or by_row):
            height, width, warps, below = _ROW_AMAX_TILE if by_row else _AMAX_TILE
            grid = -(-rows // (height * below)) * -(-columns // width)
            tile = {"ROWS": height, "COLUMNS": width, "TILES": below, "num_warps": warps}
            read = (_amax_of_rows, (grid,), {"BY_COLUMN": transposed, **tile}) if by_row else (_amax, (grid,), tile)
            kernels.append(read)
        if by_row:
            found = rows + (columns if transposed else 0)
            some = {"LARGEST": chosen.largest, "NUMBERS": 256, "num_warps": 4}
            kernels.append((_scales_of_rows, (-(-found // 256),), {**of_scales, **some}))
        if whole:
            constants.update(HISTORY=triton.next_power_of_2(length) if length else 0, GUESSED=guessed)
            kernels.append((cast_whole, (tiles,), constants))
        else:
            kernels.append((_cast_parts, (tiles,), {"GRANULARITY": granularity, **constants}))
        if length:
            kernels.append((settle, (min(tiles, 4 * device.compute_units),), constants))
        key = (shape, strides, number_format, granularity, transposed, power_of_two, length, guessed)
        self.launches = Launches(kernels, _ARGUMENTS, key)

    def __call__(
        self, x: torch.Tensor, counts: Place, history: Place | None = None, amax: Place | None = None
    ) -> tuple[torch.Tensor, ...]:
        rows, columns = self.shape
        data = empty(x, self.shape, self.dtype)
        data_t = empty(x, self.turned, self.dtype)
        if self.granularity == "tensor":
            inverse = inverse_t = empty(x, (), torch.float32)
        else:
            inverse = inverse_t = empty_inverse(x, self.granularity, rows, columns)
            if self.transposed:
                inverse_t = empty_inverse(x, self.granularity, columns, rows)
        shared = zeros(x, self.shared)
        from_x, to_counts, found = x.data_ptr(), counts.data_ptr(), shared.data_ptr()
        scales = inverse.data_ptr()
        remembered = scales if history is None else history.data_ptr()
        offered, largest = found, found + SCRATCH_LARGEST
        if amax is not None:
            largest = amax.data_ptr()
            offered = largest if self.granularity in ("block", "square") else found
        tried = found + SCRATCH_TRIED

        def typed() -> tuple[Any, ...]:
            scratch = shared if offered == found else Place(amax.tensor, torch.int32)  # type: ignore[union-attr]
            first_try = shared.at(SCRATCH_TRIED, torch.int64)
            of_rows = shared.at(SCRATCH if self.granularity == "row" else 0, torch.int32)
            return (
                x, Place(data, torch.uint8), Place(data_t, self.turned_as), inverse, inverse_t, scratch, first_try,
                shared.at(SCRATCH_LARGEST, torch.float32) if amax is None else amax,
                of_rows, of_rows, counts,
                first_try if self.length else counts, inverse if history is None else history, *self.sizes,
            )  # fmt: skip

        self.launches(
            x.get_device(),
            (x.dtype, from_x % 16, to_counts % 16, remembered % 16, largest % 16),
            (
                from_x, data.data_ptr(), data_t.data_ptr(), scales, inverse_t.data_ptr(), offered, tried, largest,
                found + SCRATCH, found + SCRATCH, to_counts, tried if self.length else to_counts, remembered,
                *self.sizes,
            ),
            typed,
        )  # fmt: skip
        return data, data_t, inverse, inverse_t if self.transposed else inverse.new_empty(0)


_prepared = lru_cache(maxsize=4096)(PreparedCast)


def prepared(
    device: Device,
    x: torch.Tensor,
    number_format: str,
    granularity: str,
    transposed: bool,
    length: int,
    power_of_two: bool,
) -> PreparedCast:
    """Return the cached ``PreparedCast`` of matrices such as x, with a history of this length, 0 for none."""
    return _prepared(device, x.shape, x.stride(), number_format, granularity, transposed, length, power_of_two)
