"""Run every Python block of the documentation on this machine's GPU, and record which passed.

    python -m tools.website.execute --record              # write benchmarks/evidence/documentation.<device>.json
    python -m tools.website.execute docs/attention.md     # one page, no record

Needs pytest and sybil in addition to the package's requirements; without installing the package, set PYTHONPATH=src.
A block that needs a missing package (transformers, executorch, ...) is skipped with that reason, and so are the
blocks that depend on it. A block that fails for any other reason fails the run, and nothing is recorded.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import kernel_pytorch as kp
from kernel_pytorch import benchmarking
from kernel_pytorch.evidence import (
    Block,
    EvidenceError,
    Execution,
    clean_commit,
    facts,
    now,
    versions,
    write_record,
)
from kernel_pytorch.hardware_abstraction import Device
from tools.website.blocks import Fence, fences

OPTIONAL = ("executorch", "torchao", "transformers", "matplotlib")
ROOT = benchmarking.checkout()


class Collector:
    """Collects the outcome of each block, by page and line."""

    def __init__(self) -> None:
        self.passed: list[Block] = []
        self.skipped: dict[str, str] = {}
        self.incomplete: dict[Fence | None, str] = {}  # blocks with a skipped line
        self.pages = {path: list(fences(path.read_text(encoding="utf-8"))) for path in pages()}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Replace Sybil's error report, which fails if the traceback has only the block's own frame."""
        for item in items:
            item.repr_failure = lambda error, _=None: "".join(traceback.format_exception(error.value))

    def fence(self, item: Any) -> Fence | None:
        """Return the block of a test; None for a directive such as a skip."""
        blocks = self.pages[Path(item.example.path).resolve()]
        return next((fence for fence in blocks if fence.first <= item.example.line <= fence.last), None)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, None]:
        outcome = yield
        report = outcome.get_result()
        example, fence = item.example, self.fence(item)
        page = Path(example.path).resolve()
        place = f"{page.relative_to(ROOT).as_posix()}:{example.line}"
        if report.failed and call.excinfo is not None:
            reason = self.incomplete.get(fence, "") or self.left_out(place.partition(":")[0], call.excinfo.value)
            if reason:
                self.incomplete[fence] = reason  # earlier lines of the block passed, but the block did not
                self.passed = [block for block in self.passed if fence is None or block.digest != fence.digest]
                report.outcome, report.longrepr = "skipped", (str(page), example.line, reason)
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped[place] = reason.removeprefix("Skipped: ")
        elif report.passed and report.when == "call" and fence is not None and fence not in self.incomplete:
            block = Block(place.partition(":")[0], fence.first, fence.digest)
            if block not in self.passed:
                self.passed.append(block)

    def left_out(self, page: str, error: BaseException) -> str:
        """Return why a block may be skipped: it needs a missing package, or a name that a skipped block defines."""
        told = "".join(traceback.format_exception(error)) + str(getattr(error, "result", ""))  # of a doctest
        missing = [name for name in OPTIONAL if not installed(name) and f"'{name}" in told and "Error" in told]
        before = [reason for place, reason in self.skipped.items() if place.startswith(f"{page}:")]
        builds_on = [reason for reason in before if reason.startswith("needs ") and "NameError" in told]
        return f"needs {missing[0]}" if missing else builds_on[0] if builds_on else ""


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(arguments: list[str] | None = None, device: Device | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="pages to run; all when left out")
    parser.add_argument("--record", action="store_true", help="keep the result as evidence; for all pages")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "evidence", help="folder for the record")
    wanted = parser.parse_args(arguments)
    if wanted.record and wanted.pages:
        parser.error("--record is for all pages: leave the pages out")
    device = device or kp.device()
    if device.backend == "cpu":
        parser.exit(2, "no GPU is here: on a CPU 'make test' runs the documentation\n")
    try:
        commit = clean_commit(ROOT) if wanted.record else ""
    except EvidenceError as error:
        parser.exit(2, f"{error}\n")
    os.chdir(ROOT)
    os.environ["DOCUMENTATION_WITHOUT_SHELL"] = "1"
    collector = Collector()
    chosen = [str(page) for page in wanted.pages or pages()]
    code = pytest.main(["-q", "-p", "no:cacheprovider", *chosen], plugins=[collector])
    passed = {block.digest for block in collector.passed}
    needed = [
        f"{page.relative_to(ROOT).as_posix()}:{fence.first}"
        for page, found in collector.pages.items()
        for fence in found
        if fence.needs in ("gpu", device.backend) and fence.digest not in passed
    ]
    if code or (needed and not wanted.pages):
        print(f"not recorded: {'a block failed' if code else f'these need this device and did not run: {needed}'}")
        return int(code) or 1
    print(f"{len(collector.passed)} blocks passed on {device.name}, {len(collector.skipped)} were left out")
    if wanted.record:
        record = Execution(
            op="documentation",
            device=facts(device),
            versions=versions(),
            commit=commit,
            command="python -m tools.website.execute --record",
            recorded=now(),
            passed=collector.passed,
            skipped=collector.skipped,
        )
        path = wanted.out / benchmarking.record_name("documentation", device)
        write_record(record, path)
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
