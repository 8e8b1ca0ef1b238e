"""Skip test files that need ExecuTorch and the C++ runtime if one is missing, with the reason."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

# Beside the files of tests/lowering: they build, lower and run programs of a backend.
ALSO_LOWERING = {"test_backend_kit.py", "test_backend_pages.py"}

EXECUTORCH = "needs ExecuTorch: pip install 'kernel-pytorch[lowering]'"


@cache
def missing_for_lowering() -> str | None:
    """Why no program can be lowered and run here, or None."""
    if _absent("executorch"):
        return EXECUTORCH
    beside = Path(sys.executable).parent
    for tool in ("cmake", "ninja"):
        if not (beside / tool).exists() and shutil.which(tool) is None:
            return f"needs {tool}: pip install 'kernel-pytorch[lowering]'"
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        return "needs a C++ compiler: install g++ or clang++, or name one in CXX"
    return None


def _absent(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:
        return True


needs_executorch = pytest.mark.skipif(_absent("executorch"), reason=EXECUTORCH)


class SkippedModule(pytest.Module):
    """A test file that is not imported, because what it imports is missing."""

    reason = ""

    def collect(self) -> NoReturn:
        pytest.skip(self.reason, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path.parent.name != "lowering" and module_path.name not in ALSO_LOWERING:
        return None
    reason = missing_for_lowering()
    if reason is None:
        return None
    skipped: SkippedModule = SkippedModule.from_parent(parent, path=module_path)
    skipped.reason = reason
    return skipped
