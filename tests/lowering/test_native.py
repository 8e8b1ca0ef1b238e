"""The C++ sources: warnings are errors, kernels agree with double precision, and the format is clang-format's."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kernel_pytorch.lowering.build import SOURCES, _run, _tool, executorch_root

TESTS = Path(__file__).parent / "native"
FILES = sorted(path for folder in (SOURCES, TESTS) for path in folder.rglob("*") if path.suffix in (".h", ".cpp"))
CLANG_FORMAT = 14  # Debian 12's; other versions format some lines differently


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the runtime's CMake project builds, and the kernel tests, with warnings as errors."""
    folder = tmp_path_factory.mktemp("native")
    configure = [_tool("cmake"), "-S", str(SOURCES), "-B", str(folder), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}", f"-DCMAKE_PREFIX_PATH={executorch_root()}"]
    _run([*configure, "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON", f"-DKERNEL_PYTORCH_TESTS={TESTS}"])
    _run([_tool("cmake"), "--build", str(folder), "--parallel", "2"])
    return folder


def test_the_runtime_builds_without_warnings(built: Path) -> None:
    assert (built / "kernel_pytorch_runner").exists()
    assert list(built.glob("libkernel_pytorch_backend.*"))


def test_kernels_agree_with_double_precision(built: Path) -> None:
    """On every instruction set of this processor; the errors are bounded as tests/lowering/native/testing.h says."""
    command = [str(built / "tests" / "kernel_pytorch_tests")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "baseline" in done.stdout
    compared = re.search(r"(\d+) comparisons, 0 failures", done.stdout)
    assert compared, done.stdout
    assert int(compared[1]) > 100_000


def test_sources_are_formatted() -> None:
    tool = shutil.which("clang-format")
    if tool is None:
        pytest.skip("no clang-format: install Debian's clang-format")
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"version (\d+)", said)
    if version is None or int(version[1]) != CLANG_FORMAT:
        pytest.skip(f"the sources are formatted with clang-format {CLANG_FORMAT}, and this is {said.strip()}")
    command = [tool, "--dry-run", "--Werror", "--style=file", *map(str, FILES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_only_operators_know_operators() -> None:
    """The core has no per-operator code: no file outside operators/ refers to an op code."""
    for path in sorted((SOURCES / "core").iterdir()) + sorted((SOURCES / "kernels").iterdir()):
        assert "OpCode::k" not in path.read_text(), path
