"""``kernel-pytorch optimize``: make a model fast, with progress; write the plan and the report."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from kernel_pytorch.cli.factory import from_function, from_hugging_face
from kernel_pytorch.cli.output_file import check_writable

__all__ = ["Source", "optimize", "seconds_of"]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?\Z")
_UNITS = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class _TimeLeft(ProgressColumn):
    """Column with the time left, which counts down while a combination is tried."""

    def render(self, task: Task) -> Text:
        end = task.fields["end"]
        if end is None:
            return Text("")
        minutes, rest = divmod(int(max(0.0, end - time.monotonic())), 60)
        return Text(f"{minutes}:{rest:02d} left, best so far {task.fields['best']:.2f}x")


@dataclass(frozen=True)
class Source:
    """The source of the model and its inputs."""

    function: str | None
    hugging_face: Path | None
    batch: int
    lengths: tuple[int, ...]
    dtype: str | None
    device: str | None


def seconds_of(duration: str) -> float:
    """Return the seconds of a duration such as ``90``, ``90s``, ``5m`` or ``1h``.

    Example:
        >>> seconds_of("5m"), seconds_of("90")
        (300.0, 90.0)
    """
    found = _DURATION.match(duration)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"--budget {duration}: use a duration such as 90s, 5m or 1h")
    return float(found[1]) * _UNITS[found[2]]


def optimize(
    source: Source,
    goal: str,
    budget: str,
    include: tuple[str, ...] | None,
    exclude: tuple[str, ...],
    plan: Path | None,
    report: Path | None,
    *,
    budget_db: float | None,
    resume: bool,
) -> float:
    """Optimise the model; return its minimum speed-up over eager and over torch.compile, plus the noise."""
    from kernel_pytorch.optimization import Progress as Step
    from kernel_pytorch.optimization import optimize as optimize_model

    seconds = seconds_of(budget)
    for name, file, example in (("--plan", plan, "plan.json"), ("--report", report, "report.html")):
        if file is not None:
            check_writable(name, file, example)
    model, inputs = _loaded(source, goal)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), _TimeLeft())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("the original", total=1, end=None, best=1.0)

        def show(step: Step) -> None:
            end = time.monotonic() + step.seconds_left
            bar.update(
                task, description=step.trying, completed=step.done, total=step.total, end=end, best=step.best
            )

        best: Any = optimize_model(
            model,
            inputs,
            goal,
            budget=seconds,
            budget_db=budget_db,
            include=include,
            exclude=exclude,
            resume=resume,
            progress=show,
        )
    found = best.report
    console = Console()
    console.print(str(found), markup=False, highlight=False, soft_wrap=True)
    for path, write in ((plan, best.plan.save), (report, found.save)):
        if path is not None:
            write(path)
            console.print(f"written to {path}", markup=False, soft_wrap=True)
    gains = [one.speedup for one in found.inputs] + [one.over_compile for one in found.inputs if one.over_compile]
    return float(min(gains, default=1.0) + found.noise)


def _loaded(source: Source, goal: str) -> tuple[Any, Any]:
    if (source.function is None) == (source.hugging_face is None):
        raise ValueError("give either package.module:function or --hf FOLDER")
    if source.function is not None:
        return from_function(source.function)
    assert source.hugging_face is not None
    return from_hugging_face(
        source.hugging_face,
        batch=source.batch,
        lengths=source.lengths,
        labels=goal in ("training", "memory"),
        dtype=source.dtype,
        device=source.device,
    )
