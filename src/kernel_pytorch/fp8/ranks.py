"""Making what the converted layers of a model remember the same on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from kernel_pytorch.fp8.checkpoint import layer_state, restore_layer_state
from kernel_pytorch.fp8.conversion import check_module
from kernel_pytorch.fp8.monitor import layers_of

__all__ = ["synchronize"]


@torch.no_grad()
def synchronize(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Make what the layers of a converted model remember the same on every rank, before a checkpoint is saved.

    Ranks see different data, so each has histories of its own, and a checkpoint keeps those of one of them. After
    this all have the largest numbers of any, and a layer that fell back on one has on all: a run that is resumed goes
    on bit for bit as the one that saved. Nothing else needs it, for what outgrows a history is cast again.

    All ranks of the group must call it. It sends one small all-reduce; without a process group it does nothing.

    Args:
        group: of the ranks that hold the same layers, as ``mesh["dp"].get_group()``; None for all ranks.

    Returns:
        The model.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> model = kp.fp8.convert(torch.nn.Sequential(torch.nn.Linear(8, 8)), "delayed")
        >>> state = kp.fp8.synchronize(model).state_dict()
    """
    check_module(model)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group={group!r}: expected a process group, as mesh['dp'].get_group(), or None for all ranks"
        )
    layers = layers_of(model)
    together = dist.is_available() and dist.is_initialized()
    # Whatever is wrong on one rank is an error on all of them: none may wait for an answer.
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
