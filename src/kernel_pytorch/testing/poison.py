"""NaN-poisoned allocations: an output element that no kernel wrote, or a read of one, shows as NaN."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any
from unittest import mock

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
        with _launches_allocate_by_torch():
            yield
    finally:
        settings.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _launches_allocate_by_torch() -> contextlib.AbstractContextManager[object]:
    """Triton kernels that are launched in a hurry allocate where torch fills nothing."""
    if importlib.util.find_spec("triton") is None:
        return contextlib.nullcontext()
    from kernel_pytorch.ops import triton_launch

    def allocate(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device="cuda")

    return mock.patch.object(triton_launch, "_empty_strided_cuda", allocate)
