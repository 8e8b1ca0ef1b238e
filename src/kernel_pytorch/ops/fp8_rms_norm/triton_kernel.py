"""fp8_rms_norm in Triton, one source for NVIDIA and AMD.

Memory-bound: a program takes a strip of rows, reads it for its sums of squares, and reads it again, from its end back
and so out of the cache, to write y and, where a history gives the scale, both copies: x comes from memory once and y
is not read at all. Without a history the scale is known only when all of y is, so a second kernel reads y for its
codes. What has outgrown its history is cast again by a last kernel, which otherwise only writes down what is known.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.ops.fp8_cast import torch_kernel as fp8_cast
from kernel_pytorch.ops.fp8_cast.triton_tiles import (
    SCRATCH,
    SCRATCH_LARGEST,
    SCRATCH_TRIED,
    add_count,
    add_numbers,
    cast_tile,
    counted,
    emit,
    encoding,
    largest_remembered,
    load_quarter,
    load_quarters,
    magnitudes,
    offer,
    quarter_with_scale,
    reciprocal,
    remember,
    scale_from_amax,
)
from kernel_pytorch.ops.fp8_rms_norm.definition import without_cast
from kernel_pytorch.ops.triton_launch import Place, launch
from kernel_pytorch.precision.formats import FORMATS

# A strip of 32 rows is turned into 32 adjacent bytes. One program with many warps fills a compute unit, so that the
# strips that are being read for the first or second time all fit into the cache; tiles in flight hide its waiting.
_ROWS, _WIDEST = 32, 256
_NUMBERS_A_THREAD = 16
_STAGES = 3
_TILE = (32, 128, 4)  # rows, columns and warps where y is read to be cast, as in fp8_cast


# The strip.


@triton.jit
def _squares(x, i, j, k, rows, columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Those of a quarter of tile (i, j), to be kept in the cache for the second reading."""
    corner = x + i.to(tl.int64) * ROWS * row_stride + j.to(tl.int64) * COLUMNS * column_stride
    row, column = tl.arange(0, ROWS // 4) * 4 + k, tl.arange(0, COLUMNS)
    inside = (row < rows - i * ROWS)[:, None] & (column < columns - j * COLUMNS)[None, :]
    places = row[:, None] * row_stride + column[None, :] * column_stride
    values = tl.load(corner + places, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return values * values


@triton.jit
def _rstd(squares, rstd, i, k, rows, columns, EPS: tl.constexpr, ROWS: tl.constexpr):
    """Of the rows of a quarter, as a column; kept for the backward."""
    row = i * ROWS + tl.arange(0, ROWS // 4) * 4 + k
    found = tl.rsqrt(tl.sum(squares, axis=1) / columns + EPS)
    tl.store(rstd + row, found, mask=row < rows)
    return found[:, None]


@triton.jit
def _factors(weight, j, columns, COLUMNS: tl.constexpr):
    """The weights of the columns of tile j, as a row."""
    column = tl.arange(0, COLUMNS)
    inside = column < columns - j * COLUMNS
    found = tl.load(weight + j * COLUMNS + column, mask=inside, other=0.0, eviction_policy="evict_last")
    return found.to(tl.float32)[None, :]


@triton.jit
def _normal(
    x, factors, y, rstd, i, j, k, rows, columns, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A quarter of tile (i, j) of y: written, and as it was rounded, in float32; zeros beyond the end."""
    row, column = tl.arange(0, ROWS // 4) * 4 + k, tl.arange(0, COLUMNS)
    inside = (row < rows - i * ROWS)[:, None] & (column < columns - j * COLUMNS)[None, :]
    corner = x + i.to(tl.int64) * ROWS * row_stride + j.to(tl.int64) * COLUMNS * column_stride
    places = row[:, None] * row_stride + column[None, :] * column_stride
    values = tl.load(corner + places, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    rounded = (values * rstd * factors).to(y.dtype.element_ty)
    corner = y + i.to(tl.int64) * ROWS * columns + j.to(tl.int64) * COLUMNS
    tl.store(corner + row[:, None] * columns + column[None, :], rounded, mask=inside, cache_modifier=".cs")
    # Beyond the end a row that is not finite has made NaN of zeros, which nobody may count.
    return tl.where(inside, rounded.to(tl.float32), 0.0)


@triton.jit
def _norm(
    x, weight, y, rstd, data, data_t, amax, tried, history,
    rows, columns, row_stride, column_stride, history_length,
    EPS: tl.constexpr, HAS_WEIGHT: tl.constexpr, CAST: tl.constexpr, STAGES: tl.constexpr,
    TURNED: tl.constexpr, WORDS: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A strip of y; with a HISTORY also of its copies, by the history's scale. Finds the amax where it must CAST."""
    i = tl.program_id(0)
    across = tl.cdiv(columns, COLUMNS)
    strides = (row_stride, column_stride)
    q_0 = tl.zeros((ROWS // 4, COLUMNS), dtype=tl.float32)
    q_1, q_2, q_3 = q_0, q_0, q_0
    zero = tl.full((), 0, tl.int32)
    for step in tl.range(0, across, num_stages=STAGES):
        j = zero + step
        q_0 += _squares(x, i, j, 0, rows, columns, *strides, ROWS, COLUMNS)
        q_1 += _squares(x, i, j, 1, rows, columns, *strides, ROWS, COLUMNS)
        q_2 += _squares(x, i, j, 2, rows, columns, *strides, ROWS, COLUMNS)
        q_3 += _squares(x, i, j, 3, rows, columns, *strides, ROWS, COLUMNS)
    r_0 = _rstd(q_0, rstd, i, 0, rows, columns, EPS, ROWS)
    r_1 = _rstd(q_1, rstd, i, 1, rows, columns, EPS, ROWS)
    r_2 = _rstd(q_2, rstd, i, 2, rows, columns, EPS, ROWS)
    r_3 = _rstd(q_3, rstd, i, 3, rows, columns, EPS, ROWS)
    if HISTORY > 0:
        before = largest_remembered(history, history_length, HISTORY)
        scale = scale_from_amax(before, LARGEST, POWER_OF_TWO) * 0.5
        if i == 0:
            tl.store(amax + 1, before.to(tl.int32, bitcast=True))
    largest = tl.full((), 0.0, tl.float32)
    highest = tl.zeros((ROWS // 4, COLUMNS), dtype=tl.float32)
    for step in tl.range(0, across, num_stages=STAGES):
        j = across - 1 - (zero + step)
        factors = _factors(weight, j, columns, COLUMNS) if HAS_WEIGHT else 1.0
        v_0 = _normal(x, factors, y, r_0, i, j, 0, rows, columns, *strides, ROWS, COLUMNS)
        v_1 = _normal(x, factors, y, r_1, i, j, 1, rows, columns, *strides, ROWS, COLUMNS)
        v_2 = _normal(x, factors, y, r_2, i, j, 2, rows, columns, *strides, ROWS, COLUMNS)
        v_3 = _normal(x, factors, y, r_3, i, j, 3, rows, columns, *strides, ROWS, COLUMNS)
        if HISTORY > 0:
            found = emit(
                v_0, v_1, v_2, v_3, scale, scale, scale, scale, data, data_t, i, j, rows, columns,
                True, TURNED, WORDS, LARGEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
            )  # fmt: skip
            seen = counted(
                found, quarter_with_scale, (y, columns, 1, scale), data, data_t, tried, i, j, rows, columns,
                True, TURNED, False, HALF_SMALLEST, NAN, ROWS, COLUMNS,
            )  # fmt: skip
            largest = tl.maximum(largest, seen)
        elif CAST:
            m_01 = tl.maximum(magnitudes(v_0), magnitudes(v_1))
            m_23 = tl.maximum(magnitudes(v_2), magnitudes(v_3))
            highest = tl.maximum(highest, tl.maximum(m_01, m_23))
    if HISTORY > 0:
        offer(amax, largest)
    elif CAST:
        offer(amax, tl.max(tl.max(highest, axis=1), axis=0))


# The casts of y as it lies in memory.


@triton.jit
def _cast(
    y, data, data_t, inverse, amax, final_amax, counts, rows, columns,
    TURNED: tl.constexpr, WORDS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile by the scale of the amax."""
    add_numbers(counts, rows, columns, TURNED)
    across = tl.cdiv(columns, COLUMNS)
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    v_0, v_1, v_2, v_3 = load_quarters(y, i, j, rows, columns, columns, 1, ROWS, COLUMNS)
    known = tl.load(amax).to(tl.float32, bitcast=True)
    scale = scale_from_amax(known, LARGEST, POWER_OF_TWO)
    if tl.program_id(0) == 0:
        tl.store(inverse, reciprocal(scale))
        tl.store(final_amax, known)
    cast_tile(
        y, v_0, v_1, v_2, v_3, scale, data, data_t, counts, i, j, rows, columns, columns, 1,
        TURNED, WORDS, TURNED, LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def _settle(
    y, data, data_t, inverse, amax, final_amax, tried, counts, history, rows, columns, history_length,
    TURNED: tl.constexpr, WORDS: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """After a cast by the history's scale: cast all of y again where some of its numbers were too large for it."""
    add_numbers(counts, rows, columns, TURNED)
    largest = tl.load(amax).to(tl.float32, bitcast=True)
    # The history itself may be brought up to date meanwhile.
    before = tl.load(amax + 1).to(tl.float32, bitcast=True)
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
            v_0, v_1, v_2, v_3 = load_quarters(y, i, j, rows, columns, columns, 1, ROWS, COLUMNS)
            cast_tile(
                y, v_0, v_1, v_2, v_3, scale, data, data_t, counts, i, j, rows, columns, columns, 1,
                TURNED, WORDS, TURNED,
                LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
            )  # fmt: skip
            if before > 0.0:
                for k in range(4):
                    values = load_quarter(y, i, j, k, rows, columns, columns, 1, ROWS, COLUMNS)
                    beyond = (magnitudes(values) * remembered > LARGEST).to(tl.int32)
                    add_count(counts, tl.sum(tl.sum(beyond, axis=1), axis=0), TURNED)


# Launching.


class PreparedNorm:
    """The norm of matrices of one kind: what is the same for all of them is worked out once.

    Called with a matrix that has numbers and a contiguous weight, the place of contiguous counts, to which what is
    lost is added, and that of a history of this length, which is brought up to date; gives y, rstd, data, data_t and
    inverse. The GPU of the matrix must be the current one.
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
        # Without a cast nothing is made of the format, but kernels must be told one.
        chosen = FORMATS[number_format or "e4m3fn"]
        self.dtype, self.casts, self.length = chosen.dtype, number_format is not None, length
        self.turned = (columns, rows) if transposed else (0, 0)
        self.words = rows % 4 == 0 and transposed
        self.strides = strides
        self.key = (shape, strides, eps, number_format, transposed, power_of_two, length)
        common: dict[str, Any] = {
            "TURNED": transposed,
            "WORDS": rows % 4 == 0,
            "POWER_OF_TWO": power_of_two,
            **encoding(device, chosen),
        }
        history = {"HISTORY": triton.next_power_of_2(length) if length else 0}
        width = min(_WIDEST, max(16, triton.next_power_of_2(columns)))
        warps = max(1, _ROWS * width // (_NUMBERS_A_THREAD * max(32, device.warp_size)))
        self.grid = (-(-rows // _ROWS),)
        self.constants = {
            "EPS": eps,
            "CAST": self.casts,
            "STAGES": _STAGES,
            "ROWS": _ROWS,
            "COLUMNS": width,
            "num_warps": warps,
            **common,
            **history,
        }
        height, width, warps = _TILE
        tiles = -(-rows // height) * -(-columns // width)
        self.cast_grid, self.settle_grid = (tiles,), (min(tiles, 4 * device.compute_units),)
        self.cast_constants = {"ROWS": height, "COLUMNS": width, "num_warps": warps, **common}
        self.settle_constants = {**self.cast_constants, **history}

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        counts: Place | None = None,
        history: Place | None = None,
        amax: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        rows, columns = self.shape
        y = x.new_empty(self.shape)
        rstd = x.new_empty(rows, dtype=torch.float32)
        data = x.new_empty(self.shape if self.casts else (0, 0), dtype=self.dtype)
        data_t = x.new_empty(self.turned, dtype=self.dtype)
        inverse = x.new_empty((), dtype=torch.float32)
        shared = x.new_zeros(SCRATCH // 4, dtype=torch.int32) if self.casts else inverse.view(torch.int32)
        largest = Place(shared, torch.float32, SCRATCH_LARGEST) if amax is None else amax
        plain = Place(data, torch.uint8)
        turned = Place(data_t, torch.int32 if self.words else torch.uint8)
        # Where there is no first try, a place in its stead that nothing is written to.
        tried = Place(shared, torch.int64, SCRATCH_TRIED) if self.casts else rstd
        pointers = (x, *(place for place in (weight, counts, history) if place is not None))
        aligned = tuple(place.data_ptr() % 16 for place in pointers)
        key = (x.dtype, x.device, None if weight is None else weight.dtype, aligned, amax is None, *self.key)
        launch(
            _norm, self.grid, key,
            x, x if weight is None else weight, y, rstd, plain, turned, shared, tried,
            rstd if history is None else history, rows, columns, *self.strides, self.length,
            HAS_WEIGHT=weight is not None, **self.constants,
        )  # fmt: skip
        if history is not None:
            launch(
                _settle, self.settle_grid, key,
                y, plain, turned, inverse, shared, largest, tried, counts, history, rows, columns, self.length,
                **self.settle_constants,
            )  # fmt: skip
        elif self.casts:
            launch(
                _cast, self.cast_grid, key,
                y, plain, turned, inverse, shared, largest, counts, rows, columns, **self.cast_constants,
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
