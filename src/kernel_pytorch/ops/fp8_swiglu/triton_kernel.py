"""fp8_swiglu in Triton, one source for NVIDIA and AMD.

Memory-bound: gate and up are read once and 8 bits written, where a history gives the scale; without one they are
read twice, first for the largest magnitude of h, which is never in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.ops.fp8_cast.torch_kernel import scale_from_amax as scale_of
from kernel_pytorch.ops.fp8_cast.triton_tiles import (
    add_count,
    counted,
    emit,
    encoding,
    hardware_encodes,
    largest_remembered,
    load_quarter,
    load_tile,
    magnitudes,
    offer,
    reciprocal,
    remember,
    scale_from_amax,
)
from kernel_pytorch.ops.triton_launch import Place, launch
from kernel_pytorch.precision.formats import FORMATS, Format

_TILE = (16, 256)  # rows, columns; the fastest of those tried on an H200
_WARPS = 4
_AMAX_TILE = (16, 256)
_TILES_PER_PROGRAM = 4  # of the first reading: fewer programs compete for one number


# Shared with the gradient.


@triton.jit
def sigmoids(gate, HARDWARE: tl.constexpr):
    """s = 1 / (1 + exp(-gate)) and 1 - s. exp sees no positive number and 1 - s is no difference.

    exp is a square: the GPU's instruction flushes subnormal numbers to zero, and the root is none.
    """
    halved = tl.abs(gate) * (-0.5 * 1.4426950408889634)
    if HARDWARE:
        root = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [halved], tl.float32, True, 1)
        small = root * root
        larger = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + small], tl.float32, True, 1)
    else:
        root = tl.exp2(halved)
        small = root * root
        larger = 1.0 / (1.0 + small)
    smaller = small * larger
    positive = gate >= 0.0
    return tl.where(positive, larger, smaller), tl.where(positive, smaller, larger)


@triton.jit
def _hidden(gates, ups, HARDWARE: tl.constexpr):
    sigmoid, _ = sigmoids(gates, HARDWARE)
    return gates * sigmoid * ups


@triton.jit
def scale_to_try(amax, history, length, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr):
    """The scale from a HISTORY, which may not be enough; without one, that from the amax."""
    if HISTORY > 0:
        scale = scale_from_amax(largest_remembered(history, length, HISTORY), LARGEST, POWER_OF_TWO) * 0.5
    else:
        scale = scale_from_amax(tl.load(amax).to(tl.float32, bitcast=True), LARGEST, POWER_OF_TWO)
    return scale


@triton.jit
def count_outgrown(counts, values, before, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Count the numbers of a tile that the scale of a history is too large for."""
    tried = scale_from_amax(before, LARGEST, POWER_OF_TWO) * 0.5
    beyond = tl.sum((magnitudes(values) * tried > LARGEST).to(tl.int32))
    add_count(counts, tl.where(before > 0.0, beyond, 0), False)


@triton.jit
def settle(
    amax, inverse, counts, final_counts, history, next_history, length,
    LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """After a cast by a history's scale: the final scale, whether all must be cast again with it, the history's amax.

    The first program writes down what is known by then.
    """
    largest = tl.load(amax).to(tl.float32, bitcast=True)
    before = largest_remembered(history, length, HISTORY)
    scale = scale_from_amax(before, LARGEST, POWER_OF_TWO) * 0.5
    again = (before == 0.0) | (largest * scale > LARGEST)
    scale = tl.where(again, scale_from_amax(largest, LARGEST, POWER_OF_TWO), scale)
    if tl.program_id(0) == 0:
        tl.store(inverse, reciprocal(scale))
        remember(history, next_history, length, largest, HISTORY)
        if not again:
            add_count(final_counts + 1, tl.load(counts + 1), False)
            add_count(final_counts + 2, tl.load(counts + 2), False)
    return scale, again, before


# The kernels.


@triton.jit
def _amax(
    gate, up, amax, rows, columns, gate_row, gate_column, up_row, up_column,
    HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    i, j = (tl.program_id(0) // across) * TILES, tl.program_id(0) % across
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
    """A quarter of tile (i, j) of h, with its scale."""
    scale, matrices = arguments
    gate, up, gate_row, gate_column, up_row, up_column, HARDWARE = matrices
    gates = load_quarter(gate, i, j, k, rows, columns, gate_row, gate_column, ROWS, COLUMNS)
    ups = load_quarter(up, i, j, k, rows, columns, up_row, up_column, ROWS, COLUMNS)
    return _hidden(gates, ups, HARDWARE), scale


@triton.jit
def _hidden_quarters(i, j, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, arguments):
    """All of tile (i, j) of h."""
    h_0, _ = _hidden_quarter(i, j, 0, rows, columns, ROWS, COLUMNS, arguments)
    h_1, _ = _hidden_quarter(i, j, 1, rows, columns, ROWS, COLUMNS, arguments)
    h_2, _ = _hidden_quarter(i, j, 2, rows, columns, ROWS, COLUMNS, arguments)
    h_3, _ = _hidden_quarter(i, j, 3, rows, columns, ROWS, COLUMNS, arguments)
    return h_0, h_1, h_2, h_3


@triton.jit
def _cast_tile(
    h_0, h_1, h_2, h_3, arguments, data, counts, i, j, rows, columns,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Tile (i, j) of h in 8 bits; the largest of its finite magnitudes."""
    scale = arguments[0]
    found = emit(
        h_0, h_1, h_2, h_3, scale, scale, scale, scale, data, data, i, j, rows, columns,
        True, False, False, LARGEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip
    return counted(
        found, _hidden_quarter, arguments, data, data, counts, i, j, rows, columns,
        True, False, False, HALF_SMALLEST, NAN, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def _cast(
    gate, up, data, inverse, amax, final_amax, counts, history,
    rows, columns, gate_row, gate_column, up_row, up_column, history_length,
    POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile; with a HISTORY by its scale, leaving behind whether that was enough."""
    across = tl.cdiv(columns, COLUMNS)
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    matrices = (gate, up, gate_row, gate_column, up_row, up_column, HARDWARE)
    # Loaded before the scale is known: neither waits for the other.
    h_0, h_1, h_2, h_3 = _hidden_quarters(i, j, rows, columns, ROWS, COLUMNS, (1.0, matrices))
    scale = scale_to_try(amax, history, history_length, LARGEST, POWER_OF_TWO, HISTORY)
    largest = _cast_tile(
        h_0, h_1, h_2, h_3, (scale, matrices), data, counts, i, j, rows, columns,
        LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip
    if HISTORY > 0:
        offer(amax, largest)
    elif tl.program_id(0) == 0:
        tl.store(inverse, reciprocal(scale))
        tl.store(final_amax, tl.load(amax).to(tl.float32, bitcast=True))


@triton.jit
def _settle(
    gate, up, data, inverse, amax, final_amax, counts, final_counts, history, next_history,
    rows, columns, gate_row, gate_column, up_row, up_column, history_length,
    POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """After a cast by the history's scale: cast all of it again where some numbers were too large for it."""
    scale, again, before = settle(
        amax, inverse, counts, final_counts, history, next_history, history_length, LARGEST, POWER_OF_TWO, HISTORY
    )
    if tl.program_id(0) == 0:
        tl.store(final_amax, tl.load(amax).to(tl.float32, bitcast=True))
    if again:
        arguments = (scale, (gate, up, gate_row, gate_column, up_row, up_column, HARDWARE))
        across = tl.cdiv(columns, COLUMNS)
        tiles = across * tl.cdiv(rows, ROWS)
        for step in range(tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))):
            tile = tl.program_id(0) + step * tl.num_programs(0)
            i, j = tile // across, tile % across
            h_0, h_1, h_2, h_3 = _hidden_quarters(i, j, rows, columns, ROWS, COLUMNS, arguments)
            _cast_tile(
                h_0, h_1, h_2, h_3, arguments, data, final_counts, i, j, rows, columns,
                LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
            )  # fmt: skip
            for k in range(4):
                values, _ = _hidden_quarter(i, j, k, rows, columns, ROWS, COLUMNS, arguments)
                count_outgrown(final_counts, values, before, LARGEST, POWER_OF_TWO)


# Launching.


def without_numbers(
    history: torch.Tensor | None,
    next_history: torch.Tensor,
    inverse: torch.Tensor,
    chosen: Format,
    power_of_two: bool,
) -> None:
    """What the cast of an empty matrix says: the history's scale or 1, and 0 in front of the history."""
    inverse.fill_(1.0)
    if history is not None:
        before = torch.where(history.isfinite(), history, 0.0).amax().clamp_min(0.0)
        scale = scale_of(before, chosen.largest, power_of_two) / 2
        inverse.copy_(torch.where(before > 0, scale, 1.0).double().reciprocal())
        next_history.copy_(torch.nn.functional.pad(history[:-1], (1, 0)))


def forward(
    device: Device,
    gate: torch.Tensor,
    up: torch.Tensor,
    number_format: str,
    history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    chosen = FORMATS[number_format]
    rows, columns = gate.shape
    matrix = gate.new_empty((rows, columns), dtype=chosen.dtype)
    inverse, final_amax = (gate.new_empty((), dtype=torch.float32) for _ in range(2))
    next_history = gate.new_empty(0 if history is None else history.shape[0], dtype=torch.float32)
    counts = gate.new_zeros(7, dtype=torch.int64)  # and those of a first try, and the amax
    data, tried, amax = Place(matrix, torch.uint8), Place(counts, torch.int64, 24), Place(counts, torch.int32, 48)
    outputs = (matrix, inverse, final_amax, counts[:3], next_history)
    if gate.numel() == 0:
        final_amax.zero_()
        without_numbers(history, next_history, inverse, chosen, power_of_two)
        return outputs
    strides = (*gate.stride(), *up.stride())
    aligned = (gate.data_ptr() % 16, up.data_ptr() % 16)
    length = next_history.shape[0]
    key = (gate.dtype, gate.device, gate.shape, strides, aligned, number_format, power_of_two, length)
    if history is None:
        height, width = _AMAX_TILE
        grid = (-(-rows // (height * _TILES_PER_PROGRAM)) * -(-columns // width),)
        launch(
            _amax,
            grid,
            key,
            gate,
            up,
            amax,
            rows,
            columns,
            *strides,
            HARDWARE=hardware_encodes(device, chosen),
            ROWS=height,
            COLUMNS=width,
            TILES=_TILES_PER_PROGRAM,
            num_warps=8,
        )
    height, width = _TILE
    constants = {
        "POWER_OF_TWO": power_of_two,
        "HISTORY": 0 if history is None else triton.next_power_of_2(history.shape[0]),
        "ROWS": height,
        "COLUMNS": width,
        "num_warps": _WARPS,
        **encoding(device, chosen),
    }
    tiles = -(-rows // height) * -(-columns // width)
    launch(
        _cast,
        (tiles,),
        key,
        gate,
        up,
        data,
        inverse,
        amax,
        final_amax,
        counts if history is None else tried,
        inverse if history is None else history,
        rows,
        columns,
        *strides,
        next_history.shape[0],
        **constants,
    )
    if history is not None:
        launch(
            _settle,
            (min(tiles, 4 * device.compute_units),),
            key,
            gate,
            up,
            data,
            inverse,
            amax,
            final_amax,
            tried,
            counts,
            history,
            next_history,
            rows,
            columns,
            *strides,
            history.shape[0],
            **constants,
        )
    return outputs
