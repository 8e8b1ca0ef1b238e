"""Mask expressions for tests: their definitions, Hypothesis strategies, and a check of layouts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import kernel_pytorch as kp
from kernel_pytorch.masks import Mask, blocks, documents
from kernel_pytorch.masks.layout import Layout

Expression = tuple[Any, ...]
"""A mask in words: (constructor, arguments...), with the tables and lengths as plain lists."""


def built(expression: Expression) -> Mask:
    """The mask of an expression, by the public constructors."""
    name, *rest = expression
    if name in ("&", "|"):
        left, right = (built(side) for side in rest)
        return left & right if name == "&" else left | right
    if name == "documents":
        return documents(rest[0], built(rest[1]))
    if name == "blocks":
        return blocks(torch.tensor(rest[0]), rest[1])
    return getattr(kp.masks, name)(*rest)


def attends(expression: Expression, b: int, h: int, query: int, i: int, j: int) -> bool:
    """The definition, one pair at a time; i is the query's position, ``query`` its index."""
    name, *rest = expression
    if name == "&":
        return all(attends(side, b, h, query, i, j) for side in rest)
    if name == "|":
        return any(attends(side, b, h, query, i, j) for side in rest)
    if name == "documents":
        rows = rest[0] if isinstance(rest[0][0], list) else [rest[0]]
        start = 0
        for length in rows[b % len(rows)]:
            if start <= i < start + length and start <= j < start + length:
                return attends(rest[1], b, h, query, i - start, j - start)
            start += length
        return False
    if name == "blocks":
        table = np.array(rest[0])
        table = table.reshape((1,) * (4 - table.ndim) + table.shape)
        return bool(table[b % len(table), h % table.shape[1], query // rest[1], j // rest[1]])
    if name == "window":
        right = rest[1] if len(rest) > 1 else 0
        return i - rest[0] <= j <= i + right
    return {
        "full": lambda: True,
        "causal": lambda: j <= i,
        "sinks": lambda: j < rest[0],
        "prefix": lambda: i < rest[0] and j < rest[0],
    }[name]()


def in_words(expression: Expression, batch: int, heads: int, q_len: int, kv_len: int) -> torch.Tensor:
    pairs = torch.zeros(batch, heads, q_len, kv_len, dtype=torch.bool)
    for b, h, query, j in itertools.product(range(batch), range(heads), range(q_len), range(kv_len)):
        pairs[b, h, query, j] = attends(expression, b, h, query, query + kv_len - q_len, j)
    return pairs


def from_walk(known: Layout, tq: int, tk: int, by_key: bool) -> torch.Tensor:
    """Return the matrix that a kernel computes from a walk; every pair at most once, full tiles inside."""
    walk = known.walk(tq, tk, by_key=by_key)
    tiles = -(-known.kv_len // tk) if by_key else -(-known.q_len // tq)
    pairs = torch.zeros(known.batch, known.heads, known.q_len, known.kv_len, dtype=torch.bool)
    visited: set[tuple[int, ...]] = set()
    first, last = known.intervals()
    assert len(walk.span) == known.batch * known.heads * tiles
    for row, (begin, end) in enumerate(walk.span.tolist()):
        entry, own = divmod(row, tiles)
        b, h = divmod(entry, known.heads)
        listed = walk.full[walk.full_offsets[row] : walk.full_offsets[row + 1]].tolist()
        partial = range(int(walk.partial_offsets[row]), int(walk.partial_offsets[row + 1]))
        every = [(other, -1) for other in (*range(begin, end), *listed)]
        every += [(int(walk.partial[at]), int(walk.slots[at])) for at in partial]
        for other, slot in every:
            t, n = (other, own) if by_key else (own, other)
            assert (b, h, t, n) not in visited
            visited.add((b, h, t, n))
            queries, keys = slice(t * tq, min(known.q_len, (t + 1) * tq)), slice(n * tk, (n + 1) * tk)
            assert queries.start < known.q_len
            assert keys.start < known.kv_len
            if slot < 0:
                assert keys.stop <= known.kv_len, "kernels read a full tile's keys unchecked"
                pairs[b, h, queries, keys] = True
                continue
            which = (b if first.shape[0] > 1 else 0, slice(slot, slot + known.slots), queries)
            key = torch.arange(keys.start, min(keys.stop, known.kv_len))
            inside = (key >= first[which].unsqueeze(-1)) & (key < last[which].unsqueeze(-1))
            pairs[b, h, queries, keys] = inside.any(dim=0)
    assert walk.tiles == len(visited)
    return pairs


def check_layout(mask: Mask, q_len: int, kv_len: int) -> None:
    """Walks, density and intervals of a mask against its dense matrix."""
    dense = mask.dense(q_len, kv_len)
    known = mask.layout(q_len, kv_len)
    assert dense.shape == (known.batch, known.heads, q_len, kv_len)
    tilings = [(16, 16), (32, 16), (16, 32), (64, 64)]
    if known.tables:
        block = known.finest_block
        tilings = list(dict.fromkeys([(16, 16), (16, block), (block, 16), (block, block)]))
    for (tq, tk), by_key in itertools.product(tilings, (False, True)):
        assert torch.equal(from_walk(known, tq, tk, by_key), dense), (tq, tk, by_key)
    assert mask.density(q_len, kv_len) == pytest.approx(dense.double().mean().item(), abs=1e-12)
    for query in range(0, q_len, 5):
        row = torch.zeros(kv_len, dtype=torch.int32)
        for first, last in known.intervals_of(query):
            assert 0 <= first < last <= kv_len
            row[first:last] += 1
        assert torch.equal(row, dense[0, 0, query].int()), query


def expressions(q_len: int, kv_len: int, batch: int, heads: int) -> st.SearchStrategy[Expression]:
    """Trees of every constructor, with documents for each batch entry and tables for each head or for all."""
    small = st.integers(0, kv_len + 10)
    leaves = st.one_of(
        st.just(("full",)),
        st.just(("causal",)),
        st.tuples(st.just("window"), small, st.integers(0, 10)),
        st.tuples(st.sampled_from(["sinks", "prefix"]), small),
    )

    def composed(of: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
        return st.tuples(st.sampled_from(["&", "|"]), of, of)

    def cut(points: list[int]) -> list[int]:
        return [b - a for a, b in itertools.pairwise([0, *sorted(points), kv_len])]

    row = st.lists(st.integers(0, kv_len), max_size=4).map(cut)
    packed = st.tuples(
        st.just("documents"),
        st.sampled_from([1, batch]).flatmap(lambda size: st.lists(row, min_size=size, max_size=size)),
        st.recursive(leaves, composed, max_leaves=3),
    )

    def table(drawn: tuple[int, int, int, int, float]) -> Expression:
        *entries, block, seed, share = drawn
        size = (*entries, -(-q_len // block), -(-kv_len // block))
        return ("blocks", (np.random.default_rng(seed).random(size) < share).tolist(), block)

    tables = st.tuples(
        st.sampled_from([1, batch]),
        st.sampled_from([1, heads]),
        st.sampled_from([16, 32, 48]),
        st.integers(0, 1 << 30),
        st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    ).map(table)
    return st.recursive(st.one_of(leaves, leaves, packed, tables), composed, max_leaves=4)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Expression, int, int, int, int]:
    """(expression, batch, heads, q_len, kv_len)."""
    q_len, kv_len = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    batch, heads = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 1, 2]))
    return draw(expressions(q_len, kv_len, batch, heads)), batch, heads, q_len, kv_len
