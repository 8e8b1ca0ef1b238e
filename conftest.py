"""Executes the documentation: every python block of the pages named below is a test.

A block that needs a GPU is preceded by ``<!--- skip: next if(not has_gpu, reason="needs a GPU") -->``.
Blocks of one page share their names and run in order.
"""

import doctest
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

HAS_GPU = torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel module is imported, as in tests/conftest.py
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers share the cores; torch's threads would wait for each other


@pytest.fixture
def documentation_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No page reads or writes the user's measured choices."""
    monkeypatch.setenv("KERNEL_PYTORCH_CACHE", str(tmp_path / "cache"))


def _names(namespace: dict[str, Any]) -> None:
    namespace["has_gpu"] = HAS_GPU
    from kernel_pytorch.hardware_abstraction import backends, devices

    for record in backends():  # the pages of a backend ask for its own devices
        namespace[f"has_{record.name}"] = any(device.backend == record.name for device in devices())


PAGES = Sybil(
    parsers=[
        PythonCodeBlockParser(doctest_optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE),
        SkipParser(),
    ],
    patterns=["README.md", "CONTRIBUTING.md", "API.md", "docs/*.md", "docs/*/*.md", "docs/*/*/*.md", "docs/*/*/*/*.md"],
    setup=_names,
    fixtures=["documentation_cache"],
)
pytest_collect_file = PAGES.pytest()
