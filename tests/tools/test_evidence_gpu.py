"""``make evidence-gpu``: its steps, what it stores, and that it resumes. The steps here are small scripts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tools.evidence_gpu import (
    BUDGET,
    NO_RECORD,
    ROOT,
    STEPS,
    TIMED_OUT,
    UNFINISHED,
    Runner,
    Step,
    gpu_test_files,
    main,
)

from kernel_pytorch import benchmarking

RECORD = "from pathlib import Path; Path('benchmarks/evidence/{}').write_text('{}'); print('measured')"


def script(name: str, code: str, limit: int = 60) -> Step:
    return Step(name, ("python", "-c", code), limit)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A committed checkout with one record."""
    root = tmp_path / "checkout"
    (root / "benchmarks" / "evidence").mkdir(parents=True)
    (root / "benchmarks" / "evidence" / "old.gpu.json").write_text("old")
    for arguments in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b.example", "commit", "-qm", "a"],
    ):
        subprocess.run(["git", "-C", str(root), *arguments], check=True)
    return root


def test_the_limits_of_the_default_steps_fit_the_budget() -> None:
    assert sum(step.limit for step in STEPS if step.default) <= BUDGET
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_every_gpu_record_has_a_step() -> None:
    records = {path.name.split(".")[0] for path in (ROOT / "benchmarks" / "evidence").glob("*.nvidia-h200.json")}
    assert records
    assert records <= {record for step in STEPS for record in step.records}


def test_the_commands_exist() -> None:
    for step in STEPS:
        if step.script is not None and step.name != "aoti":
            assert (ROOT / step.script).exists(), step.name
    assert "tests/ops/test_triton_launch.py" in gpu_test_files()


def test_records_are_stored_outside_and_the_checkout_stays_clean(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        script("changes", RECORD.format("old.gpu.json", "new")),
        script("adds", RECORD.format("added.gpu.json", "added")),
    ]
    out = tmp_path / "out"
    assert main(["--out", str(out)], steps, checkout) == 0
    assert {file.name: file.read_text() for file in (out / "records").iterdir()} == {
        "old.gpu.json": "new",
        "added.gpu.json": "added",
    }
    assert Runner(checkout, out).git("status", "--porcelain") == ""
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["ok", "changes"], ["ok", "adds"]]
    assert all(line.endswith("measured") for line in lines)
    assert main(["--out", str(out), "--install"], steps, checkout) == 0
    assert (checkout / "benchmarks" / "evidence" / "old.gpu.json").read_text() == "new"
    with pytest.raises(SystemExit, match="need a clean checkout"):
        main(["--out", str(out)], steps, checkout)


def test_a_second_run_resumes(checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, marker = tmp_path / "out", tmp_path / "marker"
    steps = [
        script("first", "print(1)"),
        script("second", f"import sys, pathlib; sys.exit(0 if pathlib.Path({str(marker)!r}).exists() else 3)"),
    ]
    assert main(["--out", str(out)], steps, checkout) == 1
    marker.touch()
    capsys.readouterr()
    assert main(["--out", str(out)], steps, checkout) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["done", "first"],
        ["ok", "second"],
    ]
    rows = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [(row["step"], row["status"]) for row in rows] == [("first", 0), ("second", 3), ("second", 0)]
    assert main(["--out", str(out), "--again", "--only", "first"], steps, checkout) == 0
    assert capsys.readouterr().out.startswith("ok")


def test_a_step_that_runs_out_of_time_is_killed_with_its_children_and_not_installed(
    checkout: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    child = "import time; time.sleep(600)"
    code = (
        RECORD.format("slow.gpu.json", "half")
        + f"; import subprocess; subprocess.run([{sys.executable!r}, '-c', {child!r}])"
    )
    runner = Runner(checkout, out)
    assert runner.run(script("slow", code, limit=2)) == TIMED_OUT
    assert (out / "partial" / "slow.gpu.json").read_text() == "half"
    assert runner.install() == []
    assert runner.done() == set()


def test_records_that_are_kept_by_name_are_installed_from_a_failed_step(checkout: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    runner = Runner(checkout, out)
    assert runner.run(script("half", RECORD.format("half.gpu.json", "some") + "; raise SystemExit(1)")) == 1
    assert runner.install() == []
    with pytest.raises(SystemExit, match="--partial other: use one of half"):
        runner.install(["other"])
    assert runner.install(["half"]) == ["half.gpu.json"]
    assert (checkout / "benchmarks" / "evidence" / "half.gpu.json").read_text() == "some"


def test_what_cannot_run_here_is_not_started(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = Runner(checkout, tmp_path / "out")
    assert runner.run(Step("none", ("python", "benchmarks/none.py"), 10)) is None
    assert runner.run(replace(script("needy", "print(1)"), needs=("sys", "no_such_module"))) is None
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split(maxsplit=2) == ["missing", "none", "there is no benchmarks/none.py"]
    assert shown[1].startswith("missing  needy")
    assert "no_such_module cannot be imported here" in shown[1]
    assert runner.done() == set()


def test_a_step_that_writes_none_of_its_records_is_not_done(checkout: Path, tmp_path: Path) -> None:
    runner = Runner(checkout, tmp_path / "out")
    step = replace(script("silent", RECORD.format("other.gpu.json", "x")), records=("mine",))
    assert runner.run(step) == NO_RECORD
    assert runner.done() == set()


def test_only_what_fits_in_the_seconds_is_started(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says = "import sys; print(sys.argv[1])"
    steps = [
        script("long", "print(1)", limit=500),
        Step("goes-on", ("python", "-c", says, "{seconds}"), 500, least=20, reserve=10),
        script("short", "print(2)", limit=30),
    ]
    out = tmp_path / "out"
    assert main(["--out", str(out), "--seconds", "60"], steps, checkout) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[:2] for words in shown] == [["no", "time"], ["ok", "goes-on"], ["ok", "short"]]
    assert 40 < int(shown[1][-1]) < 50
    assert Runner(checkout, out).done() == {"goes-on", "short"}


COUNTS = """
import pathlib, sys
state = pathlib.Path(sys.argv[1])
state.open("a").write("line %d\\n" % len(state.read_text().splitlines() if state.exists() else []))
lines = state.read_text()
pathlib.Path("benchmarks/evidence/counted.gpu.json").write_text('{"recorded": "%d"}' % len(lines.splitlines()))
raise SystemExit(0 if len(lines.splitlines()) > 2 else 75)
"""


def test_a_step_goes_on_over_machines_that_start_bare(checkout: Path, tmp_path: Path) -> None:
    """The results travel in one file, written after each step."""
    steps = [
        Step("counts", ("python", "-c", COUNTS, "{state}"), 30, ("counted",)),
        script("fails", "raise SystemExit(4)"),
    ]
    here = tmp_path / "here"
    for turn in range(3):
        there, packed = tmp_path / f"there{turn}", tmp_path / f"results{turn}.tar.gz"
        if here.exists():
            shutil.copytree(here, there)
        assert main(["--out", str(there), "--archive", str(packed)], steps, checkout) == 1  # the step that fails
        assert main(["--out", str(here), "--merge", str(packed)], steps, checkout) == 0
        assert Runner(checkout, here).done() == ({"counts"} if turn == 2 else set())
    state = (here / "state" / "counts.jsonl").read_text().splitlines()
    assert state == ["line 0", "line 1", "line 2"]
    rows = [json.loads(line) for line in (here / "steps.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows if row["step"] == "counts"] == [UNFINISHED, UNFINISHED, 0]
    assert (
        main(["--out", str(here), "--merge", str(tmp_path / "results0.tar.gz"), "--install"], steps, checkout) == 0
    )
    assert json.loads((checkout / "benchmarks/evidence/counted.gpu.json").read_text()) == {"recorded": "3"}
    assert list(tmp_path.glob(".*writing")) == []


def test_results_are_in_the_archive_when_the_run_is_terminated(checkout: Path, tmp_path: Path) -> None:
    """The slow step's processes end with it, and what was finished before is kept."""
    marker, packed = tmp_path / "marker", tmp_path / "results.tar.gz"
    slow = f"import os, pathlib, time; pathlib.Path({str(marker)!r}).write_text(str(os.getpid())); time.sleep(600)"
    code = (
        "import sys; sys.path.insert(0, {!r}); from pathlib import Path; from tools.evidence_gpu import Step, main; "
        "main({!r}, [Step('first', ('python', '-c', {!r}), 60, ('a',)), Step('slow', ('python', '-c', {!r}), 600)], "
        "Path({!r}))"
    ).format(
        str(ROOT),
        ["--out", str(tmp_path / "out"), "--archive", str(packed)],
        RECORD.format("a.gpu.json", "measured"),
        slow,
        str(checkout),
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        while not marker.exists() or not marker.read_text():
            assert process.poll() is None
            time.sleep(0.02)
        process.terminate()
        assert process.wait() == TIMED_OUT
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)
    with tarfile.open(packed) as archive:
        assert "./records/a.gpu.json" in archive.getnames()


def test_a_folder_that_is_no_checkout_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"is no git checkout: .*not a git repository"):
        Runner(tmp_path, tmp_path / "out").check_clean()


def test_the_status_of_an_unfinished_run_is_the_benchmarks() -> None:
    assert benchmarking.UNFINISHED == UNFINISHED


def test_the_list_needs_no_gpu_and_unknown_names_are_refused(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--list", "--out", str(tmp_path / "out")], STEPS, checkout) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(STEPS)
    assert shown[0].startswith("to do          attention")
    with pytest.raises(SystemExit, match="--only fp9: use one of attention, "):
        main(["--only", "fp9"], STEPS, checkout)
