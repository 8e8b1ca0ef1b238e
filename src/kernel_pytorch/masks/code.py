"""Mask expressions as a tree and as one tensor of integers (the code), and their definition pair by pair.

The code is the tree in postfix order: for each node its kind, the count of its numbers, and the numbers. In postfix
order, composing two masks is a concatenation that does not depend on the tensors' contents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

__all__ = [
    "AND",
    "BLOCKS",
    "CAUSAL",
    "DILATED",
    "DOCUMENTS",
    "FULL",
    "INTERVALS",
    "NOT_IN_RUNTIME",
    "OR",
    "PADDING",
    "PART",
    "PREFIX",
    "SINKS",
    "WINDOW",
    "Node",
]

FULL, CAUSAL, WINDOW, SINKS, PREFIX, DOCUMENTS, BLOCKS, AND, OR, PART, INTERVALS, PADDING, DILATED = range(13)
_NAMES = (
    "full",
    "causal",
    "window",
    "sinks",
    "prefix",
    "documents",
    "blocks",
    "&",
    "|",
    "part",
    "intervals",
    "padding",
    "dilated",
)
NOT_IN_RUNTIME = (PART,)
"""Node kinds that the C++ runtime does not support."""
WHOLE_SEQUENCE = (DOCUMENTS, BLOCKS, PART, INTERVALS, PADDING)
"""Node kinds with absolute positions in the full sequence, which cannot be inside a document."""
PADDING_SIDES = ("left", "right")
_CHILDREN = {DOCUMENTS: 1, AND: 2, OR: 2, PART: 1}


@dataclass(frozen=True, eq=False)
class Node:
    """One node of a mask expression."""

    kind: int
    numbers: tuple[int, ...] = ()
    children: tuple[Node, ...] = ()

    @cached_property
    def constructors(self) -> tuple[str, ...]:
        """The names of the expression's constructors, each once, such as ``("causal", "window")``."""
        names = {name for child in self.children for name in child.constructors}
        if self.kind not in (AND, OR, PART):
            names.add(_NAMES[self.kind])
        if self.kind == WINDOW and self.numbers[1] == 0:  # nothing after the query itself
            names.add(_NAMES[CAUSAL])
        return tuple(name for name in _NAMES if name in names)

    @cached_property
    def kept_blocks(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """For a block table: the number of kept blocks per row, batch entry and head, and their columns."""
        rows = math.prod(self.numbers[:3])
        numbers = np.array(self.numbers[5:], dtype=np.int64)
        return numbers[:rows], numbers[rows:]

    @cached_property
    def _identity(self) -> tuple[Any, ...]:
        return (self.kind, self.numbers, tuple(child._identity for child in self.children))

    @cached_property
    def _hash(self) -> int:
        return hash(self._identity)  # cached, because block tables are long

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Node) and self._hash == other._hash and self._identity == other._identity

    def uses(self, *kinds: int) -> bool:
        return self.kind in kinds or any(child.uses(*kinds) for child in self.children)

    def __str__(self) -> str:
        if self.kind in (AND, OR):
            sides = [f"({child})" if child.kind in (AND, OR) else str(child) for child in self.children]
            return f" {_NAMES[self.kind]} ".join(sides)
        if self.kind == DOCUMENTS:
            shown = [_short(row) for row in documents_of(self)]
            return f"documents({shown[0] if len(shown) == 1 else _short(shown)}, {self.children[0]})"
        if self.kind == BLOCKS:
            batch, heads, rows, columns, block = self.numbers[:5]
            kept = len(self.numbers) - 5 - batch * heads * rows
            shape = "x".join(str(n) for n in (batch, heads) if n != 1)
            size = f"{rows}x{columns}" if columns >= 0 else f"{rows} rows"  # CSR form has no width
            return f"blocks({shape + ' of ' if shape else ''}{size}, {kept} kept, block={block})"
        if self.kind == PART:
            from kernel_pytorch.masks.part import part_numbers

            q_len, kv_len, _, queries, keys = part_numbers(self)
            return f"({self.children[0]}).part({q_len}, {kv_len}, {_short(queries)}, {_short(keys)})"
        if self.kind == INTERVALS:
            entries, slots, rows = self.numbers[:3]
            several = f"batch={entries}, " if entries > 1 else ""
            return f"intervals({several}{rows} queries, {slots} a query)"
        if self.kind == PADDING:
            return f"padding({_short(self.numbers[2:])}, side={PADDING_SIDES[self.numbers[1]]!r})"
        numbers = self.numbers[:1] if self.kind == WINDOW and self.numbers[1] == 0 else self.numbers
        return f"{_NAMES[self.kind]}({', '.join(map(str, numbers))})"


def _short(items: Any) -> str:
    shown = [str(item) for item in items[:4]] + (["..."] if len(items) > 4 else [])
    return f"[{', '.join(shown)}]" + (f" ({len(items)} of them)" if len(items) > 4 else "")


def encode(node: Node) -> torch.Tensor:
    """Encode the tree as postfix integers."""

    def walk(node: Node) -> list[np.ndarray[Any, Any]]:
        parts = [part for child in node.children for part in walk(child)]
        head = np.array([node.kind, len(node.numbers)], dtype=np.int64)
        return [*parts, np.asarray(node.numbers, dtype=np.int64), head]

    # Kind and count come last: the code is decoded from its end.
    return torch.from_numpy(np.concatenate(walk(node)))


def decode(code: torch.Tensor) -> Node:
    """Decode a tree; raise an error if the code is not valid."""
    numbers = code.cpu().numpy()

    def walk(end: int) -> tuple[Node, int]:
        if end < 2:
            raise ValueError("the mask's code is cut short: make masks with kp.masks")
        kind, count = int(numbers[end - 2]), int(numbers[end - 1])
        if not 0 <= kind < len(_NAMES) or not 0 <= count <= end - 2:
            raise ValueError(f"the mask's code holds an unknown node ({kind}, {count}): make masks with kp.masks")
        start = end - 2 - count
        own = tuple(numbers[start : end - 2].tolist())
        children: list[Node] = []
        for _ in range(_CHILDREN.get(kind, 0)):
            child, start = walk(start)
            children.insert(0, child)
        node = Node(kind, own, tuple(children))
        _check_numbers(node)
        return node, start

    node, start = walk(len(numbers))
    if start != 0:
        raise ValueError("the mask's code has numbers left over: make masks with kp.masks")
    return node


def _check_numbers(node: Node) -> None:
    """Raise an error unless a decoded node has valid numbers for its kind."""
    numbers = node.numbers
    if node.kind == DOCUMENTS:
        position = 1
        for _ in range(numbers[0] if numbers else 0):
            position += 1 + max(numbers[position] if position < len(numbers) else 0, 0)
        good = bool(numbers) and numbers[0] > 0 and position == len(numbers)
        if good:
            check_documents(documents_of(node), node.children[0])
    elif node.kind == BLOCKS:
        good = len(numbers) >= 5 and min(numbers[:3]) > 0 and numbers[4] > 0
        if good:
            rows = math.prod(numbers[:3])
            counts, kept = numbers[5 : 5 + rows], numbers[5 + rows :]
            good = len(counts) == rows and min(counts) >= 0 and sum(counts) == len(kept)
            good = good and (not kept or (min(kept) >= 0 and (numbers[3] < 0 or max(kept) < numbers[3])))
    elif node.kind == INTERVALS:
        good = len(numbers) >= 3 and min(numbers) >= 0 and min(numbers[:2]) > 0
        good = good and len(numbers) == 3 + 2 * math.prod(numbers[:3])
    elif node.kind == PADDING:
        good = len(numbers) >= 3 and min(numbers) >= 0 and numbers[0] == len(numbers) - 2 and numbers[1] < 2
    elif node.kind == PART:
        from kernel_pytorch.masks.part import is_part

        good = is_part(node)
    else:
        good = len(numbers) == {WINDOW: 2, SINKS: 1, PREFIX: 1, DILATED: 3}.get(node.kind, 0)
        good = good and min(numbers, default=0) >= 0
    if not good:
        raise ValueError(f"the mask's code has wrong numbers for {_NAMES[node.kind]}: make masks with kp.masks")


def check_documents(rows: Sequence[Sequence[int]], inner: Node) -> None:
    """Raise an error for lengths that cannot be packed, or an inner mask without local positions."""
    if not all(rows):
        raise ValueError(f"lengths={rows}: every entry of the batch needs at least one document")
    negative = [length for row in rows for length in row if length < 0]
    if negative:
        raise ValueError(f"lengths={negative[0]}: use 0 or more")
    sums = [sum(row) for row in rows]
    if len(set(sums)) != 1:
        raise ValueError(f"lengths sum to {sums}: every entry of the batch must sum to the same number of keys")
    if inner.uses(*WHOLE_SEQUENCE):
        raise ValueError(
            f"inner={inner}: documents, blocks, intervals and padding have no local positions; compose them with & "
            "instead"
        )


def documents_of(node: Node) -> list[tuple[int, ...]]:
    """Return the lengths of a documents node, one tuple per batch entry."""
    rows, position = [], 1
    for _ in range(node.numbers[0]):
        count = node.numbers[position]
        rows.append(node.numbers[position + 1 : position + 1 + count])
        position += 1 + count
    return rows


def interval_arrays(node: Node) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the first and last (exclusive) keys of an intervals node, each of shape (batch, slots, queries)."""
    found = np.array(node.numbers[3:], dtype=np.int64).reshape(2, *node.numbers[:3])
    return found[0], found[1]


def table_numbers(table: Any, block: int) -> tuple[int, ...]:
    """Return a block table as (batch, heads, rows, columns, block, row counts, column indices)."""
    if isinstance(table, tuple):
        if len(table) != 2:
            raise ValueError(f"table is a tuple of {len(table)}: CSR form is (offsets, columns)")
        offsets, columns = (part.cpu() if isinstance(part, torch.Tensor) else np.asarray(part) for part in table)
        offsets, columns = np.asarray(offsets), np.asarray(columns)
        for name, part in (("offsets", offsets), ("columns", columns)):
            if part.dtype.kind not in "iu" and part.size:
                raise TypeError(f"table's {name} have dtype {part.dtype}: use whole numbers")
        offsets, columns = offsets.astype(np.int64), columns.astype(np.int64)
        if offsets.ndim != 1 or columns.ndim != 1 or len(offsets) < 2:
            raise ValueError("table in CSR form needs one-dimensional offsets (at least two) and columns")
        counts = np.diff(offsets)
        if offsets[0] != 0 or offsets[-1] != len(columns) or (counts < 0).any():
            raise ValueError("table's offsets must rise from 0 to the number of columns")
        rows = np.repeat(np.arange(len(counts)), counts)
        if len(columns) and columns.min() < 0:
            raise ValueError(f"table's columns hold {columns.min()}: indices are 0 or more")
        pairs = np.unique(rows * (1 << 32) + columns)
        counts = np.bincount(pairs >> 32, minlength=len(counts))
        columns = pairs & ((1 << 32) - 1)
        # CSR form has no width; the last key block is checked when the lengths are known.
        return (1, 1, len(counts), -1, block, *counts.tolist(), *columns.tolist())
    array = table.detach().cpu().numpy() if isinstance(table, torch.Tensor) else np.asarray(table)
    if array.dtype != np.bool_:
        raise TypeError(f"table has dtype {array.dtype}: use booleans, or (offsets, columns) in CSR form")
    if not 2 <= array.ndim <= 4 or 0 in array.shape:
        raise ValueError(
            f"table has shape {list(array.shape)}: use (rows, columns) with heads and batch before them"
        )
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    kept_in_row = array.sum(axis=-1).reshape(-1)
    return (*array.shape, block, *kept_in_row.tolist(), *np.nonzero(array)[3].tolist())


def dense(node: Node, q_len: int, kv_len: int) -> np.ndarray[Any, Any]:
    """Evaluate the definition for each pair; return booleans of shape (batch, heads, q_len, kv_len)."""
    if node.kind == PART:
        from kernel_pytorch.masks.part import indices, part_numbers

        whole_q, whole_kv, heads, queries, keys = part_numbers(node)
        whole = dense(node.children[0], whole_q, whole_kv)
        if heads and whole.shape[1] > 1:
            whole = whole[:, slice(*heads)]
        return whole[:, :, indices(queries)][..., indices(keys)]
    i = np.arange(kv_len - q_len, kv_len).reshape(1, 1, -1, 1)
    j = np.arange(kv_len).reshape(1, 1, 1, -1)
    pairs = _pairs(node, i, j)
    return np.array(np.broadcast_to(pairs, np.broadcast_shapes(pairs.shape, (1, 1, q_len, kv_len))))


def _pairs(node: Node, i: Any, j: Any) -> Any:
    if node.kind == FULL:
        return (i == i) & (j == j)
    if node.kind == CAUSAL:
        return j <= i
    if node.kind == WINDOW:
        return (i - node.numbers[0] <= j) & (j <= i + node.numbers[1])
    if node.kind == SINKS:
        return (j < node.numbers[0]) & (i == i)
    if node.kind == PREFIX:
        return (i < node.numbers[0]) & (j < node.numbers[0])
    if node.kind == AND:
        return _pairs(node.children[0], i, j) & _pairs(node.children[1], i, j)
    if node.kind == OR:
        return _pairs(node.children[0], i, j) | _pairs(node.children[1], i, j)
    if node.kind == DILATED:
        step, left, right = node.numbers
        return ((i - j) % step == 0) & (i - left * step <= j) & (j <= i + right * step)
    if node.kind == INTERVALS:
        first, last = interval_arrays(node)
        return ((first[..., None] <= j) & (j < last[..., None])).any(axis=1, keepdims=True)
    if node.kind == PADDING:
        real = np.array(node.numbers[2:]).reshape(-1, 1, 1, 1)
        right = PADDING_SIDES[node.numbers[1]] == "right"
        return (j < real if right else j >= j.shape[-1] - real) & (i == i)
    if node.kind == DOCUMENTS:
        batch = []
        for lengths in documents_of(node):
            owner = np.repeat(np.arange(len(lengths)), lengths)
            start = np.repeat(np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths)
            # Positions before the first key are in no document; a query there attends to nothing.
            known = (i >= 0) & (j >= 0)
            row, column = np.where(i >= 0, i, 0), np.where(j >= 0, j, 0)
            inside = (owner[row] == owner[column]) & known
            batch.append(inside & _pairs(node.children[0], i - start[row], j - start[column]))
        return np.concatenate(batch, axis=0)
    batch_count, heads, rows, columns, block = node.numbers[:5]
    counts = np.array(node.numbers[5 : 5 + batch_count * heads * rows])
    kept = np.array(node.numbers[5 + batch_count * heads * rows :], dtype=np.int64)
    table = np.zeros((batch_count * heads * rows, max(columns, -(-j.shape[-1] // block))), dtype=bool)
    table[np.repeat(np.arange(len(counts)), counts), kept] = True
    table = table.reshape(batch_count, heads, rows, -1)
    q_len = i.shape[2]
    return table[:, :, (np.arange(q_len) // block)[:, None], (j.reshape(-1) // block)[None, :]]
