"""Attention masks given as tensors: recognised as a mask of ``kp.masks``, or kept as an additive bias."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from kernel_pytorch.masks import Mask, from_dense, full

__all__ = ["mask_and_bias", "recognised"]

_FAR_BELOW = -1e30  # models use lower values for "do not attend"; in float16 its lowest value
_LARGEST_READ = 1 << 28  # pairs


_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Cache of recognised tensors with their versions: the layers of a model share one mask."""


def mask_and_bias(tensor: torch.Tensor, q_len: int, kv_len: int) -> tuple[Mask, torch.Tensor | None]:
    """``recognised`` with a cache for tensors that have not changed."""
    if _fake(tensor) or tensor.is_inference() or tensor.requires_grad:
        return recognised(tensor, q_len, kv_len)
    key = (tensor._version, q_len, kv_len)
    found: tuple[object, tuple[Mask, torch.Tensor | None]] | None = _read.get(tensor)
    if found is None or found[0] != key:
        found = (key, recognised(tensor, q_len, kv_len))
        if found[1][1] is None:  # caching a bias would keep the tensor alive
            _read[tensor] = found
    return found[1]


def recognised(tensor: torch.Tensor, q_len: int, kv_len: int) -> tuple[Mask, torch.Tensor | None]:
    """Convert an ``attn_mask`` of SDPA to a mask and, where needed, an additive bias.

    Booleans that all heads share become a mask. Additive values become a mask if all of them are 0 or far below every
    score, and a bias otherwise.

    Args:
        tensor: broadcasts to (batch, heads, q_len, kv_len).
    """
    wide = tensor[(None,) * (4 - tensor.ndim)] if tensor.ndim < 4 else tensor
    if tensor.dtype == torch.bool:
        mask = _recognised(wide, q_len, kv_len)
        if mask is not None:
            return mask, None
        return full(), torch.zeros(wide.shape, device=wide.device).masked_fill_(~wide, -torch.inf)
    if not tensor.requires_grad and not _fake(tensor):
        kept = wide == 0
        lowest = max(_FAR_BELOW, torch.finfo(tensor.dtype).min)
        # Every row needs a 0: a row of low but finite values masks nothing, its softmax is over all keys.
        if bool((kept | (wide <= lowest)).all()) and bool(kept.any(dim=-1).all()):
            mask = _recognised(kept, q_len, kv_len)
            if mask is not None:
                return mask, None
    return full(), wide


def _fake(tensor: torch.Tensor) -> bool:
    return torch.compiler.is_compiling() or type(tensor) is not torch.Tensor


def _recognised(keep: torch.Tensor, q_len: int, kv_len: int) -> Mask | None:
    if _fake(keep) or (keep.shape[1] != 1 and not bool((keep == keep[:, :1]).all())):
        return None
    if keep.shape[0] * q_len * kv_len > _LARGEST_READ:
        return None
    try:
        return from_dense(keep[:, :1].expand(-1, 1, q_len, kv_len))
    except ValueError:  # too many runs of keys
        return None
