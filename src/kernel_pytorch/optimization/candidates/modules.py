"""Checks of a module before candidates rewrite it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.utils import parametrize

from kernel_pytorch.optimization.candidate import Context, Sites, missing
from kernel_pytorch.optimization.edits import own_forward

__all__ = ["has_hooks", "is_linear", "left_alone", "matrix_of", "sites_of", "unusable"]


def left_alone(module: nn.Module) -> str | None:
    """Return why a module must not be rewritten, or None."""
    if own_forward(module):
        return "its forward was replaced by something else"
    if parametrize.is_parametrized(module):
        return "its weight is parametrized"
    for name, parameter in module.named_parameters(recurse=False):
        if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
            return f"its {name} is a {type(parameter.data).__name__}"
    return None


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is exactly an ``nn.Linear``, or the ``Conv1D`` of Hugging Face's GPT-2."""
    library = sys.modules.get("transformers.pytorch_utils")
    return type(module) is nn.Linear or (library is not None and type(module) is library.Conv1D)


def matrix_of(module: nn.Module) -> torch.Tensor:
    """Return the weight of a linear layer as (outputs, inputs); a ``Conv1D`` stores it transposed."""
    weight = module.get_parameter("weight").detach()
    return weight if isinstance(module, nn.Linear) else weight.t()


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks, which would be skipped if it were not called."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def unusable(library: str, distribution: str, context: Context) -> str | None:
    """Return why a library of GPU kernels cannot be used for this model, or None."""
    absent = missing(library, distribution)
    if absent is None and context.device.type == "cpu":
        return f"{library} has kernels for GPUs only, and the model is on a CPU"
    return absent


def sites_of(model: nn.Module, wanted: Callable[[nn.Module], str | bool], nothing: str) -> Sites | str:
    """Return the modules for which ``wanted`` is True, or the reason why there are none.

    ``wanted`` returns False for an irrelevant module, and a reason for one that must not be changed.
    """
    names, reasons = [], {}
    for name, module in _modules(model):
        answer = wanted(module)
        if answer is True:
            answer = left_alone(module) or True
        if answer is True:
            names.append(name)
        elif answer:
            reasons[name] = str(answer)
    if names:
        return Sites(tuple(names), reasons)
    if reasons:
        name, reason = next(iter(reasons.items()))
        return f"{nothing}; {name or 'the model'} is left alone: {reason}"
    return nothing


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield from model.named_modules()
