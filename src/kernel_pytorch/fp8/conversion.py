"""Convert the linear layers of a model to FP8 training in place, and revert them."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from kernel_pytorch.fp8.fsdp import unwrap, wrap
from kernel_pytorch.fp8.fusion import fuse_norms, fuse_swiglus, unfuse_norms, unfuse_swiglus
from kernel_pytorch.fp8.module import BUFFERS, Float8Linear, conv1d_class, unsupported_weight
from kernel_pytorch.fp8.monitor import layers_of, unwatch, watch
from kernel_pytorch.fp8.recipe import RECIPES, Recipe, recipe_named

__all__ = [
    "NOT_SELECTED",
    "Uncovered",
    "by_reason",
    "check_module",
    "convert",
    "group_names",
    "percent",
    "revert",
    "uncovered",
]

AUTO = "delayed"
"""The recipe whose GEMMs ``auto`` measures. It makes the fewest passes over memory."""
_IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
NOT_SELECTED = "not selected by layers=, or added later"


def convert(
    model: nn.Module,
    recipe: str | Recipe = "auto",
    *,
    layers: Callable[[str, nn.Module], bool] | None = None,
    fuse_swiglu: bool = True,
    fuse_norm: bool = True,
    monitor: int | None = 50,
    fsdp_all_gather: bool = False,
) -> nn.Module:
    """Convert the linear layers of a model to FP8 training, in place.

    Parameters stay the same objects under the same names, so optimizers, state dicts, DDP, FSDP2 (``fully_shard``),
    activation checkpointing, gradient accumulation and ``torch.compile`` work as before. Only modules whose type is
    exactly ``nn.Linear``, or the ``Conv1D`` of Hugging Face's GPT-2, are converted, and only if their weight is a
    plain tensor, whatever its size. ``kp.fp8.report`` lists all other modules that multiply by a weight, with the
    reason; a warning does where they hold more than half of the model's matmul parameters.

    Args:
        recipe: a name from ``RECIPES``, a ``Recipe``, or ``auto``. ``auto`` times each layer with the ``delayed``
            recipe at the first input of each size, and runs those of its three GEMMs in FP8 that are faster. On a
            device without FP8 matrix units nothing changes.
        layers: called with the name of each module that can be converted and the module; return False to skip it.
            The logits of a language model are sensitive, so its last layer is often skipped:
            ``lambda name, _: name != "lm_head"``.
        fuse_swiglu: run modules that compute ``down(silu(gate(x)) * up(x))`` as one function, which quantizes the
            activation as it is computed, in the forward and the backward.
        fuse_norm: let an RMSNorm also write its output in FP8 for the layers that follow. Needs a recipe with
            tensorwise scaling.
        monitor: the number of training steps between evaluations of the quantization statistics; None for none.
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
        layer = Float8Linear.from_linear(linear, chosen, auto, len(selected) == 1)
        if fsdp_all_gather:
            wrap(layer, shared=uses[id(layer.weight)] > 1)
    if fuse_swiglu:
        fuse_swiglus(model)
    if fuse_norm:
        fuse_norms(model, chosen, auto)
    # DDP must not broadcast counters and histories: every rank has its own.
    ignored = list(getattr(model, _IGNORED_BY_DDP, []))
    own = [f"{name}.{buffer}".lstrip(".") for name in selected for buffer in BUFFERS]
    setattr(model, _IGNORED_BY_DDP, ignored + [name for name in own if name not in ignored])
    _warn_about_coverage(model, selected, filtered=layers is not None)
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
    unfuse_swiglus(model)
    unfuse_norms(model)
    ignored = [name for name in getattr(model, _IGNORED_BY_DDP, []) if not name.endswith(tuple(BUFFERS))]
    if ignored:
        setattr(model, _IGNORED_BY_DDP, ignored)
    elif hasattr(model, _IGNORED_BY_DDP):
        delattr(model, _IGNORED_BY_DDP)
    for layer in converted:
        layer.revert()
    return model


def _selected(model: nn.Module, layers: Callable[[str, nn.Module], bool] | None) -> dict[str, Any]:
    """Return the layers to convert by name, all of them checked."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear):
            raise ValueError(f"model: layer {name!r} is converted already; use kp.fp8.revert(model) first")
        if (
            _is_linear(module)
            and unsupported_weight(module.weight) is None
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


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer of a type that is converted."""
    return type(module) is nn.Linear or (type(module) is conv1d_class())


def _warn_about_coverage(model: nn.Module, selected: dict[str, Any], filtered: bool) -> None:
    """Warn if less than half of the matmul parameters that layers= did not skip are converted."""
    others = {name: each for name, each in uncovered(model).items() if each.reason != NOT_SELECTED}
    covered = sum(linear.weight.numel() for linear in selected.values())
    total = covered + sum(each.parameters for each in others.values())
    if selected and 2 * covered >= total:
        return
    if selected:
        share = percent(covered, total)
        head = f"model: only {share} of its matmul parameters are in layers that can be converted"
    else:
        head = "model: nothing was converted: it has no nn.Linear that can be converted"
        head += " and that layers= selects" if filtered else ""
    reasons = {name: each.reason for name, each in others.items()}
    if not selected:
        reasons |= _sharded_already(model)
    warnings.warn("; ".join([head, *by_reason(reasons, most=3)]), stacklevel=3)


def percent(part: int, whole: int) -> str:
    """Return a share as a percentage, rounded down, so that ``100 %`` means all."""
    return f"{100 * part // max(whole, 1)} %"


# Modules that multiply by a weight and are not converted.


@dataclass(frozen=True)
class Uncovered:
    """A module that multiplies by a weight and is not converted."""

    reason: str
    """Why, and the remedy where there is one."""
    parameters: int
    """Number of elements of its weights."""


def uncovered(model: nn.Module) -> dict[str, Uncovered]:
    """Return the modules that multiply by a weight and are not converted, by name.

    Covers subclasses of ``nn.Linear``, quantized weights, ``nn.MultiheadAttention``, recurrent layers, copies of
    ``Conv1D``, and modules with parameters of their own such as experts (3-D) and routers. Embeddings, norms and
    convolutions are not listed.
    """
    found: dict[str, Uncovered] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        reason = None if module in inside else _reason(module)
        if isinstance(module, nn.MultiheadAttention):
            inside.add(module.out_proj)
        if reason is not None:
            found[name] = Uncovered(reason, _weight_elements(module))
    return found


def _sharded_already(model: nn.Module) -> dict[str, str]:
    """Return the layers that ``fully_shard`` was applied to before the conversion, which gave them a new class."""
    return {
        name: "sharded already: kp.fp8.convert comes before fully_shard"
        for name, module in model.named_modules()
        if type(module) is not nn.Linear and _class(module) is nn.Linear
    }


def by_reason(reasons: dict[str, str], most: int | None = None) -> list[str]:
    """Return one line per reason with the (grouped) names it applies to, at most ``most`` of them."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name or "the model itself")
    lines = []
    for reason, found in names.items():
        groups = group_names(found)
        more = 0 if most is None else len(groups[most:])
        lines.append(f"{', '.join(groups[:most])}{f' and {more} more' if more else ''} ({reason})")
    return lines


def group_names(names: Iterable[str]) -> list[str]:
    """Abbreviate names that differ only in layer indices.

    Example:
        >>> group_names(["h.0.up", "h.1.up", "h.2.up", "head"])
        ['h.0-2.up', 'head']
        >>> group_names(["h.0.up", "h.2.up", "h.3.up"])
        ['h.{0,2-3}.up']
    """
    templates: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        template = re.sub(r"(?<![^.])\d+(?![^.])", "{}", name)
        indices = [int(piece) for piece in name.split(".") if piece.isdecimal()]
        templates.setdefault(template, []).append(tuple(indices))
    return [template.format(*each) for template, found in templates.items() for each in _ranges(found)]


def _ranges(indices: list[tuple[int, ...]]) -> list[tuple[str, ...]]:
    """Cover index tuples by as few tuples of ranges ("0-31") as products of ranges allow."""
    columns = [sorted(set(column)) for column in zip(*indices, strict=True)]
    if math.prod(map(len, columns)) == len(set(indices)):
        return [tuple(map(_range, columns))]
    found = []
    for first, rest in itertools.groupby(sorted(indices), key=lambda each: each[0]):
        found += [(str(first), *tail) for tail in _ranges([each[1:] for each in rest])]
    return found


def _range(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return text if len(runs) == 1 else f"{{{text}}}"


def _class(module: nn.Module) -> type:
    """Return the class of a module before ``fully_shard``, which derives a class from it."""
    kind = type(module)
    return kind.__bases__[-1] if kind.__module__.startswith("torch.distributed.") else kind


def _weight_elements(module: nn.Module) -> int:
    """Return the number of elements of a module's weights with at least two dimensions, without lazy ones."""
    own = module.parameters(recurse=isinstance(module, nn.MultiheadAttention) or is_parametrized(module))
    return sum(p.numel() for p in own if not nn.parameter.is_lazy(p) and p.dim() > 1)


def _reason(module: nn.Module) -> str | None:
    """Return why a module that multiplies by a weight is not converted; None for all other modules."""
    kind = _class(module)
    name = kind.__name__
    if isinstance(module, Float8Linear):
        return None
    if isinstance(module, nn.MultiheadAttention):
        return f"{name} multiplies by its weights itself and calls no layer: use nn.Linear around kp.attention"
    if isinstance(module, nn.Linear):
        return _linear_reason(module, kind)
    if _is_linear(module):
        return unsupported_weight(module.weight) or NOT_SELECTED
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return f"{name} runs a recurrent kernel of its own"
    own = {key: p for key, p in module._parameters.items() if p is not None and not nn.parameter.is_lazy(p)}
    if name == "Conv1D" and own.get("weight") is not None and own["weight"].dim() == 2:
        return "Conv1D stores the transposed weight: use nn.Linear with conv.weight.T in its place"
    if kind.__module__.startswith("torch.nn.modules.") or isinstance(
        module, (nn.Embedding, nn.modules.conv._ConvNd)
    ):
        return None
    experts = [key for key, p in own.items() if p.dim() == 3 and min(p.shape) > 1]
    if experts:
        return f"{name} holds the weights of all experts as 3-D parameters: no FP8 grouped GEMM yet"
    weight = own.get("weight")
    if weight is not None and weight.dim() == 2 and min(weight.shape) > 1:
        if re.search("router|gat(e|ing)", name, re.IGNORECASE):
            return f"{name} routes tokens to experts: a small GEMM that is sensitive to rounding"
        return f"{name} multiplies by its weight itself: use an nn.Linear inside it"
    return None


def _linear_reason(module: nn.Linear, kind: type) -> str:
    if isinstance(module, LazyModuleMixin):
        return f"{kind.__name__} has no shape before its first input: call the model before kp.fp8.convert"
    if is_parametrized(module):
        return (
            "the weight is computed by torch.nn.utils.parametrize in every forward: use remove_parametrizations "
            "before kp.fp8.convert"
        )
    if kind is not nn.Linear:
        return (
            f"{kind.__name__} is a subclass of nn.Linear, whose forward may do more: use an nn.Linear in its place, "
            f"or inside a module of your own"
        )
    sharded = type(module) is not nn.Linear
    return NOT_SELECTED if sharded else unsupported_weight(module.weight) or NOT_SELECTED
