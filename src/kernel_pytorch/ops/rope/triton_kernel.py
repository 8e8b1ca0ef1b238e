"""RoPE in Triton, one source for NVIDIA, AMD and Intel: one launch for q and k.

Memory-bound. A program takes a tile of tokens of one batch entry, loads their cos and sin once, and walks over heads
of q, then of k. Where few tokens leave compute units idle, as in decoding, the heads are divided among several
programs. The backward is the same walk with the transposed rotation.

Shapes: T tokens of a tile, P pairs of rotary dimensions.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_pytorch.hardware_abstraction.device import Device

_ELEMENTS_A_TILE = 1024  # of each of the six tensors that a step holds: eight a thread of four warps
_PROGRAMS_PER_UNIT = 4


@triton.jit
def _rotate_heads(
    x_BHSD,
    y_BHSD,
    heads,
    batch,
    token_T,
    inside_T,
    length,
    stride_b,
    stride_h,
    stride_s,
    cos_1_TP,
    cos_2_TP,
    sin_1_TP,
    sin_2_TP,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate the tile's tokens in heads program_id(1), program_id(1) + num_programs(1), ..."""
    pair = tl.arange(0, PAIRS)
    first = pair * 2 if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else ROTARY // 2)
    inside_TP = inside_T[:, None] & (pair < ROTARY // 2)[None, :]
    for head in tl.range(tl.program_id(1), heads, tl.num_programs(1)):
        x_T = x_BHSD + batch * stride_b + head * stride_h + token_T * stride_s
        y_T = y_BHSD + ((batch * heads + head) * length + token_T) * DIM
        x_1 = tl.load(x_T[:, None] + first[None, :], mask=inside_TP, other=0.0).to(tl.float32)
        x_2 = tl.load(x_T[:, None] + second[None, :], mask=inside_TP, other=0.0).to(tl.float32)
        y_1 = x_1 * cos_1_TP - x_2 * sin_1_TP
        y_2 = x_2 * cos_2_TP + x_1 * sin_2_TP
        tl.store(y_T[:, None] + first[None, :], y_1.to(y_BHSD.dtype.element_ty), mask=inside_TP)
        tl.store(y_T[:, None] + second[None, :], y_2.to(y_BHSD.dtype.element_ty), mask=inside_TP)
        if ROTARY < DIM:
            column = ROTARY + tl.arange(0, REST)
            inside = inside_T[:, None] & (column < DIM)[None, :]
            rest = tl.load(x_T[:, None] + column[None, :], mask=inside, other=0.0)
            tl.store(y_T[:, None] + column[None, :], rest, mask=inside)


@triton.jit
def _rotate_tile(
    q_BHSD,
    k_BHSD,
    cos_BSR,
    sin_BSR,
    q_out_BHSD,
    k_out_BHSD,
    sign,
    length,
    q_heads,
    k_heads,
    q_stride_b,
    q_stride_h,
    q_stride_s,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    cos_stride_b,
    cos_stride_s,
    sin_stride_b,
    sin_stride_s,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate, or apply the transposed rotation where sign is -1."""
    tiles = tl.cdiv(length, TOKENS)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    token_T = (tl.program_id(0) % tiles) * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
    inside_T = token_T < length
    pair = tl.arange(0, PAIRS)
    first = pair * 2 if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else ROTARY // 2)
    inside_TP = inside_T[:, None] & (pair < ROTARY // 2)[None, :]
    cos_T = cos_BSR + batch * cos_stride_b + token_T * cos_stride_s
    cos_1_TP = tl.load(cos_T[:, None] + first[None, :], mask=inside_TP, other=0.0).to(tl.float32)
    cos_2_TP = tl.load(cos_T[:, None] + second[None, :], mask=inside_TP, other=0.0).to(tl.float32)
    sin_T = sin_BSR + batch * sin_stride_b + token_T * sin_stride_s
    # y_1 = x_1 cos_1 - x_2 sin_1 and y_2 = x_2 cos_2 + x_1 sin_2: transposed, the sines change places and sign.
    of_1, of_2 = tl.where(sign > 0, first, second), tl.where(sign > 0, second, first)
    sin_1_TP = sign * tl.load(sin_T[:, None] + of_1[None, :], mask=inside_TP, other=0.0).to(tl.float32)
    sin_2_TP = sign * tl.load(sin_T[:, None] + of_2[None, :], mask=inside_TP, other=0.0).to(tl.float32)
    _rotate_heads(
        q_BHSD, q_out_BHSD, q_heads, batch, token_T, inside_T, length, q_stride_b, q_stride_h, q_stride_s,
        cos_1_TP, cos_2_TP, sin_1_TP, sin_2_TP, DIM, ROTARY, INTERLEAVED, PAIRS, REST,
    )  # fmt: skip
    _rotate_heads(
        k_BHSD, k_out_BHSD, k_heads, batch, token_T, inside_T, length, k_stride_b, k_stride_h, k_stride_s,
        cos_1_TP, cos_2_TP, sin_1_TP, sin_2_TP, DIM, ROTARY, INTERLEAVED, PAIRS, REST,
    )  # fmt: skip


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x with adjacent elements in its last dimension; copied only where its strides differ."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _launch(
    device: Device,
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    sign: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, q_heads, length, dim = q.shape
    rotary = cos.shape[-1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(0 if k is None else k.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return q_out, k_out
    q, cos, sin = _rows(q), _rows(cos), _rows(sin)
    k_heads, k = (0, q) if k is None else (k.shape[1], _rows(k))
    pairs = triton.next_power_of_2(rotary // 2)
    tokens = min(max(1, _ELEMENTS_A_TILE // pairs), triton.next_power_of_2(length))
    tiles = batch * triton.cdiv(length, tokens)
    groups = triton.cdiv(_PROGRAMS_PER_UNIT * max(1, device.compute_units), tiles)
    _rotate_tile[(tiles, min(groups, max(q_heads, k_heads)))](
        q,
        k,
        cos,
        sin,
        q_out,
        k_out,
        sign,
        length,
        q_heads,
        k_heads,
        *q.stride()[:3],
        *k.stride()[:3],
        *((cos.stride(0), cos.stride(1)) if cos.shape[0] > 1 else (0, cos.stride(1))),
        *((sin.stride(0), sin.stride(1)) if sin.shape[0] > 1 else (0, sin.stride(1))),
        DIM=dim,
        ROTARY=rotary,
        INTERLEAVED=interleaved,
        TOKENS=tokens,
        PAIRS=pairs,
        REST=triton.next_power_of_2(max(1, dim - rotary)),
        num_warps=max(1, 4 * 32 // max(32, device.warp_size)),
    )
    return q_out, k_out


def forward(
    device: Device,
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch(device, q, k, cos, sin, interleaved, 1.0)


def backward(
    device: Device,
    dq_out: torch.Tensor,
    dk_out: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dk = None if dk_out.ndim == 1 else dk_out
    return _launch(device, dq_out, dk, cos, sin, interleaved, -1.0)
