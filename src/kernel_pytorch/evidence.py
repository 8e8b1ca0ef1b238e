"""Evidence: recorded measurements and checks, the only source of numbers and claims in the documentation.

A record is one JSON file. ``Benchmark`` says how fast, against which baseline and with which error;
``Checks`` says for which architectures a kernel compiles and which of its cases pass in the interpreter;
``Execution`` says which blocks of the documentation ran on a device, and ``ContractRun`` which kernels passed their
cases there.
``python -m kernel_pytorch.evidence`` prints the JSON schema.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import torch

import kernel_pytorch
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.op import Problem

__all__ = [
    "Benchmark",
    "Block",
    "Checks",
    "Compilation",
    "EvidenceError",
    "Execution",
    "Interpretation",
    "Measurement",
    "OpSupport",
    "Probed",
    "Quantiles",
    "ContractRun",
    "PassedCases",
    "clean_commit",
    "evidence_directory",
    "load_evidence",
    "named_evidence",
    "read_record",
    "schema",
    "versions",
    "write_record",
]


class EvidenceError(ValueError):
    """A record that cannot be read, or must not be written."""


class Quantiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds per run."""

    p20: float
    median: float
    p80: float


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One subject timed on one case."""

    case: str
    phase: str
    """``"forward"`` or ``"backward"``."""
    format: str
    """The number format of the tensors, by torch dtype name."""
    subject: str
    """``"kernel:NAME"`` for ours, ``"baseline:NAME"`` for what a user would call without us."""
    seconds: Quantiles
    samples: int
    traffic_bytes: int
    """The fewest bytes the call must move: each input read once, each output written once."""
    flops: int
    error: float | None = None
    """Worst error against float64, relative to the largest number of its row; None for baselines.

    For whole models in FP8: against the model in bf16, relative to the norm of a tensor; for parity, of losses.
    """
    budget: float | None = None
    """What the error may be: twice that of an independent low-precision run plus one rounding."""
    peak_bytes: int | None = None
    """The most device memory in use during the run, where that was measured."""
    predicted_peak_bytes: int | None = None
    """What a formula says of it, where there is one."""
    problem: Problem | None = None
    """What later calls are compared with, where this time takes part in choosing kernels."""


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The device a benchmark ran on."""

    name: str
    vendor: str
    backend: str
    arch: str
    memory_bytes: int
    compute_units: int
    driver: str = ""


class Benchmark(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="benchmark", tag_field="kind"):
    """One run of ``kernel-pytorch bench --record``."""

    op: str
    device: Facts
    versions: dict[str, str]
    commit: str
    command: str
    recorded: str
    copy_bandwidth: float
    """Bytes per second of a large copy on the same device in the same run, read plus written."""
    sources: dict[str, str]
    """Kernel name, or folder or file of the package such as ``"lowering/"``, to the digest of the code measured."""
    measurements: list[Measurement]


class Compilation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One Triton function built for one architecture without a device."""

    kernel: str
    function: str
    arch: str
    case: str
    format: str
    registers: int
    shared_memory_bytes: int
    spill_bytes: int


class Interpretation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cases of one kernel that meet their budget in Triton's interpreter, forward and backward."""

    kernel: str
    format: str
    cases: list[str]


class Checks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="checks", tag_field="kind"):
    """What is known of an op's kernels without their hardware; CI makes it anew and compares."""

    op: str
    versions: dict[str, str]
    sources: dict[str, str]
    compiled: list[Compilation]
    interpreted: list[Interpretation]


class Probed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What became of one operator: lowered whole and run with the right numbers, or not."""

    operator: str
    """As ``torch.export`` writes it, such as ``aten::gelu``."""
    format: str
    delegate: str = ""
    """Who ran it; empty where it was not taken whole, or not rightly."""
    reason: str = ""
    """Why it was not taken."""
    variant: str = ""
    """What is unusual about it, such as "a mask tensor"."""
    recipe: str = ""
    """The quantization recipe, where there was one."""
    dynamic: bool = False
    """Its first dimension may change."""


class OpSupport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="op_support", tag_field="kind"):
    """A backend's operators by probing; its pages show it, and CI probes a part of it anew."""

    backend: str
    versions: dict[str, str]
    sources: dict[str, str]
    """``"lowering"`` to the digest of the source text that was probed."""
    results: list[Probed]
    op: str = "lowering"


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A block of code in the documentation that ran to its end on a device."""

    page: str
    line: int
    digest: str
    """Of its text: a block that was edited since has not run."""


class Execution(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="execution", tag_field="kind"):
    """The documentation as it ran on a device: which blocks passed, and why others did not run there."""

    op: str
    device: Facts
    versions: dict[str, str]
    commit: str
    command: str
    recorded: str
    passed: list[Block]
    skipped: dict[str, str]
    """``"page:line"`` to the reason."""
    sources: dict[str, str] = {}


class PassedCases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cases that one kernel passed on a device, inside their error budgets, forward and backward."""

    kernel: str
    """With its op before it, as ``"attention/triton"``."""
    format: str
    cases: list[str]


class ContractRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tests", tag_field="kind"):
    """One run of ``python -m kernel_pytorch.testing.contract_run --record``: the backend contract on a device."""

    device: Facts
    versions: dict[str, str]
    commit: str
    command: str
    recorded: str
    sources: dict[str, str]
    """Kernel, with its op before it, to the digest of the code that was tested."""
    passed: list[PassedCases]
    op: str = "tests"


Record = Benchmark | Checks | Execution | OpSupport | ContractRun


def evidence_directory() -> Path | None:
    """Where our own records are: the checkout's ``benchmarks/evidence``, or the copy inside a wheel."""
    package = Path(__file__).parent
    for candidate in (package / "_evidence", package.parent.parent / "benchmarks" / "evidence"):
        if candidate.is_dir():
            return candidate
    return None


def schema() -> dict[str, Any]:
    """The JSON schema of a record.

    Example:
        >>> sorted(schema()["$defs"])[:3]
        ['Benchmark', 'Block', 'Checks']
    """
    return msgspec.json.schema(Record)


def read_record(path: Path) -> Record:
    """Read and validate one record; what is wrong with a bad one is in the error."""
    try:
        record: Record = msgspec.json.decode(path.read_bytes(), type=Record)
        return record
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise EvidenceError(f"{path.name} is not a valid record: {error}") from error


def load_evidence(directory: Path | None) -> tuple[Record, ...]:
    """Every record of a folder, in the order of the file names."""
    return tuple(named_evidence(directory).values())


def named_evidence(directory: Path | None) -> dict[str, Record]:
    """Every record of a folder by the name of its file, without the suffix; in that order."""
    if directory is None or not directory.is_dir():
        return {}
    return {path.stem: read_record(path) for path in sorted(directory.glob("*.json"))}


def write_record(record: Record, path: Path) -> None:
    """Write a record so that a reader never sees half of it."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.writing")
    try:
        temporary.write_bytes(text + b"\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def clean_commit(checkout: Path) -> str:
    """The commit of a checkout without local changes; anything else is an error: records must be repeatable."""

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(
                ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", "") or str(error)
            raise EvidenceError(f"a record needs a git checkout of the project: {detail.strip()}") from error
        return done.stdout.strip()

    top = Path(git("rev-parse", "--show-toplevel"))
    if top != checkout.resolve():  # an installed copy inside some other repository
        raise EvidenceError(f"a record needs a git checkout of the project: {checkout} is only a folder in {top}")
    changed = git("status", "--porcelain")
    if changed:
        raise EvidenceError(f"the tree has uncommitted changes, commit them first:\n{changed}")
    return git("rev-parse", "HEAD")


def versions() -> dict[str, str]:
    """The versions that decide speed and numerics."""
    from kernel_pytorch.hardware_abstraction.choice_cache import triton_version

    found = {
        "kernel_pytorch": kernel_pytorch.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": triton_version(),
    }
    for name in ("cuda", "hip", "xpu"):
        version = getattr(torch.version, name, None)
        if version:
            found[name] = str(version)
    return found


def facts(device: Device) -> Facts:
    """A device as a record keeps it."""
    return Facts(
        name=device.name,
        vendor=device.vendor,
        backend=device.backend,
        arch=device.arch,
        memory_bytes=device.memory_bytes,
        compute_units=device.compute_units,
    )


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


if __name__ == "__main__":
    print(msgspec.json.format(msgspec.json.encode(schema()), indent=2).decode())
