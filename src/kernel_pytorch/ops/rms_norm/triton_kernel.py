"""RMSNorm in Triton, one source for NVIDIA, AMD and Intel.

Memory-bound: the forward reads x and writes y once; the backward reads dy and x and writes dx once. In the forward, a
program holds a tile of short rows in registers. It reads a long row twice in chunks, the second time from the cache,
which leaves registers for more programs and was faster on an H200 than holding the row. In the backward, a program
walks over many tiles and accumulates its partial dweight in registers. A second small kernel sums the partial results
in a fixed order, so the result does not depend on which program finishes first.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.ops.rms_norm.definition import rstd_dtype


@dataclass(frozen=True)
class Tile:
    """Tile sizes and launch parameters. They change the speed, not the result."""

    rows: int
    warps: int
    programs_per_unit: int = 0
    """Backward only: programs per compute unit; each walks over several tiles."""
    stages: int = 1
    """Backward only: pipeline stages."""


# The sizes below are the best of a sweep on an H200 over hidden 128 to 16384; other GPUs use the same rules.


_LONG_ROW = 4096


def short_tile(hidden: int, device: Device) -> Tile:
    return Tile(rows=max(1, 2048 // triton.next_power_of_2(hidden)), warps=_warps(4, device))


def long_chunk(hidden: int) -> int:
    """Elements per step; a chunk that divides the row leaves no lane idle."""
    sizes = (4096, 2048, 1024) if hidden >= 8192 else (2048, 1024)
    return next((size for size in sizes if hidden % size == 0), 1024)


def backward_tile(hidden: int, itemsize: int, device: Device) -> Tile:
    block = triton.next_power_of_2(hidden)
    rows = max(1, 8192 // block)
    # Lanes past the end of a row load nothing, so rows that fill their tile badly need more stages.
    wanted = 3 if hidden * 8 > block * 7 else 4
    fitting = device.shared_memory_bytes // (2 * rows * block * itemsize)  # a stage holds a tile of dy and of x
    if 2048 <= block <= 8192 and fitting >= 2:
        return Tile(rows=rows, warps=_warps(8, device), programs_per_unit=1, stages=min(wanted, fitting))
    # Without shared memory for stages, several programs per compute unit hide the latency.
    rows = max(1, 4096 // block)
    return Tile(rows=rows, warps=_warps(8 if block <= 8192 else 16, device), programs_per_unit=3)


def _warps(warps: int, device: Device) -> int:
    """Convert a number of 32-thread warps to that of the device: half as many wavefronts of 64."""
    return max(1, warps * 32 // max(32, device.warp_size))


@triton.jit
def _forward_short(
    x_RH,
    weight_H,
    y_RH,
    rstd_R,
    rows,
    hidden,
    x_stride,
    eps,
    HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < hidden)[None, :]
    x = tl.load(x_RH + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / hidden + eps)
    y = x * rstd[:, None]
    if HAS_WEIGHT:
        weight = tl.load(weight_H + column, mask=column < hidden, other=0.0).to(tl.float32)
        y = y * weight[None, :]
    tl.store(y_RH + row[:, None] * hidden + column[None, :], y.to(y_RH.dtype.element_ty), mask=inside)
    tl.store(rstd_R + row, rstd, mask=row < rows)


@triton.jit
def _forward_long(
    x_RH, weight_H, y_RH, rstd_R, hidden, x_stride, eps, HAS_WEIGHT: tl.constexpr, CHUNK: tl.constexpr
):
    row = tl.program_id(0)
    x_H = x_RH + row.to(tl.int64) * x_stride
    y_H = y_RH + row.to(tl.int64) * hidden
    squares = tl.zeros((CHUNK,), dtype=tl.float32)
    for first in range(0, hidden, CHUNK):
        column = first + tl.arange(0, CHUNK)
        x = tl.load(x_H + column, mask=column < hidden, other=0.0, eviction_policy="evict_last").to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / hidden + eps)
    for first in range(0, hidden, CHUNK):
        column = first + tl.arange(0, CHUNK)
        inside = column < hidden
        x = tl.load(x_H + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        y = x * rstd
        if HAS_WEIGHT:
            y *= tl.load(weight_H + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        tl.store(y_H + column, y.to(y_RH.dtype.element_ty), mask=inside, cache_modifier=".cs")
    tl.store(rstd_R + row, rstd)


@triton.jit
def _backward(
    dy_RH,
    x_RH,
    weight_H,
    rstd_R,
    dx_RH,
    shares_PH,
    rows,
    hidden,
    dy_stride,
    x_stride,
    HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    in_row = column < hidden
    if HAS_WEIGHT:
        weight = tl.load(weight_H + column, mask=in_row, other=0.0).to(tl.float32)
        share = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    tiles = tl.cdiv(rows, ROWS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & in_row[None, :]
        dy = tl.load(dy_RH + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_RH + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_R + row, mask=row < rows, other=0.0)
        x_hat = x * rstd[:, None]
        if HAS_WEIGHT:
            share += dy * x_hat
            dy = dy * weight[None, :]
        projection = tl.sum(dy * x_hat, axis=1) / hidden
        dx = (dy - x_hat * projection[:, None]) * rstd[:, None]
        tl.store(dx_RH + row[:, None] * hidden + column[None, :], dx.to(dx_RH.dtype.element_ty), mask=inside)
    if HAS_WEIGHT:
        tl.store(shares_PH + tl.program_id(0) * hidden + column, tl.sum(share, axis=0), mask=in_row)


@triton.jit
def _sum_shares(shares_PH, dweight_H, programs, hidden, PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((PROGRAMS, COLUMNS), dtype=tl.float32)
    for first in tl.range(0, programs, PROGRAMS):
        program = first + tl.arange(0, PROGRAMS)
        inside = (program < programs)[:, None] & (column < hidden)[None, :]
        total += tl.load(shares_PH + program[:, None] * hidden + column[None, :], mask=inside, other=0.0)
    dweight = tl.sum(total, axis=0)
    tl.store(dweight_H + column, dweight.to(dweight_H.dtype.element_ty), mask=column < hidden)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x as (R, H) with contiguous rows; copied only if its strides do not allow a view."""
    x_RH = x.reshape(-1, x.shape[-1])
    return x_RH if x_RH.stride(1) == 1 or x_RH.shape[1] == 1 else x_RH.contiguous()


def forward(
    device: Device, x: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x_RH = _as_rows(x)
    rows, hidden = x_RH.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=rstd_dtype(x.dtype), device=x.device)
    if rows == 0:
        return y, rstd
    weight_H = x_RH if weight is None else weight.contiguous()
    if hidden >= _LONG_ROW:
        chunk = long_chunk(hidden)
        _forward_long[(rows,)](
            x_RH,
            weight_H,
            y,
            rstd,
            hidden,
            x_RH.stride(0),
            eps,
            HAS_WEIGHT=weight is not None,
            CHUNK=chunk,
            num_warps=_warps(chunk // 256, device),  # eight elements per thread: one 16-byte load of bfloat16
        )
    else:
        tile = short_tile(hidden, device)
        _forward_short[(triton.cdiv(rows, tile.rows),)](
            x_RH,
            weight_H,
            y,
            rstd,
            rows,
            hidden,
            x_RH.stride(0),
            eps,
            HAS_WEIGHT=weight is not None,
            ROWS=tile.rows,
            BLOCK=triton.next_power_of_2(hidden),
            num_warps=tile.warps,
        )
    return y, rstd


def backward(
    device: Device, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dy_RH, x_RH = _as_rows(dy), _as_rows(x)
    rows, hidden = x_RH.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweight = x.new_empty(0) if weight is None else torch.empty_like(weight, memory_format=torch.contiguous_format)
    if rows == 0:
        return dx, dweight.zero_()
    tile = backward_tile(hidden, x.element_size(), device)
    programs = min(triton.cdiv(rows, tile.rows), max(1, device.compute_units) * tile.programs_per_unit)
    shares_PH = x.new_empty((programs, hidden) if weight is not None else 0, dtype=torch.float32)
    _backward[(programs,)](
        dy_RH,
        x_RH,
        x_RH if weight is None else weight.contiguous(),
        rstd.contiguous(),
        dx,
        shares_PH,
        rows,
        hidden,
        dy_RH.stride(0),
        x_RH.stride(0),
        HAS_WEIGHT=weight is not None,
        ROWS=tile.rows,
        BLOCK=triton.next_power_of_2(hidden),
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    if weight is not None:
        columns = 16
        _sum_shares[(triton.cdiv(hidden, columns),)](
            shares_PH, dweight, programs, hidden, PROGRAMS=128, COLUMNS=columns, num_warps=_warps(4, device)
        )
    return dx, dweight
