"""How a norm and the layers behind it find each other inside torch.compile.

In eager mode a norm casts its output for the layers behind it (``offer``). A compiler works out norms by itself,
together with what comes before them, so here it is the other way round: the output says what it is the norm of, and
the first layer makes its cast from that. If nobody else needs the output, the compiler leaves it out.

Attributes of tensors are lost on Dynamo, so it puts ``norm_of`` into its graph as it is; ``traced_linear`` explains.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

__all__ = ["Unwritten", "norm_of", "unwritten"]

_MARK = "_fp8_norm_of"


class Unwritten(NamedTuple):
    """What a norm's output is made of: x, the reciprocals of its rows' root mean squares, and the norm's weight."""

    x: torch.Tensor | None = None
    """(rows, columns)."""
    rstd: torch.Tensor | None = None
    weight: torch.Tensor | None = None


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def norm_of(_: str, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The RMSNorm of x over its last dimension, which knows what it is where a gradient may flow."""
    y: torch.Tensor
    y, rstd = _Norm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    if y.requires_grad:
        setattr(y, _MARK, (y._version, x, x._version, weight, None if weight is None else weight._version, rstd))
    return y


def unwritten(y: torch.Tensor, history: torch.Tensor | None) -> Unwritten:
    """What y is made of, where it is of ``norm_of`` and nothing has changed since; of None where not.

    Nor without a history: nothing else has a scale before all of a norm is there. Changes past the version counter,
    through ``.data``, go unnoticed between a norm and a layer of one graph.
    """
    mark = getattr(y, _MARK, None)
    if mark is None or history is None:
        return Unwritten()
    version, x, x_version, weight, weight_version, rstd = mark
    if version != y._version or x._version != x_version:
        return Unwritten()
    if weight is not None and weight._version != weight_version:
        return Unwritten()
    x_RH = x.detach().reshape(-1, x.shape[-1])
    return Unwritten(x_RH, rstd.detach().reshape(-1), None if weight is None else weight.detach())


class _Norm(torch.autograd.Function):
    """In the operators that torch's own is made of, so that a compiler makes of them what it makes of that.

    That rstd is one of the results, and not worked out once more for the cast, keeps it out of the backward, which
    would otherwise have a sum to wait for before it can begin with its own.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, ...]:
        wide = x.float()
        rstd = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True).add(eps))
        normal = wide * rstd
        ctx.save_for_backward(x, weight, rstd)
        ctx.mark_non_differentiable(rstd)
        return (normal if weight is None else normal * weight.float()).to(x.dtype), rstd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, _: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        wide_dy, normal = dy.float(), x.float() * rstd
        upstream = wide_dy if weight is None else wide_dy * weight.float()
        total = torch.sum(normal * upstream, dim=-1, keepdim=True)
        dx = (upstream - (normal / x.shape[-1]) * total) * rstd
        if weight is None:
            return dx.to(x.dtype), None, None
        dweight = wide_dy * normal
        if x.ndim > 1:
            dweight = torch.sum(dweight, dim=tuple(range(x.ndim - 1)))
        return dx.to(x.dtype), dweight.to(weight.dtype), None
