"""Verification of a changed model against the original: outputs, gradients, losses, buffers and the state dict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kernel_pytorch.optimization.examples import Example
from kernel_pytorch.optimization.reference import Reference, reference_of
from kernel_pytorch.optimization.workload import Observation, Workload, without_dropout

__all__ = ["BUDGET_DB", "Verdict", "Verifier"]

BUDGET_DB = {"latency": 30.0, "throughput": 30.0, "training": 20.0, "memory": 20.0}
"""The signal-to-noise ratio that approximate candidates must keep by default, for each goal."""

_SLACK = 4.0  # another order of the same sums errs differently, and whole models amplify that
_NEGLIGIBLE = 1e-3  # a gradient this much smaller than the others is what is left of larger terms
_NOISE_DB = 20.0  # a gradient below this in the original is rounding noise, as of a bias before a batch norm
_OPTIMIZER_STEPS = 3
_SEED, _FRESH = 20261118, 7


@dataclass(frozen=True)
class Verdict:
    """The outcome of one verification."""

    reason: str = ""
    """What is wrong; empty where nothing is."""
    error: float = 0.0
    """The worst error relative to its budget: at most 1 where the verification passes, for exact candidates."""
    snr_db: float = math.inf
    """The worst signal-to-noise ratio of any tensor."""
    worst: str = ""
    """The tensor that it belongs to."""

    @property
    def ok(self) -> bool:
        return not self.reason


class Verifier:
    """Holds the references of one model on some examples, and compares the changed model with them.

    Each example is verified as given and with fresh values. Dropout is set to zero in the comparison; a second check
    makes sure that it still acts.
    """

    def __init__(self, workload: Workload, examples: Sequence[Example], budget_db: float) -> None:
        self.workload, self.budget_db = workload, budget_db
        self._cases = [
            (label, case)
            for example in examples
            for label, case in (
                (example.label, example),
                (f"{example.label}, fresh values", example.redrawn(_FRESH)),
            )
        ]
        self._steps = _OPTIMIZER_STEPS if workload.training else 0
        self.random = ""
        """What is random about the model even without dropout; empty where nothing is."""
        dropout = without_dropout(workload.model)
        try:
            first = self._cases[0][1]
            once, other = (workload.observe(first, seed) for seed in (_SEED, _SEED + 1))
            self._rate = workload.rate(once)
            outputs = [name for name in once if name.startswith("output.") and _differ(once[name], other[name])]
            if outputs:
                self.random = f"{outputs[0].removeprefix('output.')} changes with the random seed, without dropout"
            self._references = [self._reference(case) for _, case in self._cases]
        finally:
            dropout.undo()
        self._state = _state(workload)
        self._spread = self._random_spread()

    @property
    def float64(self) -> str | None:
        """Why the model does not run in float64, or None where it does."""
        return next((reference.float64 for reference in self._references if reference.float64), None)

    def verify(
        self, *, exact: bool, drops: frozenset[str] = frozenset(), adds_state: frozenset[str] = frozenset()
    ) -> Verdict:
        """Compare the model as it is now with the original."""
        verdicts = []
        dropout = without_dropout(self.workload.model)
        try:
            for (label, case), reference in zip(self._cases, self._references, strict=True):
                found = self.workload.observe(case, _SEED, self._steps_of(case), self._rate)
                verdict = _compared(found, reference, exact=exact, drops=drops, budget_db=self.budget_db)
                if not verdict.ok:
                    return Verdict(
                        f"{verdict.reason} (input {label})", verdict.error, verdict.snr_db, verdict.worst
                    )
                verdicts.append(verdict)
        finally:
            dropout.undo()
        now = _state(self.workload)
        added = {name for name in now.keys() - self._state.keys() if name.rpartition(".")[2] in adds_state}
        changed = _state_change(self._state, {name: now[name] for name in now.keys() - added})
        if changed:
            self.workload.restore()
            return Verdict(changed)
        reason = self._dropout_lost()
        worst = min(verdicts, key=lambda one: (-one.error, one.snr_db) if exact else (one.snr_db,))
        return Verdict(reason, worst.error, min(one.snr_db for one in verdicts), worst.worst)

    def _reference(self, case: Example) -> Reference:
        return reference_of(self.workload, case, _SEED, self._steps_of(case), self._rate)

    def _steps_of(self, case: Example) -> int:
        return self._steps if case is self._cases[0][1] else 0

    def _random_spread(self) -> dict[str, float]:
        """How much each output varies with the seed, dropout included."""
        runs = [self.workload.observe(self._cases[0][1], seed) for seed in range(4)]
        return {
            name: float(torch.stack([run[name].double() for run in runs]).std(dim=0).mean())
            for name, tensor in runs[0].items()
            if name.startswith("output.") and tensor.is_floating_point() and tensor.numel()
        }

    def _dropout_lost(self) -> str:
        if not any(spread > 0 for spread in self._spread.values()):
            return ""
        for name, now in self._random_spread().items():
            before = self._spread.get(name, 0.0)
            if not before / 3 <= now <= before * 3 and max(before, now) > 0:
                return (
                    f"{name} varies with the random seed by {now:.3g} on average, and by {before:.3g} in the "
                    "original: dropout is not the same"
                )
        return ""


def _compared(
    found: Observation, reference: Reference, *, exact: bool, drops: frozenset[str], budget_db: float
) -> Verdict:
    dropped = {name for name in reference.truth if name.removeprefix("output.").partition(".")[0] in drops}
    missing = reference.truth.keys() - found.keys() - dropped
    added = {name for name in found.keys() - reference.truth.keys() if not name.startswith("buffer.")}
    if missing or added:
        which = f"{min(missing)} is missing" if missing else f"{min(added)} is new"
        return Verdict(f"{which} in the result")
    gradients = [value for name, value in reference.truth.items() if name.startswith("gradient.")]
    largest = max((float(value.abs().max()) for value in gradients if value.numel()), default=0.0)
    count = sum(value.numel() for value in gradients)
    power = sum(float(value.double().square().sum()) for value in gradients) / max(count, 1)
    worst, snr = Verdict(), Verdict()
    for name, truth in reference.truth.items():
        if name in dropped:
            continue
        out, original = found[name], reference.original[name]
        if (out.shape, out.dtype) != (original.shape, original.dtype):
            return Verdict(
                f"{name} is {_kind(out)}, and {_kind(original)} in the original", math.inf, -math.inf, name
            )
        if not truth.is_floating_point():
            if _differ(out, original):
                return Verdict(f"{name} is another value than in the original", math.inf, -math.inf, name)
            continue
        gradient = name.startswith("gradient.")
        noise = gradient and _snr_db(original, truth, original, 0.0) < _NOISE_DB
        if noise and _distance(out, truth, original) <= _NEGLIGIBLE * largest:
            continue
        db = _snr_db(out, truth, original, (_NEGLIGIBLE**2) * power if gradient else 0.0)
        if db < snr.snr_db:
            snr = Verdict("", 0.0, db, name)
        eps = torch.finfo(out.dtype).eps
        budget = _SLACK * (
            max(_distance(run[name], truth, original) for run in reference.yardsticks)
            + eps * (_magnitude(truth) + (largest * _NEGLIGIBLE if gradient else 0.0))
        )
        distance = _distance(out, truth, original)
        error = 0.0 if distance == 0 else distance / budget if budget else math.inf
        if error > worst.error:
            worst = Verdict("", error, db, name)
    if exact and worst.error > 1:
        return Verdict(
            f"{worst.worst} is off by {worst.error:.3g} times its float64 budget",
            worst.error,
            snr.snr_db,
            worst.worst,
        )
    if not exact and snr.snr_db < budget_db:
        return Verdict(
            f"{snr.worst} has {snr.snr_db:.1f} dB against float64, below the budget of {budget_db:g} dB",
            worst.error,
            snr.snr_db,
            snr.worst,
        )
    return Verdict("", worst.error, snr.snr_db, worst.worst if exact else snr.worst)


def _finite(tensor: torch.Tensor, truth: torch.Tensor, original: torch.Tensor) -> torch.Tensor | None:
    """The truth with the original's infinities and NaN taken out, or None where the tensor has others."""
    usable = original.isfinite() & truth.isfinite()
    if not torch.equal(tensor.isfinite() | ~usable, torch.ones_like(usable)):
        return None
    return usable


def _distance(tensor: torch.Tensor, truth: torch.Tensor, original: torch.Tensor) -> float:
    usable = _finite(tensor, truth, original)
    if usable is None:
        return math.inf
    difference = (tensor.double() - truth.double())[usable].abs()
    return float(difference.max()) if difference.numel() else 0.0


def _magnitude(truth: torch.Tensor) -> float:
    finite = truth[truth.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _snr_db(tensor: torch.Tensor, truth: torch.Tensor, original: torch.Tensor, least_power: float) -> float:
    usable = _finite(tensor, truth, original)
    if usable is None:
        return -math.inf
    exact = truth.double()[usable]
    noise = float((tensor.double()[usable] - exact).square().sum())
    signal = max(float(exact.square().sum()), least_power * exact.numel())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        not torch.equal(one.nan_to_num(), other.nan_to_num())
        if one.is_floating_point()
        else not torch.equal(one, other)
    )


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _state(workload: Workload) -> dict[str, tuple[str, str]]:
    """The state dict: names, shapes and dtypes, and a checksum of the values; a copy would double a large model."""
    state = workload.model.state_dict()
    return {
        name: (_kind(value), _checksum(value)) for name, value in state.items() if isinstance(value, torch.Tensor)
    }


def _checksum(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().flatten().double()
    order = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float64)
    return f"{float(flat.sum())!r} {float(flat.dot(order.rsqrt()))!r}"


def _state_change(before: Mapping[str, tuple[str, str]], now: Mapping[str, tuple[str, str]]) -> str:
    """What a change did to the state dict, in words; empty where it is the same."""
    if before.keys() != now.keys():
        return f"the state dict has other names: {', '.join(sorted(before.keys() ^ now.keys())[:3])}"
    for name, (kind, checksum) in before.items():
        if now[name][0] != kind:
            return f"{name} of the state dict is {now[name][0]}, and {kind} in the original"
        if now[name][1] != checksum:
            return f"{name} of the state dict has other values"
    return ""
