"""Verification of a changed model against the original: outputs, gradients, losses, buffers and the state dict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kernel_pytorch.optimization.examples import Example, real
from kernel_pytorch.optimization.reference import Reference, difference, reference_of
from kernel_pytorch.optimization.workload import Observation, Workload, without_dropout

__all__ = ["BUDGET_DB", "Verdict", "Verifier"]

BUDGET_DB = {"latency": 30.0, "throughput": 30.0, "training": 12.0, "memory": 12.0}
"""Minimum signal-to-noise ratio in dB of approximate candidates by default, for each goal.

Gradients of a small Llama have 13 to 16 dB in FP8 with any recipe, and 37 dB in bf16; gradients of two batches differ
by more than that. Losses must reach ``_LOSS_DB``.
"""

_SLACK = 4.0  # another order of accumulation has other rounding errors, which whole models amplify
_NEGLIGIBLE = 1e-3  # a gradient this much smaller than the others is a cancellation of larger terms
_NOISE_DB = 20.0  # a gradient below this in the original is rounding noise, as for a bias before a batch norm
_LOSS_DB = 40.0  # one per cent of the loss, before and after the optimizer steps
_OPTIMIZER_STEPS = 3
_SEED, _FRESH = 20261118, 7
_PIECE = 1 << 26  # elements in float64 at once


@dataclass(frozen=True)
class Verdict:
    """The outcome of one verification."""

    reason: str = ""
    """The first failure; empty if there is none."""
    error: float = 0.0
    """Largest ratio of an error to its budget: at most 1 if an exact candidate passes."""
    snr_db: float = math.inf
    """The lowest signal-to-noise ratio of any tensor."""
    worst: str = ""
    """The tensor with that error or ratio."""

    @property
    def ok(self) -> bool:
        return not self.reason


class Verifier:
    """Holds the references of one model on some examples, and compares the changed model with them.

    Each example is verified as given and with redrawn values. Dropout is set to zero in the comparison; a second
    check verifies that it still has an effect.
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
        """What is random, or is kept between calls, even without dropout; empty if nothing is."""
        dropout = without_dropout(workload.model)
        try:
            first = self._cases[0][1]
            once, other = (workload.observe(first, seed) for seed in (_SEED, _SEED + 1))
            self._rate = workload.rate(once)
            workload.watch_arguments(first, once)
            outputs = [name for name in once if name.startswith("output.") and _differ(once[name], other[name])]
            if outputs:
                output = outputs[0]
                again = workload.observe(first, _SEED)
                by = "from call to call" if _differ(once[output], again[output]) else "with the random seed"
                self.random = f"{output.removeprefix('output.')} changes {by}, without dropout"
            self._references = [self._reference(case) for _, case in self._cases]
        finally:
            dropout.undo()
        self._state = _state(workload)
        self._spread = self._random_spread() if len(dropout) else {}

    @property
    def float64(self) -> str | None:
        """Why the model does not run in float64, or None if it does."""
        return next((reference.float64 for reference in self._references if reference.float64), None)

    @property
    def held_bytes(self) -> int:
        """Bytes of the references on an accelerator, to subtract from the model's memory."""
        kept = [one for reference in self._references for one in reference.tensors.values()]
        tensors = [tensor for one in kept for tensor in (one.truth, one.usable) if tensor is not None]
        return sum(tensor.nbytes for tensor in tensors if tensor.device.type != "cpu")

    def verify(
        self, *, exact: bool, drops: frozenset[str] = frozenset(), adds_state: frozenset[str] = frozenset()
    ) -> Verdict:
        """Compare the model in its present state with the original."""
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
        """Return the standard deviation of each output over random seeds, with dropout."""
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
    expected = reference.tensors
    dropped = {name for name in expected if name.removeprefix("output.").partition(".")[0] in drops}
    missing = expected.keys() - found.keys() - dropped
    added = {name for name in found.keys() - expected.keys() if not name.startswith("buffer.")}
    if missing or added:
        which = f"{min(missing)} is missing" if missing else f"{min(added)} is new"
        return Verdict(f"{which} in the result")
    gradients = [one for name, one in expected.items() if name.startswith("gradient.")]
    largest = max((one.magnitude for one in gradients), default=0.0)
    count = sum(one.truth.numel() for one in gradients)
    power = sum(one.signal for one in gradients) / max(count, 1)
    worst, snr, losses = Verdict(), Verdict(), Verdict()
    for name, one in expected.items():
        if name in dropped:
            continue
        out = found[name]
        if (out.shape, out.dtype) != (one.truth.shape, one.dtype):
            original = f"{_name(one.dtype)}{list(one.truth.shape)}"
            return Verdict(f"{name} is {_kind(out)}, and {original} in the original", math.inf, -math.inf, name)
        if not out.is_floating_point():
            if _differ(out, one.truth):
                return Verdict(f"{name} is another value than in the original", math.inf, -math.inf, name)
            continue
        gradient = name.startswith("gradient.")
        distance, noise = difference(out, one)
        if gradient and _decibels(one.signal, one.noise) < _NOISE_DB and distance <= _NEGLIGIBLE * largest:
            continue
        db = _decibels(max(one.signal, (_NEGLIGIBLE**2) * power * out.numel() if gradient else 0.0), noise)
        if db < snr.snr_db:
            snr = Verdict("", 0.0, db, name)
        if db < losses.snr_db and name.startswith("loss"):
            losses = Verdict("", 0.0, db, name)
        eps = torch.finfo(out.dtype).eps
        budget = _SLACK * (one.distance + eps * (one.magnitude + (largest * _NEGLIGIBLE if gradient else 0.0)))
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
    if not exact and losses.snr_db < max(_LOSS_DB, budget_db):
        reason = f"{losses.worst} has {losses.snr_db:.1f} dB against float64, below the {_LOSS_DB:g} dB of losses"
        return Verdict(reason, worst.error, losses.snr_db, losses.worst)
    if not exact and snr.snr_db < budget_db:
        return Verdict(
            f"{snr.worst} has {snr.snr_db:.1f} dB against float64, below the budget of {budget_db:g} dB",
            worst.error,
            snr.snr_db,
            snr.worst,
        )
    return Verdict("", worst.error, snr.snr_db, worst.worst if exact else snr.worst)


def _decibels(signal: float, noise: float) -> float:
    """Return the signal-to-noise ratio in dB from sums of squares."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal and math.isfinite(noise) else -math.inf


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        not torch.equal(one.nan_to_num(), other.nan_to_num())
        if one.is_floating_point()
        else not torch.equal(one, other)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(tensor: torch.Tensor) -> str:
    return f"{_name(tensor.dtype)}{list(tensor.shape)}"


def _state(workload: Workload) -> dict[str, tuple[str, str]]:
    """Return names, shapes, dtypes and checksums of the state dict; a copy would double a model's memory."""
    state = workload.model.state_dict()
    return {
        name: (_kind(value), _checksum(real(value)))
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def _checksum(tensor: torch.Tensor) -> str:
    sums = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    for number, piece in enumerate(tensor.detach().contiguous().flatten().split(_PIECE)):
        wide = piece.double()
        first = number * _PIECE + 1
        order = torch.arange(first, first + wide.numel(), device=wide.device, dtype=torch.float64)
        sums += torch.stack([wide.sum(), wide.dot(order.rsqrt_())])
    return repr(sums.tolist())


def _state_change(before: Mapping[str, tuple[str, str]], now: Mapping[str, tuple[str, str]]) -> str:
    """Return a description of the first difference between state dicts; empty if there is none."""
    if before.keys() != now.keys():
        return f"the state dict has other names: {', '.join(sorted(before.keys() ^ now.keys())[:3])}"
    for name, (kind, checksum) in before.items():
        if now[name][0] != kind:
            return f"{name} of the state dict is {now[name][0]}, and {kind} in the original"
        if now[name][1] != checksum:
            return f"{name} of the state dict has other values"
    return ""
