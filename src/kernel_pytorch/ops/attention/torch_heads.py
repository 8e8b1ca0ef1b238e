"""Convert the tensors and the mask of a call for PyTorch's own attention operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask

__all__ = ["adjacent", "causal_flag", "repeated", "summed"]


def adjacent(x: torch.Tensor) -> torch.Tensor:
    """Return x with contiguous rows. torch's kernels silently misread other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def causal_flag(mask: Mask, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return whether a mask that is causal or full is causal at these lengths."""
    return mask.simplified(q.shape[2], k.shape[2]).is_causal


def repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat keys and values to one head per query head, for operators without grouped-query attention."""
    group = q.shape[1] // k.shape[1]
    return (k, v) if group == 1 else (k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))


def summed(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Sum the gradient of repeated heads in float32; contiguous."""
    if gradient.shape[1] != like.shape[1]:
        group = gradient.shape[1] // like.shape[1]
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        gradient = gradient.unflatten(1, (-1, group)).sum(dim=2, dtype=wide)
    return gradient.to(like.dtype).contiguous()
