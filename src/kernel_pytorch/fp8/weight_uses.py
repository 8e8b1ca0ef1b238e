"""Whether a weight is what it was when it was last cast, so that micro-batches share one cast.

Nothing tells of every change: what is written through ``.data`` passes the version counter by. So a weight counts as
unchanged only where its version and its place are the same, no optimizer has made a step, and its gradient shows that
a backward has run since the last forward, and nothing else: who updates weights by hand clears that before the next
forward. (One who does so beside an optimizer and clears later gets a cast that is out of date.) Where an optimizer
has the weight in its care, its first gradient shows that too.
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
    return 0 if weight.is_inference() else weight._version, weight.data_ptr(), _steps


class Uses:
    """Of the weight of one layer, by its forwards in training."""

    def __init__(self) -> None:
        self.accumulates = False
        """Whether gradients have been seen to be accumulated over several forwards."""
        self._number = 0
        self._last: tuple[Any, ...] | None = None

    def seen(self, weight: torch.Tensor) -> int:
        """A number for the weight as it is at this forward: the last one's if it is the same; 0 if that is unknown.

        Before the first step of an optimizer it is: who writes the step by hand tells nobody. So it is of what a
        CUDA graph captures, which nobody asks about when it runs again.
        """
        if _steps == 0 or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            return 0
        gradient = weight.grad
        version = None if gradient is None else gradient._version
        before, self._last = self._last, (written_state(weight), id(gradient), version)
        if before is None or before[0] != self._last[0]:
            self._number += 1
            return self._number
        added_to = before[1] == id(gradient) and before[2] is not None and version == before[2] + 1
        if not added_to and any(id(weight) in parameters for parameters in _cared_for.values()):
            added_to = before[2] is None and gradient is not None
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
    """The weight, and memory for its cast that compiled steps share: data, data_t, inverse, and inverse_t if another.

    Operators fill it where that is due, and the compiler need not know: to it this is a constant, which it hands to
    operators alone.
    """
    _parameters: dict[str, nn.Parameter | None]


_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_wanted: weakref.WeakKeyDictionary[Any, list[tuple[Any, ...]]] = weakref.WeakKeyDictionary()
"""Of which shapes, dtypes and devices the memory of layers is to be."""


def register(layer: Layer) -> None:
    """Let operators find the layer by its weight; what was wanted for the last one is forgotten."""
    _wanted.pop(layer, None)
    _layers[id(layer._parameters.get("weight"))] = layer


def layer_with(weight: torch.Tensor) -> Layer | None:
    """The layer that has this weight and is in training; None where that is unknown."""
    layer: Layer | None = _layers.get(id(weight))
    if layer is None or layer._parameters.get("weight") is not weight or weight.is_inference():
        return None
    return layer if layer.training and "fp8_uses" in layer.__dict__ else None  # it may have been reverted


def ask_for_memory(layer: Layer, *codes: torch.Tensor) -> None:
    """Let a layer have memory such as these, when no graph is running or being captured: after the next step."""
    _wanted[layer] = [(each.shape, each.dtype, each.device) for each in codes]


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    global _steps
    _steps += 1
    if torch.compiler.is_compiling():
        return
    groups = optimizer.param_groups
    if len(_cared_for.get(optimizer, ())) != sum(len(group["params"]) for group in groups):
        _cared_for[optimizer] = {id(parameter) for group in groups for parameter in group["params"]}
    while _wanted:
        layer, kinds = _wanted.popitem()
        if "fp8_uses" in layer.__dict__:
            memory = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in kinds]
            for each in memory:
                torch._dynamo.mark_static_address(each)  # CUDA graphs must not copy it
            layer.fp8_codes = (layer.weight, *memory)


register_optimizer_step_post_hook(_after_step)
