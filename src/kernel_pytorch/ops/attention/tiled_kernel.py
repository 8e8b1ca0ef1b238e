"""Attention in plain torch operations, tile by tile: trains on any device and skips what the mask leaves out.

A tile of queries processes its keys in pieces: adjacent tiles of keys become one piece, scattered ones are gathered.
Only the scores of one piece are in memory. Heads that share a mask are multiplied together. Arithmetic and partial
results are in float32 (float64 for float64).

Shapes: B batch, G key heads, R = query heads of a group x queries of a tile, P keys of a piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.masks.layout import Layout
from kernel_pytorch.ops.attention.definition import lse_dtype, lse_flows, result_dtype

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask

__all__ = ["Piece", "Scores", "Work", "backward", "forward", "grouped", "tiled_backward", "tiled_forward"]

_KEPT_BYTES = 1 << 20
_KEPT_TILES = 4096
_KEYS_A_PIECE = 1024  # scores of a piece fit the second-level cache of a core


@dataclass(frozen=True)
class Piece:
    keys: slice | torch.Tensor
    """A range of keys, or the indices of gathered keys."""
    bias: torch.Tensor | None
    """(R, P): 0 for kept pairs, -inf for masked ones; None if all are kept."""
    nothing: torch.Tensor | None
    """(R, 1) booleans: the rows without a key in the piece; None if there are none."""


@dataclass(frozen=True)
class Work:
    """One tile of queries of the batch entries and heads that share a mask."""

    batch: slice
    heads: slice
    kv_heads: slice
    queries: slice
    row: int
    entry: int


def _work(known: Layout, batch: int, heads: int, group: int) -> Iterator[Work]:
    tile = known.finest_block
    rows = -(-known.q_len // tile)
    for b in range(known.batch):
        for h in range(known.heads):
            entries = slice(b, b + 1) if known.batch > 1 else slice(0, batch)
            own = slice(h, h + 1) if known.heads > 1 else slice(0, heads)
            keys = slice(h // group, h // group + 1) if known.heads > 1 else slice(0, heads // group)
            for t in range(rows):
                queries = slice(t * tile, min(known.q_len, (t + 1) * tile))
                yield Work(entries, own, keys, queries, (b * known.heads + h) * rows + t, b)


class _Cutter:
    """Splits the keys of query tiles into pieces, and caches masks that repeat along the sequence."""

    def __init__(self, known: Layout, group: int, like: torch.Tensor) -> None:
        self.known, self.group, self.like = known, group if known.heads == 1 else 1, like
        self.first, self.last = known.intervals()
        self.walk = [tensor.tolist() for tensor in known.walk(known.finest_block, known.finest_block).tensors()]
        self.made: dict[Any, tuple[torch.Tensor, torch.Tensor | None]] = {}

    @staticmethod
    def of(known: Layout, group: int, like: torch.Tensor) -> _Cutter:
        """Return the layout's cached cutter for such calls; building it is slow compared with a small call."""
        walk = known.walk(known.finest_block, known.finest_block)
        if len(walk.span) + len(walk.full) + len(walk.partial) > _KEPT_TILES:
            return _Cutter(known, group, like)
        key = ("tiled", group, like.dtype, str(like.device))
        return known.keep(key, lambda known: _Cutter(known, group, like.new_empty(0)))

    def trim(self) -> None:
        """Drop large cache entries after a call."""
        if sum(x.numel() * x.element_size() for x in self.tensors()) > _KEPT_BYTES:
            self.made.clear()

    def tensors(self) -> Iterator[torch.Tensor]:
        for bias, nothing in list(self.made.values()):
            yield bias
            if nothing is not None:
                yield nothing

    def pieces(self, work: Work) -> Iterator[Piece]:
        span, full_offsets, full, partial_offsets, listed, slots = self.walk
        tile, row = self.known.finest_block, work.row
        partial = {listed[at]: slots[at] for at in range(partial_offsets[row], partial_offsets[row + 1])}
        columns = sorted([*range(*span[row]), *full[full_offsets[row] : full_offsets[row + 1]], *partial])
        most = max(1, _KEYS_A_PIECE // tile)
        for at in range(0, len(columns), most):
            chosen = columns[at : at + most]
            ranges = [(n * tile, min(self.known.kv_len, (n + 1) * tile)) for n in chosen]
            keys: slice | torch.Tensor = slice(ranges[0][0], ranges[-1][1])
            if chosen[-1] - chosen[0] != len(chosen) - 1:
                keys = torch.cat([torch.arange(first, last) for first, last in ranges]).to(self.like.device)
            if any(n in partial for n in chosen):
                yield Piece(keys, *self._bias(work, keys, chosen, ranges, partial))
            else:
                yield Piece(keys, None, None)

    def _bias(
        self,
        work: Work,
        keys: Any,
        chosen: list[int],
        ranges: list[tuple[int, int]],
        partial: dict[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.known.tables or not isinstance(keys, slice):
            return self._finished(self._allowed(work, chosen, ranges, partial))
        batch = work.entry if self.first.shape[0] > 1 else 0
        width = keys.stop - keys.start
        first = (self.first[batch, :, work.queries] - keys.start).clamp_(0, width)
        last = (self.last[batch, :, work.queries] - keys.start).clamp_(0, width)
        pattern = (width, first.numpy().tobytes(), last.numpy().tobytes())
        found = self.made.get(pattern)
        if found is None:
            key = torch.arange(width, dtype=torch.int32)
            allowed = ((key >= first.unsqueeze(-1)) & (key < last.unsqueeze(-1))).any(dim=0)
            if len(self.made) >= 64:
                self.made.clear()
            self.made[pattern] = found = self._finished(allowed)
        return found

    def _allowed(
        self, work: Work, chosen: list[int], ranges: list[tuple[int, int]], partial: dict[int, int]
    ) -> torch.Tensor:
        """Return (queries, keys) booleans; with block tables, each tile has slots of its own."""
        queries = work.queries
        batch = work.entry if self.first.shape[0] > 1 else 0
        width = sum(last - first for first, last in ranges)
        allowed = torch.ones(queries.stop - queries.start, width, dtype=torch.bool)
        at = 0
        for n, (low, high) in zip(chosen, ranges, strict=True):
            if n in partial:
                slots = slice(partial[n], partial[n] + self.known.slots)
                first = self.first[batch, slots, queries, None]
                last = self.last[batch, slots, queries, None]
                key = torch.arange(low, high, dtype=torch.int32)
                allowed[:, at : at + high - low] = ((key >= first) & (key < last)).any(dim=0)
            at += high - low
        return allowed

    def _finished(self, allowed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = torch.zeros(allowed.shape, dtype=self.like.dtype).masked_fill_(~allowed, -math.inf)
        empty = ~allowed.any(dim=1, keepdim=True)
        nothing = None
        if bool(empty.any()):
            # A row without a key would give NaN: compute it unmasked and zero it later.
            bias.masked_fill_(empty, 0.0)
            nothing = empty.repeat(self.group, 1).to(self.like.device)
        return bias.repeat(self.group, 1).to(self.like.device), nothing


def grouped(x: torch.Tensor, work: Work) -> torch.Tensor:
    """Return the tile's rows as (B * G, R, dim), with the query heads of a group stacked."""
    tile = x[work.batch, work.heads, work.queries]
    kv_heads = work.kv_heads.stop - work.kv_heads.start
    rows = tile.shape[1] // kv_heads * tile.shape[2]
    return tile.reshape(tile.shape[0] * kv_heads, rows, *tile.shape[3:])


def _pick(x: torch.Tensor, work: Work, keys: slice | torch.Tensor) -> torch.Tensor:
    """Return the piece's keys or values as (B * G, P, dim)."""
    own = x[work.batch, work.kv_heads]
    picked = own[:, :, keys] if isinstance(keys, slice) else own.index_select(2, keys)
    return picked.flatten(0, 1)


class Scores:
    """The scores of a tile of queries and a piece of keys, -inf for masked pairs."""

    def forward(
        self,
        work: Work,  # noqa: ARG002
        piece: Piece,
        q_tile: torch.Tensor,
        k_piece: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (B * G, R, P) scores, and the rows without a key, or None."""
        k_t = k_piece.transpose(1, 2)
        if piece.bias is None:
            return torch.bmm(q_tile, k_t), piece.nothing
        return torch.baddbmm(piece.bias.expand(q_tile.shape[0], *piece.bias.shape), q_tile, k_t), piece.nothing

    def backward(self, work: Work, piece: Piece, ds: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Return the gradient of q_tile k_piece^T from that of the scores of the last ``forward``."""
        return ds


def forward(
    device: Device, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, wanted: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return tiled_forward(q, k, v, mask, scale, wanted, Scores())


def tiled_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, wanted: str, scoring: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = lse_dtype(q.dtype)
    batch, heads, q_len, _ = q.shape
    group = heads // k.shape[1]
    known = mask.layout(q_len, k.shape[2])
    out = torch.empty((batch, heads, q_len, v.shape[3]), dtype=result_dtype(q.dtype, wanted), device=q.device)
    lse = torch.empty((batch, heads, q_len), dtype=wide, device=q.device)
    q_wide, k_wide, v_wide = q.to(wide), k.to(wide), v.to(wide)
    cutter = _Cutter.of(known, group, q_wide)
    for work in _work(known, batch, heads, group):
        q_tile = grouped(q_wide, work) * scale
        acc: torch.Tensor | None = None
        sums = torch.empty(0)
        pieces = list(cutter.pieces(work))
        unsummed = wanted == "out" and len(pieces) == 1  # nothing to merge, and lse is not requested
        for piece in pieces:
            scores, nothing = scoring.forward(work, piece, q_tile, _pick(k_wide, work, piece.keys))
            p = torch.softmax(scores, dim=-1)
            part = torch.bmm(p, _pick(v_wide, work, piece.keys))
            if unsummed:
                acc = part if nothing is None else part.masked_fill_(nothing, 0.0)
                continue
            # The largest probability is exp(largest score - lse): two maxima instead of another exponential pass.
            part_sums = scores.amax(dim=-1, keepdim=True) - p.amax(dim=-1, keepdim=True).log_()
            if nothing is not None:
                part.masked_fill_(nothing, 0.0)
                part_sums.masked_fill_(nothing, -math.inf)
            if acc is None:
                acc, sums = part, part_sums
                continue
            both = torch.logaddexp(sums, part_sums)
            safe = both.masked_fill(both == -math.inf, 0.0)
            acc = acc.mul_((sums - safe).exp_()).add_(part.mul_((part_sums - safe).exp_()))
            sums = both
        if acc is None:
            out[work.batch, work.heads, work.queries] = 0.0
            lse[work.batch, work.heads, work.queries] = -math.inf
            continue
        shape = (-1, work.heads.stop - work.heads.start, work.queries.stop - work.queries.start)
        out[work.batch, work.heads, work.queries] = acc.reshape(*shape, v.shape[3])
        if not unsummed:
            lse[work.batch, work.heads, work.queries] = sums.reshape(shape)
    cutter.trim()
    return out, lse


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tiled_backward(dout, dlse, q, k, v, out, lse, mask, scale, wanted, Scores())


def tiled_backward(
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
    scoring: Scores,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = lse.dtype
    batch, heads, q_len, _ = q.shape
    group = heads // k.shape[1]
    known = mask.layout(q_len, k.shape[2])
    q_wide, k_wide, v_wide, dout_wide = q.to(wide), k.to(wide), v.to(wide), dout.to(wide)
    delta = (out.to(wide) * dout_wide).sum(dim=-1)
    if lse_flows(wanted):
        delta = delta - dlse
    # exp(score - inf) is 0, so a query that attends to nothing gives zeros instead of NaN.
    lse_safe = lse.masked_fill(lse == -math.inf, math.inf)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    cutter = _Cutter.of(known, group, q_wide)
    for work in _work(known, batch, heads, group):
        q_tile, dout_tile = grouped(q_wide, work) * scale, grouped(dout_wide, work)
        lse_tile, delta_tile = grouped(lse_safe, work).unsqueeze(-1), grouped(delta, work).unsqueeze(-1)
        dq_tile = torch.zeros_like(q_tile)
        for piece in cutter.pieces(work):
            k_piece, v_piece = _pick(k_wide, work, piece.keys), _pick(v_wide, work, piece.keys)
            scores, nothing = scoring.forward(work, piece, q_tile, k_piece)
            p = scores.sub_(lse_tile).exp_()
            if nothing is not None:
                p.masked_fill_(nothing, 0.0)
            _add(dv, work, piece.keys, torch.bmm(p.transpose(1, 2), dout_tile))
            ds = torch.bmm(dout_tile, v_piece.transpose(1, 2)).sub_(delta_tile).mul_(p)
            ds = scoring.backward(work, piece, ds)
            dq_tile.baddbmm_(ds, k_piece)
            _add(dk, work, piece.keys, torch.bmm(ds.transpose(1, 2), q_tile))
        shape = (-1, work.heads.stop - work.heads.start, work.queries.stop - work.queries.start, q.shape[3])
        dq[work.batch, work.heads, work.queries] = dq_tile.mul_(scale).reshape(shape)
    cutter.trim()
    narrow = result_dtype(q.dtype, wanted)
    return dq.to(narrow), dk.to(narrow), dv.to(narrow)


def _add(total: torch.Tensor, work: Work, keys: slice | torch.Tensor, part: torch.Tensor) -> None:
    own = total[work.batch, work.kv_heads]
    part = part.reshape(*own.shape[:2], *part.shape[1:])
    if isinstance(keys, slice):
        own[:, :, keys] += part
    else:
        own.index_add_(2, keys, part)
