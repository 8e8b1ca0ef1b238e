"""Context-parallel schedules: *ring* and *gather* as stages with one exchange each, and *heads* (all-to-all).

A stage receives the keys of some ranks that this rank's queries attend to, and computes attention over them in one
call. The ring has one stage per distance between ranks, starting with its own keys; the gather has one stage for all.
While a stage computes, the next one's keys are in flight; in the backward, the last one's gradients are too. The head
exchange instead gives every rank the full sequence for some of the heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from kernel_pytorch.distributed.parts import Part, Terms, add_to_ranges, attend, attend_backward, joined_ranges
from kernel_pytorch.distributed.placement import Placement, needed_keys
from kernel_pytorch.distributed.transport import Pending, Transport
from kernel_pytorch.masks import Mask
from kernel_pytorch.masks.part import Ranges, checked_ranges, size
from kernel_pytorch.ops.attention.definition import lse_dtype

__all__ = [
    "SCHEDULES",
    "BackwardCall",
    "ForwardCall",
    "Schedule",
    "Stage",
    "head_mask",
    "heads_refusal",
    "run_backward",
    "run_forward",
    "stages",
]

Schedule = Literal["ring", "gather", "heads"]
SCHEDULES: tuple[Schedule, ...] = ("ring", "gather", "heads")
_KEYS, _GRADIENTS = 1, 2  # message tags


@dataclass(frozen=True)
class Stage:
    """The sends, receives and attention call of one rank in one stage."""

    name: str
    sends: tuple[tuple[int, Ranges], ...]
    """(rank, ranges among this rank's own tokens) of the keys that others need."""
    pieces: tuple[tuple[int, int, int], ...]
    """The keys attended to, in sequence order: (their rank, first, last), as positions in the full sequence."""
    mask: Mask | None
    """The sub-mask; None if no query of this rank attends to any of the keys."""
    queries: slice

    def received(self, rank: int) -> int:
        """Return the number of keys received from a rank."""
        return sum(last - first for owner, first, last in self.pieces if owner == rank)


@lru_cache(maxsize=256)
def stages(mask: Mask, placement: Placement, rank: int, schedule: Schedule) -> tuple[Stage, ...]:
    """Return the stages of one rank: the same number on each, also if one neither attends nor sends.

    So all ranks post messages in the same order, by which backends without tags (NCCL) match them.
    """
    needed, ranks = needed_keys(mask, placement), placement.ranks
    if schedule == "gather":
        groups = [("gather", list(range(ranks)), list(range(ranks)))]
    else:
        # At distance d, receive keys from rank - d and send keys to rank + d.
        groups = [
            (f"ring step {d} of {ranks - 1}", [(rank - d) % ranks], [(rank + d) % ranks]) for d in range(ranks)
        ]
    found = []
    for name, sources, targets in groups:
        sends = tuple(
            (to, placement.local(rank, needed[to][rank])) for to in targets if to != rank and needed[to][rank]
        )
        pieces = tuple(sorted(((s, *one) for s in sources for one in needed[rank][s]), key=lambda piece: piece[1]))
        part, rows = _part(mask, placement, rank, tuple((first, last) for _, first, last in pieces))
        found.append(Stage(name, sends, pieces if part is not None else (), part, rows))
    return tuple(found)


def _part(mask: Mask, placement: Placement, rank: int, keys: Ranges) -> tuple[Mask | None, slice]:
    """Return the sub-mask of these keys, and the rows of a rank's queries from the first to the last that attends."""
    own, length = placement.ranges[rank], placement.length
    joined = checked_ranges("keys", keys, length)
    if not joined or not own:
        return None, slice(0, 0)
    part = mask.part(length, length, own, joined)
    known = part.layout(size(own), size(joined))
    if known.tables or part.is_full:
        return part, slice(0, size(own))
    attending = np.flatnonzero((known.last > known.first).any(axis=(0, 1)))
    if len(attending) == 0:
        return None, slice(0, 0)
    rows = slice(int(attending[0]), int(attending[-1]) + 1)
    return mask.part(length, length, _within(own, rows), joined), rows


def _within(ranges: Ranges, rows: slice) -> Ranges:
    """Return the ranges of some rows of concatenated ranges."""
    found, before = [], 0
    for first, last in ranges:
        low, high = max(rows.start - before, 0), min(rows.stop - before, last - first)
        if high > low:
            found.append((first + low, first + high))
        before += last - first
    return tuple(found)


def _packed(tensors: tuple[torch.Tensor, ...], ranges: Ranges) -> torch.Tensor:
    """Pack some tokens of tensors of shape (B, G, tokens, dim) into one message."""
    return torch.cat([joined_ranges(x, ranges).reshape(-1) for x in tensors])


def _unpacked(message: torch.Tensor, tensors: tuple[torch.Tensor, ...], tokens: int) -> list[torch.Tensor]:
    shapes = [(*x.shape[:2], tokens, x.shape[3]) for x in tensors]
    sizes = [int(np.prod(shape)) for shape in shapes]
    return [part.view(shape) for part, shape in zip(message.split(sizes), shapes, strict=True)]


class _Keys:
    """The keys and values of a stage, being received."""

    def __init__(self, stage: Stage, transport: Transport, kv: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.stage, self.kv, self.transport = stage, kv, transport
        width = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in kv)
        self.incoming = {
            rank: kv[0].new_empty(stage.received(rank) * width)
            for rank in sorted({owner for owner, _, _ in stage.pieces} - {transport.rank})
        }
        outgoing = {rank: _packed(kv, ranges) for rank, ranges in stage.sends}
        self.pending: Pending = transport.exchange(stage.name, outgoing, self.incoming, _KEYS)

    def part(self, placement: Placement) -> Part | None:
        """Wait for the keys; return None if this rank only sends."""
        self.pending.wait()
        if self.stage.mask is None:
            return None
        arrived = {
            rank: _unpacked(message, self.kv, self.stage.received(rank)) for rank, message in self.incoming.items()
        }
        own = placement.local(self.transport.rank, _of(self.stage, self.transport.rank))
        if not arrived:
            k, v = (joined_ranges(x, own) for x in self.kv)
        elif len(arrived) == 1 and not own:
            k, v = next(iter(arrived.values()))
        else:
            arrived[self.transport.rank] = [joined_ranges(x, own) for x in self.kv]
            k, v = (self._in_order(arrived, which) for which in range(2))
        return Part(k, v, self.stage.mask, self.stage.queries)

    def _in_order(self, arrived: dict[int, list[torch.Tensor]], which: int) -> torch.Tensor:
        at = dict.fromkeys(arrived, 0)
        found = []
        for owner, first, last in self.stage.pieces:
            found.append(arrived[owner][which][:, :, at[owner] : at[owner] + last - first])
            at[owner] += last - first
        return torch.cat(found, dim=2)


def _of(stage: Stage, rank: int) -> Ranges:
    return tuple((first, last) for owner, first, last in stage.pieces if owner == rank)


class _Gradients:
    """The gradients of a stage's keys, being sent to the ranks that own the keys."""

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        placement: Placement,
        totals: tuple[torch.Tensor, torch.Tensor],
        found: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        self.stage, self.totals = stage, totals
        width = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in totals)
        self.incoming = {rank: totals[0].new_empty(size(ranges) * width) for rank, ranges in stage.sends}
        outgoing: dict[int, torch.Tensor] = {}
        if found is not None:
            places: dict[int, list[tuple[int, int]]] = {}
            at = 0
            for owner, first, last in stage.pieces:
                places.setdefault(owner, []).append((at, at + last - first))
                at += last - first
            own = places.pop(transport.rank, [])
            if own:
                local = placement.local(transport.rank, _of(stage, transport.rank))
                for total, part in zip(totals, found, strict=True):
                    add_to_ranges(total, local, joined_ranges(part, tuple(own)))
            dtype = totals[0].dtype
            outgoing = {
                rank: _packed(tuple(part.to(dtype) for part in found), tuple(one)) for rank, one in places.items()
            }
        self.pending = transport.exchange(f"{stage.name}, gradients", outgoing, self.incoming, _GRADIENTS)

    def finish(self) -> None:
        self.pending.wait()
        for rank, ranges in self.stage.sends:
            parts = _unpacked(self.incoming[rank], self.totals, size(ranges))
            for total, part in zip(self.totals, parts, strict=True):
                add_to_ranges(total, ranges, part)


@dataclass(frozen=True)
class ForwardCall:
    """This rank's tensors of a call, the full mask, and the ranks."""

    transport: Transport
    placement: Placement
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: Mask
    terms: Terms


@dataclass(frozen=True)
class BackwardCall:
    """The gradients of a forward's results, and its results."""

    forward: ForwardCall
    dout: torch.Tensor
    dlse: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor


def run_forward(schedule: Schedule, call: ForwardCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of this rank's queries over the keys of all ranks."""
    if schedule == "heads":
        return _heads_forward(call)
    transport, placement, kv = call.transport, call.placement, (call.k, call.v)
    plan = stages(call.mask, placement, transport.rank, schedule)

    def parts() -> Iterator[Part]:
        coming: _Keys | None = _Keys(plan[0], transport, kv)
        for following in [*plan[1:], None]:
            assert coming is not None
            part = coming.part(placement)
            coming = _Keys(following, transport, kv) if following else None
            if part is not None:
                yield part

    merged = sum(stage.mask is not None for stage in plan) > 1
    return attend(call.q, parts(), call.v.shape[3], call.terms, merged=merged)


def run_backward(schedule: Schedule, call: BackwardCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv of this rank's tokens."""
    if schedule == "heads":
        return _heads_backward(call)
    given = call.forward
    transport, placement, q, k, v = given.transport, given.placement, given.q, given.k, given.v
    plan = stages(given.mask, placement, transport.rank, schedule)
    wide = lse_dtype(q.dtype)
    totals = (torch.zeros(k.shape, dtype=wide, device=k.device), torch.zeros(v.shape, dtype=wide, device=v.device))
    result: list[tuple[torch.Tensor, torch.Tensor]] = []

    def parts() -> Iterator[Part]:
        coming: _Keys | None = _Keys(plan[0], transport, (k, v))
        going: _Gradients | None = None
        for stage, following in zip(plan, [*plan[1:], None], strict=True):
            assert coming is not None
            part = coming.part(placement)
            coming = _Keys(following, transport, (k, v)) if following else None
            if part is not None:
                yield part
            before, going = going, _Gradients(stage, transport, placement, totals, result.pop() if part else None)
            if before is not None:
                before.finish()
        if going is not None:
            going.finish()

    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    attend_backward(
        call.dout,
        call.dlse,
        q,
        call.out,
        call.lse,
        parts(),
        dq,
        lambda dk, dv: result.append((dk, dv)),
        given.terms,
    )
    return dq.to(q.dtype), totals[0].to(k.dtype), totals[1].to(v.dtype)


def heads_refusal(ranks: int, heads: int, kv_heads: int) -> str | None:
    """Return why heads cannot be distributed to ranks, or None."""
    if heads % ranks:
        return f"{heads} query heads do not divide among {ranks} ranks"
    if kv_heads % ranks and ranks % kv_heads:
        return f"{kv_heads} key heads and {ranks} ranks: one must be a multiple of the other"
    return None


def _head_ranges(heads: int, ranks: int) -> list[slice]:
    """Return the heads of each rank; with fewer heads than ranks, several ranks share one."""
    return [slice(r * heads // ranks, max((r + 1) * heads // ranks, r * heads // ranks + 1)) for r in range(ranks)]


class _ByHeads:
    """All-to-all of tensors (B, heads, tokens, ...) between some tokens of all heads and all tokens of some heads."""

    def __init__(self, transport: Transport, placement: Placement) -> None:
        self.transport, self.placement = transport, placement
        self.others = [r for r in range(transport.ranks) if r != transport.rank]

    def whole(self, step: str, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        rank, sizes = self.transport.rank, self.placement.sizes
        shares = [_head_ranges(x.shape[1], self.transport.ranks) for x in tensors]
        outgoing = {
            r: torch.cat([x[:, share[r]].reshape(-1) for x, share in zip(tensors, shares, strict=True)])
            for r in self.others
        }
        shapes = {
            r: [
                (x.shape[0], share[rank].stop - share[rank].start, sizes[r], *x.shape[3:])
                for x, share in zip(tensors, shares, strict=True)
            ]
            for r in range(self.transport.ranks)
        }
        incoming = {r: tensors[0].new_empty(sum(int(np.prod(s)) for s in shapes[r])) for r in self.others}
        self.transport.exchange(step, outgoing, incoming, _KEYS).wait()
        found = [
            x.new_empty((*shapes[rank][i][:2], self.placement.length, *x.shape[3:])) for i, x in enumerate(tensors)
        ]
        for r in range(self.transport.ranks):
            if r == rank:
                parts = [x[:, share[rank]] for x, share in zip(tensors, shares, strict=True)]
            else:
                pieces = incoming[r].split([int(np.prod(s)) for s in shapes[r]])
                parts = [piece.view(s) for piece, s in zip(pieces, shapes[r], strict=True)]
            at = 0
            for first, last in self.placement.ranges[r]:
                for all_tokens, part in zip(found, parts, strict=True):
                    all_tokens[:, :, first:last] = part[:, :, at : at + last - first]
                at += last - first
        return found

    def by_tokens(self, step: str, tensors: list[torch.Tensor], heads: list[int]) -> list[torch.Tensor]:
        """Return this rank's tokens of all heads; results of several ranks for one head are summed."""
        rank, ranks, sizes = self.transport.rank, self.transport.ranks, self.placement.sizes
        shares = [_head_ranges(count, ranks) for count in heads]

        def of(r: int) -> list[torch.Tensor]:
            return [joined_ranges(x, self.placement.ranges[r]) for x in tensors]

        outgoing = {r: torch.cat([part.reshape(-1) for part in of(r)]) for r in self.others}
        shapes = {
            r: [
                (x.shape[0], share[r].stop - share[r].start, sizes[rank], *x.shape[3:])
                for x, share in zip(tensors, shares, strict=True)
            ]
            for r in range(ranks)
        }
        incoming = {r: tensors[0].new_empty(sum(int(np.prod(s)) for s in shapes[r])) for r in self.others}
        self.transport.exchange(step, outgoing, incoming, _GRADIENTS).wait()
        found = [
            x.new_zeros((x.shape[0], count, sizes[rank], *x.shape[3:]))
            for x, count in zip(tensors, heads, strict=True)
        ]
        for r in range(ranks):
            if r == rank:
                parts = of(r)
            else:
                pieces = incoming[r].split([int(np.prod(s)) for s in shapes[r]])
                parts = [piece.view(s) for piece, s in zip(pieces, shapes[r], strict=True)]
            for total, part, share in zip(found, parts, shares, strict=True):
                total[:, share[r]] += part
        return found


def head_mask(mask: Mask, transport: Transport, length: int, heads: int) -> Mask:
    """Return the mask, restricted to this rank's heads if its tables differ by head."""
    if mask.layout(length, length).heads == 1:
        return mask
    own = _head_ranges(heads, transport.ranks)[transport.rank]
    return mask.part(length, length, [(0, length)], [(0, length)], heads=(own.start, own.stop))


def _whole_part(call: ForwardCall, k: torch.Tensor, v: torch.Tensor) -> Part:
    """Return all keys of this rank's heads, with the mask of these heads."""
    length = call.placement.length
    return Part(k, v, head_mask(call.mask, call.transport, length, call.q.shape[1]), slice(0, length))


def _heads_forward(call: ForwardCall) -> tuple[torch.Tensor, torch.Tensor]:
    transport, placement, q, k, v = call.transport, call.placement, call.q, call.k, call.v
    by_heads = _ByHeads(transport, placement)
    all_q, all_k, all_v = by_heads.whole("head exchange", (q, k, v))
    part = _whole_part(call, all_k, all_v)
    out, lse = attend(all_q, [part], v.shape[3], call.terms, merged=False)
    (own_out,) = by_heads.by_tokens("head exchange, results", [out], [q.shape[1]])
    (own_lse,) = by_heads.by_tokens("head exchange, log-sum-exp", [lse], [q.shape[1]])
    return own_out, own_lse


def _heads_backward(call: BackwardCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    given = call.forward
    transport, placement, q, k, v = given.transport, given.placement, given.q, given.k, given.v
    by_heads = _ByHeads(transport, placement)
    all_q, all_k, all_v, all_out, all_dout = by_heads.whole(
        "head exchange, backward", (q, k, v, call.out, call.dout)
    )
    sums = (call.lse, call.dlse) if call.dlse is not None else (call.lse,)
    all_lse, *all_dlse = by_heads.whole("head exchange, log-sum-exp backward", sums)
    part = _whole_part(given, all_k, all_v)
    found: list[torch.Tensor] = []
    dq = torch.zeros(all_q.shape, dtype=lse_dtype(q.dtype), device=q.device)
    attend_backward(
        all_dout,
        all_dlse[0] if all_dlse else None,
        all_q,
        all_out,
        all_lse,
        [part],
        dq,
        lambda dk, dv: found.extend((dk, dv)),
        given.terms,
    )
    # Without shared heads nothing is summed after the exchange, so the tensors' dtype is enough.
    narrow = [dq.to(q.dtype), *found] if k.shape[1] < transport.ranks else [x.to(q.dtype) for x in (dq, *found)]
    (own_dq,) = by_heads.by_tokens("head exchange, dq", narrow[:1], [q.shape[1]])
    own_dk, own_dv = by_heads.by_tokens("head exchange, dk and dv", narrow[1:], [k.shape[1], v.shape[1]])
    return own_dq, own_dk.to(k.dtype), own_dv.to(v.dtype)
