"""Time several arms in alternation, measure the noise of the machine, and decide whether one arm is faster."""

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
"""Maximum relative noise at which decisions are possible."""
UNSTEADY = 2.0
"""Maximum ratio of the slower runs of one arm to its faster ones at which decisions are possible."""
_LEAST_NOISE = 0.01
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 60
_BATCH_SECONDS = 2e-3  # a shorter sample would be dominated by the clock's overhead
_LONG_SECONDS = 20e-3  # in longer samples, cache contents from the other arm do not matter


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: how to switch to it, and the function to time."""

    name: str
    enter: Callable[[], object]
    run: Callable[[], object]


Timer = Callable[[Sequence[Arm], torch.device, float], list[list[float]]]
"""Return the seconds of each arm in each round, given the arms, the device and the seconds to spend."""


def alternate(arms: Sequence[Arm], device: torch.device, seconds: float) -> list[list[float]]:
    """Run the arms alternately, in both orders, for about ``seconds``; return the time of each run by arm.

    A short arm runs once untimed after each switch, because the other arm has evicted its data from the caches.
    """
    samples: list[list[float]] = [[] for _ in arms]
    first = []
    for arm in arms:
        arm.enter()
        arm.run()  # warm-up: compilation and first-use costs
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
    """Times of two arms on one input, in seconds."""

    before: float
    after: float
    ratio: float
    """Median over the rounds of the ratio after / before."""
    undisturbed: float
    """Ratio of the 20th percentiles of after and before, because other programs only ever increase a time."""

    @property
    def cautious(self) -> float:
        """The larger of both ratios, so that a gain must show in each."""
        return max(self.ratio, self.undisturbed)

    @property
    def speedup(self) -> float:
        return 1 / self.ratio if self.ratio else math.inf


def compared(before: Sequence[float], after: Sequence[float]) -> Comparison:
    """Compare the times of two arms that ran in the same rounds.

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
    """Return the ratio of the 80th to the 20th percentile of the times of one arm.

    Example:
        >>> unsteady([1.0, 1.0, 1.0, 1.0, 1.0])
        1.0
    """
    low, _, high = quantiles(list(samples))
    return high / low


def noise_of(one: Sequence[float], same: Sequence[float]) -> float:
    """Return the measured difference of two equal arms: the smallest relative gain that is significant.

    It is the difference of the medians, plus twice the standard error of a median of that many rounds; or the
    difference of the 20th percentiles, if that is larger.

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

    There are no allocation statistics for CPUs. Saved tensors are what checkpointing and fused losses reduce there.
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
