"""How a norm and the layers behind it find each other inside torch.compile.

In eager mode a norm casts its output for the layers behind it (``offer``). A compiler works out norms by itself,
together with what comes before them, so here it is the other way round: the output says what it is the norm of, and
the first layer makes its cast from that. If nobody else needs the output, the compiler leaves it out.

Attributes of tensors are lost on Dynamo, so it puts these functions into its graph as they are; ``traced_linear``
explains.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Unwritten", "as_norm_of", "unwritten"]

_MARK = "_fp8_norm"


class Unwritten(NamedTuple):
    """What a norm's output is made of: x, the reciprocals of its rows' root mean squares, and the norm's weight."""

    x: torch.Tensor | None = None
    """(rows, columns)."""
    rstd: torch.Tensor | None = None
    weight: torch.Tensor | None = None


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def as_norm_of(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """y, which is the norm of x, and knows it."""
    marked = y.view(y.shape)
    weight_version = None if weight is None else weight._version
    setattr(marked, _MARK, (marked._version, x, x._version, weight, weight_version, eps))
    return marked


def unwritten(y: torch.Tensor) -> Unwritten:
    """What y is made of, where it is a norm and nothing has changed since; of None where not."""
    mark = getattr(y, _MARK, None)
    if mark is None:
        return Unwritten()
    version, x, x_version, weight, weight_version, eps = mark
    if version != y._version or x._version != x_version:
        return Unwritten()
    if weight is not None and weight._version != weight_version:
        return Unwritten()
    x_RH = x.detach().reshape(-1, x.shape[-1])
    mean = x_RH.float().pow(2).mean(dim=-1, keepdim=True)
    rstd = torch.rsqrt(mean.add(eps)).reshape(-1)
    return Unwritten(x_RH, rstd, None if weight is None else weight.detach())
