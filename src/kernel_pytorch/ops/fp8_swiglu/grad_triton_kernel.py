"""fp8_swiglu_grad in Triton, one source for NVIDIA and AMD.

Memory-bound: with histories dh, gate and up are read once, and one tile of them becomes tiles of all five FP8
matrices; tiles are transposed in shared memory. Without histories they are read twice, first for the amax of the
gradients, which are never written in high precision. A tile is held in quarters, see ``fp8_cast``'s ``triton_tiles``.
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
    SCRATCH_TRIED,
    cast_again,
    counted,
    emit,
    encode_words,
    encoding,
    hardware_encodes,
    load_quarter,
    load_tile,
    magnitudes,
    offer,
    reciprocal,
    store_turned,
    tile_of_program,
)
from kernel_pytorch.ops.fp8_swiglu import grad_torch_kernel
from kernel_pytorch.ops.fp8_swiglu.triton_kernel import scale_to_try, settle, sigmoid
from kernel_pytorch.ops.triton_launch import Launches, Place, empty, zeros

# Rows, columns and warps of a tile: the fastest of a sweep on an H200.
_TILE = (32, 64, 4)
_AMAX_TILE = (16, 256, 8, 4)  # and the number of tiles of a program, one below the other: fewer atomics
DUP: tl.constexpr = tl.constexpr(SCRATCH // 4)
"""Offset in the shared buffer from dgate's words to dup's."""


@triton.jit
def _gradients(upstream, gates, ups, HARDWARE: tl.constexpr):
    """dgate, dup and h. 1 - share loses digits only where it is added to a share near 1."""
    share = sigmoid(gates, HARDWARE)
    silu = gates * share
    return (upstream * ups) * (share + silu * (1.0 - share)), upstream * silu, silu * ups


@triton.jit
def _scaled(values, scale):
    """values * scale; NaN for non-finite values, because an infinity would saturate."""
    return values * scale + values * 0.0


@triton.jit
def _as_of_all_rows(dh, first, dh_row, ROWS: tl.constexpr):
    """The address of dh's row 0 if dh has only the rows from tile row ``first`` on."""
    return dh - (tl.full((), 0, tl.int64) + first) * ROWS * dh_row


@triton.jit
def _quarter_gradients(i, j, k, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, arguments):
    """Compute dgate, dup and h of a quarter of tile (i, j)."""
    _, source = arguments
    dh, gate, up, dh_row, dh_column, gate_row, gate_column, up_row, up_column, HARDWARE = source
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
    i, j = tile_of_program(tl.cdiv(columns, COLUMNS), True)
    i *= TILES
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
    offer(amax + DUP, tl.max(largest_dup))


@triton.jit
def _cast(
    dh, gate, up, h_inverse, dgate_data, dgate_t, dgate_inverse, dup_data, dup_t, dup_inverse, h_t,
    amax, own_gate_counts, own_up_counts, gate_history, up_history,
    first, part_rows, rows, columns, dh_row, dh_column, gate_row, gate_column, up_row, up_column, history_length,
    WITH_H: tl.constexpr, TURNED: tl.constexpr, WORDS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    HISTORY: tl.constexpr, H_LARGEST: tl.constexpr, H_MANTISSA: tl.constexpr, H_BIAS: tl.constexpr,
    H_NAN: tl.constexpr, H_FNUZ: tl.constexpr, H_HARDWARE: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of all matrices, from tile row ``first`` on; with a HISTORY by the delayed scales."""
    i, j = tile_of_program(tl.cdiv(columns, COLUMNS), HISTORY > 0)
    i += first
    dh = _as_of_all_rows(dh, first, dh_row, ROWS)
    matrices = (dh, gate, up, dh_row, dh_column, gate_row, gate_column, up_row, up_column, HARDWARE)
    # Load before the scales are computed, so that neither waits for the other.
    g_0, u_0, h_0 = _quarter_gradients(i, j, 0, rows, columns, ROWS, COLUMNS, (1.0, matrices))
    g_1, u_1, h_1 = _quarter_gradients(i, j, 1, rows, columns, ROWS, COLUMNS, (1.0, matrices))
    g_2, u_2, h_2 = _quarter_gradients(i, j, 2, rows, columns, ROWS, COLUMNS, (1.0, matrices))
    g_3, u_3, h_3 = _quarter_gradients(i, j, 3, rows, columns, ROWS, COLUMNS, (1.0, matrices))
    dgate_scale = scale_to_try(
        amax, dgate_inverse, own_gate_counts, gate_history, history_length, part_rows, columns,
        LARGEST, POWER_OF_TWO, HISTORY,
    )  # fmt: skip
    dup_scale = scale_to_try(
        amax + DUP, dup_inverse, own_up_counts, up_history, history_length, part_rows, columns,
        LARGEST, POWER_OF_TWO, HISTORY,
    )  # fmt: skip
    h_scale = reciprocal(tl.load(h_inverse)) if WITH_H else 1.0
    if WITH_H:
        # The forward has counted h; a non-finite h must become NaN again.
        words = encode_words(
            _scaled(h_0, h_scale), _scaled(h_1, h_scale), _scaled(h_2, h_scale), _scaled(h_3, h_scale),
            H_LARGEST, H_MANTISSA, H_BIAS, H_NAN, H_FNUZ, H_HARDWARE,
        )  # fmt: skip
        store_turned(h_t, words, i, j, rows, columns, WORDS, ROWS, COLUMNS)
    # Cast everything before any recount, so that the values need not stay in registers.
    dgate_found = emit(
        g_0, g_1, g_2, g_3, dgate_scale, dgate_scale, dgate_scale, dgate_scale, dgate_data, dgate_t,
        i, j, rows, columns, True, TURNED, WORDS, LARGEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip
    dup_found = emit(
        u_0, u_1, u_2, u_3, dup_scale, dup_scale, dup_scale, dup_scale, dup_data, dup_t,
        i, j, rows, columns, True, TURNED, WORDS, LARGEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip
    dgate_seen = counted(
        dgate_found, _quarter_of_dgate, (dgate_scale, matrices), dgate_data, dgate_t, own_gate_counts, i, j,
        rows, columns, True, TURNED, HISTORY == 0, HALF_SMALLEST, NAN, ROWS, COLUMNS,
    )  # fmt: skip
    dup_seen = counted(
        dup_found, _quarter_of_dup, (dup_scale, matrices), dup_data, dup_t, own_up_counts, i, j, rows, columns,
        True, TURNED, HISTORY == 0, HALF_SMALLEST, NAN, ROWS, COLUMNS,
    )  # fmt: skip
    if HISTORY > 0:
        offer(amax, dgate_seen)
        offer(amax + DUP, dup_seen)


@triton.jit
def _settle(
    dh, gate, up, dgate_data, dgate_t, dgate_inverse, dup_data, dup_t, dup_inverse,
    amax, tried, gate_counts, up_counts, gate_history, up_history, gate_next, up_next,
    first, part_rows, rows, columns, dh_row, dh_column, gate_row, gate_column, up_row, up_column, history_length,
    TURNED: tl.constexpr, WORDS: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTORY: tl.constexpr,
    LARGEST: tl.constexpr, HALF_SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """After a cast with the delayed scales: requantize each gradient whose amax does not fit its scale."""
    dgate_scale, dgate_again, dgate_exceeded = settle(
        amax, dgate_inverse, tried, gate_counts, gate_history, gate_next, history_length, part_rows, columns,
        LARGEST, BIAS, POWER_OF_TWO, HISTORY,
    )  # fmt: skip
    dup_scale, dup_again, dup_exceeded = settle(
        amax + DUP, dup_inverse, tried + DUP // 2, up_counts, up_history, up_next, history_length, part_rows, columns,
        LARGEST, BIAS, POWER_OF_TWO, HISTORY,
    )  # fmt: skip
    if dgate_again | dup_again:
        dh = _as_of_all_rows(dh, first, dh_row, ROWS)
        matrices = (dh, gate, up, dh_row, dh_column, gate_row, gate_column, up_row, up_column, HARDWARE)
        across = tl.cdiv(columns, COLUMNS)
        tiles = across * tl.cdiv(part_rows, ROWS)
        for step in range(tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))):
            tile = tl.program_id(0) + step * tl.num_programs(0)
            i, j = first + tile // across, tile % across
            if dgate_again:
                cast_again(
                    _quarter_of_dgate, matrices, dgate_scale, dgate_exceeded, dgate_data, dgate_t, gate_counts,
                    i, j, rows, columns, TURNED, WORDS, True,
                    LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
                )  # fmt: skip
            if dup_again:
                cast_again(
                    _quarter_of_dup, matrices, dup_scale, dup_exceeded, dup_data, dup_t, up_counts,
                    i, j, rows, columns, TURNED, WORDS, True,
                    LARGEST, HALF_SMALLEST, MANTISSA, BIAS, NAN, FNUZ, HARDWARE, ROWS, COLUMNS,
                )  # fmt: skip


# Launching.

# The arguments of the kernels, in the order of PreparedGradients.__call__. Counts under a delayed scale go to a
# buffer of their own, since a requantization discards them.
_ARGUMENTS = (
    "dh", "gate", "up", "h_inverse", "dgate_data", "dgate_t", "dgate_inverse", "dup_data", "dup_t", "dup_inverse",
    "h_t", "amax", "tried", "gate_counts", "up_counts", "own_gate_counts", "own_up_counts", "gate_history",
    "up_history", "gate_next", "up_next", "first", "part_rows", "rows", "columns", "dh_row",
    "dh_column", "gate_row", "gate_column", "up_row", "up_column", "history_length",
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
    if gate.numel() == 0:
        return grad_torch_kernel.forward(
            device, dh, gate, up, number_format, h_format, h_inverse, gate_history, up_history, power_of_two
        )
    counts = gate.new_zeros((2, 2, 4), dtype=torch.int64)
    histories, places = [], []
    for history in (gate_history, up_history):
        histories.append(dh.new_empty(0, dtype=torch.float32) if history is None else history.clone())
        places.append(None if history is None else Place(histories[-1], torch.float32))
    cast = prepared(
        device, gate.shape, dh.stride(), gate.stride(), up.stride(), number_format, h_format, h_inverse is not None,
        len(histories[0]), power_of_two,
    )  # fmt: skip
    found = cast(
        dh, gate, up, h_inverse, Place(counts, torch.int64), Place(counts, torch.int64, 64), places[0], places[1]
    )
    return *found, counts[:, 0, :3].contiguous(), *histories


class PreparedGradients:
    """fp8_swiglu_grad for matrices of one kind, see ``fp8_cast``'s ``PreparedCast``.

    Returns dgate, dgate_t, dgate_inverse, dup, dup_t, dup_inverse and h_t.

    Args:
        part_rows: rows of a call of ``part``; None for all rows, with the transposed gradients.
    """

    def __init__(
        self,
        device: Device,
        shape: tuple[int, int],
        dh_strides: tuple[int, int],
        gate_strides: tuple[int, int],
        up_strides: tuple[int, int],
        number_format: str,
        h_format: str,
        with_h: bool,
        length: int,
        power_of_two: bool,
        part_rows: int | None = None,
    ) -> None:
        rows, columns = self.shape = shape
        chosen, chosen_h = FORMATS[number_format], FORMATS[h_format]
        self.dtype, self.h_dtype = chosen.dtype, chosen_h.dtype
        self.h_shape = (columns, rows) if with_h else (0, 0)
        self.length = length
        height = rows if part_rows is None else part_rows
        self.sizes = (height, rows, columns, *dh_strides, *gate_strides, *up_strides, length)
        words = rows % 4 == 0
        self.turned_as = torch.int32 if words else torch.uint8
        kernels: list[tuple[Any, tuple[int], dict[str, Any]]] = []
        if length == 0:
            tall, width, warps, below = _AMAX_TILE
            grid = -(-rows // (tall * below)) * -(-columns // width)
            tile = {"ROWS": tall, "COLUMNS": width, "TILES": below, "num_warps": warps}
            kernels.append((_amax, (grid,), {"HARDWARE": hardware_encodes(device, chosen), **tile}))
        tall, width, warps = _TILE
        constants = {
            "TURNED": part_rows is None,
            "WORDS": words,
            "POWER_OF_TWO": power_of_two,
            "HISTORY": triton.next_power_of_2(length) if length else 0,
            "ROWS": tall,
            "COLUMNS": width,
            "num_warps": warps,
            **encoding(device, chosen),
        }
        of_h = {f"H_{name}": value for name, value in encoding(device, chosen_h).items() if name != "HALF_SMALLEST"}
        tiles = -(-height // tall) * -(-columns // width)
        kernels.append((_cast, (tiles,), {"WITH_H": with_h, **of_h, **constants}))
        if length:
            kernels.append((_settle, (min(tiles, 4 * device.compute_units),), constants))
        key = (
            shape, dh_strides, gate_strides, up_strides, number_format, h_format, with_h, length, power_of_two,
            part_rows,
        )  # fmt: skip
        self.launches = Launches(kernels, _ARGUMENTS, key)

    def __call__(
        self,
        dh: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        h_inverse: torch.Tensor | None,
        gate_counts: Place,
        up_counts: Place,
        gate_history: Place | None,
        up_history: Place | None,
    ) -> tuple[torch.Tensor, ...]:
        turned = self.shape[::-1]
        dgate, dup = empty(gate, self.shape, self.dtype), empty(gate, self.shape, self.dtype)
        dgate_t, dup_t = empty(gate, turned, self.dtype), empty(gate, turned, self.dtype)
        h_t = empty(gate, self.h_shape, self.h_dtype)
        dgate_inverse, dup_inverse = empty(gate, (), torch.float32), empty(gate, (), torch.float32)
        inverses = (Place(dgate_inverse, torch.float32), Place(dup_inverse, torch.float32))
        histories = (gate_history or inverses[0], up_history or inverses[1])
        self.part(
            0, (dh, gate, up), h_inverse, (dgate, dgate_t, dup, dup_t, h_t), inverses, (gate_counts, up_counts),
            histories, histories,
        )  # fmt: skip
        return dgate, dgate_t, dgate_inverse, dup, dup_t, dup_inverse, h_t

    def part(
        self,
        first_row: int,
        matrices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        h_inverse: torch.Tensor | None,
        results: tuple[torch.Tensor, ...],
        inverses: tuple[Place, Place],
        counts: tuple[Place, Place],
        histories: tuple[Place, Place],
        next_histories: tuple[Place, Place],
    ) -> None:
        """Compute the row chunk that starts at ``first``, a multiple of 512, into matrices of all rows.

        Args:
            matrices: dh with the chunk's rows, gate and up with all rows.
            results: dgate, dgate_t, dup, dup_t and h_t.
        """
        dh, gate, up = matrices
        dgate, dgate_t, dup, dup_t, h_t = results
        shared = zeros(gate, 2 * SCRATCH)
        scales = (inverses[0].data_ptr(), inverses[1].data_ptr())
        h_scale = scales[0] if h_inverse is None else h_inverse.data_ptr()
        found = shared.data_ptr()
        tried = (found + SCRATCH_TRIED, found + SCRATCH + SCRATCH_TRIED)
        first = first_row // _TILE[0]

        def typed() -> tuple[Any, ...]:
            first_try = tuple(shared.at(start + SCRATCH_TRIED, torch.int64) for start in (0, SCRATCH))
            return (
                dh, gate, up, inverses[0] if h_inverse is None else h_inverse,
                Place(dgate, torch.uint8), Place(dgate_t, self.turned_as), inverses[0],
                Place(dup, torch.uint8), Place(dup_t, self.turned_as), inverses[1], Place(h_t, self.turned_as),
                shared, first_try[0], *counts, *(first_try if self.length else counts), *histories, *next_histories,
                first, *self.sizes,
            )  # fmt: skip

        given = (dh.data_ptr(), gate.data_ptr(), up.data_ptr(), h_scale)
        to_counts = (counts[0].data_ptr(), counts[1].data_ptr())
        remembered = (
            histories[0].data_ptr(), histories[1].data_ptr(), next_histories[0].data_ptr(),
            next_histories[1].data_ptr(),
        )  # fmt: skip
        self.launches(
            gate.get_device(),
            (gate.dtype, *[address % 16 for address in (*given, *to_counts, *remembered)]),
            (
                *given, dgate.data_ptr(), dgate_t.data_ptr(), scales[0], dup.data_ptr(), dup_t.data_ptr(), scales[1],
                h_t.data_ptr(), found, tried[0], *to_counts, *(tried if self.length else to_counts), *remembered,
                first, *self.sizes,
            ),
            typed,
        )  # fmt: skip


prepared = lru_cache(maxsize=4096)(PreparedGradients)
