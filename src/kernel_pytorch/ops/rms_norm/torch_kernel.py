"""RMSNorm in plain torch operations with float32 arithmetic: runs wherever torch does."""

from __future__ import annotations

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.ops.rms_norm.definition import rstd_dtype


def forward(
    device: Device, x: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.to(rstd_dtype(x.dtype))
    rstd = wide.square().mean(dim=-1).add_(eps).rsqrt_()
    y = wide * rstd.unsqueeze(-1)
    if weight is not None:
        y *= weight
    return y.to(x.dtype).contiguous(), rstd


def backward(
    device: Device, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = rstd.unsqueeze(-1)
    x_hat = x.to(rstd.dtype) * scale
    gradient = dy.to(rstd.dtype)
    if weight is None:
        dweight = x.new_empty(0)
    else:
        rows = (gradient * x_hat).reshape(-1, x.shape[-1])
        dweight = rows.sum(dim=0).to(weight.dtype)
        gradient = gradient * weight
    projection = (gradient * x_hat).mean(dim=-1, keepdim=True)
    dx = (gradient - x_hat.mul_(projection)).mul_(scale)
    return dx.to(x.dtype).contiguous(), dweight
