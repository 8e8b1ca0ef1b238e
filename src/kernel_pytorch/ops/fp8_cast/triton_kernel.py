"""fp8_cast in Triton, one source for NVIDIA and AMD: byte for byte as defined.

Memory-bound: a number of x is read once and written once or twice (both layouts out of one tile, which is turned in
shared memory). Only scales of the tensor or of rows need the largest magnitudes first, which reads x a second time,
partly out of the cache; scales of blocks and squares lie within a tile, and scales from a history are there before.

What tiles find out together, the largest magnitudes and the counts, they add to one small buffer that starts as
zeros: magnitudes as the bit patterns of floats, which are ordered as the numbers are.

Telling apart what is lost takes more instructions than the cast. So a tile is cast as if all were well, four codes
at a time are looked at for a zero or a NaN, and only a tile with one, or an infinity, is read again to be counted.
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
from kernel_pytorch.ops.triton_launch import launch
from kernel_pytorch.precision.formats import FORMATS, Format

# Rows, columns and warps of a tile: the fastest of those tried on an H200.
_TILE = (64, 128, 4)
_ROW_TILE = (32, 128, 4)
_PART_TILE = (128, 128, 8)  # a block of the definition
_AMAX_TILE = (4, 2048, 8)
_TILES_PER_PROGRAM = 4  # of the first reading, one below the other: fewer programs compete for one number


# Number formats.


# Two numbers at a time, the second one into the low byte; what is not a number keeps being none.
_E4M3_WORD: tl.constexpr = tl.constexpr(
    "{.reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
    "mov.b32 $0, {lo, hi};}"
)
_E5M2_WORD: tl.constexpr = tl.constexpr(
    "{.reg .b16 lo, hi; cvt.rn.satfinite.e5m2x2.f32 lo, $2, $1; cvt.rn.satfinite.e5m2x2.f32 hi, $4, $3; "
    "mov.b32 $0, {lo, hi};}"
)


@triton.jit
def encode(
    product, finite, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN: tl.constexpr,
    FNUZ: tl.constexpr,
):  # fmt: skip
    """The codes of float32 numbers in integer arithmetic, saturating; NaN where not finite."""
    inside = tl.where(finite, tl.minimum(tl.maximum(product, -LARGEST), LARGEST), 0.0)
    bits = inside.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    magnitude = bits.to(tl.float32, bitcast=True)
    # Normal numbers: round the mantissa to nearest even, then move the exponent to the format's bias.
    shift: tl.constexpr = 23 - MANTISSA
    normal = bits + ((bits >> shift) & 1) + ((1 << (shift - 1)) - 1)
    normal = (normal >> shift) - ((127 - BIAS) << MANTISSA)
    # Subnormal numbers: multiples of the smallest. Adding 2^23 leaves the nearest in the low bits.
    multiple = magnitude * (2.0 ** (BIAS - 1 + MANTISSA)) + 8388608.0
    subnormal = multiple.to(tl.uint32, bitcast=True) - 0x4B000000
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), subnormal, normal)
    sign = (product.to(tl.uint32, bitcast=True) >> 24) & 0x80
    if FNUZ:
        sign = tl.where(code == 0, 0, sign)
    return tl.where(finite, code | sign, NAN)


@triton.jit
def encode_words(
    p_0, p_1, p_2, p_3, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN: tl.constexpr,
    FNUZ: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The codes of four numbers each, the first in the low byte. An infinity saturates by the GPU's instruction."""
    if HARDWARE:
        if MANTISSA == 3:
            words = tl.inline_asm_elementwise(_E4M3_WORD, "=r,f,f,f,f", [p_0, p_1, p_2, p_3], tl.uint32, True, 1)
        else:
            words = tl.inline_asm_elementwise(_E5M2_WORD, "=r,f,f,f,f", [p_0, p_1, p_2, p_3], tl.uint32, True, 1)
    else:
        words = encode(p_0, is_finite(p_0), LARGEST, MANTISSA, BIAS, NAN, FNUZ)
        words |= encode(p_1, is_finite(p_1), LARGEST, MANTISSA, BIAS, NAN, FNUZ) << 8
        words |= encode(p_2, is_finite(p_2), LARGEST, MANTISSA, BIAS, NAN, FNUZ) << 16
        words |= encode(p_3, is_finite(p_3), LARGEST, MANTISSA, BIAS, NAN, FNUZ) << 24
    return words


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def scale_from_amax(amax, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The largest float32 s with s * amax <= largest, at most 2^126; 1 where amax is 0. In float64, as defined."""
    exact = amax.to(tl.float64)
    scale = (LARGEST / tl.maximum(exact, LARGEST * 2.0**-126)).to(tl.float32)
    bits = scale.to(tl.int32, bitcast=True)
    bits = tl.where(scale.to(tl.float64) * exact > LARGEST, bits - 1, bits)
    if POWER_OF_TWO:
        bits = bits & 0x7F800000
    return tl.where(amax == 0.0, 1.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def reciprocal(scale):
    return (1.0 / scale.to(tl.float64)).to(tl.float32)


@triton.jit
def largest_remembered(history, length, HISTORY: tl.constexpr):
    """The largest entry that is finite; 0 where there is none."""
    place = tl.arange(0, HISTORY)
    entries = tl.load(history + place, mask=place < length, other=0.0)
    return tl.max(tl.where(is_finite(entries), tl.maximum(entries, 0.0), 0.0), axis=0)


# What tiles find out together.


@triton.jit
def offer(address, magnitude):
    """Raise the number there, kept as its bit pattern, to this one."""
    tl.atomic_max(address, magnitude.to(tl.int32, bitcast=True), sem="relaxed")


COPY: tl.constexpr = tl.constexpr(4)
"""From the counts of a copy to those of the transposed copy: outgrown, underflowed, not finite, all its numbers."""


@triton.jit
def add_count(counts, count, TURNED: tl.constexpr):
    """Most often there is nothing to add, and nobody to wait for."""
    if count > 0:
        tl.atomic_add(counts, count.to(tl.int64), sem="relaxed")
        if TURNED:
            tl.atomic_add(counts + COPY, count.to(tl.int64), sem="relaxed")


@triton.jit
def add_numbers(counts, rows, columns, TURNED: tl.constexpr):
    """The first program adds how many numbers there are."""
    if tl.program_id(0) == 0:
        numbers = (tl.full((), 0, tl.int64) + rows) * columns  # sizes of 1 are constants
        tl.atomic_add(counts + 3, numbers, sem="relaxed")
        if TURNED:
            tl.atomic_add(counts + 3 + COPY, numbers, sem="relaxed")


@triton.jit
def add_missed(counts, lost, TURNED: tl.constexpr):
    """Add what ``lost_in`` found in the numbers of a tile."""
    add_count(counts + 1, tl.sum(tl.sum(lost & 0xFFFF, axis=1), axis=0), TURNED)
    add_count(counts + 2, tl.sum(tl.sum(lost >> 16, axis=1), axis=0), TURNED)


@triton.jit
def lost_in(x, product, finite, HALF_SMALLEST: tl.constexpr):
    """1 for a number that became zero, 2^16 for one that is not finite."""
    under = (x != 0.0) & (tl.abs(product) <= HALF_SMALLEST)
    return tl.where(finite, under.to(tl.int32), 1 << 16)


@triton.jit
def load_tile(
    x, i, j, rows, columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Tile (i, j) of a matrix in float32, zeros beyond its end."""
    corner = x + i.to(tl.int64) * ROWS * row_stride + j.to(tl.int64) * COLUMNS * column_stride
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < rows - i * ROWS)[:, None] & (column < columns - j * COLUMNS)[None, :]
    places = row[:, None] * row_stride + column[None, :] * column_stride
    return tl.load(corner + places, mask=inside, other=0.0).to(tl.float32)


# Tiles. A tile's place is one 64-bit number; places inside it fit into 32 bits, which takes half the registers.
# A tile is held as four quarters, quarter k its rows k, k + 4, k + 8 and so on: the codes of four rows below each
# other then lie in one thread and make one word, and a tile is turned by words instead of by bytes.


@triton.jit
def load_quarter(
    x, i, j, k, rows, columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """A quarter of tile (i, j) of a matrix in float32, zeros beyond its end."""
    corner = x + i.to(tl.int64) * ROWS * row_stride + j.to(tl.int64) * COLUMNS * column_stride
    row, column = tl.arange(0, ROWS // 4) * 4 + k, tl.arange(0, COLUMNS)
    inside = (row < rows - i * ROWS)[:, None] & (column < columns - j * COLUMNS)[None, :]
    places = row[:, None] * row_stride + column[None, :] * column_stride
    return tl.load(corner + places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_plain(data, words, i, j, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The codes of tile (i, j) into a matrix whose rows follow each other."""
    corner = data + i.to(tl.int64) * ROWS * columns + j.to(tl.int64) * COLUMNS
    for k in tl.static_range(4):
        row, column = tl.arange(0, ROWS // 4) * 4 + k, tl.arange(0, COLUMNS)
        inside = (row < rows - i * ROWS)[:, None] & (column < columns - j * COLUMNS)[None, :]
        code = ((words >> (8 * k)) & 0xFF).to(tl.uint8)
        tl.store(corner + row[:, None] * columns + column[None, :], code, mask=inside)


@triton.jit
def suspicious(word):
    """Whether some code in some word of a tile is a zero or, apart from its sign, all ones, as a NaN is."""
    magnitude = word & 0x7F7F7F7F
    zeros = 0x80808080 - ((magnitude + 0x7F7F7F7F) & 0x80808080)
    ones = (magnitude + 0x01010101) & 0x80808080
    return tl.max(tl.max(zeros | ones, axis=1), axis=0) != 0


@triton.jit
def store_turned(
    data_t, word, i, j, rows, columns, WORDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The transpose of tile (i, j). By words where the rows of the transpose consist of such."""
    row, column = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    in_column = column < columns - j * COLUMNS
    turned = tl.trans(word)
    if WORDS:
        words = rows // 4
        corner = data_t + j.to(tl.int64) * COLUMNS * words + i.to(tl.int64) * (ROWS // 4)
        inside = in_column[:, None] & (row < words - i * (ROWS // 4))[None, :]
        tl.store(corner + column[:, None] * words + row[None, :], turned, mask=inside)
    else:
        corner = data_t + j.to(tl.int64) * COLUMNS * rows + i.to(tl.int64) * ROWS
        places = column[:, None] * rows + row[None, :] * 4
        left = rows - i * ROWS
        for k in tl.static_range(4):
            inside = in_column[:, None] & (row * 4 + k < left)[None, :]
            tl.store(corner + places + k, ((turned >> (8 * k)) & 0xFF).to(tl.uint8), mask=inside)


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
def emit(
    v_0, v_1, v_2, v_3, s_0, s_1, s_2, s_3, data, data_t, counts, i, j, rows, columns,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, WORDS: tl.constexpr, BOTH: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast and store the quarters of tile (i, j), each with its scales, and count what is lost.

    Returns the largest of the finite magnitudes.
    """
    words = encode_words(
        v_0 * s_0, v_1 * s_1, v_2 * s_2, v_3 * s_3, LARGEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE
    )  # fmt: skip
    if PLAIN:
        store_plain(data, words, i, j, rows, columns, ROWS, COLUMNS)
    if TURNED:
        store_turned(data_t, words, i, j, rows, columns, WORDS, ROWS, COLUMNS)
    seen = tl.maximum(tl.maximum(tl.abs(v_0), tl.abs(v_1)), tl.maximum(tl.abs(v_2), tl.abs(v_3)))
    largest = tl.max(tl.max(seen, axis=1), axis=0)
    if suspicious(words) | (largest == float("inf")):
        f_0, f_1, f_2, f_3 = is_finite(v_0), is_finite(v_1), is_finite(v_2), is_finite(v_3)
        missed = lost_in(v_0, v_0 * s_0, f_0, HALF_SMALLEST) + lost_in(v_1, v_1 * s_1, f_1, HALF_SMALLEST)
        missed += lost_in(v_2, v_2 * s_2, f_2, HALF_SMALLEST) + lost_in(v_3, v_3 * s_3, f_3, HALF_SMALLEST)
        add_missed(counts, missed, BOTH)
        if tl.max(tl.max(missed, axis=1), axis=0) >= 1 << 16:
            words = encode_words(
                nan_unless(f_0, v_0 * s_0), nan_unless(f_1, v_1 * s_1), nan_unless(f_2, v_2 * s_2),
                nan_unless(f_3, v_3 * s_3), LARGEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE,
            )  # fmt: skip
            if PLAIN:
                store_plain(data, words, i, j, rows, columns, ROWS, COLUMNS)
            if TURNED:
                store_turned(data_t, words, i, j, rows, columns, WORDS, ROWS, COLUMNS)
            m_01 = tl.maximum(magnitudes(v_0), magnitudes(v_1))
            m_23 = tl.maximum(magnitudes(v_2), magnitudes(v_3))
            largest = tl.max(tl.max(tl.maximum(m_01, m_23), axis=1), axis=0)
    return largest


@triton.jit
def nan_unless(finite, values):
    return tl.where(finite, values, float("nan"))


@triton.jit
def cast_tile(
    x, data, data_t, counts, s_0, s_1, s_2, s_3, i, j, rows, columns, row_stride, column_stride,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, WORDS: tl.constexpr, BOTH: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``emit`` of tile (i, j) of x."""
    v_0 = load_quarter(x, i, j, 0, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
    v_1 = load_quarter(x, i, j, 1, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
    v_2 = load_quarter(x, i, j, 2, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
    v_3 = load_quarter(x, i, j, 3, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
    return emit(
        v_0, v_1, v_2, v_3, s_0, s_1, s_2, s_3, data, data_t, counts, i, j, rows, columns,
        PLAIN, TURNED, WORDS, BOTH, LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def magnitudes(values):
    """Those of the finite numbers; 0 for the others."""
    return tl.where(is_finite(values), tl.abs(values), 0.0)


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
def remember(history, next_history, length, amax, HISTORY: tl.constexpr):
    """The history of the next cast: amax in front, the oldest entry dropped."""
    place = tl.arange(0, HISTORY)
    older = tl.load(history + place - 1, mask=(place > 0) & (place < length), other=0.0)
    tl.debug_barrier()  # both may be the same memory
    tl.store(next_history + place, tl.where(place == 0, amax, older), mask=place < length)


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


def hardware_encodes(device: Device, chosen: Format) -> bool:
    """Whether the GPU has an instruction for the format that rounds as defined, and the kernel is not interpreted."""
    compiled = isinstance(_cast_whole, triton.JITFunction)
    return (
        compiled and chosen.encoding != "fnuz" and device.arch in ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
    )


@lru_cache
def encoding(device: Device, chosen: Format) -> dict[str, float | int | bool]:
    """What kernels need to know of a format."""
    return {
        "LARGEST": chosen.largest,
        "HALF_SMALLEST": chosen.smallest_subnormal / 2,
        "MANTISSA": chosen.mantissa_bits,
        "BIAS": chosen.bias,
        "NAN": chosen.nan_code,
        "FNUZ": chosen.encoding == "fnuz",
        "HARDWARE": hardware_encodes(device, chosen),
    }


def forward(
    device: Device,
    x: torch.Tensor,
    number_format: str,
    granularity: str,
    transposed: bool,
    history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    counts = x.new_zeros((2, 4), dtype=torch.int64)
    next_history = x.new_empty(0, dtype=torch.float32) if history is None else history.clone()
    data, data_t, inverse, inverse_t, amax = cast(
        device,
        x,
        number_format,
        granularity,
        transposed,
        None if history is None else next_history,
        power_of_two,
        counts,
    )
    return data, data_t, inverse, inverse_t, amax, counts, next_history


def cast(
    device: Device,
    x: torch.Tensor,
    number_format: str,
    granularity: str,
    transposed: bool,
    history: torch.Tensor | None,
    power_of_two: bool,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """data, data_t, inverse, inverse_t and amax; the history is brought up to date, and what is lost added to counts.

    Both are contiguous.
    """
    chosen = FORMATS[number_format]
    rows, columns = x.shape
    data = x.new_empty((rows, columns), dtype=chosen.dtype)
    data_t = x.new_empty((columns, rows) if transposed else (0, 0), dtype=chosen.dtype)
    inverse = empty_inverse(x, granularity, rows, columns)
    inverse_t = inverse.new_empty(0)
    if transposed and granularity != "tensor":
        inverse_t = empty_inverse(x, granularity, columns, rows)
    # Counts of a first try, amax, what the history says; for scales of rows, the magnitudes of rows and columns.
    by_row = granularity == "row"
    # Where each tile has its own scales, nobody knows the largest number before the last one ends.
    own_scales = granularity in ("block", "square")
    amax = x.new_zeros((), dtype=torch.float32) if own_scales else inverse.new_empty(())
    outputs = (data, data_t, inverse, inverse_t, amax)
    if x.numel() == 0:
        amax.zero_()
        inverse.fill_(1.0)
        inverse_t.fill_(1.0)
        if history is not None:
            before = torch.where(history.isfinite(), history, 0.0).amax().clamp_min(0.0)
            scale = torch_kernel.scale_from_amax(before, chosen.largest, power_of_two) / 2
            inverse.copy_(torch.where(before > 0, scale, 1.0).double().reciprocal())
            history.copy_(torch.nn.functional.pad(history[:-1], (1, 0)))
        return outputs
    shared = x.new_zeros(10 + (rows + columns if by_row else 0), dtype=torch.int32)
    row_amax, column_amax = (shared[10:], shared[10 + rows :]) if by_row else (shared, shared)
    strides = x.stride()
    aligned = (x.data_ptr() % 16, counts.data_ptr() % 16)
    of_call = (number_format, granularity, transposed, power_of_two)
    key: tuple[Any, ...] = (x.dtype, x.device, x.shape, strides, aligned, of_call)
    if granularity == "row" or (granularity == "tensor" and history is None):
        height, width, warps = _AMAX_TILE
        grid = (-(-rows // (height * _TILES_PER_PROGRAM)) * -(-columns // width),)
        launch(
            _amax, grid, key, x, shared, row_amax, column_amax, rows, columns, *strides,
            BY_ROW=by_row, BY_COLUMN=by_row and transposed, ROWS=height, COLUMNS=width, TILES=_TILES_PER_PROGRAM,
            num_warps=warps,
        )  # fmt: skip
    height, width, warps = {"tensor": _TILE, "row": _ROW_TILE}.get(granularity, _PART_TILE)
    down, across = -(-rows // height), -(-columns // width)
    words = rows % 4 == 0
    plain = data.view(torch.uint8)
    turned = data_t.view(torch.int32 if words and transposed else torch.uint8)
    constants = {
        "TURNED": transposed,
        "WORDS": words,
        "POWER_OF_TWO": power_of_two,
        "ROWS": height,
        "COLUMNS": width,
        "num_warps": warps,
        **encoding(device, chosen),
    }
    if granularity != "tensor":
        launch(
            _cast_parts, (down * across,), key,
            x, plain, turned, inverse, inverse_t, amax.view(torch.int32) if own_scales else shared, amax,
            row_amax, column_amax, counts, rows, columns, *strides, GRANULARITY=granularity, **constants,
        )  # fmt: skip
        return outputs
    if history is None:
        launch(
            _cast_whole, (down * across,), (*key, None),
            x, plain, turned, inverse, shared, amax, counts, inverse, rows, columns, *strides, 0,
            HISTORY=0, **constants,
        )  # fmt: skip
        return outputs
    length = history.shape[0]
    tried = shared[2:].view(torch.int64)
    key = (*key, length, history.data_ptr() % 16)
    constants["HISTORY"] = triton.next_power_of_2(length)
    launch(
        _cast_whole, (down * across,), key,
        x, plain, turned, inverse, shared, amax, tried, history, rows, columns, *strides, length, **constants,
    )  # fmt: skip
    launch(
        _settle, (min(down * across, 4 * device.compute_units),), key,
        x, plain, turned, inverse, shared, amax, tried, counts, history,
        rows, columns, *strides, length, **constants,
    )  # fmt: skip
    return outputs
