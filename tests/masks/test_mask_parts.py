"""Sub-masks for ranks and chunks, against rows and columns of the dense matrix."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_pytorch.masks import Mask, blocks, causal, documents, from_code, full, prefix, sinks, window
from kernel_pytorch.masks import code as mask_code
from mask_expressions import Expression, built, cases, check_layout

Ranges = list[tuple[int, int]]


def blocks_of(expression: Expression) -> int:
    """The number that ranges must be multiples of."""
    if expression[0] == "blocks":
        return int(expression[2])
    return int(np.lcm.reduce([blocks_of(side) for side in expression[1:] if isinstance(side, tuple)] or [1]))


def chosen(ranges: Ranges) -> list[int]:
    return [index for first, last in ranges for index in range(first, last)]


@st.composite
def ranges_of(draw: st.DrawFn, length: int, unit: int) -> Ranges:
    """Ascending ranges, some empty or adjacent, at block boundaries of tables."""
    cut = st.integers(0, -(-length // unit)).map(lambda n: min(n * unit, length))
    ends = sorted(draw(st.lists(cut, min_size=2, max_size=8)))
    every = list(zip(ends[::2], ends[1::2], strict=False))
    return draw(st.sampled_from([every, every, [(0, length)]]))


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[Expression, int, int, int, int], Ranges, Ranges, tuple[int, int] | None]:
    case = draw(cases())
    expression, _, heads, q_len, kv_len = case
    unit = blocks_of(expression)
    some_heads = draw(st.sampled_from([None, *((h, h + 1) for h in range(heads)), (0, heads)]))
    return case, draw(ranges_of(q_len, unit)), draw(ranges_of(kv_len, unit)), some_heads


@settings(max_examples=400, deadline=None, derandomize=True)
@given(parts())
def test_parts(drawn: Any) -> None:
    """The pairs, walks and code of any sub-mask of any mask."""
    (expression, _, _, q_len, kv_len), queries, keys, heads = drawn
    mask = built(expression)
    part = mask.part(q_len, kv_len, queries, keys, heads=heads)
    whole = mask.dense(q_len, kv_len)
    if heads is not None and whole.shape[1] > 1:
        whole = whole[:, heads[0] : heads[1]]
    expected = whole[:, :, chosen(queries)][..., chosen(keys)]
    rows, columns = expected.shape[2:]
    found = part.dense(rows, columns)
    assert torch.equal(found.expand(expected.shape), expected), part
    if rows and columns:
        check_layout(part, rows, columns)
        plain = not mask.layout(q_len, kv_len).tables and found.shape[0] == 1
        assert part.is_full == (plain and bool(expected.all()))
        if plain and not part.is_full:
            assert part.is_causal == torch.equal(expected, causal().dense(rows, columns))
    for other in (from_code(part.code.clone()), pickle.loads(pickle.dumps(part)), copy.deepcopy(part)):
        assert (other, hash(other), repr(other)) == (part, hash(part), repr(part))
    assert mask_code.decode(part.code) == part.node


@pytest.mark.parametrize(
    ("mask", "queries", "keys", "expected"),
    [
        (causal(), [(8, 16)], [(0, 8)], full()),
        (causal(), [(0, 4), (12, 16)], [(0, 4), (12, 16)], causal()),
        (causal(), [(12, 16)], [(0, 4), (8, 16)], causal()),
        (causal() & window(100), [(0, 16)], [(0, 16)], causal()),
        (window(4, 4), [(6, 8)], [(4, 10)], full()),
        (documents([6, 10], causal()), [(6, 16)], [(6, 16)], causal()),
        (documents([6, 10]), [(0, 6)], [(0, 6)], full()),
        (sinks(5) | window(0), [(9, 12)], [(0, 5)], full()),
        (prefix(8) | causal(), [(0, 8)], [(0, 8)], full()),
        (causal(), [(0, 16)], [(0, 16)], causal()),
    ],
    ids=str,
)
def test_full_and_causal_sub_masks_are_recognised(
    mask: Mask, queries: Ranges, keys: Ranges, expected: Mask
) -> None:
    """So that kernels which support only these can serve it."""
    assert mask.part(16, 16, queries, keys) == expected


TABLE = blocks(torch.ones(4, 4, dtype=torch.bool), 16)


@pytest.mark.parametrize(
    ("mask", "queries", "keys", "message"),
    [
        (causal(), [(4, 8), (0, 4)], [(0, 8)], r"queries=\[\(4, 8\), \(0, 4\)\]: use ranges that rise, within 64"),
        (causal(), [(0, 8)], [(0, 8), (7, 9)], r"keys=.*: use ranges that rise"),
        (causal(), [(8, 4)], [(0, 8)], r"queries=.*: use ranges that rise"),
        (causal(), [(0, 8)], [(0, 65)], r"keys=.*within 64"),
        (causal(), [(-1, 8)], [(0, 8)], r"queries=.*within 64"),
        (TABLE, [(0, 16)], [(0, 24)], r"keys has the range \(0, 24\): it cuts a block of 16"),
        (TABLE & causal(), [(8, 32)], [(0, 32)], r"queries has the range \(8, 32\): it cuts a block of 16"),
    ],
)
def test_ranges_that_are_not_a_sub_mask(mask: Mask, queries: Ranges, keys: Ranges, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mask.part(64, 64, queries, keys)


def test_a_sub_mask_cannot_be_composed() -> None:
    part = window(3).part(64, 64, [(0, 8), (20, 30)], [(0, 40)])
    with pytest.raises(TypeError, match="compose the whole masks, then take the part"):
        part & causal()
    with pytest.raises(TypeError, match="compose the whole masks, then take the part"):
        causal() | part
    with pytest.raises(TypeError, match="take the part from the whole mask"):
        part.part(18, 40, [(0, 4)], [(0, 4)])
    with pytest.raises(ValueError, match="have no local positions"):
        documents([18], part)
    with pytest.raises(ValueError, match="a part of 18 queries and 40 keys"):
        part.layout(18, 41)
    with pytest.raises(ValueError, match=r"make masks with kp\.masks"):
        from_code(torch.cat([part.code[:-3], part.code[-2:]]))


def test_a_sub_mask_of_a_million_tokens_takes_linear_memory() -> None:
    """A sub-mask of a long sequence is computed from intervals only."""
    n = 1 << 20
    mask = causal() & (window(4096) | sinks(64))
    part = mask.part(n, n, [(n // 2, n // 2 + n // 8)], [(0, 64), (n // 2 - 4096, n // 2 + n // 8)])
    known = part.layout(n // 8, n // 8 + 4096 + 64)
    assert part.density(n // 8, n // 8 + 4096 + 64) == pytest.approx((4097 + 64) / (n // 8 + 4096 + 64))
    assert known.first.nbytes + known.last.nbytes <= 4 * 4 * n
