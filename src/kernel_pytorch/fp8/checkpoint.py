"""Save and restore the FP8 state of a model: amax histories, and which layers have fallen back.

``model.state_dict()`` of a converted model has the keys of the unconverted one, so checkpoints load strictly in both
directions. The FP8 state is a second, small state dict, to be saved beside the optimizer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from kernel_pytorch.fp8.autograd import STATE_SHAPE

if TYPE_CHECKING:
    from kernel_pytorch.fp8.module import Float8Linear

__all__ = [
    "layer_state",
    "load_state_dict",
    "reset_layer_state",
    "restore_layer_state",
    "state_dict",
    "synchronize",
]

_SHAPE = (STATE_SHAPE[0] + 1, STATE_SHAPE[1])
"""Amax history of the input, amax history of the gradient, and a row of ones if the layer has fallen back."""


def state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the FP8 state of a converted model: one small float32 tensor by layer name.

    Only layers with a state are in it: those with a ``delayed`` recipe, those that ``auto`` has put in FP8, and those
    that have fallen back. On several ranks, call ``kp.fp8.synchronize`` first.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> model = kp.fp8.convert(torch.nn.Sequential(torch.nn.Linear(8, 8)), "delayed")
        >>> checkpoint = {"model": model.state_dict(), "fp8": kp.fp8.state_dict(model)}
        >>> list(checkpoint["model"]), list(checkpoint["fp8"])
        (['0.weight', '0.bias'], ['0'])
    """
    return {name: layer_state(layer) for name, layer in _layers(model).items() if _has_state(layer)}


def load_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> nn.Module:
    """Restore the FP8 state of a converted model, after ``model.load_state_dict``; training resumes bit for bit.

    ``model.load_state_dict`` resets the FP8 state, since the histories of other weights do not apply. A layer that
    ``state`` lacks is reset too.

    Args:
        model: converted with the recipe that ``state`` was saved with.
        state: from ``kp.fp8.state_dict``.

    Returns:
        The model.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> model = kp.fp8.convert(torch.nn.Sequential(torch.nn.Linear(8, 8)), "delayed")
        >>> model = kp.fp8.load_state_dict(model, kp.fp8.state_dict(model))
    """
    layers = _layers(model)
    if not isinstance(state, Mapping):
        raise TypeError(f"state={state!r}: expected what kp.fp8.state_dict returned")
    if state and not layers:
        raise ValueError("model: it has no converted layer; use kp.fp8.convert(model) first")
    unknown = [name for name in state if name not in layers]
    if unknown:
        raise ValueError(
            f"state: {', '.join(map(repr, unknown[:3]))} is not the name of a converted layer; use the model and the "
            f"layers= that it was saved with"
        )
    for name, found in state.items():
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != _SHAPE:
            given = f"shape {list(found.shape)}" if isinstance(found, torch.Tensor) else f"the value {found!r}"
            raise ValueError(
                f"state: {name!r} has {given}: expected a tensor of shape {list(_SHAPE)}, as "
                f"kp.fp8.state_dict returns"
            )
        if not bool((found >= 0).all()):
            raise ValueError(
                f"state: {name!r} has negative or NaN elements, which no amax history has: the checkpoint is damaged"
            )
    for name, layer in layers.items():
        reset_layer_state(layer)
        if name in state:
            restore_layer_state(layer, state[name], "before the checkpoint was saved")
    return model


@torch.no_grad()
def synchronize(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Make the FP8 state of a converted model the same on every rank, before a checkpoint is saved.

    Ranks see different data, so each has its own amax histories, and a checkpoint holds those of one rank. This takes
    the maximum over ranks, and a layer that fell back on one rank falls back on all. A resumed run then continues bit
    for bit as the run that saved. Training itself does not need it.

    All ranks of the group must call it. It takes one small all-reduce; without a process group it does nothing.

    Args:
        group: the ranks that hold the same layers, as ``mesh["dp"].get_group()``; None for all ranks.

    Returns:
        The model.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> model = kp.fp8.convert(torch.nn.Sequential(torch.nn.Linear(8, 8)), "delayed")
        >>> state = kp.fp8.synchronize(model).state_dict()
    """
    layers = _layers(model)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group={group!r}: expected a process group, as mesh['dp'].get_group(), or None for all ranks"
        )
    together = dist.is_available() and dist.is_initialized()
    # All ranks raise the same error: none may be left waiting in a collective.
    mine = [(name, layer.fp8_text, layer.fp8_history.device.type) for name, layer in layers.items()]
    found = [mine] * (dist.get_world_size(group) if together else 1)
    if together:
        dist.all_gather_object(found, mine, group=group)
    for rank, theirs in enumerate(found):
        if theirs != found[0]:
            raise ValueError(
                f"group: its ranks 0 and {rank} have different converted layers ({len(found[0])} and {len(theirs)}), "
                f"recipes or devices; use the group of the ranks that hold the same"
            )
    if not mine:
        raise ValueError("model: it has no converted layer; use kp.fp8.convert(model) first")
    if any(device == "meta" for *_, device in mine):
        raise ValueError("model: it has no memory yet; use model.to_empty() and load or initialize it first")
    if not together:
        return model
    device = next(iter(layers.values())).fp8_history.device
    states = torch.stack([layer_state(layer).to(device) for layer in layers.values()])
    dist.all_reduce(states, dist.ReduceOp.MAX, group)
    for layer, state in zip(layers.values(), states, strict=True):
        restore_layer_state(layer, state, "on another rank")
    return model


def layer_state(layer: Float8Linear) -> torch.Tensor:
    """Return a copy of the layer's FP8 state, float32 of shape ``_SHAPE``."""
    state = layer.fp8_state
    return torch.cat([state, state.new_full((1, state.shape[1]), float(layer.fp8_fallback is not None))])


@torch.no_grad()
def restore_layer_state(layer: Float8Linear, state: torch.Tensor, reason: str) -> None:
    """Set the layer's FP8 state. ``reason`` is reported if the layer has fallen back in ``state`` but not here."""
    layer.fp8_history.copy_(state[0])
    layer.fp8_gradient_history.copy_(state[1])
    if layer.fp8_fallback is None and bool(state[-1, 0]):
        layer.fp8_fallback = reason


@torch.no_grad()
def reset_layer_state(layer: Float8Linear) -> None:
    """Clear the amax histories and the fallback."""
    layer.fp8_history.zero_()
    layer.fp8_gradient_history.zero_()
    layer.fp8_fallback = None


def _layers(model: nn.Module) -> dict[str, Float8Linear]:
    from kernel_pytorch.fp8.monitor import layers_of

    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: expected a torch.nn.Module")
    return layers_of(model)


def _has_state(layer: Float8Linear) -> bool:
    if layer.fp8_fallback is not None:
        return True
    if not layer.fp8_recipe.delayed:
        return False
    # ``auto`` leaves layers in bf16 that gain nothing: their histories stay empty.
    return not layer.fp8_auto or (not layer.fp8_history.is_meta and bool(layer.fp8_state.any()))
