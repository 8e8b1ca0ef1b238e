"""The command line: output, errors and records of each command."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch import benchmarking
from kernel_pytorch.cli import commands, main
from kernel_pytorch.evidence import Benchmark, read_record, schema
from kernel_pytorch.hardware_abstraction.device import Rates
from kernel_pytorch.hardware_abstraction.dispatch import forget_choices
from kernel_pytorch.hardware_abstraction.op import registered_op
from kernel_pytorch.html_page import line_chart
from kernel_pytorch.lowering.quiet import quiet_native
from kernel_pytorch.ops.rms_norm import torch_kernel
from requirements import needs_executorch

SMALL = ("bench", "rms_norm", "--device", "cpu", "--case", "one-row", "--format", "float32", "--seconds", "0.01")
COMMANDS = [
    command.name or command.callback.__name__ for command in commands.app.registered_commands if command.callback
]
GROUPED = [f"backend {command.name}" for command in commands.backend_app.registered_commands]


@dataclass(frozen=True)
class Outcome:
    code: object
    out: str
    err: str

    @property
    def words(self) -> str:
        """The output without line breaks, which depend on the terminal's width, and frames."""
        return " ".join(self.out.replace("│", " ").split())


class Run:
    """Calls the command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: str) -> Outcome:
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        out, err = self.capsys.readouterr()
        return Outcome(ended.value.code or 0, out, err)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(capsys)


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def clean_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A committed checkout that the benchmark takes for the project's."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "kernel.py").write_text("pass\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--no-gpg-sign", "--message", "one")
    monkeypatch.setattr(benchmarking, "checkout", lambda: folder)
    return folder


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes each benchmark that is planned or run."""
    noted: list[str] = []

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        noted.append("measured")
        raise AssertionError("measured although the record was to be refused")

    monkeypatch.setattr(benchmarking, "plan", refuse)
    monkeypatch.setattr(benchmarking, "run", refuse)
    return noted


@pytest.fixture
def wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    right = torch_kernel.forward

    def wrong(*arguments: Any) -> Any:
        y, rstd = right(*arguments)
        return y * 1.01, rstd

    monkeypatch.setattr(torch_kernel, "forward", wrong)
    forget_choices()
    yield
    forget_choices()


def test_doctor_shows_devices_kernels_and_versions(run: Run) -> None:
    outcome = run("doctor")
    assert outcome.code == 0
    assert torch.__version__ in outcome.words
    cpu = kp.device("cpu")
    for fact in (cpu.arch, "rms_norm float32", "kernel torch", "Optional libraries", "C++ runtime"):
        assert fact in outcome.words
    assert "Test status of each kernel" not in outcome.words
    lines = [line.strip() for line in outcome.out.splitlines()]
    for row in json.loads(run("doctor", "--json").out)["install_for_more"]:
        assert lines.count(row["install"]) == 1, "a command to copy is a line of its own, once"
    assert "Test status of each kernel" in run("doctor", "--support").words


def test_help_has_no_paragraph_of_broken_lines() -> None:
    """Typer keeps the line breaks of a docstring's later paragraphs."""
    for command in (*commands.app.registered_commands, *commands.backend_app.registered_commands):
        for paragraph in inspect.cleandoc(command.callback.__doc__ or "").split("\n\n")[1:]:
            assert "\n" not in paragraph, paragraph
            assert len(paragraph) <= 78, paragraph


def test_doctor_json_is_data_with_the_documented_keys(run: Run) -> None:
    report = json.loads(run("doctor", "--json").out)
    assert list(report) == [
        "versions",
        "libraries",
        "runtime",
        "devices",
        "broken_backends",
        "support",
        "install_for_more",
    ]
    assert {"kernel_pytorch", "python", "torch", "triton"} <= set(report["versions"])
    assert len(report["devices"]) == len(kp.devices())
    cpu = report["devices"][-1]
    assert (cpu["backend"], cpu["torch_device"], cpu["rates"]) == ("cpu", "cpu", None)
    assert cpu["formats"] == sorted(kp.device("cpu").formats)
    assert cpu["kernels"]["rms_norm float32"] == "torch"
    assert {"op", "kernel", "backend", "status", "detail"} == set(report["support"][0])
    assert {"package", "for", "install"} == set(report["install_for_more"][0])


def test_doctor_measures_when_asked(run: Run) -> None:
    report = json.loads(run("doctor", "--json", "--measure").out)
    for known in report["devices"]:
        assert known["rates"]["source"] == "measured"
        assert known["rates"]["bandwidth"] > 0
        assert known["rates"]["matmul"]["float32"] > 0


@needs_executorch
def test_tour_visits_every_section(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    command = [sys.executable, "-m", "kernel_pytorch.cli", "tour", "--out", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    outcome = Outcome(done.returncode, done.stdout, done.stderr)
    assert outcome.code == 0, outcome.err
    headings = (
        "1 of 5. Exact attention",
        "2 of 5. A Hugging Face model",
        "3 of 5. FP8 training",
        "4 of 5. 4 ranks",
        "5 of 5. A lowered model",
        "Next",
    )
    for heading in headings:
        assert heading in outcome.words
    contents = (
        "difference from float64",
        "candidates refused",
        "bf16",
        "from one process",
        "you: hello",
        "tokens/s",
    )
    for content in contents:
        assert content in outcome.words
    assert len(outcome.out.splitlines()) <= 50
    assert outcome.err == "", "messages of other libraries"
    text = page.read_text()
    assert text.count("<h2>") == 5
    # Attention, FP8 and ranks; kp.optimize has no chart where the machine is too busy to decide.
    assert text.count('role="img"') >= 3


def test_the_baseline_of_a_line_chart_is_on_top() -> None:
    """Curves that follow each other, as FP8's loss follows bf16's, are both seen."""
    chart = line_chart({"before": [2.0, 1.0], "after": [2.0, 1.0]}, "loss")
    assert chart.index("var(--bar)") < chart.index("stroke-dasharray")


def test_known_messages_of_native_code_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet_native():
        os.write(2, b"first\n[cpuinfo_utils.cpp:71] Reading a file\nprompt> [cpu")
        os.write(2, b"info_utils.cpp:9] more\n")
        subprocess.run(["sh", "-c", "echo from a child >&2"], check=True)
        os.write(2, b"[cpuinfo_utils is no message")
    os.write(2, b"\nafter\n")
    text = capfd.readouterr().err
    assert text == "first\nprompt> from a child\n[cpuinfo_utils is no message\nafter\n"


def test_bench_prints_a_table_of_checked_times(run: Run) -> None:
    outcome = run(*SMALL)
    assert outcome.code == 0, outcome.err
    for content in ("rms_norm on", "median", "speed-up", "one-row float32 forward", "one-row float32 backward"):
        assert content in outcome.words
    ours = [line for line in outcome.out.splitlines() if line.startswith("│   torch ")]
    assert len(ours) == 2, "one line for each phase"
    for line in ours:
        assert line.rstrip(" │").endswith("%"), "the error's share of its budget"
    assert "recorded" not in outcome.out


def test_bench_leaves_cases_for_gpus_out_on_a_cpu_unless_they_are_named() -> None:
    op, cpu = registered_op("rms_norm"), replace(kp.device("cpu"), memory_bytes=1 << 40)
    work = benchmarking.plan(op, cpu)
    steps = [str(step) for step in work.steps]
    assert "4096x4096 float32" in steps
    assert "16384x8192 float32" not in steps
    assert "16384x8192 float32: sized for a GPU; name it with --case to run it here" in work.left_out
    assert len(benchmarking.plan(op, cpu, ("16384x8192",), ("float32",)).steps) == 1


@pytest.mark.parametrize("command", [*COMMANDS, *GROUPED])
def test_help_has_an_example_of_the_command(run: Run, command: str) -> None:
    outcome = run(*command.split(), "--help")
    assert outcome.code == 0
    _, found, examples = outcome.out.partition("Example")
    assert found
    lines = [line.strip() for line in examples.splitlines()[1:] if line.strip()]
    assert lines
    assert all(line.startswith(f"kernel-pytorch {command}") for line in lines), "each on a line of its own"


def test_help_and_version(run: Run) -> None:
    outcome = run("--help")
    assert outcome.code == 0
    for command in (*COMMANDS, "backend"):
        assert command in outcome.words
    assert run("--version").out.strip() == kp.__version__


MISTAKES = {
    "op": (("bench", "nope"), ["op='nope'", "rms_norm"]),
    "case": (("bench", "rms_norm", "--case", "nope"), ["case='nope'", "one-row", "16384x4096"]),
    "format": (("bench", "rms_norm", "--format", "nope"), ["format='nope'", "bfloat16", "float32"]),
    "device": (("bench", "rms_norm", "--device", "nope"), ["device='nope'", "cpu"]),
    "kind": (("bench", "rms_norm", "--device", "mtia:0"), ["device='mtia:0'", "cpu"]),
    "catalogue": (("bench", "rms_norm", "--device", "nvidia/h200"), ["device='nvidia/h200'", "not here", "cpu"]),
    "unlisted": (("bench", "rms_norm", "--device", "nvidia/nope"), ["device='nvidia/nope'", "cpu"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_argument_and_the_choices(run: Run, mistake: str) -> None:
    arguments, expected = MISTAKES[mistake]
    outcome = run(*arguments)
    assert outcome.code == 1
    (line,) = outcome.err.splitlines()
    assert line.startswith("kernel-pytorch: ")
    for text in expected:
        assert text in line
    assert "Traceback" not in outcome.out + outcome.err


def test_debug_shows_the_traceback(run: Run) -> None:
    outcome = run("--debug", "bench", "nope")
    assert outcome.code == 1
    assert outcome.err.startswith("Traceback (most recent call last)")
    assert outcome.err.rstrip().splitlines()[-1].startswith("ValueError: op='nope'")


def test_a_wrong_use_of_the_command_line_is_not_an_error_of_ours(run: Run) -> None:
    outcome = run("bench")
    assert outcome.code == 2
    assert "Traceback" not in outcome.err


def test_record_in_a_dirty_tree_is_refused_before_measuring(
    run: Run, clean_repository: Path, no_measuring: list[str]
) -> None:
    (clean_repository / "kernel.py").write_text("changed = True\n")
    outcome = run(*SMALL, "--record", "--out", str(clean_repository / "evidence"))
    assert outcome.code == 1
    (line,) = outcome.err.splitlines()
    assert "uncommitted changes" in line
    assert "kernel.py" in line
    assert no_measuring == []
    assert not (clean_repository / "evidence").exists()


def test_record_outside_git_is_refused_before_measuring(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_measuring: list[str]
) -> None:
    monkeypatch.setattr(benchmarking, "checkout", lambda: tmp_path)
    outcome = run(*SMALL, "--record", "--out", str(tmp_path / "evidence"))
    assert outcome.code == 1
    (line,) = outcome.err.splitlines()
    assert "needs a git checkout" in line
    assert no_measuring == []
    assert not (tmp_path / "evidence").exists()


@pytest.mark.usefixtures("wrong_kernel")
def test_a_kernel_with_wrong_numbers_is_neither_timed_nor_recorded(
    run: Run, clean_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[object] = []
    monkeypatch.setattr(benchmarking, "sample_seconds", lambda *arguments: timed.append(arguments))
    outcome = run(*SMALL, "--record", "--out", str(clean_repository / "evidence"))
    assert outcome.code == 1
    (line,) = outcome.err.splitlines()
    assert "rms_norm kernel 'torch'" in line
    assert "y: error 0.0" in line
    assert "EXCEEDS its budget" in line
    assert timed == []
    assert not (clean_repository / "evidence").exists()


def test_a_record_is_valid_and_says_how_it_was_made(
    run: Run, clean_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Measuring the rates takes ten seconds here, and doctor's test does it.
    monkeypatch.setattr(benchmarking, "measure_rates", lambda _: Rates(bandwidth=2e9, source="measured"))
    folder = clean_repository / "evidence [1]"  # brackets: a path is not markup
    arguments = (*SMALL, "--record", "--out", str(folder))
    outcome = run(*arguments)
    assert outcome.code == 0, outcome.err
    (path,) = folder.iterdir()
    assert f"recorded in {path}" in outcome.out
    assert path.name == benchmarking.record_name(registered_op("rms_norm"), kp.device("cpu"))
    jsonschema.validate(json.loads(path.read_text()), schema())
    record = read_record(path)
    assert isinstance(record, Benchmark)
    assert record.commit == git(clean_repository, "rev-parse", "HEAD")
    assert record.command.startswith("kernel-pytorch bench rms_norm --device cpu --case one-row")
    assert "--out" not in record.command, "a folder is one machine's own"
    assert record.device.name == kp.device("cpu").name
    assert record.copy_bandwidth == 2e9
    subjects = {(row.phase, row.subject) for row in record.measurements}
    for phase in ("forward", "backward"):
        assert {(phase, "kernel:torch"), (phase, "baseline:torch.nn.functional")} <= subjects
    for row in record.measurements:
        assert 0 < row.seconds.p20 <= row.seconds.median <= row.seconds.p80
        if row.subject == "kernel:torch":
            assert row.error is not None
            assert row.budget is not None
            assert row.error <= row.budget


@pytest.mark.parametrize("way", ["script", "module"])
def test_the_command_is_installed(way: str) -> None:
    script = shutil.which("kernel-pytorch", path=str(Path(sys.executable).parent))
    assert script, "kernel-pytorch is not beside this python; install the project with: make install"
    command = [script] if way == "script" else [sys.executable, "-m", "kernel_pytorch.cli"]
    shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == kp.__version__
    failed = subprocess.run([*command, "bench", "nope"], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    assert "op='nope'" in line
