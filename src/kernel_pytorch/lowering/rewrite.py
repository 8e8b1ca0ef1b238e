"""Rewrite attention, RMS norms and quantized linears to custom operators before decomposition.

A mask that the graph computes from constants, such as a causal triangle, is recognised and becomes a mask of
``kp.masks``; any other mask stays a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torchao  # noqa: F401 - defines torch.ops.torchao
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from kernel_pytorch import kv_cache as _cache  # noqa: F401 - defines torch.ops.kernel_pytorch.cached_attention
from kernel_pytorch import masks
from kernel_pytorch.lowering import operators
from kernel_pytorch.lowering.constants import Constants, fold_constants
from kernel_pytorch.lowering.lengths import mask_of_a_length
from kernel_pytorch.lowering.packing import packing_refusal
from kernel_pytorch.lowering.patterns import quantized_rows, quantized_weights, written_out_norms
from kernel_pytorch.lowering.strided import as_size, equal
from kernel_pytorch.masks.code import NOT_IN_RUNTIME
from kernel_pytorch.ops import attention as _attention  # noqa: F401 - defines torch.ops.kernel_pytorch.attention
from kernel_pytorch.ops import rms_norm as _rms  # noqa: F401

__all__ = ["REWRITTEN", "FLOATS", "RefusedError", "attention_refusal", "recognised_mask", "rewritten"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_FAR_BELOW = -1e30  # or below means "do not attend": no finite score survives the addition


class RefusedError(Exception):
    """Raised if a node is not taken; the message becomes a line of the report."""


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[position] if position < len(node.args) else default


def tensor_of(node: Any) -> torch.Tensor:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise RefusedError(f"{node.name} is not a tensor")
    return value


def recognised_mask(dense: torch.Tensor, q_len: Any, kv_len: Any) -> masks.Mask | None:
    """Return the mask of kp.masks that equals a constant boolean or additive mask tensor, or None.

    Example:
        >>> recognised_mask(torch.ones(4, 4).tril().bool(), 4, 4)
        causal()
    """
    if dense.dtype != torch.bool:
        kept = dense == 0
        if not bool((kept | (dense <= _FAR_BELOW)).all()):
            return None
        dense = kept
    if dense.ndim < 2 or dense.numel() == 0:
        return None
    flat = dense.reshape(-1, *dense.shape[-2:])
    if not bool((flat == flat[0]).all()):
        return None
    rows = flat[0]
    if not bool(rows.any(dim=1).all()):
        return None  # rows without a key: large negative values and -inf give different results
    if bool(rows.all()):
        return masks.full()
    if tuple(rows.shape) != (q_len, kv_len):
        return None  # one row for all queries
    last_row = rows[-1].nonzero().flatten()
    left = kv_len - 1 - int(last_row[0])
    for candidate in (masks.causal(), masks.causal() & masks.window(left)):
        if torch.equal(candidate.dense(q_len, kv_len)[0, 0], rows):
            return candidate
    return None


def attention_refusal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    if q.dtype not in FLOATS:
        return f"q is {str(q.dtype).removeprefix('torch.')}; attention takes float32, float16 and bfloat16"
    if not (q.dtype == k.dtype == v.dtype):
        return "q, k and v differ in dtype"
    if not q.ndim == k.ndim == v.ndim == 4:
        return f"q has {q.ndim} dimensions; attention takes (batch, heads, length, head_dim)"
    return None


def rewritten(
    program: ExportedProgram, *, attention: bool = True, norms: bool = True, linears: bool = True
) -> ExportedProgram:
    """Return the program with our operators in it; unsupported patterns are unchanged."""
    constants = Constants(program)
    module = program.graph_module
    module.meta["kernel_pytorch_buffers"] = dict(program.graph_signature.inputs_to_buffers)
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)  # ExecuTorch removes them later too; they hide the users of a value
    changes = {**(_ATTENTION if attention else {}), **(_NORMS if norms else {}), **(_LINEARS if linears else {})}
    for node in list(module.graph.nodes):
        change = changes.get(node.target) if node.op == "call_function" else None
        if change is None:
            continue
        try:
            change(module, node, constants, program.range_constraints)
        except RefusedError as reason:
            node.meta["kernel_pytorch_refusal"] = str(reason)
    if norms:
        for found in written_out_norms(module.graph):
            try:
                joined = _norm(module, found.root, found.x, found.weight, found.eps)
            except RefusedError as reason:
                found.root.meta["kernel_pytorch_refusal"] = str(reason)
                continue
            found.root.replace_all_uses_with(joined)
    module.graph.eliminate_dead_code()
    fold_constants(program)
    _forget_cache_buffers(program)
    for node in module.graph.nodes:
        if node.target is torch.ops.kernel_pytorch.cached_attention.default:
            why = node.meta.get("kernel_pytorch_refusal", "the options leave out attention")
            raise ValueError(f"{node.name} is not taken, and no other backend has caches: {why}")
    module.recompile()
    return program


def _insert(module: GraphModule, before: Node, target: Any, *arguments: Any) -> Node:
    with module.graph.inserting_before(before):
        node = module.graph.call_function(target, arguments)
    with before.meta["val"].fake_mode if hasattr(before.meta["val"], "fake_mode") else torch.no_grad():
        values = torch.fx.node.map_arg(arguments, lambda source: source.meta["val"])
        node.meta = {key: value for key, value in before.meta.items() if key != "val"}
        node.meta["val"] = target(*values)
    return node


def _sdpa(module: GraphModule, node: Node, constants: Constants, ranges: Mapping[Any, Any]) -> None:
    q, k, v = (argument(node, at, name) for at, name in enumerate(("query", "key", "value")))
    bias, dropout, causal = (
        argument(node, 3, "attn_mask"),
        argument(node, 4, "dropout_p", 0.0),
        argument(node, 5, "is_causal", False),
    )
    scale, grouped = argument(node, 6, "scale"), argument(node, 7, "enable_gqa", False)
    if dropout:
        raise RefusedError(f"dropout_p={dropout}: call model.eval() before lowering")
    if any(tensor_of(x).ndim == 3 for x in (q, k, v)):
        q, k, v = (
            _insert(module, node, torch.ops.aten.unsqueeze.default, x, 1) if tensor_of(x).ndim == 3 else x
            for x in (q, k, v)
        )
        if bias is not None and tensor_of(bias).ndim == 3:
            bias = _insert(module, node, torch.ops.aten.unsqueeze.default, bias, 1)
    refusal = attention_refusal(tensor_of(q), tensor_of(k), tensor_of(v))
    if refusal:
        raise RefusedError(refusal)
    heads = [as_size(tensor_of(x).shape[1]) for x in (q, k, v)]
    broadcast = heads[1] == heads[2] == 1  # one key head for all query heads is grouped-query attention too
    if not grouped and not broadcast and not equal(heads[0], heads[1]):
        raise RefusedError("q and k differ in heads, and enable_gqa is not set")
    q_len, kv_len = (as_size(tensor_of(x).shape[2]) for x in (q, k))
    mask = masks.full()
    if causal:
        mask = masks.causal()
        if not equal(q_len, kv_len):
            # torch aligns is_causal with the first key: no query attends to keys at or after q_len.
            if not (isinstance(q_len, int) and isinstance(kv_len, int) and q_len <= kv_len):
                raise RefusedError(
                    f"is_causal with {q_len} queries and {kv_len} keys: pass a mask of kp.masks instead"
                )
            k, v = (_insert(module, node, torch.ops.aten.slice.Tensor, x, 2, 0, q_len) for x in (k, v))
    elif bias is not None:
        known = constants.of(bias)
        if isinstance(known, torch.Tensor):
            recognised = recognised_mask(known, q_len, kv_len)
        else:
            same = equal(q_len, kv_len)
            recognised = mask_of_a_length(bias, q_len, constants, ranges, recognised_mask) if same else None
        if recognised is not None:
            mask, bias = recognised, None
        elif tensor_of(bias).dtype not in (*FLOATS, torch.bool):
            raise RefusedError(f"attn_mask has dtype {tensor_of(bias).dtype}")
    scale = float(tensor_of(q).shape[-1]) ** -0.5 if scale is None else float(scale)
    found = _insert(module, node, operators.ATTENTION, q, k, v, bias, mask.code.tolist(), scale)
    if tensor_of(node).ndim == 3:
        found = _insert(module, node, torch.ops.aten.squeeze.dim, found, 1)
    node.replace_all_uses_with(found)
    module.graph.erase_node(node)


def _kp_attention(module: GraphModule, node: Node, constants: Constants, ranges: Mapping[Any, Any]) -> None:
    q, k, v, code, scale = node.args[:5]
    refusal = attention_refusal(tensor_of(q), tensor_of(k), tensor_of(v))
    if refusal:
        raise RefusedError(refusal)
    outputs = {user.args[1]: user for user in node.users}
    if 1 in outputs and outputs[1].users:
        raise RefusedError("the log-sum-exp is used; the delegate returns the output alone")
    known = constants.of(code) if isinstance(code, Node) else None
    if known is None:
        raise RefusedError(
            "the mask is an input of the model; make it inside forward, so that it is data of the program"
        )
    if masks.from_code(known).node.uses(*NOT_IN_RUNTIME):
        raise RefusedError(f"the mask is {masks.from_code(known)}, which the runtime does not read")
    found = _insert(module, node, operators.ATTENTION, q, k, v, None, known.tolist(), scale)
    if 0 in outputs:
        outputs[0].replace_all_uses_with(found)
    for user in list(node.users):
        module.graph.erase_node(user)
    module.graph.erase_node(node)


def _cached_attention(module: GraphModule, node: Node, constants: Constants, ranges: Mapping[Any, Any]) -> None:
    """Replace attention over a cache: its buffers become memory of the delegate, identified by name and shape."""
    q, k, v, position, keys, values = node.args[:6]
    window, sinks, scale = node.args[9:12]
    refusal = attention_refusal(tensor_of(q), tensor_of(k), tensor_of(v))
    if refusal:
        raise RefusedError(refusal)
    if any(user is not node for user in keys.users):  # type: ignore[union-attr]
        raise RefusedError("its cache is used more than once in a method")
    if constants.of(position) is not None:  # type: ignore[arg-type]
        raise RefusedError("its position is a constant; make it an input of the model, one int64 number")
    name = module.meta["kernel_pytorch_buffers"][keys.name].removesuffix("keys").rstrip(".")  # type: ignore[union-attr]
    batch, heads, slots, dim = tensor_of(keys).shape
    shape = [batch, heads, dim, tensor_of(values).shape[3], slots - sinks, sinks, window]  # type: ignore[operator]
    dtype = tensor_of(keys).dtype
    found = _insert(module, node, operators.CACHED_ATTENTION, q, k, v, position, name, dtype, shape, scale)
    node.replace_all_uses_with(found)
    module.graph.erase_node(node)


def _forget_cache_buffers(program: ExportedProgram) -> None:
    """Remove the program's buffers of caches that the delegate now holds."""
    taken = {node.args[4] for node in program.graph.nodes if node.target is operators.CACHED_ATTENTION}
    if not taken:
        return
    signature, kept = program.graph_signature, []
    buffers = signature.inputs_to_buffers
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec in signature.input_specs:
        target = buffers.get(getattr(spec.arg, "name", ""))
        placeholder = placeholders.get(getattr(spec.arg, "name", ""))
        owner = None if target is None else target.rpartition(".")[0]
        if owner in taken and placeholder is not None and not placeholder.users:
            program.graph.erase_node(placeholder)
            program.state_dict.pop(target, None)
            program.constants.pop(target, None)
        else:
            kept.append(spec)
    signature.input_specs[:] = kept


def _norm(module: GraphModule, node: Node, x: Any, weight: Any, eps: float) -> Node:
    if tensor_of(x).dtype not in FLOATS:
        raise RefusedError(f"x is {tensor_of(x).dtype}; norms take float32, float16 and bfloat16")
    return _insert(module, node, operators.RMS_NORM, x, weight, eps)


def _rms_norm(module: GraphModule, node: Node, constants: Constants, ranges: Mapping[Any, Any]) -> None:
    x, shape, weight = (
        argument(node, 0, "input"),
        argument(node, 1, "normalized_shape"),
        argument(node, 2, "weight"),
    )
    eps = argument(node, 3, "eps")
    if len(shape) != 1:
        raise RefusedError(f"normalises {len(shape)} dimensions; the last one alone is taken")
    eps = torch.finfo(tensor_of(x).dtype).eps if eps is None else eps
    node.replace_all_uses_with(_norm(module, node, x, weight, eps))
    module.graph.erase_node(node)


def _kp_rms_norm(module: GraphModule, node: Node, constants: Constants, ranges: Mapping[Any, Any]) -> None:
    x, weight, eps = (argument(node, at, name) for at, name in enumerate(("x", "weight", "eps")))
    outputs = {user.args[1]: user for user in node.users}
    if 1 in outputs and outputs[1].users:
        raise RefusedError("the reciprocal root is used; the delegate returns the output alone")
    found = _norm(module, node, x, weight, eps)
    if 0 in outputs:
        outputs[0].replace_all_uses_with(found)
    for user in list(node.users):
        module.graph.erase_node(user)
    module.graph.erase_node(node)


def _linear(module: GraphModule, node: Node, constants: Constants, ranges: Mapping[Any, Any]) -> None:
    """Replace a linear with quantized weights and floating-point or dynamically quantized activations."""
    x, weight, bias = argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")
    weights = quantized_weights(weight)
    if weights is None:
        return
    source = quantized_rows(x)
    if source is None and "quantize" in str(x.target):
        return  # static quantization: left to XNNPACK
    known = None if weights.zero_points is None else constants.of(weights.zero_points)
    if weights.zero_points is not None and (known is None or bool(known.any())):
        raise RefusedError("its weights have zero points; symmetric ones alone are taken")
    if tensor_of(x).dtype != torch.float32:
        raise RefusedError("linears are taken in float32")
    inputs, group = tensor_of(weights.data).shape[1], weights.group
    if source is None:
        if weights.bits != 8 or group != inputs:
            raise RefusedError(
                f"its weights have {weights.bits} bits in groups of {group} inputs: beside inputs that are not "
                "quantized, 8 bits with one scale an output are taken"
            )
        found = _insert(module, node, operators.LINEAR_INT8, x, weights.data, weights.scales, bias)
    else:
        refused = packing_refusal(inputs, inputs // group, weights.bits)
        if refused is not None:
            raise RefusedError(refused)
        operands = (source, weights.data, weights.scales, bias)
        found = _insert(module, node, operators.QUANTIZED_LINEAR, *operands, weights.bits)
    node.replace_all_uses_with(found)
    module.graph.erase_node(node)


Change = Callable[[GraphModule, Node, Constants, Mapping[Any, Any]], None]
_ATTENTION: dict[Any, Change] = {
    _SDPA: _sdpa,
    torch.ops.kernel_pytorch.attention.default: _kp_attention,
    torch.ops.kernel_pytorch.cached_attention.default: _cached_attention,
}
_LINEARS: dict[Any, Change] = {torch.ops.aten.linear.default: _linear}
_NORMS: dict[Any, Change] = {
    torch.ops.aten.rms_norm.default: _rms_norm,
    torch.ops.kernel_pytorch.rms_norm.default: _kp_rms_norm,
}
REWRITTEN = frozenset({*_ATTENTION, *_LINEARS, *_NORMS})
"""Operators that are replaced by an operator of the runtime if it supports their arguments."""
