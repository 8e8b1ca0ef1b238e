"""PyTorch's flash attention for GPUs by its operators, which return the log-sum-exp and take it in the backward.

The operators support grouped-query attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.ops.attention.torch_heads import adjacent, causal_flag

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask


def forward(
    device: Device, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, wanted: str
) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        adjacent(q), adjacent(k), adjacent(v), 0.0, causal_flag(mask, q, k), False, scale=scale
    )
    return found[0].contiguous(), found[1].contiguous()


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
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # seed and offset of dropout, which is off
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        adjacent(dout),
        adjacent(q),
        adjacent(k),
        adjacent(v),
        out,
        lse,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal_flag(mask, q, k),
        unused,
        unused,
        scale=scale,
    )
    return dq.contiguous(), dk.contiguous(), dv.contiguous()
