"""fp8_swiglu in Triton, one source for NVIDIA and AMD.

Memory-bound: with a history gate and up are read once and FP8 data is written. Without one they are read twice, first
for the amax of h, which is never written in high precision.
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
from kernel_pytorch.ops.fp8_cast.triton_tiles import (
    SCRATCH,
    SCRATCH_LARGEST,
    SCRATCH_TRIED,
    add_count,
    add_numbers,
    cast_again,
    cast_tile,
    encoding,
    hardware_encodes,
    largest_remembered,
    load_quarter,
    load_tile,
    magnitudes,
    needs_own_scale,
    offer,
    quarters,
    reciprocal,
    remember,
    scale_from_amax,
    tile_of_program,
)
from kernel_pytorch.ops.fp8_swiglu import torch_kernel
from kernel_pytorch.ops.triton_launch import Launches, Place, empty, zeros

# Rows, columns and warps of a tile: the fastest of a sweep on an H200.
_TILE = (32, 128, 4)
_AMAX_TILE = (16, 256, 8, 4)  # and the number of tiles of a program, one below the other: fewer atomics


# Shared with fp8_swiglu_grad.


@triton.jit
def sigmoid(gate, HARDWARE: tl.constexpr):
    """1 / (1 + exp(-gate)); 0 where exp is infinite, and with HARDWARE instructions where it would be subnormal."""
    exponent = gate * -1.4426950408889634
    if HARDWARE:
        power = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], tl.float32, True, 1)
        share = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], tl.float32, True, 1)
    else:
        share = 1.0 / (1.0 + tl.exp2(exponent))
    return share


@triton.jit
def _hidden(gates, ups, HARDWARE: tl.constexpr):
    return gates * sigmoid(gates, HARDWARE) * ups


@triton.jit
def scale_to_try(
    amax, inverse, own_counts, history, length, rows, columns,
    LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """The delayed scale of a HISTORY, which may not fit; without a history, the scale of the amax.

    The first program stores the results that are known by then.
    """
    if HISTORY > 0:
        before = largest_remembered(history, length, HISTORY)
        scale = scale_from_amax(before, LARGEST, POWER_OF_TWO) * 0.5
        if tl.program_id(0) == 0:
            tl.store(amax + 1, before.to(tl.int32, bitcast=True))
    else:
        scale = scale_from_amax(tl.load(amax).to(tl.float32, bitcast=True), LARGEST, POWER_OF_TWO)
        add_numbers(own_counts, rows, columns, True)
        if tl.program_id(0) == 0:
            tl.store(inverse, reciprocal(scale))
    return scale


@triton.jit
def settle(
    amax, inverse, tried, counts, history, next_history, length, rows, columns,
    LARGEST: tl.constexpr, BIAS: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """After a cast with a delayed scale: the final scale, whether to requantize with it, and the delayed scale if the
    amax exceeds it, else 0.

    The first program stores the results that are known by then, and the history for the next cast.
    """
    add_numbers(counts, rows, columns, True)
    largest = tl.load(amax).to(tl.float32, bitcast=True)
    before = tl.load(amax + 1).to(tl.float32, bitcast=True)  # the history itself may have been updated by now
    remembered = scale_from_amax(before, LARGEST, POWER_OF_TWO) * 0.5
    again, exceeded = needs_own_scale(before, largest, remembered, LARGEST, BIAS)
    scale = tl.where(again, scale_from_amax(largest, LARGEST, POWER_OF_TWO), remembered)
    if tl.program_id(0) == 0:
        tl.store(inverse, reciprocal(scale))
        remember(history, next_history, length, largest, HISTORY)
        if not again:
            add_count(counts + 1, tl.load(tried + 1), True)
            add_count(counts + 2, tl.load(tried + 2), True)
    return scale, again, exceeded


# The kernels.


@triton.jit
def _amax(
    gate, up, amax, rows, columns, gate_row, gate_column, up_row, up_column,
    HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    i, j = tile_of_program(tl.cdiv(columns, COLUMNS), True)
    i *= TILES
    largest = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(TILES):
        gates = load_tile(gate, i, j, rows, columns, gate_row, gate_column, ROWS, COLUMNS)
        ups = load_tile(up, i, j, rows, columns, up_row, up_column, ROWS, COLUMNS)
        h = _hidden(gates, ups, HARDWARE)
        largest = tl.maximum(largest, magnitudes(h))
        i += 1
    offer(amax, tl.max(largest))


@triton.jit
def _hidden_quarter(i, j, k, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, arguments):
    """Compute a quarter of tile (i, j) of h, with its scale."""
    scale, source = arguments
    gate, up, gate_row, gate_column, up_row, up_column, HARDWARE = source
    gates = load_quarter(gate, i, j, k, rows, columns, gate_row, gate_column, ROWS, COLUMNS)
    ups = load_quarter(up, i, j, k, rows, columns, up_row, up_column, ROWS, COLUMNS)
    return _hidden(gates, ups, HARDWARE), scale


@triton.jit
def _cast(
    gate, up, data, inverse, amax, final_amax, own_counts, history,
    rows, columns, gate_row, gate_column, up_row, up_column, history_length,
    POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantize one tile; with a HISTORY by the delayed scale, storing the amax for ``_settle``."""
    i, j = tile_of_program(tl.cdiv(columns, COLUMNS), HISTORY > 0)
    source = (gate, up, gate_row, gate_column, up_row, up_column, HARDWARE)
    h_0, h_1, h_2, h_3 = quarters(_hidden_quarter, i, j, rows, columns, ROWS, COLUMNS, source)
    scale = scale_to_try(
        amax, inverse, own_counts, history, history_length, rows, columns, LARGEST, POWER_OF_TWO, HISTORY
    )
    largest = cast_tile(
        h_0, h_1, h_2, h_3, scale, _hidden_quarter, source, data, data, own_counts, i, j, rows, columns,
        False, False, HISTORY == 0, LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip
    if HISTORY > 0:
        offer(amax, largest)
    elif tl.program_id(0) == 0:
        tl.store(final_amax, tl.load(amax).to(tl.float32, bitcast=True))


@triton.jit
def _settle(
    gate, up, data, inverse, amax, final_amax, tried, counts, history,
    rows, columns, gate_row, gate_column, up_row, up_column, history_length,
    POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """After a cast with the delayed scale: requantize all of it if the amax does not fit that scale."""
    scale, again, exceeded = settle(
        amax, inverse, tried, counts, history, history, history_length, rows, columns,
        LARGEST, BIAS, POWER_OF_TWO, HISTORY,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(final_amax, tl.load(amax).to(tl.float32, bitcast=True))
    if again:
        source = (gate, up, gate_row, gate_column, up_row, up_column, HARDWARE)
        across = tl.cdiv(columns, COLUMNS)
        tiles = across * tl.cdiv(rows, ROWS)
        for step in range(tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))):
            tile = tl.program_id(0) + step * tl.num_programs(0)
            cast_again(
                _hidden_quarter, source, scale, exceeded, data, data, counts, tile // across, tile % across,
                rows, columns, False, False, True,
                LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
            )  # fmt: skip


# Launching.

# The arguments of the kernels, in the order of PreparedSwiGLU.__call__. Counts under a delayed scale go to a buffer
# of their own, since a requantization discards them.
_ARGUMENTS = (
    "gate", "up", "data", "inverse", "amax", "final_amax", "tried", "counts", "own_counts", "history",
    "rows", "columns", "gate_row", "gate_column", "up_row", "up_column", "history_length",
)  # fmt: skip


def forward(
    device: Device,
    gate: torch.Tensor,
    up: torch.Tensor,
    number_format: str,
    history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    if gate.numel() == 0:
        return torch_kernel.forward(device, gate, up, number_format, history, power_of_two)
    counts = gate.new_zeros((2, 4), dtype=torch.int64)
    amax = gate.new_zeros((), dtype=torch.float32)
    next_history = amax.new_empty(0) if history is None else history.clone()
    cast = prepared(device, gate.shape, gate.stride(), up.stride(), number_format, len(next_history), power_of_two)
    remembered = None if history is None else Place(next_history, torch.float32)
    data, inverse = cast(gate, up, Place(counts, torch.int64), remembered, Place(amax, torch.float32))
    return data, inverse, amax, counts[0, :3], next_history


class PreparedSwiGLU:
    """fp8_swiglu for matrices of one kind, see ``fp8_cast``'s ``PreparedCast``; returns data and inverse."""

    def __init__(
        self,
        device: Device,
        shape: tuple[int, int],
        gate_strides: tuple[int, int],
        up_strides: tuple[int, int],
        number_format: str,
        length: int,
        power_of_two: bool,
    ) -> None:
        rows, columns = self.shape = shape
        chosen = FORMATS[number_format]
        self.dtype, self.length = chosen.dtype, length
        self.sizes = (rows, columns, *gate_strides, *up_strides, length)
        kernels: list[tuple[Any, tuple[int], dict[str, Any]]] = []
        if length == 0:
            height, width, warps, below = _AMAX_TILE
            grid = -(-rows // (height * below)) * -(-columns // width)
            tile = {"ROWS": height, "COLUMNS": width, "TILES": below, "num_warps": warps}
            kernels.append((_amax, (grid,), {"HARDWARE": hardware_encodes(device, chosen), **tile}))
        height, width, warps = _TILE
        constants = {
            "POWER_OF_TWO": power_of_two,
            "HISTORY": triton.next_power_of_2(length) if length else 0,
            "ROWS": height,
            "COLUMNS": width,
            "num_warps": warps,
            **encoding(device, chosen),
        }
        tiles = -(-rows // height) * -(-columns // width)
        kernels.append((_cast, (tiles,), constants))
        if length:
            kernels.append((_settle, (min(tiles, 4 * device.compute_units),), constants))
        key = (shape, gate_strides, up_strides, number_format, length, power_of_two)
        self.launches = Launches(kernels, _ARGUMENTS, key)

    def __call__(
        self, gate: torch.Tensor, up: torch.Tensor, counts: Place, history: Place | None, amax: Place | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        data = empty(gate, self.shape, self.dtype)
        inverse = empty(gate, (), torch.float32)
        shared = zeros(gate, SCRATCH)
        of_gate, of_up, to_counts, found = gate.data_ptr(), up.data_ptr(), counts.data_ptr(), shared.data_ptr()
        scale = inverse.data_ptr()
        remembered = scale if history is None else history.data_ptr()
        largest = found + SCRATCH_LARGEST if amax is None else amax.data_ptr()
        tried = found + SCRATCH_TRIED

        def typed() -> tuple[Any, ...]:
            first_try = shared.at(SCRATCH_TRIED, torch.int64)
            return (
                gate, up, Place(data, torch.uint8), inverse, shared,
                shared.at(SCRATCH_LARGEST, torch.float32) if amax is None else amax,
                first_try, counts, first_try if self.length else counts, inverse if history is None else history,
                *self.sizes,
            )  # fmt: skip

        self.launches(
            gate.get_device(),
            (gate.dtype, of_gate % 16, of_up % 16, to_counts % 16, remembered % 16, largest % 16),
            (
                of_gate, of_up, data.data_ptr(), scale, found, largest, tried, to_counts,
                tried if self.length else to_counts, remembered, *self.sizes,
            ),
            typed,
        )  # fmt: skip
        return data, inverse


prepared = lru_cache(maxsize=4096)(PreparedSwiGLU)
