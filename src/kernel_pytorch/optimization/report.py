"""The report of ``kp.optimize``: measured, chosen and refused candidates, as text and as an HTML page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["InputReport", "ModuleReport", "Refusal", "Report", "StepReport"]


@dataclass(frozen=True)
class InputReport:
    """Seconds and bytes of the original and of the optimised model on one input."""

    label: str
    eager_seconds: float
    compile_seconds: float | None
    """Seconds with torch.compile; None if it was excluded, failed, or is the choice itself."""
    best_seconds: float
    speedup: float
    """Speed-up over eager: the median of the ratios of the rounds."""
    over_compile: float | None
    eager_bytes: int | None = None
    best_bytes: int | None = None


@dataclass(frozen=True)
class StepReport:
    """One step towards the plan; steps are in the order in which they were found."""

    candidate: str
    """The candidate that was added, or several that were added, removed or exchanged together."""
    summary: str
    kind: str
    speedup: float
    """Speed-up over the plan without this step, the minimum over all inputs."""
    error: float | None
    """Largest ratio of an error to its float64 budget; None from the first approximate step on."""
    snr_db: float | None
    drops: tuple[str, ...] = ()
    graphs: int = 0
    """Number of graphs that torch.compile compiled for the plan with this step, over all inputs."""
    breaks: int = 0
    """Number of graph breaks of torch.compile."""


@dataclass(frozen=True)
class Refusal:
    """A candidate or combination that is not in the plan, with the reason."""

    candidate: str
    reason: str


@dataclass(frozen=True)
class ModuleReport:
    """One module, with the candidates that change it and reasons of those that do not."""

    name: str
    kind: str
    changes: tuple[str, ...]
    left_alone: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """The results of ``kp.optimize`` with reasons. ``print`` shows a summary, ``save`` writes an HTML page.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> report = kp.optimize(model, (torch.ones(2, 8),), exclude=("compile",), budget=1).report
        >>> str(report).splitlines()[0].startswith("Sequential for latency on cpu")
        True
    """

    model: str
    goal: str
    device: str
    parameters: int
    noise: float
    budget_db: float
    seconds: float
    inputs: tuple[InputReport, ...]
    chosen: tuple[str, ...]
    """The candidates of the plan, in the order of application."""
    steps: tuple[StepReport, ...]
    refusals: tuple[Refusal, ...]
    modules: tuple[ModuleReport, ...]
    notes: tuple[str, ...]
    versions: dict[str, str]
    memory_kind: str = ""
    """What the bytes measure, such as peak allocation."""
    fallbacks: tuple[Refusal, ...] = ()
    """Fallbacks to the original, and warnings, while a combination was tried."""

    @property
    def speedup(self) -> float:
        """The minimum speed-up over eager of all inputs."""
        return min((one.speedup for one in self.inputs), default=1.0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one self-contained page of HTML."""
        from kernel_pytorch.optimization.html_report import page

        Path(path).write_text(page(self), encoding="utf-8")

    def __str__(self) -> str:
        lines = [f"{self.model} for {self.goal} on {self.device}: {self.verdict}"]
        lines += [f"  note: {note}" for note in self.notes]
        rows = [("input", "eager", "compile", "optimised", "over eager", "over compile")]
        rows += [
            (
                one.label,
                seconds(one.eager_seconds),
                seconds(one.compile_seconds),
                seconds(one.best_seconds),
                f"{one.speedup:.2f}x",
                f"{one.over_compile:.2f}x" if one.over_compile else "",
            )
            for one in self.inputs
        ]
        lines += _table(rows) if self.inputs else []
        for one in self.inputs:
            if one.eager_bytes and one.best_bytes is not None:
                before, after = size(one.eager_bytes), size(one.best_bytes)
                lines.append(f"  {self.memory_kind}, {one.label}: {before} to {after}")
        if self.steps:
            lines.append("steps")
            steps = [(step.candidate, f"{step.speedup:.2f}x", accuracy(step), step.summary) for step in self.steps]
            lines += _table(steps)
            lines += [
                f"  {step.candidate} leaves out the output {', '.join(step.drops)}"
                for step in self.steps
                if step.drops
            ]
            lines += [f"  {step.candidate}: {compilation(step)}" for step in self.steps if step.graphs]
        if self.fallbacks:
            lines.append("fallbacks and warnings")
            lines += [f"  {one.candidate}: {one.reason}" for one in self.fallbacks]
        if self.refusals:
            lines.append("refused")
            lines += [f"  {refusal.candidate}: {refusal.reason}" for refusal in self.refusals]
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines.append(f"noise {noise(self.noise)}, {self.seconds:.0f} s, {versions}")
        return "\n".join(lines)

    @property
    def verdict(self) -> str:
        """Return the outcome as a phrase."""
        if not self.chosen:
            return "left as it is"
        if self.goal == "memory":
            ratios = [one.best_bytes / one.eager_bytes for one in self.inputs if one.eager_bytes and one.best_bytes]
            return f"{max(ratios, default=1.0):.0%} of the memory with {' + '.join(self.chosen)}"
        return f"{self.speedup:.2f}x over eager with {' + '.join(self.chosen)}"


def noise(value: float) -> str:
    """Return the noise of the machine as text, or that the search ended before it was measured."""
    return f"{value:.1%}" if value else "not measured"


def accuracy(step: StepReport) -> str:
    """Return the accuracy of a step as text."""
    if step.error is not None:
        return f"{step.error:.0%} of the float64 budget"
    return "no difference" if step.snr_db is None else f"{step.snr_db:.0f} dB"


def compilation(step: StepReport) -> str:
    """Return graphs and graph breaks of a step as text; empty if nothing was compiled."""
    if not step.graphs:
        return ""
    graphs = f"{step.graphs} graph{'s' * (step.graphs != 1)} compiled"
    return f"{graphs}, {step.breaks} graph break{'s' * (step.breaks != 1)}"


def seconds(value: float | None) -> str:
    """Format a time with a suitable unit; return an empty string for None.

    Example:
        >>> seconds(0.00123), seconds(2.5)
        ('1.23 ms', '2.5 s')
    """
    if value is None:
        return ""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def size(count: int) -> str:
    """Format a number of bytes with a suitable unit.

    Example:
        >>> size(3 << 20)
        '3 MiB'
    """
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.3g} {unit}"
    return f"{count} B"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
