"""The order in which pytest-xdist's workers get tests."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import scheduling

ROOT = Path(__file__).parents[2]
CONFTEST = f"""
import sys
sys.path.insert(0, {str(Path(scheduling.__file__).parent)!r})
import scheduling
from scheduling import pytest_xdist_make_scheduler
scheduling.SECONDS = {{"test_few.py": 9, "test_split.py[b]": 5}}
scheduling.BY_PARAMETER = {{"test_split.py"}}
scheduling.LONG = -1

def pytest_configure(config):
    if config.getoption("dist") != "no":
        config.pluginmanager.register(scheduling.Clock())
"""
TEST = "import pytest\n@pytest.mark.parametrize('x', {values!r})\ndef test_one(x): pass\n"


def test_long_scopes_come_first_and_a_parameter_may_be_a_scope(tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # the root of names
    for name, values in {"few": "z", "many": "vwxyz", "split": "abcd"}.items():
        (tmp_path / f"test_{name}.py").write_text(TEST.format(values=list(values)))
    options = ["-p", "no:cacheprovider", "-v", "-n", "1", "--dist", "loadscope"]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [line.split("PASSED ")[1].strip() for line in done.stdout.splitlines() if "PASSED" in line]
    many = [f"test_many.py::test_one[{value}]" for value in "vwxyz"]
    split = [f"test_split.py::test_one[{value}]" for value in "bacd"]
    assert ran == ["test_few.py::test_one[z]", split[0], *many, *split[1:]]
    assert "test_many.py took 0 s: name it" in done.stdout
    assert "test_few.py took" not in done.stdout


@pytest.mark.parametrize(
    ("test", "scope"),
    [
        ("tests/test_x.py::test_one[aten::add-2]", "tests/test_x.py"),
        ("tests/test_x.py::TestA::test_one[2]", "tests/test_x.py::TestA"),
        ("docs/setup.md::line:12,column:1", "docs/setup.md"),
        (
            "tests/testing/test_cross_compile.py::test_one[attention]",
            "tests/testing/test_cross_compile.py[attention]",
        ),
        ("tests/testing/test_cross_compile.py::test_one", "tests/testing/test_cross_compile.py"),
    ],
)
def test_scopes_of_tests(test: str, scope: str) -> None:
    assert scheduling.scope_of(test) == scope


def test_named_scopes_exist() -> None:
    paths = {re.split(r"\[|::", scope)[0] for scope in [*scheduling.SECONDS, *scheduling.BY_PARAMETER]}
    assert [path for path in paths if not (ROOT / path).is_file()] == []
