"""A kernel's digest changes with its code and with nothing else."""

import ast
from pathlib import Path

import pytest

from kernel_pytorch.hardware_abstraction import source_digest as digests
from kernel_pytorch.hardware_abstraction.registry import backends
from kernel_pytorch.hardware_abstraction.source_digest import code_of, part_digest, source_digest

CODE = "from a import b\n\n\ndef f(x: int = 1) -> int:\n    return b(x) + 2  # why\n"


@pytest.mark.parametrize(
    "same",
    [
        CODE.replace("# why", ""),
        CODE.replace("from a import b", "from elsewhere import b\nimport os"),
        CODE.replace("    return", '    """Docstring."""\n    return'),
        CODE.replace("b(x) + 2", "(b(\n        x,\n    ) + 2)"),
    ],
)
def test_cosmetic_changes_keep_the_code(same: str) -> None:
    assert code_of(ast.parse(same)) == code_of(ast.parse(CODE))


@pytest.mark.parametrize(
    "change", [("+ 2", "+ 3"), ("+ 2", "- 2"), ("= 1", "= 2"), ("b(x)", "b(-x)"), ("f(", "g(")]
)
def test_changes_of_code_are_seen(change: tuple[str, str]) -> None:
    assert code_of(ast.parse(CODE.replace(*change))) != code_of(ast.parse(CODE))


def test_imported_triton_functions_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "digested"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "kernel.py").write_text("from digested.triton_shared import f\n\nforward = f\n")
    shared = package / "triton_shared.py"
    seen = []
    for text in ("def f(): return 1\n", "def f(): return 1  # comment\n", "def f(): return 2\n"):
        shared.write_text(text)
        seen.append(source_digest("digested.kernel"))
    assert seen[0] == seen[1] != seen[2]


def test_a_missing_module_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"kernel_pytorch\.nowhere"):
        source_digest("kernel_pytorch.nowhere")


def test_a_kernels_cpp_files_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PACKAGE", tmp_path)
    seen = []
    for text in ("int f() { return 1; }", "int f() {\n  return 1;  // why\n}", "int f() { return 2; }"):
        (tmp_path / "kernel.cpp").write_text(text)
        seen.append(source_digest("kernel_pytorch.benchmarking", ("kernel.cpp",)))
    assert seen[0] == seen[1] != seen[2]
    assert source_digest("kernel_pytorch.benchmarking") not in seen


def test_kernels_of_the_cpp_runtime_name_their_files() -> None:
    kernels = [kernel for record in backends() for kernel in record.kernels if kernel.name == "native"]
    assert kernels
    for kernel in kernels:
        assert any(name.endswith(".cpp") for name in kernel.cpp)
        assert all((digests.PACKAGE / name).is_file() for name in kernel.cpp)


def test_the_digest_of_a_part_sees_every_file_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PACKAGE", tmp_path)
    folder = tmp_path / "part"
    (folder / "native").mkdir(parents=True)
    (folder / "one.py").write_text("x = 1\n")
    first = part_digest("part/")
    (folder / "one.py").write_text('"""What it does."""\nx = 1  # one\n')
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "one.pyc").write_bytes(b"anything")
    assert part_digest("part/") == first
    (folder / "native" / "f.cpp").write_text("int f();")
    second = part_digest("part/")
    assert second != first
    (folder / "native" / "f.cpp").rename(folder / "native" / "g.cpp")
    assert part_digest("part/") not in (first, second)


@pytest.mark.parametrize("name", ["gone/", "part", "one.py", "../one.py"])
def test_a_part_that_is_not_there_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "part").mkdir()
    monkeypatch.setattr(digests, "PACKAGE", tmp_path)
    with pytest.raises(FileNotFoundError, match="Python file of the package"):
        part_digest(name)
