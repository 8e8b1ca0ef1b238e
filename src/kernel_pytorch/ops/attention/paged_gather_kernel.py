"""Paged attention in plain torch operations: gathers the keys of each row, then computes attention without pages.

Copies the lengths to the host (a synchronization) and the keys of every row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.ops.attention import tiled_kernel
from kernel_pytorch.ops.attention.definition import lse_dtype
from kernel_pytorch.ops.attention.paged import row_keys

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
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    lse = q.new_full(q.shape[:3], -math.inf, dtype=lse_dtype(q.dtype))
    for b, length in enumerate(lengths.tolist()):
        if length:
            keys, values = (row_keys(x, table[b], length) for x in (k, v))
            known = mask.simplified(q.shape[2], length)
            own = tiled_kernel.forward(device, q[b : b + 1], keys, values, known, scale, "lse")
            out[b : b + 1], lse[b : b + 1] = own
    return out, lse
