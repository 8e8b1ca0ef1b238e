"""Render an FP8 report as one self-contained HTML page, readable on a phone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel_pytorch.fp8.summary import LayerGroup

__all__ = ["page"]

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


def page(summary: str, groups: Sequence[LayerGroup], remarks: Sequence[str]) -> str:
    """Return the page: the summary, what is not covered, and a card for each group of layers."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>FP8 report</title><style>{_STYLE}</style></head><body>",
        f'<h1>FP8 report</h1><p class="summary">{escape(summary)}</p>',
    ]
    if remarks:
        parts.append(f"<h2>Remarks</h2>{_list(remarks)}")
    parts.append("<h2>Converted layers</h2>")
    parts += map(_card, groups)
    parts.append("</body></html>")
    return "\n".join(parts) + "\n"


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
