"""Statistics of parity runs: gaps between arms at the same steps, spread of seeds, step times, time to a loss."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kernel_pytorch.evidence import Quantiles
from kernel_pytorch.hardware_abstraction.timing import quantiles
from kernel_pytorch.parity.training import BASELINE, Finished, Results, Settings

__all__ = ["RELATIVE_LIMIT", "TAIL", "Arm", "Gap", "Summary", "Verdict", "smoothed", "summarize"]

RELATIVE_LIMIT = 0.0025
"""A gap below this fraction of the bf16 loss passes, whatever the spread of the seeds."""
TAIL = 0.05
"""Fraction of the steps, at the end, whose mean is a run's training loss; also the window of smoothed curves."""


@dataclass(frozen=True)
class Gap:
    """The mean difference of an arm's loss from bf16's, over the seeds that both finished, in one measure."""

    measure: str
    """``"training"`` (the mean of the last steps) or ``"held-out"``."""
    baseline: float
    loss: float
    by_seed: dict[int, float]
    spread: float
    """Range (max - min) of the loss over the bf16 seeds."""
    deviation: float
    """Standard deviation of the loss over the bf16 seeds; 0 for one seed."""
    yardstick: float
    """The spread of the held-out bf16 losses, in either measure: all runs share the held-out text, while training
    losses of two seeds also differ because their last batches do."""

    @property
    def mean(self) -> float:
        return self.loss - self.baseline

    @property
    def relative(self) -> float:
        return self.mean / self.baseline

    @property
    def allowed(self) -> float:
        """The largest gap that passes: the yardstick, or the smallest gap that counts if that is larger."""
        return max(self.yardstick, RELATIVE_LIMIT * abs(self.baseline))

    @property
    def passes(self) -> bool:
        return abs(self.mean) <= self.allowed


@dataclass(frozen=True)
class Arm:
    """The results of one arm."""

    name: str
    seeds: tuple[int, ...]
    """The seeds whose runs finished."""
    training: dict[int, float]
    """Mean loss of the last steps, by seed."""
    held_out: dict[int, float]
    held_out_bf16: dict[int, float]
    """Held-out loss of the same parameters in the unconverted model, by seed."""
    curve: npt.NDArray[np.float64]
    """Loss at each step, averaged over the seeds."""
    step: Quantiles | None
    """Seconds of each step after the warm-up, of all seeds."""
    samples: int
    peak_bytes: int | None
    failure: Finished | None
    fell_back: tuple[str, ...] = ()
    """Layers that fell back to their dtype in any seed."""
    steps_to_loss: int | None = None
    """Steps until the smoothed curve reaches the summary's target; None if it does not."""

    @property
    def seconds_to_loss(self) -> float | None:
        """Seconds to the target at the median step time, which excludes warm-up and compilation."""
        return None if self.steps_to_loss is None or self.step is None else self.steps_to_loss * self.step.median


@dataclass(frozen=True)
class Verdict:
    """The comparison of one recipe with bf16."""

    arm: Arm
    gaps: tuple[Gap, ...]
    matched: dict[int, npt.NDArray[np.float64]]
    """Loss minus bf16's on the same batch, at each step, by seed."""
    speedup: float | None
    reason: str
    """Why it does not pass; empty if it does."""

    @property
    def passes(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class Summary:
    settings: Settings
    baseline: Arm
    verdicts: tuple[Verdict, ...]
    target: float | None
    """The target of time to a loss: the final bf16 training loss, plus the gap that always passes."""
    window: int
    """Number of steps of the tail and of the smoothing window."""
    warmup: int
    """Number of first steps that are left out of step times."""

    @property
    def passes(self) -> bool:
        return bool(self.verdicts) and all(verdict.passes for verdict in self.verdicts)


def smoothed(losses: Sequence[float] | npt.NDArray[np.float64], window: int) -> npt.NDArray[np.float64]:
    """Return the moving average over the last ``window`` values; over fewer at the beginning.

    Example:
        >>> smoothed([4.0, 2.0, 0.0, 0.0], 2).tolist()
        [4.0, 3.0, 1.0, 0.0]
    """
    total = np.concatenate([[0.0], np.cumsum(np.asarray(losses, dtype=np.float64))])
    last = np.arange(1, len(total))
    first = np.maximum(last - window, 0)
    means: npt.NDArray[np.float64] = (total[last] - total[first]) / (last - first)
    return means


def summarize(results: Results) -> Summary:
    """Return the statistics of a folder's finished runs."""
    steps = results.settings.steps
    window, warmup = max(1, round(TAIL * steps)), min(max(10, round(TAIL * steps)), steps - 1)
    names = list(dict.fromkeys(arm for arm, _ in results.losses if arm != BASELINE))
    baseline = _arm(results, BASELINE, window, warmup)
    arms = [_arm(results, name, window, warmup) for name in names]
    target = None
    if baseline.seeds:
        target = (1 + RELATIVE_LIMIT) * statistics.fmean(baseline.training.values())
        baseline, *arms = (_with_time(arm, target, window) for arm in (baseline, *arms))
    verdicts = tuple(_verdict(results, baseline, arm) for arm in arms)
    return Summary(results.settings, baseline, verdicts, target, window, warmup)


def _arm(results: Results, name: str, window: int, warmup: int) -> Arm:
    runs = {seed: run for (arm, seed), run in results.finished.items() if arm == name and run.failed_step is None}
    losses = {seed: results.losses[name, seed] for seed in runs}
    warm = [second for seed in runs for second in results.seconds[name, seed][warmup:]]
    return Arm(
        name=name,
        seeds=tuple(sorted(runs)),
        training={seed: statistics.fmean(losses[seed][-window:]) for seed in runs},
        held_out={seed: run.held_out for seed, run in runs.items() if run.held_out is not None},
        held_out_bf16={seed: run.held_out_bf16 for seed, run in runs.items() if run.held_out_bf16 is not None},
        curve=np.mean([losses[seed] for seed in runs], axis=0) if runs else np.zeros(0),
        step=Quantiles(*quantiles(warm)) if warm else None,
        samples=len(warm),
        peak_bytes=max((run.peak_bytes for run in runs.values() if run.peak_bytes), default=None),
        failure=results.failed(name),
        fell_back=tuple(sorted({layer for run in runs.values() for layer in run.fell_back})),
    )


def _with_time(arm: Arm, target: float, window: int) -> Arm:
    below = np.flatnonzero(smoothed(arm.curve, window) <= target)
    return replace(arm, steps_to_loss=int(below[0]) + 1 if len(below) else None)


def _spread(losses: dict[int, float]) -> tuple[float, float]:
    """Return (max - min, standard deviation)."""
    values = list(losses.values())
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return max(values) - min(values), deviation


def _verdict(results: Results, baseline: Arm, arm: Arm) -> Verdict:
    both = [seed for seed in arm.seeds if seed in baseline.seeds]
    gaps = tuple(
        _gap(measure, theirs, ours, both, _spread(baseline.held_out)[0])
        for measure, theirs, ours in (
            ("training", baseline.training, arm.training),
            ("held-out", baseline.held_out, arm.held_out),
        )
        if both
    )
    matched = {
        seed: np.subtract(results.losses[arm.name, seed], results.losses[BASELINE, seed], dtype=np.float64)
        for seed in both
    }
    speedup = baseline.step.median / arm.step.median if baseline.step and arm.step else None
    return Verdict(arm, gaps, matched, speedup, _reason(baseline, arm, gaps))


def _gap(measure: str, theirs: dict[int, float], ours: dict[int, float], both: list[int], yardstick: float) -> Gap:
    spread, deviation = _spread(theirs)  # over all bf16 seeds, also those that the arm has not finished
    return Gap(
        measure=measure,
        baseline=statistics.fmean(theirs[seed] for seed in both),
        loss=statistics.fmean(ours[seed] for seed in both),
        by_seed={seed: ours[seed] - theirs[seed] for seed in both},
        spread=spread,
        deviation=deviation,
        yardstick=yardstick,
    )


def _reason(baseline: Arm, arm: Arm, gaps: tuple[Gap, ...]) -> str:
    for failure in (arm.failure, baseline.failure):
        if failure is not None:
            return str(failure)
    if arm.fell_back:
        return f"{len(arm.fell_back)} layers fell back to {BASELINE}, such as {arm.fell_back[0]!r}"
    if not gaps:
        return f"no seed is finished in both {BASELINE} and {arm.name}"
    if arm.seeds != baseline.seeds:
        return f"{BASELINE} has finished seeds {list(baseline.seeds)} and {arm.name} {list(arm.seeds)}"
    return "; ".join(
        f"the {gap.measure} loss is {gap.mean:+.4f} ({gap.relative:+.2%}) from that of {BASELINE}, where "
        f"{gap.allowed:.4f} passes"
        for gap in gaps
        if not gap.passes
    )
