"""Self-contained HTML pages for reports: inline CSS and SVG, no scripts, fonts or other files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["STYLE", "bar_chart", "document", "table"]

STYLE = """
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
    """Return a bar chart of (name, value, text) as SVG; the first bar is drawn as the baseline."""
    widest = max(value for _, value, _ in rows) or 1.0
    height, parts = 34, []
    for number, (name, value, text) in enumerate(rows):
        top, width = number * height, 340 * value / widest
        colour = "var(--bar)" if number else "var(--before)"
        parts.append(
            f'<text x="0" y="{top + 21}">{escape(name)}</text>'
            f'<rect x="190" y="{top + 4}" width="{width:.1f}" height="24" rx="3" fill="{colour}"/>'
            f'<text x="{196 + width:.1f}" y="{top + 21}">{escape(text)}</text>'
        )
    said = ", ".join(f"{name} {text}" for name, _, text in rows)
    return (
        f'<svg viewBox="0 0 600 {height * len(rows)}" role="img" aria-label="{escape(label)}: {escape(said)}">'
        f"{''.join(parts)}</svg>"
    )
