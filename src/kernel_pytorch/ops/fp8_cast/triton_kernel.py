"""fp8_cast in Triton, one source for NVIDIA and AMD: byte for byte as defined.

Memory-bound: a number of x is read once and written once or twice (both layouts out of one tile, which is turned in
shared memory). Only scales of the tensor or of rows need the largest magnitudes first, which reads x a second time,
partly out of the cache; scales of blocks and squares lie within a tile, and scales from a history are there before.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.ops.fp8_cast import torch_kernel
from kernel_pytorch.ops.fp8_cast.definition import empty_inverse
from kernel_pytorch.ops.fp8_cast.triton_tiles import (
    COPY,
    add_count,
    add_numbers,
    cast_tile,
    encoding,
    largest_remembered,
    load_quarter,
    magnitudes,
    offer,
    reciprocal,
    remember,
    scale_from_amax,
)
from kernel_pytorch.ops.triton_launch import Place, Ready, current_stream, launch, watched
from kernel_pytorch.precision.formats import FORMATS

# Rows, columns and warps of a tile: the fastest of those tried on an H200.
_TILE = (64, 128, 4)
_ROW_TILE = (32, 128, 4)
_PART_TILE = (128, 128, 8)  # a block of the definition
_AMAX_TILE = (4, 2048, 8)
_TILES_PER_PROGRAM = 4  # of the first reading, one below the other: fewer programs compete for one number


# The first reading.


@triton.jit
def _amax(
    x, amax, row_amax, column_amax, rows, columns, row_stride, column_stride,
    BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    i, j = (tl.program_id(0) // across) * TILES, tl.program_id(0) % across
    corner = x + i.to(tl.int64) * ROWS * row_stride + j.to(tl.int64) * COLUMNS * column_stride
    column = tl.arange(0, COLUMNS)
    largest = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in tl.static_range(TILES):
        row = tl.arange(0, ROWS) + step * ROWS
        inside = (row < rows - i * ROWS)[:, None] & (column < columns - j * COLUMNS)[None, :]
        places = row[:, None] * row_stride + column[None, :] * column_stride
        magnitude = tl.abs(tl.load(corner + places, mask=inside, other=0.0).to(tl.float32))
        magnitude = tl.where(magnitude < float("inf"), magnitude, 0.0)
        if BY_ROW:
            of_row = tl.max(magnitude, axis=1).to(tl.int32, bitcast=True)
            tl.atomic_max(row_amax + i * ROWS + row, of_row, mask=row < rows - i * ROWS, sem="relaxed")
        largest = tl.maximum(largest, magnitude)
    of_column = tl.max(largest, axis=0)
    if BY_COLUMN:
        bits = of_column.to(tl.int32, bitcast=True)
        tl.atomic_max(column_amax + j * COLUMNS + column, bits, mask=column < columns - j * COLUMNS, sem="relaxed")
    offer(amax, tl.max(of_column, axis=0))


# The cast.


@triton.jit
def _cast_whole(
    x, data, data_t, inverse, amax, final_amax, counts, history,
    rows, columns, row_stride, column_stride, history_length,
    TURNED: tl.constexpr, WORDS: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile with the tensor's scale: from its amax, or from a HISTORY, finding the amax."""
    across = tl.cdiv(columns, COLUMNS)
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    if HISTORY > 0:
        before = largest_remembered(history, history_length, HISTORY)
        scale = scale_from_amax(before, LARGEST, POWER_OF_TWO) * 0.5
        if tl.program_id(0) == 0:
            tl.store(amax + 1, before.to(tl.int32, bitcast=True))
    else:
        add_numbers(counts, rows, columns, TURNED)
        known = tl.load(amax).to(tl.float32, bitcast=True)
        scale = scale_from_amax(known, LARGEST, POWER_OF_TWO)
        if tl.program_id(0) == 0:
            tl.store(inverse, reciprocal(scale))
            tl.store(final_amax, known)
    largest = cast_tile(
        x, data, data_t, counts, scale, scale, scale, scale, i, j, rows, columns, row_stride, column_stride,
        True, TURNED, WORDS, TURNED and HISTORY == 0,
        LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip
    if HISTORY > 0:
        offer(amax, largest)


@triton.jit
def _settle(
    x, data, data_t, inverse, amax, final_amax, tried, counts, history,
    rows, columns, row_stride, column_stride, history_length,
    TURNED: tl.constexpr, WORDS: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """After a cast by the history's scale: cast all of it again where some numbers were too large for it."""
    add_numbers(counts, rows, columns, TURNED)
    largest = tl.load(amax).to(tl.float32, bitcast=True)
    before = tl.load(amax + 1).to(
        tl.float32, bitcast=True
    )  # the history itself may be brought up to date meanwhile
    remembered = scale_from_amax(before, LARGEST, POWER_OF_TWO) * 0.5
    again = (before == 0.0) | (largest * remembered > LARGEST)
    scale = remembered
    if again:
        scale = scale_from_amax(largest, LARGEST, POWER_OF_TWO)
    if tl.program_id(0) == 0:
        tl.store(inverse, reciprocal(scale))
        tl.store(final_amax, largest)
        remember(history, history, history_length, largest, HISTORY)
        if not again:
            add_count(counts + 1, tl.load(tried + 1), TURNED)
            add_count(counts + 2, tl.load(tried + 2), TURNED)
    if again:
        across = tl.cdiv(columns, COLUMNS)
        tiles = across * tl.cdiv(rows, ROWS)
        for step in range(tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))):
            tile = tl.program_id(0) + step * tl.num_programs(0)
            i, j = tile // across, tile % across
            cast_tile(
                x, data, data_t, counts, scale, scale, scale, scale, i, j, rows, columns, row_stride, column_stride,
                True, TURNED, WORDS, TURNED,
                LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
            )  # fmt: skip
            if before > 0.0:
                for k in range(4):
                    values = load_quarter(x, i, j, k, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
                    beyond = (magnitudes(values) * remembered > LARGEST).to(tl.int32)
                    add_count(counts, tl.sum(tl.sum(beyond, axis=1), axis=0), TURNED)


@triton.jit
def _row_scale(
    x, row_amax, inverse, i, j, k, rows, columns, row_stride, column_stride,
    BLOCKS: tl.constexpr, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The scales of the rows of a quarter, or of their parts in this tile, as a column; keeps their reciprocals."""
    row = i * ROWS + tl.arange(0, ROWS // 4) * 4 + k
    if BLOCKS:
        values = load_quarter(x, i, j, k, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
        of_row = tl.max(magnitudes(values), axis=1)
    else:
        of_row = tl.load(row_amax + row, mask=row < rows, other=0).to(tl.float32, bitcast=True)
    scale = scale_from_amax(of_row, LARGEST, POWER_OF_TWO)
    if BLOCKS:
        tl.store(inverse + j.to(tl.int64) * rows + row, reciprocal(scale), mask=row < rows)
    elif j == 0:
        tl.store(inverse + row, reciprocal(scale), mask=row < rows)
    return scale[:, None]


@triton.jit
def _tile_magnitudes(
    x, i, j, rows, columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The largest magnitude of each four rows below each other."""
    largest = tl.zeros((ROWS // 4, COLUMNS), dtype=tl.float32)
    for k in tl.static_range(4):
        values = load_quarter(x, i, j, k, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
        largest = tl.maximum(largest, magnitudes(values))
    return largest


@triton.jit
def _cast_parts(
    x, data, data_t, inverse, inverse_t, amax, final_amax, row_amax, column_amax, counts,
    rows, columns, row_stride, column_stride,
    GRANULARITY: tl.constexpr, TURNED: tl.constexpr, WORDS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile with scales of rows, blocks or squares; what is read several times comes out of the cache."""
    add_numbers(counts, rows, columns, TURNED)
    across, down = tl.cdiv(columns, COLUMNS), tl.cdiv(rows, ROWS)
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    BLOCKS: tl.constexpr = GRANULARITY == "block"
    if GRANULARITY != "row":
        of_column = tl.max(
            _tile_magnitudes(x, i, j, rows, columns, row_stride, column_stride, ROWS, COLUMNS), axis=0
        )
        of_tile = tl.max(of_column, axis=0)
        offer(amax, of_tile)
    elif tl.program_id(0) == 0:
        tl.store(final_amax, tl.load(amax).to(tl.float32, bitcast=True))
    if GRANULARITY == "square":
        scale = scale_from_amax(of_tile, LARGEST, POWER_OF_TWO)
        tl.store(inverse + i * across + j, reciprocal(scale))
        if TURNED:
            tl.store(inverse_t + j * down + i, reciprocal(scale))
        cast_tile(
            x, data, data_t, counts, scale, scale, scale, scale, i, j, rows, columns, row_stride, column_stride,
            True, TURNED, WORDS, TURNED, LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        s_0 = _row_scale(
            x, row_amax, inverse, i, j, 0, rows, columns, row_stride, column_stride,
            BLOCKS, LARGEST, POWER_OF_TWO, ROWS, COLUMNS,
        )  # fmt: skip
        s_1 = _row_scale(
            x, row_amax, inverse, i, j, 1, rows, columns, row_stride, column_stride,
            BLOCKS, LARGEST, POWER_OF_TWO, ROWS, COLUMNS,
        )  # fmt: skip
        s_2 = _row_scale(
            x, row_amax, inverse, i, j, 2, rows, columns, row_stride, column_stride,
            BLOCKS, LARGEST, POWER_OF_TWO, ROWS, COLUMNS,
        )  # fmt: skip
        s_3 = _row_scale(
            x, row_amax, inverse, i, j, 3, rows, columns, row_stride, column_stride,
            BLOCKS, LARGEST, POWER_OF_TWO, ROWS, COLUMNS,
        )  # fmt: skip
        cast_tile(
            x, data, data_t, counts, s_0, s_1, s_2, s_3, i, j, rows, columns, row_stride, column_stride,
            True, False, WORDS, False, LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
        )  # fmt: skip
        if TURNED:
            column = j * COLUMNS + tl.arange(0, COLUMNS)
            if not BLOCKS:
                of_column = tl.load(column_amax + column, mask=column < columns, other=0)
                of_column = of_column.to(tl.float32, bitcast=True)
            scale_t = scale_from_amax(of_column, LARGEST, POWER_OF_TWO)
            if BLOCKS:
                tl.store(inverse_t + i.to(tl.int64) * columns + column, reciprocal(scale_t), mask=column < columns)
            elif i == 0:
                tl.store(inverse_t + column, reciprocal(scale_t), mask=column < columns)
            s_t = scale_t[None, :]
            cast_tile(
                x, data, data_t, counts + COPY, s_t, s_t, s_t, s_t, i, j, rows, columns, row_stride, column_stride,
                False, True, WORDS, False,
                LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
            )  # fmt: skip


# Launching.

# What tiles find out together, as 32-bit numbers: the largest magnitude, what the history says, four counts of a
# first try, the largest magnitude as a float; for scales of rows, the magnitudes of rows and columns. In bytes:
_TRIED, _LARGEST, _OF_ROWS = 8, 40, 48


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
    data, data_t, inverse, inverse_t, _ = cast.first(x, Place(counts, torch.int64), remembered, amax)
    if inverse_t is inverse:  # results of an op must not be the same memory
        inverse_t = inverse.new_empty(0)
    return data, data_t, inverse, inverse_t, amax, counts, next_history


class PreparedCast:
    """The cast of matrices of one kind: what is the same for all of them is worked out once.

    Called with a matrix that has numbers, the place of contiguous counts, to which what is lost is added, and that
    of a history of this length, which is brought up to date; gives data, data_t, inverse and inverse_t. The GPU of
    the matrix must be the current one. A layer makes three such calls a step, and its GPU may wait for them, so torch
    is asked for nothing but memory.
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
    ) -> None:
        rows, columns = self.shape = shape
        self.format = FORMATS[number_format]
        self.dtype = self.format.dtype
        self.granularity, self.transposed, self.length = granularity, transposed, length
        self.sizes = (rows, columns, *strides)
        self.turned = (columns, rows) if transposed else (0, 0)
        self.key = (shape, strides, number_format, granularity, transposed, power_of_two, length)
        height, width, warps = {"tensor": _TILE, "row": _ROW_TILE}.get(granularity, _PART_TILE)
        tiles = -(-rows // height) * -(-columns // width)
        self.grid, self.settle_grid = (tiles,), (min(tiles, 4 * device.compute_units),)
        self.words = rows % 4 == 0 and transposed
        self.constants: dict[str, Any] = {
            "TURNED": transposed,
            "WORDS": rows % 4 == 0,
            "POWER_OF_TWO": power_of_two,
            "ROWS": height,
            "COLUMNS": width,
            "num_warps": warps,
            **encoding(device, self.format),
        }
        if granularity == "tensor":
            self.constants["HISTORY"] = triton.next_power_of_2(length) if length else 0
        else:
            self.constants["GRANULARITY"] = granularity
        by_row = granularity == "row"
        height, width, warps = _AMAX_TILE
        self.amax_grid = (-(-rows // (height * _TILES_PER_PROGRAM)) * -(-columns // width),)
        self.amax_constants: dict[str, Any] = {
            "BY_ROW": by_row,
            "BY_COLUMN": by_row and transposed,
            "ROWS": height,
            "COLUMNS": width,
            "TILES": _TILES_PER_PROGRAM,
            "num_warps": warps,
        }
        self.shared = _OF_ROWS // 4 + (rows + columns if by_row else 0)
        self.ready: dict[tuple[Any, ...], tuple[Ready, Ready]] = {}

    def __call__(self, x: torch.Tensor, counts: Place, history: Place | None = None) -> tuple[torch.Tensor, ...]:
        """As ``first``; from the second call on, kernels for scales of the tensor are launched by addresses."""
        from_x, to_counts = x.data_ptr(), counts.data_ptr()
        from_history = 0 if history is None else history.data_ptr()
        index = x.get_device()
        which = (index, x.dtype, from_x % 16, to_counts % 16, from_history % 16)
        ready = self.ready.get(which)
        if ready is None or watched():
            *found, kernels = self.first(x, counts, history)
            if self.granularity == "tensor" and None not in kernels:
                self.ready[which] = kernels
            return tuple(found)
        one, two = ready
        data = x.new_empty(self.shape, dtype=self.dtype)
        data_t = x.new_empty(self.turned, dtype=self.dtype)
        inverse = x.new_empty((), dtype=torch.float32)
        shared = x.new_zeros(self.shared, dtype=torch.int32)
        plain, turned, scale, together = data.data_ptr(), data_t.data_ptr(), inverse.data_ptr(), shared.data_ptr()
        stream = current_stream(index)
        if history is None:
            one(stream, from_x, together, together, together, *self.sizes)
            two(
                stream, from_x, plain, turned, scale, together, together + _LARGEST, to_counts, scale, *self.sizes, 0
            )  # fmt: skip
        else:
            one(
                stream, from_x, plain, turned, scale, together, together + _LARGEST, together + _TRIED, from_history,
                *self.sizes, self.length,
            )  # fmt: skip
            two(
                stream, from_x, plain, turned, scale, together, together + _LARGEST, together + _TRIED, to_counts,
                from_history, *self.sizes, self.length,
            )  # fmt: skip
        return data, data_t, inverse, inverse if self.transposed else inverse.new_empty(0)

    def first(
        self, x: torch.Tensor, counts: Place, history: Place | None = None, amax: torch.Tensor | None = None
    ) -> tuple[Any, ...]:
        """data, data_t, inverse, inverse_t and the kernels that made them."""
        rows, columns = self.shape
        data = x.new_empty(self.shape, dtype=self.dtype)
        data_t = x.new_empty(self.turned, dtype=self.dtype)
        inverse = empty_inverse(x, self.granularity, rows, columns)
        inverse_t = inverse
        if self.granularity != "tensor" or not self.transposed:
            inverse_t = (
                empty_inverse(x, self.granularity, columns, rows) if self.transposed else inverse.new_empty(0)
            )
        shared = x.new_zeros(self.shared, dtype=torch.int32)
        largest = Place(shared, torch.float32, _LARGEST) if amax is None else amax
        aligned = (x.data_ptr() % 16, counts.data_ptr() % 16, amax is None)
        key: tuple[Any, ...] = (x.dtype, x.device, *aligned, *self.key)
        plain = Place(data, torch.uint8)
        turned = Place(data_t, torch.int32 if self.words else torch.uint8)
        one = None
        if self.granularity != "tensor":
            row_amax = Place(shared, torch.int32, _OF_ROWS)
            column_amax = Place(shared, torch.int32, _OF_ROWS + 4 * rows)
            offered: Any = shared
            if self.granularity == "row":
                one = launch(
                    _amax, self.amax_grid, key, x, shared, row_amax, column_amax, *self.sizes, **self.amax_constants
                )  # fmt: skip
            elif amax is not None:
                offered = Place(amax, torch.int32)
            two = launch(
                _cast_parts, self.grid, key,
                x, plain, turned, inverse, inverse_t, offered, largest, row_amax, column_amax, counts, *self.sizes,
                **self.constants,
            )  # fmt: skip
        elif history is None:
            one = launch(_amax, self.amax_grid, key, x, shared, shared, shared, *self.sizes, **self.amax_constants)
            two = launch(
                _cast_whole, self.grid, key,
                x, plain, turned, inverse, shared, largest, counts, inverse, *self.sizes, 0, **self.constants,
            )  # fmt: skip
        else:
            key = (*key, history.data_ptr() % 16)
            tried = Place(shared, torch.int64, _TRIED)
            one = launch(
                _cast_whole, self.grid, key,
                x, plain, turned, inverse, shared, largest, tried, history, *self.sizes, self.length,
                **self.constants,
            )  # fmt: skip
            two = launch(
                _settle, self.settle_grid, key,
                x, plain, turned, inverse, shared, largest, tried, counts, history, *self.sizes, self.length,
                **self.constants,
            )  # fmt: skip
        return data, data_t, inverse, inverse_t, (one, two)


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
    """The cast of matrices such as x, with a history of this length, or 0 for none."""
    return _prepared(device, x.shape, x.stride(), number_format, granularity, transposed, length, power_of_two)
