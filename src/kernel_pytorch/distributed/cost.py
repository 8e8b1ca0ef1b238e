"""What each schedule would cost: bytes counted from the mask, seconds from a link's and a device's rates.

``ring``: a stage's compute hides the next stage's keys, so a stage costs the longer of the two. ``gather``: first all
keys, then all compute. ``heads``: an exchange before and after, then compute that every rank shares evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from kernel_pytorch.distributed.placement import Placement, needed_keys, work_of_queries
from kernel_pytorch.distributed.schedules import SCHEDULES, Schedule, heads_refusal
from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.masks import Mask
from kernel_pytorch.masks.part import size

__all__ = ["LINKS", "Link", "Prediction", "ScheduleChoice", "Shape", "choose", "predict"]


@dataclass(frozen=True)
class Link:
    """How ranks are connected.

    Example:
        >>> import kernel_pytorch as kp
        >>> kp.context_parallel.LINKS["nvlink4"].bandwidth
        450000000000.0
    """

    name: str
    bandwidth: float
    """Bytes a second that one rank sends, and receives at the same time."""
    latency: float
    """Seconds until the first byte of a message arrives."""


LINKS = {
    link.name: link
    for link in (
        Link("nvlink4", 450e9, 5e-6),  # H100 and H200 data sheets: 900 GB/s, both directions together
        Link("nvlink5", 900e9, 5e-6),  # B200 data sheet: 1.8 TB/s, both directions together
        Link("xgmi-mi300x", 448e9, 8e-6),  # MI300X data sheet: seven links of 64 GB/s a direction
        Link("infiniband-ndr", 50e9, 10e-6),  # one 400 Gbit/s port a GPU
        Link("gloo", 1e9, 2e-4),  # a CPU's loopback or Ethernet; measure_link() says more
    )
}


@dataclass(frozen=True)
class Shape:
    """The part of a call that costs."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    training: bool = True

    @property
    def key_bytes(self) -> int:
        """What one key and its value weigh."""
        return self.batch * self.kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """What the gradients of one key and its value weigh: float32 at the least."""
        return self.key_bytes // self.dtype.itemsize * max(4, self.dtype.itemsize)


@dataclass(frozen=True)
class Prediction:
    """One schedule's cost for the busiest rank; ``refusal`` says why it cannot run."""

    schedule: Schedule
    seconds: float
    compute_seconds: float
    link_seconds: float
    """Time on the link, hidden or not."""
    sent_bytes: int
    refusal: str | None = None

    def __str__(self) -> str:
        if self.refusal:
            return f"{self.schedule:<6}  refused: {self.refusal}"
        return (
            f"{self.schedule:<6}  {self.seconds * 1e3:9.3f} ms: compute {self.compute_seconds * 1e3:.3f} ms, "
            f"link {self.link_seconds * 1e3:.3f} ms, {self.sent_bytes / 1e6:.2f} MB sent a rank"
        )


@dataclass(frozen=True)
class ScheduleChoice:
    """The schedule of a call across ranks, with what each would cost. ``kp.explain`` returns one."""

    call: str
    placement: Placement
    link: Link
    schedule: Schedule
    predictions: tuple[Prediction, ...]
    reason: str
    kernels: tuple[str, ...]
    """For each stage of this rank: its name, and the kernel that serves it."""

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


_EFFICIENCY = 0.5  # of the matrix units' peak, what attention kernels reach
_STAGE_SECONDS = 3e-5  # launches of a stage and its merge
_DEFAULT_RATE, _DEFAULT_BANDWIDTH = 5e10, 1e10  # a core or two, where a device has no known rates


def _rates(device: Device, dtype: torch.dtype) -> tuple[float, float]:
    """(FLOP/s, bytes/s), from what is known without measuring: every rank must come to the same choice."""
    rates = device.rates if device.rates and device.rates.source == "datasheet" else None
    if rates is None:
        same = [known.rates for known in CATALOGUE.values() if known.arch == device.arch and known.rates]
        rates = same[0] if same else None
    if rates is None:
        return _DEFAULT_RATE, _DEFAULT_BANDWIDTH
    name = str(dtype).removeprefix("torch.")
    return rates.matmul.get(name, _DEFAULT_RATE) * _EFFICIENCY, rates.bandwidth


@lru_cache(maxsize=256)
def predict(mask: Mask, placement: Placement, shape: Shape, device: Device, link: Link) -> tuple[Prediction, ...]:
    """The cost of each schedule for the busiest rank, forward, and backward where the shape trains.

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
    ranks, length = placement.ranks, placement.length
    rate, bandwidth = _rates(device, shape.dtype)
    pairs = float(work_of_queries(mask, length, 128 if length >= 128 else 1).sum())
    known = mask.layout(length, length)
    a_pair = 2 * (shape.head_dim + shape.value_dim) * (3.5 if shape.training else 1.0)
    flops = pairs * shape.batch / known.batch * shape.heads / known.heads * a_pair
    compute = flops / rate / ranks
    busiest = compute * placement.imbalance
    needed = [[size(ranges) for ranges in row] for row in needed_keys(mask, placement)]
    a_key = 2 * shape.key_bytes + shape.gradient_bytes if shape.training else shape.key_bytes
    return tuple(
        _ring(needed, shape, busiest, a_key, link, bandwidth, placement)
        if schedule == "ring"
        else _gather(needed, busiest, a_key, link)
        if schedule == "gather"
        else _heads(ranks, length, shape, compute, link)
        for schedule in SCHEDULES
    )


def _sent(needed: list[list[int]], shape_bytes: int) -> int:
    """What the rank that sends most sends: its keys to others, and others' gradients back."""
    ranks = range(len(needed))
    return max(sum(needed[r][s] for r in ranks if r != s) for s in ranks) * shape_bytes


def _ring(
    needed: list[list[int]],
    shape: Shape,
    compute: float,
    a_key: int,
    link: Link,
    bandwidth: float,
    placement: Placement,
) -> Prediction:
    ranks, slowest, on_link = len(needed), 0.0, 0.0
    passes = 2 if shape.training else 1
    for r in range(ranks):
        total = max(sum(needed[r]), 1)
        distances = [d for d in range(ranks) if d == 0 or needed[r][(r - d) % ranks] or needed[(r + d) % ranks][r]]
        comm = [
            max(needed[r][(r - d) % ranks], needed[(r + d) % ranks][r]) * a_key / link.bandwidth
            + 2 * passes * link.latency
            for d in distances[1:]
        ]
        merge = 12 * placement.sizes[r] * shape.batch * shape.heads * shape.value_dim / bandwidth
        work = [compute * needed[r][(r - d) % ranks] / total + passes * _STAGE_SECONDS + merge for d in distances]
        slowest = max(slowest, sum(max(a, b) for a, b in zip(work, [*comm, 0.0], strict=True)))
        on_link = max(on_link, sum(comm))
    return Prediction("ring", slowest, compute, on_link, _sent(needed, a_key))


def _gather(needed: list[list[int]], compute: float, a_key: int, link: Link) -> Prediction:
    ranks = len(needed)
    busiest = max(
        max(
            sum(needed[r][s] for s in range(ranks) if s != r),
            sum(needed[s][r] for s in range(ranks) if s != r),
        )
        for r in range(ranks)
    )
    on_link = busiest * a_key / link.bandwidth + (3 * link.latency if ranks > 1 else 0.0)
    return Prediction("gather", compute + on_link + 2 * _STAGE_SECONDS, compute, on_link, _sent(needed, a_key))


def _heads(ranks: int, length: int, shape: Shape, compute: float, link: Link) -> Prediction:
    refusal = heads_refusal(ranks, shape.heads, shape.kv_heads)
    if refusal:
        return Prediction("heads", float("inf"), compute, float("inf"), 0, refusal)
    own = -(-length // ranks)
    to_others = (ranks - 1) / ranks
    narrow = shape.dtype.itemsize * shape.batch
    q = shape.heads * shape.head_dim * narrow
    out = shape.heads * (shape.value_dim * narrow + 4 * shape.batch)
    shared = max(shape.kv_heads, ranks)  # a head that several ranks need is sent to each
    kv = shared * (shape.head_dim + shape.value_dim) * narrow
    sent = own * to_others * (q + kv + out)
    if shape.training:
        gradients = kv if shape.kv_heads >= ranks else kv // shape.dtype.itemsize * 4
        sent += own * to_others * (2 * q + 2 * out + kv + gradients)
    on_link = sent / link.bandwidth + (8 if shape.training else 3) * link.latency * (ranks > 1)
    return Prediction("heads", compute + on_link + 2 * _STAGE_SECONDS, compute, on_link, int(sent))


def choose(predictions: tuple[Prediction, ...], pinned: Schedule | None) -> tuple[Schedule, str]:
    """The pinned schedule, or the one predicted fastest; a pinned one that cannot run is an error."""
    by_name = {one.schedule: one for one in predictions}
    if pinned is not None:
        if pinned not in by_name:
            raise ValueError(f"schedule={pinned!r}: use auto, {', '.join(by_name)}")
        if by_name[pinned].refusal:
            raise ValueError(f"schedule={pinned!r}: {by_name[pinned].refusal}; use another, or auto")
        return pinned, "pinned"
    best = min(predictions, key=lambda one: one.seconds)
    return best.schedule, "predicted fastest"
