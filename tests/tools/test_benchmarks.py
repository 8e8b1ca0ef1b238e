"""What the programs in benchmarks import from this package exists. No test runs them: they take minutes."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
from tools.evidence_gpu import ROOT

PROGRAMS = sorted((ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_what_a_benchmark_imports_exists(path: Path) -> None:
    missing = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "kernel_pytorch":
            try:
                module = importlib.import_module(node.module or "")
                missing += [alias.name for alias in node.names if not _is_in(module.__name__, alias.name)]
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] == "kernel_pytorch":
                    missing.append(str(node.module))
    assert not missing


def _is_in(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True
