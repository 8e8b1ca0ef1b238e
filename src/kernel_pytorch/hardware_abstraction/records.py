"""Order an op's kernels by recorded times: those of the run, among a backend's benchmark records, nearest to a call.

A recorded run applies to calls of its phase and kind whose sizes are all within a factor of four of its own, on
devices of its architecture. For all other calls the backend's order applies.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernel_pytorch.evidence import Benchmark, EvidenceError, read_record
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.op import Call, Kernel, Phase, Problem

__all__ = ["RecordedRun", "nearest_run", "ordered", "recorded_runs"]

_FURTHEST = 2.0
"""As a power of two: a run does not apply to a call with a size more than four times as large or small."""


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """The kernels of one op timed on one problem in one run."""

    record: str
    """The name of the record's file, without the suffix."""
    commit: str
    recorded: str
    backend: str
    arch: str
    op: str
    case: str
    phase: Phase
    format: str
    problem: Problem
    seconds: dict[str, float]
    """Median seconds by kernel."""
    sources: dict[str, str]
    """The digest of each kernel's source that was measured."""

    def distance(self, problem: Problem) -> float | None:
        """Return the distance of a problem from this run's, or None if the run does not apply to it."""
        if problem.kind != self.problem.kind or problem.sizes.keys() != self.problem.sizes.keys():
            return None
        steps = [abs(math.log2(size / self.problem.sizes[name])) for name, size in problem.sizes.items()]
        return sum(steps) if max(steps, default=0.0) <= _FURTHEST else None

    def __str__(self) -> str:
        return f"{self.record} at commit {self.commit[:7]}: {self.case}, {self.format}, {self.phase}"


@cache
def recorded_runs(folder: Path | None) -> tuple[RecordedRun, ...]:
    """Return the runs of a folder of benchmark records; each folder is read once.

    A record that cannot be read gives a warning and is skipped.
    """
    found: list[RecordedRun] = []
    for path in sorted(folder.glob("*.json")) if folder is not None and folder.is_dir() else ():
        try:
            record = read_record(path)
        except EvidenceError as error:
            warnings.warn(f"{error}; it orders no kernels", stacklevel=2)
            continue
        if isinstance(record, Benchmark):
            found += _runs(path.stem, record)
    return tuple(found)


def _runs(name: str, record: Benchmark) -> Iterator[RecordedRun]:
    groups: dict[tuple[str, str, str], RecordedRun] = {}
    for row in record.measurements:
        subject, _, kernel = row.subject.partition(":")
        if row.problem is None or subject != "kernel" or row.phase not in ("forward", "backward"):
            continue
        run = groups.setdefault(
            (row.case, row.phase, row.format),
            RecordedRun(
                record=name,
                commit=record.commit,
                recorded=record.recorded,
                backend=record.device.backend,
                arch=record.device.arch,
                op=record.op,
                case=row.case,
                phase=row.phase,  # type: ignore[arg-type]
                format=row.format,
                problem=row.problem,
                seconds={},
                sources=record.sources,
            ),
        )
        run.seconds[kernel] = row.seconds.median
    yield from groups.values()


def nearest_run(
    runs: Sequence[RecordedRun], call: Call, device: Device, kernels: Sequence[Kernel]
) -> RecordedRun | None:
    """Return the run nearest to the call that timed at least two of the kernels, or None if none applies.

    Among equally near runs the one with the most kernels wins, then the latest."""
    names = {kernel.name for kernel in kernels}
    near = [
        run
        for run in runs
        if (run.op, run.phase, run.backend, run.arch) == (call.op, call.phase, device.backend, device.arch)
        and len(names & run.seconds.keys()) > 1
    ]
    problem = call.problem if near else None
    if problem is None:
        return None
    found = [(distance, run) for run in near if (distance := run.distance(problem)) is not None]
    if not found:
        return None
    closest = min(distance for distance, _ in found)
    equals = [run for distance, run in found if distance == closest]
    return max(equals, key=lambda run: (len(names & run.seconds.keys()), run.recorded))


def ordered(kernels: Sequence[Kernel], run: RecordedRun | None) -> tuple[Kernel, ...]:
    """Return the kernels, with those that the run timed sorted by time; the others keep their places."""
    if run is None:
        return tuple(kernels)
    timed = sorted(
        (kernel for kernel in kernels if kernel.name in run.seconds), key=lambda kernel: run.seconds[kernel.name]
    )
    fastest_first = iter(timed)
    return tuple(next(fastest_first) if kernel.name in run.seconds else kernel for kernel in kernels)
