"""Turning a model's linear layers to 8-bit training, in place, and back; and the table of what became of each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from kernel_pytorch.fp8.gathering import Shard, stop_gathering
from kernel_pytorch.fp8.kept_cast import sums_of_y
from kernel_pytorch.fp8.layer import BUFFERS, Float8Linear
from kernel_pytorch.fp8.linear import COUNTS_SHAPE
from kernel_pytorch.fp8.monitor import Losses, layers_of, losses_of, unwatch, watch
from kernel_pytorch.fp8.norm import fuse_norms, norms_in, unfuse_norms
from kernel_pytorch.fp8.plan import Measured, may_gain
from kernel_pytorch.fp8.recipe import PRODUCTS, RECIPES, Recipe, recipe_named
from kernel_pytorch.fp8.swiglu import fuse, fused_in, unfuse
from kernel_pytorch.hardware_abstraction.dispatch import explain
from kernel_pytorch.hardware_abstraction.formats import FORMATS
from kernel_pytorch.hardware_abstraction.registry import device_of
from kernel_pytorch.ops.fp8_cast.definition import inverse_shape
from kernel_pytorch.ops.fp8_matmul import KERNEL_DEQUANTISED, KERNEL_SCALED_MM, fp8_matmul

__all__ = ["LayerReport", "Report", "check_module", "convert", "report", "revert"]

AUTO = "delayed"
"""The recipe that ``auto`` measures products of: the one with the fewest passes over memory."""
_IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
_ONE_THREAD = "_fp8_one_thread"
"""The attribute of a model whose conversion has taken autograd its threads."""


def convert(
    model: nn.Module,
    recipe: str | Recipe = "auto",
    *,
    layers: Callable[[str, nn.Linear], bool] | None = None,
    fuse_swiglu: bool = True,
    fuse_norm: bool = True,
    monitor: int | None = 50,
    one_thread: bool | None = None,
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
        one_thread: let autograd run backwards in the thread that calls them, by
            ``torch.autograd.set_multithreading_enabled(False)``, a setting of the thread that converts. Handing a
            backward over to autograd's own thread for the device may cost small layers half their step, and gains
            only where one process trains on several GPUs; so None does it where there is one.

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
    if one_thread is not None and not isinstance(one_thread, bool):
        raise TypeError(f"one_thread={one_thread!r}: use True or False, or None for True where there is one GPU")
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
                    *_by_reason({**_left_alone(model), **_sharded_before(model)}, most=3),
                ]
            ),
            stacklevel=2,
        )
        return model
    if monitor is not None:
        watch(model, monitor)
    alone = torch.accelerator.device_count() == 1 if one_thread is None else one_thread
    if alone and torch._C._is_multithreading_enabled():
        torch.autograd.set_multithreading_enabled(False)
        setattr(model, _ONE_THREAD, True)
    return model


def check_module(model: Any) -> None:
    """An error where that is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: expected a torch.nn.Module")


def revert(model: nn.Module) -> nn.Module:
    """Make a converted model what it was; its parameters stay where they are.

    Autograd gets its threads back if the model's conversion took them, whatever else is converted.

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
    for module in model.modules():
        if hasattr(module, _ONE_THREAD):
            delattr(module, _ONE_THREAD)
            torch.autograd.set_multithreading_enabled(True)
    return model


@dataclass(frozen=True)
class LayerReport:
    """What became of one layer."""

    name: str
    inputs: int
    outputs: int
    recipe: str
    products: dict[str, str]
    """For y, dx and dW: ``fp8``, ``own`` (the layer's own precision), or ``?`` where auto has not seen an input."""
    measured: tuple[Measured, ...]
    """The measurements of ``auto``, one for each number of rows it was asked about."""
    losses: dict[str, Losses]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """A table of all converted layers; print it."""

    layers: tuple[LayerReport, ...]
    others: tuple[str, ...]
    """Names of the layers that are an ``nn.Linear`` and were not converted."""
    norms: dict[str, str | None]
    """The fused norms by name, each with the name of the layer that it casts for; None where that is not known."""
    left_alone: dict[str, str]
    """Names of what multiplies by a weight and ``convert`` never takes, for what it is: why, and what to do."""
    one_thread: bool
    """Whether autograd runs backwards in the thread that calls them, if this one does."""

    def __str__(self) -> str:
        head = ["layer", "K -> N", "recipe", *PRODUCTS, "measured", "outgrown", "to zero", "not finite", "notes"]
        rows = [head]
        for layer in self.layers:
            gains = [f"{found.speedup:.2f}x at {found.rows} rows" for found in layer.measured]
            lost = layer.losses.values()
            rows.append([
                layer.name,
                f"{layer.inputs} -> {layer.outputs}",
                layer.recipe,
                *layer.products.values(),
                ", ".join(gains) or "-",
                f"{max(of.outgrown for of in lost):.2%}",
                f"{max(of.underflowed for of in lost):.2%}",
                str(sum(of.nonfinite for of in lost)),
                "; ".join(layer.notes),
            ])  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        if self.others:
            lines.append(f"not converted: {', '.join(self.others)}")
        lines += [f"not converted: {line}" for line in _by_reason(self.left_alone)]
        idle = [name or "the model itself" for name, layer in self.norms.items() if layer is None]
        if idle:
            lines.append(f"fused norms that cast for no layer so far: {', '.join(idle)}")
        if self.one_thread:
            lines.append("autograd runs backwards in the thread that calls them; one_thread=False gives it its own")
        return "\n".join(lines)


def report(model: nn.Module) -> Report:
    """What became of each layer of a converted model: its products, what auto measured, what its casts lost.

    Below the table are the linear layers that were not converted, with the reason where that is their class.
    Waits for the device, for it reads the counts. What the casts lost is the largest part over input, weight and
    gradient since the conversion.
    """
    check_module(model)
    converted = layers_of(model)
    if not converted:
        raise ValueError(
            "; ".join(
                [
                    "model: it has no converted layer",
                    "use kp.fp8.convert(model) first, which converts what is an nn.Linear",
                    *_by_reason(_left_alone(model), most=3),
                ]
            )
        )
    fused = fused_in(model)
    names = {id(layer): name for name, layer in converted.items()}
    norms = {norm: names.get(id(layer)) for norm, layer in norms_in(model).items()}
    before = {layer: norm for norm, layer in norms.items() if layer is not None}
    rows = tuple(_layer_report(name, layer, fused.get(name), before.get(name)) for name, layer in converted.items())
    others = tuple(name for name, module in model.named_modules() if _class_of(module) is nn.Linear)
    return Report(rows, others, norms, _left_alone(model), not torch._C._is_multithreading_enabled())


def _class_of(module: nn.Module) -> type:
    """Its class, also where ``fully_shard`` has put one of its own before it."""
    kind = type(module)
    return kind.__bases__[-1] if kind.__module__.startswith("torch.distributed.") else kind


def _left_alone(model: nn.Module) -> dict[str, str]:
    """The names of what multiplies by a weight and is no ``nn.Linear``: for each why not, and what to do."""
    found, parts = {}, set()
    for name, module in model.named_modules():
        kind = _class_of(module)
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


def _sharded_before(model: nn.Module) -> dict[str, str]:
    """The names of layers that would have been converted before ``fully_shard`` gave them a class of its own."""
    return {
        name: "sharded already: kp.fp8.convert comes before fully_shard"
        for name, module in model.named_modules()
        if type(module) is not nn.Linear and _class_of(module) is nn.Linear
    }


def _by_reason(reasons: dict[str, str], most: int | None = None) -> list[str]:
    """A line for each reason, with the names it is for, or the first of them."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name or "the model itself")
    lines = []
    for reason, found in names.items():
        more = 0 if most is None else len(found[most:])
        lines.append(f"{', '.join(found[:most])}{f' and {more} more' if more else ''} ({reason})")
    return lines


def _without_matrix_units(layer: Float8Linear) -> dict[str, str]:
    """The 8-bit products of the last kind of eager call that a GPU computes from copies in float32: for each why."""
    shape, call = layer.fp8_last_call()
    device = None if layer.weight.is_meta else device_of(layer.weight.device)
    if call is None or shape is None or device is None or device.backend == "cpu":
        return {}
    recipe, how = call
    m, k, n = math.prod(shape[:-1]), layer.in_features, layer.out_features
    forward, gradient = how.forward_format, how.gradient_format
    # Rows of both operands, the length of the sums, scales, formats, and how they are added up.
    products = {
        "y": ((m, n), k, (recipe.input, recipe.weight), (forward, forward), sums_of_y(recipe.input)),
        "dx": ((m, k), n, (recipe.gradient, recipe.weight), (gradient, forward), recipe.dx_sums),
        "dW": ((n, k), m, (recipe.gradient, recipe.input), (gradient, forward), "promoted"),
    }
    found = {}
    for product in recipe.low_precision:
        sizes, length, granularities, formats, sums = products[product]
        with torch.device("meta"):
            codes = [
                torch.empty(size, length, dtype=FORMATS[name].dtype)
                for size, name in zip(sizes, formats, strict=True)
            ]
            scales = [
                torch.empty(inverse_shape(each, size, length))
                for size, each in zip(sizes, granularities, strict=True)
            ]
        choice = explain(fp8_matmul, *codes, *scales, how.dtype, sums, device=device)
        if choice.kernel is KERNEL_DEQUANTISED and m > 0:
            why = next(verdict.reason for verdict in choice.verdicts if verdict.kernel == KERNEL_SCALED_MM.name)
            found[product] = f"multiplied as copies in float32: {KERNEL_SCALED_MM.name} {why}"
    return found


def _filled_up(layer: Float8Linear, products: Iterable[str]) -> list[str]:
    """A line if the matrix units take other sizes for these products; M is that of the last kind of eager call."""
    if layer.weight.is_meta or device_of(layer.weight.device).backend == "cpu":
        return []
    shape, _ = layer.fp8_last_call()
    m = 0 if shape is None else math.prod(shape[:-1])
    sizes = {"M": m, "K": layer.in_features, "N": layer.out_features}
    filled = {"y": "KN", "dx": "KN", "dW": "MK"}  # the length of the sums, and columns
    sides = {side for product in products for side in filled[product]}
    ragged = [f"{side} = {size}" for side, size in sizes.items() if side in sides and size % 16]
    return [f"{', '.join(ragged)} filled up with zeros to a multiple of 16 in 8-bit products"] if ragged else []


def _layer_report(name: str, layer: Float8Linear, fused: str | None, norm: str | None) -> LayerReport:
    notes = []
    if layer.fp8_fallback is not None:
        notes.append(f"fell back: {layer.fp8_fallback}")
    if fused is not None:
        notes.append(f"part of the fused SwiGLU {fused!r}" if fused else "part of a fused SwiGLU")
    if isinstance(layer.fp8_gather, Shard):
        notes.append(f"gathered in {'8 bits' if layer.fp8_gather.in_8_bits else 'its own precision: it fell back'}")
    elif layer.fp8_gather is not None:
        notes.append(f"gathered in its own precision: {layer.fp8_gather}")
    if norm is not None:
        notes.append(f"its input is cast by the norm {norm!r}")
    measured = layer.fp8_measured() if layer.fp8_auto else ()
    if layer.fp8_fallback is not None:
        products = dict.fromkeys(PRODUCTS, "own")
    elif layer.fp8_auto and not measured:
        unknown = may_gain(layer.weight.device.type)
        products = dict.fromkeys(PRODUCTS, "?" if unknown else "own")
        if not unknown:
            notes.append(f"no 8-bit matrix units on {layer.weight.device.type}")
    else:
        low = measured[-1].best if measured else layer.fp8_recipe.low_precision
        products = {product: "fp8" if product in low else "own" for product in PRODUCTS}
    refused = _without_matrix_units(layer)
    in_8 = [product for product, how in products.items() if how == "fp8" and product not in refused]
    notes += _filled_up(layer, in_8)
    notes += _by_reason(refused)
    counts = torch.zeros(COUNTS_SHAPE, dtype=torch.int64) if layer.weight.is_meta else layer.fp8_counts.cpu()
    recipe = f"auto ({layer.fp8_recipe})" if layer.fp8_auto else str(layer.fp8_recipe)
    return LayerReport(
        name, layer.in_features, layer.out_features, recipe, products, measured, losses_of(counts), tuple(notes)
    )
