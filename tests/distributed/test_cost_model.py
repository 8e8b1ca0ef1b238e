"""The cost model of context parallelism: exact bytes, and properties of the predicted seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch import masks
from kernel_pytorch.distributed.cost import (
    LINKS,
    Link,
    Prediction,
    Shape,
    _ring_pass,
    _volumes,
    choose,
    measure_link,
    predict,
    sent_bytes,
)
from kernel_pytorch.distributed.placement import Placement, needed_keys, place
from kernel_pytorch.distributed.schedules import SCHEDULES, Schedule
from kernel_pytorch.masks.part import size
from ranks import Ranks, started

SHAPE = Shape(1, 32, 8, 128, 128, torch.bfloat16)
CLUSTER = LINKS["infiniband-ndr"].between_nodes(8, LINKS["nvlink4"])
CAUSAL = masks.causal()
SINKS = masks.causal() & (masks.window(4096) | masks.sinks(64))
CASES: dict[str, tuple[masks.Mask, int]] = {
    "causal": (CAUSAL, 203),
    "window and sinks": (masks.causal() & (masks.window(16) | masks.sinks(4)), 256),
    "documents": (masks.documents([100, 37, 63]) & masks.causal(), 200),
    "blocks": (
        masks.blocks(torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 0]]) > 0, block=64),
        256,
    ),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with started(2) as found:
        yield found


def predictions(
    mask: masks.Mask = CAUSAL,
    ranks: int = 8,
    length: int = 1 << 17,
    shape: Shape = SHAPE,
    link: Link = LINKS["nvlink4"],
    placement: Placement | None = None,
) -> dict[Schedule, Prediction]:
    placement = placement or place(mask, length, ranks)
    return {one.schedule: one for one in predict(mask, placement, shape, kp.device("nvidia/h100"), link)}


def counted(group: Any, case: str, schedule: Schedule, heads: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that this rank sends in the forward, and in total."""
    mask, length = CASES[case]
    cp = kp.context_parallel.Context(group, length, mask, schedule=schedule, timeout=60)
    torch.manual_seed(0)
    q = cp.shard(torch.randn(2, 4, length, 16, dtype=dtype), dim=2).requires_grad_()
    k = cp.shard(torch.randn(2, heads, length, 16, dtype=dtype), dim=2).requires_grad_()
    v = cp.shard(torch.randn(2, heads, length, 8, dtype=dtype), dim=2).requires_grad_()
    out = kp.attention(q, k, v, mask, group=cp)
    forward = cp.traffic.sent_bytes
    out.sum().backward()
    return forward, cp.traffic.sent_bytes


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("kv_heads", "dtype"), [(2, torch.float32), (1, torch.bfloat16), (1, torch.float64)], ids=str
)
def test_bytes_predicted_are_bytes_counted(
    ranks: Ranks, case: str, schedule: Schedule, kv_heads: int, dtype: torch.dtype
) -> None:
    mask, length = CASES[case]
    placement = place(mask, length, 2)
    shape = Shape(2, 4, kv_heads, 16, 8, dtype)
    expected = zip(
        sent_bytes(mask, placement, replace(shape, training=False), schedule),
        sent_bytes(mask, placement, shape, schedule),
        strict=True,
    )
    assert ranks.run(counted, 2, case, schedule, kv_heads, dtype) == list(expected)


def measured(group: Any, node_ranks: int | None) -> Link:
    return measure_link(group, node_ranks=node_ranks, sizes=(1 << 10, 1 << 18, 1 << 20), repeats=3)


@pytest.mark.parametrize("node_ranks", [None, 1, 2])
def test_a_measured_link_is_sane_and_the_same_on_every_rank(ranks: Ranks, node_ranks: int | None) -> None:
    one, other = ranks.run(measured, 2, node_ranks)
    assert one == other
    assert one.name == "measured"
    assert 1e6 < one.bandwidth < 1e12
    assert 1e-7 < one.latency < 1


def refused(group: Any, options: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match=r"use ") as found:
        measure_link(group, **options)
    return str(found.value)


@pytest.mark.parametrize(
    "options", [{"node_ranks": 3}, {"sizes": (8,)}, {"sizes": (8, 4)}, {"repeats": 0}], ids=str
)
def test_a_measurement_that_makes_no_sense_is_refused_before_anything_is_sent(
    ranks: Ranks, options: dict[str, Any]
) -> None:
    (name,) = options
    assert all(f"{name}=" in text for text in ranks.run(refused, 2, options))


@pytest.mark.parametrize("style", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("case", CASES)
def test_counted_keys_are_those_of_the_listed_ranges(case: str, count: int, style: Any) -> None:
    mask, length = CASES[case]
    placement = place(mask, length, count, style)
    listed = [[size(ranges) for ranges in row] for row in needed_keys(mask, placement)]
    assert _volumes(mask, placement).keys.tolist() == listed


@pytest.mark.parametrize("case", ["causal", "window and sinks", "documents"])
def test_pairs_are_those_of_the_mask(case: str) -> None:
    mask, length = CASES[case]
    placement = place(mask, length, 4)
    attended = mask.dense(length, length).squeeze().numpy()
    expected = [
        [attended[np.ix_(placement.tokens(r), placement.tokens(s))].sum() for s in range(4)] for r in range(4)
    ]
    assert _volumes(mask, placement).pairs.tolist() == expected


def test_pairs_of_a_long_sequence_are_sampled_closely() -> None:
    mask, length = SINKS, 1 << 18
    pairs = _volumes(mask, place(mask, length, 4)).pairs.sum()
    assert pairs == pytest.approx(mask.layout(length, length).density * length**2, rel=1e-3)


def test_the_busiest_rank_is_that_of_the_calls_mask() -> None:
    placement = place(masks.window(64, 64), 1 << 16, 8)
    assert placement.style == "contiguous"
    compute = predictions(CAUSAL, placement=placement)["ring"].compute_seconds
    assert compute == pytest.approx(15 / 8 * predictions(CAUSAL, length=1 << 16)["ring"].compute_seconds, rel=0.01)


@pytest.mark.parametrize("mask", [CAUSAL, SINKS], ids=str)
@pytest.mark.parametrize("link", [LINKS["nvlink4"], CLUSTER], ids=lambda link: link.name)
def test_more_bandwidth_is_never_slower(mask: masks.Mask, link: Link) -> None:
    slower = predictions(mask, 16, link=link)
    for faster_link in (
        replace(link, bandwidth=2 * link.bandwidth),
        replace(link, latency=link.latency / 2),
        replace(link, inner=replace(link.inner, bandwidth=2 * link.inner.bandwidth)) if link.inner else link,
    ):
        faster = predictions(mask, 16, link=faster_link)
        assert all(faster[name].seconds <= slower[name].seconds for name in SCHEDULES)
        assert all(faster[name].sent_bytes == slower[name].sent_bytes for name in SCHEDULES)


def test_a_window_sends_less_than_everything_and_inference_less_than_training() -> None:
    window, everything = predictions(SINKS), predictions(CAUSAL)
    forward = predictions(CAUSAL, shape=replace(SHAPE, training=False))
    for name in ("ring", "gather"):
        assert window[name].sent_bytes < everything[name].sent_bytes / 10
    for name in SCHEDULES:
        assert forward[name].sent_bytes < everything[name].sent_bytes
        assert forward[name].seconds < everything[name].seconds


def test_no_schedule_is_faster_than_its_compute_and_a_ring_hides_its_link() -> None:
    found = predictions(CAUSAL, 8, 1 << 20, link=LINKS["infiniband-ndr"])
    assert all(one.seconds > one.compute_seconds for one in found.values())
    assert found["ring"].seconds < found["ring"].compute_seconds + found["ring"].link_seconds
    assert found["gather"].seconds > found["gather"].compute_seconds + found["gather"].link_seconds


def test_heads_that_cannot_be_distributed_have_a_reason() -> None:
    found = predictions(CAUSAL, 12)["heads"]
    assert found.refusal == "32 query heads do not divide among 12 ranks"
    assert (found.seconds, found.sent_bytes) == (float("inf"), 0)
    with pytest.raises(ValueError, match="'heads': 32 query heads"):
        sent_bytes(CAUSAL, place(CAUSAL, 1 << 17, 12), SHAPE, "heads")


def test_one_rank_sends_nothing() -> None:
    for one in predictions(CAUSAL, 1).values():
        assert (one.sent_bytes, one.link_seconds) == (0, 0.0)


def test_an_empty_sequence_costs_nothing_but_its_launches() -> None:
    for one in predictions(CAUSAL, 4, 0, replace(SHAPE, kv_heads=32)).values():
        assert (one.sent_bytes, one.compute_seconds) == (0, 0.0)
        assert one.seconds < 1e-3


def test_nodes_cost_between_their_two_links() -> None:
    assert all(
        predictions(CAUSAL, 8, link=CLUSTER)[name] == predictions(CAUSAL, 8, link=LINKS["nvlink4"])[name]
        for name in SCHEDULES
    )
    shape = replace(SHAPE, heads=64, kv_heads=64)
    inner, both, outer = (
        predictions(CAUSAL, 16, shape=shape, link=link)
        for link in (LINKS["nvlink4"], CLUSTER, LINKS["infiniband-ndr"])
    )
    for name in SCHEDULES:
        assert inner[name].link_seconds < both[name].link_seconds < outer[name].link_seconds
        assert inner[name].seconds <= both[name].seconds <= outer[name].seconds


@pytest.mark.parametrize(
    "wrong", [{"bandwidth": 0.0}, {"latency": -1.0}, {"node_ranks": 8}, {"inner": LINKS["nvlink4"]}], ids=str
)
def test_a_link_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)) if "inner" not in wrong else "node_ranks"):
        replace(LINKS["nvlink4"], **wrong)


def test_the_ring_waits_for_the_slowest_rank_of_each_step() -> None:
    """Two ranks that exchange keys: forward is max(compute, link), then the second stage."""

    class Two:
        ranks, length = 2, 2
        sizes = np.array([1, 1])
        keys = np.array([[1, 1], [1, 1]])
        shape = Shape(1, 1, 1, 1, 1, torch.float32)
        link = Link("test", 8.0, 0.0)  # a key and its value take a second, and so do their gradients
        bandwidth = 1e30

    compute = np.array([[0.25, 0.25], [4.0, 0.25]])
    forward, on_link = _ring_pass(Two(), compute, backward=False)  # type: ignore[arg-type]
    assert forward == pytest.approx([1.25, 5.0], rel=1e-3)
    assert on_link.tolist() == [1.0, 1.0]
    backward, on_link = _ring_pass(Two(), compute, backward=True)  # type: ignore[arg-type]
    assert backward == pytest.approx([6.0, 6.0], rel=1e-3)  # rank 1's gradients come last, to both
    assert on_link.tolist() == [2.0, 2.0]


def test_choose_takes_the_fastest_or_the_pinned_schedule() -> None:
    slow, fast = Prediction("ring", 2.0, 1.0, 1.0, 8), Prediction("gather", 1.5, 1.0, 0.5, 8, 100)
    cannot = Prediction("heads", 1.0, 1.0, 1.0, 0, refusal="5 query heads do not divide among 2 ranks")
    found = (slow, fast, cannot)
    assert choose(found, None) == ("gather", "predicted fastest")
    assert choose(found, "ring") == ("ring", "pinned")
    with pytest.raises(ValueError, match=r"'heads': 5 query heads .*; use another"):
        choose(found, "heads")
    with pytest.raises(ValueError, match=r"'star': use auto, ring, gather, heads"):
        choose(found, "star")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no schedule can run: heads: 5 query heads"):
        choose((cannot,), None)


def test_choose_takes_the_least_memory_where_predictions_are_too_close() -> None:
    found = (Prediction("ring", 1.51, 1.0, 1.0, 8, 10), Prediction("gather", 1.5, 1.0, 0.5, 8, 100))
    assert choose(found, None) == ("ring", "as fast as any, with the least memory")


def test_a_gather_that_does_not_fit_is_not_chosen_yet_may_be_pinned() -> None:
    found = predictions(CAUSAL, 64, 1 << 23, link=replace(CLUSTER, bandwidth=1e15))
    assert (found["ring"].fits, found["gather"].fits) == (True, False)
    assert "does not fit: needs 192 GiB" in str(found["gather"])
    assert choose(tuple(found.values()), None)[0] == "ring"
    assert choose(tuple(found.values()), "gather") == ("gather", "pinned")


def test_a_windows_keys_are_gathered_and_plain_causal_goes_round_or_by_heads() -> None:
    assert choose(tuple(predictions(SINKS, 8).values()), None)[0] == "gather"
    assert choose(tuple(predictions(CAUSAL, 8).values()), None)[0] == "heads"
    assert choose(tuple(predictions(CAUSAL, 64, 1 << 20, link=CLUSTER).values()), None)[0] == "ring"


@pytest.mark.parametrize("mask", [CAUSAL, SINKS], ids=str)
def test_the_largest_cluster_and_sequence_are_predicted(mask: masks.Mask) -> None:
    """Takes about half a second; counting all keys once for each rank would take minutes."""
    found = predictions(mask, placement=place(mask, 1 << 23, 1024), link=CLUSTER)
    assert found["ring"].seconds > found["ring"].compute_seconds > 0
    assert found["heads"].refusal


def test_predictions_are_cached() -> None:
    assert predict(CAUSAL, place(CAUSAL, 4096, 4), SHAPE, kp.device("cpu"), CLUSTER) is predict(
        masks.causal(), place(masks.causal(), 4096, 4), SHAPE, kp.device("cpu"), CLUSTER
    )
