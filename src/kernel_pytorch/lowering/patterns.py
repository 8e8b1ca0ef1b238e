"""Match patterns before decomposition: RMS norms written out in torch operators, and torchao's quantized linears."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

__all__ = ["QuantizedWeights", "WrittenOutNorm", "quantized_rows", "quantized_weights", "written_out_norms"]

_ATEN = torch.ops.aten
_CASTS = {_ATEN.to.dtype, _ATEN._to_copy.default, _ATEN.to.dtype_layout}


@dataclass(frozen=True)
class WrittenOutNorm:
    """``x * rsqrt(mean(x^2) + eps)``, optionally cast back and then scaled by a weight."""

    root: Node
    """The node whose value is the norm's result."""
    x: Node
    weight: Node | None
    eps: float


def written_out_norms(graph: Graph) -> list[WrittenOutNorm]:
    """Return every RMS norm in the graph that is written out in torch operators."""
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
    """Return the norm's weight or None, the node of the scaled norm, and the normalised tensor before any cast."""
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


@dataclass(frozen=True)
class QuantizedWeights:
    """Integer weights of shape (outputs, inputs), as torchao dequantizes them."""

    data: Node
    scales: Node
    """(outputs, groups), or (outputs,) for one group."""
    zero_points: Node | None
    bits: int
    group: int
    """Number of inputs that share a scale."""


def quantized_weights(weight: Any) -> QuantizedWeights | None:
    """Return the weights behind ``dequantize_affine`` or ``dequantize_per_channel``; None for other nodes."""
    if _named(weight, "torchao.dequantize_affine.default"):
        data, block, scales, zero_points, _, low, high = weight.args[:7]
        if block[0] != 1:
            return None
        group = block[1]
    elif _named(weight, "quantized_decomposed.dequantize_per_channel.default"):
        data, scales, zero_points, axis, low, high = weight.args[:6]
        if axis != 0:
            return None
        group = data.meta["val"].shape[-1]
    else:
        return None
    value = data.meta["val"]
    bits = {7: 4, 127: 8}.get(high)
    if value.dtype != torch.int8 or value.ndim != 2 or bits is None or low < -high - 1:
        return None
    return QuantizedWeights(data, scales, zero_points, bits, group)


def quantized_rows(x: Any) -> Node | None:
    """Return the tensor whose asymmetric dynamic 8-bit quantization ``x`` is; None for other nodes.

    torchao's operators use one range per row. PT2E's ``choose_qparams`` uses one for all rows; XNNPACK and our
    delegate use one per row instead, which is never wider.
    """
    of_choose: tuple[Any, ...]
    if _named(x, "torchao.dequantize_affine.default"):
        quantize, choose = "torchao.quantize_affine.default", "torchao.choose_qparams_affine.default"
        scale_at, of_choose = 2, ("ASYMMETRIC", [1] * (x.meta["val"].ndim - 1) + [x.meta["val"].shape[-1]])
    elif _named(x, "quantized_decomposed.dequantize_per_tensor.tensor"):
        quantize, choose = (
            "quantized_decomposed.quantize_per_tensor.tensor",
            "quantized_decomposed.choose_qparams.tensor",
        )
        scale_at, of_choose = 1, (-128, 127)
    else:
        return None
    data, scale, zero_point = x.args[0], x.args[scale_at], x.args[scale_at + 1]
    if not _named(data, quantize) or data.args[scale_at : scale_at + 2] != (scale, zero_point):
        return None
    chosen: Any = scale.args[0] if _is(scale, operator.getitem) else None
    if not _named(chosen, choose) or chosen.args[0] is not data.args[0]:
        return None
    if [str(given) for given in chosen.args[1:3]] != [str(wanted) for wanted in of_choose]:
        return None
    limits = [argument for argument in (*x.args, *data.args) if argument in (-128, 127)]
    return data.args[0] if limits == [-128, 127] * 2 else None


def _named(node: Any, name: str) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and str(node.target) == name
