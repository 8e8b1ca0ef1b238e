"""``kernel-pytorch bench``: the benchmark with progress, a table, and the record."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import kernel_pytorch as kp
from kernel_pytorch import benchmarking
from kernel_pytorch.evidence import Measurement, clean_commit, evidence_directory, write_record
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.op import registered_op
from kernel_pytorch.hardware_abstraction.timing import readable, require_quiet

__all__ = ["measurement_table", "run"]


def run(
    op_name: str,
    *,
    cases: tuple[str, ...],
    formats: tuple[str, ...],
    device: str | None,
    seconds: float,
    record: bool,
    out: Path | None,
    command: str,
) -> None:
    console = Console()
    # Fail before the work if the run could not be recorded.
    commit = clean_commit(benchmarking.checkout()) if record else ""
    folder = out or evidence_directory()
    if record and folder is None:
        raise FileNotFoundError("no folder for the record: name one with --out")
    work = benchmarking.plan(registered_op(op_name), present_device(device), cases, formats)
    if record:
        require_quiet(work.device)
    console.print(f"[bold]{work.op.name}[/bold] on {work.device.name} ({work.device.arch})")
    for reason in work.left_out:
        console.print(f"[yellow]left out[/yellow] {reason}")
    if not work.steps:
        raise ValueError("no case is left to run; name a smaller one with --case")
    measurements: list[Measurement] = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("", total=len(work.steps))
        for step in work.steps:
            progress.update(task, description=f"{step}: checking against float64")
            for measurement in benchmarking.run(work, step, seconds):
                measurements.append(measurement)
                progress.update(task, description=f"{step}: {measurement.phase} {measurement.subject}")
            progress.advance(task)
        progress.update(task, description="done")
    console.print(measurement_table(measurements))
    if record and folder is not None:
        require_quiet(work.device)  # the machine may have become busy during the run
        path = folder / benchmarking.record_name(work.op, work.device)
        evidence = benchmarking.record(
            work.op.name, work.device, work.kernels, measurements, command=command, commit=commit
        )
        write_record(evidence, path)
        console.print(f"recorded in {path}", markup=False, soft_wrap=True)


def present_device(name: str | None) -> Device:
    """Return the device of a torch name; raise an error that lists the present ones if it is not present."""
    here = ", ".join(str(known.torch_device) for known in kp.devices())
    refusal = f"device={name!r}: not here; there is {here}"
    try:
        found = kp.device(name)
    except Exception as error:  # torch's error names neither the argument nor the present devices
        raise ValueError(refusal) from error
    if not found.present:
        raise ValueError(refusal)
    return found


def measurement_table(measurements: list[Measurement]) -> Table:
    """Return a table of times, rates and errors, with a section per case, dtype and phase."""
    table = Table(header_style="bold")
    table.add_column("")
    for column in ("median", "20 to 80 %", "GB/s", "speed-up", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for group in dict.fromkeys((row.case, row.format, row.phase) for row in measurements):
        rows = [row for row in measurements if (row.case, row.format, row.phase) == group]
        rivals = [row.seconds.median for row in rows if row.subject.startswith("baseline:")]
        table.add_section()
        table.add_row(" ".join(group), style="cyan")
        for row in rows:
            ours = row.subject.startswith("kernel:")
            table.add_row(
                "  " + row.subject.partition(":")[2],
                readable(row.seconds.median),
                f"{readable(row.seconds.p20)} - {readable(row.seconds.p80)}",
                f"{row.traffic_bytes / row.seconds.median / 1e9:,.0f}",
                f"{min(rivals) / row.seconds.median:.2f}x" if ours and rivals else "",
                f"{row.error / row.budget:.0%}" if row.error is not None and row.budget else "",
                style="bold" if ours else None,
            )
    table.caption = "speed-up: over the best baseline; error: share of its budget, against float64"
    return table
