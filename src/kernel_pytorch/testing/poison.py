"""NaN-poisoned allocations: an output element that no kernel wrote, or a read of one, shows as NaN."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["poisoned"]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill every new uninitialised tensor, on any device, with NaN (integers with their largest value).

    Example:
        >>> with poisoned():
        ...     bool(torch.empty(3).isnan().all())
        True
    """
    # torch can do this itself, as part of its deterministic mode; warn_only leaves the choice of kernels alone.
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # its attributes are properties that no type checker sees
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
