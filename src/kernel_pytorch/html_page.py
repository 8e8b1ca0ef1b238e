"""Self-contained HTML pages for reports: inline CSS, no scripts, no fonts and no files beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["bar_chart", "document", "table"]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #3b82c4; --before: #9aa3ad; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.note { border-left: 4px solid #d9822b; padding-left: .7rem; }
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


def document(title: str, body: Iterable[str], style: str = _STYLE) -> str:
    """Return a page, readable on a phone, with these elements of HTML one after another; ``style`` is its CSS."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>\n'
        f"<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, which scrolls sideways where the screen is narrow; columns without any text are left out.

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
