"""Report which layers of a model are in FP8, with their quantization statistics."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from torch import nn

from kernel_pytorch.fp8.autograd import COUNTS_SHAPE
from kernel_pytorch.fp8.autotune import Measured, may_have_matrix_units
from kernel_pytorch.fp8.conversion import NOT_SELECTED, by_reason, check_module, group_names, percent, uncovered
from kernel_pytorch.fp8.fusion import fused_in, norms_in
from kernel_pytorch.fp8.module import Float8Linear
from kernel_pytorch.fp8.monitor import CastStats, cast_stats, layers_of
from kernel_pytorch.fp8.quantize import output_accumulation
from kernel_pytorch.fp8.recipe import PRODUCTS
from kernel_pytorch.hardware_abstraction.explanation import explain
from kernel_pytorch.hardware_abstraction.formats import FORMATS
from kernel_pytorch.hardware_abstraction.registry import device_of
from kernel_pytorch.html_page import document
from kernel_pytorch.ops.fp8_cast.definition import inverse_shape
from kernel_pytorch.ops.fp8_matmul import KERNEL_DEQUANTISED, KERNEL_SCALED_MM, fp8_matmul

__all__ = ["LayerGroup", "LayerReport", "Report", "report"]

WIDTH = 100
UNDECIDED, NOT_COMPUTED = "?", "-"
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --good: #1a7f37; --bad: #b35900; }
@media (prefers-color-scheme: dark) { :root { --good: #4ac26b; --bad: #f0a35e; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.summary { font-size: 1.1rem; padding: .8rem 1rem; border-left: 4px solid var(--good); background: var(--soft); }
article { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .9rem; margin: .6rem 0; }
h3 { font: 600 .95rem ui-monospace, monospace; margin: 0; overflow-wrap: anywhere; }
p { margin: .3rem 0; } .facts { color: GrayText; font-size: .9rem; }
.gemms { display: flex; flex-wrap: wrap; gap: .4rem; margin: .4rem 0; }
.gemms span { border: 1px solid var(--line); border-radius: 1rem; padding: 0 .7rem; font-size: .9rem; }
.gemms .fp8 { border-color: var(--good); color: var(--good); }
.bad { color: var(--bad); } ul { padding-left: 1.2rem; margin: .3rem 0; } li { overflow-wrap: anywhere; }
""".strip()

_GEMMS = ("output y", "input gradient dx", "weight gradient dW")


@dataclass(frozen=True)
class LayerReport:
    """One converted layer."""

    name: str
    inputs: int
    outputs: int
    recipe: str
    products: dict[str, str]
    """For the GEMMs y, dx and dW: ``fp8``, the layer's dtype (``bf16``), ``-`` if not computed because the weight is
    frozen, or ``?`` if ``auto`` has not measured yet."""
    measured: tuple[Measured, ...]
    """The measurements of ``auto``, one for each number of rows."""
    stats: dict[str, CastStats]
    """Quantization statistics of input, weight and gradient since the conversion."""
    notes: tuple[str, ...]
    fell_back: bool = False

    @property
    def in_fp8(self) -> bool:
        """Whether at least one GEMM is in FP8."""
        return "fp8" in self.products.values()


@dataclass(frozen=True)
class LayerGroup:
    """Layers that differ only in their indices: one row of the report, with the worst statistics of the group."""

    name: str
    count: int
    shape: str
    recipe: str
    products: tuple[str, ...]
    saturated: float
    underflowed: float
    nonfinite: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """All linear layers of a converted model. Print it, or save it as a page.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> print(kp.fp8.report(kp.fp8.convert(model, "delayed")))
        4 of 4 linear layers in FP8, 100 % of matmul parameters, 0 fell back
        recipe: delayed
        layer  K -> N    y    dx   dW   saturated  underflow  non-finite
        0-3    64 -> 64  fp8  fp8  fp8  0.00%      0.00%      0
    """

    layers: tuple[LayerReport, ...]
    not_covered: dict[str, str]
    """The modules that multiply by a weight and are not converted, each with the reason."""
    norms: dict[str, str | None]
    """The fused norms by name, each with the layer whose input it quantizes; None if it has quantized none yet."""
    not_covered_parameters: int = 0

    @property
    def summary(self) -> str:
        """One line: how many layers and parameters are in FP8, and how many layers fell back."""
        inside = [layer for layer in self.layers if layer.in_fp8]
        covered = sum(layer.inputs * layer.outputs for layer in inside)
        total = sum(layer.inputs * layer.outputs for layer in self.layers) + self.not_covered_parameters
        undecided = sum(UNDECIDED in layer.products.values() for layer in self.layers)
        line = (
            f"{len(inside)} of {len(self.layers) + len(self.not_covered)} linear layers in FP8, "
            f"{percent(covered, total)} of matmul parameters, "
            f"{sum(layer.fell_back for layer in self.layers)} fell back"
        )
        return f"{line}, {undecided} not measured yet" if undecided else line

    @property
    def remarks(self) -> tuple[str, ...]:
        """The modules that are not covered, with the reasons, and fused norms without an effect."""
        lines = [f"not covered: {line}" for line in by_reason(self.not_covered)]
        idle = [name or "the model itself" for name, layer in self.norms.items() if layer is None]
        if idle:
            lines.append(
                f"fused norms that have quantized no layer's input in eager mode: {', '.join(group_names(idle))}"
            )
        return tuple(lines)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers with repeated ones grouped."""
        alike: dict[tuple[object, ...], list[LayerReport]] = {}
        for layer in self.layers:
            template = re.sub(r"\d+", "*", layer.name)
            notes = tuple(map(_without_indices, _notes(layer)))
            key = (template, layer.inputs, layer.outputs, layer.recipe, *layer.products.values(), notes)
            alike.setdefault(key, []).append(layer)
        return tuple(group for layers in alike.values() for group in _groups(layers))

    def save(self, path: str | Path) -> Path:
        """Write the report as one self-contained HTML page.

        Example:
            >>> import tempfile, torch, kernel_pytorch as kp
            >>> report = kp.fp8.report(kp.fp8.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), "delayed"))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     report.save(f"{folder}/report.html").name
            'report.html'
        """
        path = Path(path)
        if path.suffix != ".html":
            raise ValueError(f"path={str(path)!r}: use a name that ends in .html")
        path.write_text(_page(self.summary, self.groups, self.remarks), encoding="utf-8")
        return path

    def __str__(self) -> str:
        groups = self.groups
        recipes = sorted({group.recipe for group in groups})
        lines = [self.summary]
        for remark in self.remarks:
            lines += textwrap.wrap(remark, WIDTH, subsequent_indent="  ")
        if len(recipes) == 1:
            lines.append(f"recipe: {recipes[0]}")
        table = [["layer", "K -> N", *PRODUCTS, "saturated", "underflow", "non-finite"]]
        table += [
            [
                group.name, group.shape, *group.products, f"{group.saturated:.2%}", f"{group.underflowed:.2%}",
                str(group.nonfinite),
            ]
            for group in groups
        ]  # fmt: skip
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        widths[0] = max(5, min(widths[0], WIDTH - sum(widths[1:]) - 2 * len(widths[1:])))
        for row, notes in zip(table, [(), *(group.notes for group in groups)], strict=True):
            if len(row[0]) > widths[0]:
                lines += textwrap.wrap(row[0], WIDTH, subsequent_indent="  ")
                row[0] = ""
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
            for note in notes:
                lines += textwrap.wrap(note, WIDTH, initial_indent="    ", subsequent_indent="      ")
        if len(recipes) > 1:
            for recipe in recipes:
                names = ", ".join(group.name for group in groups if group.recipe == recipe)
                lines += textwrap.wrap(f"recipe {recipe}: {names}", WIDTH, subsequent_indent="  ")
        return "\n".join(lines)


def report(model: nn.Module) -> Report:
    """Return the report of a converted model: GEMMs in FP8, measurements of ``auto``, quantization statistics.

    Reads the counters, so it synchronizes with the device. ``Report`` has an example.
    """
    check_module(model)
    converted, others = layers_of(model), uncovered(model)
    reasons = {name: each.reason for name, each in others.items()}
    if not converted:
        refused = {name: reason for name, reason in reasons.items() if reason != NOT_SELECTED}
        head = "model: it has no converted layer; use kp.fp8.convert(model) first"
        raise ValueError("; ".join([head, *by_reason(refused, most=3)]))
    fused = fused_in(model)
    names = {id(layer): name for name, layer in converted.items()}
    norms = {norm: names.get(id(layer)) for norm, layer in norms_in(model).items()}
    before = {layer: norm for norm, layer in norms.items() if layer is not None}
    rows = tuple(_layer_report(name, layer, fused.get(name), before.get(name)) for name, layer in converted.items())
    return Report(rows, reasons, norms, sum(each.parameters for each in others.values()))


def _notes(layer: LayerReport) -> tuple[str, ...]:
    """Return the notes of a layer, preceded by what ``auto`` measured."""
    gains = [f"{found.speedup:.2f}x at {found.rows} rows" for found in layer.measured]
    return (*([f"measured: {', '.join(gains)}"] if gains else []), *layer.notes)


def _without_indices(note: str) -> str:
    """Replace the indices in a note's quoted module names, which differ between the layers of a group."""
    return re.sub(r"'[^']*'", lambda quoted: re.sub(r"(?<=[.'])\d+(?=[.'])", "*", quoted[0]), note)


def _groups(layers: list[LayerReport]) -> list[LayerGroup]:
    first = layers[0]
    names = group_names(layer.name for layer in layers)
    if len(names) > 1 or len(layers) == 1:  # no regular repetition
        names, members = [layer.name for layer in layers], [[layer] for layer in layers]
    else:
        members = [layers]
    found = []
    for name, group in zip(names, members, strict=True):
        stats = [each for layer in group for each in layer.stats.values()]
        notes = _notes(group[0])
        found.append(
            LayerGroup(
                name or "the model itself",
                len(group),
                f"{first.inputs} -> {first.outputs}",
                first.recipe,
                tuple(first.products.values()),
                max(each.saturated for each in stats),
                max(each.underflowed for each in stats),
                sum(each.nonfinite for each in stats),
                notes if len(group) == 1 else tuple(map(_without_indices, notes)),
            )
        )
    return found


def _without_matrix_units(layer: Float8Linear) -> dict[str, str]:
    """Return the FP8 GEMMs of the last eager call that a GPU computes from float32 copies, each with the reason."""
    shape, call = layer.fp8_last_call()
    device = None if layer.weight.is_meta else device_of(layer.weight.device)
    if call is None or shape is None or device is None or device.backend == "cpu":
        return {}
    recipe, how = call
    m, k, n = math.prod(shape[:-1]), layer.in_features, layer.out_features
    forward, gradient = how.forward_format, how.gradient_format
    # Rows of both operands, length of the reduction, granularities, formats, accumulation.
    products = {
        "y": ((m, n), k, (recipe.input, recipe.weight), (forward, forward), output_accumulation(recipe.input)),
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
            found[product] = f"computed from float32 copies: {KERNEL_SCALED_MM.name} {why}"
    return found


def _padded(layer: Float8Linear, products: Iterable[str]) -> list[str]:
    """Return a note if sizes are padded for the matrix units; M is that of the last eager call."""
    if layer.weight.is_meta or device_of(layer.weight.device).backend == "cpu":
        return []
    shape, _ = layer.fp8_last_call()
    m = 0 if shape is None else math.prod(shape[:-1])
    sizes = {"M": m, "K": layer.in_features, "N": layer.out_features}
    padded = {"y": "KN", "dx": "KN", "dW": "MK"}  # dimensions that _scaled_mm needs in multiples of 16
    sides = {side for product in products for side in padded[product]}
    ragged = [f"{side} = {size}" for side, size in sizes.items() if side in sides and size % 16]
    return [f"{', '.join(ragged)} padded to a multiple of 16 in FP8 GEMMs"] if ragged else []


def _layer_report(name: str, layer: Float8Linear, fused: str | None, norm: str | None) -> LayerReport:
    notes = []
    dtype = _SHORT[layer.weight.dtype]
    if layer.fp8_fallback is not None:
        notes.append(f"fell back: {layer.fp8_fallback}")
    if fused is not None:
        notes.append(f"part of the fused SwiGLU {fused!r}" if fused else "part of a fused SwiGLU")
    if layer.fp8_gather is not None:
        reason = layer.fp8_gather
        notes.append("all-gathered in FP8" if reason is True else f"not all-gathered in FP8: {reason}")
    if norm is not None:
        notes.append(f"its input is quantized by the norm {norm!r}")
    measured = layer.fp8_measured() if layer.fp8_auto else ()
    if layer.fp8_fallback is not None:
        products = dict.fromkeys(PRODUCTS, dtype)
    elif layer.fp8_auto and not measured:
        unknown = may_have_matrix_units(layer.weight.device.type)
        products = dict.fromkeys(PRODUCTS, UNDECIDED if unknown else dtype)
        if not unknown:
            notes.append(f"no FP8 matrix units on {layer.weight.device.type}")
    else:
        low = measured[-1].best if measured else layer.fp8_recipe.low_precision
        products = {product: "fp8" if product in low else dtype for product in PRODUCTS}
    if not layer.weight.requires_grad:
        products["dW"] = NOT_COMPUTED
        notes.append("the weight is frozen: no weight gradient")
    rank, features = sorted((layer.in_features, layer.out_features))
    if 8 * rank <= features and rank <= 64 and "fp8" in products.values():
        notes.append(f"rank {rank} is too small to gain from FP8: leave it out with layers=")
    refused = _without_matrix_units(layer)
    computed = [product for product, how in products.items() if how == "fp8" and product not in refused]
    notes += _padded(layer, computed)
    notes += by_reason(refused)
    counts = torch.zeros(COUNTS_SHAPE, dtype=torch.int64) if layer.weight.is_meta else layer.fp8_counts.cpu()
    return LayerReport(
        name=name,
        inputs=layer.in_features,
        outputs=layer.out_features,
        recipe=f"auto ({layer.fp8_recipe})" if layer.fp8_auto else str(layer.fp8_recipe),
        products=products,
        measured=measured,
        stats=cast_stats(counts),
        notes=tuple(notes),
        fell_back=layer.fp8_fallback is not None,
    )


def _page(summary: str, groups: Sequence[LayerGroup], remarks: Sequence[str]) -> str:
    """Return the page: the summary, what is not covered, and a card for each group of layers."""
    parts = [f'<h1>FP8 report</h1><p class="summary">{escape(summary)}</p>']
    if remarks:
        parts.append(f"<h2>Remarks</h2>{_list(remarks)}")
    parts.append("<h2>Converted layers</h2>")
    parts += map(_card, groups)
    return document("FP8 report", parts, _STYLE)


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _card(group: LayerGroup) -> str:
    gemms = "".join(
        f'<span class="{"fp8" if how == "fp8" else "other"}">{gemm}: {escape(how)}</span>'
        for gemm, how in zip(_GEMMS, group.products, strict=True)
    )
    repeated = f" &middot; {group.count} layers" if group.count > 1 else ""
    stats = (
        f"{group.saturated:.2%} saturated &middot; {group.underflowed:.2%} underflowed &middot; "
        f"{group.nonfinite} non-finite"
    )
    warn = group.nonfinite > 0 or group.underflowed > 0.5 or group.saturated > 1e-3
    notes = _list(group.notes) if group.notes else ""
    return (
        f'<article><h3>{escape(group.name)}</h3><p class="facts">{escape(group.shape)} &middot; '
        f'{escape(group.recipe)}{repeated}</p><div class="gemms">{gemms}</div>'
        f'<p class="{"bad" if warn else "facts"}">{stats}</p>{notes}</article>'
    )
