"""Attention masks as small expressions, composed with ``&`` and ``|``, without an N x N tensor.

With i the position of a query and j of a key: ``full()``; ``causal()``: j <= i; ``window(left, right)``:
i - left <= j <= i + right; ``sinks(n)``: j < n; ``prefix(n)``: i < n and j < n; ``documents(lengths, inner)``:
packed sequences, each with ``inner`` at its own positions; ``padding(lengths, side)``: the tokens of each batch
entry; ``dilated(step, left, right)``: every step-th position; ``intervals(first, last)``: any intervals of keys;
``blocks(table, block)``: any table of tiles; ``from_dense(keep)``: a tensor of booleans. When there are fewer queries
than keys, the last query is at the last key's position.

A mask does not depend on lengths until it is used. torch.compile and torch.export see it as one tensor of integers
(``Mask.code``), so that other lengths, windows or tables need no new graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kernel_pytorch.masks import code as mask_code
from kernel_pytorch.masks.code import Node
from kernel_pytorch.masks.from_tensor import from_dense
from kernel_pytorch.masks.mask import Mask, checked_count, leaf, made
from kernel_pytorch.masks.mask import from_code as from_code
from kernel_pytorch.masks.packing import documents, intervals, padding

__all__ = [
    "Mask",
    "blocks",
    "causal",
    "dilated",
    "documents",
    "from_dense",
    "full",
    "intervals",
    "padding",
    "prefix",
    "sinks",
    "window",
]


def full() -> Mask:
    """Return a mask in which every query attends to every key."""
    return leaf(mask_code.FULL)


def causal() -> Mask:
    """Return a mask in which a query attends to its own position and those before it: j <= i.

    Example:
        >>> import kernel_pytorch as kp
        >>> kp.masks.causal().density(1000, 1000)
        0.5005
    """
    return leaf(mask_code.CAUSAL)


def window(left: int, right: int = 0) -> Mask:
    """Return a sliding window: ``left`` positions before the query, its own, and ``right`` positions after it."""
    return leaf(mask_code.WINDOW, checked_count("left", left), checked_count("right", right))


def sinks(n: int) -> Mask:
    """Return a mask in which every query attends to the first n keys: j < n."""
    return leaf(mask_code.SINKS, checked_count("n", n))


def prefix(n: int) -> Mask:
    """Return a mask in which the first n positions attend to each other: i < n and j < n."""
    return leaf(mask_code.PREFIX, checked_count("n", n))


def dilated(step: int, left: int, right: int = 0) -> Mask:
    """Return a dilated window: every ``step``-th position, ``left`` before the query's own and ``right`` after it.

    A query then has ``left + right + 1`` intervals of one key, at most 256. For longer dilated windows, reorder the
    tokens by their position modulo ``step``: the mask is then ``documents(..., window(left, right))`` over contiguous
    keys, which kernels compute in whole tiles.

    Example:
        >>> import kernel_pytorch as kp
        >>> print(kp.masks.dilated(2, left=2).show(6))
        █
         █
        █ █
         █ █
        █ █ █
         █ █ █
    """
    numbers = (checked_count("step", step, 1), checked_count("left", left), checked_count("right", right))
    if left + right >= 256:
        raise ValueError(
            f"left={left}, right={right}: at most 256 positions in all; reorder the tokens by position modulo "
            f"step={step} and use documents(..., window({left}, {right}))"
        )
    if step * max(left, right) >= 1 << 30:
        raise ValueError(f"step={step}: use less than 2 ** 30 for the distance of the furthest position")
    return leaf(mask_code.DILATED, *numbers)


def blocks(
    table: torch.Tensor | np.ndarray[Any, Any] | tuple[torch.Tensor, torch.Tensor], block: int = 128
) -> Mask:
    """Return a block mask: query tile r attends to key tile c if ``table[..., r, c]`` is true.

    Args:
        table: booleans of shape (rows, columns), (heads, rows, columns) or (batch, heads, rows, columns); or a
            pair (offsets, columns) in CSR form, shared by all heads.
        block: number of queries and of keys of a tile, a multiple of 16.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> kp.masks.blocks(torch.eye(2, dtype=torch.bool), block=16).density(32, 32)
        0.5
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("blocks() in a compiled function: make it outside and pass the mask in as an argument")
    block = checked_count("block", block, 16)
    if block % 16:
        raise ValueError(f"block={block}: use a multiple of 16")
    return made(Node(mask_code.BLOCKS, mask_code.table_numbers(table, block)))
