"""NaN-poisoned allocations, to find output elements that no kernel has written, and reads of such elements."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["poisoned"]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill every new uninitialised tensor, on any device, with NaN (integers with their maximum).

    Example:
        >>> with poisoned():
        ...     bool(torch.empty(3).isnan().all())
        True
    """
    # torch does this in deterministic mode; warn_only keeps the selection of kernels unchanged.
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # type checkers do not see its properties
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
