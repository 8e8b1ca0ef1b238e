"""Fold batch norms into the convolutions before them, for inference.

Both modules stay in place. The convolution computes with weights that include the normalization, and the batch norm
returns its input. The folded weights are recomputed when a weight or a running statistic changes.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from kernel_pytorch.optimization.candidate import Candidate, Context, Sites, Stage
from kernel_pytorch.optimization.candidates.modules import has_hooks, left_alone
from kernel_pytorch.optimization.candidates.weights import WeightCache, warn_of_gradients
from kernel_pytorch.optimization.edits import Edits, Forward

__all__ = ["BATCH_NORM_FOLDING"]

_PAIRS = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}


def _fold(convolution: Any, norm: Any) -> tuple[torch.Tensor, ...]:
    """Return the weight and bias of a convolution with its batch norm folded in."""
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    shift = -norm.running_mean.double()
    if convolution.bias is not None:
        shift = shift + convolution.bias.double()
    shift = shift * scale
    if norm.bias is not None:
        shift = shift + norm.bias.double()
    weight = convolution.weight
    folded = weight.double() * scale.reshape(-1, *[1] * (weight.ndim - 1))
    layout = torch.channels_last if _channels_last(weight) else torch.contiguous_format
    return folded.to(weight.dtype).contiguous(memory_format=layout), shift.to(weight.dtype)


def _channels_last(weight: torch.Tensor) -> bool:
    if weight.ndim != 4 or weight.is_contiguous():
        return False
    return weight.is_contiguous(memory_format=torch.channels_last)


def _folded(norm: nn.Module) -> bool:
    """Return whether a pair runs folded in this call; both modules must get the same result."""
    return not norm.training and not torch.is_grad_enabled()


def _convolution(call: Forward, x: torch.Tensor) -> Any:
    if not _folded(call.settings.modules[1]):
        warn_of_gradients()
        return call.original(x)
    weight, bias = call.settings.tensors()
    module: Any = call.module
    return module._conv_forward(x, weight, bias)


def _norm(call: Forward, x: torch.Tensor) -> Any:
    return x if _folded(call.module) else call.original(x)


def _pairs(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Return the names of each convolution and the batch norm of equal channels registered directly after it."""
    users: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        users[id(module)] = users.get(id(module), 0) + 1
    found: list[str] = []
    reasons: dict[str, str] = {}
    for path, parent in model.named_modules():
        children = list(parent.named_children())
        for (one, convolution), (two, norm) in itertools.pairwise(children):
            kind = _PAIRS.get(type(convolution))
            if kind is None or type(norm) is not kind or norm.num_features != convolution.out_channels:
                continue
            names = [f"{path}.{child}".lstrip(".") for child in (one, two)]
            reason = left_alone(convolution) or left_alone(norm)
            if reason is None and (has_hooks(convolution) or has_hooks(norm)):
                reason = "it or its batch norm has hooks, which would see other values"
            if reason is None and norm.running_var is None:
                reason = "its batch norm keeps no running statistics"
            if reason is None and max(users[id(convolution)], users[id(norm)]) > 1:
                reason = "it or its batch norm is shared"
            if reason:
                reasons[names[0]] = reason
            else:
                found += names
    return found, reasons


def _match(model: nn.Module, context: Context) -> Sites | str:
    found, reasons = _pairs(model)
    if not found:
        return next(iter(reasons.values()), "the model has no batch norm right behind a convolution")
    return Sites(tuple(found), reasons)


def _apply(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    found, _ = _pairs(model)
    norm_of = dict(zip(found[::2], found[1::2], strict=True))
    for one, two in itertools.zip_longest(sites[::2], sites[1::2]):
        if norm_of.get(one) != two:
            raise ValueError(f"modules {one!r} and {two!r} are no convolution with its batch norm")
        convolution, norm = model.get_submodule(one), model.get_submodule(two)
        folded = WeightCache(_fold, convolution, norm)
        edits.replace_forward(convolution, _convolution, folded)
        edits.replace_forward(norm, _norm, folded)


BATCH_NORM_FOLDING = Candidate(
    "batch-norm-folding",
    "batch norms folded into the convolutions before them",
    "exact",
    Stage.MODULE,
    _match,
    _apply,
    goals=frozenset({"latency", "throughput"}),
)
