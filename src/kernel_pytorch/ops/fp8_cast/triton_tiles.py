"""Building blocks of the FP8 casts in Triton: encoding, scales, counts, and tiles that are read, cast and transposed.

Tiles accumulate their amax and counts in one small buffer of zeros by atomics. The amax is stored as the bit pattern
of a float, which orders like the float itself.

Classifying every element (underflowed, non-finite) takes more instructions than the cast. So a tile is first cast,
and the codes are inspected four at a time. In e4m3 some elements of most tiles become zero: zeros are counted, unless
an element was zero before. Only a tile with such an element, or with a NaN or an infinity (in e5m2: with any zero),
is read again and counted element by element.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.formats import Format
from kernel_pytorch.ops.fp8_cast.definition import NORMAL_BINADES

# FP8 formats.


# Two elements per instruction, the second into the low byte; NaN stays NaN.
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
    """Encode float32 in integer arithmetic, saturating; NaN for non-finite elements."""
    inside = tl.where(finite, tl.minimum(tl.maximum(product, -LARGEST), LARGEST), 0.0)
    bits = inside.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    magnitude = bits.to(tl.float32, bitcast=True)
    # Normal numbers: round the mantissa to nearest even, then move the exponent to the format's bias.
    shift: tl.constexpr = 23 - MANTISSA
    normal = bits + ((bits >> shift) & 1) + ((1 << (shift - 1)) - 1)
    normal = (normal >> shift) - ((127 - BIAS) << MANTISSA)
    # Subnormal numbers are multiples of the smallest one. Adding 2^23 leaves the nearest in the low bits.
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
    """Encode four elements per word, the first in the low byte. The GPU's instruction saturates infinities."""
    if HARDWARE:
        WORD: tl.constexpr = _E4M3_WORD if MANTISSA == 3 else _E5M2_WORD
        words = tl.inline_asm_elementwise(WORD, "=r,f,f,f,f", [p_0, p_1, p_2, p_3], tl.uint32, True, 1)
    else:
        words = encode(p_0, is_finite(p_0), LARGEST, MANTISSA, BIAS, NAN, FNUZ)
        words |= encode(p_1, is_finite(p_1), LARGEST, MANTISSA, BIAS, NAN, FNUZ) << 8
        words |= encode(p_2, is_finite(p_2), LARGEST, MANTISSA, BIAS, NAN, FNUZ) << 16
        words |= encode(p_3, is_finite(p_3), LARGEST, MANTISSA, BIAS, NAN, FNUZ) << 24
    return words


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


# Correctly rounded quotients from one that may be a few ulps off: a correctly rounded division branches, and loads
# would wait for it. Products of two float32 values are exact in float64.


@triton.jit
def scale_from_amax(amax, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The largest float32 s with s * amax <= largest, at most 2^126; 1 if amax is 0."""
    magnitude = tl.maximum(amax, LARGEST * 2.0**-126)
    near = (LARGEST / magnitude).to(tl.float64)
    exact = magnitude.to(tl.float64)
    scale = (near + (LARGEST - near * exact) * (near * (1.0 / LARGEST))).to(tl.float32)
    bits = scale.to(tl.int32, bitcast=True)
    bits = tl.where(scale.to(tl.float64) * exact > LARGEST, bits - 1, bits)
    if POWER_OF_TWO:
        bits = bits & 0x7F800000
    return tl.where(amax == 0.0, 1.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def reciprocal(scale):
    """The reciprocal, correctly rounded to float32."""
    exact = scale.to(tl.float64)
    near = (1.0 / scale).to(tl.float64)
    near += near * (1.0 - near * exact)
    near += near * (1.0 - near * exact)
    return near.to(tl.float32)


@triton.jit
def largest_remembered(history, length, HISTORY: tl.constexpr):
    """The largest finite entry of an amax history; 0 if there is none."""
    place = tl.arange(0, HISTORY)
    entries = tl.load(history + place, mask=place < length, other=0.0)
    return tl.max(tl.where(is_finite(entries), tl.maximum(entries, 0.0), 0.0), axis=0)


_BINADES: tl.constexpr = tl.constexpr(NORMAL_BINADES)


@triton.jit
def needs_own_scale(before, amax, remembered, LARGEST: tl.constexpr, BIAS: tl.constexpr):
    """Whether a tensor must be requantized with its own amax, and the delayed scale if it exceeds that, else 0.

    Args:
        before: the largest entry of the history, 0 if there is none.
        remembered: the delayed scale.
    """
    reached = amax * remembered
    exceeds = (before > 0.0) & (reached > LARGEST)
    below = (amax > 0.0) & (reached < 2.0 ** (_BINADES + 1 - BIAS))
    return (before == 0.0) | exceeds | below, tl.where(exceeds, remembered, 0.0)


# Layout of the shared buffer, in 32-bit words: the amax, the history's largest entry, four 64-bit counts of the cast
# with the delayed scale, the amax as a float. In bytes:
SCRATCH_TRIED, SCRATCH_LARGEST, SCRATCH = 8, 40, 48


@triton.jit
def offer(address, magnitude):
    """Atomic maximum of a magnitude, stored as its bit pattern."""
    tl.atomic_max(address, magnitude.to(tl.int32, bitcast=True), sem="relaxed")


COPY: tl.constexpr = tl.constexpr(4)
"""Offset from the counts of data to those of data_t: saturated, underflowed, non-finite, all elements."""


@triton.jit
def add_count(counts, count, TURNED: tl.constexpr):
    """Add to a count; skip the atomic when the count is zero."""
    count = tl.full((), 0, tl.int64) + count
    if count > 0:
        tl.atomic_add(counts, count, sem="relaxed")
        if TURNED:
            tl.atomic_add(counts + COPY, count, sem="relaxed")


@triton.jit
def add_numbers(counts, rows, columns, TURNED: tl.constexpr):
    """Add the number of elements, in the first program only."""
    if tl.program_id(0) == 0:
        numbers = (tl.full((), 0, tl.int64) + rows) * columns  # sizes of 1 are constants
        tl.atomic_add(counts + 3, numbers, sem="relaxed")
        if TURNED:
            tl.atomic_add(counts + 3 + COPY, numbers, sem="relaxed")


@triton.jit
def add_missed(counts, lost, TURNED: tl.constexpr):
    """Add the counts that ``lost_in`` found in a tile."""
    add_count(counts + 1, tl.sum(tl.sum(lost & 0xFFFF, axis=1), axis=0), TURNED)
    add_count(counts + 2, tl.sum(tl.sum(lost >> 16, axis=1), axis=0), TURNED)


@triton.jit
def lost_in(x, product, finite, HALF_SMALLEST: tl.constexpr):
    """1 for an underflowed element, 2^16 for a non-finite one: two counts in one sum."""
    under = (x != 0.0) & (tl.abs(product) <= HALF_SMALLEST)
    return tl.where(finite, under.to(tl.int32), 1 << 16)


@triton.jit
def load_tile(
    x, i, j, rows, columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Load tile (i, j) of a matrix as float32, zeros outside the matrix."""
    corner = x + i.to(tl.int64) * ROWS * row_stride + j.to(tl.int64) * COLUMNS * column_stride
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < rows - i * ROWS)[:, None] & (column < columns - j * COLUMNS)[None, :]
    places = row[:, None] * row_stride + column[None, :] * column_stride
    return tl.load(corner + places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def remember(history, next_history, length, amax, HISTORY: tl.constexpr):
    """Write the history for the next cast: amax in front, the oldest entry dropped."""
    place = tl.arange(0, HISTORY)
    older = tl.load(history + place - 1, mask=(place > 0) & (place < length), other=0.0)
    tl.debug_barrier()  # history and next_history may alias
    tl.store(next_history + place, tl.where(place == 0, amax, older), mask=place < length)


# Tiles. The offset of a tile is 64-bit; offsets inside it are 32-bit, which takes half the registers. A tile is held
# as four quarters, quarter k with rows k, k + 4, k + 8 and so on: the codes of four consecutive rows then lie in one
# thread and make one word, and a tile is transposed by words instead of by bytes.


@triton.jit
def tile_of_program(across, LAST_FIRST: tl.constexpr):
    """The tile (i, j) of this program; ``across`` is the number of tiles in a row of tiles.

    LAST_FIRST reverses the order. The first pass over a matrix starts with its last tiles, which were written last
    and may still be in the cache; the second pass goes the other way, for the same reason.
    """
    tile = tl.program_id(0)
    if LAST_FIRST:
        tile = tl.num_programs(0) - 1 - tile
    return tile // across, tile % across


@triton.jit
def load_quarter(
    x, i, j, k, rows, columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Load a quarter of tile (i, j) of a matrix as float32, zeros outside the matrix."""
    corner = x + i.to(tl.int64) * ROWS * row_stride + j.to(tl.int64) * COLUMNS * column_stride
    row, column = tl.arange(0, ROWS // 4) * 4 + k, tl.arange(0, COLUMNS)
    inside = (row < rows - i * ROWS)[:, None] & (column < columns - j * COLUMNS)[None, :]
    places = row[:, None] * row_stride + column[None, :] * column_stride
    return tl.load(corner + places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_quarter(data, codes, i, j, k, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the codes of a quarter of tile (i, j) to a contiguous matrix."""
    corner = data + i.to(tl.int64) * ROWS * columns + j.to(tl.int64) * COLUMNS
    row, column = tl.arange(0, ROWS // 4) * 4 + k, tl.arange(0, COLUMNS)
    inside = (row < rows - i * ROWS)[:, None] & (column < columns - j * COLUMNS)[None, :]
    tl.store(corner + row[:, None] * columns + column[None, :], codes, mask=inside)


@triton.jit
def codes_of_quarter(products, words, k: tl.constexpr, MANTISSA: tl.constexpr, AGAIN: tl.constexpr):
    """The codes of a quarter from the words of a tile; or encoded AGAIN, four elements of a row in one word."""
    if AGAIN:
        WORD: tl.constexpr = _E4M3_WORD if MANTISSA == 3 else _E5M2_WORD
        codes = tl.inline_asm_elementwise(WORD, "=r,f,f,f,f", [products], tl.uint8, True, 4)
    else:
        codes = ((words >> (8 * k)) & 0xFF).to(tl.uint8)
    return codes


@triton.jit
def not_zero(word):
    """Set the top bit of each byte that is neither 0x00 nor 0x80; the other bits are undefined."""
    return (word & 0x7F7F7F7F) + 0x7F7F7F7F


@triton.jit
def store_turned(
    data_t, word, i, j, rows, columns, WORDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Store the transpose of tile (i, j), by words if the rows of the transpose are aligned to words."""
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


@triton.jit
def emit(
    v_0, v_1, v_2, v_3, s_0, s_1, s_2, s_3, data, data_t, i, j, rows, columns,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, WORDS: tl.constexpr,
    LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN: tl.constexpr, FNUZ: tl.constexpr,
    HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast and store the quarters of tile (i, j), each with its scales.

    Returns the arguments of ``counted``: the amax, whether it is invalid so that ``recount`` must run, and the number
    of elements that became zero.
    """
    p_0, p_1, p_2, p_3 = v_0 * s_0, v_1 * s_1, v_2 * s_2, v_3 * s_3
    words = encode_words(p_0, p_1, p_2, p_3, LARGEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE)
    if PLAIN:
        products = (p_0, p_1, p_2, p_3)
        for k in tl.static_range(4):
            # Fewer instructions than unpacking the words, which are needed packed.
            codes = codes_of_quarter(products[k], words, k, MANTISSA, HARDWARE and TURNED)
            store_quarter(data, codes, i, j, k, rows, columns, ROWS, COLUMNS)
    if TURNED:
        store_turned(data_t, words, i, j, rows, columns, WORDS, ROWS, COLUMNS)
    # Non-finite values have larger bit patterns than finite ones.
    seen = _larger(_larger(tl.abs(v_0), tl.abs(v_1)), _larger(tl.abs(v_2), tl.abs(v_3))).to(tl.int32, bitcast=True)
    if MANTISSA == 3:
        least = tl.minimum(tl.minimum(tl.abs(v_0), tl.abs(v_1)), tl.minimum(tl.abs(v_2), tl.abs(v_3)))
        # One reduction for both: a zero code counts as larger than any finite magnitude.
        flagged = tl.where(least == 0.0, 0x7FFFFFFF, seen)
        # Four counts per word, of up to COLUMNS each; then two, of up to ROWS * COLUMNS / 2.
        tl.static_assert((COLUMNS <= 0xFF) & (ROWS * COLUMNS // 2 <= 0xFFFF))
        kept, flagged = tl.reduce(((not_zero(words) >> 7) & 0x01010101, flagged), 1, _sum_and_largest)
        kept, largest = tl.reduce(((kept & 0x00FF00FF) + ((kept >> 8) & 0x00FF00FF), flagged), 0, _sum_and_largest)
        underflowed = ROWS * COLUMNS - ((kept & 0xFFFF) + (kept >> 16)).to(tl.int32)
    else:
        flagged = tl.where(((not_zero(words) & 0x80808080) ^ 0x80808080) != 0, 0x7FFFFFFF, seen)
        largest = tl.max(tl.max(flagged, axis=1), axis=0)
        underflowed = 0
    return largest.to(tl.float32, bitcast=True), largest >= 0x7F800000, underflowed


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _sum_and_largest(sum_a, largest_a, sum_b, largest_b):
    return sum_a + sum_b, tl.maximum(largest_a, largest_b)


@triton.jit
def counted(
    found, quarter: tl.constexpr, arguments, data, data_t, counts, i, j, rows, columns,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, BOTH: tl.constexpr, HALF_SMALLEST: tl.constexpr, NAN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """After ``emit``: add the counts of tile (i, j); return the amax of its finite elements."""
    largest, odd, underflowed = found
    if odd:
        largest = recount(
            quarter, arguments, data, data_t, counts, i, j, rows, columns,
            PLAIN, TURNED, BOTH, HALF_SMALLEST, NAN, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        add_count(counts + 1, underflowed, BOTH)
    return largest


@triton.jit
def recount(
    quarter: tl.constexpr, arguments, data, data_t, counts, i, j, rows, columns,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, BOTH: tl.constexpr, HALF_SMALLEST: tl.constexpr, NAN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Count tile (i, j) element by element, write NaN for non-finite elements; return the amax of the finite ones.

    Args:
        quarter: loads the elements and scales of a quarter again. Keeping them would take registers in every tile
            for the sake of a few tiles.
    """
    tl.debug_barrier()  # another thread may replace a code that emit has stored by NaN
    missed = tl.zeros((ROWS // 4, COLUMNS), dtype=tl.int32)
    seen = tl.zeros((ROWS // 4, COLUMNS), dtype=tl.float32)
    row, column = tl.arange(0, ROWS // 4) * 4, tl.arange(0, COLUMNS)
    for k in range(4):
        values, scales = quarter(i, j, k, rows, columns, ROWS, COLUMNS, arguments)
        finite = is_finite(values)
        missed += lost_in(values, values * scales, finite, HALF_SMALLEST)
        seen = tl.maximum(seen, magnitudes(values))
        # Elements outside the matrix are zeros, which are finite.
        if PLAIN:
            corner = data + i.to(tl.int64) * ROWS * columns + j.to(tl.int64) * COLUMNS
            tl.store(corner + (row + k)[:, None] * columns + column[None, :], NAN, mask=finite == 0)
        if TURNED:
            codes = data_t.to(tl.pointer_type(tl.uint8))
            corner_t = codes + j.to(tl.int64) * COLUMNS * rows + i.to(tl.int64) * ROWS
            tl.store(corner_t + column[None, :] * rows + (row + k)[:, None], NAN, mask=finite == 0)
    add_missed(counts, missed, BOTH)
    return tl.max(tl.max(seen, axis=1), axis=0)


# A matrix that is not in memory is a function that computes a quarter of tile (i, j) and its scales, with its
# arguments. With tensorwise scaling the arguments are a pair: the scale, and the inputs of the elements.


@triton.jit
def quarter_of_matrix(i, j, k, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, arguments):
    """A quarter of a matrix in memory, with a tensorwise scale, or one per column."""
    scale, source = arguments
    x, row_stride, column_stride = source
    return load_quarter(x, i, j, k, rows, columns, row_stride, column_stride, ROWS, COLUMNS), scale


@triton.jit
def quarters(
    quarter: tl.constexpr, i, j, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, source
):  # fmt: skip
    """Load all four quarters of tile (i, j).

    Callers load them before they compute the scale, so that neither waits for the other.
    """
    arguments = (1.0, source)
    v_0, _ = quarter(i, j, 0, rows, columns, ROWS, COLUMNS, arguments)
    v_1, _ = quarter(i, j, 1, rows, columns, ROWS, COLUMNS, arguments)
    v_2, _ = quarter(i, j, 2, rows, columns, ROWS, COLUMNS, arguments)
    v_3, _ = quarter(i, j, 3, rows, columns, ROWS, COLUMNS, arguments)
    return v_0, v_1, v_2, v_3


@triton.jit
def cast_tile(
    v_0, v_1, v_2, v_3, scale, quarter: tl.constexpr, source, data, data_t, counts, i, j, rows, columns,
    TURNED: tl.constexpr, WORDS: tl.constexpr, BOTH: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast tile (i, j), loaded by ``quarters``, with a tensorwise scale; return the amax of its finite elements."""
    found = emit(
        v_0, v_1, v_2, v_3, scale, scale, scale, scale, data, data_t, i, j, rows, columns,
        True, TURNED, WORDS, LARGEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip
    return counted(
        found, quarter, (scale, source), data, data_t, counts, i, j, rows, columns,
        True, TURNED, BOTH, HALF_SMALLEST, NAN, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def cast_again(
    quarter: tl.constexpr, source, scale, exceeded, data, data_t, counts, i, j, rows, columns,
    TURNED: tl.constexpr, WORDS: tl.constexpr, BOTH: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Requantize tile (i, j) with another scale; count the elements that saturated under the ``exceeded`` scale."""
    v_0, v_1, v_2, v_3 = quarters(quarter, i, j, rows, columns, ROWS, COLUMNS, source)
    cast_tile(
        v_0, v_1, v_2, v_3, scale, quarter, source, data, data_t, counts, i, j, rows, columns, TURNED, WORDS, BOTH,
        LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip
    if exceeded > 0.0:
        for k in range(4):
            values, _ = quarter(i, j, k, rows, columns, ROWS, COLUMNS, (scale, source))
            beyond = (magnitudes(values) * exceeded > LARGEST).to(tl.int32)
            add_count(counts, tl.sum(tl.sum(beyond, axis=1), axis=0), BOTH)


@triton.jit
def magnitudes(values):
    """The magnitudes of the finite elements; 0 for the others."""
    return tl.where(is_finite(values), tl.abs(values), 0.0)


# Constants.


def hardware_encodes(device: Device, chosen: Format) -> bool:
    """Return whether the GPU has an encoding instruction with the defined rounding and the kernel is compiled."""
    compiled = isinstance(cast_tile, triton.JITFunction)
    return (
        compiled and chosen.encoding != "fnuz" and device.arch in ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
    )


@lru_cache
def encoding(device: Device, chosen: Format) -> dict[str, float | int | bool]:
    """Return the constexpr arguments that describe a format."""
    return {
        "LARGEST": chosen.largest,
        "HALF_SMALLEST": chosen.smallest_subnormal / 2,
        "MANTISSA": chosen.mantissa_bits,
        "BIAS": chosen.bias,
        "NAN": chosen.nan_code,
        "FNUZ": chosen.encoding == "fnuz",
        "HARDWARE": hardware_encodes(device, chosen),
    }
