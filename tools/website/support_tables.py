"""Render the support table as Markdown: by kernel, and by op."""

from __future__ import annotations

from kernel_pytorch.documentation.support import Status, support_table
from kernel_pytorch.hardware_abstraction.registry import Backend

__all__ = ["matrix_markdown", "support_markdown"]


def support_markdown(shown: tuple[Backend, ...] | None = None) -> str:
    """Return the full table: one row per op and kernel, one column per backend."""
    table = support_table(shown)
    columns = list(dict.fromkeys(row.backend for row in table))
    cells = {(row.op, row.kernel, row.backend): row for row in table}
    lines = ["| Op | Kernel | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for op, kernel in dict.fromkeys((row.op, row.kernel) for row in table):
        texts = []
        for column in columns:
            row = cells.get((op, kernel, column))
            text = "" if row is None else f"**{row.status.value}**" + (f": {row.detail}" if row.detail else "")
            texts.append(text)
        lines.append(f"| `{op}` | `{kernel}` | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def matrix_markdown(shown: tuple[Backend, ...] | None = None) -> str:
    """Return the table by op: one column per backend, with the best test status of any kernel and its name."""
    table = support_table(shown)
    columns = list(dict.fromkeys(row.backend for row in table))
    lines = ["| Op | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for op in dict.fromkeys(row.op for row in table):
        texts = []
        for column in columns:
            rows = [row for row in table if (row.op, row.backend) == (op, column)]
            best = next((status for status in Status if any(row.status is status for row in rows)), None)
            kernels = ", ".join(f"`{row.kernel}`" for row in rows if row.status is best)
            texts.append(f"**{best.value}**: {kernels}" if best else "no kernel")
        lines.append(f"| `{op}` | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"
