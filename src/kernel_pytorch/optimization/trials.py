"""Trials: the result of each combination that was tried, cached on disk so that an interrupted search can resume."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

import msgspec

from kernel_pytorch.hardware_abstraction.choice_cache import ChoiceCacheWarning, directory

__all__ = ["Trial", "TrialCache"]

_NOISIER = 2.0  # the noise of one machine varies less than this between runs


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One combination of candidates, verified and then measured in comparison with another one."""

    base: tuple[str, ...]
    state: tuple[str, ...]
    reason: str = ""
    """Why it was refused; empty if it was kept."""
    correct: bool = False
    """Whether it passed verification."""
    ratios: tuple[float, ...] = ()
    """Ratio of its time (or memory) to the base's for each input; empty if it was not measured."""
    error: float | None = 0.0
    snr_db: float | None = None
    graphs: int = 0
    """Number of graphs that torch.compile compiled for it, over all inputs."""
    breaks: int = 0
    """Number of graph breaks."""
    fallbacks: tuple[str, ...] = ()
    """Calls that a candidate left to the original, and warnings of libraries."""
    noise: float = 0.0
    """The noise of the machine when it was timed; zero if it was not timed."""

    @property
    def kept(self) -> bool:
        return not self.reason

    @property
    def speedup(self) -> float:
        """The minimum over all inputs."""
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
        """Number of trials that were read from the cache."""
        if self.path is not None and self.path.exists():
            try:
                for trial in msgspec.json.decode(self.path.read_bytes(), type=list[Trial]):
                    self._trials[trial.base, trial.state] = trial
            except (OSError, msgspec.DecodeError) as error:
                warnings.warn(f"cannot read {self.path}: {error}; trying again", ChoiceCacheWarning, stacklevel=2)

    def get(self, base: tuple[str, ...], state: tuple[str, ...], noise: float) -> Trial | None:
        """Return the trial of a combination; None if there is none, or it was timed with far more noise than now."""
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
