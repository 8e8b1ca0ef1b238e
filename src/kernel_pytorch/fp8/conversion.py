"""Convert the linear layers of a model to FP8 training in place, and revert them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kernel_pytorch.fp8.coverage import NOT_SELECTED, by_reason, sharded_already, subclass_weight, uncovered
from kernel_pytorch.fp8.fsdp import unwrap, wrap
from kernel_pytorch.fp8.fusion.rms_norm import fuse_norms, unfuse_norms
from kernel_pytorch.fp8.fusion.swiglu import fuse, unfuse
from kernel_pytorch.fp8.module import BUFFERS, Float8Linear
from kernel_pytorch.fp8.monitor import layers_of, unwatch, watch
from kernel_pytorch.fp8.recipe import RECIPES, Recipe, recipe_named

__all__ = ["check_module", "convert", "revert"]

AUTO = "delayed"
"""The recipe whose GEMMs ``auto`` measures: the one with the fewest passes over memory."""
_IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"


def convert(
    model: nn.Module,
    recipe: str | Recipe = "auto",
    *,
    layers: Callable[[str, nn.Linear], bool] | None = None,
    fuse_swiglu: bool = True,
    fuse_norm: bool = True,
    monitor: int | None = 50,
    fsdp_all_gather: bool = False,
) -> nn.Module:
    """Convert the linear layers of a model to FP8 training, in place.

    Parameters stay the same objects under the same names, so optimizers, state dicts, DDP, FSDP2 (``fully_shard``),
    activation checkpointing, gradient accumulation and ``torch.compile`` work as before. Only modules whose type is
    exactly ``nn.Linear`` and whose weight is a plain tensor are converted, whatever their size. ``kp.fp8.report``
    lists all other modules that multiply by a weight, with the reason; a warning does where they hold more than half
    of the model's matmul parameters.

    Args:
        recipe: a name from ``RECIPES``, a ``Recipe``, or ``auto``. ``auto`` measures each layer with the ``delayed``
            recipe when it first sees an input of a size, and computes those of its three GEMMs in FP8 that are
            faster. On a device without FP8 matrix units nothing changes.
        layers: called with the name and the module of each ``nn.Linear``; return False to leave it as it is. The
            logits of a language model are sensitive, so its last layer is often left out:
            ``lambda name, _: name != "lm_head"``.
        fuse_swiglu: compute ``down(silu(gate(x)) * up(x))`` as one function in modules that are found to do so. The
            activation is then quantized as it is computed, in the forward and the backward.
        fuse_norm: let an RMSNorm write its output also in FP8 for the layers that follow. Needs a recipe with
            tensorwise scaling.
        monitor: evaluate the quantization statistics every so many training steps; None for never.
        fsdp_all_gather: let FSDP2 all-gather the weights in FP8, half the bytes of bfloat16. Needs a recipe with
            tensorwise weight scaling, and ``fully_shard`` afterwards; the weights become new Parameters.

    Returns:
        The model.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
        >>> model = kp.fp8.convert(model, recipe="tensorwise")
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> print(kp.fp8.report(model).summary)
        2 of 2 linear layers in FP8, 100 % of matmul parameters, 0 fell back
    """
    check_module(model)
    if layers is not None and not callable(layers):
        raise TypeError(f"layers={layers!r}: expected a function of a layer's name and the layer, or None")
    if monitor is not None and (not isinstance(monitor, int) or isinstance(monitor, bool) or monitor < 1):
        raise ValueError(f"monitor={monitor!r}: use a number of steps, or None")
    for name, flag in (
        ("fuse_swiglu", fuse_swiglu),
        ("fuse_norm", fuse_norm),
        ("fsdp_all_gather", fsdp_all_gather),
    ):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}={flag!r}: use True or False")
    auto = recipe == "auto"
    if not isinstance(recipe, Recipe) and recipe not in (*RECIPES, "auto"):
        raise ValueError(f"recipe={recipe!r}: use a Recipe, auto, or one of {', '.join(RECIPES)}")
    chosen = recipe_named(AUTO if auto else recipe)
    selected = _selected(model, layers)
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    for linear in selected.values():
        layer = Float8Linear.made_from(linear, chosen, auto, len(selected) == 1)
        if fsdp_all_gather:
            wrap(layer, shared=uses[id(layer.weight)] > 1)
    if fuse_swiglu:
        fuse(model)
    if fuse_norm:
        fuse_norms(model, chosen, auto)
    # Every rank keeps its own counters and histories.
    ignored = list(getattr(model, _IGNORED_BY_DDP, []))
    own = [f"{name}.{buffer}".lstrip(".") for name in selected for buffer in BUFFERS]
    setattr(model, _IGNORED_BY_DDP, ignored + [name for name in own if name not in ignored])
    _warn_about_coverage(model, selected)
    if selected and monitor is not None:
        watch(model, monitor)
    return model


def check_module(model: Any) -> None:
    """Raise a TypeError unless ``model`` is an ``nn.Module``."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: expected a torch.nn.Module")


def revert(model: nn.Module) -> nn.Module:
    """Undo ``convert``; the parameters stay the same objects.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> model = kp.fp8.revert(kp.fp8.convert(torch.nn.Sequential(torch.nn.Linear(8, 8)), "rowwise"))
        >>> type(model[0]).__name__
        'Linear'
    """
    check_module(model)
    converted = layers_of(model).values()
    for layer in converted:
        unwrap(layer)
    unwatch(model)
    unfuse(model)
    unfuse_norms(model)
    ignored = [name for name in getattr(model, _IGNORED_BY_DDP, []) if not name.endswith(tuple(BUFFERS))]
    if ignored:
        setattr(model, _IGNORED_BY_DDP, ignored)
    elif hasattr(model, _IGNORED_BY_DDP):
        delattr(model, _IGNORED_BY_DDP)
    for layer in converted:
        layer.plain()
    return model


def _selected(model: nn.Module, layers: Callable[[str, nn.Linear], bool] | None) -> dict[str, nn.Linear]:
    """Return the layers to convert by name, all of them checked."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear):
            raise ValueError(f"model: layer {name!r} is converted already; use kp.fp8.revert(model) first")
        if (
            type(module) is nn.Linear
            and subclass_weight(module) is None
            and (layers is None or layers(name, module))
        ):
            found[name] = module
    for name, linear in found.items():
        if linear.weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(
                f"layer {name!r} has a weight of {linear.weight.dtype}: use float32, float16 or bfloat16, or leave "
                f"it out with layers="
            )
    return found


def _warn_about_coverage(model: nn.Module, selected: dict[str, nn.Linear]) -> None:
    """Warn where nothing, or less than half of what layers= did not leave out, is converted."""
    others = {name: each for name, each in uncovered(model).items() if each.reason != NOT_SELECTED}
    covered = sum(linear.weight.numel() for linear in selected.values())
    total = covered + sum(each.parameters for each in others.values())
    if selected and 2 * covered >= total:
        return
    if selected:
        head = f"model: only {covered / total:.0%} of its matmul parameters are in layers that can be converted"
    else:
        head = "model: nothing was converted, for no module that layers= takes is an nn.Linear"
    reasons = {name: each.reason for name, each in others.items()}
    if not selected:
        reasons |= sharded_already(model)
    warnings.warn("; ".join([head, *by_reason(reasons, most=3)]), stacklevel=3)
