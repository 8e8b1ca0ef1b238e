"""Find the modules of a model that multiply by a weight and are not converted to FP8, each with the reason."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from kernel_pytorch.fp8.module import Float8Linear

__all__ = [
    "NOT_SELECTED",
    "Uncovered",
    "by_reason",
    "group_names",
    "sharded_already",
    "subclass_weight",
    "uncovered",
]

NOT_SELECTED = "not selected by layers="


@dataclass(frozen=True)
class Uncovered:
    """A module that multiplies by a weight and is not converted."""

    reason: str
    """Why, and the remedy where there is one."""
    parameters: int
    """Number of elements of its weights."""


def uncovered(model: nn.Module) -> dict[str, Uncovered]:
    """Return the modules that multiply by a weight and are not converted, by name.

    Covers subclasses of ``nn.Linear``, quantized weights, ``nn.MultiheadAttention``, recurrent layers, Hugging Face's
    ``Conv1D``, and modules with parameters of their own such as experts (3-D) and routers. Embeddings, norms and
    convolutions are no linear layers and are left out.
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


def subclass_weight(linear: nn.Linear) -> str | None:
    """Return why a weight that is a tensor subclass cannot be converted; None for a plain tensor."""
    weight = linear.weight
    data = weight.data if isinstance(weight, torch.Tensor) else weight
    if not hasattr(data, "__tensor_flatten__"):
        return None
    kind = type(data).__name__
    if kind == "DTensor":
        return "its weight is a DTensor: kp.fp8.convert comes before fully_shard and parallelize_module"
    return f"its weight is a {kind}, which is quantized or computed already: FP8 training needs a plain tensor"


def sharded_already(model: nn.Module) -> dict[str, str]:
    """Return the layers that ``fully_shard`` has given a class of its own before they were converted."""
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
    """Abbreviate names that differ in layer indices alone.

    Example:
        >>> group_names(["h.0.up", "h.1.up", "h.2.up", "head"])
        ['h.0-2.up', 'head']
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
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _class(module: nn.Module) -> type:
    """The class of a module, without the one that ``fully_shard`` derives from it."""
    kind = type(module)
    return kind.__bases__[-1] if kind.__module__.startswith("torch.distributed.") else kind


def _weight_elements(module: nn.Module) -> int:
    """Elements of the weights with two dimensions and more; lazy ones have no shape yet."""
    own = module.parameters(recurse=isinstance(module, nn.MultiheadAttention) or is_parametrized(module))
    return sum(p.numel() for p in own if not nn.parameter.is_lazy(p) and p.dim() > 1)


def _reason(module: nn.Module) -> str | None:
    """Why a module that multiplies by a weight is not converted; None for all other modules."""
    kind = _class(module)
    name = kind.__name__
    if isinstance(module, Float8Linear):
        return None
    if isinstance(module, nn.MultiheadAttention):
        return f"{name} multiplies by its weights itself and calls no layer: use nn.Linear around kp.attention"
    if isinstance(module, nn.Linear):
        return _linear_reason(module, kind)
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
    return NOT_SELECTED if sharded else subclass_weight(module) or NOT_SELECTED
