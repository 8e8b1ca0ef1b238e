"""Executes the documentation: every python block of the pages named below is a test.

A block that needs a GPU is preceded by ``<!--- skip: next if(not has_gpu, reason="needs a GPU") -->``.
Blocks of one page share their names and run in order. On the pages that are written by hand, blocks in bash run as
well, in a folder of their own for each page, with the checkout's demos and benchmarks in it; one that cannot, such as
``make install``, is preceded by ``<!--- skip: next "the reason" -->``. For the commands of other pages see
tests/website/test_documentation.py.
"""

import doctest
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest

# Workers and their children share the cores: a thread that waits must not keep one busy. Before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from sybil import Example, Sybil
from sybil.parsers.myst import CodeBlockParser, PythonCodeBlockParser, SkipParser
from sybil.sybil import SybilCollection

ROOT = Path(__file__).parent
HAS_GPU = torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel module is imported, as in tests/conftest.py
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # torch's threads would wait for those of other workers
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # in programs that tests start

# Lowered checkpoints: kept for the run, and not in the user's cache.
_PROGRAMS = tempfile.TemporaryDirectory(prefix="programs-")
os.environ["KERNEL_PYTORCH_PROGRAMS"] = _PROGRAMS.name


@pytest.fixture
def documentation_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No page reads or writes the user's measured choices, and each measures while other tests run beside it."""
    monkeypatch.setenv("KERNEL_PYTORCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("kernel_pytorch.hardware_abstraction.timing.MOST_SPREAD", float("inf"))


def _names(namespace: dict[str, Any]) -> None:
    from kernel_pytorch.hardware_abstraction import backends, devices

    namespace["has_gpu"] = HAS_GPU
    for record in backends():  # the pages of a backend ask for its own devices
        namespace[f"has_{record.name}"] = any(device.backend == record.name for device in devices())


def _sandbox(namespace: dict[str, Any]) -> None:
    _names(namespace)
    sandbox = namespace["sandbox"] = tempfile.TemporaryDirectory()
    for folder in ("demos", "benchmarks"):
        (Path(sandbox.name) / folder).symlink_to(ROOT / folder)
    os.chdir(sandbox.name)  # Python blocks and commands of a page find each other's files


def _leave(namespace: dict[str, Any]) -> None:
    os.chdir(ROOT)
    namespace["sandbox"].cleanup()


def _run_shell(example: Example) -> None:
    """A block as a reader would paste it, after activating the environment; a command that fails, fails it."""
    if os.environ.get("DOCUMENTATION_WITHOUT_SHELL"):
        raise SkipTest("commands are run by 'make test', where the package is installed")
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", str(example.parsed)],
        env={**os.environ, "PATH": tools, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def _below(folder: str, suffix: str) -> list[str]:
    """Patterns for a folder's files at any depth; in a pattern of Sybil's, ``**`` is one level."""
    return [f"{folder}/{'*/' * depth}*.{suffix}" for depth in range(6)]


_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_FIXTURES = ["documentation_cache"]
SHELL_PATTERNS = ["README.md", "CONTRIBUTING.md", "docs/*.md", "docs/tutorials/*.md", "docs/guides/*.md"]

PAGES = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=_FLAGS), SkipParser()],
    patterns=_below("docs", "md"),
    excludes=SHELL_PATTERNS,
    setup=_names,
    fixtures=_FIXTURES,
)
SHELL = Sybil(
    parsers=[
        PythonCodeBlockParser(doctest_optionflags=_FLAGS),
        CodeBlockParser(language="bash", evaluator=_run_shell),
        SkipParser(),
    ],
    patterns=SHELL_PATTERNS,
    excludes=["demos/*.md"],
    setup=_sandbox,
    teardown=_leave,
    fixtures=_FIXTURES,
)
pytest_collect_file = SybilCollection([PAGES, SHELL]).pytest()
