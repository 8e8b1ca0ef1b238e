"""A sequence spread over ranks, and attention over all of it.

``Context`` places the tokens and goes into ``kp.attention(..., group=context)``; a bare process group or mesh
dimension does too, with tokens placed for the call's mask, as ``shard`` and ``unshard`` here place them.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_pytorch.distributed.chunks import Chunks
from kernel_pytorch.distributed.context import Context, total_length
from kernel_pytorch.distributed.cost import LINKS, Link, measure_link
from kernel_pytorch.distributed.module import parallelize
from kernel_pytorch.distributed.placement import Placement, place
from kernel_pytorch.distributed.token_mean import token_mean
from kernel_pytorch.distributed.tokenwise import chunked_layer, tokenwise
from kernel_pytorch.distributed.transport import RankError
from kernel_pytorch.masks import Mask

__all__ = [
    "LINKS",
    "Chunks",
    "Context",
    "Link",
    "Placement",
    "RankError",
    "chunked_layer",
    "measure_link",
    "parallelize",
    "place",
    "positions",
    "shard",
    "token_mean",
    "tokenwise",
    "unshard",
]


def shard(x: torch.Tensor, mask: Mask, group: Any, dim: int = 1) -> torch.Tensor:
    """This rank's tokens of a tensor that every rank has whole, placed for the mask.

    Example:
        >>> import torch, torch.distributed as dist, kernel_pytorch as kp
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> kp.context_parallel.shard(torch.randn(2, 10, 8), kp.masks.causal(), dist.group.WORLD).shape
        torch.Size([2, 10, 8])
        >>> dist.destroy_process_group()
    """
    return Context(group, x.shape[dim], mask).shard(x, dim)


def unshard(x: torch.Tensor, mask: Mask, group: Any, dim: int = 1) -> torch.Tensor:
    """The whole tensor, on every rank, from each rank's tokens as ``shard`` with this mask placed them."""
    return Context(group, total_length(x.shape[dim], group), mask).unshard(x, dim)


def positions(length: int, mask: Mask, group: Any) -> torch.Tensor:
    """The positions of this rank's tokens, as rotary embeddings need them."""
    return Context(group, length, mask).positions()
