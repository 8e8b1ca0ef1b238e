"""RMSNorm for eager and compiled PyTorch: float32 accumulation, rounded once."""

from __future__ import annotations

import torch

from kernel_pytorch import Device


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def forward(
    device: Device, x: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x_wide = _wide(x)
    rstd = (x_wide.square().mean(-1) + eps).rsqrt()
    y = x_wide * rstd.unsqueeze(-1)
    y = y if weight is None else y * _wide(weight)
    return y.to(x.dtype).contiguous(), rstd


def backward(
    device: Device, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    gradient, x_hat = _wide(dy), _wide(x) * rstd.unsqueeze(-1)
    dweight = x.new_empty(0)
    if weight is not None:
        dweight = (gradient * x_hat).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        gradient = gradient * _wide(weight)
    dx = (gradient - x_hat * (gradient * x_hat).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return dx.to(x.dtype).contiguous(), dweight
