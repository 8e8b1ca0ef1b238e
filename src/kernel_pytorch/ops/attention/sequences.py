"""Convert masks to FlashAttention-4's arguments: a window, packed sequences with a window, or a list of tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernel_pytorch.masks import code as mask_code
from kernel_pytorch.masks.code import Node, documents_of
from kernel_pytorch.masks.layout import Layout

__all__ = ["TILE", "PackedSequences", "Window", "packed_sequences", "tile_refusal", "window_of"]

TILE = 128
"""FlashAttention-4's tiles of queries and of keys in a block table, forward and backward."""


@dataclass(frozen=True)
class Window:
    """A query attends to keys from ``left`` before its position to ``right`` after it; None for no bound."""

    left: int | None = None
    right: int | None = None

    def within(self, other: Window) -> Window:
        return Window(_smaller(self.left, other.left), _smaller(self.right, other.right))

    @property
    def is_causal(self) -> bool:
        return self.left is None and self.right == 0


@dataclass(frozen=True)
class PackedSequences:
    """Packed sequences, with the same window inside each."""

    lengths: tuple[tuple[int, ...], ...]
    """For each batch entry, or one row for all."""
    window: Window

    def offsets(self, batch: int) -> list[int]:
        """Return the start of each sequence, with all batch entries joined, and the end of the last."""
        rows = self.lengths if len(self.lengths) == batch else self.lengths * batch
        found = [0]
        for length in (length for row in rows for length in row if length):
            found.append(found[-1] + length)
        return found

    @property
    def longest(self) -> int:
        return max(max(row) for row in self.lengths)


def _smaller(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def window_of(node: Node) -> Window | None:
    """Return the mask as one window, or None."""
    if node.kind == mask_code.FULL:
        return Window()
    if node.kind == mask_code.CAUSAL:
        return Window(right=0)
    if node.kind == mask_code.WINDOW:
        return Window(*(min(size, 1 << 30) for size in node.numbers))
    if node.kind == mask_code.AND:
        left, right = (window_of(child) for child in node.children)
        return left.within(right) if left and right else None
    return None


def packed_sequences(node: Node) -> PackedSequences | None:
    """Return the mask as packed sequences with one window inside each, or None."""
    if node.kind == mask_code.AND:
        # A window is relative to each query's position, so it is the same inside a sequence.
        for documents, other in (node.children, node.children[::-1]):
            packed, window = packed_sequences(documents), window_of(other)
            if packed and window:
                return replace(packed, window=packed.window.within(window))
    if node.kind != mask_code.DOCUMENTS:
        return None
    inner = window_of(node.children[0])
    return PackedSequences(tuple(documents_of(node)), inner) if inner else None


def tile_refusal(known: Layout) -> str | None:
    """Return why a mask with block tables cannot be a list of tiles for FlashAttention-4, or None."""
    if known.finest_block % TILE:
        return f"walks tiles of {TILE}; the mask's blocks are of {known.finest_block}"
    walk = known.walk(TILE, TILE)
    if walk.slots.numel() and walk.slots.min() != walk.slots.max():
        return "compares all partial tiles with the same intervals; this mask's depend on the table's entries"
    return None
