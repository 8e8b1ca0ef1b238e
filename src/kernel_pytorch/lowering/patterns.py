"""RMS norms that a model writes out as powers, means and roots, found and joined before decomposition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

__all__ = ["WrittenOutNorm", "written_out_norms"]

_ATEN = torch.ops.aten
_CASTS = {_ATEN.to.dtype, _ATEN._to_copy.default, _ATEN.to.dtype_layout}


@dataclass(frozen=True)
class WrittenOutNorm:
    """``x * rsqrt(mean(x^2) + eps)``, perhaps cast back and scaled by a weight after."""

    root: Node
    """The node whose value the norm is."""
    x: Node
    weight: Node | None
    eps: float


def written_out_norms(graph: Graph) -> list[WrittenOutNorm]:
    """Every RMS norm in the graph that is written out."""
    return [norm for node in graph.nodes if (norm := _norm_at(node)) is not None]


def _is(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _norm_at(rsqrt: Node) -> WrittenOutNorm | None:
    if not _is(rsqrt, _ATEN.rsqrt.default) or len(rsqrt.users) != 1:
        return None
    added = rsqrt.args[0]
    if not _is(added, _ATEN.add.Tensor, _ATEN.add.Scalar) or not isinstance(added.args[1], (int, float)):  # type: ignore[union-attr]
        return None
    mean, eps = added.args[:2]  # type: ignore[union-attr]
    if not _is(mean, _ATEN.mean.dim) or not _along_last(mean) or eps < 0:  # type: ignore[arg-type, operator]
        return None
    x = _squared(mean.args[0])  # type: ignore[union-attr]
    (root,) = rsqrt.users
    if x is None or not _is(root, _ATEN.mul.Tensor) or set(root.args) != {x, rsqrt}:
        return None
    weight, root, x = _with_weight(root, x)
    return WrittenOutNorm(root, x, weight, float(eps))  # type: ignore[arg-type]


def _along_last(mean: Node) -> bool:
    axes = mean.args[1]
    rank = mean.args[0].meta["val"].ndim  # type: ignore[union-attr]
    keeps = mean.kwargs.get("keepdim", mean.args[2] if len(mean.args) > 2 else False)
    return bool(keeps) and [axis % rank for axis in axes] == [rank - 1]  # type: ignore[union-attr]


def _squared(node: Any) -> Node | None:
    if _is(node, _ATEN.pow.Tensor_Scalar) and node.args[1] == 2:
        return node.args[0]  # type: ignore[no-any-return]
    if _is(node, _ATEN.square.default):
        return node.args[0]  # type: ignore[no-any-return]
    if _is(node, _ATEN.mul.Tensor) and node.args[0] is node.args[1]:
        return node.args[0]  # type: ignore[no-any-return]
    return None


def _with_weight(root: Node, x: Node) -> tuple[Node | None, Node, Node]:
    """The weight that scales the norm, the node of the scaled norm, and what is normalised, cast or not."""
    scaled, before = root, x
    if _is(x, *_CASTS) and len(root.users) == 1 and _is(next(iter(root.users)), *_CASTS):
        source, back = x.args[0], next(iter(root.users))
        if isinstance(source, Node) and source.meta["val"].dtype == back.meta["val"].dtype:
            scaled, before = back, source
    if len(scaled.users) == 1:
        (user,) = scaled.users
        if _is(user, _ATEN.mul.Tensor):
            weight = user.args[0] if user.args[1] is scaled else user.args[1]
            if (
                isinstance(weight, Node)
                and weight is not scaled
                and tuple(weight.meta["val"].shape) == (scaled.meta["val"].shape[-1],)
                and user.meta["val"].dtype == scaled.meta["val"].dtype
            ):
                return weight, user, before
    return None, scaled, before
