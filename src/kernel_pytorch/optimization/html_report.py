"""The page of a report: inline CSS and SVG, no scripts, no fonts and no files beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from kernel_pytorch.optimization.report import accuracy, seconds, size

if TYPE_CHECKING:
    from kernel_pytorch.optimization.report import Report

__all__ = ["page"]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #3b82c4; --before: #9aa3ad; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.note { border-left: 4px solid #d9822b; padding-left: .7rem; }
svg { width: 100%; height: auto; } svg text { font: 13px system-ui, sans-serif; fill: currentColor; }
code { font-size: .9em; overflow-wrap: anywhere; }
"""
_MOST_MODULES = 200


def page(report: Report) -> str:
    """Return the whole page."""
    title = f"{report.model} for {report.goal}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(report.verdict)}. {report.parameters:,} parameters on {escape(report.device)}. "
        f"The noise of the machine was {report.noise:.1%}; approximate steps had to keep {report.budget_db:g} dB. "
        f"The search took {report.seconds:.0f} s.</p>",
        *(f'<p class="note">{escape(note)}</p>' for note in report.notes),
    ]
    if report.steps:
        body += ["<h2>Where the gain comes from</h2>", waterfall(report), *_steps(report)]
    body += ["<h2>Before and after</h2>", *_inputs(report)]
    body += [
        "<h2>Refused</h2>",
        _table(("candidate", "reason"), ((one.candidate, one.reason) for one in report.refusals)),
    ]
    body += _modules(report)
    body += ["<h2>Versions</h2>", _table(("package", "version"), report.versions.items())]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def waterfall(report: Report) -> str:
    """Return the chart: the time left after each step, as a share of eager."""
    shares, left = [("eager", 1.0)], 1.0
    for step in report.steps:
        left /= step.speedup or 1.0
        shares.append((step.candidate, left))
    widest = max(share for _, share in shares)
    row, rows = 34, []
    for number, (name, share) in enumerate(shares):
        top, width = number * row, 340 * share / widest
        colour = "var(--bar)" if number else "var(--before)"
        rows.append(
            f'<text x="0" y="{top + 21}">{escape(name)}</text>'
            f'<rect x="190" y="{top + 4}" width="{width:.1f}" height="24" rx="3" fill="{colour}"/>'
            f'<text x="{196 + width:.1f}" y="{top + 21}">{share:.0%}</text>'
        )
    label = ", ".join(f"{name} {share:.0%}" for name, share in shares)
    quantity = "memory" if report.goal == "memory" else "time"
    return (
        f'<svg viewBox="0 0 600 {row * len(shares)}" role="img" aria-label="{quantity} left after each step: '
        f'{escape(label)}">{"".join(rows)}</svg>'
    )


def _steps(report: Report) -> list[str]:
    rows = [
        (step.candidate, step.summary, f"{step.speedup:.2f}x", step.kind, accuracy(step), ", ".join(step.drops))
        for step in report.steps
    ]
    return [_table(("step", "what it does", "gain", "kind", "accuracy so far", "leaves out"), rows)]


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
    return [_table(heads, rows)]


def _modules(report: Report) -> list[str]:
    if not report.modules:
        return []
    rows = [(one.name, one.kind, ", ".join(one.changes), "; ".join(one.left_alone)) for one in report.modules]
    shown = [_table(("module", "class", "changed by", "left alone"), rows[:_MOST_MODULES])]
    if len(rows) > _MOST_MODULES:
        shown.append(f"<p>and {len(rows) - _MOST_MODULES} more modules.</p>")
    return ["<h2>Modules</h2>", *shown]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    kept = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    head = "".join(f"<th>{escape(heads[column])}</th>" for column in kept)
    body = "".join(f"<tr>{''.join(f'<td>{escape(row[column])}</td>' for column in kept)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
