"""``make evidence-gpu``: run the GPU tests and make every GPU record, each step with a time limit, and resumable.

    python -m tools.evidence_gpu                      # every default step that is not done at this commit
    python -m tools.evidence_gpu --only fp8-linears   # these steps only, also those that are not run by default
    python -m tools.evidence_gpu --list               # the steps, their limits and what is done; needs no GPU
    python -m tools.evidence_gpu --install            # copy the finished records to benchmarks/evidence

Needs a clean checkout, because a record names its commit. A step's output goes to ``OUT/NAME.log`` and its records to
``OUT/records``, so that the checkout stays clean for the next step. Records of a step that failed or ran out of time
go to ``OUT/partial`` and are never installed. Running again skips the steps that ended well at the same commit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BUDGET", "STEPS", "Runner", "Step", "main"]

BUDGET = 1500
"""Seconds that the limits of all default steps add up to, at most."""
ROOT = Path(__file__).parent.parent
EVIDENCE = Path("benchmarks/evidence")
TIMED_OUT = 124


@dataclass(frozen=True)
class Step:
    """One command, with the Python interpreter in place of ``python``."""

    name: str
    command: tuple[str, ...]
    limit: int
    """Seconds after which it is killed."""
    records: tuple[str, ...] = ()
    """The records that it writes, without the device's name."""
    default: bool = True
    """Whether it runs without ``--only``."""
    renamed: bool = False
    """Whether its record is stored under the step's name instead of its own."""

    @property
    def script(self) -> str | None:
        """The script that the command runs, or None for a module."""
        return self.command[1] if self.command[1].endswith(".py") else None


def gpu_test_files(root: Path = ROOT) -> tuple[str, ...]:
    """Return the test files with tests that need a GPU, or that use one where it is present."""
    signs = ("needs a GPU", "needs a CUDA GPU", "torch.cuda.", '"cuda"')
    files = sorted((root / "tests").rglob("test_*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.stem != "test_evidence_gpu"}
    return tuple(str(file.relative_to(root)) for file, text in texts.items() if any(sign in text for sign in signs))


def _fp8(name: str, limit: int, *workloads: str, records: tuple[str, ...]) -> Step:
    return Step(name, ("python", "benchmarks/fp8.py", "--record", "--workloads", *workloads), limit, records)


# Correctness first, then the records that most pages show, the longest last.
STEPS = (
    Step("contract", ("python", "-m", "kernel_pytorch.testing.contract_run", "--record"), 90, ("tests",)),
    Step("tests", ("python", "-m", "pytest", "-q", "--maxfail", "20", *gpu_test_files()), 210),
    _fp8("fp8-linears", 130, "linear-4096", "linear-14336", "linear-28672", records=("fp8-linears",)),
    _fp8("fp8-blocks", 150, "mlp", "block-4096", records=("fp8-blocks", "fp8-memory")),
    _fp8("fp8-small-block", 120, "block-2048", "batches", records=("fp8-small-block", "fp8-batches")),
    _fp8("fp8-grid", 130, "grid", records=("fp8-grid",)),
    Step("fp8-compiled-profile", ("python", "benchmarks/fp8_compiled_profile.py"), 60),
    Step("rms_norm", ("python", "-m", "kernel_pytorch.cli", "bench", "rms_norm", "--record"), 60, ("rms_norm",)),
    Step("rope", ("python", "-m", "kernel_pytorch.cli", "bench", "rope", "--record"), 60, ("rope",)),
    Step("attention", ("python", "benchmarks/attention.py", "--record", "--seconds", "150"), 190, ("attention",)),
    Step("optimize", ("python", "benchmarks/optimize.py", "--record"), 220, ("optimize",)),
    Step("aoti", ("python", "benchmarks/aoti.py", "--record"), 80, ("aoti",)),
    # With flash-attn-4 and nvidia-cudnn-frontend on the path; without them it is the record of ``attention``.
    Step("attention-libraries", ("python", "benchmarks/attention.py", "--record"), 600, ("attention-libraries",),
         default=False, renamed=True),
    Step("fp8_cast", ("python", "-m", "kernel_pytorch.cli", "bench", "fp8_cast", "--record"), 120, ("fp8_cast",),
         default=False),
    Step("long-sequences", ("python", "benchmarks/long_sequences.py", "--record"), 600,
         ("attention-long", "attention-step"), default=False),
    Step("parity", ("python", "-m", "kernel_pytorch.cli", "parity", "--size", "100m", "--steps", "1000",
                    "--seeds", "3", "--recipe", "delayed", "--record"), 3600, ("fp8-parity",), default=False),
    Step("documentation", ("python", "-m", "tools.website.execute", "--record"), 600, ("documentation",),
         default=False),
)  # fmt: skip


@dataclass(frozen=True)
class Runner:
    """Runs steps in a checkout and keeps their logs, records and results in a folder outside of it."""

    root: Path
    out: Path

    def git(self, *arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(self.root), *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    @property
    def commit(self) -> str:
        return self.git("rev-parse", "HEAD").strip()

    def done(self) -> set[str]:
        """Return the names of the steps that ended well at this commit."""
        log = self.out / "steps.jsonl"
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return {row["step"] for row in rows if row["status"] == 0 and row["commit"] == self.commit}

    def check_clean(self) -> None:
        """Raise an error if the checkout has local changes."""
        changed = self.git("status", "--porcelain")
        if changed:
            raise SystemExit(f"records need a clean checkout, commit or remove these first:\n{changed}")

    def run(self, step: Step) -> int:
        """Run a step, store its log, records and result, print one line, and return its exit status."""
        if step.script is not None and not (self.root / step.script).exists():
            print(f"missing  {step.name:22} there is no {step.script}")
            return 0
        self.out.mkdir(parents=True, exist_ok=True)
        log = self.out / f"{step.name}.log"
        started = time.monotonic()
        status = self._execute(step, log)
        seconds = time.monotonic() - started
        self._collect(step, self.out / ("records" if status == 0 else "partial"))
        row = {"step": step.name, "commit": self.commit, "status": status, "seconds": round(seconds, 1)}
        with (self.out / "steps.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        said = {0: "ok", TIMED_OUT: "time out"}.get(status, f"failed {status}")
        print(
            f"{said:8} {step.name:22} {seconds:5.0f} s of {step.limit}  {lines[-1].strip()[:160] if lines else ''}"
        )
        return status

    def _execute(self, step: Step, log: Path) -> int:
        command = [sys.executable, *step.command[1:]]
        path = os.pathsep.join(filter(None, [str(self.root / "src"), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=file, stderr=file, start_new_session=True
            )
            try:
                return process.wait(timeout=step.limit)
            except subprocess.TimeoutExpired:
                return TIMED_OUT
            finally:  # also on Ctrl-C: workers and compilers of the step must not outlive it
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _collect(self, step: Step, folder: Path) -> None:
        """Move the records that a step has written out of the checkout, which is clean afterwards."""
        for line in self.git("status", "--porcelain", "--untracked-files=all", "--", str(EVIDENCE)).splitlines():
            file = self.root / line[3:].strip('"')
            name = file.name
            if step.renamed and not name.startswith(f"{step.name}."):
                name = f"{step.name}.{name.split('.', 1)[1]}"
            folder.mkdir(parents=True, exist_ok=True)
            if file.exists():
                shutil.copy(file, folder / name)
            if line.startswith("??"):
                file.unlink()
            else:
                self.git("checkout", "--", str(file.relative_to(self.root)))

    def install(self) -> list[str]:
        """Copy the finished records to the checkout's evidence folder; return their names."""
        found = sorted((self.out / "records").glob("*")) if (self.out / "records").exists() else []
        for file in found:
            shutil.copy(file, self.root / EVIDENCE / file.name)
        return [file.name for file in found]


def _chosen(names: Sequence[str], steps: Sequence[Step]) -> list[Step]:
    unknown = set(names) - {step.name for step in steps}
    if unknown:
        raise SystemExit(f"--only {sorted(unknown)[0]}: use one of {', '.join(step.name for step in steps)}")
    return [step for step in steps if (step.name in names if names else step.default)]


def main(arguments: Sequence[str] | None = None, steps: Sequence[Step] = STEPS, root: Path = ROOT) -> int:
    """Run the command line; return 0 if every step that ran ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these steps only")
    parser.add_argument("--again", action="store_true", help="also run steps that are done")
    parser.add_argument("--list", action="store_true", help="print the steps and run nothing")
    parser.add_argument("--install", action="store_true", help="copy the finished records to benchmarks/evidence")
    parser.add_argument("--out", type=Path, default=root / "build" / "evidence-gpu", help="folder of the results")
    asked = parser.parse_args(arguments)
    runner = Runner(root, asked.out.resolve())
    chosen, done = _chosen(asked.only, steps), runner.done()
    if asked.list:
        for step in steps:
            mark = "done" if step.name in done else "to do" if step in chosen else "not by default"
            print(f"{mark:14} {step.name:22} {step.limit:5} s  {' '.join(step.command)[:120]}")
        return 0
    if asked.install:
        print("\n".join(runner.install()) or f"there are no finished records in {runner.out}")
        return 0
    runner.check_clean()
    statuses = []
    for step in chosen:
        if step.name in done and not asked.again:
            print(f"done     {step.name}")
        else:
            statuses.append(runner.run(step))
    return int(any(statuses))


if __name__ == "__main__":
    raise SystemExit(main())
