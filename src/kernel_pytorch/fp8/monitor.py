"""Monitor quantization statistics during training and fall back to the layer's dtype where FP8 loses too much.

Casts accumulate counters on the device. Every ``interval`` training steps the counters of all converted layers are
copied to the host without synchronizing, and evaluated one step later, when the copy is done.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from kernel_pytorch.fp8.module import Float8Linear

__all__ = ["CastStats", "Monitor", "cast_stats", "layers_of", "monitor_of", "unwatch", "watch"]

TENSORS = ("input", "weight", "gradient")
MAX_UNDERFLOWED = 0.5
"""A tensor fails an interval if more than this fraction of its elements underflowed to zero."""
MAX_SATURATED = 1e-3
"""A tensor fails an interval if more than this fraction of its elements exceeded the delayed scale."""
MOST_NAMED = 3
"""Maximum number of non-finite tensors that one warning names; the first layer's is usually the cause."""
MAX_FAILURES = 3
"""A layer falls back after this many failed intervals in a row."""


@dataclass(frozen=True)
class CastStats:
    """Quantization statistics of one tensor of a layer (input, weight or gradient), summed over its casts."""

    saturated: float
    """Fraction of elements that exceeded the delayed scale. They are requantized with the tensor's own amax."""
    underflowed: float
    """Fraction of nonzero elements that became zero."""
    nonfinite: int
    """Number of NaN and infinite elements."""
    elements: int
    """Number of elements quantized."""

    @property
    def failed(self) -> str | None:
        """The reason why these statistics fail an interval, or None."""
        if self.underflowed > MAX_UNDERFLOWED:
            return f"{self.underflowed:.0%} of the elements underflowed to zero"
        if self.saturated > MAX_SATURATED:
            return f"{self.saturated:.2%} of the elements exceeded the delayed scale"
        return None


def cast_stats(counts: torch.Tensor) -> dict[str, CastStats]:
    """Return the statistics by tensor from a layer's counters, of shape ``COUNTS_SHAPE`` on the CPU."""
    found = {}
    for name, layouts in zip(TENSORS, counts.tolist(), strict=True):
        saturated, underflowed, nonfinite, elements = layouts[0]  # both layouts hold the same elements
        total = max(elements, 1)
        found[name] = CastStats(saturated / total, underflowed / total, nonfinite, elements)
    return found


def layers_of(model: nn.Module) -> dict[str, Float8Linear]:
    """Return the converted layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Float8Linear)}


class Monitor:
    """Evaluates the counters of a converted model every ``interval`` training steps.

    Non-finite elements raise a warning. A layer fails an interval if more than half of a tensor's elements
    underflowed or more than one in a thousand exceeded the delayed scale. After three failed intervals in a row it
    falls back to its dtype, with a warning.
    """

    def __init__(self, model: nn.Module, interval: int) -> None:
        self.interval = interval
        self.steps = 0
        """Training steps so far."""
        self._model = weakref.ref(model)
        self._layers = weakref.WeakSet(layers_of(model).values())
        self._updated: set[int] = set()
        self._pending: tuple[list[str], torch.Tensor, torch.Event | None] | None = None
        self._previous: dict[str, torch.Tensor] = {}
        self._failures: dict[str, int] = {}

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Count an optimizer's step if it updated a converted weight.

        A training step begins when a weight is updated again that the current step has updated already. So one
        optimizer per parameter, stepping inside the backward, counts as one step like a single optimizer does.
        """
        weights = {id(layer._parameters.get("weight")) for layer in self._layers}
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]} & weights
        if not updated:
            return
        if not self._updated or self._updated & updated:
            self._updated = updated
            self.step()
        else:
            self._updated |= updated

    def step(self) -> None:
        """Advance by one training step: evaluate the counters copied last, and copy them if the interval is over."""
        self.steps += 1
        self.evaluate()
        if self.steps % self.interval == 0:
            self._copy_counts()

    def evaluate(self) -> None:
        """Evaluate the counters that were copied last."""
        if self._pending is None:
            return
        names, counts, event = self._pending
        if event is not None:
            event.synchronize()
        self._pending = None
        model = self._model()
        layers = {} if model is None else layers_of(model)
        nonfinite: list[str] = []
        for name, now in zip(names, counts, strict=True):
            since = now - self._previous.get(name, torch.zeros_like(now))
            self._previous[name] = now
            called = bool((since >= 0).all()) and bool(since.any())  # negative: the counters were reset
            if name in layers and layers[name].fp8_fallback is None and called:
                stats = cast_stats(since)
                nonfinite += [
                    f"{found.nonfinite} elements of the {tensor} of layer {name!r}"
                    for tensor, found in stats.items()
                    if found.nonfinite
                ]
                self._evaluate_layer(name, layers[name], stats)
        if nonfinite:
            rest = len(nonfinite) - MOST_NAMED
            more = f"; and {rest} more tensors, see kp.fp8.report(model)" if rest > 0 else ""
            warnings.warn(
                f"fp8: not finite in the last {self.interval} steps: {'; '.join(nonfinite[:MOST_NAMED])}{more}",
                stacklevel=2,
            )

    def _copy_counts(self) -> None:
        model = self._model()
        layers = {} if model is None else layers_of(model)
        if not layers:
            return
        device = next(iter(layers.values())).fp8_counts.device
        counts = torch.stack([layer.fp8_counts.to(device, non_blocking=True) for layer in layers.values()])
        event = None
        if device.type != "cpu":
            host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            host.copy_(counts, non_blocking=True)
            event = torch.Event(device.type)
            event.record()
            counts = host
        self._pending = (list(layers), counts, event)

    def _evaluate_layer(self, name: str, layer: Float8Linear, stats: dict[str, CastStats]) -> None:
        failed = [f"{tensor}: {found.failed}" for tensor, found in stats.items() if found.failed]
        self._failures[name] = self._failures.get(name, 0) + 1 if failed else 0
        if self._failures[name] >= MAX_FAILURES:
            layer.fp8_fallback = (
                f"{'; '.join(failed)} in {MAX_FAILURES} intervals of {self.interval} steps in a row"
            )
            dtype = str(layer.weight.dtype).removeprefix("torch.")
            warnings.warn(f"fp8: layer {name!r} falls back to {dtype}: {layer.fp8_fallback}", stacklevel=2)


_monitors: weakref.WeakKeyDictionary[nn.Module, Monitor] = weakref.WeakKeyDictionary()
_hook: Any = None
"""The one optimizer hook, registered while a monitored model exists."""


def watch(model: nn.Module, interval: int) -> Monitor:
    """Monitor a model until it is reverted or deleted."""
    global _hook
    weakref.finalize(model, _release)  # before _monitors' own weak reference: callbacks run last to first
    monitor = _monitors[model] = Monitor(model, interval)
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_optimizer_step)
    return monitor


def monitor_of(model: nn.Module) -> Monitor | None:
    """Return the monitor of a converted model, or None if it has none."""
    return _monitors.get(model)


def unwatch(model: nn.Module) -> None:
    """Stop monitoring a model."""
    _monitors.pop(model, None)
    _release()


def _release() -> None:
    """Remove the hook if no monitored model is left."""
    global _hook
    if _hook is not None and not _monitors:
        _hook.remove()
        _hook = None


def _after_optimizer_step(optimizer: Optimizer, *_: Any) -> None:
    for monitor in list(_monitors.values()):
        monitor.optimizer_stepped(optimizer)
