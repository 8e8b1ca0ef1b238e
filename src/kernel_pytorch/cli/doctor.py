"""``kernel-pytorch doctor``: report this machine's devices, kernels and libraries, as data and as tables."""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import kernel_pytorch as kp
from kernel_pytorch.documentation import support_table
from kernel_pytorch.evidence import versions
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.op import registered_ops
from kernel_pytorch.hardware_abstraction.registry import backends, broken_backends, device
from kernel_pytorch.hardware_abstraction.selection import UnsupportedCallError, select

__all__ = ["diagnose", "show"]

# Distribution -> its purpose and how to install it.
_OPTIONAL = {
    "triton": ("GPU kernels", "pip install triton"),
    "executorch": ("programs for devices, text generation", "pip install 'kernel-pytorch[lowering]'"),
    "torchao": ("quantized programs; a candidate of kp.optimize", "pip install torchao"),
    "transformers": ("Hugging Face models and tokenizers", "pip install transformers"),
    "flash-attn-4": (
        "the fastest dense, windowed and block-sparse attention on NVIDIA Hopper",
        "pip install 'kernel-pytorch[hopper]'",
    ),
    "nvidia-cudnn-frontend": (
        "the fastest attention with other masks on NVIDIA Hopper",
        "pip install 'kernel-pytorch[hopper]'",
    ),
    "liger-kernel": ("a candidate of kp.optimize on GPUs", "pip install liger-kernel"),
    "matplotlib": ("plots of masks and of parity training", "pip install 'kernel-pytorch[plots]'"),
}


def diagnose(*, measure: bool = False) -> dict[str, Any]:
    """Return the report of ``doctor`` as plain data."""
    found = [device(known.torch_device, measure=True) if measure else known for known in kp.devices()]
    libraries = [
        {"package": name, "version": _version(name), "for": purpose, "install": command}
        for name, (purpose, command) in _OPTIONAL.items()
    ]
    missing = [
        {key: row[key] for key in ("package", "for", "install")} for row in libraries if row["version"] is None
    ]
    missing += [
        {"package": "torch", "for": record.title, "install": record.install_hint}
        for record in backends()
        if record.install_hint and not any(known.backend == record.name for known in found)
    ]
    return {
        "versions": versions(),
        "libraries": libraries,
        "runtime": _runtime(),
        "devices": [{**_plain(asdict(known)), "kernels": _choices(known)} for known in found],
        "broken_backends": [asdict(broken) for broken in broken_backends()],
        "support": [{**asdict(row), "status": row.status.value} for row in support_table()],
        "install_for_more": missing,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _runtime() -> dict[str, Any]:
    """Return whether the C++ runtime for lowered programs is built, and where, or what is missing to build it."""
    from kernel_pytorch.lowering.build import BuildError, Runtime, runtime_prefix

    try:
        built = Runtime(runtime_prefix())
    except BuildError as error:
        return {"built": False, "where": None, "remedy": str(error)}
    remedy = "" if built.present else "kernel-pytorch build-runtime"
    return {"built": built.present, "where": str(built.prefix), "remedy": remedy}


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: sorted(value) if isinstance(value, frozenset) else value for key, value in facts.items()}


def _choices(known: Device) -> dict[str, str]:
    """Return the kernel that would be selected for an ordinary call of each op in each dtype."""
    chosen = {}
    for op in registered_ops():
        case = next((case for case in op.cases if case.benchmark), op.cases[0])
        for number_format in case.formats:
            arguments = case.arguments(getattr(torch, number_format), torch.device("meta"))
            call = function_of(op).call("forward", tuple(arguments.values()), True)
            try:
                kernel = select(call, known).kernel.name
            except UnsupportedCallError:
                kernel = "none"
            chosen[f"{op.name} {number_format}"] = kernel
    return chosen


def show(report: dict[str, Any], *, support: bool = False) -> None:
    """Print the report; with ``support``, also the test status of each kernel."""
    console = Console()
    console.print("[bold]Versions[/bold]  " + "  ".join(f"{k} {v}" for k, v in report["versions"].items()))
    for facts in report["devices"]:
        title = escape(f"{facts['torch_device']}: {facts['name']}")
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column()
        table.add_row("backend", facts["backend"])
        table.add_row("architecture", facts["arch"])
        table.add_row("memory", f"{facts['memory_bytes'] / 2**30:.1f} GiB")
        table.add_row("compute units", str(facts["compute_units"]))
        table.add_row("number formats", ", ".join(facts["formats"]))
        table.add_row("matrix units", ", ".join(facts["matrix_units"]) or "none")
        if facts["features"]:
            table.add_row("features", ", ".join(facts["features"]))
        if facts["rates"]:
            rates = facts["rates"]
            table.add_row("bandwidth", f"{rates['bandwidth'] / 1e9:,.0f} GB/s ({rates['source']})")
            for name, rate in rates["matmul"].items():
                table.add_row(f"matmul {name}", f"{rate / 1e12:.2f} TFLOP/s")
        for what, kernel in facts["kernels"].items():
            table.add_row(what, f"kernel [green]{kernel}[/green]")
        console.print(table)
    there = [f"{row['package']} {row['version']}" for row in report["libraries"] if row["version"]]
    console.print(
        "[bold]Optional libraries[/bold]  " + ("  ".join(there) or "none"), highlight=False, soft_wrap=True
    )
    runtime = report["runtime"]
    state = "built" if runtime["built"] else f"not built: {runtime['remedy']}"
    console.print(f"[bold]C++ runtime[/bold]  {escape(state)}", highlight=False, soft_wrap=True)
    if support:
        console.print(_support_table(report["support"]))
    for broken in report["broken_backends"]:
        origin, error = escape(broken["origin"]), escape(broken["error"])
        console.print(f"[red bold]Broken backend {escape(broken['name'])}[/] ({origin}): {error}")
        console.print(broken["traceback"], style="dim", markup=False, highlight=False)
    if report["install_for_more"]:
        console.print("[bold]Install for more[/bold]")
        gains: dict[str, list[str]] = {}
        for row in report["install_for_more"]:
            gains.setdefault(row["install"], []).append(row["for"])
        for command, purposes in gains.items():
            # Not wrapped by us: a command stays one line to copy.
            console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)
            console.print(f"    for {'; '.join(purposes)}", highlight=False, markup=False, soft_wrap=True)


def _support_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "op", "kernel", "backend", "status", "where", title="Test status of each kernel", title_justify="left"
    )
    colours = {
        "measured": "green",
        "tested": "green",
        "compiled": "cyan",
        "interpreted": "yellow",
        "no record": "red",
    }
    for row in rows:
        status = f"[{colours[row['status']]}]{row['status']}[/]"
        table.add_row(row["op"], row["kernel"], row["backend"], status, row["detail"])
    return table
