"""``make evidence-gpu``: its steps, what it stores, and that it resumes. The steps here are small scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tools.evidence_gpu import BUDGET, ROOT, STEPS, TIMED_OUT, Runner, Step, gpu_test_files, main

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


def test_a_renamed_record_and_a_missing_script(checkout: Path, tmp_path: Path) -> None:
    runner = Runner(checkout, tmp_path / "out")
    step = replace(script("attention-libraries", RECORD.format("attention.gpu.json", "x")), renamed=True)
    assert runner.run(step) == 0
    assert runner.install() == ["attention-libraries.gpu.json"]
    assert runner.run(Step("none", ("python", "benchmarks/none.py"), 10)) == 0
    assert "none" not in runner.done()


def test_the_list_needs_no_gpu_and_unknown_names_are_refused(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--list", "--out", str(tmp_path / "out")], STEPS, checkout) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(STEPS)
    assert shown[0].startswith("to do          contract")
    with pytest.raises(SystemExit, match="--only fp9: use one of contract, "):
        main(["--only", "fp9"], STEPS, checkout)
