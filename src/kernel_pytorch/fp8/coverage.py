"""Find the modules of a model that multiply by a weight and cannot be converted, each with the reason."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from kernel_pytorch.fp8.layer import Float8Linear

__all__ = ["by_reason", "class_of", "left_alone", "sharded_before"]


def class_of(module: nn.Module) -> type:
    """Its class, also where ``fully_shard`` has put one of its own before it."""
    kind = type(module)
    return kind.__bases__[-1] if kind.__module__.startswith("torch.distributed.") else kind


def left_alone(model: nn.Module) -> dict[str, str]:
    """The names of what multiplies by a weight and is no ``nn.Linear``: for each why not, and what to do."""
    found, parts = {}, set()
    for name, module in model.named_modules():
        kind = class_of(module)
        if isinstance(module, nn.MultiheadAttention):
            parts.add(module.out_proj)
            found[name] = (
                f"{kind.__name__} multiplies by its weights itself and calls no layer: use layers of nn.Linear "
                f"around kp.attention"
            )
        elif not isinstance(module, nn.Linear) or isinstance(module, Float8Linear) or module in parts:
            continue
        elif isinstance(module, LazyModuleMixin):
            found[name] = (
                f"{kind.__name__} has no shape before its first input: call the model before kp.fp8.convert"
            )
        elif is_parametrized(module):
            found[name] = (
                "the weight is computed by torch.nn.utils.parametrize in every forward: use "
                "remove_parametrizations before kp.fp8.convert"
            )
        elif kind is not nn.Linear:
            found[name] = (
                f"{kind.__name__} is a subclass of nn.Linear, whose forward may do more: use an nn.Linear in its "
                f"place, or inside a module of your own"
            )
    return found


def sharded_before(model: nn.Module) -> dict[str, str]:
    """The names of layers that would have been converted before ``fully_shard`` gave them a class of its own."""
    return {
        name: "sharded already: kp.fp8.convert comes before fully_shard"
        for name, module in model.named_modules()
        if type(module) is not nn.Linear and class_of(module) is nn.Linear
    }


def by_reason(reasons: dict[str, str], most: int | None = None) -> list[str]:
    """A line for each reason, with the names it is for, or the first of them."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name or "the model itself")
    lines = []
    for reason, found in names.items():
        more = 0 if most is None else len(found[most:])
        lines.append(f"{', '.join(found[:most])}{f' and {more} more' if more else ''} ({reason})")
    return lines
