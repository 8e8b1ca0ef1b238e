"""``kernel-pytorch parity``: the paired runs with progress, their report, and the record."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from torch import nn

from kernel_pytorch import benchmarking
from kernel_pytorch.cli.bench import present_device
from kernel_pytorch.evidence import EvidenceError, Measurement, clean_commit, evidence_directory, write_record
from kernel_pytorch.fp8.autotune import may_have_matrix_units
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.registry import backend
from kernel_pytorch.parity import report as parity_report
from kernel_pytorch.parity import training as parity
from kernel_pytorch.parity.model import batches, held_out_batches, size_named
from kernel_pytorch.parity.statistics import Summary
from kernel_pytorch.parity.training import BASELINE, Convert, Finished, Results, Settings, Steps

__all__ = ["redraw", "run"]

OP = "fp8-parity"


def run(
    *,
    size: str,
    steps: int | None,
    seeds: int,
    recipes: tuple[str, ...],
    device: str | None,
    compiled: bool | None,
    record: bool,
    out: Path,
    command: str,
    convert: Convert = parity.default_convert,
) -> Summary:
    """Run the trainings that ``out`` does not have yet, write the report there, and optionally the record."""
    console = Console()
    # Fail before the work if the run could not be recorded or converted.
    commit = clean_commit(benchmarking.checkout()) if record else _commit()
    folder = evidence_directory()
    if record and folder is None:
        raise FileNotFoundError("no folder for the record: run from a checkout of the project")
    here = present_device(device)
    settings = _settings(size, steps, here, compiled)
    arms = (BASELINE, *_checked(recipes, settings, convert))
    results = Results(out, settings)
    foreign = sorted({run.commit for run in results.finished.values()} - {commit})
    if record and foreign:
        raise EvidenceError(
            f"{out} holds runs of commit {foreign[0][:10] or 'unknown'} and this is {commit[:10]}: a record needs "
            f"runs of one commit, name an empty folder with --out"
        )
    console.print(
        f"[bold]parity[/bold] of {', '.join(arms[1:])} with {BASELINE}: {settings.size}, {settings.steps} steps, "
        f"{seeds} seeds, on {here.name}, {'compiled' if settings.compiled else 'eager'}"
    )
    _train(results, arms, seeds, commit, convert, console)
    summary = _report(results, out, console)
    if record and folder is not None:
        _record(results, summary, here, folder, out, command, commit, console)
    return summary


def redraw(source: Path, out: Path | None) -> Summary:
    """Write the report of existing results."""
    return _report(Results(source), out or source, Console())


def _commit() -> str:
    """Return the commit of a checkout without changes; empty if there is none, so that nothing can be recorded."""
    try:
        return clean_commit(benchmarking.checkout())
    except EvidenceError:
        return ""


def _settings(size: str, steps: int | None, device: Device, compiled: bool | None) -> Settings:
    chosen, steps = size_named(size), steps or size_named(size).steps
    where = str(device.torch_device)
    if compiled is None:  # compiling for a CPU takes longer than it saves at the sizes that fit one
        compiled = torch.device(where).type != "cpu"
    return Settings(chosen.name, steps, where, device.name, str(torch.__version__), compiled)


def _checked(recipes: tuple[str, ...], settings: Settings, convert: Convert) -> tuple[str, ...]:
    """Return the recipes without duplicates, after converting a layer with each."""
    for recipe in recipes:
        if recipe == BASELINE:
            raise ValueError(f"recipe={recipe!r}: that arm is always there; name what to compare with it")
        if recipe == "auto" and not may_have_matrix_units(torch.device(settings.device).type):
            raise ValueError(
                f"recipe='auto': on {settings.device} it leaves all layers as they are, so nothing is compared; "
                f"use delayed, whose arithmetic is the same on every device"
            )
        convert(nn.Sequential(nn.Linear(32, 32, bias=False)).to(settings.device), recipe)
    return tuple(dict.fromkeys(recipes))


def _train(
    results: Results, arms: tuple[str, ...], seeds: int, commit: str, convert: Convert, console: Console
) -> None:
    size, steps = size_named(results.settings.size), results.settings.steps
    # Arms alternate, so that changes of the machine over time affect all of them.
    work = [(arm, seed) for seed in range(seeds) for arm in arms]
    ahead = [key for key in work if key not in results.finished]
    if len(ahead) < len(work):
        console.print(f"{len(work) - len(ahead)} of {len(work)} runs are in {results.path} already", soft_wrap=True)
    held_out = held_out_batches(size)
    text, drawn = torch.empty(0), -1
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=steps * len(ahead))
        for arm, seed in ahead:
            ended = results.failed(BASELINE) or results.failed(arm)
            if ended is not None:
                console.print(f"[yellow]left out[/yellow] {arm} seed {seed}: {ended}")
                progress.update(task, advance=steps)
                continue
            if drawn != seed:
                text, drawn = batches(size, steps, seed), seed

            def on_steps(done: Steps) -> None:
                loss = f"{done.losses[-1]:.3f}" if done.losses else ""
                progress.update(task, advance=len(done.losses), description=f"{done.arm} seed {done.seed} {loss}")

            run = parity.train(results, arm, seed, text, held_out, convert, commit=commit, on_steps=on_steps)
            _announce(run, console)


def _announce(run: Finished, console: Console) -> None:
    colour = "red" if run.failed_step is not None else "default"
    console.print(f"[{colour}]{run}[/]", highlight=False)


def _report(results: Results, out: Path, console: Console) -> Summary:
    summary, files, missing = parity_report.write_report(results, out)
    console.print(_table(summary))
    for verdict in summary.verdicts:
        colour = "green" if verdict.passes else "red"
        console.print(f"[{colour}]{parity_report.sentence(verdict)}[/]", highlight=False, soft_wrap=True)
    if missing:
        console.print(missing, style="yellow", markup=False, soft_wrap=True)
    for path in files:
        console.print(f"written: {path}", markup=False, soft_wrap=True, highlight=False)
    return summary


def _table(summary: Summary) -> Table:
    table = Table(
        header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )  # eight columns in eighty characters
    table.add_column("", no_wrap=True)
    for column in ("training", "held-out", "gap", "limit", "step", "speed-up", "to loss"):
        table.add_column(column, justify="right", no_wrap=True)
    by_name = {verdict.arm.name: verdict for verdict in summary.verdicts}
    for arm in (summary.baseline, *(verdict.arm for verdict in summary.verdicts)):
        verdict = by_name.get(arm.name)
        gap = verdict.gaps[-1] if verdict and verdict.gaps else None
        table.add_row(
            arm.name,
            parity_report.mean_text(arm.training),
            parity_report.mean_text(arm.held_out),
            f"{gap.relative:+.2%}" if gap else "",
            f"{gap.allowed / gap.baseline:.2%}" if gap else "",
            parity_report.duration(arm.step.median if arm.step else None),
            f"{verdict.speedup:.2f}x" if verdict and verdict.speedup else "",
            parity_report.duration(arm.seconds_to_loss),
        )
    table.caption = (
        "losses: means of the seeds; gap: held-out; to loss: warm steps until bf16's final training loss"
    )
    return table


def _record(
    results: Results,
    summary: Summary,
    device: Device,
    folder: Path,
    out: Path,
    command: str,
    commit: str,
    console: Console,
) -> None:
    """Record step times and gaps, and every run's curve; raise an error if a recipe does not pass."""
    if not summary.passes:
        reasons = "; ".join(parity_report.sentence(verdict) for verdict in summary.verdicts if not verdict.passes)
        raise benchmarking.GateError(f"not recorded: {reasons}")
    stem = folder / f"{OP}.{_slug(device)}"
    kernels = [kernel for kernel in backend(device.backend).kernels if kernel.op.startswith("fp8_")]
    evidence = benchmarking.record(
        OP, device, kernels, measurements(summary), command=command, commit=commit, parts=("fp8/", "parity/")
    )
    write_record(evidence, stem.with_name(f"{stem.name}.json"))
    shutil.copyfile(results.path, stem.with_name(f"{stem.name}.jsonl"))
    picture = out / parity_report.PICTURE
    if picture.exists():
        shutil.copyfile(picture, stem.with_name(f"{stem.name}.png"))
    console.print(f"recorded in {stem}.json, with its curves in .jsonl", markup=False, soft_wrap=True)


def _slug(device: Device) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in device.name.lower()).split())


def measurements(summary: Summary) -> list[Measurement]:
    """Return step times; a recipe's error is its largest gap relative to the bf16 loss, its budget what passes."""
    settings, size = summary.settings, size_named(summary.settings.size)
    mode = "compiled" if settings.compiled else "eager"
    case = f"{size.name}, {settings.steps} steps, {len(summary.baseline.seeds)} seeds, {mode}"
    rows = []
    for subject, arm, gaps in (
        (f"baseline:{BASELINE}", summary.baseline, ()),
        *((f"kernel:{verdict.arm.name}", verdict.arm, verdict.gaps) for verdict in summary.verdicts),
    ):
        if arm.step is None:
            continue
        worst = max(gaps, key=lambda gap: abs(gap.mean) / gap.allowed, default=None)
        rows.append(
            Measurement(
                case=case,
                phase="training step",
                format="bfloat16",
                subject=subject,
                seconds=arm.step,
                samples=arm.samples,
                traffic_bytes=0,
                flops=size.step_flops,
                error=abs(worst.relative) if worst else None,
                budget=worst.allowed / worst.baseline if worst else None,
            )
        )
    return rows
