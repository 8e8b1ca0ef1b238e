"""The table of operators that the delegate supports: one rule per operator, with its checks and its emitter.

A rule returns why a node is not taken, and emits a node that is. The partitioner, the preprocessor, the report and
the documentation all read this table.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Node

from kernel_pytorch.lowering.constants import Constants, narrowed
from kernel_pytorch.lowering.emitter import Emitter
from kernel_pytorch.lowering.packing import PackedWeights, pack_quantized_weights
from kernel_pytorch.lowering.payload import MOST_DIMENSIONS, PANEL, Cache, OpCode, Reduction, Step
from kernel_pytorch.lowering.rewrite import FLOATS, argument, attention_refusal
from kernel_pytorch.lowering.strided import Size, Strided, as_size, broadcast, equal, product

__all__ = ["RULES", "Rule", "cache_of", "emit_node", "operator_name", "refusal"]

Kind = Literal["attention", "linear", "norm", "softmax", "activation", "pointwise", "reduction", "view"]


@dataclass(frozen=True)
class Rule:
    """Checks and emitter of one operator."""

    kind: Kind
    emit: Callable[[Emitter, Node], None]
    check: Callable[[Node], str | None] = lambda node: None
    """Return why a node is not taken, in addition to the checks of every node; None if it is."""
    constants: tuple[int, ...] = ()
    """Positions of the arguments that must be constant, if given."""
    whole_numbers: tuple[int, ...] = ()
    """Positions of the arguments that are integer tensors."""


RULES: dict[str, Rule] = {}
"""Rules by operator name, such as ``aten::gelu``."""


def operator_name(node: Node) -> str:
    """Return the operator name of a node in any dialect."""
    target = getattr(node.target, "_op", node.target)
    name = getattr(target, "name", None)
    return str(name()) if callable(name) else getattr(target, "__name__", str(target))


def refusal(node: Node, constants: Constants) -> str | None:
    """Return why the delegate does not take a node, or None."""
    if node.target is operator.getitem:
        source = node.args[0]
        return refusal(source, constants) if isinstance(source, Node) else "is no part of a tensor operator"
    rule = RULES.get(operator_name(node))
    if rule is None:
        return "no rule for this operator"
    for position in rule.constants:
        own = node.args[position] if position < len(node.args) else None
        if isinstance(own, Node) and not isinstance(constants.of(own), torch.Tensor):
            return f"{own.name} is not known ahead of time"
    if rule.kind != "view":
        for source in node.all_input_nodes:
            if source in [node.args[at] for at in rule.whole_numbers]:
                continue
            value = source.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.dtype in (*FLOATS, torch.bool):
                continue
            if not isinstance(constants.of(source), torch.Tensor):
                return (
                    f"{source.name} is {str(value.dtype).removeprefix('torch.')}; floating numbers alone are taken"
                )
    return _general_refusal(node) or rule.check(node)


def _general_refusal(node: Node) -> str | None:
    known = node.meta.get("val")
    for value in known if isinstance(known, (tuple, list)) else (known,):
        if not isinstance(value, torch.Tensor):
            return "its result is no tensor"
        if value.ndim > MOST_DIMENSIONS:
            return f"its result has {value.ndim} dimensions; {MOST_DIMENSIONS} are the most"
        if value.dtype not in FLOATS:
            return f"its result is {str(value.dtype).removeprefix('torch.')}; floating numbers alone are taken"
    return None


def emit_node(emitter: Emitter, node: Node) -> None:
    if node.target is operator.getitem:
        emitter.set(node, emitter.result(node.args[0])[node.args[1]])
    else:
        RULES[operator_name(node)].emit(emitter, node)


def _tensors(node: Node) -> Iterator[tuple[str, torch.Tensor]]:
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if isinstance(value, torch.Tensor):
            yield source.name, value


def _dims(node: Node) -> tuple[Size, ...]:
    return tuple(as_size(size) for size in node.meta["val"].shape)


# Pointwise


def _check_pointwise(node: Node) -> str | None:
    for name, value in _tensors(node):
        if value.dtype not in (*FLOATS, torch.bool) and value.numel() != 1:
            return f"{name} is {str(value.dtype).removeprefix('torch.')}; floating numbers alone are taken"
    if operator_name(node) == "aten::div.Tensor_mode" and node.kwargs.get("rounding_mode"):
        return "rounds its quotient"
    return None


def _check_cast(node: Node) -> str | None:
    for name, value in _tensors(node):
        if value.dtype not in (*FLOATS, torch.bool):
            return f"{name} is {str(value.dtype).removeprefix('torch.')}; floating numbers alone are taken"
    return None


def _pointwise(step: Step, count: int) -> Callable[[Emitter, Node], None]:
    return lambda emitter, node: emitter.pointwise(node, step, *node.args[:count])


def _sum(step: Step) -> Callable[[Emitter, Node], None]:
    def emit(emitter: Emitter, node: Node) -> None:
        left, right = node.args[:2]
        alpha = argument(node, 2, "alpha", 1)
        scaled = right if alpha == 1 else emitter.lazy(node, Step.MULTIPLY, right, alpha)
        emitter.pointwise(node, step, left, scaled)

    return emit


for _name, _step in {
    "add.Tensor": Step.ADD,
    "add.Scalar": Step.ADD,
    "sub.Tensor": Step.SUBTRACT,
    "sub.Scalar": Step.SUBTRACT,
}.items():
    RULES[f"aten::{_name}"] = Rule("pointwise", _sum(_step), _check_pointwise)
for _name, _step in {
    "mul.Tensor": Step.MULTIPLY,
    "mul.Scalar": Step.MULTIPLY,
    "div.Tensor": Step.DIVIDE,
    "div.Scalar": Step.DIVIDE,
    "maximum": Step.MAXIMUM,
    "minimum": Step.MINIMUM,
}.items():
    RULES[f"aten::{_name}"] = Rule("pointwise", _pointwise(_step, 2), _check_pointwise)
for _name, _step in {
    "neg": Step.NEGATE,
    "abs": Step.ABSOLUTE,
    "exp": Step.EXP,
    "log": Step.LOG,
    "sqrt": Step.SQRT,
    "rsqrt": Step.RSQRT,
    "reciprocal": Step.RECIPROCAL,
    "relu": Step.RELU,
    "sin": Step.SIN,
    "cos": Step.COS,
}.items():
    RULES[f"aten::{_name}"] = Rule("pointwise", _pointwise(_step, 1), _check_pointwise)
for _name, _step in {"sigmoid": Step.SIGMOID, "tanh": Step.TANH, "erf": Step.ERF, "silu": Step.SILU}.items():
    RULES[f"aten::{_name}"] = Rule("activation", _pointwise(_step, 1), _check_pointwise)


def _emit_gelu(emitter: Emitter, node: Node) -> None:
    step = Step.GELU_TANH if argument(node, 1, "approximate", "none") == "tanh" else Step.GELU
    emitter.pointwise(node, step, node.args[0])


def _emit_power(emitter: Emitter, node: Node) -> None:
    base, exponent = node.args[:2]
    if exponent == 2:
        emitter.pointwise(node, Step.MULTIPLY, base, base)
    elif exponent == 0.5:
        emitter.pointwise(node, Step.SQRT, base)
    else:
        emitter.pointwise(node, Step.POWER, base, exponent)


def _emit_cast(emitter: Emitter, node: Node) -> None:
    if node.meta["val"].dtype == emitter.result(node.args[0]).dtype:
        emitter.set(node, emitter.view(node.args[0]))
    else:
        emitter.pointwise(node, Step.COPY, node.args[0])


def _clamped(emitter: Emitter, node: Node, x: Any, low: Any, high: Any) -> Any:
    if low is not None:
        x = emitter.lazy(node, Step.MAXIMUM, x, low)
    return x if high is None else emitter.lazy(node, Step.MINIMUM, x, high)


def _emit_clamp(emitter: Emitter, node: Node) -> None:
    default = (-1.0, 1.0) if operator_name(node) == "aten::hardtanh" else (None, None)
    low, high = (argument(node, at, name, default[at - 1]) for at, name in ((1, "min"), (2, "max")))
    emitter.pointwise(node, Step.COPY, _clamped(emitter, node, node.args[0], low, high))


def _emit_leaky(emitter: Emitter, node: Node) -> None:
    slope = argument(node, 1, "negative_slope", 0.01)
    scaled = emitter.lazy(node, Step.MULTIPLY, node.args[0], slope)
    emitter.pointwise(node, Step.MAXIMUM, node.args[0], scaled)


def _check_leaky(node: Node) -> str | None:
    slope = argument(node, 1, "negative_slope", 0.01)
    return _check_pointwise(node) if 0 <= slope <= 1 else f"negative_slope={slope} is not within 0 and 1"


def _emit_hard(emitter: Emitter, node: Node) -> None:
    moved = emitter.lazy(node, Step.ADD, node.args[0], 3.0)
    share = emitter.lazy(node, Step.DIVIDE, _clamped(emitter, node, moved, 0.0, 6.0), 6.0)
    if operator_name(node) == "aten::hardswish":
        emitter.pointwise(node, Step.MULTIPLY, share, node.args[0])
    else:
        emitter.pointwise(node, Step.COPY, share)


def _emit_logarithm(emitter: Emitter, node: Node) -> None:
    base = {"aten::log2": 2.0, "aten::log10": 10.0}[operator_name(node)]
    emitter.pointwise(node, Step.MULTIPLY, emitter.lazy(node, Step.LOG, node.args[0]), 1 / math.log(base))


RULES["aten::clamp"] = RULES["aten::hardtanh"] = Rule("pointwise", _emit_clamp, _check_pointwise)
RULES["aten::leaky_relu"] = Rule("pointwise", _emit_leaky, _check_leaky)
RULES["aten::hardsigmoid"] = RULES["aten::hardswish"] = Rule("activation", _emit_hard, _check_pointwise)
RULES["aten::log2"] = RULES["aten::log10"] = Rule("pointwise", _emit_logarithm, _check_pointwise)
RULES["aten::gelu"] = Rule("activation", _emit_gelu, _check_pointwise)
RULES["aten::pow.Tensor_Scalar"] = Rule("pointwise", _emit_power, _check_pointwise)
RULES["aten::_to_copy"] = RULES["dim_order_ops::_to_dim_order_copy"] = Rule("view", _emit_cast, _check_cast)


# Views


def _check_view(node: Node) -> str | None:
    source = next(_tensors(node), None)
    if source is None or source[1].dtype not in FLOATS:
        return "does not view floating numbers"
    return None


def _view(change: Callable[[Emitter, Strided, Node], Any]) -> Rule:
    def emit(emitter: Emitter, node: Node) -> None:
        emitter.set(node, change(emitter, emitter.view(node.args[0]), node))

    return Rule("view", emit, _check_view)


def _sliced(emitter: Emitter, source: Strided, node: Node) -> Strided:
    axis, start, step = argument(node, 1, "dim", 0), argument(node, 2, "start"), argument(node, 4, "step", 1)
    first = as_size(emitter.result(start)) if start is not None else 0
    length = source.dims[axis]
    if isinstance(first, int) and first < 0:
        first = max(first + length, 0) if isinstance(length, int) else first + length
    if isinstance(length, int):
        first = min(first, length)
    return source.narrow(axis, first, _dims(node)[axis], step)


def _check_slice(node: Node) -> str | None:
    start = argument(node, 2, "start")
    if start is not None and not isinstance(start, int):
        return "begins at a position that is computed"
    axis, source = argument(node, 1, "dim", 0), node.args[0]
    assert isinstance(source, Node)
    from_the_end = start is not None and start < 0 and not isinstance(source.meta["val"].shape[axis], int)
    # A negative start on a dynamic dimension: correct only if the dimension always has that many elements.
    if from_the_end and (node.meta["val"].shape[axis] != -(start or 0) or argument(node, 4, "step", 1) != 1):
        return "begins at a position that depends on a dynamic length"
    return _check_view(node)


def _selected(emitter: Emitter, source: Strided, node: Node) -> Strided:
    axis, index = node.args[1], as_size(emitter.result(node.args[2]))
    assert isinstance(axis, int)
    if isinstance(index, int) and index < 0:
        index = index + source.dims[axis]
    return source.select(axis, index)


def _transposed(emitter: Emitter, source: Strided, node: Node) -> Strided:
    order = list(range(len(source.dims)))
    first, second = (int(axis) for axis in node.args[1:3])  # type: ignore[arg-type]
    order[first], order[second] = order[second], order[first]
    return source.permute(order)


def _split(emitter: Emitter, source: Strided, node: Node) -> tuple[Strided, ...]:
    axis = argument(node, 2, "dim", 0)
    parts, start = [], 0
    for part in node.meta["val"]:
        size = as_size(part.shape[axis])
        parts.append(source.narrow(axis, start, size))
        start = start + size
    return tuple(parts)


RULES["aten::view_copy"] = _view(lambda emitter, source, node: emitter.reshape(source, _dims(node)))
RULES["aten::_unsafe_view"] = RULES["aten::view_copy"]
RULES["aten::permute_copy"] = _view(lambda emitter, source, node: source.permute(node.args[1]))  # type: ignore[arg-type]
RULES["aten::transpose_copy.int"] = _view(_transposed)
RULES["aten::unsqueeze_copy"] = _view(lambda emitter, source, node: source.unsqueeze(node.args[1]))  # type: ignore[arg-type]
RULES["aten::squeeze_copy.dims"] = _view(lambda emitter, source, node: source.squeeze(node.args[1]))  # type: ignore[arg-type]
RULES["aten::squeeze_copy.dim"] = _view(lambda emitter, source, node: source.squeeze([node.args[1]]))  # type: ignore[list-item]
RULES["aten::expand_copy"] = _view(lambda emitter, source, node: broadcast(source, _dims(node)))
RULES["aten::slice_copy.Tensor"] = Rule("view", _view(_sliced).emit, _check_slice)
RULES["aten::select_copy.int"] = _view(_selected)
RULES["aten::split_with_sizes_copy"] = Rule("view", _view(_split).emit)
RULES["aten::split_copy.Tensor"] = Rule("view", _view(_split).emit)
for _name in ("aten::clone", "dim_order_ops::_clone_dim_order", "aten::alias_copy", "aten::detach_copy"):
    RULES[_name] = _view(lambda emitter, source, node: source)


def _emit_cat(emitter: Emitter, node: Node) -> None:
    sources, axis = node.args[0], argument(node, 1, "dim", 0)
    into = emitter.new(_dims(node), node.meta["val"].dtype, node)
    start: Size = 0
    for source in sources:  # type: ignore[union-attr]
        found = emitter.result(source)  # a lazy operand is computed directly into its slice of the result
        found = emitter.view(source) if not hasattr(found, "dims") else found
        if found.dims == (0,):
            continue  # torch accepts an empty 1-D tensor together with any shape
        emitter.copy(found, into.narrow(axis, start, found.dims[axis]))
        start = start + found.dims[axis]
    emitter.set(node, into)


RULES["aten::cat"] = Rule("pointwise", _emit_cat, _check_pointwise)


# Along rows


def _check_last(node: Node) -> str | None:
    axis = node.args[1]
    rank = node.meta["val"].ndim
    if rank == 0 or node.meta["val"].shape[axis] == 0:
        return "has no number to work on"
    return _check_pointwise(node)


def _emit_softmax(emitter: Emitter, node: Node) -> None:
    source, axis = emitter.view(node.args[0]), node.args[1]
    assert isinstance(axis, int)
    into = emitter.new(source.dims, node.meta["val"].dtype, node)
    order = list(range(len(source.dims)))
    order.append(order.pop(axis))  # row operators reduce along the last dimension of their operand
    emitter.emit(OpCode.SOFTMAX, [source.permute(order)], [into.permute(order)])
    emitter.set(node, into)


def _check_layer_norm(node: Node) -> str | None:
    x, shape = node.args[0], node.args[1]
    assert isinstance(x, Node)
    if any(user.args[1] != 0 and user.users for user in node.users):
        return "its mean or reciprocal deviation is used"
    if not all(isinstance(size, int) and size > 0 for size in shape):  # type: ignore[union-attr]
        return f"normalised shape {shape}: fixed sizes of at least 1 are taken"
    if not all(weight is None or isinstance(weight, Node) for weight in node.args[2:4]):
        return "its weights are no tensors"
    return None


def _emit_layer_norm(emitter: Emitter, node: Node) -> None:
    x, shape, weight, bias, eps = node.args[:5]
    source = emitter.view(x)
    count = len(shape)  # type: ignore[arg-type]
    width = product(shape)  # type: ignore[arg-type]
    flat = emitter.reshape(source, (*source.dims[: len(source.dims) - count], width))
    into = emitter.new(flat.dims, node.meta["val"][0].dtype)
    own = [None if w is None else emitter.reshape(emitter.view(w), (width,)) for w in (weight, bias)]
    emitter.emit(OpCode.LAYER_NORM, [flat, *own], [into], floats=[float(eps)])  # type: ignore[arg-type]
    emitter.set(node, (emitter.reshape(into, source.dims), None, None))


def _emit_rms_norm(emitter: Emitter, node: Node) -> None:
    x, weight, eps = node.args[:3]
    source = emitter.view(x)
    into = emitter.new(source.dims, node.meta["val"].dtype, node)
    own = None if weight is None else emitter.view(weight)
    emitter.emit(OpCode.RMS_NORM, [source, own], [into], floats=[float(eps)])  # type: ignore[arg-type]
    emitter.set(node, into)


def _reduced_axes(node: Node) -> list[int]:
    x = node.args[0]
    assert isinstance(x, Node)
    axes = argument(node, 1, "dim")
    rank = x.meta["val"].ndim
    return sorted({axis % rank for axis in axes}) if axes else list(range(rank))


def _check_reduction(node: Node) -> str | None:
    x = node.args[0]
    assert isinstance(x, Node)
    value = x.meta["val"]
    if value.ndim == 0 or any(
        not isinstance(value.shape[a], int) or value.shape[a] == 0 for a in _reduced_axes(node)
    ):
        return "reduces dimensions that are empty or not fixed"
    if argument(node, 3, "dtype") not in (None, value.dtype):
        return "reduces in another format than its numbers have"
    return _check_pointwise(node)


def _reduction(reduction: Reduction) -> Rule:
    def emit(emitter: Emitter, node: Node) -> None:
        source = emitter.view(node.args[0])
        axes = _reduced_axes(node)
        kept = [axis for axis in range(len(source.dims)) if axis not in axes]
        moved = source.permute([*kept, *axes])
        outer = moved.dims[: len(kept)]
        flat = emitter.reshape(moved, (*outer, product(moved.dims[len(kept) :])))
        into = emitter.new((*outer, 1), node.meta["val"].dtype)
        emitter.emit(OpCode.REDUCE, [flat], [into], [reduction])
        emitter.set(node, emitter.reshape(into, _dims(node)))

    return Rule("reduction", emit, _check_reduction)


RULES["aten::_softmax"] = Rule("softmax", _emit_softmax, _check_last)
RULES["aten::native_layer_norm"] = Rule("norm", _emit_layer_norm, _check_layer_norm)
RULES["kernel_pytorch_lowering::rms_norm"] = Rule("norm", _emit_rms_norm)
RULES["aten::mean.dim"] = _reduction(Reduction.MEAN)
RULES["aten::sum.dim_IntList"] = _reduction(Reduction.SUM)
RULES["aten::amax"] = _reduction(Reduction.MAXIMUM)


# Linears


def _check_linear(node: Node) -> str | None:
    x, weight, bias = _operands(node)
    if any("quantize" in operator_name(source) for source in (x, weight, bias) if _is_call(source)):
        return "is quantized; XNNPACK runs it"
    for name, value in _tensors(node):
        if value.dtype not in FLOATS or value.dtype != node.meta["val"].dtype:
            return f"{name} is {str(value.dtype).removeprefix('torch.')}; linears are taken in one floating format"
    if node.meta["val"].shape[-1] == 0 or any(0 in value.shape for _, value in _tensors(node)):
        return "has no number to work on"
    return None


def _is_call(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function"


def _operands(node: Node) -> tuple[Any, Any, Any]:
    """Return input, weight and bias of a linear in any of its forms."""
    name = operator_name(node)
    if name == "aten::addmm":
        return node.args[1], node.args[2], node.args[0]
    return node.args[0], node.args[1], argument(node, 2, "bias") if name == "aten::linear" else None


def _check_addmm(node: Node) -> str | None:
    if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1:
        return "alpha or beta is not 1"
    bias = node.args[0]
    if not isinstance(bias, Node) or bias.meta["val"].ndim != 1:
        return "adds more than one row"
    return _check_linear(node)


def packed_weights(weight: torch.Tensor) -> torch.Tensor:
    """Pack weights of shape (outputs, inputs) in panels of outputs."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight.detach(), (0, 0, 0, -outputs % PANEL))
    return padded.view(-1, PANEL, inputs).transpose(1, 2).contiguous()


def _exact_panels(weight: torch.Tensor) -> torch.Tensor:
    """Pack weights as ``packed_weights`` does, in the narrowest dtype that represents every weight exactly."""
    return packed_weights(narrowed(weight))


def _emit_linear(
    emitter: Emitter, node: Node, x: Any, weight: torch.Tensor, bias: Any, scale: torch.Tensor | None = None
) -> None:
    source = emitter.view(x)
    if source.dtype != torch.float32:  # accumulate in float32 and round once
        source = emitter.cast(source, torch.float32)
    elif not equal(source.strides[-1], 1):
        source = emitter.contiguous(source)
    into = emitter.new(_dims(node), torch.float32)
    own = None if bias is None else emitter.constant(emitter.constants.of(bias).float().contiguous())
    scales = None
    if scale is not None:
        scales = emitter.constant(scale.flatten().float().contiguous())
    packed = emitter.constant(emitter.once(_exact_panels, weight))
    emitter.emit(OpCode.LINEAR, [source, packed, own, scales], [into])
    if node.meta["val"].dtype == torch.float32:
        emitter.set(node, into)
    else:
        emitter.pointwise(node, Step.COPY, into)


def _known(emitter: Emitter, node: Any) -> torch.Tensor:
    found = emitter.constants.of(node)
    assert isinstance(found, torch.Tensor)
    return found


def _emit_aten_linear(emitter: Emitter, node: Node) -> None:
    x, weight, bias = _operands(node)
    _emit_linear(emitter, node, x, _known(emitter, weight), bias)


def _emit_int8_linear(emitter: Emitter, node: Node) -> None:
    x, weight, scale, bias = node.args[:4]
    _emit_linear(emitter, node, x, _known(emitter, weight), bias, _known(emitter, scale))


def _emit_quantized_linear(emitter: Emitter, node: Node) -> None:
    x, weight, scales, bias, bits = node.args[:5]
    source = emitter.contiguous(emitter.view(x))
    packed = emitter.once(_packed_for_rows, _known(emitter, weight), _known(emitter, scales), bits)
    constants = [emitter.constant(tensor) for tensor in (packed.weights, packed.scales, packed.sums)]
    own = None if bias is None else emitter.constant(_known(emitter, bias).float().contiguous())
    into = emitter.new(_dims(node), torch.float32)
    emitter.emit(OpCode.QUANTIZED_LINEAR, [source, *constants, own], [into], [packed.bits, packed.group])
    emitter.set(node, into)


def _packed_for_rows(weight: torch.Tensor, scales: torch.Tensor, bits: int) -> PackedWeights:
    return pack_quantized_weights(weight, scales.reshape(weight.shape[0], -1), bits=bits)


RULES["kernel_pytorch_lowering::quantized_linear"] = Rule("linear", _emit_quantized_linear, constants=(1, 2, 3))
RULES["kernel_pytorch_lowering::linear_int8"] = Rule("linear", _emit_int8_linear, constants=(1, 2, 3))
RULES["aten::linear"] = Rule(
    "linear",
    _emit_aten_linear,
    _check_linear,
    constants=(1, 2),
)
RULES["aten::addmm"] = Rule(
    "linear",
    lambda emitter, node: _emit_linear(
        emitter, node, node.args[1], _known(emitter, node.args[2]).t(), node.args[0]
    ),
    _check_addmm,
    constants=(0, 2),
)
RULES["aten::mm"] = Rule(
    "linear",
    lambda emitter, node: _emit_linear(emitter, node, node.args[0], _known(emitter, node.args[1]).t(), None),
    _check_linear,
    constants=(1,),
)


# Attention


def _check_attention(node: Node) -> str | None:
    q, k, v = (source.meta["val"] for source in node.args[:3])  # type: ignore[union-attr]
    return attention_refusal(q, k, v)


def _emit_attention(emitter: Emitter, node: Node) -> None:
    q, k, v = (emitter.view(source) for source in node.args[:3])
    bias, mask, scale = node.args[3:6]
    batch = q.dims[0]
    k, v = (broadcast(x, (batch, *x.dims[1:])) if not equal(x.dims[0], batch) else x for x in (k, v))
    scores = (batch, q.dims[1], q.dims[2], k.dims[2])
    own = None if bias is None else broadcast(emitter.view(bias), scores)
    into = emitter.new(_dims(node), node.meta["val"].dtype, node)
    emitter.emit(OpCode.ATTENTION, [q, k, v, own], [into], mask, [float(scale)])  # type: ignore[arg-type]
    emitter.set(node, into)


def cache_of(node: Node) -> Cache:
    """Return the cache of a cached-attention node."""
    arguments: tuple[Any, ...] = node.args
    name, dtype, shape = arguments[4:7]
    return Cache(name, dtype, *shape)


def _emit_cached_attention(emitter: Emitter, node: Node) -> None:
    q, k, v, position = (emitter.view(source) for source in node.args[:4])
    cache, scale = emitter.cache(cache_of(node)), node.args[7]
    into = emitter.new(_dims(node), node.meta["val"].dtype, node)
    emitter.emit(OpCode.CACHE_WRITE, [k, v, position], [], [cache])
    emitter.emit(OpCode.CACHED_ATTENTION, [q], [into], [cache], [float(scale)])  # type: ignore[arg-type]
    emitter.set(node, into)


RULES["kernel_pytorch_lowering::cached_attention"] = Rule(
    "attention", _emit_cached_attention, _check_attention, whole_numbers=(3,)
)
RULES["kernel_pytorch_lowering::attention"] = Rule("attention", _emit_attention, _check_attention)
