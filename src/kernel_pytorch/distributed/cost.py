"""Cost model of the schedules: bytes counted from the mask, seconds from the rates of a link and a device.

Bytes are exact: what each rank sends in ``stages`` and in the head exchange. Seconds are a simulation of all ranks.
``ring``: a rank starts a stage when its keys have arrived, while the next stage's keys are in flight; in the backward
the last stage's gradients are too. ``gather``: first all keys, then all compute. ``heads``: an exchange before and
after compute that all ranks share evenly. Nothing is measured, so that every rank makes the same choice.

Shapes: R ranks, [r, s] what rank r needs from rank s.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from kernel_pytorch.distributed.placement import NO_INTERVALS, Placement, joined_intervals
from kernel_pytorch.distributed.schedules import SCHEDULES, Schedule, heads_refusal
from kernel_pytorch.distributed.transport import Transport
from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.masks import Mask
from kernel_pytorch.masks.layout import Layout
from kernel_pytorch.masks.part import indices

__all__ = [
    "LINKS",
    "Link",
    "Prediction",
    "ScheduleChoice",
    "Shape",
    "choose",
    "measure_link",
    "predict",
    "sent_bytes",
]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Link:
    """The interconnect between ranks: the same for all, or faster inside nodes of adjacent ranks.

    Example:
        >>> import kernel_pytorch as kp
        >>> links = kp.context_parallel.LINKS
        >>> links["nvlink4"].bandwidth
        450000000000.0
        >>> cluster = links["infiniband-ndr"].between_nodes(8, links["nvlink4"])
        >>> cluster.name, cluster.node_ranks
        ('infiniband-ndr between nodes of 8 on nvlink4', 8)
    """

    name: str
    bandwidth: float
    """Bytes per second that one rank sends, while it receives as much."""
    latency: float
    """Seconds until the first byte of a message arrives."""
    node_ranks: int = 1
    """Number of adjacent ranks that share a node, starting at a multiple of it."""
    inner: Link | None = None
    """The link inside a node; None if all links are alike."""

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not self.latency >= 0:
            raise ValueError(f"bandwidth={self.bandwidth}, latency={self.latency}: use above 0, and 0 or more")
        if self.node_ranks < 1 or (self.inner is None) != (self.node_ranks == 1):
            raise ValueError(f"node_ranks={self.node_ranks}: above 1 with an inner link, 1 without")

    def between_nodes(self, node_ranks: int, inner: Link) -> Link:
        """Return a link that is this one between nodes of ``node_ranks`` ranks, and ``inner`` inside them."""
        name = f"{self.name} between nodes of {node_ranks} on {inner.name}"
        return replace(self, name=name, node_ranks=node_ranks, inner=inner)


LINKS = {
    link.name: link
    for link in (
        Link("nvlink4", 450e9, 5e-6),  # H100 and H200 data sheets: 900 GB/s, both directions together
        Link("nvlink5", 900e9, 5e-6),  # B200 data sheet: 1.8 TB/s, both directions together
        Link("xgmi-mi300x", 448e9, 8e-6),  # MI300X data sheet: seven links of 64 GB/s a direction
        Link("infiniband-ndr", 50e9, 10e-6),  # one 400 Gbit/s port a GPU
        Link("gloo", 1e9, 2e-4),  # a CPU's loopback or Ethernet; measure_link() is more accurate
    )
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a call that determine its cost.

    Example:
        >>> import torch
        >>> from kernel_pytorch.distributed.cost import Shape
        >>> Shape(1, 32, 8, 128, 128, torch.bfloat16).key_bytes
        4096
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    training: bool = True

    @property
    def key_bytes(self) -> int:
        """Bytes of one key and its value."""
        return self.batch * self.kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of one key and its value, at least float32."""
        return self.key_bytes // self.dtype.itemsize * self.wide

    @property
    def wide(self) -> int:
        """Bytes of an accumulated element or a log-sum-exp."""
        return max(4, self.dtype.itemsize)


@dataclass(frozen=True)
class Prediction:
    """The cost of one schedule for the busiest rank; ``refusal`` is the reason why it cannot run, or None."""

    schedule: Schedule
    seconds: float
    compute_seconds: float
    link_seconds: float
    """Communication time, overlapped or not."""
    sent_bytes: int
    memory_bytes: int = 0
    """Peak memory for other ranks' tensors, in addition to this rank's own."""
    fits: bool = True
    """Whether that is less than the device's memory. If not, the schedule is never chosen, but may be pinned."""
    refusal: str | None = None

    def __str__(self) -> str:
        if self.refusal:
            return f"{self.schedule:<6}  refused: {self.refusal}"
        return (
            f"{self.schedule:<6}  {self.seconds * 1e3:9.3f} ms: compute {self.compute_seconds * 1e3:.3f} ms, "
            f"link {self.link_seconds * 1e3:.3f} ms, {self.sent_bytes / 1e6:.2f} MB sent a rank"
            + ("" if self.fits else f", does not fit: needs {self.memory_bytes / 2**30:.0f} GiB")
        )


@dataclass(frozen=True)
class ScheduleChoice:
    """The schedule of a call across ranks, with the predicted cost of each. ``kp.explain`` returns one."""

    call: str
    placement: Placement
    link: Link
    schedule: Schedule
    predictions: tuple[Prediction, ...]
    reason: str
    kernels: tuple[str, ...]
    """(name, kernel) of each stage of this rank."""

    def __str__(self) -> str:
        sizes = sorted(set(self.placement.sizes))
        tokens = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        lines = [
            self.call,
            f"{self.placement.ranks} ranks of {tokens} tokens, {self.placement.style}, busiest rank "
            f"{self.placement.imbalance:.3f}x the mean; {self.link.name} at {self.link.bandwidth / 1e9:g} GB/s",
        ]
        for prediction in self.predictions:
            mark = "->" if prediction.schedule == self.schedule else "  "
            why = f" ({self.reason})" if prediction.schedule == self.schedule else ""
            lines.append(f"{mark} {prediction}{why}")
        return "\n".join([*lines, *(f"   {kernel}" for kernel in self.kernels)])

    __repr__ = __str__


_EFFICIENCY = 0.5  # fraction of the matrix units' peak that attention kernels reach
_STAGE_SECONDS = 3e-5  # launch overhead of a stage and its merge, per pass
_DEFAULT_RATE, _DEFAULT_BANDWIDTH = 5e10, 1e10  # one or two cores, for a device without known rates
_AT_ONCE = 8  # messages of one exchange whose latencies overlap
_AS_FAST = 1.02  # accuracy of predictions: within it, the schedule that needs less memory wins
_SAMPLES = 2048  # sampled queries of a rank when pairs are counted


def _rates(device: Device, dtype: torch.dtype) -> tuple[float, float]:
    """Return (FLOP/s, bytes/s) without measuring, because every rank must make the same choice."""
    rates = device.rates if device.rates and device.rates.source == "datasheet" else None
    if rates is None:
        same = [known.rates for known in CATALOGUE.values() if known.arch == device.arch and known.rates]
        rates = same[0] if same and device.backend != "cpu" else None  # CPUs of one instruction set differ
    if rates is None:
        return _DEFAULT_RATE, _DEFAULT_BANDWIDTH
    # A dtype without a rate in the data sheet counts as its slowest one.
    slowest = min(rates.matmul.values(), default=_DEFAULT_RATE)
    return rates.matmul.get(str(dtype).removeprefix("torch."), slowest) * _EFFICIENCY, rates.bandwidth


@dataclass(frozen=True, eq=False)
class _Volumes:
    """Keys and pairs that each rank needs from each other, independent of the heads and the link."""

    keys: Array
    """(R, R) keys, exact."""
    pairs: Array
    """(R, R) kept pairs, averaged over batch entries and heads; long sequences are sampled."""


@lru_cache(maxsize=16)
def _volumes(mask: Mask, placement: Placement) -> _Volumes:
    """Count the volumes in O(length + ranks x ranges); ``needed_keys`` would list the ranges in O(ranks x length)."""
    known = mask.layout(placement.length, placement.length)
    pieces = sorted((one, rank) for rank, own in enumerate(placement.ranges) for one in own)
    edges = np.array([0, *(last for (_, last), _ in pieces)], dtype=np.int64)
    owners = np.array([rank for _, rank in pieces], dtype=np.int64)
    ranks = placement.ranks
    keys, pairs = np.zeros((ranks, ranks), dtype=np.int64), np.zeros((ranks, ranks))
    every = _tiled(known, placement) if known.tables else _by_query(known, placement)
    for rank, lists in enumerate(every):
        runs = [joined_intervals(first, last) for first, last, _ in lists]
        first, last = (
            joined_intervals(*(np.concatenate(ends) for ends in zip(*runs, strict=True)))
            if runs
            else (NO_INTERVALS, NO_INTERVALS)
        )
        keys[rank] = np.bincount(owners, np.diff(_until(first, last, edges)), ranks)[:ranks]
        for first, last, weight in lists:
            step = max(1, len(first) // _SAMPLES)
            some = slice(step // 2, None, step)
            weight *= len(first) / max(1, len(first[some]))
            pairs[rank] += (
                weight * np.bincount(owners, np.diff(_until(first[some], last[some], edges)), ranks)[:ranks]
            )
    return _Volumes(keys, pairs / (known.batch * known.heads))


_Lists = list[tuple[Array, Array, float]]
"""Intervals of keys, with the number of queries that each stands for."""


def _by_query(known: Layout, placement: Placement) -> Iterator[_Lists]:
    """Yield the intervals of each rank's queries, as a list per batch entry and slot, where they mostly ascend."""
    for own in placement.ranges:
        ends = [
            np.concatenate([part[:, :, a:b] for a, b in own], axis=2) if own else part[:, :, :0]
            for part in (known.first, known.last)
        ]
        first, last = (part.reshape(part.shape[0] * part.shape[1], part.shape[2]) for part in ends)
        yield [(first[i], last[i], 1.0) for i in range(len(first))]


def _tiled(known: Layout, placement: Placement) -> Iterator[_Lists]:
    """Yield the intervals of each rank's tiles for a mask with tables; a partial tile counts half."""
    tile = known.finest_block
    walk = known.walk(tile, tile)
    rows = -(-known.q_len // tile)
    span, full_offsets, full, partial_offsets, partial, _ = (x.numpy().astype(np.int64) for x in walk.tensors())
    found: list[_Lists] = [[] for _ in placement.ranges]
    rank_of = np.zeros(max(rows, 1), dtype=np.int64)
    for rank, own in enumerate(placement.ranges):
        rank_of[indices(tuple((a // tile, -(-b // tile)) for a, b in own))] = rank
    row_of = np.arange(len(span))
    for low, high, row, weight in (
        (span[:, 0], span[:, 1], row_of, 1.0),
        (full, full + 1, np.repeat(row_of, np.diff(full_offsets)), 1.0),
        (partial, partial + 1, np.repeat(row_of, np.diff(partial_offsets)), 0.5),
    ):
        owner = rank_of[row % max(rows, 1)]
        order = np.argsort(owner, kind="stable")
        cuts = np.searchsorted(owner[order], np.arange(1, placement.ranks))
        parts = (np.split((ends * tile).clip(max=known.kv_len)[order], cuts) for ends in (low, high))
        for lists, first, last in zip(found, *parts, strict=True):
            lists.append((first, last, weight * tile))
    yield from found


def _until(first: Array, last: Array, edges: Array) -> Array:
    """Return the total number of keys of the intervals before each edge."""

    def total(ends: Array) -> Array:
        ends = np.sort(ends, kind="stable").astype(np.int64)
        at = np.searchsorted(ends, edges)
        return np.concatenate([[0], np.cumsum(ends)])[at] + edges * (len(ends) - at)

    found: Array = total(last) - total(first)
    return found


@lru_cache(maxsize=256)
def predict(mask: Mask, placement: Placement, shape: Shape, device: Device, link: Link) -> tuple[Prediction, ...]:
    """Return the cost of each schedule for the busiest rank, forward and, if the shape trains, backward.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> from kernel_pytorch.distributed.cost import Shape, predict
        >>> mask = kp.masks.causal()
        >>> placement = kp.context_parallel.place(mask, length=65536, ranks=8)
        >>> shape = Shape(1, 32, 8, 128, 128, torch.bfloat16)
        >>> found = predict(mask, placement, shape, kp.device("nvidia/h100"), kp.context_parallel.LINKS["nvlink4"])
        >>> [one.schedule for one in found]
        ['ring', 'gather', 'heads']
    """
    call = _Call(placement, _volumes(mask, placement), shape, device, link)
    found = []
    for schedule in SCHEDULES:
        refusal = heads_refusal(placement.ranks, shape.heads, shape.kv_heads) if schedule == "heads" else None
        if refusal:
            infinite = float("inf")
            compute = float(call.compute.sum(1).mean())
            found.append(Prediction(schedule, infinite, compute, infinite, 0, refusal=refusal))
            continue
        if schedule == "ring":
            compute, (seconds, on_link), memory = call.compute.sum(1).max(), _ring(call), _ring_memory(call)
        else:
            exchanges = _gather_exchanges(call) if schedule == "gather" else _heads_exchanges(call)
            memory = _gather_memory(call) if schedule == "gather" else _heads_memory(call)
            work = call.compute.sum(1)
            compute = work.max() if schedule == "gather" else work.mean()
            on_link = sum(_exchange_seconds(link, one) for one in exchanges)
            copied = sum(max(one.sum(0).max(), one.sum(1).max()) for one in exchanges) * 4 / call.bandwidth
            seconds = compute + on_link + copied + call.passes * _STAGE_SECONDS
        fits = device.memory_bytes == 0 or memory < device.memory_bytes  # 0: unknown
        sent = max(sent_bytes(mask, placement, shape, schedule))
        found.append(Prediction(schedule, float(seconds), float(compute), float(on_link), sent, int(memory), fits))
    return tuple(found)


def sent_bytes(mask: Mask, placement: Placement, shape: Shape, schedule: Schedule) -> tuple[int, ...]:
    """Return the bytes that each rank sends in a call, including its backward if the shape trains.

    Exact, unless the loss uses the log-sum-exp or a kernel is pinned, which may change it a little.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> from kernel_pytorch.distributed.cost import Shape, sent_bytes
        >>> mask = kp.masks.window(15, 0)
        >>> placement = kp.context_parallel.place(mask, length=256, ranks=2)
        >>> sent_bytes(mask, placement, Shape(1, 1, 1, 8, 8, torch.float32, training=False), "ring")
        (960, 0)
    """
    refusal = heads_refusal(placement.ranks, shape.heads, shape.kv_heads)
    if schedule == "heads" and refusal:
        raise ValueError(f"schedule={schedule!r}: {refusal}")
    call = _Call(placement, _volumes(mask, placement), shape, None, None)
    exchanges = _heads_exchanges(call) if schedule == "heads" else _gather_exchanges(call)
    found = sum((one.sum(0) for one in exchanges), np.zeros(placement.ranks, dtype=np.int64))
    return tuple(int(one) for one in found)


class _Call:
    """The costs of a call with its placement, device and link, as arrays over ranks."""

    def __init__(
        self, placement: Placement, volumes: _Volumes, shape: Shape, device: Device | None, link: Link | None
    ) -> None:
        self.sizes = np.array(placement.sizes, dtype=np.int64)
        self.length, self.ranks = placement.length, placement.ranks
        self.shape, self.keys, self.pairs = shape, volumes.keys, volumes.pairs
        self.others = self.keys * (1 - np.eye(self.ranks, dtype=np.int64))
        self.passes = 2 if shape.training else 1
        if device is not None and link is not None:
            self.link = link
            self.rate, self.bandwidth = _rates(device, shape.dtype)
            flops = self.pairs * shape.batch * shape.heads * 2.0
            # Forward: GEMMs with K and V. Backward: both again, and one each for dq, dk and dv.
            self.forward = flops * (shape.head_dim + shape.value_dim) / self.rate
            self.backward = flops * (3 * shape.head_dim + 2 * shape.value_dim) / self.rate
            self.compute = self.forward + self.backward if shape.training else self.forward


def _gather_exchanges(call: _Call) -> list[Array]:
    """Return bytes [r, s] from rank s to rank r in each exchange. The ring sends the same in more exchanges."""
    keys = call.others * call.shape.key_bytes
    return [keys, keys, call.others.T * call.shape.gradient_bytes] if call.shape.training else [keys]


def _heads_exchanges(call: _Call) -> list[Array]:
    shape, ranks = call.shape, call.ranks
    different = 1 - np.eye(ranks, dtype=np.int64)
    from_tokens, to_tokens = different * call.sizes[None, :], different * call.sizes[:, None]
    heads = shape.batch * shape.heads // ranks
    kv_heads = shape.batch * max(shape.kv_heads // ranks, 1)  # a head that several ranks need is sent to each
    narrow, both = shape.dtype.itemsize, shape.head_dim + shape.value_dim
    found = [
        from_tokens * (heads * shape.head_dim + kv_heads * both) * narrow,
        to_tokens * heads * shape.value_dim * narrow,
        to_tokens * heads * shape.wide,
    ]
    if shape.training:
        # Gradients of a head that several ranks share are summed, and sent in float32.
        gradients = kv_heads * both * (narrow if shape.kv_heads >= ranks else shape.wide)
        found += [
            from_tokens * (heads * (shape.head_dim + 2 * shape.value_dim) + kv_heads * both) * narrow,
            from_tokens * heads * shape.wide,
            to_tokens * heads * shape.head_dim * narrow,
            to_tokens * gradients,
        ]
    return found


def _exchange_seconds(link: Link, given: Array) -> float:
    """Return the time of an exchange; a node's inner link and the link between nodes work in parallel."""
    node = np.arange(len(given)) // link.node_ranks
    inside = (node[:, None] == node[None, :]) if link.inner else np.zeros(given.shape, dtype=bool)
    slowest = 0.0
    for one, mine in ((link, ~inside), (link.inner, inside)):
        if one is None:
            continue
        for axis in (0, 1):  # what a rank sends, and what it receives
            amount = np.where(mine, given, 0)
            rounds = -(-(amount > 0).sum(axis) // _AT_ONCE)
            slowest = max(slowest, float((amount.sum(axis) / one.bandwidth + rounds * one.latency).max()))
    return slowest


def _ring(call: _Call) -> tuple[float, float]:
    """Return (seconds, seconds of communication) of the slowest rank, for forward plus backward."""
    seconds, on_link = _ring_pass(call, call.forward, backward=False)
    if call.shape.training:
        again = _ring_pass(call, call.backward, backward=True)
        seconds, on_link = seconds + again[0], on_link + again[1]
    return float(seconds.max()), float(on_link.max())


def _ring_pass(call: _Call, compute: Array, *, backward: bool) -> tuple[Array, Array]:
    """Return (seconds, seconds of communication) of each rank.

    A rank posts a stage's keys when it starts the previous stage, starts the stage when they have arrived and its own
    have been sent, and posts the gradients at its end; it waits for those one stage later. Messages queue on the
    link.
    """
    shape, link, ranks = call.shape, call.link, np.arange(call.ranks)
    node = ranks // link.node_ranks
    # Merging reads two partial results and writes one in float32, or accumulates dq and the gradients of keys.
    width = shape.head_dim if backward else shape.value_dim
    merge = 3 * shape.wide * shape.batch * shape.heads * width * call.sizes / call.bandwidth
    a_key = (4 * shape.key_bytes + (7 * shape.gradient_bytes if backward else 0)) / call.bandwidth  # and packing
    start, free = np.zeros(call.ranks), compute[ranks, ranks] + _STAGE_SECONDS
    link_free, owed, on_link = (np.zeros(call.ranks) for _ in range(3))

    def sent(amount: Array, ready: Array, source: Array, back: Array) -> tuple[Array, Array]:
        """Return (end, seconds) of the message into each rank; ``back`` is the rank that each rank sends to."""
        inside = node == node[source] if link.inner else False
        bandwidth = np.where(inside, (link.inner or link).bandwidth, link.bandwidth)
        latency = np.where(inside, (link.inner or link).latency, link.latency)
        some = amount > 0
        takes = np.where(some, amount / bandwidth + latency, 0.0)
        begin = np.maximum(np.maximum(ready, ready[source]), np.maximum(link_free, link_free[source]))
        end = np.where(some, begin + takes, 0.0)
        return np.maximum(end, end[back]), np.maximum(takes, takes[back])

    def finish(held: tuple[Array, Array, Array, Array, Array]) -> None:
        """Send gradients after the next stage's keys, which were posted before them."""
        nonlocal link_free, owed, on_link
        amount, ended, source, target, active = held
        end, takes = sent(amount[target], ended, target, source)
        link_free, owed = np.maximum(link_free, end), np.where(active, end, owed)
        on_link = on_link + takes

    held: tuple[Array, Array, Array, Array, Array] | None = None
    for distance in range(1, call.ranks):
        source, target = (ranks - distance) % call.ranks, (ranks + distance) % call.ranks
        keys = call.keys[ranks, source]
        if not keys.any():
            continue
        active = (keys > 0) | (keys[target] > 0)
        come, takes = sent(keys * shape.key_bytes, start, source, target)
        link_free, on_link = np.maximum(link_free, come), on_link + takes
        if held:
            finish(held)
        start = np.where(active, np.maximum(free, come), start)
        attends = np.where(keys > 0, _STAGE_SECONDS + merge, 0.0)
        ended = start + compute[ranks, source] + attends + a_key * (keys + keys[target]) / 2
        free = np.where(active, np.maximum(ended, owed), free)
        if backward:
            held = (keys * shape.gradient_bytes, ended, source, target, active)
    if held:
        finish(held)
    return np.maximum(free, owed), on_link


def _ring_memory(call: _Call) -> int:
    """Return the memory of two stages' keys, in flight and in use, and of gradients sent and received."""
    largest = int(call.others.max(initial=0))
    return largest * (2 * call.shape.key_bytes + (4 * call.shape.gradient_bytes if call.shape.training else 0))


def _gather_memory(call: _Call) -> int:
    """Return the memory of all keys as received and in order, their gradients, and the packed gradients."""
    keys = int(call.keys.sum(1).max()) if int(call.others.sum()) else 0
    return 2 * keys * (call.shape.key_bytes + (call.shape.gradient_bytes if call.shape.training else 0))


def _heads_memory(call: _Call) -> int:
    """Return the memory of the largest exchange as received and in order, and of the results."""
    largest = [int(one.sum(1).max()) for one in _heads_exchanges(call)]
    return 2 * largest[0] + largest[1] if not call.shape.training else 2 * largest[3] + 2 * sum(largest[5:])


def choose(predictions: tuple[Prediction, ...], pinned: Schedule | None) -> tuple[Schedule, str]:
    """Return the pinned schedule, or the one predicted fastest; raise an error if the pinned one cannot run.

    Among predictions that are too close to tell apart, the one with the least memory is chosen.

    Example:
        >>> from kernel_pytorch.distributed.cost import Prediction, choose
        >>> choose((Prediction("ring", 2.0, 1.0, 1.0, 8), Prediction("gather", 1.5, 1.0, 0.5, 8)), None)
        ('gather', 'predicted fastest')
    """
    by_name = {one.schedule: one for one in predictions}
    if pinned is not None:
        if pinned not in by_name:
            raise ValueError(f"schedule={pinned!r}: use auto, {', '.join(by_name)}")
        if by_name[pinned].refusal:
            raise ValueError(f"schedule={pinned!r}: {by_name[pinned].refusal}; use another, or auto")
        return pinned, "pinned"
    can = [one for one in predictions if one.refusal is None]
    if not can:
        raise ValueError(
            "no schedule can run: " + "; ".join(f"{one.schedule}: {one.refusal}" for one in predictions)
        )
    can = [one for one in can if one.fits] or can
    fastest = min(can, key=lambda one: one.seconds)
    best = min((one for one in can if one.seconds <= _AS_FAST * fastest.seconds), key=lambda one: one.memory_bytes)
    return best.schedule, "predicted fastest" if best is fastest else "as fast as any, with the least memory"


def measure_link(
    group: Any,
    *,
    node_ranks: int | None = None,
    sizes: tuple[int, ...] = (),
    repeats: int = 7,
    timeout: float = 300.0,
) -> Link:
    """Measure the link of a group. Every rank must call it, and all get the slowest rank's result.

    Args:
        group: a process group, or one dimension of a DeviceMesh.
        node_ranks: number of adjacent ranks that share a node, to measure links inside and between nodes.
        sizes: bytes of the messages, ascending; None to choose them for the group's device.
        repeats: number of times that each size is sent; the medians are used.
        timeout: seconds after which a rank that does not respond is an error.

    Example:
        >>> import torch.distributed as dist, kernel_pytorch as kp
        >>> from kernel_pytorch.distributed.cost import measure_link
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> measure_link(dist.group.WORLD)  # one rank sends nothing: what is known of the backend
        Link(name='gloo', bandwidth=1000000000.0, latency=0.0002, node_ranks=1, inner=None)
        >>> dist.destroy_process_group()
    """
    from kernel_pytorch.distributed.context import _guessed_link, group_of  # which imports this module

    process_group = group_of(group)
    transport = Transport(process_group, timedelta(seconds=timeout))
    ranks = transport.ranks
    if node_ranks is not None and (node_ranks < 1 or ranks % node_ranks):
        raise ValueError(f"node_ranks={node_ranks}: use a number that divides the {ranks} ranks")
    if len(sizes) == 1 or list(sizes) != sorted(set(sizes)) or (sizes and sizes[0] < 1) or repeats < 1:
        raise ValueError(f"sizes={sizes}, repeats={repeats}: use two sizes or more, rising, and 1 or more")
    if ranks == 1:
        return _guessed_link(process_group)
    on_cpu = "gloo" in dist.get_backend(process_group)
    device = torch.device("cpu") if on_cpu else torch.device(torch.accelerator.current_accelerator() or "cuda")
    sizes = sizes or ((1 << 12, 1 << 20, 1 << 24) if on_cpu else (1 << 12, 1 << 24, 1 << 28))

    def timed(target: int, source: int) -> tuple[float, float]:
        """Return (bytes per second, seconds of latency) while every rank sends and receives."""
        medians = []
        for size in sizes:
            outgoing, incoming = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
            times = []
            for _ in range(repeats + 1):
                if not on_cpu:
                    torch.accelerator.synchronize(device)
                started = time.perf_counter()
                transport.exchange("the measurement of a link", {target: outgoing}, {source: incoming}).wait()
                if not on_cpu:
                    torch.accelerator.synchronize(device)
                times.append(time.perf_counter() - started)
            medians.append(statistics.median(times[1:]))  # the first one connects and allocates
        # Use the whole time of the longest message: differences of times are unreliable on a busy machine.
        return max(size / took for size, took in zip(sizes, medians, strict=True)), min(medians)

    rank, nodes = transport.rank, node_ranks or 1
    found: list[float] = []
    if nodes > 1:
        base = rank // nodes * nodes
        found += timed(base + (rank + 1) % nodes, base + (rank - 1) % nodes)
    if nodes < ranks:
        found += timed((rank + nodes) % ranks, (rank - nodes) % ranks)
    own = torch.tensor(found, dtype=torch.float64, device=device)
    others = [r for r in range(ranks) if r != rank]
    incoming = {r: torch.empty_like(own) for r in others}
    transport.exchange("the measurement of a link", dict.fromkeys(others, own), incoming).wait()
    every = torch.stack([own, *incoming.values()]).cpu()
    measured = [
        Link("measured", float(every[:, at].min()), float(every[:, at + 1].max())) for at in range(0, len(found), 2)
    ]
    return measured[0] if len(measured) == 1 else measured[1].between_nodes(nodes, measured[0])
