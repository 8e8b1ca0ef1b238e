"""``token_mean``: the mean over the tokens of all ranks, with its gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from kernel_pytorch.distributed.context import Context, group_of
from kernel_pytorch.ops.attention.definition import lse_dtype

__all__ = ["Scaled", "token_mean", "token_mean_over"]


def token_mean(values: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the mean of per-token values, such as losses, over the tokens of all ranks.

    The result is the same on every rank. Gradients must be *averaged* over the ranks of the group, as DDP and FSDP2
    do: each rank's gradient is scaled by the number of ranks, so that the average is exactly the gradient of the mean
    over all tokens. A mean of each rank's mean would be wrong if ranks have different numbers of tokens.

    Args:
        values: one value per token of this rank, of any shape; ranks may have different numbers of values, or none.
            Leave out ignored tokens, as in ``losses[labels != -100]``.
        group: a ``Context``, a process group, or one dimension of a DeviceMesh.

    Example:
        >>> import torch, torch.distributed as dist, kernel_pytorch as kp
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> losses = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
        >>> loss = kp.context_parallel.token_mean(losses, dist.group.WORLD)
        >>> loss.backward()
        >>> loss.item(), losses.grad
        (3.0, tensor([0.3333, 0.3333, 0.3333]))
        >>> dist.destroy_process_group()
    """
    process_group = group.group if isinstance(group, Context) else group_of(group)
    return token_mean_over(values, process_group, None)


def token_mean_over(values: torch.Tensor, group: dist.ProcessGroup, count: Any) -> torch.Tensor:
    """Return the sum over all ranks, divided by ``count``, or by the number of values of all ranks if it is None."""
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        raise TypeError(f"values={values!r}: expected a tensor of floating-point numbers, one for each token")
    # Not compiled: torch.compile cannot trace a collective inside an autograd function.
    mean: torch.Tensor = torch.compiler.disable(_Mean.apply)(values, group, count)
    return mean


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup, count: Any) -> torch.Tensor:
        # In float64, where counts are exact and the order of the ranks does not matter after rounding.
        sums = torch.stack(
            [values.sum(dtype=torch.float64), values.new_tensor(values.numel(), dtype=torch.float64)]
        )
        dist.all_reduce(sums, group=group)
        total = sums[1] if count is None else count
        ctx.shape, ctx.dtype = values.shape, values.dtype
        ctx.weight = dist.get_world_size(group) / total
        return (sums[0] / total).to(lse_dtype(values.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (gradient * ctx.weight).to(ctx.dtype).expand(ctx.shape), None, None


class Scaled(torch.autograd.Function):
    """Identity that multiplies the gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None
