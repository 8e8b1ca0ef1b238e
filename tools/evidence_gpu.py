"""``make evidence-gpu``: run the GPU tests and make every GPU record, each step with a time limit, and resumable.

    python -m tools.evidence_gpu                      # every default step that is not done at this commit
    python -m tools.evidence_gpu --only fp8-linears   # these steps only, also those that are not run by default
    python -m tools.evidence_gpu --list               # the steps, their limits and what is done; needs no GPU
    python -m tools.evidence_gpu --install            # copy the finished records to benchmarks/evidence

On a machine that is lent for a few minutes and starts bare each time:

    python -m tools.evidence_gpu --seconds 560 --archive results.tar.gz    # there: start only what fits
    python -m tools.evidence_gpu --merge results.tar.gz                    # here: add to build/evidence-gpu

Needs a clean checkout, because a record names its commit. A step's output goes to ``OUT/NAME.log`` and its records to
``OUT/records``, so that the checkout stays clean for the next step. Records of a step that failed or ran out of time
go to ``OUT/partial`` and are installed only with ``--partial NAME``. Running again skips the steps that ended well at
the same commit, and continues those that keep what they measured in ``OUT/state``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

__all__ = ["BUDGET", "STEPS", "UNFINISHED", "Runner", "Step", "main"]

BUDGET = 1800
"""Seconds that the limits of all default steps add up to, at most."""
ROOT = Path(__file__).parent.parent
EVIDENCE = Path("benchmarks/evidence")
TIMED_OUT = 124
UNFINISHED = 75
"""``kernel_pytorch.benchmarking.UNFINISHED``: a step kept its state, wrote valid records and has more to measure."""
NO_RECORD = 65
"""Status of a step that ended well and wrote none of its records (EX_DATAERR)."""


@dataclass(frozen=True)
class Step:
    """One command, with the Python interpreter in place of ``python``.

    ``{state}`` stands for a file that is kept between runs, and ``{seconds}`` for the seconds in which the command
    may start new work.
    """

    name: str
    command: tuple[str, ...]
    limit: int
    """Seconds after which it is killed."""
    records: tuple[str, ...] = ()
    """The records that it writes, without the device's name; it must write at least one."""
    default: bool = True
    """Whether it runs without ``--only``."""
    needs: tuple[str, ...] = ()
    """Modules without which it is not started."""
    least: int = 0
    """Seconds that are worth starting it for, if it can be continued; 0: only the whole limit."""
    reserve: int = 0
    """Seconds of the limit that are left to finish the work that was started."""

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


_GO_ON = ("--state", "{state}", "--seconds", "{seconds}")

# Steps whose records most pages show come first; steps that do not fit in the time are left to the next run. Each
# benchmark checks its kernels against float64 before it times them.
STEPS = (
    # With flash-attn-4 and nvidia-cudnn-frontend on the path it writes attention-libraries, else attention.
    Step("attention", ("python", "benchmarks/attention.py", "--record", *_GO_ON), 420,
         ("attention-libraries", "attention"), least=150, reserve=45),
    _fp8("fp8-linears", 130, "linear-4096", "linear-14336", "linear-28672", records=("fp8-linears",)),
    _fp8("fp8-blocks", 150, "mlp", "block-4096", records=("fp8-blocks", "fp8-memory")),
    _fp8("fp8-small-block", 120, "block-2048", "batches", records=("fp8-small-block", "fp8-batches")),
    _fp8("fp8-grid", 130, "grid", records=("fp8-grid",)),
    Step("optimize", ("python", "benchmarks/optimize.py", "--record", "--budget", "90", *_GO_ON), 360, ("optimize",),
         needs=("transformers",), least=240, reserve=200),
    Step("aoti", ("python", "benchmarks/aoti.py", "--record"), 80, ("aoti",)),
    Step("contract", ("python", "-m", "kernel_pytorch.testing.contract_run", "--record", "--accelerators", *_GO_ON),
         150, ("tests",), least=60, reserve=25),
    Step("documentation", ("python", "-m", "tools.website.execute", "--record"), 180, ("documentation",),
         needs=("pytest", "sybil", "transformers")),
    Step("rms_norm", ("python", "-m", "kernel_pytorch.cli", "bench", "rms_norm", "--record"), 40, ("rms_norm",)),
    Step("rope", ("python", "-m", "kernel_pytorch.cli", "bench", "rope", "--record"), 40, ("rope",)),
    Step("fp8-compiled-profile", ("python", "benchmarks/fp8_compiled_profile.py"), 60, default=False),
    Step("tests", ("python", "-m", "pytest", "-q", "--maxfail", "20", *gpu_test_files()), 210, default=False,
         needs=("pytest", "hypothesis")),
    Step("fp8_cast", ("python", "-m", "kernel_pytorch.cli", "bench", "fp8_cast", "--record"), 120, ("fp8_cast",),
         default=False),
    Step("long-sequences", ("python", "benchmarks/long_sequences.py", "--record"), 600,
         ("attention-long", "attention-step"), default=False),
    Step("parity", ("python", "-m", "kernel_pytorch.cli", "parity", "--size", "100m", "--steps", "1000",
                    "--seeds", "3", "--recipe", "delayed", "--record"), 3600, ("fp8-parity",), default=False),
)  # fmt: skip


@dataclass(frozen=True)
class Runner:
    """Runs steps in a checkout and keeps their logs, records and results in a folder outside of it."""

    root: Path
    out: Path
    archive: Path | None = None
    """A file with all of ``out``, written anew after each step."""
    deadline: float = float("inf")
    """The ``time.monotonic()`` after which nothing runs."""
    started: dict[str, int] = field(default_factory=dict)
    """The exit status of each step that was run."""

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
        """Raise an error if the checkout has local changes, or is none."""
        try:
            changed = self.git("status", "--porcelain")
        except (OSError, subprocess.CalledProcessError) as error:
            reason = str(getattr(error, "stderr", "")).strip() or error
            raise SystemExit(f"records name a commit, and {self.root} is no git checkout: {reason}") from error
        if changed:
            raise SystemExit(f"records need a clean checkout, commit or remove these first:\n{changed}")

    def obstacle(self, step: Step) -> str | None:
        """Return why a step cannot run here, or None."""
        if step.script is not None and not (self.root / step.script).exists():
            return f"there is no {step.script}"
        missing = [name for name in step.needs if importlib.util.find_spec(name) is None]
        return (
            f"{', '.join(missing)} cannot be imported here: install it, or name its folder in PYTHONPATH"
            if missing
            else None
        )

    def run(self, step: Step) -> int | None:
        """Run a step, store its log, records and result, print one line, and return its status; None if not run."""
        obstacle = self.obstacle(step)
        if obstacle is not None:
            say("missing", step, obstacle)
            return None
        granted = int(min(step.limit, self.deadline - time.monotonic()))
        if granted < (step.least or step.limit):
            say("no time", step, f"needs {step.least or step.limit} s, and {max(granted, 0)} s are left")
            return None
        self.out.mkdir(parents=True, exist_ok=True)
        log = self.out / f"{step.name}.log"
        started = time.monotonic()
        status = self._execute(step, log, granted)
        seconds = time.monotonic() - started
        written = self._collect(step, kept=status in (0, UNFINISHED))
        if status == 0 and step.records and not written:
            status = NO_RECORD
        row = {"step": step.name, "commit": self.commit, "status": status, "seconds": round(seconds, 1)}
        row["ended"] = round(time.time(), 3)  # distinguishes runs that are merged
        with (self.out / "steps.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        known = {0: "ok", UNFINISHED: "to go on", NO_RECORD: "nothing", TIMED_OUT: "time out"}
        last = lines[-1].strip()[:160] if lines else ""
        say(known.get(status, f"failed {status}"), step, f"{seconds:5.0f} s of {granted}  {last}")
        return status

    def run_all(self, steps: Sequence[Step]) -> int:
        """Run steps one after another, whatever becomes of each; return 0 if all that ran ended well."""
        for step in steps:
            try:
                status = self.run(step)
            except (
                OSError,
                subprocess.SubprocessError,
            ) as error:  # such as a full disk: the next step may need less
                say("failed", step, f"{type(error).__name__}: {error}")
                status = 1
            if status is not None:
                self.started[step.name] = status
                self.pack()
        return int(any(status not in (0, UNFINISHED) for status in self.started.values()))

    def _execute(self, step: Step, log: Path, granted: int) -> int:
        state = self.out / "state" / f"{step.name}.jsonl"
        state.parent.mkdir(exist_ok=True)
        values = {"{state}": str(state), "{seconds}": str(max(granted - step.reserve, 1))}
        command = [sys.executable, *(values.get(word, word) for word in step.command[1:])]
        path = os.pathsep.join(filter(None, [str(self.root / "src"), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as file:  # a continued step appends to its log
            process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=file, stderr=file, start_new_session=True
            )
            try:
                return process.wait(timeout=granted)
            except subprocess.TimeoutExpired:
                return TIMED_OUT
            finally:  # also on Ctrl-C: workers and compilers of the step must not outlive it
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _collect(self, step: Step, *, kept: bool) -> list[str]:
        """Move the records that a step has written out of the checkout, which is clean afterwards; return names."""
        folder = self.out / ("records" if kept else "partial")
        names = []
        for line in self.git("status", "--porcelain", "--untracked-files=all", "--", str(EVIDENCE)).splitlines():
            file = self.root / line[3:].strip('"')
            folder.mkdir(parents=True, exist_ok=True)
            if file.exists():
                shutil.copy(file, folder / file.name)
                if file.name.split(".")[0] in step.records:
                    names.append(file.name)
            if line.startswith("??"):
                file.unlink()
            else:
                self.git("checkout", "--", str(file.relative_to(self.root)))
        return names

    def pack(self) -> None:
        """Write everything in ``out`` to the archive, whole or not at all."""
        if self.archive is None or not self.out.exists():
            return
        written = self.archive.with_name(f".{self.archive.name}.writing")
        try:
            with tarfile.open(written, "w:gz") as packed:
                packed.add(
                    self.out, arcname=".", filter=lambda info: info if info.isfile() or info.isdir() else None
                )
            written.replace(self.archive)
        finally:
            written.unlink(missing_ok=True)

    def merge(self, archive: Path) -> list[str]:
        """Add the results of another run; return the names of its records.

        Lines of ``steps.jsonl`` and of states that are new are added; of two records of a name, the later stays.
        """
        with tempfile.TemporaryDirectory() as scratch:
            with tarfile.open(archive) as packed:
                packed.extractall(scratch, filter="data")
            names = []
            for file in sorted(path for path in Path(scratch).rglob("*") if path.is_file()):
                place = self.out / file.relative_to(scratch)
                place.parent.mkdir(parents=True, exist_ok=True)
                if file.suffix == ".jsonl" and place.parent.name != "records" and place.exists():
                    known = place.read_text().splitlines()
                    added = [line for line in file.read_text().splitlines() if line not in set(known)]
                    place.write_text("".join(f"{line}\n" for line in [*known, *added]))
                elif not place.exists() or _recorded(place) <= _recorded(file):
                    shutil.copy(file, place)
                if place.parent.name == "records":
                    names.append(file.name)
        return names

    def install(self, partial: Sequence[str] = ()) -> list[str]:
        """Copy the finished records, and the named ones of failed steps, to the evidence folder; return names."""
        found = {file.name: file for file in sorted((self.out / "records").glob("*"))}
        for name in partial:
            files = sorted((self.out / "partial").glob(f"{name}.*"))
            if not files:
                there = sorted({file.name.split(".")[0] for file in (self.out / "partial").glob("*")})
                raise SystemExit(f"--partial {name}: use one of {', '.join(there) or 'none: there are none'}")
            found |= {file.name: file for file in files}
        for name, file in found.items():
            shutil.copy(file, self.root / EVIDENCE / name)
        return list(found)


def say(status: str, step: Step, text: str) -> None:
    print(f"{status:8} {step.name:22} {text}", flush=True)


def _recorded(file: Path) -> str:
    """Return when a record was made; the empty string for other files."""
    try:
        return str(json.loads(file.read_text())["recorded"])
    except (ValueError, KeyError, TypeError):
        return ""


def _chosen(names: Sequence[str], steps: Sequence[Step]) -> list[Step]:
    unknown = set(names) - {step.name for step in steps}
    if unknown:
        raise SystemExit(f"--only {sorted(unknown)[0]}: use one of {', '.join(step.name for step in steps)}")
    return [step for step in steps if (step.name in names if names else step.default)]


def _stop(*_: object) -> NoReturn:
    raise SystemExit(TIMED_OUT)


def main(arguments: Sequence[str] | None = None, steps: Sequence[Step] = STEPS, root: Path = ROOT) -> int:
    """Run the command line; return 0 if every step that ran ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these steps only")
    parser.add_argument("--again", action="store_true", help="also run steps that are done")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all steps together")
    parser.add_argument("--archive", type=Path, help="keep all results in this .tar.gz, written after each step")
    parser.add_argument("--list", action="store_true", help="print the steps and run nothing")
    parser.add_argument("--merge", type=Path, metavar="ARCHIVE", help="add the results of another run")
    parser.add_argument("--install", action="store_true", help="copy the finished records to benchmarks/evidence")
    parser.add_argument(
        "--partial",
        nargs="+",
        default=[],
        metavar="NAME",
        help="with --install: also these records of failed steps",
    )
    parser.add_argument("--out", type=Path, default=root / "build" / "evidence-gpu", help="folder of the results")
    asked = parser.parse_args(arguments)
    if asked.partial and not asked.install:
        parser.error("--partial names records for --install: add it")
    archive = asked.archive.resolve() if asked.archive else None
    runner = Runner(root, asked.out.resolve(), archive, time.monotonic() + asked.seconds)
    chosen, done = _chosen(asked.only, steps), runner.done()
    if asked.list:
        for step in steps:
            mark = "done" if step.name in done else "to do" if step in chosen else "not by default"
            missing = runner.obstacle(step)
            text = f"missing: {missing}" if missing else " ".join(step.command)[:120]
            print(f"{mark:14} {step.name:22} {step.limit:5} s  {text}")
        return 0
    if asked.merge:
        print("\n".join(runner.merge(asked.merge)) or f"there are no finished records in {asked.merge}")
    if asked.install:
        print("\n".join(runner.install(asked.partial)) or f"there are no finished records in {runner.out}")
    if asked.merge or asked.install:
        return 0
    runner.check_clean()
    for step in chosen:
        if step.name in done and not asked.again:
            print(f"done     {step.name}", flush=True)
    signal.signal(signal.SIGTERM, _stop)  # ends the running step's processes as Ctrl-C does
    return runner.run_all([step for step in chosen if step.name not in done or asked.again])


if __name__ == "__main__":
    raise SystemExit(main())
