"""Attention with soft-capping, ALiBi, bias and sinks in plain torch operations: the tiled kernel's tiles."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.ops.attention.definition import lse_dtype, lse_flows, result_dtype
from kernel_pytorch.ops.attention.score_mod import Terms, sink_gradient
from kernel_pytorch.ops.attention.sink_logits import with_sink_logits
from kernel_pytorch.ops.attention.tiled_kernel import Piece, Scores, Work, grouped, tiled_backward, tiled_forward

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask

__all__ = ["backward", "forward"]


class _ModifiedScores(Scores):
    """``cap(q k^T * scale) - slope * |i - j| + bias``, tile by tile, and the gradient of the bias."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, terms: Terms) -> None:
        wide = lse_dtype(q.dtype)
        self.softcap, self.kv_len, self.offset = terms.softcap, k.shape[2], k.shape[2] - q.shape[2]
        self.slopes: torch.Tensor | None = None if terms.slopes is None else terms.slopes.to(wide)
        self.bias = None if terms.bias is None else terms.bias.expand(*q.shape[:3], k.shape[2])
        self.dbias = None
        if terms.bias is not None and terms.bias_grad:
            self.dbias = torch.zeros(terms.bias.shape, dtype=wide, device=q.device)
        self.slope_of_cap: torch.Tensor | None = None

    def forward(
        self, work: Work, piece: Piece, q_tile: torch.Tensor, k_piece: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        scores = torch.bmm(q_tile, k_piece.transpose(1, 2))
        if self.softcap:
            tanh = scores.div_(self.softcap).tanh_()
            self.slope_of_cap = 1 - tanh.square()
            scores = tanh * self.softcap
        if self.slopes is not None:
            scores -= self._alibi(work, piece, scores)
        nothing = piece.nothing
        if self.bias is not None:
            scores += _picked(self.bias, work, piece).to(scores.dtype)
            if piece.bias is not None:
                scores += piece.bias
            dead = scores.amax(dim=-1, keepdim=True) == -math.inf
            # Rows that the bias masks completely would give NaN: compute them with equal scores and zero them later.
            scores.masked_fill_(dead, 0.0)
            nothing = dead if nothing is None else dead | nothing
        elif piece.bias is not None:
            scores += piece.bias
        return scores, nothing

    def backward(self, work: Work, piece: Piece, ds: torch.Tensor) -> torch.Tensor:
        if self.dbias is not None:
            self._add_to_bias(work, piece, ds)
        return ds if self.slope_of_cap is None else ds * self.slope_of_cap

    def _alibi(self, work: Work, piece: Piece, like: torch.Tensor) -> torch.Tensor:
        assert self.slopes is not None
        i = torch.arange(work.queries.start, work.queries.stop, device=like.device, dtype=like.dtype) + self.offset
        j = torch.arange(self.kv_len, device=like.device, dtype=like.dtype)[piece.keys]
        distance = (i.unsqueeze(-1) - j).abs_()
        slopes = self.slopes[work.heads]
        entries = like.shape[0] // (work.kv_heads.stop - work.kv_heads.start)
        every = (slopes.view(-1, 1, 1) * distance).expand(entries, -1, -1, -1)
        return every.reshape(like.shape)

    def _add_to_bias(self, work: Work, piece: Piece, ds: torch.Tensor) -> None:
        assert self.dbias is not None
        total, where = self.dbias, (work.batch, work.heads, work.queries)
        own = total[tuple(slice(None) if n == 1 else at for n, at in zip(total.shape, where, strict=False))]
        queries = work.queries.stop - work.queries.start
        part = ds.reshape(-1, work.heads.stop - work.heads.start, queries, ds.shape[-1])
        if total.shape[3] == 1:
            own += part.sum_to_size(own.shape)
        elif isinstance(piece.keys, slice):
            own[..., piece.keys] += part.sum_to_size(own[..., piece.keys].shape)
        else:
            own.index_add_(3, piece.keys, part.sum_to_size((*own.shape[:3], len(piece.keys))))


def _picked(bias: torch.Tensor, work: Work, piece: Piece) -> torch.Tensor:
    if isinstance(piece.keys, slice):
        return grouped(bias[..., piece.keys], work)
    return grouped(bias.index_select(3, piece.keys), work)


def forward(
    device: Device,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    scale: float,
    wanted: str,
    *modifying: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    terms = Terms(*modifying)
    scoring = _ModifiedScores(q, k, terms)
    if terms.sinks is None:
        return tiled_forward(q, k, v, mask, scale, wanted, scoring)
    out, lse = tiled_forward(q, k, v, mask, scale, "parts", scoring)  # unrounded
    return with_sink_logits(out, lse, terms.sinks, result_dtype(q.dtype, wanted))


def backward(
    device: Device,
    dout: torch.Tensor,
    dlse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: Mask,
    scale: float,
    wanted: str,
    *modifying: Any,
) -> tuple[torch.Tensor, ...]:
    terms = Terms(*modifying)
    scoring = _ModifiedScores(q, k, terms)
    gradients = tiled_backward(dout, dlse, q, k, v, out, lse, mask, scale, wanted, scoring)
    dbias = q.new_empty(0) if scoring.dbias is None else scoring.dbias.to(terms.bias.dtype)
    dsinks = q.new_empty(0)
    if terms.sinks is not None:
        delta = (out.to(lse.dtype) * dout.to(lse.dtype)).sum(dim=-1)
        dsinks = sink_gradient(terms.sinks, lse, delta - dlse if lse_flows(wanted) else delta)
    return (*gradients, dbias, dsinks)
