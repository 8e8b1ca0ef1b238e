"""Convert the linear layers of a model to FP8 training in place, and revert them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kernel_pytorch.fp8.coverage import by_reason, left_alone, sharded_before
from kernel_pytorch.fp8.gathering import stop_gathering
from kernel_pytorch.fp8.layer import BUFFERS, Float8Linear
from kernel_pytorch.fp8.monitor import layers_of, unwatch, watch
from kernel_pytorch.fp8.norm import fuse_norms, unfuse_norms
from kernel_pytorch.fp8.recipe import RECIPES, Recipe, recipe_named
from kernel_pytorch.fp8.swiglu import fuse, unfuse

__all__ = ["check_module", "convert", "revert"]

AUTO = "delayed"
"""The recipe that ``auto`` measures products of: the one with the fewest passes over memory."""
_IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"


def convert(
    model: nn.Module,
    recipe: str | Recipe = "auto",
    *,
    layers: Callable[[str, nn.Linear], bool] | None = None,
    fuse_swiglu: bool = True,
    fuse_norm: bool = True,
    monitor: int | None = 50,
) -> nn.Module:
    """Turn the linear layers of a model to 8-bit training, in place.

    Parameters stay the objects they are, under their names: optimizers, state dicts, DDP, FSDP2 (``fully_shard``),
    activation checkpointing, gradient accumulation and ``torch.compile`` work as before. Only what is itself an
    ``nn.Linear`` is converted: no subclass of it, and no ``nn.MultiheadAttention``, which calls no layers. The
    report names those. A layer may have any size.

    Args:
        recipe: one of ``RECIPES`` by name, a ``Recipe``, or ``auto``: the ``delayed`` recipe for those of the three
            products of each layer that are measured to be faster with it, when the layer first sees an input of a
            size; the others, and every layer on a device without 8-bit matrix units, stay as they are.
        layers: called with the name and the layer, for each ``nn.Linear`` and nothing else; those it answers False
            for stay as they are. The last layer of a language model, whose logits are sensitive, is often left out:
            ``lambda name, _: name != "lm_head"``.
        fuse_swiglu: run ``down(silu(gate(x)) * up(x))`` as one function where a module is found to compute that, with
            the activation going straight into 8 bits, forward and backward.
        fuse_norm: with scales of tensors, let an RMSNorm write its result also in 8 bits for the layers behind it,
            which then do not read it: in eager mode from the second call on, and under torch.compile, with a
            delayed recipe, only in 8 bits where nobody else needs it.
        monitor: every how many steps of an optimizer the casts' losses are looked at; None for never.

    Returns:
        The model.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
        >>> model = kp.fp8.convert(model, recipe="tensorwise")
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> print(kp.fp8.report(model))  # doctest: +ELLIPSIS
        layer  K -> N     recipe      y    dx   dW ...
    """
    check_module(model)
    if layers is not None and not callable(layers):
        raise TypeError(f"layers={layers!r}: expected a function of a layer's name and the layer, or None")
    if monitor is not None and (not isinstance(monitor, int) or isinstance(monitor, bool) or monitor < 1):
        raise ValueError(f"monitor={monitor!r}: use a number of steps, or None")
    for name, flag in (("fuse_swiglu", fuse_swiglu), ("fuse_norm", fuse_norm)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}={flag!r}: use True or False")
    auto = recipe == "auto"
    if not isinstance(recipe, Recipe) and recipe not in (*RECIPES, "auto"):
        raise ValueError(f"recipe={recipe!r}: use a Recipe, auto, or one of {', '.join(RECIPES)}")
    chosen = recipe_named(AUTO if auto else recipe)
    for name, module in list(model.named_modules()):
        if isinstance(module, Float8Linear):
            raise ValueError(f"model: layer {name!r} is converted already; use kp.fp8.revert(model) first")
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and (layers is None or layers(name, module))
    ]
    for name, linear in found:
        if linear.weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(
                f"layer {name!r} has a weight of {linear.weight.dtype}: use float32, float16 or bfloat16, or leave "
                f"it out with layers="
            )
    for _, linear in found:
        Float8Linear.made_from(linear, chosen, auto, len(found) == 1)
    if fuse_swiglu:
        fuse(model)
    if fuse_norm:
        fuse_norms(model, chosen, auto)
    # Every rank keeps its own counts and histories.
    ignored = list(getattr(model, _IGNORED_BY_DDP, []))
    own = [f"{name}.{buffer}".lstrip(".") for name, _ in found for buffer in BUFFERS]
    setattr(model, _IGNORED_BY_DDP, ignored + [name for name in own if name not in ignored])
    if not found:
        warnings.warn(
            "; ".join(
                [
                    "model: nothing was converted, for no module that layers= takes is an nn.Linear",
                    *by_reason({**left_alone(model), **sharded_before(model)}, most=3),
                ]
            ),
            stacklevel=2,
        )
        return model
    if monitor is not None:
        watch(model, monitor)
    return model


def check_module(model: Any) -> None:
    """An error where that is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: expected a torch.nn.Module")


def revert(model: nn.Module) -> nn.Module:
    """Make a converted model what it was; its parameters stay where they are.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> model = kp.fp8.revert(kp.fp8.convert(torch.nn.Sequential(torch.nn.Linear(8, 8)), "rowwise"))
        >>> type(model[0]).__name__
        'Linear'
    """
    check_module(model)
    unwatch(model)
    unfuse(model)
    stop_gathering(model)
    unfuse_norms(model)
    ignored = [name for name in getattr(model, _IGNORED_BY_DDP, []) if not name.endswith(tuple(BUFFERS))]
    if ignored:
        setattr(model, _IGNORED_BY_DDP, ignored)
    elif hasattr(model, _IGNORED_BY_DDP):
        delattr(model, _IGNORED_BY_DDP)
    for layer in layers_of(model).values():
        layer.plain()
    return model
