"""Self-contained HTML pages for reports: inline CSS, no scripts, fonts or other files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

__all__ = ["STYLE", "bar_chart", "document", "line_chart", "table"]

STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #3b82c4; --before: #9aa3ad; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.note { border-left: 4px solid #d9822b; padding-left: .7rem; }
svg { width: 100%; height: auto; } svg text { font: 13px system-ui, sans-serif; fill: currentColor; }
.bars { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr max-content; gap: .4rem .7rem; }
.bars { margin-bottom: 1rem; }
.bars > span { align-self: center; overflow-wrap: anywhere; }
.bars i { display: block; height: 1.4rem; border-radius: 3px; background: var(--bar); min-width: 2px; }
.bars span:nth-child(2) i { background: var(--before); }
@media (max-width: 40rem) {
  .bars { grid-template-columns: 1fr max-content; }
  .bars > span:nth-child(3n + 1) { grid-column: 1 / 3; margin-top: .3rem; }
}
code { font-size: .9em; overflow-wrap: anywhere; }
"""


def document(title: str, body: Iterable[str], style: str = STYLE) -> str:
    """Return an HTML page, readable on a phone, with ``body`` as its elements and ``style`` as its CSS."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>\n'
        f"<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table that scrolls sideways on a narrow screen. Empty columns are left out.

    Example:
        >>> "<td>1 &lt; 2</td>" in table(["relation"], [["1 < 2"]])
        True
    """
    rows = list(rows)
    kept = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    head = "".join(f"<th>{escape(heads[column])}</th>" for column in kept)
    body = "".join(f"<tr>{''.join(f'<td>{escape(row[column])}</td>' for column in kept)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def bar_chart(rows: Sequence[tuple[str, float, str]], label: str) -> str:
    """Return horizontal bars of (name, value, text); the first is drawn as the baseline.

    Example:
        >>> '<i style="width: 50.0%"></i>' in bar_chart([("before", 2.0, "2 ms"), ("after", 1.0, "1 ms")], "time")
        True
    """
    widest = max((value for _, value, _ in rows), default=0.0) or 1.0
    parts = [
        f'<span>{escape(name)}</span><span class="bar"><i style="width: {100 * value / widest:.1f}%"></i></span>'
        f"<span>{escape(text)}</span>"
        for name, value, text in rows
    ]
    said = ", ".join(f"{name} {text}" for name, _, text in rows)
    return f'<div class="bars" role="img" aria-label="{escape(label)}: {escape(said)}">{"".join(parts)}</div>'


def line_chart(series: Mapping[str, Sequence[float]], label: str) -> str:
    """Return curves over their steps, from zero; the first is the baseline, dashed and on top of the others.

    Example:
        >>> "polyline" in line_chart({"before": [3.0, 2.0], "after": [3.0, 1.0]}, "loss")
        True
    """
    width, height = 580, 180
    highest = max(max(values) for values in series.values()) or 1.0
    parts = [f'<text x="0" y="14">{escape(label)}, {highest:.3g} at the top, 0 at the bottom</text>']
    for number, (name, values) in reversed(list(enumerate(series.items()))):
        colour, dashes = ("var(--bar)", "") if number else ("var(--before)", ' stroke-dasharray="6 6"')
        points = " ".join(
            f"{width * place / max(len(values) - 1, 1):.1f},{24 + (height - 24) * (1 - value / highest):.1f}"
            for place, value in enumerate(values)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts.append(f'<text x="{150 * number}" y="{height + 20}" style="fill:{colour}">{escape(name)}</text>')
    ends = ", ".join(f"{name} ends at {values[-1]:.3g}" for name, values in series.items())
    return (
        f'<svg viewBox="0 0 600 {height + 28}" role="img" aria-label="{escape(label)}: {escape(ends)}">'
        f"{''.join(parts)}</svg>"
    )
