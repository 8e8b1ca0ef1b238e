"""Convert boolean tensors to masks: the intervals of keys that each query attends to."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernel_pytorch.masks import code as mask_code
from kernel_pytorch.masks.mask import Mask, leaf
from kernel_pytorch.masks.packing import intervals

__all__ = ["from_dense", "from_rows"]

_MOST_INTERVALS = 64  # kernels compare every key of a partial tile with each interval
_PAIRS_A_CHUNK = 1 << 24


def from_dense(keep: torch.Tensor) -> Mask:
    """Return the mask of a boolean tensor, true where a query attends to a key.

    Args:
        keep: (queries, keys) or (batch, 1, queries, keys). A query may attend to at most 64 separate runs of keys.
            For masks that differ by head, pass a bias of -inf: ``kp.attention(bias=...)``.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> kp.masks.from_dense(torch.ones(4, 4, dtype=torch.bool).tril())
        causal()
    """
    if not isinstance(keep, torch.Tensor) or keep.dtype != torch.bool:
        shown = keep.dtype if isinstance(keep, torch.Tensor) else repr(keep)
        raise TypeError(f"keep={shown}: expected a tensor of booleans, true where a query attends to a key")
    if keep.ndim not in (2, 4) or (keep.ndim == 4 and keep.shape[1] != 1) or keep.shape[0] == 0:
        raise ValueError(f"keep has shape {list(keep.shape)}: use (queries, keys) or (batch, 1, queries, keys)")
    rows = keep[None] if keep.ndim == 2 else keep[:, 0]
    return from_rows(lambda begin, end: rows[:, begin:end], rows.shape[1], rows.shape[2])


def from_rows(rows: Callable[[int, int], torch.Tensor], q_len: int, kv_len: int) -> Mask:
    """Return a mask from a function that computes row chunks, so that a mask of any length fits into memory.

    Args:
        rows: ``rows(begin, end)`` returns the queries from begin to end as booleans, (batch, end - begin, kv_len).
    """
    step = max(1, _PAIRS_A_CHUNK // max(1, kv_len))
    found = [_runs(rows(begin, min(q_len, begin + step))) for begin in range(0, max(q_len, 1), step)]
    slots = max(first.shape[1] for first, _ in found)
    first, last = (
        torch.cat([torch.nn.functional.pad(ends[n], (0, 0, 0, slots - ends[n].shape[1])) for ends in found], dim=2)
        for n in range(2)
    )
    if slots == 1:
        if bool((first == 0).all()) and bool((last == kv_len).all()):
            return leaf(mask_code.FULL)
        ends = torch.arange(kv_len - q_len, kv_len).clamp_(min=-1) + 1
        if bool((first == 0).all()) and bool((last == ends).all()):
            return leaf(mask_code.CAUSAL)
    if len(first) > 1 and bool((first == first[:1]).all()) and bool((last == last[:1]).all()):
        first, last = first[:1], last[:1]
    return intervals(first, last)


def _runs(keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and last (exclusive) key of each run of keys, (batch, slots, queries), on the CPU."""
    edge = torch.zeros_like(keep[..., :1])
    before = torch.cat([edge, keep[..., :-1]], dim=-1)
    after = torch.cat([keep[..., 1:], edge], dim=-1)
    starts, ends = (keep & ~before).nonzero().cpu(), (keep & ~after).nonzero().cpu()
    batch, queries = keep.shape[:2]
    row = starts[:, 0] * queries + starts[:, 1]
    counts = torch.bincount(row, minlength=batch * queries)
    slots = max(1, int(counts.max())) if counts.numel() else 1
    if slots > _MOST_INTERVALS:
        raise ValueError(
            f"keep has a query that attends to {slots} separate runs of keys: at most {_MOST_INTERVALS} are a mask; "
            "use kp.masks.blocks for tables of tiles, or bias=torch.where(keep, 0.0, -torch.inf)"
        )
    slot = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    first, last = (torch.zeros(batch, slots, queries, dtype=torch.int64) for _ in range(2))
    at = (starts[:, 0], slot, starts[:, 1])
    first[at], last[at] = starts[:, 2], ends[:, 2] + 1
    return first, last
