"""Sub-masks: a mask restricted to some of the queries and keys of a sequence, for one rank or one chunk.

Ranges keep their order, so an interval of keys stays an interval: its ends move by the number of removed keys before
them. Block tables lose the rows and columns of the removed tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kernel_pytorch.masks.code import PART, Node

if TYPE_CHECKING:
    from kernel_pytorch.masks.layout import Layout

__all__ = [
    "Ranges",
    "checked_ranges",
    "part_node",
    "part_numbers",
    "restricted_intervals",
    "restricted_table",
    "size",
]

Array = np.ndarray[Any, Any]
Ranges = tuple[tuple[int, int], ...]
"""Ascending, disjoint [first, last) ranges."""


def size(ranges: Ranges) -> int:
    return sum(last - first for first, last in ranges)


def checked_ranges(name: str, ranges: Sequence[tuple[int, int]], length: int) -> Ranges:
    """Return the ranges with adjacent ones joined; raise an error unless they ascend within the length."""
    found: list[tuple[int, int]] = []
    for first, last in ranges:
        if not 0 <= first <= last <= length or (found and first < found[-1][1]):
            raise ValueError(f"{name}={list(ranges)}: use ranges that rise, within {length}")
        if found and first == found[-1][1]:
            found[-1] = (found[-1][0], last)
        elif last > first:
            found.append((first, last))
    return tuple(found)


def part_node(
    inner: Node, q_len: int, kv_len: int, queries: Ranges, keys: Ranges, heads: tuple[int, int] | None
) -> Node:
    flat = [number for ranges in (queries, keys) for number in (len(ranges), *(n for r in ranges for n in r))]
    return Node(PART, (q_len, kv_len, *(heads or (0, 0)), *flat), (inner,))


def part_numbers(node: Node) -> tuple[int, int, tuple[int, int] | None, Ranges, Ranges]:
    """Return a sub-mask's full lengths, heads (None for all), and ranges of queries and keys."""
    q_len, kv_len, first_head, last_head, *rest = node.numbers
    found: list[Ranges] = []
    for _ in range(2):
        count = rest[0]
        flat = rest[1 : 1 + 2 * count]
        found.append(tuple(zip(flat[::2], flat[1::2], strict=True)))
        rest = rest[1 + 2 * count :]
    if rest:
        raise ValueError("the mask's code has wrong numbers for part: make masks with kp.masks")
    return q_len, kv_len, ((first_head, last_head) if last_head else None), found[0], found[1]


def is_part(node: Node) -> bool:
    """Return whether a decoded node is a valid sub-mask."""
    if len(node.numbers) < 6 or min(node.numbers) < 0 or node.children[0].uses(PART):
        return False
    try:
        q_len, kv_len, _, queries, keys = part_numbers(node)
        return (queries, keys) == (
            checked_ranges("queries", queries, q_len),
            checked_ranges("keys", keys, kv_len),
        )
    except (ValueError, IndexError):
        return False


def indices(ranges: Ranges) -> Array:
    return np.concatenate([np.arange(*one) for one in ranges]) if ranges else np.zeros(0, dtype=np.int64)


def restricted_intervals(first: Array, last: Array, queries: Ranges, keys: Ranges) -> tuple[Array, Array]:
    """Return the intervals of the chosen queries, as positions among the chosen keys."""
    starts = np.array([r[0] for r in keys] or [0], dtype=np.int64)
    sizes = np.array([r[1] - r[0] for r in keys] or [0], dtype=np.int64)
    before = np.cumsum(sizes) - sizes

    def moved(ends: Array) -> Array:
        chosen = np.concatenate([ends[..., a:b] for a, b in queries], axis=-1) if queries else ends[..., :0]
        own = np.maximum(np.searchsorted(starts, chosen, side="right") - 1, 0)
        return (before[own] + np.clip(chosen - starts[own], 0, sizes[own])).astype(np.int32)

    return moved(first), moved(last)


def restricted_table(
    table: Node, known: Layout, queries: Ranges, keys: Ranges, heads: tuple[int, int] | None
) -> Node:
    """Return the table of the chosen blocks; raise an error if a range cuts a block."""
    batch, all_heads, rows, _, block = table.numbers[:5]
    for name, ranges, length in (("queries", queries, known.q_len), ("keys", keys, known.kv_len)):
        for first, last in ranges:
            if first % block or (last % block and last != length):
                raise ValueError(f"{name} has the range ({first}, {last}): it cuts a block of {block} of the table")
    row_blocks = indices(tuple((a // block, -(-b // block)) for a, b in queries))
    column_blocks = indices(tuple((a // block, -(-b // block)) for a, b in keys))
    counts, kept = table.kept_blocks
    owner = np.repeat(np.arange(len(counts)), counts)
    new_row = np.full(rows, -1)
    new_row[row_blocks] = np.arange(len(row_blocks))
    new_column = np.full(max(-(-known.kv_len // block), int(kept.max(initial=-1)) + 1), -1)
    new_column[column_blocks] = np.arange(len(column_blocks))
    b, h, r = owner // rows // all_heads, owner // rows % all_heads, owner % rows
    own_heads = (0, all_heads) if heads is None or all_heads == 1 else heads
    chosen = (new_row[r] >= 0) & (new_column[kept] >= 0) & (h >= own_heads[0]) & (h < own_heads[1])
    head_count = own_heads[1] - own_heads[0]
    rows_now = ((b * head_count + h - own_heads[0]) * len(row_blocks) + new_row[r])[chosen]
    order = np.lexsort((new_column[kept][chosen], rows_now))
    counts_now = np.bincount(rows_now, minlength=batch * head_count * len(row_blocks))
    return replace(
        table,
        numbers=(
            batch,
            head_count,
            len(row_blocks),
            len(column_blocks),
            block,
            *counts_now.tolist(),
            *new_column[kept][chosen][order].tolist(),
        ),
    )


def is_causal(first: Array, last: Array, kv_len: int) -> bool:
    """Return whether one slot of intervals equals ``causal()`` at these lengths."""
    q_len = first.shape[-1]
    wanted = np.clip(np.arange(kv_len - q_len, kv_len) + 1, 0, None)
    return bool(first.shape[1] == 1 and not first.any() and (last == wanted).all())


def is_full(first: Array, last: Array, kv_len: int) -> bool:
    return bool(first.shape[1] == 1 and not first.any() and (last == kv_len).all())
