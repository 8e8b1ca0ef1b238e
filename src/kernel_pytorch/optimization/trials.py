"""Trials: what became of each combination that was tried, kept in the user's cache so that a second run resumes."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

import msgspec

from kernel_pytorch.hardware_abstraction.choice_cache import ChoiceCacheWarning, directory

__all__ = ["Trial", "TrialCache"]

_NOISIER = 2.0  # the noise of one machine varies by less from run to run


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One combination of candidates, verified and then measured beside another one."""

    base: tuple[str, ...]
    state: tuple[str, ...]
    reason: str = ""
    """Why it was refused; empty where it was kept."""
    correct: bool = False
    """Whether it passed verification."""
    ratios: tuple[float, ...] = ()
    """For each input, time (or memory) over that of the base; empty where it was not measured."""
    error: float | None = 0.0
    snr_db: float | None = None
    graphs: int = 0
    """How many graphs torch.compile compiled for it, for all inputs."""
    breaks: int = 0
    """How often it broke a graph."""
    fallbacks: tuple[str, ...] = ()
    """Calls that a candidate left to the original, and warnings of libraries."""
    noise: float = 0.0
    """The noise of the machine that it was timed at; zero where it was not timed."""

    @property
    def kept(self) -> bool:
        return not self.reason

    @property
    def speedup(self) -> float:
        """The least of all inputs."""
        return 1 / max(self.ratios) if self.ratios else 0.0

    @property
    def removed(self) -> tuple[str, ...]:
        return tuple(name for name in self.base if name not in self.state)

    @property
    def added(self) -> tuple[str, ...]:
        return tuple(name for name in self.state if name not in self.base)


class TrialCache:
    """The trials of one problem: a model's structure, its inputs, the goal, the device and the versions."""

    def __init__(self, problem: str, *, enabled: bool = True) -> None:
        digest = hashlib.sha256(problem.encode()).hexdigest()
        self.path: Path | None = directory().parent / "optimization" / f"{digest}.json" if enabled else None
        self._trials: dict[tuple[tuple[str, ...], tuple[str, ...]], Trial] = {}
        self.resumed = 0
        """How many trials were read instead of made."""
        if self.path is not None and self.path.exists():
            try:
                for trial in msgspec.json.decode(self.path.read_bytes(), type=list[Trial]):
                    self._trials[trial.base, trial.state] = trial
            except (OSError, msgspec.DecodeError) as error:
                warnings.warn(f"cannot read {self.path}: {error}; trying again", ChoiceCacheWarning, stacklevel=2)

    def get(self, base: tuple[str, ...], state: tuple[str, ...], noise: float) -> Trial | None:
        """Return what became of a combination; None where it is unknown, or was timed at far more noise than now."""
        trial = self._trials.get((base, state))
        if trial is not None and trial.noise > _NOISIER * noise:
            return None
        self.resumed += trial is not None
        return trial

    def add(self, trial: Trial) -> None:
        self._trials[trial.base, trial.state] = trial
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            writing = self.path.with_suffix(".writing")
            writing.write_bytes(msgspec.json.encode(list(self._trials.values())))
            writing.replace(self.path)
        except OSError as error:
            warnings.warn(f"cannot keep trials in {self.path}: {error}", ChoiceCacheWarning, stacklevel=2)
            self.path = None
