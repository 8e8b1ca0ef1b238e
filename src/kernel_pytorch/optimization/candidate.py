"""Candidates: ways to make a model faster or smaller, in a registry that other packages can extend.

A package adds its own through the entry-point group ``kernel_pytorch.candidates``; each entry point refers to a
``Candidate`` or a sequence of them.
"""

from __future__ import annotations

import enum
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from kernel_pytorch.optimization.edits import Edits
from kernel_pytorch.optimization.examples import Example

__all__ = ["ENTRY_POINTS", "GOALS", "Candidate", "Context", "Sites", "Stage", "missing", "registered_candidates"]

ENTRY_POINTS = "kernel_pytorch.candidates"
GOALS = ("latency", "throughput", "training", "memory")
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")


class Stage(enum.IntEnum):
    """The order in which candidates are applied, lowest first."""

    MODULE = 0
    """Rewrites single modules."""
    PRECISION = 1
    """Changes the number format of some computations."""
    MEMORY = 2
    """Trades time for memory around modules that earlier stages have rewritten."""
    LAYOUT = 3
    """Changes the memory layout of weights."""
    COMPILE = 4
    """Compiles the result of the earlier stages."""


@dataclass(frozen=True)
class Context:
    """The device, goal and examples, for ``Candidate.match``."""

    goal: str
    device: torch.device
    examples: tuple[Example, ...]

    @property
    def training(self) -> bool:
        """Whether the goal has a backward pass."""
        return self.goal in ("training", "memory")


@dataclass(frozen=True)
class Sites:
    """Names of the modules that a candidate would change (``""`` is the model), and of those that it skips."""

    names: tuple[str, ...]
    left_alone: Mapping[str, str] = field(default_factory=dict)
    """Names of skipped modules, with the reasons."""


@dataclass(frozen=True)
class Candidate:
    """One way to make a model faster or smaller.

    Example:
        >>> import torch
        >>> from kernel_pytorch.optimization import Candidate, Sites, Stage
        >>> def relus(model, context):
        ...     found = tuple(name for name, module in model.named_modules() if type(module) is torch.nn.ReLU)
        ...     return Sites(found) if found else "the model has no nn.ReLU"
        >>> def clamp(call, x):
        ...     return x.clamp(min=0)
        >>> def apply(model, sites, edits):
        ...     for name in sites:
        ...         edits.replace_forward(model.get_submodule(name), clamp)
        >>> candidate = Candidate("clamp-relu", "clamp instead of relu", "exact", Stage.MODULE, relus, apply)
        >>> candidate.match(torch.nn.Sequential(torch.nn.Tanh()), None)
        'the model has no nn.ReLU'
    """

    name: str
    """Lower-case words joined by hyphens; plans refer to it."""
    summary: str
    """One line for the report."""
    kind: Literal["exact", "approximate"]
    """``exact`` is held to an error budget derived from float64, ``approximate`` to a signal-to-noise ratio."""
    stage: Stage
    match: Callable[[nn.Module, Context], Sites | str]
    """Return the modules to change, or the reason why there are none. It must not change the model."""
    apply: Callable[[nn.Module, tuple[str, ...], Edits], None]
    """Make the changes at these modules, all of them through the ``Edits``, which undo them."""
    goals: frozenset[str] = frozenset(GOALS)
    conflicts: frozenset[str] = frozenset()
    """Names of candidates that cannot be combined with it."""
    drops: frozenset[str] = frozenset()
    """Names of outputs that it omits; all other outputs are compared."""
    adds_state: frozenset[str] = frozenset()
    """Last components of names that it adds to the state dict, such as the state of FP8 scales."""
    requires: frozenset[str] = frozenset()
    """Distributions that it calls, such as ``liger-kernel``; a plan is valid for their versions only."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """More information for the report, such as a compiler mode."""

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ValueError(f"name={self.name!r}: use lower-case words joined by hyphens, such as 'rms-norm'")
        if self.kind not in ("exact", "approximate"):
            raise ValueError(f"kind={self.kind!r} of candidate {self.name}: use 'exact' or 'approximate'")
        unknown = self.goals - set(GOALS)
        if unknown:
            raise ValueError(f"goals={sorted(unknown)} of candidate {self.name}: use some of {', '.join(GOALS)}")

    @property
    def exact(self) -> bool:
        return self.kind == "exact"

    def excludes(self, other: Candidate) -> bool:
        """Return whether the two cannot be combined."""
        both_compile = self.stage is other.stage is Stage.COMPILE
        return both_compile or other.name in self.conflicts or self.name in other.conflicts


def missing(library: str, distribution: str | None = None) -> str | None:
    """Return why a library cannot be used, or None if it is installed; nothing is imported.

    Example:
        >>> from kernel_pytorch.optimization.candidate import missing
        >>> missing("no_such_library")
        'needs no_such_library, which is not installed: pip install no_such_library'
    """
    if importlib.util.find_spec(library) is None:
        return f"needs {library}, which is not installed: pip install {distribution or library}"
    return None


@functools.cache
def _installed() -> tuple[tuple[Candidate, ...], Mapping[str, str]]:
    """Return all candidates, and the entry points that could not be loaded with their errors."""
    from kernel_pytorch.optimization.candidates import BUILT_IN

    found: dict[str, Candidate] = {candidate.name: candidate for candidate in BUILT_IN}
    broken: dict[str, str] = {}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            loaded = entry.load()
            group: Iterable[Candidate] = (loaded,) if isinstance(loaded, Candidate) else tuple(loaded)
            for candidate in group:
                if not isinstance(candidate, Candidate):
                    raise TypeError(f"{candidate!r} is not a Candidate")
                if candidate.name in found:
                    raise ValueError(f"there is a candidate {candidate.name!r} already")
                found[candidate.name] = candidate
        except Exception as error:
            broken[entry.name] = f"{type(error).__name__}: {error}"
    return tuple(found.values()), broken


def registered_candidates() -> tuple[Candidate, ...]:
    """Return all candidates: the built-in ones and those of entry points.

    Example:
        >>> from kernel_pytorch.optimization import registered_candidates
        >>> "rms-norm" in {candidate.name for candidate in registered_candidates()}
        True
    """
    return _installed()[0]


def broken_entry_points() -> Mapping[str, str]:
    """Return the entry points of candidates that could not be loaded, with their errors."""
    return _installed()[1]
