"""Record otherwise silent fallbacks: calls that a candidate leaves to the original, and warnings of libraries."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

__all__ = ["fell_back", "recorded"]

_MOST = 5  # messages of the current trial
_seen: dict[str, None] | None = None


def fell_back(what: str) -> None:
    """Record that a call was left to the original, with the reason. Compiled calls are not recorded."""
    if torch.compiler.is_compiling():
        return
    if _seen is not None:
        _seen[what] = None


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """Collect fallbacks and warnings inside the block, each message once; the list is filled at its end.

    Example:
        >>> with recorded() as found:
        ...     fell_back("a mask tensor goes to SDPA")
        >>> found
        ['a mask tensor goes to SDPA']
    """
    global _seen
    before, _seen = _seen, {}
    found: list[str] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield found
    finally:
        texts = [f"{one.category.__name__}: {' '.join(str(one.message).split())[:200]}" for one in caught]
        found += [*_seen, *dict.fromkeys(texts)][:_MOST]
        _seen = before
