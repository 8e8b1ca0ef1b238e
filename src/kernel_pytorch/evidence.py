"""Records of measurements and checks, the only source of numbers and claims in the documentation.

A record is one JSON file. A ``Benchmark`` has times, baselines and errors. ``Checks`` has the architectures that a
kernel compiles for and the cases that pass in Triton's interpreter. An ``Execution`` has the blocks of the
documentation that ran on a device, and a ``ContractRun`` the kernels that passed their cases there.
``python -m kernel_pytorch.evidence`` prints the JSON schema.
"""

from __future__ import annotations

import datetime
import hashlib
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
    "SUMS",
    "clean_commit",
    "evidence_directory",
    "listed_sums",
    "load_evidence",
    "named_evidence",
    "read_record",
    "schema",
    "sums",
    "versions",
    "write_record",
    "write_sums",
]


SUMS = "SHA256SUMS"
"""File of an evidence folder with the digests of the others, so that an edit by hand is found."""


class EvidenceError(ValueError):
    """A record that cannot be read, or must not be written."""


class Quantiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds per run."""

    p20: float
    median: float
    p80: float


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The times of one kernel or baseline on one case."""

    case: str
    phase: str
    """``"forward"`` or ``"backward"``."""
    format: str
    """The number format of the tensors, by torch dtype name."""
    subject: str
    """``"kernel:NAME"`` for this package's kernels, ``"baseline:NAME"`` for the alternatives."""
    seconds: Quantiles
    samples: int
    traffic_bytes: int
    """Minimum memory traffic in bytes: each input read once, each output written once."""
    flops: int
    error: float | None = None
    """Largest error against float64, relative to the amax of its row; None for baselines.

    For FP8 models: the error against the model in bf16, relative to the norm of a tensor; for parity, of losses.
    """
    budget: float | None = None
    """The error budget: twice the error of an independent low-precision run plus one rounding."""
    peak_bytes: int | None = None
    """Peak device memory during the run; None if not measured."""
    predicted_peak_bytes: int | None = None
    """Peak device memory predicted by a formula; None if there is none."""
    problem: Problem | None = None
    """The sizes to compare later calls with, if this time is used for kernel selection."""


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
    """The cases of one kernel that meet their error budget in Triton's interpreter, forward and backward."""

    kernel: str
    format: str
    cases: list[str]


class Checks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="checks", tag_field="kind"):
    """The test status of an op's kernels without their hardware. CI repeats it and compares."""

    op: str
    versions: dict[str, str]
    sources: dict[str, str]
    compiled: list[Compilation]
    interpreted: list[Interpretation]


class Probed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The result of one operator: lowered whole and run with correct results, or not."""

    operator: str
    """The operator's name in ``torch.export``, such as ``aten::gelu``."""
    format: str
    delegate: str = ""
    """The delegate that ran it; empty if it was not lowered whole, or returned wrong results."""
    reason: str = ""
    """Why it was not lowered."""
    variant: str = ""
    """The variant, such as "a mask tensor"."""
    recipe: str = ""
    """The quantization recipe, if any."""
    dynamic: bool = False
    """Whether its first dimension is dynamic."""


class OpSupport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="op_support", tag_field="kind"):
    """The operators that a backend supports, found by probing. Its pages show them, and CI probes a sample again."""

    backend: str
    versions: dict[str, str]
    sources: dict[str, str]
    """``"lowering"`` to the digest of the source that was probed."""
    results: list[Probed]
    op: str = "lowering"


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A code block of the documentation that ran without an error on a device."""

    page: str
    line: int
    digest: str
    """Digest of the block's source: it does not apply to a block that was edited since."""


class Execution(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="execution", tag_field="kind"):
    """A run of the documentation on a device: the blocks that passed, and why others were skipped."""

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
    """The cases that one kernel passed on a device within their error budgets, forward and backward."""

    kernel: str
    """The kernel's name, prefixed with its op, such as ``"attention/triton"``."""
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
    """From the kernel's name, prefixed with its op, to the digest of the tested code."""
    passed: list[PassedCases]
    op: str = "tests"


Record = Benchmark | Checks | Execution | OpSupport | ContractRun


def evidence_directory() -> Path | None:
    """Return the folder of the project's records: ``benchmarks/evidence``, or the copy inside a wheel."""
    package = Path(__file__).parent
    for candidate in (package / "_evidence", package.parent.parent / "benchmarks" / "evidence"):
        if candidate.is_dir():
            return candidate
    return None


def schema() -> dict[str, Any]:
    """Return the JSON schema of a record.

    Example:
        >>> sorted(schema()["$defs"])[:3]
        ['Benchmark', 'Block', 'Checks']
    """
    return msgspec.json.schema(Record)


def read_record(path: Path) -> Record:
    """Read and validate one record; raise EvidenceError with the reason if it is not valid."""
    try:
        record: Record = msgspec.json.decode(path.read_bytes(), type=Record)
        return record
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise EvidenceError(f"{path.name} is not a valid record: {error}") from error


def load_evidence(directory: Path | None) -> tuple[Record, ...]:
    """Return every record of a folder, sorted by file name."""
    return tuple(named_evidence(directory).values())


def named_evidence(directory: Path | None) -> dict[str, Record]:
    """Return every record of a folder by its file name without the suffix, sorted."""
    if directory is None or not directory.is_dir():
        return {}
    return {path.stem: read_record(path) for path in sorted(directory.glob("*.json"))}


def sums(directory: Path) -> dict[str, str]:
    """Return the digest of each file of an evidence folder by its name, without the list of digests itself."""
    files = sorted(path for path in directory.iterdir() if path.is_file() and path.name != SUMS)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def listed_sums(directory: Path) -> dict[str, str]:
    """Return the digests that ``SHA256SUMS`` lists by file name; empty if there is no list."""
    path = directory / SUMS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def write_sums(directory: Path, digests: dict[str, str]) -> None:
    """Write ``SHA256SUMS`` in the format of ``sha256sum``."""
    lines = (f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    (directory / SUMS).write_text("".join(lines), encoding="utf-8")


def write_record(record: Record, path: Path) -> None:
    """Write a record atomically, with its digest in the folder's ``SHA256SUMS`` if there is one."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.writing")
    try:
        temporary.write_bytes(text + b"\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    listed = listed_sums(path.parent)
    if listed:  # only this line: a file that was edited by hand stays found
        write_sums(path.parent, {**listed, path.name: hashlib.sha256(text + b"\n").hexdigest()})


def clean_commit(checkout: Path) -> str:
    """Return the commit of a checkout; raise an error if it has local changes, since records must be repeatable."""

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
    """Return the versions that decide speed and numerics."""
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
    """Return a device's facts for a record."""
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
