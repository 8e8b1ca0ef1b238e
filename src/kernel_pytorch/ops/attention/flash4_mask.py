"""The mask function that FlashAttention-4 compiles for partial tiles: whether a key is in one of a query's intervals.

The function reads the intervals from tensors, so a new mask needs no compilation. Imported with the library.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
from flash_attn.cute import utils

__all__ = ["in_intervals"]


@cache
def in_intervals(slots: int, batched: bool) -> Callable[..., Any]:
    """Return the mask function for a number of intervals per query, which may differ by batch entry."""

    @cute.jit
    def attends(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        first, last = aux_tensors[0], aux_tensors[1]
        entry = batch[0] if cutlass.const_expr(batched) else 0
        begin = utils.scalar_to_ssa(first[entry, 0, m_idx[0]], cutlass.Int32)
        end = utils.scalar_to_ssa(last[entry, 0, m_idx[0]], cutlass.Int32)
        found = (n_idx >= begin) & (n_idx < end)
        for slot in cutlass.range_constexpr(1, slots):
            begin = utils.scalar_to_ssa(first[entry, slot, m_idx[0]], cutlass.Int32)
            end = utils.scalar_to_ssa(last[entry, slot, m_idx[0]], cutlass.Int32)
            found = found | ((n_idx >= begin) & (n_idx < end))
        return found

    return attends  # type: ignore[no-any-return]
