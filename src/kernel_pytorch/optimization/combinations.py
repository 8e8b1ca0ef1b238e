"""Switch a model between combinations of candidates, each of which is applied once and then undone and redone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from kernel_pytorch.optimization.candidate import Candidate
from kernel_pytorch.optimization.edits import Edits

__all__ = ["COMPILE", "EAGER", "State", "SwitchedModel", "build", "device_of"]

State = tuple[str, ...]
"""Names of candidates in the order of application."""
EAGER: State = ()
COMPILE: State = ("compile",)


def build(model: nn.Module, steps: Sequence[tuple[Candidate, tuple[str, ...]]]) -> Edits:
    """Apply candidates at their sites, lowest stage first; if one fails, undo all of them."""
    edits = Edits()
    try:
        for candidate, sites in sorted(steps, key=lambda step: step[0].stage):
            candidate.apply(model, sites, edits)
    except BaseException:
        edits.undo()
        raise
    return edits


class SwitchedModel:
    """A model that switches between combinations, each of which keeps its data, such as quantized weights."""

    def __init__(self, model: nn.Module, steps: Mapping[str, tuple[Candidate, tuple[str, ...]]]) -> None:
        self._model, self._steps = model, steps
        self._edits: dict[State, Edits] = {EAGER: Edits()}
        self._now: State = EAGER

    def switch(self, state: State) -> None:
        """Switch the model to this combination."""
        if state == self._now and self._edits[state].active:
            return
        self._edits[self._now].undo()
        self._now = EAGER
        if state not in self._edits:
            self._edits[state] = build(self._model, [self._steps[name] for name in state])
        else:
            self._edits[state].redo()
        self._now = state

    def forget(self, state: State) -> None:
        """Free the data of a combination, such as quantized weights and compiled graphs."""
        self.switch(EAGER)
        if state != EAGER:
            self._edits.pop(state, None)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; raise an error if there are several."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"model: its tensors are on {names}; move it to one device first")
    return next(iter(devices), torch.device("cpu"))
