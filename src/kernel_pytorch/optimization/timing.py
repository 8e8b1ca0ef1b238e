"""Timing of several arms in turns, the noise of the machine, and the decision whether one is faster."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernel_pytorch.hardware_abstraction.timing import quantiles

__all__ = [
    "TOO_NOISY",
    "UNSTEADY",
    "Arm",
    "Comparison",
    "Timer",
    "alternate",
    "compared",
    "noise_of",
    "saved_bytes",
    "unsteady",
]

TOO_NOISY = 0.25
"""Above this relative noise no decision is possible."""
UNSTEADY = 2.0
"""Where the slower runs of one arm take this many times as long as the faster ones, no decision is possible."""
_LEAST_NOISE = 0.01
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 60
_BATCH_SECONDS = 2e-3  # a shorter sample would time the clock
_LONG_SECONDS = 20e-3  # a longer sample does not notice whose data is in the caches


@dataclass(frozen=True)
class Arm:
    """One of the things compared: how to switch to it, and what to run."""

    name: str
    enter: Callable[[], object]
    run: Callable[[], object]


Timer = Callable[[Sequence[Arm], torch.device, float], list[list[float]]]
"""Return the seconds of each arm in each round, given the arms, the device and the seconds to spend."""


def alternate(arms: Sequence[Arm], device: torch.device, seconds: float) -> list[list[float]]:
    """Run the arms in turns, in both orders, for about so many seconds; return the time of each run by arm.

    A short arm runs once untimed after it is entered, because the other one has used the caches.
    """
    samples: list[list[float]] = [[] for _ in arms]
    first = []
    for arm in arms:
        arm.enter()
        arm.run()  # compilation and first-use costs
        first.append(max(_timed(arm, device, 1), 1e-9))
    batches = [max(1, int(_BATCH_SECONDS / seconds_of_one)) for seconds_of_one in first]
    deadline = time.perf_counter() + seconds
    for round_number in range(_MOST_ROUNDS):
        order = range(len(arms)) if round_number % 2 == 0 else reversed(range(len(arms)))
        for number in order:
            arms[number].enter()
            if first[number] < _LONG_SECONDS:
                arms[number].run()
            samples[number].append(_timed(arms[number], device, batches[number]))
        if round_number + 1 >= _LEAST_ROUNDS and time.perf_counter() > deadline:
            break
    return samples


def _timed(arm: Arm, device: torch.device, batch: int) -> float:
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(batch):
        arm.run()
    _synchronize(device)
    return (time.perf_counter() - started) / batch


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class Comparison:
    """One arm beside another on one input, in seconds."""

    before: float
    after: float
    ratio: float
    """Median over the rounds of after / before."""
    undisturbed: float
    """The 20th percentile of after over that of before: other programs only add to a time."""

    @property
    def cautious(self) -> float:
        """The larger of both ratios: a gain has to show in each."""
        return max(self.ratio, self.undisturbed)

    @property
    def speedup(self) -> float:
        return 1 / self.ratio if self.ratio else math.inf


def compared(before: Sequence[float], after: Sequence[float]) -> Comparison:
    """Compare two arms that ran in the same rounds.

    Example:
        >>> compared([2.0, 2.2, 2.0], [1.0, 1.1, 1.0]).speedup
        2.0
    """
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    return Comparison(
        statistics.median(before), statistics.median(after), statistics.median(ratios), _low(after) / _low(before)
    )


def _low(samples: Sequence[float]) -> float:
    return quantiles(list(samples))[0]


def unsteady(samples: Sequence[float]) -> float:
    """Return the 80th percentile of the times of one arm over the 20th.

    Example:
        >>> unsteady([1.0, 1.0, 1.0, 1.0, 1.0])
        1.0
    """
    low, _, high = quantiles(list(samples))
    return high / low


def noise_of(one: Sequence[float], same: Sequence[float]) -> float:
    """Return by how much two equal arms seem to differ: the least relative gain that means something.

    It is the difference of the medians, plus twice the standard error of a median of so many rounds; or the
    difference of the 20th percentiles, where that is larger.

    Example:
        >>> noise_of([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
        0.01
    """
    ratios = [new / old for old, new in zip(one, same, strict=True)]
    middle = statistics.median(ratios)
    deviation = 1.4826 * statistics.median(abs(ratio - middle) for ratio in ratios)
    error = abs(middle - 1) + 2 * 1.2533 * deviation / math.sqrt(len(ratios))
    return max(_LEAST_NOISE, error, abs(_low(same) / _low(one) - 1))


def saved_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the memory of one run: peak allocation on an accelerator, tensors saved for backward on a CPU.

    A CPU has no allocator that counts. What autograd saves is what checkpointing and fused losses change there.
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        run()
        torch.accelerator.synchronize(device)
        return torch.accelerator.max_memory_allocated(device)
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(seen.values())
