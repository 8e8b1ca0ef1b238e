"""Whether a weight is what it was when it was last cast, so that micro-batches share one cast.

Nothing tells of every change: what is written through ``.data`` passes the version counter by. So a weight counts as
unchanged only where its version and its place are the same, no optimizer has made a step, and its gradient shows that
a backward has run since the last forward, and nothing else: who updates weights by hand clears that before the next
forward. (One who does so beside an optimizer and clears later gets a cast that is out of date.) Where an optimizer
has the weight in its care, anything may happen to its gradient.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = [
    "Layer",
    "Uses",
    "ask_for_memory",
    "layer_with",
    "optimizer_steps",
    "register",
    "repeats_forward",
    "written_state",
]

_steps = 0
"""How many steps optimizers have made in this process: weights may differ after each."""
_cared_for: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
"""The ids of the parameters of optimizers that have made a step: torch swaps no tensor that is weakly referred to."""


def optimizer_steps() -> int:
    """How many steps optimizers have made in this process."""
    return _steps


def repeats_forward() -> bool:
    """Whether a backward is running, and repeats a forward for activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def written_state(weight: torch.Tensor) -> tuple[int, ...]:
    """What differs once a weight was written to, unless through ``.data``."""
    return weight._version, weight.data_ptr(), _steps


class Uses:
    """Of the weight of one layer, by its forwards in training."""

    def __init__(self) -> None:
        self.accumulates = False
        """Whether gradients have been seen to be accumulated over several forwards."""
        self.wanted: list[tuple[Any, ...]] | None = None
        """Of which shapes, dtypes and devices ``fp8_codes`` are to be."""
        self._number = 0
        self._last: tuple[Any, ...] | None = None

    def seen(self, weight: torch.Tensor) -> int:
        """A number for the weight as it is at this forward: the last one's if it is the same; 0 if that is unknown.

        Before the first step of an optimizer it is: who writes the step by hand tells nobody.
        """
        if _steps == 0:
            return 0
        gradient = weight.grad
        version = None if gradient is None else gradient._version
        before, self._last = self._last, (written_state(weight), id(gradient), version)
        if before is None or before[0] != self._last[0]:
            self._number += 1
            return self._number
        added_to = before[1] == id(gradient) and before[2] is not None and version == before[2] + 1
        if not added_to and any(id(weight) in parameters for parameters in _cared_for.values()):
            added_to = gradient is not None and before != self._last
            if not added_to and repeats_forward():
                return self._number
        self.accumulates = self.accumulates or added_to
        self._number += not added_to
        return self._number


class Layer(Protocol):
    """What is asked of a layer here and by compiled steps."""

    training: bool
    fp8_uses: Uses
    fp8_codes: tuple[torch.Tensor, ...] | None
    """Memory for the cast of the weight that compiled steps share: data, data_t, inverse, and inverse_t if another.

    Operators fill it where that is due, and the compiler need not know: to it this is a constant, which it hands to
    operators alone.
    """
    _parameters: dict[str, nn.Parameter | None]


_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_waiting: weakref.WeakSet[Any] = weakref.WeakSet()


def register(layer: Layer) -> None:
    """Let operators find the layer by its weight."""
    _layers[id(layer._parameters.get("weight"))] = layer


def layer_with(weight: torch.Tensor) -> Layer | None:
    """The layer that has this weight and is in training; None where that is unknown."""
    layer: Layer | None = _layers.get(id(weight))
    return layer if layer is not None and layer._parameters.get("weight") is weight and layer.training else None


def ask_for_memory(layer: Layer, *codes: torch.Tensor) -> None:
    """Let a layer have memory such as these, when no graph is running or being captured: after the next step."""
    layer.fp8_uses.wanted = [(each.shape, each.dtype, each.device) for each in codes]
    _waiting.add(layer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    global _steps
    _steps += 1
    if torch.compiler.is_compiling():
        return
    groups = optimizer.param_groups
    if len(_cared_for.get(optimizer, ())) != sum(len(group["params"]) for group in groups):
        _cared_for[optimizer] = {id(parameter) for group in groups for parameter in group["params"]}
    while _waiting:
        layer = _waiting.pop()
        uses = getattr(layer, "fp8_uses", None)
        if uses is not None and uses.wanted is not None:
            memory = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in uses.wanted]
            for each in memory:
                torch._dynamo.mark_static_address(each)  # CUDA graphs must not copy it
            layer.fp8_codes, uses.wanted = tuple(memory), None


register_optimizer_step_post_hook(_after_step)
