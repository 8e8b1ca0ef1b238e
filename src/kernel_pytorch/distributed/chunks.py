"""Ring attention on one device: chunks of the sequence instead of ranks, with keys and values in host memory.

Forward, a chunk of queries loops over the chunks of keys that it attends to. Backward, a chunk of keys loops over the
chunks of queries that attend to it, so its gradient is complete when the chunk is released. Keys and values in host
memory are copied in while the device computes, double-buffered; their gradients are copied back likewise.

Shapes: B batch, H query heads, G key heads, N tokens, D head dimension, E value head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernel_pytorch.distributed.parts import (
    NO_SECOND_DERIVATIVE,
    Part,
    Terms,
    add_to_ranges,
    attend,
    attend_backward,
    joined_ranges,
)
from kernel_pytorch.distributed.placement import Placement, table_unit
from kernel_pytorch.distributed.schedules import Stage, stages
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.explanation import explaining
from kernel_pytorch.hardware_abstraction.op import Call, TensorSpec
from kernel_pytorch.masks import Mask
from kernel_pytorch.masks.part import Ranges, size
from kernel_pytorch.ops.attention.definition import ATTENTION, lse_dtype

__all__ = ["Chunks", "chunked_attention"]


@dataclass(frozen=True)
class Chunks:
    """Attention in chunks on one device, passed as ``group``; keys and values may be offloaded to host memory.

    Args:
        tokens: number of queries and of keys of a chunk.
        offload: keep k and v in pinned host memory from the forward to the backward. If k and v already are in host
            memory (and q on a GPU) they stay there, and so do their gradients.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> q = k = v = torch.randn(1, 2, 1000, 32)
        >>> whole = kp.attention(q, k, v, kp.masks.causal())
        >>> chunked = kp.attention(q, k, v, kp.masks.causal(), group=kp.context_parallel.Chunks(256))
        >>> torch.testing.assert_close(chunked, whole)
    """

    tokens: int = 131072
    offload: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(f"tokens={self.tokens!r}: use a whole number of 1 or more")

    def placement(self, mask: Mask, length: int) -> Placement:
        """Return the chunks as a placement with one rank each; they end at block boundaries of the mask's tables."""
        unit = table_unit(mask.layout(length, length))
        step = max(unit, self.tokens // unit * unit)
        starts = range(0, length, step)
        ranges = tuple(((first, min(length, first + step)),) for first in starts) or ((),)
        return Placement(length, ranges, "contiguous", 1.0)

    def peak_bytes(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, held: bool = True) -> int:
        """Return the peak memory on q's device in forward and backward, including the tensors of the call.

        Linear in the length, if there are several chunks. ``held``: whether the caller keeps offloaded k and v on
        the device too.
        """
        batch, heads, length, dim = q.shape
        kv_heads, value_dim, narrow = k.shape[1], v.shape[3], q.element_size()
        wide = lse_dtype(q.dtype).itemsize
        chunk = min(self.tokens, length)
        on_host = self.offload or k.device != q.device
        a_query = heads * (dim * narrow + 2 * value_dim * narrow + wide)  # q, out, dout, lse
        a_key = kv_heads * (dim + value_dim)
        whole = a_query + (a_key * narrow if not on_host or (held and k.device == q.device) else 0)
        gradients = heads * dim * (wide + narrow) + (a_key * narrow if k.device == q.device else 0)
        # One chunk of keys, its accumulated and partial gradients, and the kernel's buffers for its queries.
        buffers = min(3, -(-length // max(chunk, 1))) if on_host else 0  # in use, in flight, and not yet freed
        keys = a_key * (2 * wide + buffers * narrow)
        queries = heads * (dim * wide + value_dim * narrow + 4 * wide)
        during = heads * dim * wide + (a_key * narrow if k.device == q.device else 0)
        at_end = batch * length * (whole + gradients)
        within = batch * (length * (whole + during) + chunk * (keys + queries))
        return max(at_end, within)


def chunked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    scale: float,
    lse_flows: bool,
    chunks: Chunks,
    policy: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) like ``attention`` without chunks."""
    terms = Terms(scale, policy, lse_flows)
    specs = [TensorSpec.of(x) if isinstance(x, torch.Tensor) else x for x in (q, k, v)]
    if isinstance(q, torch.Tensor) and all(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in (k, v)):
        # Keys may be in host memory: check everything else as if they were on the queries' device.
        specs = [TensorSpec.of(x.to("meta")) for x in (q, k, v)]
    values = (*specs, mask, scale, terms.wanted(q.dtype, merged=True))
    ATTENTION.check(Call("attention", "forward", tuple(zip(ATTENTION.argument_names, values, strict=True)), False))
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} tokens and k {k.shape[2]}: chunks take as many queries as keys")
    if explaining():  # explain the first chunk only
        plan = [stage for stage in stages(mask, chunks.placement(mask, q.shape[2]), 0, "ring") if stage.mask]
        if plan:
            rows, ranges = plan[0].queries, _keys(plan[0])
            own = (q[:, :, rows], joined_ranges(k, ranges), joined_ranges(v, ranges), _present(plan[0].mask))
            function_of(ATTENTION)(*own, scale, terms.wanted(q.dtype, merged=True), kernel=terms.kernel)
    found: tuple[torch.Tensor, torch.Tensor] = _Chunked.apply(q, k, v, mask, terms, chunks)  # type: ignore[no-untyped-call]
    return found


class _Incoming:
    """Chunks of keys and values on the device, in order of use, with the next one prefetched."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, device: torch.device) -> None:
        self.kv, self.device = (k, v), device
        self.streamed = k.device != device
        self.copies = torch.Stream(device) if self.streamed else None
        if self.copies is not None:  # the copy to host memory may still be running
            self.copies.wait_stream(torch.accelerator.current_stream(device))

    def _fetch(self, ranges: Ranges) -> tuple[tuple[torch.Tensor, ...], Any]:
        if not self.streamed:
            return tuple(joined_ranges(x, ranges) for x in self.kv), None
        assert self.copies is not None
        with self.copies:
            fetched = tuple(_gathered(x, ranges, self.device) for x in self.kv)
            return fetched, self.copies.record_event()

    def __call__(self, order: list[Ranges]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        ahead = self._fetch(order[0]) if order else None
        for following in [*order[1:], None]:
            if ahead is None:
                return
            (k, v), ready = ahead
            if ready is not None:
                current = torch.accelerator.current_stream(self.device)
                current.wait_event(ready)
                for x in (k, v):
                    x.record_stream(current)  # allocated on the copy stream, used on this one
            ahead = self._fetch(following) if following else None
            yield k, v


def _copied(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between host and device head by head: torch would pack a non-contiguous tensor first and synchronize."""
    for b in range(source.shape[0]):
        for h in range(source.shape[1]):
            to[b, h].copy_(source[b, h], non_blocking=True)


def _gathered(x: torch.Tensor, ranges: Ranges, device: torch.device) -> torch.Tensor:
    found = torch.empty((*x.shape[:2], size(ranges), x.shape[3]), dtype=x.dtype, device=device)
    at = 0
    for a, b in ranges:
        _copied(found[:, :, at : at + b - a], x[:, :, a:b])
        at += b - a
    return found


def _give_back(totals: list[torch.Tensor], ranges: Ranges, *found: torch.Tensor) -> None:
    for total, one in zip(totals, found, strict=True):
        add_to_ranges(total, ranges, one)


def _keys(stage: Stage) -> Ranges:
    return tuple((first, last) for _, first, last in stage.pieces)


def _pinned(x: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned host memory, for copies that overlap with compute."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type != "cpu")
    return host.copy_(x, non_blocking=True)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, terms: Terms, chunks: Chunks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        placement = chunks.placement(mask, q.shape[2])
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))
        incoming = _Incoming(k, v, q.device)
        for number, ((first, last),) in enumerate(placement.ranges) if q.shape[2] else ():
            plan = [stage for stage in stages(mask, placement, number, "ring") if stage.mask is not None]
            keys = incoming([_keys(stage) for stage in plan])
            parts = (
                Part(part_k, part_v, _present(stage.mask), stage.queries)
                for stage, (part_k, part_v) in zip(plan, keys, strict=True)
            )
            found = attend(q[:, :, first:last], parts, v.shape[3], terms, merged=len(plan) > 1)
            out[:, :, first:last], lse[:, :, first:last] = found
        ctx.mask, ctx.terms, ctx.placement, ctx.device = mask, terms, placement, k.device
        if chunks.offload and k.device == q.device:
            k, v = _pinned(k), _pinned(v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # no tensor of zeros for the gradient of an unused lse
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        known = (ctx.mask, ctx.terms, ctx.placement, ctx.device)
        found = _ChunkedBackward.apply(dout, dlse, q, k, v, out, lse, *known)  # type: ignore[no-untyped-call]
        return (*found, None, None, None)


class _ChunkedBackward(torch.autograd.Function):
    """The backward as an autograd function, so that differentiating it (create_graph=True) raises an error."""

    @staticmethod
    def forward(
        _ctx: Any,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: Mask,
        terms: Terms,
        placement: Placement,
        device: torch.device,
    ) -> Any:
        wide = lse_dtype(q.dtype)
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=device, pin_memory=device != q.device) for x in (k, v))
        by_keys: dict[int, list[tuple[int, Stage]]] = {number: [] for number in range(placement.ranks)}
        for number in range(placement.ranks) if q.shape[2] else ():
            for stage in stages(mask, placement, number, "ring"):
                if stage.mask is not None:
                    by_keys[stage.pieces[0][0]].append((number, stage))
        used = [number for number, plan in by_keys.items() if plan]
        incoming = _Incoming(k, v, q.device)([placement.ranges[number] for number in used])
        for number, ranges in enumerate(placement.ranges) if q.shape[2] else ():
            ((start, stop),) = ranges
            if not by_keys[number]:
                dk[:, :, start:stop], dv[:, :, start:stop] = 0.0, 0.0
                continue
            chunk_k, chunk_v = next(incoming)
            totals = [torch.zeros(x.shape, dtype=wide, device=q.device) for x in (chunk_k, chunk_v)]
            for of_queries, stage in by_keys[number]:
                ((first, last),) = placement.ranges[of_queries]
                own = tuple((a - start, b - start) for a, b in _keys(stage))
                part = Part(
                    joined_ranges(chunk_k, own), joined_ranges(chunk_v, own), _present(stage.mask), stage.queries
                )

                rows = slice(first, last)
                attend_backward(
                    dout[:, :, rows],
                    dlse[:, :, rows] if dlse is not None else None,
                    q[:, :, rows],
                    out[:, :, rows],
                    lse[:, :, rows],
                    [part],
                    dq[:, :, rows],
                    partial(_give_back, totals, own),
                    terms,
                )
            while totals:  # from the end, to free each as early as possible
                result = (dk, dv)[len(totals) - 1]
                _copied(result[:, :, start:stop], totals.pop().to(result.dtype))
        if device != q.device:
            torch.accelerator.synchronize(q.device)  # the caller may read them on the host
        return dq.to(q.dtype), dk, dv

    @staticmethod
    def backward(_ctx: Any, *_gradients: Any) -> Any:
        raise NotImplementedError(NO_SECOND_DERIVATIVE)


def _present(mask: Mask | None) -> Mask:
    assert mask is not None
    return mask
