"""Attention of few queries over many keys in Triton, split over the keys (flash decoding); keys may be in pages.

A program owns some rows (queries x the query heads of a group, so that keys are read once for the group) and some of
the key tiles that these rows attend to. It writes a partial result with its log-sum-exp, and a second kernel merges
the partial results in a fixed order. Keys that no row attends to are not read.

Masks made of causal, windows and sinks are passed as integers (``masks/relative.py``); others as the intervals of
each query, or, with block tables or many intervals, as a list of tiles.

Shapes: B batch, H query heads, G key heads, M queries, N keys, D head dimension, E value head dimension, S splits,
P pages of a row.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.masks.layout import Layout
from kernel_pytorch.masks.relative import MOST_RELATIVE_INTERVALS, RelativeInterval, relative_intervals
from kernel_pytorch.masks.walk import expand
from kernel_pytorch.ops.attention.definition import lse_dtype, result_dtype
from kernel_pytorch.ops.attention.triton_kernel import _allowed, _dot, _rows, backward
from kernel_pytorch.ops.triton_launch import launch

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask

__all__ = ["Split", "backward", "forward", "split_for", "split_kv"]

_LOG2_E = math.log2(math.e)
_RELATIVE, _INTERVALS, _LISTED = range(3)
_NO_INTERVAL = RelativeInterval(last=0)


@dataclass(frozen=True)
class Split:
    """Tile sizes and number of splits. They change the speed, not the result."""

    keys: int
    """Keys of a tile."""
    warps: int
    stages: int
    programs: int
    """Target number of programs per compute unit, from which the number of splits is derived."""


@lru_cache(maxsize=256)
def split_for(dim: int, itemsize: int, device: Device, paged: bool = False) -> Split:
    """Return the parameters for a device and the wider head dimension: the best of a sweep on an H200."""
    wide = max(16, triton.next_power_of_2(dim))
    if itemsize == 4:  # no matrix unit multiplies float32 exactly: small tiles, or the registers spill
        return Split(16 if wide > 128 else 32, 8 if wide > 64 else 4, 2, 2)
    if wide == 128 and device.shared_memory_bytes >= 200_000 and not paged:
        return Split(128, 4, 3, 1)
    keys = 64 if wide <= 128 else 32
    if device.backend == "amd" and "mfma" not in device.matrix_units:
        keys //= 2
    fits = device.shared_memory_bytes // (2 * keys * wide * itemsize)
    return Split(keys, 4, max(1, min(4, fits // 2), min(2, fits)), 2)


@triton.jit
def _range(first_M, last_M, m_inside):
    """The first and the last key of any row as (first, last); (2 ** 30, 0) if there is none."""
    some = m_inside & (first_M < last_M)
    return tl.min(tl.where(some, first_M, 1 << 30), axis=0), tl.max(tl.where(some, last_M, 0), axis=0)


@triton.jit
def _tile_of(index, low_0, high_0, low_1, high_1, count_0, BLOCK_N: tl.constexpr):
    """The first key of a tile of the two ranges, and the end of its range."""
    later = index >= count_0
    start = tl.where(later, low_1 + (index - count_0) * BLOCK_N, low_0 + index * BLOCK_N)
    return start, tl.where(later, high_1, high_0)


@triton.jit
def _tile_pointers(base, page_N, n, page_stride, row_stride, columns, PAGE: tl.constexpr):
    """The addresses of a tile of keys or values as (keys, columns); with PAGE, ``page_N`` is the page of each key."""
    if PAGE:
        rows = page_N.to(tl.int64) * page_stride + (n % PAGE) * row_stride
        return base + rows[:, None] + columns[None, :]
    return base + n[:, None] * row_stride + columns[None, :]


@triton.jit
def _load_tile(pointers, inside, columns, DIM: tl.constexpr):
    if columns.shape[0] != DIM:
        return tl.load(pointers, mask=inside[:, None] & (columns < DIM)[None, :], other=0.0)
    return tl.load(pointers, mask=inside[:, None], other=0.0)


@triton.jit(
    do_not_specialize=[
        "q_len", "kv_len", "splits", "table_b", "first_b", "mask_b", "mask_h",
        "first_0", "first_offset_0", "last_0", "last_offset_0",
        "first_1", "first_offset_1", "last_1", "last_offset_1",
    ]
)  # fmt: skip
def _split_kv(
    q_BHMD, k_BGND, v_BGNE, out, lse, table_BP, lengths_B, first_DSM, last_DSM, offsets, tiles, slots,
    heads, q_len, kv_len, splits, scale,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, table_b, first_b, mask_b, mask_h,
    first_0, first_offset_0, last_0, last_offset_0, first_1, first_offset_1, last_1, last_offset_1,
    MASK: tl.constexpr, SLOTS: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    MERGED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Programs that read the same keys come one after another: row tiles, then splits, heads and the batch.
    row_tiles = tl.cdiv(q_len * PACK, BLOCK_M)
    row_tile = tl.program_id(0) % row_tiles
    split = tl.program_id(0) // row_tiles % splits
    head_tile = tl.program_id(0) // row_tiles // splits % (heads // PACK)
    b = (tl.program_id(0) // row_tiles // splits // (heads // PACK)).to(tl.int64)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m, h = row // PACK, head_tile * PACK + row % PACK
    m_inside = m < q_len
    g = (head_tile * PACK // GROUP).to(tl.int64)
    d, e, step = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_N)
    q = tl.load(
        q_BHMD + b * q_b + h[:, None].to(tl.int64) * q_h + m[:, None].to(tl.int64) * q_m + d[None, :],
        mask=m_inside[:, None] & (d < D)[None, :],
        other=0.0,
    )
    if PAGE:
        kv_len = tl.maximum(tl.minimum(tl.load(lengths_B + b), kv_len), 0)
        k_ND, v_NE = k_BGND + g * k_h, v_BGNE + g * v_h
    else:
        k_ND, v_NE = k_BGND + b * k_b + g * k_h, v_BGNE + b * v_b + g * v_h
    first_M, last_M = first_DSM + b * first_b, last_DSM + b * first_b
    low_0, high_0, low_1, high_1, count_0 = 0, 0, 0, 0, 0
    listed = 0
    if MASK == 2:
        listed = tl.load(offsets + b * mask_b + head_tile * mask_h)
        count = tl.load(offsets + b * mask_b + head_tile * mask_h + 1) - listed
    else:
        if MASK == 0:
            position = kv_len - q_len + m
            begin_0 = tl.maximum(first_0, position + first_offset_0)
            end_0 = tl.minimum(tl.minimum(last_0, position + last_offset_0), kv_len)
            begin_1 = tl.maximum(first_1, position + first_offset_1)
            end_1 = tl.minimum(tl.minimum(last_1, position + last_offset_1), kv_len)
        else:
            begin_0 = tl.load(first_M + m, mask=m_inside, other=0)
            end_0 = tl.load(last_M + m, mask=m_inside, other=0)
            begin_1, end_1 = begin_0, end_0
            if SLOTS == 2:
                begin_1 = tl.load(first_M + q_len + m, mask=m_inside, other=0)
                end_1 = tl.load(last_M + q_len + m, mask=m_inside, other=0)
        low_0, high_0 = _range(begin_0, end_0, m_inside)
        if SLOTS == 2:
            # Two ranges of keys in order; their overlap belongs to the first.
            a_low, a_high = low_0, high_0
            b_low, b_high = _range(begin_1, end_1, m_inside)
            swap = b_low < a_low
            low_0, high_0 = tl.where(swap, b_low, a_low), tl.where(swap, b_high, a_high)
            low_1, high_1 = tl.where(swap, a_low, b_low), tl.where(swap, a_high, b_high)
            low_1 = tl.maximum(low_1, high_0)
        count_0 = tl.cdiv(tl.maximum(high_0 - low_0, 0), BLOCK_N)
        count = count_0 + tl.cdiv(tl.maximum(high_1 - low_1, 0), BLOCK_N)
    each = tl.cdiv(count, splits)
    begin = tl.minimum(split * each, count)
    end = tl.minimum(begin + each, count)

    acc = tl.zeros((BLOCK_M, BLOCK_E), dtype=tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    # Tile, slot and pages are loaded one tile ahead, so that the keys' addresses are known in time.
    next_tile, next_slot, next_page = 0, 0, step
    if MASK == 2:
        next_tile = tl.load(tiles + listed + begin, mask=begin < end, other=0)
        next_slot = tl.load(slots + listed + begin, mask=begin < end, other=0)
    if PAGE:
        start, stop = _tile_of(begin, low_0, high_0, low_1, high_1, count_0, BLOCK_N)
        next_page = tl.load(
            table_BP + b * table_b + (start + step) // PAGE, mask=(start + step < stop) & (begin < end), other=0
        )
    for index in tl.range(begin, end, num_stages=STAGES):
        slot, page = next_slot, next_page
        if MASK == 2:
            start, stop = next_tile * BLOCK_N, kv_len
            next_tile = tl.load(tiles + listed + index + 1, mask=index + 1 < end, other=0)
            next_slot = tl.load(slots + listed + index + 1, mask=index + 1 < end, other=0)
        else:
            start, stop = _tile_of(index, low_0, high_0, low_1, high_1, count_0, BLOCK_N)
        if PAGE:
            after, limit = _tile_of(index + 1, low_0, high_0, low_1, high_1, count_0, BLOCK_N)
            next_page = tl.load(
                table_BP + b * table_b + (after + step) // PAGE,
                mask=(after + step < limit) & (index + 1 < end),
                other=0,
            )
        n = start + step
        inside = n < stop
        k = _load_tile(_tile_pointers(k_ND, page, n, k_b, k_n, d, PAGE), inside, d, D)
        scores = _dot(q, tl.trans(k), PRECISE) * scale
        if MASK == 2:
            allowed = _allowed(first_M, last_M, tl.maximum(slot, 0), q_len, m, m_inside, n, SLOTS, False)
            allowed = allowed | (slot < 0)
        else:
            allowed = (n[None, :] >= begin_0[:, None]) & (n[None, :] < end_0[:, None])
            if SLOTS == 2:
                allowed = allowed | ((n[None, :] >= begin_1[:, None]) & (n[None, :] < end_1[:, None]))
        scores = tl.where(allowed & inside[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # Before the first key the maximum is -inf; zero keeps the exponentials zero instead of NaN.
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        v = _load_tile(_tile_pointers(v_NE, page, n, v_b, v_n, e, PAGE), inside, e, E)
        acc = acc * shrink[:, None] + _dot(p.to(v.dtype), v, PRECISE)
        total = total * shrink + tl.sum(p, axis=1)
        top = new_top

    nothing = total == 0.0
    part = acc / tl.where(nothing, 1.0, total)[:, None]
    log2 = tl.where(nothing, -float("inf"), top + tl.log2(tl.where(nothing, 1.0, total)))
    row_out = (b * heads + h) * q_len + m
    if MERGED:
        row_out = row_out * splits + split
    else:
        log2 = log2 / 1.4426950408889634
    tl.store(
        out + row_out[:, None] * E + e[None, :],
        part.to(out.dtype.element_ty),
        mask=m_inside[:, None] & (e < E)[None, :],
    )
    tl.store(lse + row_out, log2, mask=m_inside)


@triton.jit(do_not_specialize=["splits"])
def _merge(parts, log2_parts, out, lse, splits, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    acc = tl.zeros((BLOCK_E,), dtype=tl.float32)
    top, total = -float("inf"), 0.0
    for start in tl.range(0, splits, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        inside = s < splits
        log2 = tl.load(log2_parts + row * splits + s, mask=inside, other=-float("inf"))
        part = tl.load(
            parts + (row * splits + s)[:, None] * E + e[None, :],
            mask=inside[:, None] & (e < E)[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(log2, axis=0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        share = tl.exp2(log2 - base)
        shrink = tl.exp2(top - base)
        acc = acc * shrink + tl.sum(part * share[:, None], axis=0)
        total = total * shrink + tl.sum(share, axis=0)
        top = new_top
    nothing = total == 0.0
    safe = tl.where(nothing, 1.0, total)
    tl.store(out + row * E + e, (acc / safe).to(out.dtype.element_ty), mask=e < E)
    tl.store(lse + row, tl.where(nothing, -float("inf"), (top + tl.log2(safe)) / 1.4426950408889634))


@dataclass(frozen=True)
class _Listed:
    """The tiles that each (batch entry, head) visits; slot -1 marks a full tile."""

    offsets: torch.Tensor
    tiles: torch.Tensor
    slots: torch.Tensor
    most: int

    def tensors(self) -> Iterable[torch.Tensor]:
        return (self.offsets, self.tiles, self.slots)


def _listed(known: Layout, keys: int, device: torch.device) -> _Listed:
    queries = known.finest_block if known.tables else max(16, triton.next_power_of_2(known.q_len))
    walk = known.walk(queries, keys)
    span, full_offsets, full, partial_offsets, partial, slots = (x.numpy() for x in walk.tensors())
    rows = np.arange(len(span))
    spanned, inner = expand(span[:, 0], span[:, 1])
    owner = np.concatenate(
        [spanned, np.repeat(rows, np.diff(full_offsets)), np.repeat(rows, np.diff(partial_offsets))]
    )
    tile = np.concatenate([inner, full, partial])
    slot = np.concatenate([np.full(len(inner) + len(full), -1), slots])
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=len(rows))
    numbers = (np.concatenate([[0], np.cumsum(counts)]), tile[order], slot[order])
    offsets, tiles, own = (torch.from_numpy(x.astype(np.int32)).to(device, non_blocking=True) for x in numbers)
    return _Listed(offsets, tiles, own, int(counts.max(initial=0)))


@lru_cache(maxsize=4096)
def _splits(programs: int, tiles: int, places: int) -> int:
    """Return the smallest number of splits with nearly the best occupancy; each split has at least two tiles."""

    def busy(splits: int) -> float:
        waves = programs * splits / places
        return waves / math.ceil(waves)

    most = max(1, min(tiles // 2, 4 * -(-places // programs), 256))
    best = max(busy(splits) for splits in range(1, most + 1))
    splits = next(splits for splits in range(1, most + 1) if busy(splits) >= 0.95 * best)
    return -(-tiles // -(-tiles // splits)) if tiles else 1


def _relative_tiles(intervals: tuple[RelativeInterval, ...], q_len: int, kv_len: int, keys: int) -> int:
    """Return the maximum number of tiles that the queries visit."""
    found = 0
    for interval in intervals:
        first, last = interval.at(kv_len - q_len, kv_len)[0], interval.at(kv_len - 1, kv_len)[1]
        found += -(-max(last - first, 0) // keys)
    return min(found, -(-kv_len // keys) + len(intervals) - 1)


def _interval_tiles(known: Layout, keys: int) -> int:
    """Return the maximum number of tiles that the queries of a batch entry visit."""
    some = known.last > known.first
    first = np.where(some, known.first, known.kv_len).min(axis=-1)
    last = np.where(some, known.last, 0).max(axis=-1)
    return int((-(-np.maximum(last - first, 0) // keys)).sum(axis=-1).max())


def split_kv(
    device: Device,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    scale: float,
    wanted: str,
    *,
    pages: tuple[torch.Tensor, torch.Tensor] | None = None,
    split: Split | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exp.

    Args:
        k, v: (batch, kv_heads, kv_len, head_dim), or with ``pages`` (num_pages, kv_heads, page_size, head_dim).
        pages: the page table (batch, maximum pages of a row) and the number of keys of each row (batch,), both int32.
        split, splits: override the defaults for the device.
    """
    q, k, v = _rows(q), _rows(k), _rows(v)
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len, value_dim = k.shape[1], k.shape[2], v.shape[3]
    page_size = 0
    if pages is not None:
        page_size, kv_len = kv_len, kv_len * pages[0].shape[1]
    out = torch.empty((batch, heads, q_len, value_dim), dtype=result_dtype(q.dtype, wanted), device=q.device)
    lse = torch.empty((batch, heads, q_len), dtype=lse_dtype(q.dtype), device=q.device)
    if out.numel() == 0:
        return out, lse
    if kv_len == 0:
        return out.zero_(), lse.fill_(-math.inf)
    cut = split_for(max(dim, value_dim), q.element_size(), device, pages is not None) if split is None else split
    group = keys_group = heads // kv_heads
    keys, mask_strides, first_b = cut.keys, (0, 0), 0
    table, lengths = (q, q) if pages is None else pages
    first = last = offsets = tiles = slots = q  # placeholders; read only if the mask has them
    intervals = relative_intervals(mask.node)
    if intervals is not None and len(intervals) <= MOST_RELATIVE_INTERVALS:
        kind, count = _RELATIVE, max(1, len(intervals))
        most = _relative_tiles(intervals, q_len, kv_len, keys)
    else:
        assert pages is None
        known = mask.layout(q_len, kv_len)
        first, last = known.intervals(q.device)
        first_b = first.stride(0) if first.shape[0] > 1 else 0
        count, intervals = known.slots, ()
        if known.tables or known.slots > MOST_RELATIVE_INTERVALS:
            kind, keys = _LISTED, min(keys, known.finest_block)
            visited = known.keep(("split_kv", keys, q.device), lambda known: _listed(known, keys, q.device))
            offsets, tiles, slots, most = visited.offsets, visited.tiles, visited.slots, visited.most
            mask_strides = (known.heads if known.batch > 1 else 0, 1 if known.heads > 1 else 0)
            keys_group = 1 if known.heads > 1 else group
        else:
            kind, most = _INTERVALS, _interval_tiles(known, keys)
    rows = q_len * keys_group
    block_rows = min(16 if q.element_size() == 4 else 64, max(16, triton.next_power_of_2(rows)))
    programs = batch * (heads // keys_group) * triton.cdiv(rows, block_rows)
    if splits is None:
        splits = _splits(programs, most, max(1, device.compute_units) * cut.programs)
    numbers = [number for interval in (*intervals, _NO_INTERVAL, _NO_INTERVAL)[:2] for number in interval]
    merged = splits > 1
    if merged:
        parts = torch.empty((batch, heads, q_len, splits, value_dim), dtype=lse.dtype, device=q.device)
        log2_parts = torch.empty((batch, heads, q_len, splits), dtype=lse.dtype, device=q.device)
    block_values = max(16, triton.next_power_of_2(value_dim))
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    results = (parts, log2_parts) if merged else (out, lse)
    constants = {
        "MASK": kind, "SLOTS": count, "PAGE": page_size, "GROUP": group, "PACK": keys_group, "MERGED": merged,
        "D": dim, "E": value_dim, "BLOCK_D": max(16, triton.next_power_of_2(dim)), "BLOCK_E": block_values,
        "BLOCK_M": block_rows, "BLOCK_N": keys, "PRECISE": q.dtype == torch.float32, "STAGES": cut.stages,
        "num_warps": cut.warps,
    }  # fmt: skip
    aligned = [x.data_ptr() % 16 == 0 for x in (q, k, v, table, lengths)]
    grid, where = (programs * splits,), (q.get_device(), q.dtype, out.dtype)
    launch(
        _split_kv, grid, (grid, *where, heads, strides, *aligned, *constants.values()),
        q, k, v, *results, table, lengths, first, last, offsets, tiles, slots,
        heads, q_len, kv_len, splits, scale * _LOG2_E, *strides, table.stride(0), first_b, *mask_strides, *numbers,
        **constants,
    )  # fmt: skip
    if merged:
        constants = {"E": value_dim, "BLOCK_E": block_values, "BLOCK_S": min(32, triton.next_power_of_2(splits))}
        grid = (batch * heads * q_len,)
        launch(_merge, grid, (grid, *where, *constants.values()), parts, log2_parts, out, lse, splits, **constants)
    return out, lse


def forward(
    device: Device, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, wanted: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return split_kv(device, q, k, v, mask, scale, wanted)
