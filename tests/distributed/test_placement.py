"""Placement of tokens: every token once, equal numbers and work per rank, whole blocks of tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_pytorch.context_parallel import Placement, place
from kernel_pytorch.distributed.placement import needed_keys, table_unit
from kernel_pytorch.masks import Mask, blocks, causal, documents, full, prefix, sinks, window
from mask_expressions import built, expressions

STYLES = ("auto", "contiguous", "zigzag", "balanced")


@st.composite
def placed(draw: st.DrawFn) -> tuple[Mask, int, int, str]:
    length = draw(st.integers(1, 200) | st.integers(1000, 1100))
    batch, heads = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    mask = built(draw(expressions(length, length, batch, heads)))
    return mask, length, draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from(STYLES))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(placed())
def test_placements(drawn: tuple[Mask, int, int, Any]) -> None:
    """Every token once; equal numbers up to a tile; whole blocks; exactly the keys that other ranks need."""
    mask, length, ranks, style = drawn
    placement = place(mask, length, ranks, style)
    known = mask.layout(length, length)
    unit = table_unit(known)
    tokens = [placement.tokens(rank) for rank in range(ranks)]
    assert sorted(np.concatenate(tokens).tolist()) == list(range(length))
    assert placement.sizes == tuple(len(own) for own in tokens)
    tile = unit * max(1, min(128, length // (ranks * 32)) // unit)
    assert max(placement.sizes) - min(placement.sizes) <= (tile if placement.style == "balanced" else unit)
    assert placement.imbalance >= 1 - 1e-9
    assert style in ("auto", placement.style)
    for own, mine in zip(placement.ranges, tokens, strict=True):
        assert list(own) == sorted(own)
        assert all(first % unit == 0 and (last % unit == 0 or last == length) for first, last in own)
        local = placement.local(placement.ranges.index(own), own)
        assert local == (((0, len(mine)),) if len(mine) else ())
    pairs = mask.dense(length, length).flatten(0, 1).any(dim=0).numpy()
    needed = needed_keys(mask, placement)
    for rank, other in np.ndindex(ranks, ranks):
        keys = {key for first, last in needed[rank][other] for key in range(first, last)}
        exact = set(np.flatnonzero(pairs[tokens[rank]].any(axis=0)).tolist()) & set(tokens[other].tolist())
        assert keys <= set(tokens[other].tolist())
        assert keys == exact if not known.tables else keys >= exact
        assert all(
            first % unit == 0 and (last % unit == 0 or last == length) for first, last in needed[rank][other]
        )


def busiest(mask: Mask, placement: Placement) -> float:
    """The work of the busiest rank over the mean, from the layout's intervals."""
    known = mask.layout(placement.length, placement.length)
    pairs = (known.last - known.first).astype(np.int64).sum(axis=(0, 1))
    work = [int(pairs[placement.tokens(rank)].sum()) for rank in range(placement.ranks)]
    return max(work) * placement.ranks / sum(work)


LENGTH = (1 << 15) - 77
RNG = np.random.default_rng(1)
SHARES = RNG.multinomial(LENGTH, RNG.dirichlet(np.ones(20))).tolist()


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
@pytest.mark.parametrize(
    ("mask", "style"),
    [
        (full(), "contiguous"),
        (causal(), "zigzag"),
        (window(512, 512), "contiguous"),
        (causal() & (window(1024) | sinks(64)), None),
        (causal() | prefix(5000), None),
        (documents(SHARES, causal()), None),
        (documents([SHARES, SHARES[::-1]]), None),
    ],
    ids=str,
)
def test_work_is_even(mask: Mask, style: str | None, ranks: int) -> None:
    placement = place(mask, LENGTH, ranks)
    assert placement.imbalance <= 1.05
    assert busiest(mask, placement) == pytest.approx(placement.imbalance, abs=0.02)
    if style:
        assert placement.style == style
    if style == "zigzag":
        assert placement.imbalance <= 1 + 2 * ranks / LENGTH, "a token or two more than others"
        assert all(len(own) <= 2 for own in placement.ranges)
    assert max(placement.sizes) - min(placement.sizes) <= LENGTH / ranks / 32


def test_tables_are_placed_by_whole_blocks() -> None:
    table = (
        torch.rand(2, 64, 64, generator=torch.Generator().manual_seed(0)) < torch.linspace(0.05, 0.9, 64)[:, None]
    )
    mask = causal() & blocks(table, 48) & blocks(torch.ones(96, 96, dtype=torch.bool), 32)
    placement = place(mask, 64 * 48, 4)
    assert all(first % 96 == 0 and last % 96 == 0 for own in placement.ranges for first, last in own)
    assert placement.style == "balanced"
    assert placement.imbalance < place(mask, 64 * 48, 4, "contiguous").imbalance


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks=0: use 1 or more"),
        ({"length": -1}, "length=-1: use 0 or more"),
        ({"style": "spiral"}, "style='spiral': use auto, contiguous, zigzag, balanced"),
    ],
)
def test_invalid_placements(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(**{"mask": causal(), "length": 64, "ranks": 2, **arguments})


@pytest.mark.parametrize("ranges", [(((0, 4),), ((5, 8),)), (((0, 5),), ((4, 8),)), (((0, 4),), ((4, 7),))])
def test_a_custom_placement_has_every_token_once(ranges: Any) -> None:
    with pytest.raises(ValueError, match="every token of 8 must be on one rank"):
        Placement(8, ranges, "own", 1.0)


def test_a_placement_by_hand_is_put_in_order_or_refused() -> None:
    made = Placement(50, (((0, 20), (20, 50)), ((50, 50),), ()), "own", 1.0)
    assert made.ranges == (((0, 50),), (), ())
    for ranges in ((((25, 50), (0, 25)),), (((0, 5), (5, 3)),), (((0, 40),),)):
        with pytest.raises(ValueError, match="ranges="):
            Placement(50, ranges, "own", 1.0)
