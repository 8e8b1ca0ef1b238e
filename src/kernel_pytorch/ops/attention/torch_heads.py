"""Grouped heads for kernels that know only as many key heads as query heads."""

from __future__ import annotations

import torch

__all__ = ["adjacent", "repeated", "summed"]


def adjacent(x: torch.Tensor) -> torch.Tensor:
    """x with adjacent numbers in each row: torch's kernels read others as if they were, without a word."""
    return x if x.stride(-1) == 1 else x.contiguous()


def repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with one head for each query head."""
    group = q.shape[1] // k.shape[1]
    k, v = adjacent(k), adjacent(v)
    return (k, v) if group == 1 else (k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))


def summed(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gradient of repeated heads, summed in float32, contiguous."""
    if gradient.shape[1] != like.shape[1]:
        group = gradient.shape[1] // like.shape[1]
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        gradient = gradient.unflatten(1, (-1, group)).sum(dim=2, dtype=wide)
    return gradient.to(like.dtype).contiguous()
