"""Attention in Triton, one source for NVIDIA, AMD and Intel: dense and block-sparse, forward and backward.

A program owns a tile of queries (forward, dq) or of keys (dk, dv) and loops over the tiles that its mask lists: a
span of full tiles, other full tiles, and partial ones, where it compares keys with the intervals of each query.
Masked tiles are never read. Accumulation is in float32 by one program, without atomics, so the backward is
deterministic.

The same functions serve ``score_mod_attention``: an argument that is None (bias, slopes, outer, sinks) is known at
compile time, and its code is removed.

Shapes: B batch, H query heads, G key heads, M queries, N keys, D head dimension, E value head dimension.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.masks.layout import Layout
from kernel_pytorch.ops.attention.definition import lse_dtype, lse_flows, result_dtype
from kernel_pytorch.ops.attention.score_mod import Terms, sink_gradient, sink_share

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask

_LOG2_E = math.log2(math.e)
_NO_TERMS = Terms()
_BIAS_GRADIENT_BYTES = 256 << 20  # of partial results, where batch entries share a bias


@dataclass(frozen=True)
class Tile:
    """Tile sizes and launch parameters. They change the speed, not the result."""

    queries: int
    keys: int
    warps: int
    stages: int


def tiles(
    dim: int, itemsize: int, device: Device, known: Layout, terms: Terms = _NO_TERMS
) -> tuple[Tile, Tile, Tile]:
    """Return the tiles of the forward, of dq, and of dk and dv, for the wider of the two head dimensions.

    The best of a sweep on an H200; other GPUs get sizes that fit their registers and shared memory.
    """
    wide = triton.next_power_of_2(dim)
    if itemsize == 4:  # no matrix unit multiplies float32 exactly: small tiles, or the registers spill
        small = Tile(32, 32, 4, 1) if wide > 64 else Tile(64, 32, 4, 1)
        return small, small, Tile(32, 32, 4, 1) if wide > 64 else Tile(32, 64, 4, 1)
    if terms.bias is not None:  # its tile and pointers take registers too
        return Tile(64, 64, 4, 2) if wide <= 128 else Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)
    if wide > 128:
        return Tile(64, 32, 4, 2), Tile(64, 32, 8, 1), Tile(32, 64, 8, 1)
    if "wgmma" in device.matrix_units or "tcgen05" in device.matrix_units:
        # Large tiles read fewer indices and reuse more; sparse masks have mostly partial tiles, which fit small ones.
        blocks = bool(known.tables) and known.finest_block >= 128
        thin = not blocks and (bool(known.tables) or known.density < 0.25)
        if wide > 64:
            small = Tile(64, 64, 4, 2)
            if device.shared_memory_bytes < 200_000:
                return small, small, small
            return (
                Tile(64, 64, 4, 3) if thin else Tile(128, 128, 8, 3),
                small if thin else Tile(128, 64, 8, 3),
                Tile(64, 128, 8, 3) if blocks else small,
            )
        return Tile(64, 64, 4, 3) if thin else Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)
    if device.backend == "amd" and "mfma" not in device.matrix_units:
        return Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)
    return Tile(128, 32, 4, 2), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)


@triton.jit
def _allowed(first_M, last_M, slot, slot_stride, m, m_inside, n, SLOTS: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Whether key n is in one of query m's intervals; (queries, keys), or (keys, queries) where KEYS_FIRST."""
    if KEYS_FIRST:
        allowed = (n[:, None] < 0) & (m[None, :] < 0)
    else:
        allowed = (m[:, None] < 0) & (n[None, :] < 0)
    for s in tl.static_range(SLOTS):
        first = tl.load(first_M + (slot + s) * slot_stride + m, mask=m_inside, other=0)
        last = tl.load(last_M + (slot + s) * slot_stride + m, mask=m_inside, other=0)
        if KEYS_FIRST:
            allowed = allowed | ((n[:, None] >= first[None, :]) & (n[:, None] < last[None, :]))
        else:
            allowed = allowed | ((n[None, :] >= first[:, None]) & (n[None, :] < last[:, None]))
    return allowed


@triton.jit
def _load_rows(base, stride, rows, inside, columns, DIM: tl.constexpr, CHECK: tl.constexpr):
    """Load rows of a matrix as (rows, columns), with zeros past the head dimension and, if CHECK, past the rows."""
    pointers = base + rows[:, None] * stride + columns[None, :]
    if CHECK:
        return tl.load(pointers, mask=inside[:, None] & (columns < DIM)[None, :], other=0.0)
    if columns.shape[0] != DIM:
        return tl.load(pointers, mask=(columns < DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _dot(a, b, PRECISE: tl.constexpr):
    """A matmul in float32; PRECISE keeps matrix units from rounding float32 operands."""
    if PRECISE:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def _tanh(x):
    """tanh and its derivative to a few units in the last place; the hardware's approximation has 11 bits."""
    size = tl.abs(x)
    rest = 2.0 / (tl.exp2(size * 2.8853900817779268) + 1.0)
    large = tl.where(x < 0.0, rest - 1.0, 1.0 - rest)
    # Near zero that difference cancels: a polynomial in x^2 of least relative error below 0.55.
    z = x * x
    series = ((0.016458776 * z - 0.05268415) * z + 0.13320942) * z - 0.33332959
    return tl.where(size < 0.55, x + x * z * series, large), rest * (2.0 - rest)


@triton.jit
def _exp(x, MODIFIED: tl.constexpr):
    """The exponential of a difference of scores. Plain scores are scaled to base 2, MODIFIED ones are not.

    A bias may be large and its differences small, so the change of base comes after the difference.
    """
    if MODIFIED:
        x *= 1.4426950408889634
    return tl.exp2(x)


@triton.jit
def _modified(products, scale, bias_MN, bias_m, bias_n, slope, outer, offset, m, m_inside, n, n_inside):
    """The scores, -inf where the bias is -inf, and the derivative of the soft-capping.

    m and n, and whether they are inside, have the shapes in which they broadcast to the products.
    """
    scores = products * scale
    derivative = 1.0
    if outer is not None:
        scores, derivative = _tanh(scores)
        scores *= outer
    if slope is not None:
        scores -= slope * tl.abs(m + offset - n).to(tl.float32)
    if bias_MN is not None:
        pointers = bias_MN + m.to(tl.int64) * bias_m + n.to(tl.int64) * bias_n
        scores += tl.load(pointers, mask=m_inside & n_inside, other=0.0).to(tl.float32)
    return scores, derivative


@triton.jit
def _forward_step(
    acc,
    top,
    total,
    q,
    k_ND,
    v_NE,
    k_stride,
    v_stride,
    start,
    kv_len,
    scale,
    first_M,
    last_M,
    slot,
    slot_stride,
    m,
    m_inside,
    bias_MN,
    bias_m,
    bias_n,
    slope,
    outer,
    offset,
    MODIFIED: tl.constexpr,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    n = start + tl.arange(0, BLOCK_N)
    inside = n < kv_len
    k = _load_rows(k_ND, k_stride, n, inside, tl.arange(0, BLOCK_D), D, MASKED)
    scores = _dot(q, tl.trans(k), PRECISE)
    if MODIFIED:
        scores, _ = _modified(
            scores, scale, bias_MN, bias_m, bias_n, slope, outer, offset,
            m[:, None], m_inside[:, None], n[None, :], inside[None, :],
        )  # fmt: skip
    if MASKED:
        allowed = _allowed(first_M, last_M, slot, slot_stride, m, m_inside, n, SLOTS, False)
        scores = tl.where(allowed, scores, -float("inf"))
    if MODIFIED:
        new_top = tl.maximum(top, tl.max(scores, axis=1))
    else:
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    if MASKED or MODIFIED:
        # Before the first key the maximum is -inf; zero keeps the exponentials zero instead of NaN.
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
    else:
        base = new_top
    if not MODIFIED:
        scores *= scale
    p = _exp(scores - base[:, None], MODIFIED)
    shrink = _exp(top - base, MODIFIED)
    v = _load_rows(v_NE, v_stride, n, inside, tl.arange(0, BLOCK_E), E, MASKED)
    acc = acc * shrink[:, None] + _dot(p.to(v.dtype), v, PRECISE)
    total = total * shrink + tl.sum(p, axis=1)
    return acc, new_top, total


@triton.jit
def _forward(
    q_BHMD,
    k_BGND,
    v_BGNE,
    out_BHME,
    lse_BHM,
    first_DSM,
    last_DSM,
    span,
    full_offsets,
    full,
    partial_offsets,
    partial,
    slots,
    heads,
    group,
    q_len,
    kv_len,
    scale,
    q_b,
    q_h,
    q_m,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    mask_b,
    mask_h,
    first_b,
    bias,
    bias_b,
    bias_h,
    bias_m,
    bias_n,
    slopes,
    outer,
    sinks,
    MODIFIED: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISE: tl.constexpr,
    SLOTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Later queries of a causal mask have more keys: start the longest programs first.
    tile_m = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    m_inside = m < q_len
    k_ND = k_BGND + b * k_b + (h // group) * k_h
    v_NE = v_BGNE + b * v_b + (h // group) * v_h
    q = _load_rows(q_BHMD + b * q_b + h * q_h, q_m, m, m_inside, tl.arange(0, BLOCK_D), D, True)
    first_M = first_DSM + b * first_b
    last_M = last_DSM + b * first_b

    bias_MN, slope = None, None
    if bias is not None:
        bias_MN = bias + b * bias_b + h * bias_h
    if slopes is not None:
        slope = tl.load(slopes + h)
    acc = tl.zeros((BLOCK_M, BLOCK_E), dtype=tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    row = b * mask_b + h * mask_h + tile_m
    for index in tl.range(tl.load(span + 2 * row), tl.load(span + 2 * row + 1), num_stages=STAGES):
        acc, top, total = _forward_step(
            acc, top, total, q, k_ND, v_NE, k_n, v_n, index * BLOCK_N, kv_len, scale,
            first_M, last_M, 0, q_len, m, m_inside,
            bias_MN, bias_m, bias_n, slope, outer, kv_len - q_len, MODIFIED,
            False, D, E, BLOCK_D, BLOCK_E, BLOCK_N, PRECISE, SLOTS,
        )  # fmt: skip
    listed, end = tl.load(full_offsets + row), tl.load(full_offsets + row + 1)
    tile = tl.load(full + listed, mask=listed < end, other=0)
    for index in tl.range(listed, end, num_stages=STAGES):
        start = tile * BLOCK_N
        tile = tl.load(full + index + 1, mask=index + 1 < end, other=0)  # known before it is needed
        acc, top, total = _forward_step(
            acc, top, total, q, k_ND, v_NE, k_n, v_n, start, kv_len, scale,
            first_M, last_M, 0, q_len, m, m_inside,
            bias_MN, bias_m, bias_n, slope, outer, kv_len - q_len, MODIFIED,
            False, D, E, BLOCK_D, BLOCK_E, BLOCK_N, PRECISE, SLOTS,
        )  # fmt: skip
    listed, end = tl.load(partial_offsets + row), tl.load(partial_offsets + row + 1)
    tile = tl.load(partial + listed, mask=listed < end, other=0)
    for index in tl.range(listed, end, num_stages=STAGES):
        start = tile * BLOCK_N
        tile = tl.load(partial + index + 1, mask=index + 1 < end, other=0)  # known before it is needed
        acc, top, total = _forward_step(
            acc, top, total, q, k_ND, v_NE, k_n, v_n, start, kv_len, scale,
            first_M, last_M, tl.load(slots + index), q_len, m, m_inside,
            bias_MN, bias_m, bias_n, slope, outer, kv_len - q_len, MODIFIED,
            True, D, E, BLOCK_D, BLOCK_E, BLOCK_N, PRECISE, SLOTS,
        )  # fmt: skip

    if sinks is not None:  # one more score in the softmax, without a value
        sink = tl.load(sinks + h)
        if not MODIFIED:
            sink *= 1.4426950408889634
        new_top = tl.maximum(top, sink)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        shrink = _exp(top - base, MODIFIED)
        acc *= shrink[:, None]
        total = total * shrink + _exp(sink - base, MODIFIED)
        top = new_top
    nothing = total == 0.0
    out = acc / tl.where(nothing, 1.0, total)[:, None]
    log_total = tl.log2(tl.where(nothing, 1.0, total))
    if not MODIFIED:
        lse = tl.where(nothing, -float("inf"), (top + log_total) / 1.4426950408889634)
    else:
        lse = tl.where(nothing, -float("inf"), top + log_total / 1.4426950408889634)
    row_out = (b * heads + h) * q_len + m
    e = tl.arange(0, BLOCK_E)
    tl.store(
        out_BHME + row_out[:, None] * E + e[None, :],
        out.to(out_BHME.dtype.element_ty),
        mask=m_inside[:, None] & (e < E)[None, :],
    )
    tl.store(lse_BHM + row_out, lse, mask=m_inside)


@triton.jit
def _dq_step(
    dq, q, dout, log_sum, delta, k_ND, v_NE, k_stride, v_stride, start, kv_len, scale,
    first_M, last_M, slot, slot_stride, m, m_inside, bias_MN, bias_m, bias_n, slope, outer, offset,
    dbias_MN, MODIFIED: tl.constexpr, MASKED: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    n = start + tl.arange(0, BLOCK_N)
    inside = n < kv_len
    k = _load_rows(k_ND, k_stride, n, inside, tl.arange(0, BLOCK_D), D, MASKED)
    v = _load_rows(v_NE, v_stride, n, inside, tl.arange(0, BLOCK_E), E, MASKED)
    scores = _dot(q, tl.trans(k), PRECISE)
    if MODIFIED:
        scores, derivative = _modified(
            scores, scale, bias_MN, bias_m, bias_n, slope, outer, offset,
            m[:, None], m_inside[:, None], n[None, :], inside[None, :],
        )  # fmt: skip
    else:
        scores *= scale
    p = _exp(scores - log_sum[:, None], MODIFIED)
    if MASKED:
        allowed = _allowed(first_M, last_M, slot, slot_stride, m, m_inside, n, SLOTS, False)
        p = tl.where(allowed, p, 0.0)
    ds = p * (_dot(dout, tl.trans(v), PRECISE) - delta[:, None])
    if dbias_MN is not None:
        # A launch visits each pair once; launches for other batch entries add to the same memory in sequence.
        pointers = dbias_MN + m[:, None].to(tl.int64) * kv_len + n[None, :]
        both = m_inside[:, None] & inside[None, :]
        tl.store(pointers, tl.load(pointers, mask=both, other=0.0) + ds, mask=both)
    if MODIFIED:
        ds *= derivative
    return dq + _dot(ds.to(k.dtype), k, PRECISE)


@triton.jit
def _dq(
    q_BHMD, k_BGND, v_BGNE, out_BHME, dout_BHME, lse_BHM, dlse_BHM, log_sum_BHM, delta_BHM, dq_BHMD,
    first_DSM, last_DSM,
    span, full_offsets, full, partial_offsets, partial, slots,
    heads, group, q_len, kv_len, scale, inner_scale,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, dout_b, dout_h, dout_m, mask_b, mask_h, first_b,
    bias, bias_b, bias_h, bias_m, bias_n, slopes, outer, dbias_BHMN, first_entry,
    dlse_b, dlse_h, dlse_m, HAS_DLSE: tl.constexpr, MODIFIED: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISE: tl.constexpr, SLOTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile_m = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    dbias_MN = None
    if dbias_BHMN is not None:
        dbias_MN = dbias_BHMN + (b * heads + h) * q_len * kv_len
        b += first_entry
    bias_MN, slope = None, None
    if bias is not None:
        bias_MN = bias + b * bias_b + h * bias_h
    if slopes is not None:
        slope = tl.load(slopes + h)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    m_inside = m < q_len
    k_ND = k_BGND + b * k_b + (h // group) * k_h
    v_NE = v_BGNE + b * v_b + (h // group) * v_h
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    q = _load_rows(q_BHMD + b * q_b + h * q_h, q_m, m, m_inside, d, D, True)
    dout = _load_rows(dout_BHME + b * dout_b + h * dout_h, dout_m, m, m_inside, e, E, True)
    row_out = (b * heads + h) * q_len + m
    # sum(out * dout) - dlse of each query, subtracted from its score gradients; stored for dk and dv.
    out = _load_rows(out_BHME, E, row_out, m_inside, e, E, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1)
    if HAS_DLSE:
        delta -= tl.load(dlse_BHM + b * dlse_b + h * dlse_h + m * dlse_m, mask=m_inside, other=0.0)
    lse = tl.load(lse_BHM + row_out, mask=m_inside, other=-float("inf"))
    # Where a query attends to nothing its lse is -inf; +inf makes every probability zero instead of NaN.
    log_sum = tl.where(lse == -float("inf"), float("inf"), lse if MODIFIED else lse * 1.4426950408889634)
    tl.store(delta_BHM + row_out, delta, mask=m_inside)
    tl.store(log_sum_BHM + row_out, log_sum, mask=m_inside)
    first_M = first_DSM + b * first_b
    last_M = last_DSM + b * first_b
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    row = b * mask_b + h * mask_h + tile_m
    for index in tl.range(tl.load(span + 2 * row), tl.load(span + 2 * row + 1), num_stages=STAGES):
        dq = _dq_step(
            dq, q, dout, log_sum, delta, k_ND, v_NE, k_n, v_n, index * BLOCK_N, kv_len, inner_scale,
            first_M, last_M, 0, q_len, m, m_inside,
            bias_MN, bias_m, bias_n, slope, outer, kv_len - q_len, dbias_MN, MODIFIED,
            False, D, E, BLOCK_D, BLOCK_E, BLOCK_N, PRECISE, SLOTS,
        )  # fmt: skip
    listed, end = tl.load(full_offsets + row), tl.load(full_offsets + row + 1)
    tile = tl.load(full + listed, mask=listed < end, other=0)
    for index in tl.range(listed, end, num_stages=STAGES):
        start = tile * BLOCK_N
        tile = tl.load(full + index + 1, mask=index + 1 < end, other=0)  # known before it is needed
        dq = _dq_step(
            dq, q, dout, log_sum, delta, k_ND, v_NE, k_n, v_n, start, kv_len, inner_scale,
            first_M, last_M, 0, q_len, m, m_inside,
            bias_MN, bias_m, bias_n, slope, outer, kv_len - q_len, dbias_MN, MODIFIED,
            False, D, E, BLOCK_D, BLOCK_E, BLOCK_N, PRECISE, SLOTS,
        )  # fmt: skip
    listed, end = tl.load(partial_offsets + row), tl.load(partial_offsets + row + 1)
    tile = tl.load(partial + listed, mask=listed < end, other=0)
    for index in tl.range(listed, end, num_stages=STAGES):
        start = tile * BLOCK_N
        tile = tl.load(partial + index + 1, mask=index + 1 < end, other=0)  # known before it is needed
        dq = _dq_step(
            dq, q, dout, log_sum, delta, k_ND, v_NE, k_n, v_n, start, kv_len, inner_scale,
            first_M, last_M, tl.load(slots + index), q_len, m, m_inside,
            bias_MN, bias_m, bias_n, slope, outer, kv_len - q_len, dbias_MN, MODIFIED,
            True, D, E, BLOCK_D, BLOCK_E, BLOCK_N, PRECISE, SLOTS,
        )  # fmt: skip
    tl.store(
        dq_BHMD + row_out[:, None] * D + d[None, :],
        (dq * scale).to(dq_BHMD.dtype.element_ty),
        mask=m_inside[:, None] & (d < D)[None, :],
    )


@triton.jit
def _dkdv_step(
    dk, dv, columns, k, v, q_MD, dout_ME, log_sum_M, delta_M, q_stride, dout_stride, start, q_len, scale,
    first_M, last_M, slot, slot_stride, n, n_inside, bias_MN, bias_m, bias_n, slope, outer, offset,
    dbias_N, MODIFIED: tl.constexpr, MASKED: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    PRECISE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    m = start + tl.arange(0, BLOCK_M)
    inside = m < q_len
    q = _load_rows(q_MD, q_stride, m, inside, tl.arange(0, BLOCK_D), D, MASKED)
    if MASKED:
        log_sum = tl.load(log_sum_M + m, mask=inside, other=float("inf"))
    else:
        log_sum = tl.load(log_sum_M + m)
    scores = _dot(k, tl.trans(q), PRECISE)
    if MODIFIED:
        scores, derivative = _modified(
            scores, scale, bias_MN, bias_m, bias_n, slope, outer, offset,
            m[None, :], inside[None, :], n[:, None], n_inside[:, None],
        )  # fmt: skip
    else:
        scores *= scale
    p = _exp(scores - log_sum[None, :], MODIFIED)
    if MASKED:
        allowed = _allowed(first_M, last_M, slot, slot_stride, m, inside, n, SLOTS, True)
        p = tl.where(allowed, p, 0.0)
    dout = _load_rows(dout_ME, dout_stride, m, inside, tl.arange(0, BLOCK_E), E, MASKED)
    dv += _dot(p.to(dout.dtype), dout, PRECISE)
    if MASKED:
        delta = tl.load(delta_M + m, mask=inside, other=0.0)
    else:
        delta = tl.load(delta_M + m)
    ds = p * (_dot(v, tl.trans(dout), PRECISE) - delta[None, :])
    if dbias_N is not None:
        columns += tl.sum(ds, axis=1)
    if MODIFIED:
        ds *= derivative
    dk += _dot(ds.to(q.dtype), q, PRECISE)
    return dk, dv, columns


@triton.jit
def _dkdv(
    q_BHMD, k_BGND, v_BGNE, dout_BHME, log_sum_BHM, delta_BHM, dk_BGND, dv_BGNE, first_DSM, last_DSM,
    span, full_offsets, full, partial_offsets, partial, slots,
    heads, group, q_len, kv_len, scale, inner_scale,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, dout_b, dout_h, dout_m, mask_b, mask_h, first_b,
    bias, bias_b, bias_h, bias_m, bias_n, slopes, outer, dbias_BHN, MODIFIED: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISE: tl.constexpr, SLOTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    kv_heads = heads // group
    tile_n = tl.program_id(0)
    b = (tl.program_id(1) // kv_heads).to(tl.int64)
    g = (tl.program_id(1) % kv_heads).to(tl.int64)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n_inside = n < kv_len
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    k = _load_rows(k_BGND + b * k_b + g * k_h, k_n, n, n_inside, d, D, True)
    v = _load_rows(v_BGNE + b * v_b + g * v_h, v_n, n, n_inside, e, E, True)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_E), dtype=tl.float32)
    first_M = first_DSM + b * first_b
    last_M = last_DSM + b * first_b
    # The query heads of a group share their keys: one program loops over them.
    for member in range(group):
        h = g * group + member
        q_MD = q_BHMD + b * q_b + h * q_h
        dout_ME = dout_BHME + b * dout_b + h * dout_h
        log_sum_M = log_sum_BHM + (b * heads + h) * q_len
        delta_M = delta_BHM + (b * heads + h) * q_len
        bias_MN, slope = None, None
        if bias is not None:
            bias_MN = bias + b * bias_b + h * bias_h
        if slopes is not None:
            slope = tl.load(slopes + h)
        columns = tl.zeros((BLOCK_N,), dtype=tl.float32)
        row = b * mask_b + h * mask_h + tile_n
        for index in tl.range(tl.load(span + 2 * row), tl.load(span + 2 * row + 1), num_stages=STAGES):
            dk, dv, columns = _dkdv_step(
                dk, dv, columns, k, v, q_MD, dout_ME, log_sum_M, delta_M, q_m, dout_m, index * BLOCK_M, q_len,
                inner_scale,
                first_M, last_M, 0, q_len, n, n_inside,
                bias_MN, bias_m, bias_n, slope, outer, kv_len - q_len, dbias_BHN, MODIFIED,
                False, D, E, BLOCK_D, BLOCK_E, BLOCK_M, PRECISE, SLOTS,
            )  # fmt: skip
        listed, end = tl.load(full_offsets + row), tl.load(full_offsets + row + 1)
        tile = tl.load(full + listed, mask=listed < end, other=0)
        for index in tl.range(listed, end, num_stages=STAGES):
            start = tile * BLOCK_M
            tile = tl.load(full + index + 1, mask=index + 1 < end, other=0)  # known before it is needed
            dk, dv, columns = _dkdv_step(
                dk, dv, columns, k, v, q_MD, dout_ME, log_sum_M, delta_M, q_m, dout_m, start, q_len, inner_scale,
                first_M, last_M, 0, q_len, n, n_inside,
                bias_MN, bias_m, bias_n, slope, outer, kv_len - q_len, dbias_BHN, MODIFIED,
                False, D, E, BLOCK_D, BLOCK_E, BLOCK_M, PRECISE, SLOTS,
            )  # fmt: skip
        listed, end = tl.load(partial_offsets + row), tl.load(partial_offsets + row + 1)
        tile = tl.load(partial + listed, mask=listed < end, other=0)
        for index in tl.range(listed, end, num_stages=STAGES):
            start = tile * BLOCK_M
            tile = tl.load(partial + index + 1, mask=index + 1 < end, other=0)  # known before it is needed
            dk, dv, columns = _dkdv_step(
                dk, dv, columns, k, v, q_MD, dout_ME, log_sum_M, delta_M, q_m, dout_m, start, q_len, inner_scale,
                first_M, last_M, tl.load(slots + index), q_len, n, n_inside,
                bias_MN, bias_m, bias_n, slope, outer, kv_len - q_len, dbias_BHN, MODIFIED,
                True, D, E, BLOCK_D, BLOCK_E, BLOCK_M, PRECISE, SLOTS,
            )  # fmt: skip
        if dbias_BHN is not None:
            tl.store(dbias_BHN + (b * heads + h) * kv_len + n, columns, mask=n_inside)
    row_out = (b * kv_heads + g) * kv_len + n
    tl.store(
        dk_BGND + row_out[:, None] * D + d[None, :],
        (dk * scale).to(dk_BGND.dtype.element_ty),
        mask=n_inside[:, None] & (d < D)[None, :],
    )
    tl.store(
        dv_BGNE + row_out[:, None] * E + e[None, :],
        dv.to(dv_BGNE.dtype.element_ty),
        mask=n_inside[:, None] & (e < E)[None, :],
    )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return x with contiguous rows, copied only if its strides require it.

    Offsets within a head are 32-bit; strided heads of a projection may exceed that.
    """
    adjacent = x.stride(-1) == 1 or x.shape[-1] == 1
    return x if adjacent and x.shape[2] * x.stride(2) < 1 << 31 else x.contiguous()


def _mask_arguments(
    known: Layout, tile: Tile, device: torch.device, *, by_key: bool = False
) -> tuple[tuple[torch.Tensor, ...], tuple[int, int, int]]:
    """Return the mask's tensors, and the batch and head strides of its rows and intervals."""
    walk = known.walk(tile.queries, tile.keys, by_key=by_key, device=device)
    first, last = known.intervals(device)
    rows = len(walk.span) // (known.batch * known.heads)
    mask_b = known.heads * rows if known.batch > 1 else 0
    mask_h = rows if known.heads > 1 else 0
    first_b = first.stride(0) if first.shape[0] > 1 else 0
    return (first, last, *walk.tensors()), (mask_b, mask_h, first_b)


def _fitted(tile: Tile, known: Layout) -> Tile:
    """Return the tile, reduced to the block size of the mask's tables."""
    return replace(tile, queries=min(tile.queries, known.finest_block), keys=min(tile.keys, known.finest_block))


def _constants(q: torch.Tensor, v: torch.Tensor, known: Layout, tile: Tile) -> dict[str, Any]:
    """Return the constexpr arguments that the three kernels share."""
    return {
        "D": q.shape[3],
        "E": v.shape[3],
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3])),
        "BLOCK_E": max(16, triton.next_power_of_2(v.shape[3])),
        "BLOCK_M": tile.queries,
        "BLOCK_N": tile.keys,
        "PRECISE": q.dtype == torch.float32,
        "SLOTS": known.slots,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


def _modifies(terms: Terms) -> bool:
    """Return whether the scores differ from plain attention's; a sink does not change them."""
    return terms.bias is not None or terms.slopes is not None or terms.softcap != 0


def _term_arguments(q: torch.Tensor, k: torch.Tensor, terms: Terms) -> dict[str, Any]:
    """Return the arguments for score terms that the three kernels share; None for absent terms."""
    names = ("bias", "bias_b", "bias_h", "bias_m", "bias_n", "slopes", "outer")
    found: dict[str, Any] = dict.fromkeys(names)
    found["MODIFIED"] = _modifies(terms)
    if terms.bias is not None:
        bias = terms.bias.float() if terms.bias.dtype == torch.float64 else terms.bias
        bias = bias.expand(*q.shape[:3], k.shape[2])
        found |= dict(zip(names, (bias, *bias.stride()), strict=False))
    if terms.slopes is not None:
        found["slopes"] = terms.slopes.float().contiguous()
    if terms.softcap:
        found["outer"] = terms.softcap
    return found


def _bias_gradients(
    q: torch.Tensor, k: torch.Tensor, terms: Terms
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return zeros for the score gradients: by pair, (entries, H, M, N), or summed over the queries, (B, H, N).

    None if the bias takes no gradient, or is the same for all keys. Batch entries that share a bias accumulate into
    the same memory, in launches of as many entries as fit ``_BIAS_GRADIENT_BYTES``.
    """
    bias = terms.bias
    if bias is None or not terms.bias_grad or bias.shape[3] == 1:
        return None, None
    (batch, heads, q_len), kv_len = q.shape[:3], k.shape[2]
    if bias.shape[2] == 1:
        return None, torch.zeros((batch, heads, kv_len), device=q.device)
    entries = batch
    if bias.shape[0] < batch:
        entries = min(batch, max(1, _BIAS_GRADIENT_BYTES // max(1, 4 * heads * q_len * kv_len)))
    return torch.zeros((entries, heads, q_len, kv_len), device=q.device), None


def _inner_scale(scale: float, terms: Terms) -> float:
    """Return the first factor of q k^T: for tanh, for modified scores, or for scores to base 2."""
    if terms.softcap:
        return scale / terms.softcap
    return scale if _modifies(terms) else scale * _LOG2_E


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
    """The forward of ``attention``; with the fields of ``Terms`` as arguments, of ``score_mod_attention``."""
    terms = Terms(*modifying)
    q, k, v = _rows(q), _rows(k), _rows(v)
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    out = torch.empty((batch, heads, q_len, v.shape[3]), dtype=result_dtype(q.dtype, wanted), device=q.device)
    lse = torch.empty((batch, heads, q_len), dtype=lse_dtype(q.dtype), device=q.device)
    sinks = None if terms.sinks is None else terms.sinks.float().contiguous()
    if out.numel() == 0:
        return out, lse
    if kv_len == 0:
        return out.zero_(), lse.fill_(-math.inf) if sinks is None else lse.copy_(sinks.view(-1, 1))
    known = mask.layout(q_len, kv_len)
    tile = _fitted(tiles(max(q.shape[3], v.shape[3]), q.element_size(), device, known, terms)[0], known)
    tensors, strides = _mask_arguments(known, tile, q.device)
    if scale < 0:  # the kernel's running maximum needs a positive scale
        q, scale = -q, -scale
    scale = max(scale, 1e-30)  # and -inf times zero would be NaN
    _forward[(triton.cdiv(q_len, tile.queries), batch * heads)](
        q, k, v, out, lse, *tensors, heads, heads // kv_heads, q_len, kv_len, _inner_scale(scale, terms),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides, sinks=sinks,
        **_term_arguments(q, k, terms), **_constants(q, v, known, tile),
    )  # fmt: skip
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
    *modifying: Any,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v, and for ``score_mod_attention`` those of bias and sinks."""
    terms = Terms(*modifying)
    # Matrix units need operands of one dtype; the gradient of partial results is float32.
    q, k, v, dout = _rows(q), _rows(k), _rows(v), _rows(dout.to(q.dtype))
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    narrow = result_dtype(q.dtype, wanted)
    dq, dk, dv = (torch.empty(x.shape, dtype=narrow, device=x.device) for x in (q, k, v))
    lse = lse.contiguous()
    delta, log_sum = torch.empty_like(lse), torch.empty_like(lse)
    by_pair, by_key = _bias_gradients(q, k, terms)
    if q_len == 0 or kv_len == 0 or batch == 0:
        delta.copy_(-dlse) if lse_flows(wanted) else delta.zero_()
        gradients = dq.zero_(), dk.zero_(), dv.zero_()
    else:
        gradients = dq, dk, dv
        known = mask.layout(q_len, kv_len)
        dq_tile, dkdv_tile = (
            _fitted(tile, known)
            for tile in tiles(max(q.shape[3], v.shape[3]), q.element_size(), device, known, terms)[1:]
        )
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
        numbers = (heads, heads // kv_heads, q_len, kv_len, scale, _inner_scale(scale, terms))
        modified = _term_arguments(q, k, terms)
        tensors, mask_strides = _mask_arguments(known, dq_tile, q.device)
        entries = batch if by_pair is None else len(by_pair)
        for first in range(0, batch, entries):
            _dq[(triton.cdiv(q_len, dq_tile.queries), min(entries, batch - first) * heads)](
                q, k, v, out.contiguous(), dout, lse, dlse, log_sum, delta, dq, *tensors, *numbers, *strides,
                *mask_strides, dlse_b=dlse.stride(0), dlse_h=dlse.stride(1), dlse_m=dlse.stride(2),
                dbias_BHMN=by_pair, first_entry=None if by_pair is None else first,
                HAS_DLSE=lse_flows(wanted), **modified, **_constants(q, v, known, dq_tile),
            )  # fmt: skip
        tensors, mask_strides = _mask_arguments(known, dkdv_tile, q.device, by_key=True)
        _dkdv[(triton.cdiv(kv_len, dkdv_tile.keys), batch * kv_heads)](
            q, k, v, dout, log_sum, delta, dk, dv, *tensors, *numbers, *strides, *mask_strides,
            dbias_BHN=by_key, **modified, **_constants(q, v, known, dkdv_tile),
        )  # fmt: skip
    if not modifying:
        return gradients
    dbias = q.new_empty(0)
    if terms.bias is not None and terms.bias_grad:
        if by_pair is not None:
            total = by_pair
        elif by_key is not None:
            total = by_key.unsqueeze(2)
        else:  # the score gradients of a query sum to those of its sink and lse
            total = delta * sink_share(terms.sinks, lse) + (dlse if lse_flows(wanted) else 0.0)
            total = total.masked_fill(lse == -math.inf, 0.0).unsqueeze(3)
        dbias = total.sum_to_size(terms.bias.shape).to(terms.bias.dtype)
    dsinks = q.new_empty(0) if terms.sinks is None else sink_gradient(terms.sinks, lse, delta)
    return (*gradients, dbias, dsinks)
