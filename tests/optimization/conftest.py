"""Fixtures: candidates of a test instead of the installed ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernel_pytorch.optimization import Candidate
from kernel_pytorch.optimization.candidates.compilers import COMPILE


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make these the only candidates there are, with torch.compile if asked for."""

    def use(*candidates: Candidate, compiled: bool = False) -> None:
        found = (*candidates, COMPILE) if compiled else candidates
        monkeypatch.setattr("kernel_pytorch.optimization.driver.registered_candidates", lambda: found)

    return use


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Small tensors on busy cores."""
