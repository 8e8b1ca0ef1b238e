"""PyTorch's flash attention for CPUs by its operators, which return the log-sum-exp and take it in the backward.

Computes in float32 (float64 for float64) whatever the tensors' dtype: in 16-bit dtypes torch uses a less accurate
exponential, visible in the log-sum-exp, and is not faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import TORCH_VERSION
from kernel_pytorch.ops.attention.definition import lse_dtype
from kernel_pytorch.ops.attention.torch_heads import adjacent, causal_flag, repeated, summed

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask


_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values for the operators, which support grouped heads from torch 2.13 on."""
    return (k, v) if TORCH_VERSION >= (2, 13) else repeated(q, k, v)


def _wide(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return adjacent(x if x.dtype == dtype else x.to(dtype))


def forward(
    device: Device, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, wanted: str
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = _heads(q, k, v)
    wide = [_wide(x, lse_dtype(q.dtype)) for x in (q, k, v)]
    causal = causal_flag(mask, q, k)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, causal, scale=scale)
    return out.to(q.dtype).contiguous(), lse.contiguous()


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
    k_all, v_all = _heads(q, k, v)
    wide = [_wide(x, lse.dtype) for x in (dout, q, k_all, v_all, out)]
    dq, dk, dv = _BACKWARD(*wide, lse, 0.0, causal_flag(mask, q, k), scale=scale)
    return summed(dq, q), summed(dk, k), summed(dv, v)


def masked_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    addends: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The backward with an additive mask that broadcasts to the scores; every query must attend to some key."""
    k_all, v_all = _heads(q, k, v)
    wide = [_wide(x, lse.dtype) for x in (dout, q, k_all, v_all, out)]
    dq, dk, dv = _BACKWARD(*wide, lse, 0.0, False, attn_mask=addends, scale=scale)
    return summed(dq, q), summed(dk, k), summed(dv, v)
