"""Plots of recorded measurements, as SVG that follows the reader's theme and fits a phone.

Each plot is a function from the records to ``Chart``s, which are data only; ``drawn`` renders the image. An image
contains the digest of its data, so that it is not redrawn while its records are unchanged, and can be checked without
matplotlib. It also contains its own digest: an edited image is not ``intact`` and is redrawn.
"""

from __future__ import annotations

import ast
import hashlib
import html
import io
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from kernel_pytorch.evidence import Benchmark, Measurement, Record
from kernel_pytorch.hardware_abstraction.source_digest import code_of
from tools.website.measured import provenance, stale_kernels

__all__ = ["PLOTS", "Chart", "drawn", "intact"]

_INK, _FAINT = "#010203", "#010204"  # placeholders for the page's text colour; no series may use them
_COLOURS = ("#2f7fd1", "#d9772b", "#3a9a68", "#8b8f98", "#9a6bc4")  # readable on white and on black
_WIDTH = 4.9  # inches of 96 pixels: text keeps its size on a wide page and is legible on a phone


@dataclass(frozen=True)
class Chart:
    """One set of axes. Bars: a row per label, a colour per series. Lines: labels are points on a logarithmic axis."""

    kind: str
    title: str
    axis: str
    labels: tuple[str, ...]
    series: Mapping[str, tuple[float | None, ...]]
    unit: str = ""
    line_at: float | None = None


Plot = tuple[str, Callable[[Benchmark], list[Chart]]]


def _row(record: Benchmark, case: str, phase: str, subject: str) -> Measurement | None:
    found = [row for row in record.measurements if (row.case, row.phase, row.subject) == (case, phase, subject)]
    return found[0] if found else None


def _gain(record: Benchmark, case: str, phase: str, subject: str, over: str, over_phase: str = "") -> float | None:
    ours, theirs = _row(record, case, phase, subject), _row(record, case, over_phase or phase, over)
    return theirs.seconds.median / ours.seconds.median if ours and theirs else None


def _sparse(record: Benchmark) -> list[Chart]:
    flex = "baseline:compiled FlexAttention"
    charts = []
    for dimension in ("d64", "d128"):
        cases = dict.fromkeys(
            row.case
            for row in record.measurements
            if row.subject == flex and row.case.endswith(f"32768 {dimension}")
        )
        series = {
            phase: tuple(_gain(record, case, phase, "kernel:triton", flex) for case in cases)
            for phase in ("forward", "backward")
        }
        labels = tuple(case.removesuffix(f" 32768 {dimension}") for case in cases)
        title = f"32,768 tokens, head dimension {dimension[1:]}"
        charts.append(Chart("bars", title, "speed-up over compiled FlexAttention", labels, series, "x", 1.0))
    return charts


def _dense(record: Benchmark) -> list[Chart]:
    lengths = ("2048", "4096", "8192", "16384", "32768")
    subjects = {
        "kp.attention (takes cuDNN)": "kernel:cudnn",
        "SDPA, cuDNN": "baseline:SDPA cuDNN",
        "SDPA, flash": "baseline:SDPA flash",
        "SDPA, efficient": "baseline:SDPA efficient",
    }
    charts = []
    for phase in ("forward", "backward"):
        series = {}
        for name, subject in subjects.items():
            rows = [_row(record, f"causal {length} d128", phase, subject) for length in lengths]
            series[name] = tuple(row.flops / row.seconds.median / 1e12 if row else None for row in rows)
        charts.append(Chart("lines", phase, "TFLOP/s, causal, head dimension 128", lengths, series))
    return charts


def _long(record: Benchmark) -> list[Chart]:
    lengths = ("131072", "262144", "524288", "1048576")
    phase = "forward and backward"
    subjects = {
        "SDPA": "baseline:SDPA",
        "in chunks": "kernel:triton in chunks",
        "in chunks, keys in host memory": "kernel:triton in chunks, keys in host memory",
    }
    rates: dict[str, tuple[float | None, ...]] = {}
    peaks: dict[str, tuple[float | None, ...]] = {}
    for name, subject in subjects.items():
        rows = [_row(record, f"causal {length} 8 heads d128, {phase}", phase, subject) for length in lengths]
        rates[name] = tuple(row.flops / row.seconds.median / 1e12 if row else None for row in rows)
        peaks[name] = tuple((row.peak_bytes or 0) / 2**30 if row else None for row in rows)
    labels = tuple(f"{int(length) // 1024}k" for length in lengths)
    return [
        Chart("lines", "forward and backward, causal", "TFLOP/s", labels, rates),
        Chart("lines", "peak memory on the device", "GiB", labels, peaks),
    ]


def _fp8(record: Benchmark) -> list[Chart]:
    eager, compiled = (f"forward and backward, {mode}" for mode in ("eager", "compiled"))
    subjects = {
        "delayed, eager": ("kernel:delayed eager", eager),
        "delayed, compiled": ("kernel:delayed compiled", compiled),
        "rowwise, compiled": ("kernel:rowwise compiled", compiled),
        "torchao tensorwise, compiled": ("baseline:torchao tensorwise compiled", compiled),
        "torchao rowwise, compiled": ("baseline:torchao rowwise compiled", compiled),
    }
    cases = tuple(dict.fromkeys(row.case for row in record.measurements))
    series = {
        name: tuple(_gain(record, case, phase, subject, "baseline:bf16 compiled", compiled) for case in cases)
        for name, (subject, phase) in subjects.items()
    }
    return [Chart("bars", "", "speed-up over compiled bf16", cases, series, "x", 1.0)]


def _lowering(record: Benchmark) -> list[Chart]:
    charts = []
    for case in ("block-512", "block-1024", "attention-8192-window-512"):
        rows = [row for row in record.measurements if row.case == case]
        # Rivals without support for windows compute full attention.
        dense = " (dense)" if "window" in case else ""
        labels = tuple(
            name if kind == "kernel" else f"{name}{dense}"
            for kind, _, name in (row.subject.partition(":") for row in rows)
        )
        times = {"time": tuple(row.seconds.median * 1e3 for row in rows)}
        axis = "milliseconds, 8,192 tokens" if "window" in case else "milliseconds"
        charts.append(Chart("bars", case, axis, labels, times, " ms"))
    return charts


PLOTS: dict[str, Plot] = {
    "docs/plots/attention-sparse.svg": ("attention.nvidia-h200", _sparse),
    "docs/plots/attention-dense.svg": ("attention.nvidia-h200", _dense),
    "docs/plots/long-context.svg": ("attention-long.nvidia-h200", _long),
    "docs/plots/fp8-linears.svg": ("fp8-linears.nvidia-h200", _fp8),
    "docs/plots/fp8-blocks.svg": ("fp8-blocks.nvidia-h200", _fp8),
    "docs/plots/lowering.svg": ("lowering.amd-epyc", _lowering),
}
"""Path from the checkout's root -> the record's name and the function that makes its charts."""


def drawn(plot: Plot, records: Mapping[str, Record], there: str = "") -> str:
    """Return the image as SVG; return ``there`` unchanged if it has the same data."""
    name, make = plot
    record = records.get(name)
    charts = make(record) if isinstance(record, Benchmark) else []
    source = "There is no record yet."
    if isinstance(record, Benchmark):
        older = stale_kernels(record)
        source = provenance(record).partition(": ")[0] + (f" (since changed: {', '.join(older)})" if older else "")
    code = code_of(ast.parse(Path(__file__).read_bytes()))  # a comment in this file does not change the image
    data = msgspec.json.encode([source, [asdict(chart) for chart in charts]]) + code.encode()
    digest = hashlib.sha256(data).hexdigest()[:16]
    same = f"<!-- data {digest} -->" in there and intact(there)
    return there if same else _signed(_draw(name, charts, source, digest))


_SIGNATURE = re.compile(r"<!-- content ([0-9a-f]{16}) -->\n")


def _signed(svg: str) -> str:
    return f"{svg}<!-- content {hashlib.sha256(svg.encode()).hexdigest()[:16]} -->\n"


def intact(svg: str) -> bool:
    """Return whether an image is unedited: its last line has the digest of all others.

    Example:
        >>> intact(_signed("<svg>1</svg>\\n")), intact(_signed("<svg>1</svg>\\n").replace("1", "2"))
        (True, False)
    """
    content, mark, after = svg.rpartition("<!-- content ")
    return bool(mark) and _SIGNATURE.fullmatch(mark + after) is not None and _signed(content) == svg


def _draw(name: str, charts: list[Chart], source: str, digest: str) -> str:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    heights = [_height(chart) for chart in charts] or [0.6]
    names = max((len(chart.series) for chart in charts), default=0)
    legend = 0.1 + 0.17 * ((names + 1) // 2) if names > 1 else 0.0  # inches, in two columns
    height = sum(heights) + legend + 0.3
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": digest,
        "font.size": 8.5,
        "axes.titlesize": 9,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "legend.frameon": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), _INK),
        "grid.color": _FAINT,
    }
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(
            len(heights), 1, figsize=(_WIDTH, height), height_ratios=heights, squeeze=False
        )
        for chart, ax in zip(charts, axes[:, 0], strict=False):
            (_bars if chart.kind == "bars" else _lines)(ax, chart)
        for chart, ax in zip(charts, axes[:, 0], strict=False):
            # All charts of one quantity in an image use the same scale.
            alike = [other for one, other in zip(charts, axes[:, 0], strict=False) if one.axis == chart.axis]
            if chart.kind == "bars":
                ax.set_xlim(right=max(other.get_xlim()[1] for other in alike))
            else:
                ax.set_ylim(top=max(other.get_ylim()[1] for other in alike))
        if not charts:
            axes[0, 0].axis("off")
        below = textwrap.fill(source, 92)
        figure.text(0.01, 0.005, below, fontsize=6.5, alpha=0.75, va="bottom")
        if legend:
            figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper left", ncols=2, fontsize=8)
        note = 0.12 * (1 + below.count("\n"))
        figure.tight_layout(rect=(0, note / height, 1, 1 - legend / height))
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    return _finish(out.getvalue(), name, charts, source, digest)


def _height(chart: Chart) -> float:
    return 0.75 + len(chart.labels) * (0.2 + 0.15 * len(chart.series)) if chart.kind == "bars" else 2.3


def _bars(ax: Any, chart: Chart) -> None:
    count = len(chart.series)
    step = 0.8 / count
    for place, (name, values) in enumerate(chart.series.items()):
        for row, value in enumerate(values):
            if value is None:
                continue
            y = row + (place - (count - 1) / 2) * step
            ax.barh(y, value, step * 0.9, color=_COLOURS[place], label=name if row == _first(values) else None)
            ax.annotate(_number(value) + chart.unit, (value, y), (2, 0), textcoords="offset points", va="center")
    if chart.line_at is not None:
        ax.axvline(chart.line_at, color=_INK, linewidth=0.8, linestyle="--")
    labels = [label.replace(" & (", "\n& (").replace(", ", ",\n", 1) for label in chart.labels]
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.set_xlim(right=ax.get_xlim()[1] * 1.1)
    ax.set_xlabel(chart.axis)
    ax.set_title(chart.title)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 10 else f"{value:.2f}"


def _first(values: tuple[float | None, ...]) -> int:
    return next(place for place, value in enumerate(values) if value is not None)


def _lines(ax: Any, chart: Chart) -> None:
    for place, (name, values) in enumerate(chart.series.items()):
        points = [(x, value) for x, value in enumerate(values) if value is not None]
        ax.plot(*zip(*points, strict=True), color=_COLOURS[place], label=name, marker="os^Dv"[place], markersize=4)
    ax.set_xticks(range(len(chart.labels)), chart.labels)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("tokens")
    ax.set_title(f"{chart.title} ({chart.axis})")
    ax.grid(axis="y", alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def _finish(svg: str, name: str, charts: list[Chart], source: str, digest: str) -> str:
    """Finish the image: the page's text colour and font, no date, unique ids, and a description."""
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style type=\"text/css\">.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[a-z]+[0-9.]*_[\d_]+"', "", svg)
    svg = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 system-ui, sans-serif", svg)
    svg = svg.replace(_INK, "currentColor").replace(_FAINT, "currentColor")
    head, _, body = svg.partition(">")
    head = re.sub(r' (?:width|height|version)="[^"]*"', "", head)
    theme = "<style>.plot{color:#24292f}@media (prefers-color-scheme:dark){.plot{color:#d5dae0}}</style>"
    words = f"<title>{html.escape(name)}</title><desc>{html.escape(_in_words(charts, source))}</desc>"
    svg = f'{head} class="plot" role="img" stroke-linejoin="round">{theme}{words}\n<!-- data {digest} -->{body}'
    return "\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n"


def _in_words(charts: list[Chart], source: str) -> str:
    lines = []
    for chart in charts:
        for row, label in enumerate(chart.labels):
            cells = [
                f"{name} {_number(value)}{chart.unit}"
                for name, value in ((name, values[row]) for name, values in chart.series.items())
                if value is not None
            ]
            lines.append(f"{chart.title or chart.axis}, {label}: {', '.join(cells)}.")
    return " ".join([*lines, source])
