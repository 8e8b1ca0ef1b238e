"""A kernel's digest changes with its code and with nothing else."""

import ast
from pathlib import Path

import pytest

from kernel_pytorch.hardware_abstraction.source_digest import code_of, source_digest

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
