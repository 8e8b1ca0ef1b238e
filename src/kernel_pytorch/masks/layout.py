"""Layouts: a mask at given lengths, as intervals of keys for each query and lists of tiles for kernels.

Every mask without a block table is, for each query, a union of a few intervals of keys. ``Layout`` stores them as
``first`` and ``last`` (exclusive), shape (batch, slots, q_len): O(q_len) memory for any mask. A tile of queries x
keys is then *full* (every pair is kept), *partial* (a kernel compares keys with the intervals of its slots) or
skipped. Block tables are constant within a tile, so a mask with tables has one set of slots per combination of table
entries, and a tile has the index of its set.

Shapes: D batch entries of the intervals, S slots, Q queries, T tiles of queries.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from kernel_pytorch.masks import code as mask_code
from kernel_pytorch.masks import part as mask_part
from kernel_pytorch.masks.code import Node
from kernel_pytorch.masks.walk import Walk, attended_pairs, walk_of

__all__ = ["LAYOUTS", "Layout", "LayoutCache", "Walk", "layout"]

Array = np.ndarray[Any, Any]


class _HasTensors(Protocol):
    def tensors(self) -> Iterable[torch.Tensor]: ...


_Keeps = TypeVar("_Keeps", bound=_HasTensors)


@dataclass(frozen=True, eq=False)
class Layout:
    """A mask at given lengths."""

    node: Node
    q_len: int
    kv_len: int
    first: Array
    last: Array
    slots: int
    """Slots per combination of block-table entries; the first table is a combination's lowest bit."""
    tables: tuple[Node, ...]
    _kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Memory of the intervals and of everything that kernels have cached, on any device."""
        tensors: list[torch.Tensor] = []
        for kept in list(self._kept.values()):
            tensors += kept if isinstance(kept, tuple) else kept.tensors()
        size = self.first.nbytes + self.last.nbytes + sum(x.numel() * x.element_size() for x in tensors)
        return int(size)

    @property
    def batch(self) -> int:
        return max([len(self.first), *(table.numbers[0] for table in self.tables)])

    @property
    def heads(self) -> int:
        return max([1, *(table.numbers[1] for table in self.tables)])

    @cached_property
    def finest_block(self) -> int:
        """The largest power of two that divides the block of every table; 128 without tables."""
        block = 128
        for table in self.tables:
            block = int(np.gcd(block, table.numbers[4]))
        return block

    @cached_property
    def density(self) -> float:
        pairs = self.q_len * self.kv_len
        if pairs == 0:
            return 0.0
        if not self.tables:
            return float((self.last - self.first).astype(np.int64).sum() / (pairs * self.first.shape[0]))
        return attended_pairs(self) / (pairs * self.batch * self.heads)

    def intervals_of(self, query: int) -> list[tuple[int, int]]:
        """Return the keys that a query of the first batch entry and head attends to, as [first, last) intervals."""
        if not self.tables:
            rows = zip(self.first[0, :, query].tolist(), self.last[0, :, query].tolist(), strict=True)
            return [(first, last) for first, last in rows if last > first]
        tile = self.finest_block
        walk, row = self.walk(tile, tile), query // tile
        full = walk.full[walk.full_offsets[row] : walk.full_offsets[row + 1]].tolist()
        found = [(walk.span[row, 0].item() * tile, walk.span[row, 1].item() * tile)]
        found += [(n * tile, (n + 1) * tile) for n in full]
        for at in range(int(walk.partial_offsets[row]), int(walk.partial_offsets[row + 1])):
            low, high = int(walk.partial[at]) * tile, (int(walk.partial[at]) + 1) * tile
            for slot in range(int(walk.slots[at]), int(walk.slots[at]) + self.slots):
                first, last = int(self.first[0, slot, query]), int(self.last[0, slot, query])
                found.append((max(low, first), min(high, last)))
        return [(int(first), int(min(last, self.kv_len))) for first, last in found if last > first]

    def intervals(self, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Return the intervals (first, last) of shape (D, S, Q) on a device; cached."""
        key = ("intervals", str(device))
        if key not in self._kept:
            self._kept[key] = tuple(torch.from_numpy(part).to(device) for part in (self.first, self.last))
        found: tuple[torch.Tensor, torch.Tensor] = self._kept[key]
        return found

    def keep(self, key: Hashable, make: Callable[[Layout], _Keeps]) -> _Keeps:
        """Return a kernel's cached data for this layout, with a method ``tensors``; build it on a cache miss."""
        if key not in self._kept:
            self._kept[key] = make(self)
        found: _Keeps = self._kept[key]
        return found

    def walk(self, queries: int, keys: int, *, by_key: bool = False, device: torch.device | str = "cpu") -> Walk:
        """Return the tiles of queries x keys that a kernel visits, per tile of queries, or of keys if ``by_key``.

        Cached. Tiles must divide the blocks of the mask's tables.
        """
        key = (queries, keys, by_key, str(device))
        if key in self._kept:
            kept: Walk = self._kept[key]
            return kept
        if str(device) != "cpu":
            there = self.walk(queries, keys, by_key=by_key)
            found = Walk(*(tensor.to(device) for tensor in there.tensors()))
        else:
            for name, tile in (("queries", queries), ("keys", keys)):
                if self.tables and self.finest_block % tile:
                    raise ValueError(
                        f"{name}={tile}: it must divide the blocks of the tables, so {self.finest_block}"
                    )
            found = walk_of(self, queries, keys, by_key)
        self._kept[key] = found
        return found


class LayoutCache:
    """LRU cache of layouts, bounded in bytes.

    Kernels add cached data to layouts. Recounting all layouts for every new one would take milliseconds per decoding
    step, so only the last used layout is recounted, and all of them every ``_COUNTED_EVERY`` layouts.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._lock = threading.Lock()
        self._layouts: OrderedDict[tuple[Node, int, int], Layout] = OrderedDict()
        self._counted: dict[tuple[Node, int, int], int] = {}
        """The bytes of each layout when it was counted last."""
        self._total = 0
        self._made = 0

    @property
    def bytes(self) -> int:
        return sum(known.bytes for known in self._layouts.values())

    def __len__(self) -> int:
        return len(self._layouts)

    def clear(self) -> None:
        with self._lock:
            self._layouts.clear()
            self._counted.clear()
            self._total = 0

    def find(self, node: Node, q_len: int, kv_len: int) -> Layout:
        key = (node, q_len, kv_len)
        with self._lock:
            found = self._layouts.get(key)
            if found is not None:
                self._layouts.move_to_end(key)
                return found
        made = _layout(node, q_len, kv_len)
        with self._lock:
            self._made += 1
            everything = self._made % _COUNTED_EVERY == 0
            for known in list(self._layouts) if everything else itertools.islice(reversed(self._layouts), 1):
                self._count(known)
            self._layouts[key] = made
            self._count(key)
            while len(self._layouts) > 1 and (self._total > self.most_bytes or len(self._layouts) > _MOST_LAYOUTS):
                oldest, _ = self._layouts.popitem(last=False)
                self._total -= self._counted.pop(oldest)
        return made

    def _count(self, key: tuple[Node, int, int]) -> None:
        size = self._layouts[key].bytes
        self._total += size - self._counted.get(key, 0)
        self._counted[key] = size


_MOST_LAYOUTS = 1024
_COUNTED_EVERY = 64
LAYOUTS = LayoutCache(most_bytes=256 << 20)


def layout(node: Node, q_len: int, kv_len: int) -> Layout:
    """Return the layout of a mask at these lengths; raise an error with the reason if it does not fit them."""
    return LAYOUTS.find(node, q_len, kv_len)


def _layout(node: Node, q_len: int, kv_len: int) -> Layout:
    if node.kind == mask_code.PART:
        return _part_layout(node, q_len, kv_len)
    tables = tuple(_nodes(node, mask_code.BLOCKS))
    for table in tables:
        rows, columns, block = table.numbers[2:5]
        wanted = (-(-q_len // block), -(-kv_len // block))
        needed = int(table.kept_blocks[1].max(initial=0)) + 1
        if rows != wanted[0] or (columns != wanted[1] if columns >= 0 else needed > wanted[1]):
            shown = f"{rows}x{columns if columns >= 0 else needed}"
            raise ValueError(
                f"table has {shown} tiles of {block}: {q_len} queries and {kv_len} keys need {wanted[0]}x{wanted[1]}"
            )
    _check_lengths(node, q_len, kv_len)
    batched = (mask_code.DOCUMENTS, mask_code.BLOCKS, mask_code.INTERVALS, mask_code.PADDING)
    batches = {found.numbers[0] for found in _nodes(node, *batched)} - {1}
    heads = {table.numbers[1] for table in tables} - {1}
    if len(batches) > 1 or len(heads) > 1:
        raise ValueError(f"mask mixes batches {sorted(batches)} or heads {sorted(heads)}: use one size, or 1")
    if len(tables) > 4:
        raise ValueError(f"mask has {len(tables)} block tables: combine them into at most 4")
    sets = []
    for number in range(1 << len(tables)):
        constants = {id(table): bool(number >> bit & 1) for bit, table in enumerate(tables)}
        sets.append(_all_intervals(node, q_len, kv_len, constants))
    return _stacked(node, q_len, kv_len, sets, tables)


def _check_lengths(node: Node, q_len: int, kv_len: int) -> None:
    """Raise an error if intervals or padding do not fit the lengths."""
    for found in _nodes(node, mask_code.INTERVALS):
        if found.numbers[2] != q_len:
            raise ValueError(
                f"mask has intervals for {found.numbers[2]} queries and q has {q_len}: they must be equal"
            )
        furthest = max(found.numbers[3:], default=0)
        if furthest > kv_len:
            raise ValueError(f"mask has intervals up to key {furthest} and k has {kv_len}: give none beyond")
    for found in _nodes(node, mask_code.PADDING):
        if max(found.numbers[2:]) > kv_len:
            raise ValueError(
                f"lengths={max(found.numbers[2:])} of padding: there are {kv_len} keys; use at most that"
            )


def _stacked(
    node: Node, q_len: int, kv_len: int, sets: list[tuple[Array, Array]], tables: tuple[Node, ...]
) -> Layout:
    """Build the layout from the intervals of each combination of table entries."""
    batch = max(first.shape[0] for first, _ in sets)
    slots = max(first.shape[1] for first, _ in sets)

    def stacked(which: int) -> Array:
        if len(sets) == 1:
            return sets[0][which]
        # Pad every combination with empty slots to the largest number of slots.
        every = np.zeros((batch, len(sets) * slots, q_len), dtype=np.int32)
        for number, pair in enumerate(sets):
            every[:, number * slots : number * slots + pair[which].shape[1]] = pair[which]
        return every

    return Layout(node, q_len, kv_len, stacked(0), stacked(1), slots, tables)


def _part_layout(node: Node, q_len: int, kv_len: int) -> Layout:
    whole_q, whole_kv, heads, queries, keys = mask_part.part_numbers(node)
    if (mask_part.size(queries), mask_part.size(keys)) != (q_len, kv_len):
        raise ValueError(
            f"mask is a part of {mask_part.size(queries)} queries and {mask_part.size(keys)} keys: "
            f"there are {q_len} and {kv_len}"
        )
    whole = layout(node.children[0], whole_q, whole_kv)
    sets = []
    for number in range(1 << len(whole.tables)):
        own = slice(number * whole.slots, (number + 1) * whole.slots)
        sets.append(
            _merged(*mask_part.restricted_intervals(whole.first[:, own], whole.last[:, own], queries, keys))
        )
    tables = tuple(mask_part.restricted_table(table, whole, queries, keys, heads) for table in whole.tables)
    return _stacked(node, q_len, kv_len, sets, tables)


def _nodes(node: Node, *kinds: int) -> Iterator[Node]:
    if node.kind in kinds:
        yield node
    for child in node.children:
        yield from _nodes(child, *kinds)


_QUERIES_A_PIECE = 1 << 15  # small enough for intermediate results to stay in the cache


def _all_intervals(node: Node, q_len: int, kv_len: int, constants: dict[int, bool]) -> tuple[Array, Array]:
    """Return the merged intervals of all queries, computed in chunks of queries."""
    pieces = []
    for begin in range(0, max(q_len, 1), _QUERIES_A_PIECE):
        end = min(q_len, begin + _QUERIES_A_PIECE)
        position = np.arange(begin + kv_len - q_len, end + kv_len - q_len, dtype=np.int32)[None, :]
        length = np.full_like(position, kv_len)
        pieces.append(_merged(*_intervals(node, position, length, constants)))
    slots = max(first.shape[1] for first, _ in pieces)
    shape = (pieces[0][0].shape[0], slots, q_len)
    first, last = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    for number, (piece_first, piece_last) in enumerate(pieces):
        begin = number * _QUERIES_A_PIECE
        where = (slice(None), slice(piece_first.shape[1]), slice(begin, begin + piece_first.shape[2]))
        first[where], last[where] = piece_first, piece_last
    return first, last


def _intervals(node: Node, position: Array, length: Array, constants: dict[int, bool]) -> tuple[Array, Array]:
    """Return the intervals (first, last), (D, S, Q), of queries at ``position`` in sequences of ``length`` keys.

    They may be empty or overlap.
    """
    kind, numbers = node.kind, node.numbers
    zero = np.zeros_like(position)
    if kind == mask_code.AND:
        (a_first, a_last), (b_first, b_last) = (
            _intervals(child, position, length, constants) for child in node.children
        )
        first = np.maximum(a_first[:, :, None], b_first[:, None])
        last = np.minimum(a_last[:, :, None], b_last[:, None])
        shape = (len(first), first.shape[1] * first.shape[2], first.shape[-1])
        return first.reshape(shape), last.reshape(shape)
    if kind == mask_code.OR:
        sides = [_intervals(child, position, length, constants) for child in node.children]
        batch = max(len(side[0]) for side in sides)
        firsts, lasts = zip(*sides, strict=True)
        wide = [[np.broadcast_to(a, (batch, *a.shape[1:])) for a in part] for part in (firsts, lasts)]
        return np.concatenate(wide[0], axis=1), np.concatenate(wide[1], axis=1)
    if kind == mask_code.DOCUMENTS:
        return _document_intervals(node, position, length, constants)
    if kind == mask_code.INTERVALS:
        rows = position[0] - (length[0] - np.int32(numbers[2]))
        ends = [ends[:, :, rows].astype(np.int32) for ends in mask_code.interval_arrays(node)]
        return ends[0], ends[1]
    if kind == mask_code.PADDING:
        known = np.array(numbers[2:], dtype=np.int32).reshape(-1, 1)
        if mask_code.PADDING_SIDES[numbers[1]] == "left":
            return np.maximum(length - known, 0)[:, None], np.broadcast_to(length, (len(known), 1, length.shape[1]))
        return np.zeros((len(known), 1, length.shape[1]), dtype=np.int32), np.minimum(length, known)[:, None]
    if kind == mask_code.DILATED:
        step, left, right = numbers
        offsets = np.arange(-left, right + 1, dtype=np.int32)[:, None] * np.int32(step)
        first = position[:, None] + offsets
        valid = (first >= 0) & (first < length[:, None])
        return np.where(valid, first, 0), np.where(valid, first + 1, 0)
    if kind == mask_code.BLOCKS:
        first, last = zero, (length if constants[id(node)] else zero)
    elif kind == mask_code.FULL:
        first, last = zero, length
    elif kind == mask_code.CAUSAL:
        first, last = zero, position + 1
    elif kind == mask_code.WINDOW:
        first, last = position - np.int32(min(numbers[0], 2**30)), position + np.int32(min(numbers[1], 2**30) + 1)
    elif kind == mask_code.SINKS:
        first, last = zero, np.full_like(position, min(numbers[0], 2**30))
    else:
        limit = np.int32(min(numbers[0], 2**30))
        first, last = zero, np.where(position < limit, limit, 0).astype(np.int32)
    return np.maximum(first, 0)[:, None], np.minimum(last, length)[:, None]


def _document_intervals(
    node: Node, position: Array, length: Array, constants: dict[int, bool]
) -> tuple[Array, Array]:
    rows = mask_code.documents_of(node)
    kv_len = int(length.flat[0]) if length.size else sum(rows[0])
    if sum(rows[0]) != kv_len:
        raise ValueError(
            f"lengths sum to {sum(rows[0])}: there are {kv_len} keys, and documents must cover them all"
        )
    starts, lengths = [], []
    for row in rows:
        counts = np.array(row, dtype=np.int32)
        begins = np.cumsum(counts, dtype=np.int32) - counts
        # The last document that starts at or before the position; a query before the first key is in no document.
        own = np.maximum(np.searchsorted(begins, position[0], side="right") - 1, 0)
        starts.append(begins[own])
        lengths.append(np.where(position[0] >= 0, counts[own], 0).astype(np.int32))
    start, size = np.stack(starts), np.stack(lengths)
    first, last = _intervals(node.children[0], position - start, size, constants)
    return first + start[:, None], last + start[:, None]


_NEVER = np.int32(2**31 - 1)  # the start of empty intervals during sorting


def _merged(first: Array, last: Array) -> tuple[Array, Array]:
    """Merge to disjoint, sorted intervals; empty ones are (0, 0) and last, and unused slots are dropped."""
    empty = last <= first
    if empty.any():
        first, last = np.where(empty, _NEVER, first), np.where(empty, _NEVER, last)
    if first.shape[1] > 1:
        first, last = _merged_pair(first, last) if first.shape[1] == 2 else _merged_many(first, last)
    empty = first == _NEVER
    if empty.any():
        first, last = np.where(empty, 0, first), np.where(empty, 0, last)
        used = max(1, int((~empty).any(axis=(0, 2)).sum()))
        first, last = first[:, :used], last[:, :used]
    return first.astype(np.int32, copy=False), last.astype(np.int32, copy=False)


def _merged_pair(first: Array, last: Array) -> tuple[Array, Array]:
    """Merge two slots, the most common case, without a sort; see ``_merged``."""
    swap = first[:, 0] > first[:, 1]
    early, late = np.minimum(first[:, 0], first[:, 1]), np.maximum(first[:, 0], first[:, 1])
    early_end, late_end = np.where(swap, last[:, 1], last[:, 0]), np.where(swap, last[:, 0], last[:, 1])
    joins = (late <= early_end) & (late < _NEVER)
    early_end = np.where(joins, np.maximum(early_end, late_end), early_end)
    late, late_end = np.where(joins, _NEVER, late), np.where(joins, _NEVER, late_end)
    return np.stack([early, late], axis=1), np.stack([early_end, late_end], axis=1)


def _merged_many(first: Array, last: Array) -> tuple[Array, Array]:
    def in_order(first: Array, last: Array) -> tuple[Array, Array]:
        order = np.argsort(first, axis=1, kind="stable")
        return np.take_along_axis(first, order, axis=1), np.take_along_axis(last, order, axis=1)

    first, last = in_order(first, last)
    for slot in range(1, first.shape[1]):
        before, here = slot - 1, slot
        joins = (first[:, here] <= last[:, before]) & (first[:, here] < _NEVER)
        # Move the merged interval to this slot, so that later ones compare with it, and empty the previous slot.
        last[:, here] = np.where(joins, np.maximum(last[:, before], last[:, here]), last[:, here])
        first[:, here] = np.where(joins, first[:, before], first[:, here])
        first[:, before] = np.where(joins, _NEVER, first[:, before])
        last[:, before] = np.where(joins, _NEVER, last[:, before])
    return in_order(first, last)
