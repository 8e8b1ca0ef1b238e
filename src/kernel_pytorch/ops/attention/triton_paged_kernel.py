"""Paged attention by the split-KV Triton kernel, which reads the page table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.ops.attention.triton_split_kv_kernel import split_kv

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask


def forward(
    device: Device,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    mask: Mask,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return split_kv(device, q, k, v, mask, scale, "out", pages=(table, lengths.contiguous()))
