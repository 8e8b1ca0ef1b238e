"""Masks that differ by batch entry or by query: packed documents, padding, and intervals of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kernel_pytorch.masks import code as mask_code
from kernel_pytorch.masks.code import Node
from kernel_pytorch.masks.layout import layout
from kernel_pytorch.masks.mask import Mask, checked_count, leaf, made, traced

__all__ = ["documents", "intervals", "padding"]

Lengths = Sequence[int] | Sequence[Sequence[int]] | torch.Tensor
Array = np.ndarray[Any, Any]


def documents(
    lengths: Lengths | None = None,
    inner: Mask | Sequence[Mask] | None = None,
    *,
    query_lengths: Lengths | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> Mask:
    """Return a mask of packed sequences: a query attends only within its document, with ``inner`` at local positions.

    Args:
        lengths: the documents' lengths, which must sum to the number of keys; or one such list per batch entry.
        inner: the mask inside a document, ``full()`` if None; or a list with one mask per document. None of them may
            be ``documents``, ``blocks``, ``intervals`` or ``padding``.
        query_lengths: number of queries of each document if it differs from its number of keys, as in
            cross-attention or with caches of unequal length. The last query of a document is at the position of its
            last key.
        cu_seqlens: cumulative lengths, starting with 0, as in FlashAttention, instead of ``lengths``. A tensor on a
            GPU is copied to the host once, which synchronizes.

    Example:
        >>> import kernel_pytorch as kp
        >>> kp.masks.documents([2, 1], kp.masks.causal()).dense(3, 3)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
        >>> kp.masks.documents([3, 1], query_lengths=[1, 2]).dense(3, 4)[0, 0].int().tolist()
        [[1, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1]]
    """
    if cu_seqlens is not None:
        if lengths is not None:
            raise ValueError("lengths and cu_seqlens: give one of the two")
        lengths = _lengths_of(cu_seqlens)
    inner = leaf(mask_code.FULL) if inner is None else inner
    if torch.compiler.is_compiling():
        if query_lengths is not None or not isinstance(inner, Mask):
            raise RuntimeError(
                "documents() with query_lengths or several inner masks in a compiled function: make it outside and "
                "pass the mask in as an argument"
            )
        return _traced_documents(lengths, inner)
    keys = _checked_lengths("lengths", lengths)
    if not isinstance(inner, Mask) or query_lengths is not None:
        queries = keys if query_lengths is None else _checked_lengths("query_lengths", query_lengths)
        return _unequal_documents(keys, queries, inner)
    mask_code.check_documents(keys, inner.node)
    numbers = [len(keys)]
    for row in keys:
        numbers += [len(row), *row]
    return made(Node(mask_code.DOCUMENTS, tuple(numbers), (inner.node,)))


def _lengths_of(cu_seqlens: torch.Tensor) -> torch.Tensor:
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.ndim not in (1, 2) or cu_seqlens.is_floating_point():
        raise TypeError(f"cu_seqlens={cu_seqlens!r}: expected a tensor of whole numbers, (documents + 1,)")
    if torch.compiler.is_compiling():
        return cu_seqlens.diff(dim=-1)
    ends = cu_seqlens.cpu()  # the only copy to the host and the only synchronization
    if ends.shape[-1] == 0 or bool((ends[..., 0] != 0).any()):
        raise ValueError(f"cu_seqlens={ends.tolist()}: it must begin with 0")
    return ends.diff(dim=-1)


def _checked_lengths(name: str, lengths: Any) -> list[Sequence[int]]:
    """Return lengths as one list per batch entry."""
    rows: Any = lengths.tolist() if isinstance(lengths, (torch.Tensor, np.ndarray)) else lengths
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise TypeError(f"{name}={lengths!r}: expected a list of lengths, or such a list for each batch entry")
    if not rows:
        raise ValueError(f"{name}=[]: name at least one document")
    batched = rows if isinstance(rows[0], Sequence) else [rows]
    for row in batched:
        if not isinstance(row, Sequence):
            raise TypeError(f"{name}={lengths!r}: {row!r} among lists; use one list for each batch entry")
    return [[checked_count(name, length) for length in row] for row in batched]


def _traced_documents(lengths: Any, inner: Mask) -> Mask:
    """Build ``documents`` while tracing, from the codes only; invalid lengths raise an error when the graph runs."""
    if isinstance(lengths, torch.Tensor):
        rows = lengths.reshape(-1, lengths.shape[-1]).to("cpu", torch.int64)
        batch, count = rows.shape
        numbers = torch.cat([torch.full((batch, 1), count), rows], dim=1).reshape(-1)
    else:
        listed = lengths if isinstance(lengths[0], (list, tuple)) else [lengths]
        batch = len(listed)
        numbers = torch.tensor([n for row in listed for n in (len(row), *row)], dtype=torch.int64)
    return traced(mask_code.DOCUMENTS, torch.cat([torch.tensor([batch], dtype=torch.int64), numbers]), inner)


def _unequal_documents(
    keys: list[Sequence[int]], queries: list[Sequence[int]], inner: Mask | Sequence[Mask]
) -> Mask:
    """Return documents as intervals, for query lengths that differ from key lengths or several inner masks."""
    if [len(row) for row in keys] != [len(row) for row in queries]:
        raise ValueError(
            f"lengths={keys} and query_lengths={queries}: give each document both, in every entry of the batch"
        )
    for name, rows in (("lengths", keys), ("query_lengths", queries)):
        sums = [sum(row) for row in rows]
        if len(set(sums)) != 1:
            raise ValueError(f"{name} sum to {sums}: every entry of the batch must sum to the same number")
    entries = []
    for key_row, query_row in zip(keys, queries, strict=True):
        own = [inner] * len(key_row) if isinstance(inner, Mask) else list(inner)
        if len(own) != len(key_row) or not all(isinstance(one, Mask) for one in own):
            raise TypeError(
                f"inner={inner!r}: expected a mask of kp.masks, or one for each of {len(key_row)} documents"
            )
        start, pieces = 0, []
        for mask, kv_len, q_len in zip(own, key_row, query_row, strict=True):
            mask_code.check_documents([[kv_len]], mask.node)
            known = layout(mask.node, q_len, kv_len)
            used = known.last > known.first
            pieces.append((np.where(used, known.first + start, 0)[0], np.where(used, known.last + start, 0)[0]))
            start += kv_len
        slots = max(len(first) for first, _ in pieces)
        grown = [[np.pad(ends, ((0, slots - len(ends)), (0, 0))) for ends in piece] for piece in pieces]
        entries.append([np.concatenate(ends, axis=-1) for ends in zip(*grown, strict=True)])
    slots = max(len(first) for first, _ in entries)
    padded = [[np.pad(ends, ((0, slots - len(ends)), (0, 0))) for ends in entry] for entry in entries]
    first, last = (np.stack(ends) for ends in zip(*padded, strict=True))
    return _intervals_mask(first, last)


def intervals(first: torch.Tensor | Array | Sequence[Any], last: torch.Tensor | Array | Sequence[Any]) -> Mask:
    """Return a mask in which each query attends to the keys from its ``first`` to before its ``last``.

    Args:
        first, last: whole numbers of shape (queries,), (batch, queries) or, for a union of several intervals,
            (batch, slots, queries). An interval with last <= first is empty.

    Example:
        >>> import kernel_pytorch as kp
        >>> kp.masks.intervals([0, 0, 2], [1, 3, 4]).dense(3, 4)[0, 0].int().tolist()
        [[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 1, 1]]
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "intervals() in a compiled function: make it outside and pass the mask in as an argument"
        )
    arrays = []
    for name, ends in (("first", first), ("last", last)):
        array = ends.detach().cpu().numpy() if isinstance(ends, torch.Tensor) else np.asarray(ends)
        if array.dtype.kind not in "iu":
            raise TypeError(f"{name} has dtype {array.dtype}: use whole numbers")
        if not 1 <= array.ndim <= 3:
            raise ValueError(
                f"{name} has shape {list(array.shape)}: use (queries,), (batch, queries) or (batch, slots, queries)"
            )
        if array.size and int(array.min()) < 0:
            raise ValueError(f"{name} holds {array.min()}: keys count from 0")
        arrays.append(array[None, None] if array.ndim == 1 else array[:, None] if array.ndim == 2 else array)
    if arrays[0].shape != arrays[1].shape or 0 in arrays[0].shape[:2]:
        raise ValueError(f"first has shape {list(arrays[0].shape)} and last {list(arrays[1].shape)}: use one shape")
    return _intervals_mask(arrays[0], arrays[1])


def _intervals_mask(first: Array, last: Array) -> Mask:
    used = last > first
    ends = [np.where(used, ends, 0).astype(np.int64).reshape(-1).tolist() for ends in (first, last)]
    return made(Node(mask_code.INTERVALS, (*first.shape, *ends[0], *ends[1])))


def padding(lengths: Sequence[int] | torch.Tensor, side: str = "right") -> Mask:
    """Return a mask in which queries attend to the tokens of their batch entry and not to its padding.

    Args:
        lengths: number of tokens of each batch entry, (batch,).
        side: the side of the padding, ``"right"`` or ``"left"``.

    Example:
        >>> import kernel_pytorch as kp
        >>> (kp.masks.causal() & kp.masks.padding([1, 3], side="left")).dense(3, 3)[0, 0].int().tolist()
        [[0, 0, 0], [0, 0, 0], [0, 0, 1]]
    """
    if side not in mask_code.PADDING_SIDES:
        raise ValueError(f"side={side!r}: use 'left' or 'right'")
    number = mask_code.PADDING_SIDES.index(side)
    if torch.compiler.is_compiling():
        rows = lengths if isinstance(lengths, torch.Tensor) else torch.tensor(lengths)
        head = torch.tensor([rows.shape[0], number], dtype=torch.int64)
        return traced(mask_code.PADDING, torch.cat([head, rows.to("cpu", torch.int64)]))
    listed: Any = lengths.tolist() if isinstance(lengths, (torch.Tensor, np.ndarray)) else lengths
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise TypeError(f"lengths={lengths!r}: expected the number of tokens of each batch entry")
    counts = [checked_count("lengths", length) for length in listed]
    return made(Node(mask_code.PADDING, (len(counts), number, *counts)))
