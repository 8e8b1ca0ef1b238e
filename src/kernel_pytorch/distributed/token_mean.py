"""``token_mean``: the mean over the tokens of all ranks, with its gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from kernel_pytorch.distributed.context import Context, group_of
from kernel_pytorch.ops.attention.definition import lse_dtype

__all__ = ["Scaled", "token_mean", "token_mean_over"]


def token_mean(values: torch.Tensor, group: Any) -> torch.Tensor:
    """The mean over the tokens of all ranks of what this rank has for each of its own, such as their losses.

    Its value is the same on every rank. Its gradient is made for gradients that are *averaged* over the ranks of the
    group, as DDP and FSDP2 do: their average is then exactly the gradient of the mean over all tokens. Each rank's
    gradient is scaled by the number of ranks for that; a mean of each rank's own mean would be wrong where ranks
    hold different numbers of tokens.

    Args:
        values: one number for each token of this rank that counts, of any shape; ranks may have different numbers
            of them, or none. Leave out those that do not count, as in ``losses[labels != -100]``.
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
    """The sum over all ranks, divided by ``count`` or else by the number of values of all ranks."""
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        raise TypeError(f"values={values!r}: expected a tensor of floating-point numbers, one for each token")
    # Not compiled: a collective inside an autograd function is nothing that torch.compile can trace.
    mean: torch.Tensor = torch.compiler.disable(_Mean.apply)(values, group, count)
    return mean


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup, count: Any) -> torch.Tensor:
        # In float64, in which a count is exact and the order of the ranks' sums does not show.
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
    """The tensor itself, with its gradient times a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None
