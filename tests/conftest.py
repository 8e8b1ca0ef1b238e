"""Shared test set-up. Without a GPU, Triton kernels run in the interpreter."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scheduling import Clock, pytest_xdist_make_scheduler

__all__ = ["pytest_xdist_make_scheduler"]

HAS_GPU = torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel module is imported


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no":  # in the process that hands out the tests
        config.pluginmanager.register(Clock())


@pytest.fixture(autouse=True)
def _own_choice_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's measured choices."""
    monkeypatch.setenv("KERNEL_PYTORCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors on busy cores: threads that wait for each other take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
