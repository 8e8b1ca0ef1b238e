"""RMSNorm in plain torch operations with float32 arithmetic: runs wherever torch does.

Works through the rows in pieces small enough that what one operation writes is still in the cache when the
next one reads it.
"""

from __future__ import annotations

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.ops.rms_norm.definition import rstd_dtype

_NUMBERS_A_PIECE = 1 << 17  # half a megabyte of float32: fits the second-level cache of today's cores


def _pieces(x_RH: torch.Tensor) -> range:
    """First rows of the pieces; a GPU, with its far larger appetite, takes all rows at once."""
    rows, hidden = x_RH.shape
    return range(0, rows, max(1, _NUMBERS_A_PIECE // hidden if x_RH.is_cpu else rows))


def forward(
    device: Device, x: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = rstd_dtype(x.dtype)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=wide, device=x.device)
    x_RH, y_RH, rstd_R = x.reshape(-1, x.shape[-1]), y.view(-1, x.shape[-1]), rstd.view(-1)
    weight_H = None if weight is None else weight.to(wide)
    pieces = _pieces(x_RH)
    for first in pieces:
        piece = slice(first, first + pieces.step)
        x_piece = x_RH[piece].to(wide)
        scale = x_piece.square().mean(dim=-1).add_(eps).rsqrt_()
        rstd_R[piece] = scale
        normal = x_piece * scale.unsqueeze(-1)
        y_RH[piece] = normal if weight_H is None else normal.mul_(weight_H)
    return y, rstd


def backward(
    device: Device, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dy_RH, x_RH, dx_RH = dy.reshape(-1, hidden), x.reshape(-1, hidden), dx.view(-1, hidden)
    rstd_R = rstd.reshape(-1, 1)
    weight_H = None if weight is None else weight.to(rstd.dtype)
    pieces = _pieces(x_RH)
    shares = rstd.new_empty(0 if weight is None else len(pieces), hidden)
    for number, first in enumerate(pieces):
        piece = slice(first, first + pieces.step)
        scale = rstd_R[piece]
        x_hat = x_RH[piece].to(rstd.dtype) * scale
        gradient = dy_RH[piece].to(rstd.dtype)
        if weight_H is not None:
            torch.sum(gradient * x_hat, dim=0, out=shares[number])
            gradient = gradient * weight_H
        projection = (gradient * x_hat).mean(dim=-1, keepdim=True)
        dx_RH[piece] = (gradient - x_hat.mul_(projection)).mul_(scale)
    dweight = x.new_empty(0) if weight is None else shares.sum(dim=0).to(weight.dtype)
    return dx, dweight
