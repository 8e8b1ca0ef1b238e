"""What is known about each op on each backend: derived from evidence, never typed by hand.

*measured*: timed on hardware, its numbers inside their budget. *compiled*: built for the vendor's
architectures. *interpreted*: its cases pass in Triton's interpreter. *untested*: none of these.
A record about an older text of a kernel proves nothing about the present one and does not count.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kernel_pytorch.evidence import Benchmark, Checks, Record, load_evidence
from kernel_pytorch.hardware_abstraction.op import Kernel, registered_ops
from kernel_pytorch.hardware_abstraction.registry import Backend, backends

__all__ = ["Status", "Support", "matrix_markdown", "support_markdown", "support_table"]


class Status(enum.Enum):
    """Best first."""

    MEASURED = "measured"
    COMPILED = "compiled"
    INTERPRETED = "interpreted"
    UNTESTED = "untested"


@dataclass(frozen=True)
class Support:
    """One kernel of one op on one backend."""

    op: str
    kernel: str
    backend: str
    status: Status
    detail: str
    """Where that is known from: devices, architectures or cases."""


def support_table(shown: tuple[Backend, ...] | None = None) -> tuple[Support, ...]:
    """Every op, kernel and backend with its status; of all backends that load, or of those given.

    Example:
        >>> {row.backend for row in support_table()} >= {"cpu", "nvidia", "amd", "intel"}
        True
    """
    rows = []
    for op in registered_ops():
        for record in backends() if shown is None else shown:
            evidence = load_evidence(record.evidence)
            for kernel in record.kernels:
                if kernel.op == op.name:
                    status, detail = _status(kernel, record, evidence)
                    rows.append(Support(op.name, kernel.name, record.name, status, detail))
    return tuple(rows)


def _status(kernel: Kernel, backend: Backend, evidence: tuple[Record, ...]) -> tuple[Status, str]:
    current = [
        record
        for record in evidence
        if record.op == kernel.op and record.sources.get(kernel.name) == kernel.source_digest
    ]
    devices = {
        record.device.name
        for record in current
        if isinstance(record, Benchmark)
        and record.device.backend == backend.name
        and any(row.subject == f"kernel:{kernel.name}" for row in record.measurements)
    }
    if devices:
        return Status.MEASURED, ", ".join(sorted(devices))
    checks = [record for record in current if isinstance(record, Checks)]
    known = {device.arch for device in backend.catalogue}
    built = {row.arch for record in checks for row in record.compiled if row.kernel == kernel.name} & known
    if built:
        return Status.COMPILED, ", ".join(sorted(built))
    passed = [row for record in checks for row in record.interpreted if row.kernel == kernel.name]
    if passed:
        return Status.INTERPRETED, ", ".join(f"{row.format}: {len(row.cases)} cases" for row in passed)
    return Status.UNTESTED, ""


def support_markdown(shown: tuple[Backend, ...] | None = None) -> str:
    """The table as the documentation shows it: one row per op and kernel, one column per backend."""
    table = support_table(shown)
    columns = list(dict.fromkeys(row.backend for row in table))
    cells = {(row.op, row.kernel, row.backend): row for row in table}
    lines = ["| Op | Kernel | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for op, kernel in dict.fromkeys((row.op, row.kernel) for row in table):
        texts = []
        for column in columns:
            row = cells.get((op, kernel, column))
            text = "" if row is None else f"**{row.status.value}**" + (f": {row.detail}" if row.detail else "")
            texts.append(text)
        lines.append(f"| `{op}` | `{kernel}` | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def matrix_markdown(shown: tuple[Backend, ...] | None = None) -> str:
    """One row per op, one column per backend: the best that is known of any kernel, and of which."""
    table = support_table(shown)
    columns = list(dict.fromkeys(row.backend for row in table))
    lines = ["| Op | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for op in dict.fromkeys(row.op for row in table):
        texts = []
        for column in columns:
            rows = [row for row in table if (row.op, row.backend) == (op, column)]
            best = next((status for status in Status if any(row.status is status for row in rows)), None)
            kernels = ", ".join(f"`{row.kernel}`" for row in rows if row.status is best)
            texts.append(f"**{best.value}**: {kernels}" if best else "no kernel")
        lines.append(f"| `{op}` | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"
