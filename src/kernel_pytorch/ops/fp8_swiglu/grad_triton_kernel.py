"""fp8_swiglu_grad in Triton, one source for NVIDIA and AMD.

Memory-bound: dh, gate and up are read once, where histories give the scales, and one tile of them becomes tiles of
all five 8-bit matrices; what is transposed is turned in shared memory. Without histories they are read twice, first
for the largest magnitudes of the gradients, which are never in memory. A tile is held in quarters, as ``fp8_cast``
explains.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.ops.fp8_cast.triton_tiles import (
    counted,
    emit,
    encode_words,
    encoding,
    hardware_encodes,
    is_finite,
    load_quarter,
    load_tile,
    magnitudes,
    nan_unless,
    offer,
    reciprocal,
    store_turned,
)
from kernel_pytorch.ops.fp8_swiglu.triton_kernel import (
    count_outgrown,
    scale_to_try,
    settle,
    sigmoids,
    without_numbers,
)
from kernel_pytorch.ops.triton_launch import Place, launch
from kernel_pytorch.precision.formats import FORMATS

_TILE = (32, 64)  # rows, columns; the fastest of those tried on an H200
_WARPS = 4
_AMAX_TILE = (16, 256)
_TILES_PER_PROGRAM = 4  # of the first reading: fewer programs compete for one number


@triton.jit
def _gradients(upstream, gates, ups, HARDWARE: tl.constexpr):
    """dgate, dup and h."""
    sigmoid, complement = sigmoids(gates, HARDWARE)
    silu = gates * sigmoid
    return (upstream * ups) * (sigmoid * (1.0 + gates * complement)), upstream * silu, silu * ups


@triton.jit
def _quarter_gradients(i, j, k, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, arguments):
    """dgate, dup and h of a quarter of tile (i, j)."""
    _, matrices = arguments
    dh, gate, up, dh_row, dh_column, gate_row, gate_column, up_row, up_column, HARDWARE = matrices
    upstream = load_quarter(dh, i, j, k, rows, columns, dh_row, dh_column, ROWS, COLUMNS)
    gates = load_quarter(gate, i, j, k, rows, columns, gate_row, gate_column, ROWS, COLUMNS)
    ups = load_quarter(up, i, j, k, rows, columns, up_row, up_column, ROWS, COLUMNS)
    return _gradients(upstream, gates, ups, HARDWARE)


@triton.jit
def _quarter_of_dgate(i, j, k, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, arguments):
    return _quarter_gradients(i, j, k, rows, columns, ROWS, COLUMNS, arguments)[0], arguments[0]


@triton.jit
def _quarter_of_dup(i, j, k, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, arguments):
    return _quarter_gradients(i, j, k, rows, columns, ROWS, COLUMNS, arguments)[1], arguments[0]


@triton.jit
def _amax(
    dh, gate, up, amax, rows, columns, dh_row, dh_column, gate_row, gate_column, up_row, up_column,
    HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    i, j = (tl.program_id(0) // across) * TILES, tl.program_id(0) % across
    largest_dgate = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    largest_dup = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(TILES):
        upstream = load_tile(dh, i, j, rows, columns, dh_row, dh_column, ROWS, COLUMNS)
        gates = load_tile(gate, i, j, rows, columns, gate_row, gate_column, ROWS, COLUMNS)
        ups = load_tile(up, i, j, rows, columns, up_row, up_column, ROWS, COLUMNS)
        dgate, dup, _ = _gradients(upstream, gates, ups, HARDWARE)
        largest_dgate = tl.maximum(largest_dgate, magnitudes(dgate))
        largest_dup = tl.maximum(largest_dup, magnitudes(dup))
        i += 1
    offer(amax, tl.max(largest_dgate))
    offer(amax + 1, tl.max(largest_dup))


@triton.jit
def _cast(
    dh, gate, up, h_inverse, dgate_data, dgate_t, dgate_inverse, dup_data, dup_t, dup_inverse, h_t,
    amax, counts, gate_history, up_history,
    rows, columns, dh_row, dh_column, gate_row, gate_column, up_row, up_column, history_length,
    WITH_H: tl.constexpr, WORDS: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
    H_LARGEST: tl.constexpr, H_MANTISSA: tl.constexpr, H_BIAS: tl.constexpr, H_NAN: tl.constexpr,
    H_FNUZ: tl.constexpr, H_HARDWARE: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of all matrices; with a HISTORY by its scales, finding the amaxes."""
    across = tl.cdiv(columns, COLUMNS)
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    matrices = (dh, gate, up, dh_row, dh_column, gate_row, gate_column, up_row, up_column, HARDWARE)
    # Loaded before the scales are known: neither waits for the other.
    g_0, u_0, h_0 = _quarter_gradients(i, j, 0, rows, columns, ROWS, COLUMNS, (1.0, matrices))
    g_1, u_1, h_1 = _quarter_gradients(i, j, 1, rows, columns, ROWS, COLUMNS, (1.0, matrices))
    g_2, u_2, h_2 = _quarter_gradients(i, j, 2, rows, columns, ROWS, COLUMNS, (1.0, matrices))
    g_3, u_3, h_3 = _quarter_gradients(i, j, 3, rows, columns, ROWS, COLUMNS, (1.0, matrices))
    dgate_scale = scale_to_try(amax, gate_history, history_length, LARGEST, POWER_OF_TWO, HISTORY)
    dup_scale = scale_to_try(amax + 1, up_history, history_length, LARGEST, POWER_OF_TWO, HISTORY)
    h_scale = reciprocal(tl.load(h_inverse)) if WITH_H else 1.0
    if WITH_H:
        # The forward has counted what is lost here; an h that is not finite must be NaN again.
        words = encode_words(
            nan_unless(is_finite(h_0), h_0 * h_scale), nan_unless(is_finite(h_1), h_1 * h_scale),
            nan_unless(is_finite(h_2), h_2 * h_scale), nan_unless(is_finite(h_3), h_3 * h_scale),
            H_LARGEST, H_MANTISSA, H_BIAS, H_NAN, H_FNUZ, H_HARDWARE,
        )  # fmt: skip
        store_turned(h_t, words, i, j, rows, columns, WORDS, ROWS, COLUMNS)
    # All is cast before anything is looked at again, so that its numbers need not be kept.
    dgate_found = emit(
        g_0, g_1, g_2, g_3, dgate_scale, dgate_scale, dgate_scale, dgate_scale, dgate_data, dgate_t,
        i, j, rows, columns, True, True, WORDS, LARGEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip
    dup_found = emit(
        u_0, u_1, u_2, u_3, dup_scale, dup_scale, dup_scale, dup_scale, dup_data, dup_t,
        i, j, rows, columns, True, True, WORDS, LARGEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip
    dgate_seen = counted(
        dgate_found, _quarter_of_dgate, (dgate_scale, matrices), dgate_data, dgate_t, counts, i, j, rows, columns,
        True, True, False, HALF_SMALLEST, NAN, ROWS, COLUMNS,
    )  # fmt: skip
    dup_seen = counted(
        dup_found, _quarter_of_dup, (dup_scale, matrices), dup_data, dup_t, counts + 3, i, j, rows, columns,
        True, True, False, HALF_SMALLEST, NAN, ROWS, COLUMNS,
    )  # fmt: skip
    if HISTORY > 0:
        offer(amax, dgate_seen)
        offer(amax + 1, dup_seen)
    elif tl.program_id(0) == 0:
        tl.store(dgate_inverse, reciprocal(dgate_scale))
        tl.store(dup_inverse, reciprocal(dup_scale))


@triton.jit
def _again(
    quarter: tl.constexpr, arguments, data, data_t, before, counts, i, j, rows, columns,
    WORDS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of one gradient once more, with a scale of its own."""
    v_0, _ = quarter(i, j, 0, rows, columns, ROWS, COLUMNS, arguments)
    v_1, _ = quarter(i, j, 1, rows, columns, ROWS, COLUMNS, arguments)
    v_2, _ = quarter(i, j, 2, rows, columns, ROWS, COLUMNS, arguments)
    v_3, _ = quarter(i, j, 3, rows, columns, ROWS, COLUMNS, arguments)
    scale = arguments[0]
    found = emit(
        v_0, v_1, v_2, v_3, scale, scale, scale, scale, data, data_t, i, j, rows, columns,
        True, True, WORDS, LARGEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip
    counted(
        found, quarter, arguments, data, data_t, counts, i, j, rows, columns,
        True, True, False, HALF_SMALLEST, NAN, ROWS, COLUMNS,
    )  # fmt: skip
    for k in range(4):
        values, _ = quarter(i, j, k, rows, columns, ROWS, COLUMNS, arguments)
        count_outgrown(counts, values, before, LARGEST, POWER_OF_TWO)


@triton.jit
def _settle(
    dh, gate, up, dgate_data, dgate_t, dgate_inverse, dup_data, dup_t, dup_inverse,
    amax, counts, final_counts, gate_history, up_history, gate_next_history, up_next_history,
    rows, columns, dh_row, dh_column, gate_row, gate_column, up_row, up_column, history_length,
    WORDS: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """After a cast by the histories' scales: cast again what has numbers that were too large for its own."""
    dgate_scale, dgate_again, dgate_before = settle(
        amax, dgate_inverse, counts, final_counts, gate_history, gate_next_history, history_length,
        LARGEST, POWER_OF_TWO, HISTORY,
    )  # fmt: skip
    dup_scale, dup_again, dup_before = settle(
        amax + 1, dup_inverse, counts + 3, final_counts + 3, up_history, up_next_history, history_length,
        LARGEST, POWER_OF_TWO, HISTORY,
    )  # fmt: skip
    if dgate_again | dup_again:
        matrices = (dh, gate, up, dh_row, dh_column, gate_row, gate_column, up_row, up_column, HARDWARE)
        across = tl.cdiv(columns, COLUMNS)
        tiles = across * tl.cdiv(rows, ROWS)
        for step in range(tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))):
            tile = tl.program_id(0) + step * tl.num_programs(0)
            i, j = tile // across, tile % across
            if dgate_again:
                _again(
                    _quarter_of_dgate, (dgate_scale, matrices), dgate_data, dgate_t, dgate_before, final_counts,
                    i, j, rows, columns, WORDS, POWER_OF_TWO,
                    LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
                )  # fmt: skip
            if dup_again:
                _again(
                    _quarter_of_dup, (dup_scale, matrices), dup_data, dup_t, dup_before, final_counts + 3,
                    i, j, rows, columns, WORDS, POWER_OF_TWO,
                    LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
                )  # fmt: skip


def forward(
    device: Device,
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    number_format: str,
    h_format: str,
    h_inverse: torch.Tensor | None,
    gate_history: torch.Tensor | None,
    up_history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    chosen, chosen_h = FORMATS[number_format], FORMATS[h_format]
    rows, columns = gate.shape
    dgate, dup = (gate.new_empty((rows, columns), dtype=chosen.dtype) for _ in range(2))
    dgate_t, dup_t = (gate.new_empty((columns, rows), dtype=chosen.dtype) for _ in range(2))
    h_t = gate.new_empty((0, 0) if h_inverse is None else (columns, rows), dtype=chosen_h.dtype)
    dgate_inverse, dup_inverse = (gate.new_empty((), dtype=torch.float32) for _ in range(2))
    length = 0 if gate_history is None else gate_history.shape[0]
    gate_next, up_next = (gate.new_empty(length, dtype=torch.float32) for _ in range(2))
    shared = gate.new_zeros((5, 3), dtype=torch.int64)  # counts, counts of a first try, amaxes
    counts, tried, amax = shared[:2], Place(shared, torch.int64, 48), Place(shared, torch.int32, 96)
    outputs = (
        dgate, dgate_t, dgate_inverse, dup, dup_t, dup_inverse, h_t, counts, gate_next, up_next
    )  # fmt: skip
    if gate.numel() == 0:
        without_numbers(gate_history, gate_next, dgate_inverse, chosen, power_of_two)
        without_numbers(up_history, up_next, dup_inverse, chosen, power_of_two)
        return outputs
    strides = (*dh.stride(), *gate.stride(), *up.stride())
    aligned = tuple(matrix.data_ptr() % 16 for matrix in (dh, gate, up))
    of_call = (number_format, h_format, h_inverse is None, length, power_of_two)
    key = (gate.dtype, gate.device, gate.shape, strides, aligned, of_call)
    if gate_history is None or up_history is None:
        height, width = _AMAX_TILE
        grid = (-(-rows // (height * _TILES_PER_PROGRAM)) * -(-columns // width),)
        launch(
            _amax,
            grid,
            key,
            dh,
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
    words = rows % 4 == 0
    turned = [Place(copy, torch.int32 if words else torch.uint8) for copy in (dgate_t, dup_t, h_t)]
    plain = [Place(matrix, torch.uint8) for matrix in (dgate, dup)]
    constants = {
        "WORDS": words,
        "POWER_OF_TWO": power_of_two,
        "HISTORY": triton.next_power_of_2(length) if length else 0,
        "ROWS": height,
        "COLUMNS": width,
        "num_warps": _WARPS,
        **encoding(device, chosen),
    }
    of_h = {f"H_{name}": value for name, value in encoding(device, chosen_h).items() if name != "HALF_SMALLEST"}
    down, across = -(-rows // height), -(-columns // width)
    launch(
        _cast,
        (down * across,),
        key,
        dh,
        gate,
        up,
        dgate_inverse if h_inverse is None else h_inverse,
        plain[0],
        turned[0],
        dgate_inverse,
        plain[1],
        turned[1],
        dup_inverse,
        turned[2],
        amax,
        tried if length else counts,
        dgate_inverse if gate_history is None else gate_history,
        dup_inverse if up_history is None else up_history,
        rows,
        columns,
        *strides,
        length,
        WITH_H=h_inverse is not None,
        **of_h,
        **constants,
    )
    if length:
        launch(
            _settle,
            (min(down * across, 4 * device.compute_units),),
            key,
            dh,
            gate,
            up,
            plain[0],
            turned[0],
            dgate_inverse,
            plain[1],
            turned[1],
            dup_inverse,
            amax,
            tried,
            counts,
            gate_history,
            up_history,
            gate_next,
            up_next,
            rows,
            columns,
            *strides,
            length,
            **constants,
        )
    return outputs
