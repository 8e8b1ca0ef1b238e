"""``python -m tools.website.freshness``: list the recorded numbers that are older than the code they measure.

A record is *stale* if the code of a kernel that it names has changed: its numbers are no longer valid, and pages that
show them fail to build. It is *older* if the code of other files that it measures has changed since its commit, which
may or may not have changed its numbers; so is a table of operators that was probed with another lowering. Comments,
docstrings and layout are ignored. It is *unknown* if its commit is not in this checkout's history, or its backend is
not installed. It is *broken* if it names code that does not exist, if it names no code and its commit is missing, or
if a measurement is impossible, such as a rate above the device's peak. A file of the folder is also broken if its
digest differs from ``SHA256SUMS``: commands that write a record add its digest, and ``--sum`` writes all digests, for
use after commands that regenerate curves, images and logs. Otherwise the record is *current*. The exit code is 1 if a
record is broken, and with ``--strict`` if one is not current.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from kernel_pytorch.benchmarking import checkout
from kernel_pytorch.documentation.op_support import lowering_digest, lowering_sources
from kernel_pytorch.evidence import (
    Benchmark,
    Checks,
    ContractRun,
    Execution,
    OpSupport,
    Record,
    listed_sums,
    named_evidence,
    sums,
    write_sums,
)
from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE
from kernel_pytorch.hardware_abstraction.registry import backends
from kernel_pytorch.hardware_abstraction.source_digest import file_code, is_part, part_digest
from tools.website.blocks import fences
from tools.website.measured import GONE, stale_kernels
from tools.website.pages import hand_written
from tools.website.plots import PLOTS

__all__ = ["Age", "ages", "implausible", "markdown"]

# Files that a record measures in addition to the kernels of one op, by the first part of the record's name.
_FP8 = ("fp8", "ops/fp8_cast", "ops/fp8_matmul")
_FP8_MODELS = (*_FP8, "ops/fp8_rms_norm", "ops/fp8_swiglu", "ops/attention")
_MEASURES = {
    "attention-long": ("ops/attention", "distributed/chunks.py", "distributed/parts.py"),
    "attention-step": ("ops/attention", "distributed/tokenwise.py", "ops/rms_norm"),
    "fp8-batches": _FP8_MODELS,
    "fp8-blocks": _FP8_MODELS,
    "fp8-grid": _FP8,
    "fp8-linears": _FP8,
    "fp8-memory": _FP8_MODELS,
    "fp8-parity": _FP8_MODELS,
    "fp8-small-block": _FP8_MODELS,
}
_LINK = re.compile(r'evidence/([\w.-]+)\.json "measured: ')


@dataclass(frozen=True)
class Age:
    """The state of a record relative to the present code."""

    record: str
    state: str
    recorded: str
    shown: int
    """Number of measured numbers and plots in the documentation that read it."""
    changed: tuple[str, ...]
    """Kernels, files, or blocks of documentation that have changed since."""


def ages(root: Path) -> list[Age]:
    """Return the age of every record of a checkout, and of the documentation blocks that need a GPU."""
    records = named_evidence(root / "benchmarks" / "evidence")
    shown = Counter(name for name, _ in PLOTS.values())
    for page in hand_written(root):
        shown.update(_LINK.findall(page.read_text(encoding="utf-8")))
    found = []
    for name, record in records.items():
        if isinstance(record, (Benchmark, Checks, ContractRun)):
            found.append(_age(root, name, record, shown[name]))
        elif isinstance(record, OpSupport):
            found.append(_age_of_operators(root, name, record, shown[name]))
    return [*found, *_edited_files(root), *_blocks_without_a_record(root, list(records.values()))]


def _age(root: Path, name: str, record: Benchmark | Checks | ContractRun, shown: int) -> Age:
    recorded = "" if isinstance(record, Checks) else record.recorded[:10]
    wrong = implausible(record) if isinstance(record, Benchmark) else []
    if wrong:
        return Age(name, "broken", recorded, shown, tuple(wrong))
    kernels = stale_kernels(record)
    parts = {part: _part_now(part) for part in record.sources if is_part(part)}
    gone = [f"kernel {kernel} {what}" for kernel, what in kernels.items() if what == GONE]
    gone += [f"{part} is not there" for part, digest in parts.items() if digest is None]
    if gone:
        return Age(name, "broken", recorded, shown, tuple(gone))
    if kernels:
        return Age(name, "stale", recorded, shown, tuple(f"kernel {kernel}" for kernel in kernels))
    if not isinstance(record, Benchmark):
        return Age(name, "current", recorded, shown, ())
    if parts:
        return _age_of_parts(root, name, record, shown, parts)
    paths = _MEASURES.get(name.partition(".")[0], (f"ops/{record.op}",))
    known = record.sources or name.partition(".")[0] in _MEASURES
    files = (
        _changed_since(root, record.commit, tuple(f"src/kernel_pytorch/{path}" for path in paths))
        if known
        else None
    )
    if files is None and not record.sources:
        return Age(name, "broken", recorded, shown, ("names no code that it measured",))
    if files is None:
        return Age(name, "unknown", recorded, shown, (f"commit {record.commit[:10]} is not here",))
    return Age(name, "older" if files else "current", recorded, shown, files)


def _part_now(part: str) -> str | None:
    """Return the present digest of a part of the package; None if the part does not exist."""
    try:
        return part_digest(part)
    except FileNotFoundError:
        return None


def _age_of_parts(root: Path, name: str, record: Benchmark, shown: int, parts: dict[str, str | None]) -> Age:
    """Return the age of a record of package parts: digests show which parts changed, git which of their files."""
    recorded = record.recorded[:10]
    changed = [part for part, digest in parts.items() if digest != record.sources[part]]
    if not changed:
        return Age(name, "current", recorded, shown, ())
    paths = (f"src/kernel_pytorch/{part.rstrip('/')}" for part in changed)
    files = _changed_since(root, record.commit, tuple(path for path in paths if (root / path).exists()))
    return Age(name, "older", recorded, shown, files or tuple(changed))


def _age_of_operators(root: Path, name: str, record: OpSupport, shown: int) -> Age:
    """Return the age of a table of operators, which has no commit: a digest shows changes, git the changed files."""
    owner = next((known for known in backends() if known.name == record.backend), None)
    if owner is None or owner.lowering is None:
        return Age(name, "unknown", "", shown, (f"no backend {record.backend!r} that lowers is here",))
    if record.sources.get("lowering") == lowering_digest(owner):
        return Age(name, "current", "", shown, ())
    written = ["git", "-C", str(root), "log", "-1", "--format=%H", "--", f"benchmarks/evidence/{name}.json"]
    commit = subprocess.run(written, capture_output=True, text=True, check=False).stdout.strip()
    files = [path.resolve() for path in lowering_sources(owner).values()]
    within = tuple(path.relative_to(root).as_posix() for path in files if root.resolve() in path.parents)
    changed = _changed_since(root, commit, within) if commit and within else None
    return Age(name, "older", "", shown, changed or (f"the lowering of {record.backend}",))


def _changed_since(root: Path, commit: str, paths: tuple[str, ...]) -> tuple[str, ...] | None:
    missing = [path for path in paths if not (root / path).exists()]
    if missing:
        raise FileNotFoundError(f"{missing[0]}: _MEASURES in {Path(__file__).name} names what is not there")
    command = ["git", "-C", str(root), "diff", "--name-only", commit, "--", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    changed = (file for file in done.stdout.split() if _code_changed(root, commit, file))
    return tuple(file.removeprefix("src/kernel_pytorch/") for file in changed)


def _code_changed(root: Path, commit: str, file: str) -> bool:
    """Return whether a file's code differs from that at a commit, ignoring comments, docstrings and layout."""
    then = subprocess.run(["git", "-C", str(root), "show", f"{commit}:{file}"], capture_output=True, check=False)
    if then.returncode != 0 or not (root / file).is_file():
        return True
    old, new = (file_code(file, data) for data in (then.stdout, (root / file).read_bytes()))
    return old != new


def _blocks_without_a_record(root: Path, records: list[Record]) -> list[Age]:
    """Return the blocks for kinds of devices that we have measured on, if their present form has not passed there."""
    passed = {block.digest for record in records if isinstance(record, Execution) for block in record.passed}
    devices = {"gpu", *(record.device.backend for record in records if isinstance(record, Benchmark))}
    missing = [
        f"{page.relative_to(root).as_posix()}:{fence.first}"
        for page in sorted((root / "docs").rglob("*.md"))
        for fence in fences(page.read_text(encoding="utf-8"))
        if fence.needs in devices and fence.digest not in passed
    ]
    return [Age("documentation on a GPU", "stale", "", len(missing), tuple(missing))] if missing else []


def _edited_files(root: Path) -> list[Age]:
    """Return the records, and files beside them, that were edited or are not listed in ``SHA256SUMS``."""
    folder = root / "benchmarks" / "evidence"
    listed, found = listed_sums(folder), sums(folder)
    changed = sorted(name for name in {*listed, *found} if listed.get(name) != found.get(name))
    if not listed:  # without a list, records cannot be checked
        changed = [name for name in changed if not name.endswith(".json")]
    return [Age("edited or unlisted files", "broken", "", 0, tuple(changed))] if changed else []


def implausible(record: Benchmark) -> list[str]:
    """Return the impossible measurements: quantiles out of order, or a rate or an error above its bound."""
    found = []
    known = next((one for one in CATALOGUE.values() if _named(one.name) in _named(record.device.name)), None)
    rates = known.rates.matmul.values() if known is not None and known.rates is not None else ()
    peak = max(rates, default=math.inf)
    for row in record.measurements:
        seconds = row.seconds
        what = f"{row.case}, {row.phase}, {row.subject}"
        if not 0 < seconds.p20 <= seconds.median <= seconds.p80:
            found.append(f"{what}: its quantiles are out of order")
        elif row.flops / seconds.median > peak:
            found.append(f"{what}: {row.flops / seconds.median / 1e12:.0f} TFLOP/s exceed the device's peak")
        elif row.error is not None and row.budget is not None and row.error > row.budget:
            found.append(f"{what}: its error exceeds its budget")
    return found


def _named(name: str) -> str:
    return name.partition("/")[2].lower() or name.lower().replace(" ", "").replace("-", "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.website.freshness",
        description=__doc__.partition(": ")[2] if __doc__ else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the table as data")
    parser.add_argument("--strict", action="store_true", help="exit 1 unless every record is current")
    parser.add_argument("--sum", action="store_true", help="write the digests of the files beside the records")
    wanted = parser.parse_args(arguments)
    if wanted.sum:
        folder = checkout() / "benchmarks" / "evidence"
        write_sums(folder, sums(folder))
        return 0
    found = ages(checkout())
    if wanted.json:
        print(msgspec.json.format(msgspec.json.encode([asdict(age) for age in found]), indent=2).decode())
    else:
        _show(found)
    return int(any(age.state != "current" if wanted.strict else age.state == "broken" for age in found))


def markdown(found: list[Age]) -> str:
    """Return the ages as a Markdown table."""
    rows = [f"| {age.record} | {age.state} | {age.recorded} | {', '.join(_few(age))} |" for age in found]
    return "\n".join(["| Record | State | Recorded | Changed since |", "|---|---|---|---|", *rows]) + "\n"


def _few(age: Age) -> list[str]:
    return [*age.changed[:3], *([f"and {len(age.changed) - 3} more"] if len(age.changed) > 3 else [])]


def _show(found: list[Age]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(
        Column("Record", no_wrap=True), "State", "Recorded", "Shown", Column("Changed since", overflow="fold")
    )
    colours = {"current": "green", "older": "yellow", "stale": "red", "unknown": "magenta", "broken": "bold red"}
    for age in found:
        colour = colours[age.state]
        table.add_row(
            age.record, f"[{colour}]{age.state}[/{colour}]", age.recorded, str(age.shown), "\n".join(_few(age))
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(table)
    counts = Counter(age.state for age in found)
    console.print(", ".join(f"{count} {state}" for state, count in counts.items()))
    if set(counts) - {"current"}:
        console.print(
            "BENCHMARKS.md has the command of each record; 'make docs-gpu' runs the blocks that need a GPU; "
            "'make probe' makes the table of operators."
        )


if __name__ == "__main__":
    sys.exit(main())
