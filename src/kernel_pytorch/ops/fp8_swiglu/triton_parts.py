"""fp8_swiglu_grad in row chunks, so that dh is never in memory as a whole.

Each chunk is quantized like the whole: with the delayed scales, or with its own amax if that does not fit them. If
chunks end with different scales, all are rescaled to the smallest one: their codes are scaled down and rounded again.
The histories get the amax over all chunks. If every chunk fits its history, the result is byte for byte that of one
cast.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.formats import FORMATS
from kernel_pytorch.ops.fp8_cast.triton_tiles import add_count, encode, encoding
from kernel_pytorch.ops.fp8_swiglu.grad_triton_kernel import prepared
from kernel_pytorch.ops.triton_launch import Launches, Place

__all__ = ["PreparedParts"]

_TILE = (32, 128, 4)
_APART = 16
"""Bytes from the scale of a chunk to that of the next: the alignment that the kernels were compiled for."""


@triton.jit
def decode(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Decode finite codes to float32."""
    bits = code.to(tl.uint32)
    exponent, fraction = (bits & 0x7F) >> MANTISSA, bits & ((1 << MANTISSA) - 1)
    normal = (((exponent + (127 - BIAS)) << 23) | (fraction << (23 - MANTISSA))).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, fraction.to(tl.float32) * (2.0 ** (1 - BIAS - MANTISSA)), normal)
    return magnitude * tl.where(bits >= 0x80, -1.0, 1.0)


@triton.jit
def _agree_on(
    data, inverses, inverse, counts, nexts, history, rows, columns, part_rows, parts, history_length,
    PARTS: tl.constexpr, HISTORY: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``_agree`` for one gradient."""
    part, place = tl.arange(0, PARTS), tl.arange(0, HISTORY)
    own = tl.load(inverses + part * 4, mask=part < parts, other=0.0)
    # Ignore the scale of a chunk of zeros without a history, which is 1.
    amax = tl.load(nexts + part * history_length, mask=part < parts, other=0.0)
    common = tl.max(tl.where(amax > 0.0, own, 0.0), axis=0)
    common = tl.where(common == 0.0, tl.load(inverses), common)
    if tl.program_id(0) == 0:
        tl.store(inverse, common)
        inside = (part < parts)[:, None] & (place < history_length)[None, :]
        entries = tl.load(nexts + part[:, None] * history_length + place[None, :], mask=inside, other=0.0)
        tl.store(history + place, tl.max(entries, axis=0), mask=place < history_length)
    if tl.max(((amax > 0.0) & (own < common)).to(tl.int32), axis=0) > 0:
        across = tl.cdiv(columns, COLUMNS)
        tiles = across * tl.cdiv(rows, ROWS)
        for step in range(tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))):
            tile = tl.program_id(0) + step * tl.num_programs(0)
            i, j = tile // across, tile % across
            before = tl.load(inverses + i * ROWS // part_rows * 4)
            if before < common:
                row, column = i * ROWS + tl.arange(0, ROWS), j * COLUMNS + tl.arange(0, COLUMNS)
                codes = data + row[:, None].to(tl.int64) * columns + column[None, :]
                inside = (row < rows)[:, None] & (column < columns)[None, :]
                code = tl.load(codes, mask=inside, other=0)
                number = (code != NAN) & (code != (NAN | 0x80))
                value = tl.where(number, decode(code, MANTISSA, BIAS), 0.0)
                scaled = value * (before / common)
                again = encode(scaled, number, LARGEST, MANTISSA, BIAS, NAN, FNUZ).to(tl.uint8)
                tl.store(codes, again, mask=inside)
                under = ((value != 0.0) & (tl.abs(scaled) <= HALF_SMALLEST)).to(tl.int32)
                add_count(counts + 1, tl.sum(tl.sum(under, axis=1), axis=0), True)


@triton.jit
def _agree(
    dgate, dup, gate_inverses, up_inverses, dgate_inverse, dup_inverse, gate_counts, up_counts, gate_nexts, up_nexts,
    gate_history, up_history, rows, columns, part_rows, parts, history_length,
    PARTS: tl.constexpr, HISTORY: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """After all chunks: rescale each gradient to one scale, and update its history."""
    _agree_on(
        dgate, gate_inverses, dgate_inverse, gate_counts, gate_nexts, gate_history, rows, columns, part_rows, parts,
        history_length, PARTS, HISTORY, LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, ROWS, COLUMNS,
    )  # fmt: skip
    _agree_on(
        dup, up_inverses, dup_inverse, up_counts, up_nexts, up_history, rows, columns, part_rows, parts,
        history_length, PARTS, HISTORY, LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, ROWS, COLUMNS,
    )  # fmt: skip


_ARGUMENTS = (
    "dgate", "dup", "gate_inverses", "up_inverses", "dgate_inverse", "dup_inverse", "gate_counts", "up_counts",
    "gate_nexts", "up_nexts", "gate_history", "up_history", "rows", "columns", "part_rows", "parts",
    "history_length",
)  # fmt: skip


class PreparedParts:
    """fp8_swiglu_grad in row chunks for matrices of one kind, with histories.

    Returns dgate, dgate_inverse, dup, dup_inverse and h_t.

    Args:
        part_rows: rows of a chunk, a multiple of 512; the last chunk may have fewer.
    """

    def __init__(
        self,
        device: Device,
        shape: tuple[int, int],
        gate_strides: tuple[int, int],
        up_strides: tuple[int, int],
        number_format: str,
        h_format: str,
        with_h: bool,
        length: int,
        power_of_two: bool,
        part_rows: int,
    ) -> None:
        rows, columns = self.shape = shape
        self.length, self.part_rows = length, part_rows
        self.casts = [
            prepared(
                device, shape, (columns, 1), gate_strides, up_strides, number_format, h_format, with_h, length,
                power_of_two, min(part_rows, rows - first),
            )
            for first in range(0, rows, part_rows)
        ]  # fmt: skip
        parts, (height, width, warps) = len(self.casts), _TILE
        constants = {
            "PARTS": triton.next_power_of_2(parts),
            "HISTORY": triton.next_power_of_2(length),
            "ROWS": height,
            "COLUMNS": width,
            "num_warps": warps,
            **encoding(device, FORMATS[number_format]),
        }
        tiles = -(-rows // height) * -(-columns // width)
        self.sizes = (rows, columns, part_rows, parts, length)
        key = (shape, number_format, part_rows, length)
        self.launches = Launches([(_agree, (min(tiles, 4 * device.compute_units),), constants)], _ARGUMENTS, key)

    def __call__(
        self,
        dh_of: Callable[[int, int], torch.Tensor],
        gate: torch.Tensor,
        up: torch.Tensor,
        h_inverse: torch.Tensor | None,
        gate_counts: Place,
        up_counts: Place,
        gate_history: Place,
        up_history: Place,
    ) -> tuple[torch.Tensor, ...]:
        """``dh_of(first, last)`` returns the rows of dh from first to before last, contiguous."""
        kind, parts = self.casts[0], len(self.casts)
        dgate, dup = gate.new_empty(self.shape, dtype=kind.dtype), gate.new_empty(self.shape, dtype=kind.dtype)
        h_t = gate.new_empty(kind.h_shape, dtype=kind.h_dtype)
        inverses = gate.new_empty((2, parts, _APART // 4), dtype=torch.float32)
        nexts = gate.new_empty((2, parts, self.length), dtype=torch.float32)
        dgate_inverse, dup_inverse = (gate.new_empty((), dtype=torch.float32) for _ in range(2))
        counts, histories = (gate_counts, up_counts), (gate_history, up_history)

        def both(tensor: torch.Tensor, part: int = 0) -> tuple[Place, Place]:
            """The places of one chunk, for dgate and for dup."""
            second, row = tensor[0].numel() * 4, tensor.shape[-1] * 4
            return Place(tensor, torch.float32, part * row), Place(tensor, torch.float32, second + part * row)

        for number, cast in enumerate(self.casts):
            first = number * self.part_rows
            dh = dh_of(first, first + cast.sizes[0])
            cast.part(
                first, (dh, gate, up), h_inverse, (dgate, dgate, dup, dup, h_t), both(inverses, number), counts,
                histories, both(nexts, number),
            )  # fmt: skip
            del dh
        places = (
            Place(dgate, torch.uint8), Place(dup, torch.uint8), *both(inverses), Place(dgate_inverse, torch.float32),
            Place(dup_inverse, torch.float32), *counts, *both(nexts), *histories,
        )  # fmt: skip
        addresses = tuple(place.data_ptr() for place in places)
        self.launches(
            gate.get_device(),
            tuple(address % 16 for address in addresses),
            (*addresses, *self.sizes),
            lambda: (*places, *self.sizes),
        )
        return dgate, dgate_inverse, dup, dup_inverse, h_t
