"""Test status of each kernel on each backend, derived from records.

*measured*: timed on hardware with results within their error budget, alone or as a kernel of a larger benchmark.
*tested*: its cases pass on hardware. *compiled*: compiles for the vendor's architectures. *interpreted*: its cases
pass in Triton's interpreter. *no record*: none of these for the present source.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kernel_pytorch.evidence import Benchmark, Checks, ContractRun, Record, load_evidence
from kernel_pytorch.hardware_abstraction.op import Kernel, registered_ops
from kernel_pytorch.hardware_abstraction.registry import Backend, backends

__all__ = ["Status", "Support", "support_table"]


class Status(enum.Enum):
    """Best first."""

    MEASURED = "measured"
    TESTED = "tested"
    COMPILED = "compiled"
    INTERPRETED = "interpreted"
    NO_RECORD = "no record"


@dataclass(frozen=True)
class Support:
    """One kernel of one op on one backend."""

    op: str
    kernel: str
    backend: str
    status: Status
    detail: str
    """The devices, architectures or cases of the records."""


def support_table(shown: tuple[Backend, ...] | None = None) -> tuple[Support, ...]:
    """Return every op and kernel of every backend, or of those given, with its status.

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
    full_name = f"{kernel.op}/{kernel.name}"
    current = [
        record
        for record in evidence
        if record.sources.get(kernel.name if record.op == kernel.op else full_name) == kernel.source_digest
    ]
    here = [
        record
        for record in current
        if isinstance(record, (Benchmark, ContractRun)) and record.device.backend == backend.name
    ]
    measured = {
        record.device.name for record in here if isinstance(record, Benchmark) and _times(record, kernel, backend)
    }
    if measured:
        return Status.MEASURED, ", ".join(sorted(measured))
    tested = {record.device.name for record in here if isinstance(record, ContractRun)}
    if tested:
        return Status.TESTED, ", ".join(sorted(tested))
    checks = [record for record in current if isinstance(record, Checks)]
    known = {device.arch for device in backend.catalogue}
    built = {row.arch for record in checks for row in record.compiled if row.kernel == kernel.name} & known
    if built:
        return Status.COMPILED, ", ".join(sorted(built))
    passed = [row for record in checks for row in record.interpreted if row.kernel == kernel.name]
    if passed:
        return Status.INTERPRETED, ", ".join(f"{row.format}: {len(row.cases)} cases" for row in passed)
    return Status.NO_RECORD, ""


def _times(record: Benchmark, kernel: Kernel, backend: Backend) -> bool:
    """Return whether a benchmark timed the kernel, alone or as the op's preferred kernel inside a larger subject."""
    if record.op != kernel.op:
        return kernel is next(known for known in backend.kernels if known.op == kernel.op)
    return any(row.subject == f"kernel:{kernel.name}" for row in record.measurements)
