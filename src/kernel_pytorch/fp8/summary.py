"""Report what became of each layer of a converted model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from kernel_pytorch.fp8.conversion import check_module
from kernel_pytorch.fp8.coverage import by_reason, class_of, left_alone
from kernel_pytorch.fp8.gathering import Shard
from kernel_pytorch.fp8.kept_cast import sums_of_y
from kernel_pytorch.fp8.layer import Float8Linear
from kernel_pytorch.fp8.linear import COUNTS_SHAPE
from kernel_pytorch.fp8.monitor import CastStats, cast_stats, layers_of
from kernel_pytorch.fp8.norm import norms_in
from kernel_pytorch.fp8.plan import Measured, may_gain
from kernel_pytorch.fp8.recipe import PRODUCTS
from kernel_pytorch.fp8.swiglu import fused_in
from kernel_pytorch.hardware_abstraction.dispatch import explain
from kernel_pytorch.hardware_abstraction.formats import FORMATS
from kernel_pytorch.hardware_abstraction.registry import device_of
from kernel_pytorch.ops.fp8_cast.definition import inverse_shape
from kernel_pytorch.ops.fp8_matmul import KERNEL_DEQUANTISED, KERNEL_SCALED_MM, fp8_matmul

__all__ = ["LayerReport", "Report", "report"]


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
    stats: dict[str, CastStats]
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

    def __str__(self) -> str:
        head = [
            "layer",
            "K -> N",
            "recipe",
            *PRODUCTS,
            "measured",
            "saturated",
            "underflowed",
            "non-finite",
            "notes",
        ]
        rows = [head]
        for layer in self.layers:
            gains = [f"{found.speedup:.2f}x at {found.rows} rows" for found in layer.measured]
            stats = layer.stats.values()
            rows.append([
                layer.name,
                f"{layer.inputs} -> {layer.outputs}",
                layer.recipe,
                *layer.products.values(),
                ", ".join(gains) or "-",
                f"{max(of.saturated for of in stats):.2%}",
                f"{max(of.underflowed for of in stats):.2%}",
                str(sum(of.nonfinite for of in stats)),
                "; ".join(layer.notes),
            ])  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        if self.others:
            lines.append(f"not converted: {', '.join(self.others)}")
        lines += [f"not converted: {line}" for line in by_reason(self.left_alone)]
        idle = [name or "the model itself" for name, layer in self.norms.items() if layer is None]
        if idle:
            lines.append(f"fused norms that cast for no layer so far: {', '.join(idle)}")
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
                    *by_reason(left_alone(model), most=3),
                ]
            )
        )
    fused = fused_in(model)
    names = {id(layer): name for name, layer in converted.items()}
    norms = {norm: names.get(id(layer)) for norm, layer in norms_in(model).items()}
    before = {layer: norm for norm, layer in norms.items() if layer is not None}
    rows = tuple(_layer_report(name, layer, fused.get(name), before.get(name)) for name, layer in converted.items())
    others = tuple(name for name, module in model.named_modules() if class_of(module) is nn.Linear)
    return Report(rows, others, norms, left_alone(model))


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
    notes += by_reason(refused)
    counts = torch.zeros(COUNTS_SHAPE, dtype=torch.int64) if layer.weight.is_meta else layer.fp8_counts.cpu()
    recipe = f"auto ({layer.fp8_recipe})" if layer.fp8_auto else str(layer.fp8_recipe)
    return LayerReport(
        name, layer.in_features, layer.out_features, recipe, products, measured, cast_stats(counts), tuple(notes)
    )
