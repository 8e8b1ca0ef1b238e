"""Draw a mask as text or PNG; a cell's shade is the fraction of its pairs that the mask keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kernel_pytorch.masks.layout import Array, Layout

__all__ = ["draw_png", "draw_text", "shares"]

_SHADES = " ░▒▓█"


def shares(known: Layout, size: int) -> Array:
    """Return the fraction of kept pairs in each cell, (rows, columns), of the first batch entry and head.

    The queries of a cell are sampled, so the cost does not depend on the length.
    """
    rows, columns = min(size, known.q_len), min(size, known.kv_len)
    edges = np.linspace(0, known.kv_len, columns + 1)
    picture = np.zeros((rows, columns))
    for row in range(rows):
        begin, end = row * known.q_len // rows, max(row * known.q_len // rows + 1, (row + 1) * known.q_len // rows)
        queries = np.unique(np.linspace(begin, end - 1, min(end - begin, 64)).astype(np.int64))
        for query in queries:
            for first, last in known.intervals_of(int(query)):
                covered = np.minimum(edges[1:], last) - np.maximum(edges[:-1], first)
                picture[row] += covered.clip(0) / np.diff(edges) / len(queries)
    return picture


def draw_text(known: Layout, size: int) -> str:
    if size < 1:
        raise ValueError(f"size={size}: use 1 or more")
    picture = shares(known, size)
    # Only an empty cell is blank.
    levels = np.where(picture > 0, np.maximum(1, np.round(picture * (len(_SHADES) - 1))), 0).astype(int)
    return "\n".join("".join(_SHADES[level] for level in row).rstrip() for row in levels)


def draw_png(known: Layout, path: Path, title: str, size: int = 512) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing a PNG needs matplotlib: pip install 'kernel-pytorch[plots]'") from error
    figure = Figure(figsize=(5, 5.3), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow(
        shares(known, size),
        cmap="Blues",
        vmin=0,
        vmax=1,
        extent=(0, known.kv_len, known.q_len, 0),
        aspect=known.kv_len / max(known.q_len, 1),
        interpolation="nearest",
    )
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.set_title(f"{title}\n{known.density:.2%} of pairs attend", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
