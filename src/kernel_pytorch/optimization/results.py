"""The result of a search, and its progress."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernel_pytorch.optimization.combinations import EAGER, State
from kernel_pytorch.optimization.timing import Comparison
from kernel_pytorch.optimization.trials import Trial

__all__ = ["Progress", "Result"]


@dataclass(frozen=True)
class Progress:
    """Progress of a search, for a progress bar."""

    trying: str
    done: int
    total: int
    """Estimated number of trials; winning combinations are refined further."""
    seconds_left: float
    best: float
    """The minimum speed-up over eager of the best combination so far."""


@dataclass
class Result:
    """The result of a search."""

    best: State = EAGER
    noise: float = 0.0
    trials: list[Trial] = field(default_factory=list)
    steps: list[Trial] = field(default_factory=list)
    """The trials that led to the best combination, in order."""
    over_eager: list[Comparison] = field(default_factory=list)
    over_compile: list[Comparison] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    """Bytes before and after, for each input."""
    notes: list[str] = field(default_factory=list)
