"""Context parallelism: a sequence sharded across ranks, and attention over all of it.

``Context`` places the tokens and is passed to ``kp.attention(..., group=context)``. A process group or mesh dimension
may be passed instead; the tokens then must be placed for the call's mask by ``shard`` and ``unshard``.
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
    """Return this rank's tokens of a tensor that every rank has in full, placed for the mask.

    Example:
        >>> import torch, torch.distributed as dist, kernel_pytorch as kp
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> kp.context_parallel.shard(torch.randn(2, 10, 8), kp.masks.causal(), dist.group.WORLD).shape
        torch.Size([2, 10, 8])
        >>> dist.destroy_process_group()
    """
    return Context(group, x.shape[dim], mask).shard(x, dim)


def unshard(x: torch.Tensor, mask: Mask, group: Any, dim: int = 1) -> torch.Tensor:
    """Return the full tensor on every rank, from the tokens that ``shard`` with this mask gave each rank."""
    return Context(group, total_length(x.shape[dim], group), mask).unshard(x, dim)


def positions(length: int, mask: Mask, group: Any) -> torch.Tensor:
    """Return the positions of this rank's tokens, for rotary embeddings."""
    return Context(group, length, mask).positions()
