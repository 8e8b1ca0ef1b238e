"""``kernel-pytorch backend new``: a project that works as it comes, proved by the page that explains it."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from packaging.specifiers import SpecifierSet

from environments import make_environment
from kernel_pytorch.documentation import scaffold
from kernel_pytorch.documentation.scaffold import create_project
from kernel_pytorch.evidence import Benchmark, OpSupport, load_evidence

PAGE = Path(__file__).parents[2] / "docs" / "backends" / "adding-a-backend.md"


# What only a hosted runner does, and why the walk can do without.
HOSTED = {
    "actions/checkout": "the project is in a folder already",
    "actions/setup-python": "the steps run with the Python of the walk's environment",
}


@dataclass(frozen=True)
class Walk:
    """The page's commands, run in order by one shell in an empty folder, and the workflow's in the fresh project."""

    project: Path
    outputs: dict[str, str]
    """What each block of the page and each step of the workflow printed."""

    def output(self, command: str) -> str:
        return next(text for script, text in self.outputs.items() if command in script)


def blocks() -> list[str]:
    tokens = MarkdownIt("commonmark").parse(PAGE.read_text(encoding="utf-8"))
    return [token.content for token in tokens if token.type == "fence" and token.info == "bash"]


def workflow() -> list[dict[str, Any]]:
    """The steps of every job of the workflow that a new project has."""
    text = (scaffold.KIT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    return [step for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"]]


def steps() -> list[str]:
    return [str(step["run"]) for step in workflow() if "run" in step]


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    folder = tmp_path_factory.mktemp("walk")
    environment = make_environment(folder, folder)
    variables = environment.variables | {
        # pip finds what it needs in the borrowed environment, and must not look elsewhere.
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "KERNEL_PYTORCH_MOST_SPREAD": "inf",  # other tests run beside this one
        "GIT_AUTHOR_NAME": "t",
        "GIT_AUTHOR_EMAIL": "t@example.org",
        "GIT_COMMITTER_NAME": "t",
        "GIT_COMMITTER_EMAIL": "t@example.org",
    }
    first, *others = blocks()  # makes the project and goes there
    scripts = {first: first}
    scripts |= {step: f"bash -e -c {shlex.quote(step)}" for step in steps()}  # as a runner does: a shell for each
    # What the workflow has just run is not run twice.
    scripts |= {block: block for block in others if not set(block.splitlines()) <= set(steps())}
    mark = "== command =="
    script = "set -euo pipefail\n" + "".join(f"echo '{mark}'\n{command}\n" for command in scripts.values())
    done = subprocess.run(
        ["bash"], input=script, cwd=folder, env=variables, capture_output=True, text=True, timeout=900, check=False
    )
    outputs = dict(zip(scripts, done.stdout.split(mark)[1:], strict=False))
    reached = list(outputs)[-1] if outputs else "nothing"
    assert done.returncode == 0, f"stopped in:\n{reached}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    return Walk(folder / "acme-backend", outputs)


def test_every_block_of_the_page_and_every_step_of_the_workflow_succeeds(walk: Walk) -> None:
    assert len(blocks()) >= 10
    assert len(steps()) >= 5
    run = set(walk.outputs)
    assert [block for block in blocks() if block not in run and not set(block.splitlines()) <= run] == []
    assert set(steps()) <= run


def test_the_workflow_has_nothing_that_the_walk_passes_over(walk: Walk) -> None:
    text = (walk.project / ".github" / "workflows" / "ci.yml").read_text()
    assert text == (scaffold.KIT / ".github" / "workflows" / "ci.yml").read_text()  # it is Acme's as it comes
    assert {step["uses"].partition("@")[0] for step in workflow() if "uses" in step} == set(HOSTED)
    assert all(
        set(step) <= {"name", "run"} for step in workflow() if "run" in step
    )  # no shell, folder or condition
    (python,) = [step["with"]["python-version"] for step in workflow() if "setup-python" in step.get("uses", "")]
    wanted = re.search(r'requires-python = "(.*)"', (walk.project / "pyproject.toml").read_text())
    assert wanted is not None
    assert SpecifierSet(wanted[1]).contains(python)


def test_the_fresh_projects_own_tests_pass_and_none_is_skipped(walk: Walk) -> None:
    told = walk.output("python -m pytest")
    assert int(re.search(r"(\d+) passed", told)[1]) > 50
    assert "skipped" not in told


def test_python_and_cpp_give_the_same_numbers(walk: Walk) -> None:
    text = "".join(walk.outputs.values())
    python = re.search(r"output 0: float32\[4, 32\], mean (\S+)", text)
    cpp = re.findall(r"128 numbers, mean (\S+)", text)
    assert python is not None
    assert python[1] == cpp[0]
    assert cpp[1] != cpp[0], "the quantized program is the float one"
    assert float(cpp[1]) == pytest.approx(float(cpp[0]), rel=0.05)


def test_the_table_of_operators_is_what_the_project_does(walk: Walk) -> None:
    rows = list(csv.DictReader((walk.project / "docs" / "op-support.csv").read_text().splitlines()))
    found = {row["Operator"]: (row["Compute DType"], row["Quantization"]) for row in rows}
    assert found == {
        "aten::linear": ("float32", "int8-weight"),
        "aten::relu": ("float32", ""),
        "aten::neg": ("float32", ""),
    }
    assert "aten::gelu" in (walk.project / "docs" / "acme-op-support.md").read_text().partition("## Not Taken")[2]


def test_the_project_is_measured_and_its_pages_show_it(walk: Walk) -> None:
    records = load_evidence(walk.project / "src" / "acme_backend" / "evidence")
    assert {type(record) for record in records} == {Benchmark, OpSupport}
    page = (walk.project / "docs" / "guides" / "acme-performance.md").read_text()
    assert "Not measured" not in page
    assert "(host)" in page
    assert "docs conforms" in walk.output("--probe")


# Names and places


@pytest.mark.parametrize("name", ["Acme", "1st", "a-b", "", "ünit", "a__b", "a_", "../x"])
def test_a_name_that_is_no_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one lower-case word"):
        create_project(name, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_keyword_is_refused_as_a_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name='class': is a keyword of Python"):
        create_project("class", tmp_path / "out")


@pytest.mark.parametrize("name", ["cpu", "nvidia", "xnnpack", "kernel_pytorch", "kernel_pytorch_two"])
def test_a_name_that_is_taken_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"name='{name}'"):
        create_project(name, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists already"):
        create_project("acme", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaffold, "_RENDER", "raise SystemExit('{name} cannot be drawn')")
    with pytest.raises(RuntimeError, match="my_npu cannot be drawn"):
        create_project("my_npu", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_vendors_name_is_in_every_text_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaffold, "_RENDER", "pass")
    folder = create_project("my_npu", tmp_path / "deep" / "out")
    texts = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert not [name for name, text in texts.items() if "acme" in (name + text).lower()]
    assert 'my_npu = "my_npu_backend:BACKEND"' in texts["pyproject.toml"]
    assert "class MyNpuBackend(BackendDetails)" in texts["src/my_npu_backend/delegate.py"]
    assert "src/my_npu_backend/native/cmake/my_npu-config.cmake.in" in texts
    assert ".github/workflows/ci.yml" in texts
