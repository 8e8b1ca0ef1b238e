"""Watching what 8-bit casts lose, and turning back layers that keep losing too much.

The casts count on the device as they go. Every so many steps of an optimizer the counts of all layers of a model are
copied to the host without waiting. They are looked at one step later: the device then has that step to do, and does
not wait, and a run that is repeated falls back at the same step.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from kernel_pytorch.fp8.layer import Float8Linear

__all__ = ["Losses", "Monitor", "layers_of", "losses_of"]

TENSORS = ("input", "weight", "gradient")
MOST_UNDERFLOW = 0.5
"""Of the numbers of a tensor: with more than this part turned to zero, a layer's step has failed."""
MOST_OUTGROWN = 1e-3
"""Of the numbers of a tensor: with more than this part too large for its history, too."""
FAILURES = 3
"""So many intervals in a row, and the layer falls back."""


@dataclass(frozen=True)
class Losses:
    """What the casts of one tensor of a layer lost: parts of all its numbers, and how many were not finite."""

    outgrown: float
    underflowed: float
    nonfinite: int
    numbers: int

    @property
    def failed(self) -> str | None:
        """What was too much, or None."""
        if self.underflowed > MOST_UNDERFLOW:
            return f"{self.underflowed:.0%} of its numbers became zero"
        if self.outgrown > MOST_OUTGROWN:
            return f"{self.outgrown:.2%} of its numbers outgrew their history"
        return None


def losses_of(counts: torch.Tensor) -> dict[str, Losses]:
    """The counts of a layer, on the host, by tensor."""
    found = {}
    for name, copies in zip(TENSORS, counts.tolist(), strict=True):
        outgrown, underflowed, nonfinite, numbers = copies[0]  # both copies have the same numbers
        total = max(numbers, 1)
        found[name] = Losses(outgrown / total, underflowed / total, nonfinite, numbers)
    return found


def layers_of(model: nn.Module) -> dict[str, Float8Linear]:
    """The converted layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Float8Linear)}


class Monitor:
    """Looks at a model's counts every ``interval`` steps; ``kp.fp8.convert`` makes one.

    A tensor with numbers that are not finite is named in a warning. A layer fails an interval where more than half of
    the numbers of a tensor became zero, or more than one in a thousand outgrew its history; one that fails three
    intervals in a row computes in its own precision from then on, and a warning names it.
    """

    def __init__(self, model: nn.Module, interval: int) -> None:
        self.interval = interval
        self._model = weakref.ref(model)
        self._steps = 0
        self._pending: tuple[list[str], torch.Tensor, torch.Event | None] | None = None
        self._before: dict[str, torch.Tensor] = {}
        self._failures: dict[str, int] = {}

    def step(self) -> None:
        """One step of the optimizer has been made."""
        self._steps += 1
        self.look()
        if self._steps % self.interval == 0:
            self._fetch()

    def look(self) -> None:
        """Judge the counts that were fetched last."""
        if self._pending is None:
            return
        names, counts, event = self._pending
        if event is not None:
            event.synchronize()
        self._pending = None
        model = self._model()
        layers = {} if model is None else layers_of(model)
        for name, now in zip(names, counts, strict=True):
            since = now - self._before.get(name, torch.zeros_like(now))
            self._before[name] = now
            ran = bool((since >= 0).all()) and bool(since.any())  # neither reset nor left out
            if name in layers and layers[name].fp8_fallback is None and ran:
                self._judge(name, layers[name], losses_of(since))

    def _fetch(self) -> None:
        model = self._model()
        layers = {} if model is None else layers_of(model)
        if not layers:
            return
        device = next(iter(layers.values())).fp8_counts.device
        together = torch.stack([layer.fp8_counts.to(device, non_blocking=True) for layer in layers.values()])
        event = None
        if device.type != "cpu":
            host = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
            host.copy_(together, non_blocking=True)
            event = torch.Event(device.type)
            event.record()
            together = host
        self._pending = (list(layers), together, event)

    def _judge(self, name: str, layer: Float8Linear, losses: dict[str, Losses]) -> None:
        for tensor, lost in losses.items():
            if lost.nonfinite:
                warnings.warn(
                    f"fp8: {lost.nonfinite} numbers of the {tensor} of layer {name!r} were not finite in the last "
                    f"{self.interval} steps",
                    stacklevel=2,
                )
        failed = [f"of the {tensor}, {lost.failed}" for tensor, lost in losses.items() if lost.failed]
        self._failures[name] = self._failures.get(name, 0) + 1 if failed else 0
        if self._failures[name] >= FAILURES:
            layer.fp8_fallback = f"{'; '.join(failed)} in {FAILURES} intervals of {self.interval} steps in a row"
            warnings.warn(
                f"fp8: layer {name!r} now computes in its own precision: {layer.fp8_fallback}", stacklevel=2
            )


_monitors: weakref.WeakKeyDictionary[nn.Module, Monitor] = weakref.WeakKeyDictionary()


def watch(model: nn.Module, interval: int) -> Monitor:
    """Watch a model until it is gone."""
    monitor = Monitor(model, interval)
    _monitors[model] = monitor
    return monitor


def monitor_of(model: nn.Module) -> Monitor | None:
    """The monitor of a converted model."""
    return _monitors.get(model)


def unwatch(model: nn.Module) -> None:
    _monitors.pop(model, None)


def _after_step(*_: object) -> None:
    for monitor in list(_monitors.values()):
        monitor.step()


register_optimizer_step_post_hook(_after_step)
