"""Reduce activation memory: recomputation in the backward pass, or offloading to host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernel_pytorch.optimization.candidate import Candidate, Context, Sites, Stage
from kernel_pytorch.optimization.candidates.modules import left_alone
from kernel_pytorch.optimization.edits import Edits, Forward

__all__ = ["ACTIVATION_CHECKPOINTING", "ACTIVATION_OFFLOADING"]

_CACHES = ("past_key_value", "past_key_values", "use_cache")


def _forward(call: Forward, *args: Any, **kwargs: Any) -> Any:
    if not (call.module.training and torch.is_grad_enabled()):
        return call.original(*args, **kwargs)
    # The recomputation would add its keys to a KV cache a second time. Hugging Face also removes the cache.
    kwargs = {name: None if name in _CACHES else value for name, value in kwargs.items()}
    return checkpoint(call.original, *args, use_reentrant=False, **kwargs)


def _match(model: nn.Module, context: Context) -> Sites | str:
    names: list[str] = []
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        blocks = list(module.named_children()) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
        alike = len(blocks) > 1 and len({type(block) for _, block in blocks}) == 1
        for child, block in blocks if alike and next(blocks[0][1].children(), None) is not None else ():
            path = f"{name}.{child}".lstrip(".")
            reason = left_alone(block)
            if reason:
                reasons[path] = reason
            elif not any(path.startswith(f"{outer}.") for outer in names):
                names.append(path)
    return Sites(tuple(names), reasons) if names else "the model has no list of equal blocks"


def _apply(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    for name in sites:
        edits.replace_forward(model.get_submodule(name), _forward)


ACTIVATION_CHECKPOINTING = Candidate(
    "activation-checkpointing",
    "activations of repeated blocks computed again in the backward pass",
    "exact",
    Stage.MEMORY,
    _match,
    _apply,
    goals=frozenset({"memory"}),
    drops=frozenset({"past_key_values"}),
)


# Offloading: tensors saved by autograd are kept in host memory.

_LEAST_BYTES = 1 << 20  # for smaller tensors, the copy costs more than the memory gains


def _offloaded(call: Forward, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return call.original(*args, **kwargs)
    module = call.module
    # Weights are on the device in any case, as they are or as the views that GEMMs save.
    kept = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}

    def pack(tensor: torch.Tensor) -> Any:
        small = tensor.nbytes < _LEAST_BYTES or type(tensor) not in (torch.Tensor, nn.Parameter)
        if small or tensor.device.type == "cpu" or tensor.untyped_storage().data_ptr() in kept:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        device, host = packed
        found: torch.Tensor = host.to(device, non_blocking=True)
        return found

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return call.original(*args, **kwargs)


def _match_offloading(model: nn.Module, context: Context) -> Sites | str:
    if context.device.type != "cuda":
        return f"moves activations from a GPU to host memory, and the model is on {context.device.type}"
    return left_alone(model) or Sites(("",))


def _apply_offloading(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    edits.replace_forward(model, _offloaded)


ACTIVATION_OFFLOADING = Candidate(
    "activation-offloading",
    "what the backward pass needs kept in pinned host memory",
    "exact",
    Stage.MEMORY,
    _match_offloading,
    _apply_offloading,
    goals=frozenset({"memory"}),
)
