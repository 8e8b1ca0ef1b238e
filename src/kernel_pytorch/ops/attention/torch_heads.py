"""How PyTorch's own attention operators take the tensors and the mask of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask

__all__ = ["adjacent", "causal_flag", "repeated", "summed"]


def adjacent(x: torch.Tensor) -> torch.Tensor:
    """x with adjacent numbers in each row: torch's kernels read others as if they were, without a word."""
    return x if x.stride(-1) == 1 else x.contiguous()


def causal_flag(mask: Mask, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether a mask that these operators serve, so causal or full, is causal at these lengths."""
    return mask.simplified(q.shape[2], k.shape[2]).is_causal


def repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with one head for each query head, for operators that know no grouped heads."""
    group = q.shape[1] // k.shape[1]
    return (k, v) if group == 1 else (k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))


def summed(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gradient of repeated heads, summed in float32, contiguous."""
    if gradient.shape[1] != like.shape[1]:
        group = gradient.shape[1] // like.shape[1]
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        gradient = gradient.unflatten(1, (-1, group)).sum(dim=2, dtype=wide)
    return gradient.to(like.dtype).contiguous()
