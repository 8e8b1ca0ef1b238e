"""RoPE in plain torch operations with float32 arithmetic (float64 for float64): runs wherever torch does."""

from __future__ import annotations

import torch

from kernel_pytorch.hardware_abstraction.device import Device

_ELEMENTS_A_CHUNK = 1 << 17  # half a megabyte of float32: fits the second-level cache of a core


def _pairs(x: torch.Tensor, rotary: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and of the second element of every pair."""
    if interleaved:
        return x[..., 0:rotary:2], x[..., 1:rotary:2]
    return x[..., : rotary // 2], x[..., rotary // 2 : rotary]


def _applied(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, transposed: bool
) -> torch.Tensor:
    """The rotation of every head, or its transpose, which the backward takes."""
    rotary, wide = cos.shape[-1], torch.promote_types(x.dtype, torch.float32)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y[..., rotary:] = x[..., rotary:]
    cos_1, cos_2 = _pairs(cos.to(wide).unsqueeze(1), rotary, interleaved)
    sin_1, sin_2 = _pairs(sin.to(wide).unsqueeze(1), rotary, interleaved)
    if transposed:
        sin_1, sin_2 = -sin_2, -sin_1
    batch, heads, length, dim = x.shape
    # A GPU takes everything at once; a CPU goes through the tokens in chunks that stay in its cache.
    step = max(1, _ELEMENTS_A_CHUNK // (batch * heads * dim)) if x.is_cpu and x.numel() else max(1, length)
    for first in range(0, length, step):
        tokens = (..., slice(first, first + step), slice(None))
        x_1, x_2 = (part.to(wide) for part in _pairs(x[tokens], rotary, interleaved))
        y_1, y_2 = _pairs(y[tokens], rotary, interleaved)
        y_1.copy_(x_1 * cos_1[tokens] - x_2 * sin_1[tokens])
        y_2.copy_(x_2 * cos_2[tokens] + x_1 * sin_2[tokens])
    return y


def forward(
    device: Device,
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    k_out = q.new_empty(0) if k is None else _applied(k, cos, sin, interleaved, False)
    return _applied(q, cos, sin, interleaved, False), k_out


def backward(
    device: Device,
    dq_out: torch.Tensor,
    dk_out: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dk = dk_out if dk_out.ndim == 1 else _applied(dk_out, cos, sin, interleaved, True)
    return _applied(dq_out, cos, sin, interleaved, True), dk
