"""Render a report as one HTML page with inline CSS, without scripts, fonts or other files."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from kernel_pytorch.html_page import bar_chart, document, table
from kernel_pytorch.optimization.report import accuracy, compilation, noise, seconds, size

if TYPE_CHECKING:
    from kernel_pytorch.optimization.report import Report

__all__ = ["page"]

_MOST_MODULES = 200


def page(report: Report) -> str:
    """Return the whole page."""
    title = f"{report.model} for {report.goal}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(report.verdict)}. {report.parameters:,} parameters on {escape(report.device)}. "
        f"The noise of the machine was {noise(report.noise)}; approximate steps had to keep {report.budget_db:g} dB. "
        f"The search took {report.seconds:.0f} s.</p>",
        *(f'<p class="note">{escape(note)}</p>' for note in report.notes),
    ]
    if report.steps:
        body += ["<h2>Where the gain comes from</h2>", waterfall(report), *_steps(report)]
    body += ["<h2>Before and after</h2>", *_inputs(report)]
    body += [
        "<h2>Refused</h2>",
        table(("candidate", "reason"), ((one.candidate, one.reason) for one in report.refusals)),
    ]
    if report.fallbacks:
        rows = ((one.candidate, one.reason) for one in report.fallbacks)
        body += ["<h2>Fallbacks and warnings</h2>", table(("while trying", "what"), rows)]
    body += _modules(report)
    body += ["<h2>Versions</h2>", table(("package", "version"), report.versions.items())]
    return document(title, body)


def waterfall(report: Report) -> str:
    """Return a chart of the time after each step, as a fraction of eager."""
    shares, left = [("eager", 1.0)], 1.0
    for step in report.steps:
        left /= step.speedup or 1.0
        shares.append((step.candidate, left))
    quantity = "memory" if report.goal == "memory" else "time"
    return bar_chart([(name, share, f"{share:.0%}") for name, share in shares], f"{quantity} left after each step")


def _steps(report: Report) -> list[str]:
    rows = [
        (
            step.candidate,
            step.summary,
            f"{step.speedup:.2f}x",
            step.kind,
            accuracy(step),
            ", ".join(step.drops),
            compilation(step),
        )
        for step in report.steps
    ]
    return [table(("step", "what it does", "gain", "kind", "accuracy so far", "leaves out", "compiler"), rows)]


def _inputs(report: Report) -> list[str]:
    rows = [
        (
            one.label,
            seconds(one.eager_seconds),
            seconds(one.compile_seconds),
            seconds(one.best_seconds),
            f"{one.speedup:.2f}x",
            f"{one.over_compile:.2f}x" if one.over_compile else "",
            f"{size(one.eager_bytes)} to {size(one.best_bytes)}"
            if one.eager_bytes is not None and one.best_bytes is not None
            else "",
        )
        for one in report.inputs
    ]
    heads = ("input", "eager", "torch.compile", "optimised", "over eager", "over compile", report.memory_kind)
    return [table(heads, rows)]


def _modules(report: Report) -> list[str]:
    if not report.modules:
        return []
    rows = [(one.name, one.kind, ", ".join(one.changes), "; ".join(one.left_alone)) for one in report.modules]
    shown = [table(("module", "class", "changed by", "left alone"), rows[:_MOST_MODULES])]
    if len(rows) > _MOST_MODULES:
        shown.append(f"<p>and {len(rows) - _MOST_MODULES} more modules.</p>")
    return ["<h2>Modules</h2>", *shown]
