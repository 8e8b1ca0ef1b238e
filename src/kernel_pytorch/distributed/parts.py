"""Attention over blocks of keys, with partial results merged in float32: the computation of every schedule.

A ``Part`` is a block of keys with its sub-mask. Its partial result is (out, lse); partial results over different keys
are merged exactly by their log-sum-exp. The gradients of a block follow from the lse over all keys, so partial dq are
summed, and partial dk and dv are summed on the rank that owns the keys.

Shapes: B batch, H query heads, G key heads, Q queries of this rank, K keys of a block, D head dimension, E value head
dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.selection import Policy
from kernel_pytorch.masks import Mask
from kernel_pytorch.masks.part import Ranges
from kernel_pytorch.ops.attention.definition import ATTENTION, lse_dtype

__all__ = ["NO_SECOND_DERIVATIVE", "Part", "Terms", "add_to_ranges", "attend", "attend_backward", "joined_ranges"]

NO_SECOND_DERIVATIVE = (
    "attention has no second derivative: leave out create_graph=True, or differentiate its formula in plain torch "
    "operations"
)


@dataclass(frozen=True)
class Part:
    """A block of keys, and the rows of this rank's queries that attend to any of them."""

    k: torch.Tensor
    """(B, G, K, D)"""
    v: torch.Tensor
    """(B, G, K, E)"""
    mask: Mask
    """The sub-mask of these queries and keys."""
    queries: slice
    """The rows of q that attend to any of these keys."""


@dataclass(frozen=True)
class Terms:
    """The arguments that all blocks of a call share."""

    scale: float
    policy: str = ""
    """The encoded policy of the forward: the backward may run outside of its ``with`` block."""
    lse_flows: bool = False

    @property
    def kernel(self) -> str | None:
        """The pinned kernel, which may round partial results to q's dtype; without one they are float32."""
        return Policy.decode(self.policy).kernel

    def wanted(self, dtype: torch.dtype, *, merged: bool) -> str:
        """Return the kernel's ``wanted`` argument for partial results that are merged, or for the final result."""
        if merged and self.kernel is None and dtype != lse_dtype(dtype):
            return "parts"
        return "lse" if self.lse_flows else "grad"


def attend(
    q: torch.Tensor, parts: Iterable[Part], value_dim: int, terms: Terms, *, merged: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out in q's dtype, lse) of q over all blocks; ``merged`` may be False if there is only one."""
    wide, wanted = lse_dtype(q.dtype), terms.wanted(q.dtype, merged=merged)
    out: torch.Tensor | None = None
    lse = torch.full(q.shape[:3], -math.inf, dtype=wide, device=q.device)
    function = function_of(ATTENTION)
    for part in parts:
        rows = part.queries
        arguments = (q[:, :, rows], part.k, part.v, part.mask, terms.scale, wanted)
        part_out, part_lse = function.run("forward", arguments, terms.policy)
        if out is None:
            if part_lse.shape == lse.shape:
                out, lse = part_out if not merged else part_out.to(wide), part_lse
                continue
            out = torch.zeros((*q.shape[:3], value_dim), dtype=wide, device=q.device)
        total = lse[:, :, rows]
        # exp(part_lse) / (exp(part_lse) + exp(total)); if neither has a key, the result stays zero.
        share = torch.sigmoid(part_lse - total).nan_to_num_(0.0)
        out[:, :, rows].lerp_(part_out.to(wide), share.unsqueeze(-1))
        total.copy_(torch.logaddexp(total, part_lse))
    if out is None:
        out = torch.zeros((*q.shape[:3], value_dim), dtype=q.dtype, device=q.device)
    return out.to(q.dtype), lse


def attend_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    parts: Iterable[Part],
    dq: torch.Tensor,
    give_back: Callable[[torch.Tensor, torch.Tensor], None],
    terms: Terms,
) -> None:
    """Accumulate into dq (float32), and call ``give_back`` with dk and dv of each block, in order."""
    wanted = terms.wanted(q.dtype, merged=True)
    function = function_of(ATTENTION)
    none = torch.zeros((), dtype=lse.dtype, device=lse.device).expand(lse.shape) if dlse is None else dlse
    for part in parts:
        rows = part.queries
        arguments = (
            *(x[:, :, rows] for x in (dout, none, q)),
            part.k,
            part.v,
            *(x[:, :, rows] for x in (out, lse)),
            part.mask,
            terms.scale,
            wanted,
        )
        part_dq, dk, dv = function.run("backward", arguments, terms.policy)
        dq[:, :, rows] += part_dq
        del part_dq
        give_back(dk, dv)


def joined_ranges(x: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """Return some tokens of a tensor of shape (B, heads, tokens, ...); a view if they are one range."""
    if len(ranges) == 1:
        return x[:, :, ranges[0][0] : ranges[0][1]]
    return torch.cat([x[:, :, a:b] for a, b in ranges] or [x[:, :, :0]], dim=2)


def add_to_ranges(total: torch.Tensor, ranges: Ranges, part: torch.Tensor) -> None:
    """Add the concatenated tokens of ``part`` to their ranges in ``total``."""
    at = 0
    for first, last in ranges:
        total[:, :, first:last] += part[:, :, at : at + last - first]
        at += last - first
