"""Look up a private name, test it, and use the alternative if it is missing or behaves differently."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["PRIVATE_NAMES", "CompatibilityWarning", "PrivateName", "private"]

CHECKED = "torch 2.13 and 2.15"
"""The versions that the tests of these names have passed with, on CPUs (2.13.0 and 2.15.0)."""


class CompatibilityWarning(UserWarning):
    """A private API of torch is missing or behaves differently; the message says what is used instead."""


@dataclass(frozen=True, kw_only=True)
class PrivateName:
    """One private name, with its test status."""

    path: str
    """Its path, such as ``"torch._C._len_torch_dispatch_stack"``."""
    without: str
    """What happens if it cannot be used."""
    test: Callable[[Any], bool]
    """Returns whether an object behaves as expected; cheap, and independent of the state of the process."""
    checked: str = CHECKED


PRIVATE_NAMES: dict[str, PrivateName] = {}
"""Every private name that was looked up, by its path."""


def private(path: str, *, test: Callable[[Any], bool], without: str, otherwise: Any = None) -> Any:
    """Return the object at a path, or ``otherwise`` with a warning.

    Args:
        path: a module and names in it, such as ``"torch._C._len_torch_dispatch_stack"``.
        test: returns whether the object behaves as expected.
        without: what happens if it cannot be used, for the warning or the error.
        otherwise: what to use instead; None makes a missing name an error.

    Example:
        >>> private("torch._C._len_torch_dispatch_stack", test=lambda f: f() >= 0, without="...")()
        0
    """
    PRIVATE_NAMES[path] = PrivateName(path=path, without=without, test=test)
    try:
        found = _find(path)
        if test(found):
            return found
        problem = "behaves differently"
    except Exception as error:  # a private API may fail in any way
        problem = f"cannot be used ({type(error).__name__}: {error})"
    message = f"{path} {problem} in torch {torch.__version__}; it was checked with {CHECKED}: {without}"
    if otherwise is None:
        raise ImportError(message)
    warnings.warn(message, CompatibilityWarning, stacklevel=2)
    return otherwise


def _find(path: str) -> Any:
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)
