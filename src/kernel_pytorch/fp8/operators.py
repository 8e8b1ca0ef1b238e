"""What torch.compile sees: functions that Dynamo puts into its graph untraced, and custom operators.

AOTAutograd calls the functions (``*_in_graph``) with tensors that keep attributes, so layers that take the same
tensor share its quantized data here too; Dynamo drops attributes. A compiled step waits on the host between
operators, so there are as few as possible: one for the forward and one for the backward of a linear layer, one and
two for a SwiGLU. Each declares what it mutates (counts and amax histories) in its schema.

Imported while compiling only: ``allow_in_graph`` imports ``torch._dynamo``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from kernel_pytorch._compat.compiler import constant_in_graph, proxies_of
from kernel_pytorch.fp8.autograd import Buffers, GemmSpec, traced_linear
from kernel_pytorch.fp8.quantize import (
    INPUT,
    NAMES,
    WEIGHT,
    QuantizeSpec,
    ScaledTensor,
    output_accumulation,
    quantize,
    quantize_norm,
    scaled_matmul,
    weight_spec,
)
from kernel_pytorch.fp8.rms_norm import NormInputs, traced_rms_norm
from kernel_pytorch.fp8.swiglu import (
    Between,
    MLPBuffers,
    MLPSpec,
    Needs,
    Saved,
    backward_gemms,
    backward_hidden,
    in_row_chunks,
    is_chunked,
    swiglu_forward,
    traced_swiglu,
)
from kernel_pytorch.ops.fp8_cast.definition import FP8_CAST
from kernel_pytorch.ops.fp8_swiglu.grad_definition import FP8_SWIGLU_GRAD

__all__ = [
    "linear_backward",
    "linear_forward",
    "linear_in_graph",
    "revision",
    "rms_norm_in_graph",
    "skip_version_check",
    "swiglu_in_graph",
    "swiglu_mlp_backward",
    "swiglu_mlp_forward",
    "traced_quantize",
]

# Functions that Dynamo puts into its graph. Arguments are tensors, strings and numbers; NamedTuples are flattened.


@constant_in_graph
def revision() -> str:
    """Return the digest of this package's source, an argument of every function that Dynamo puts into its graph.

    torch's cache of compiled graphs identifies such a function by its name and arguments, not by its body: inside
    activation checkpointing, a graph of an earlier version would be called.
    """
    return _revision()


@cache
def _revision() -> str:
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()[:16]


def skip_version_check(*mutated: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Let torch.compile save tensors that an operator mutates; the backward reads their values at that time.

    AOTAutograd allows this for tensors that are attributes of a traced ``autograd.Function``'s context. It assumes
    that all other saved tensors do not change.
    """
    for tensor in mutated:
        for proxy in () if tensor is None else proxies_of(tensor):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True
    return mutated


def unflatten(values: tuple[Any, ...], *records: Any) -> list[Any]:
    """Rebuild NamedTuples from their concatenated values."""
    found = []
    for record in records:
        count = len(record._fields)
        found.append(record(*values[:count]))
        values = values[count:]
    return found


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def linear_in_graph(
    _: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    gathered_data: torch.Tensor | None,
    gathered_inverse: torch.Tensor | None,
    *values: Any,
) -> torch.Tensor:
    """Compute a linear layer without its bias.

    Args:
        gathered_data: the FP8 data of the weight if FSDP2 has gathered it, or None.
        gathered_inverse: its inverse scale, or None.
        values: the fields of ``Buffers``, then those of ``GemmSpec``.
    """
    return traced_linear(
        x, weight, _gathered(gathered_data, gathered_inverse), *unflatten(values, Buffers, GemmSpec)
    )


def _gathered(data: torch.Tensor | None, inverse: torch.Tensor | None) -> ScaledTensor | None:
    return None if data is None or inverse is None else ScaledTensor(data, data, inverse, inverse)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def rms_norm_in_graph(_: str, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, tagged with its inputs so that the next layer can quantize from them."""
    return traced_rms_norm(x, weight, eps)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def swiglu_in_graph(_: str, x: torch.Tensor, *values: Any) -> torch.Tensor:
    """Compute a SwiGLU.

    Args:
        x: (..., K).
        values: the weights of gate, up and down; their FP8 data and inverse scales if FSDP2 has gathered them, else
            None; then the fields of three ``Buffers``, of ``MLPSpec`` and of ``Needs``.
    """
    weights, gathered, rest = values[:3], values[3:9], values[9:]
    *buffers, spec, needs = unflatten(rest, Buffers, Buffers, Buffers, MLPSpec, Needs)
    quantized = [_gathered(*gathered[i : i + 2]) for i in (0, 2, 4)]
    return traced_swiglu(x, weights, quantized, MLPBuffers(*buffers), spec, needs)


# Custom operators. A schema has no NamedTuples, so a spec is passed as JSON.


Spec = TypeVar("Spec", QuantizeSpec, GemmSpec, MLPSpec)


def _encoded(spec: tuple[Any, ...]) -> str:
    return msgspec.json.encode(spec).decode()


@cache
def _decoded(text: str, kind: type[Spec]) -> Spec:
    return msgspec.json.decode(text, type=kind)


_library = torch.library.Library("kernel_pytorch", "FRAGMENT")


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator without autograd. ``torch.library.custom_op`` adds more host time than a cast takes."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"kernel_pytorch::{name}", fake, lib=_library)
    return getattr(torch.ops.kernel_pytorch, name).default


def _quantize(
    x_RC: torch.Tensor, spec: str, counts: torch.Tensor | None, row: int, history: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    found = quantize(x_RC, _decoded(spec, QuantizeSpec), counts, row, history)
    # The results of a custom operator must not alias.
    inverse_t = found.inverse.new_empty(0) if found.inverse_t is found.inverse else found.inverse_t
    return found.data, found.data_t, found.inverse, inverse_t


def _quantize_fake(x_RC: torch.Tensor, spec: str, *_: Any) -> tuple[torch.Tensor, ...]:
    return _fake_cast(x_RC, _decoded(spec, QuantizeSpec))


def _fake_cast(x_RC: torch.Tensor, spec: QuantizeSpec) -> tuple[torch.Tensor, ...]:
    number_format, granularity, transposed, power_of_two = spec
    return FP8_CAST.fake(x_RC, number_format, granularity, transposed, None, power_of_two)[:4]


_quantize_op = _define(
    "fp8_quantize(Tensor x, str spec, Tensor(a!)? counts, int row, Tensor(b!)? history) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _quantize,
    _quantize_fake,
)


def traced_quantize(
    x_RC: torch.Tensor,
    spec: QuantizeSpec,
    counts: torch.Tensor | None,
    row: int,
    history: torch.Tensor | None = None,
) -> ScaledTensor:
    """``quantize`` as one operator of the graph; the backward may read its counts and history later."""
    skip_version_check(counts, history)
    data, data_t, inverse, inverse_t = _quantize_op(x_RC, _encoded(spec), counts, row, history)
    shared = spec.transposed and spec.granularity == "tensor"
    return ScaledTensor(data, data_t, inverse, inverse if shared else inverse_t)


def linear_forward(
    x_MK: torch.Tensor,
    weight: torch.Tensor,
    gemms: GemmSpec,
    buffers: Buffers,
    x: ScaledTensor | None,
    norm: NormInputs,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Quantize both operands and multiply them, as one operator.

    Args:
        x: the quantized x, if another layer has quantized it.
        norm: the inputs of the RMSNorm that computed x, to quantize from.

    Returns:
        y, the tensors that ``linear_backward`` reads, and the quantized x: data, inverse, data_t and, unless scaling
        is tensorwise, inverse_t.
    """
    spec = _encoded(gemms)
    if x is not None:
        y, *weight_t = _linear_of_quantized_op(x.data, x.inverse, weight, spec, buffers.counts)
        return y, (x.data_t, x.inverse_t, *weight_t), ()
    op = _forward_tensorwise if gemms.input_granularity == "tensor" else _forward_by_group
    normed = x_MK if norm.x is None else norm.x
    y, weight_data_t, weight_inverse_t, *made = op(
        normed, weight, spec, buffers.counts, buffers.history, norm.rstd, norm.weight
    )
    _, inverse, data_t, *inverse_t = made
    return y, (data_t, *(inverse_t or [inverse]), weight_data_t, weight_inverse_t), tuple(made)


def linear_backward(
    dy_MN: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    gemms: GemmSpec,
    counts: torch.Tensor | None,
    history: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx and dweight in dy's dtype: quantize dy and two GEMMs, as one operator."""
    dx, dweight = _linear_backward_op(dy_MN, *saved, _encoded(gemms), counts, history)
    return dx, dweight


def _linear_forward(
    x_MK: torch.Tensor,
    weight: torch.Tensor,
    spec: str,
    counts: torch.Tensor | None,
    history: torch.Tensor | None,
    rstd: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Return y, the transposed quantized weight with its scales, and the quantized x, or norm of x."""
    x = quantize_norm(x_MK, rstd, norm_weight, _decoded(spec, GemmSpec).x_spec, counts, history)
    of_weight = _linear_of_quantized(x.data, x.inverse, weight, spec, counts, x.direct)
    inverse_t = () if x.inverse_t is x.inverse else (x.inverse_t,)
    return *of_weight, x.data, x.inverse, x.data_t, *inverse_t


def _linear_forward_fake(x_MK: torch.Tensor, weight: torch.Tensor, spec: str, *_: Any) -> tuple[torch.Tensor, ...]:
    x_spec = _decoded(spec, GemmSpec).x_spec
    data, data_t, inverse, inverse_t = _fake_cast(x_MK, x_spec)
    of_weight = _linear_of_quantized_fake(x_MK, inverse, weight, spec)
    return *of_weight, data, inverse, data_t, *(() if x_spec.granularity == "tensor" else (inverse_t,))


_FORWARD = (
    "(Tensor x, Tensor weight, str spec, Tensor(a!)? counts, Tensor(b!)? history, Tensor? rstd, "
    "Tensor? norm_weight) -> "
)
_forward_tensorwise, _forward_by_group = (
    _define(f"{name}{_FORWARD}({', '.join(['Tensor'] * results)})", _linear_forward, _linear_forward_fake)
    for name, results in (("fp8_linear_forward", 6), ("fp8_linear_forward_by_group", 7))
)


def _linear_of_quantized(
    x_data: torch.Tensor,
    x_inverse: torch.Tensor,
    weight: torch.Tensor,
    spec: str,
    counts: torch.Tensor | None,
    direct: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return y, and the transposed quantized weight with its scales."""
    gemms = _decoded(spec, GemmSpec)
    w = quantize(weight, gemms.weight_spec, counts, WEIGHT)
    accumulation = output_accumulation(gemms.input_granularity)
    y = scaled_matmul(x_data, w.data, x_inverse, w.inverse, gemms.dtype, accumulation, direct or w.direct)
    return y, w.data_t, w.inverse_t


def _linear_of_quantized_fake(
    x_data: torch.Tensor, _: torch.Tensor, weight: torch.Tensor, spec: str, *_rest: Any
) -> tuple[torch.Tensor, ...]:
    gemms = _decoded(spec, GemmSpec)
    y = x_data.new_empty((x_data.shape[0], weight.shape[0]), dtype=getattr(torch, gemms.dtype))
    _data, data_t, inverse, inverse_t = _fake_cast(weight, gemms.weight_spec)
    return y, data_t, inverse if gemms.weight_granularity == "tensor" else inverse_t


_linear_of_quantized_op = _define(
    "fp8_linear_of_quantized(Tensor x_data, Tensor x_inverse, Tensor weight, str spec, Tensor(a!)? counts) "
    "-> (Tensor, Tensor, Tensor)",
    _linear_of_quantized,
    _linear_of_quantized_fake,
)


def _linear_backward(
    dy_MN: torch.Tensor,
    x_data_t: torch.Tensor,
    x_inverse_t: torch.Tensor,
    weight_data_t: torch.Tensor,
    weight_inverse_t: torch.Tensor,
    spec: str,
    counts: torch.Tensor | None,
    history: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Return dx and dweight in dy's dtype."""
    gemms, name = _decoded(spec, GemmSpec), NAMES[dy_MN.dtype]
    dy = quantize(dy_MN, gemms.gradient_spec, counts, INPUT, history)
    dx = scaled_matmul(dy.data, weight_data_t, dy.inverse, weight_inverse_t, name, gemms.dx_sums, dy.direct)
    return dx, scaled_matmul(dy.data_t, x_data_t, dy.inverse_t, x_inverse_t, name, "promoted", dy.direct)


def _linear_backward_fake(dy_MN: torch.Tensor, x_data_t: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    (m, n), k = dy_MN.shape, x_data_t.shape[0]
    return dy_MN.new_empty((m, k)), dy_MN.new_empty((n, k))


_linear_backward_op = _define(
    "fp8_linear_backward(Tensor dy, Tensor x_data_t, Tensor x_inverse_t, Tensor weight_data_t, "
    "Tensor weight_inverse_t, str spec, Tensor(a!)? counts, Tensor(b!)? history) -> (Tensor, Tensor)",
    _linear_backward,
    _linear_backward_fake,
)


# SwiGLU


def swiglu_mlp_forward(
    x_MK: torch.Tensor, weights: tuple[torch.Tensor, ...], buffers: MLPBuffers, spec: MLPSpec, norm: NormInputs
) -> tuple[torch.Tensor, Saved]:
    """Quantize x and the three weights and compute y, as one operator; also return what the backward reads."""
    gate, up, down = buffers
    y, *saved = _swiglu_forward_op(
        x_MK if norm.x is None else norm.x, *weights, _encoded(spec), gate.counts, up.counts, down.counts,
        gate.history, down.history, norm.rstd, norm.weight,
    )  # fmt: skip
    return y, Saved(*saved)


def swiglu_mlp_backward(
    dy_MN: torch.Tensor, saved: Saved, buffers: MLPBuffers, spec: MLPSpec
) -> tuple[torch.Tensor, ...]:
    """Return the two terms of dx, from gate and from up, and the gradients of the three weights, by two operators."""
    gate, up, down = buffers
    between = _swiglu_hidden_op(
        dy_MN, list(saved), _encoded(spec), in_row_chunks(saved.gate, gate.gradient_history), gate.gradient_counts,
        up.gradient_counts, down.gradient_counts, gate.gradient_history, up.gradient_history, down.gradient_history,
    )  # fmt: skip
    found: tuple[torch.Tensor, ...] = _swiglu_gemms_op(
        list(between), list(saved[2:]), NAMES[dy_MN.dtype], spec.dx_sums
    )
    return found


def _swiglu_forward(
    x_MK: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    spec: str,
    gate_counts: torch.Tensor,
    up_counts: torch.Tensor,
    down_counts: torch.Tensor,
    x_history: torch.Tensor | None,
    h_history: torch.Tensor | None,
    rstd: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Return y of x, or of its norm, and the tensors that the backward reads."""
    buffers = MLPBuffers(Buffers(gate_counts, x_history), Buffers(up_counts), Buffers(down_counts, h_history))
    mlp = _decoded(spec, MLPSpec)
    x_spec = QuantizeSpec(mlp.forward_format, "tensor", True, mlp.power_of_two)
    x = quantize_norm(x_MK, rstd, norm_weight, x_spec, gate_counts, x_history)
    of_weights = weight_spec(mlp.forward_format, "tensor", True, mlp.power_of_two)
    weights_8 = [
        quantize(weight, of_weights, each.counts, WEIGHT)
        for weight, each in zip((gate, up, down), buffers, strict=True)
    ]
    y, saved = swiglu_forward(x, weights_8, mlp, buffers)
    return y, *saved


def _swiglu_forward_fake(
    x_MK: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, spec: str, *_: Any
) -> tuple[torch.Tensor, ...]:
    mlp = _decoded(spec, MLPSpec)
    of_all = QuantizeSpec(mlp.forward_format, "tensor", True, mlp.power_of_two)
    out = getattr(torch, mlp.dtype)
    m, hidden = x_MK.shape[0], gate.shape[0]
    found = [x_MK.new_empty((m, size), dtype=out) for size in (down.shape[0], hidden, hidden)]
    found.append(x_MK.new_empty((), dtype=torch.float32))
    for matrix in (x_MK, gate, up, down):
        _data, data_t, inverse, *_others = _fake_cast(matrix, of_all)
        found += [inverse, data_t]
    return tuple(found)


def _swiglu_hidden(
    dy_MN: torch.Tensor,
    saved: list[torch.Tensor],
    spec: str,
    chunked: bool,
    dgate_counts: torch.Tensor,
    dup_counts: torch.Tensor,
    dy_counts: torch.Tensor,
    *histories: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    of_gradients = zip((dgate_counts, dup_counts, dy_counts), histories, strict=True)
    buffers = MLPBuffers(*(Buffers(None, None, *each) for each in of_gradients))
    return tuple(backward_hidden(dy_MN, Saved(*saved), _decoded(spec, MLPSpec), buffers, chunked, True))


def _swiglu_hidden_fake(
    dy_MN: torch.Tensor, saved: list[torch.Tensor], spec: str, chunked: bool, *_: Any
) -> tuple[torch.Tensor, ...]:
    kept, mlp = Saved(*saved), _decoded(spec, MLPSpec)
    data, data_t, inverse, _inverse_t = _fake_cast(
        dy_MN, QuantizeSpec(mlp.gradient_format, "tensor", True, mlp.power_of_two)
    )
    formats = (mlp.gradient_format, mlp.forward_format)
    dgate, dgate_t, dgate_inverse, dup, dup_t, dup_inverse, h_t, *_others = FP8_SWIGLU_GRAD.fake(
        kept.gate, kept.gate, kept.up, *formats, kept.h_inverse, None, None, mlp.power_of_two
    )
    if chunked:
        data_t, dgate_t, dup_t = data, data.new_empty((0, 0)), data.new_empty((0, 0))
    return data_t, inverse, dgate, dgate_t, dgate_inverse, dup, dup_t, dup_inverse, h_t


def _without_gate_and_up(others: list[torch.Tensor]) -> Saved:
    """Return ``Saved`` with empty tensors in place of gate and up, whose memory can then be freed."""
    return Saved(others[0], others[0], *others)


def _swiglu_gemms(
    between: list[torch.Tensor], saved: list[torch.Tensor], dtype: str, dx_sums: str
) -> tuple[torch.Tensor | None, ...]:
    return backward_gemms([*between], _without_gate_and_up(saved), dtype, dx_sums, Needs())


def _swiglu_gemms_fake(
    between: list[torch.Tensor], saved: list[torch.Tensor], dtype: str, *_: Any
) -> tuple[torch.Tensor, ...]:
    made, kept, out = Between(*between), _without_gate_and_up(saved), getattr(torch, dtype)
    (m, hidden), k = made.dgate.shape, kept.x_t.shape[0]
    n = made.dy_t.shape[1 if is_chunked(made) else 0]
    shapes = ((m, k), (m, k), (hidden, k), (hidden, k), (n, hidden))
    return tuple(made.dgate.new_empty(shape, dtype=out) for shape in shapes)


_swiglu_forward_op = _define(
    "fp8_swiglu_mlp_forward(Tensor x, Tensor gate, Tensor up, Tensor down, str spec, Tensor(a!) gate_counts, "
    "Tensor(b!) up_counts, Tensor(c!) down_counts, "
    "Tensor(d!)? x_history, Tensor(e!)? h_history, Tensor? rstd, Tensor? norm_weight) "
    f"-> ({', '.join(['Tensor'] * (1 + len(Saved._fields)))})",
    _swiglu_forward,
    _swiglu_forward_fake,
)
_swiglu_hidden_op = _define(
    "fp8_swiglu_mlp_backward_hidden(Tensor dy, Tensor[] saved, str spec, bool chunked, Tensor(a!) dgate_counts, "
    "Tensor(b!) dup_counts, Tensor(c!) dy_counts, "
    "Tensor(d!)? dgate_history, Tensor(e!)? dup_history, Tensor(f!)? dy_history) "
    f"-> ({', '.join(['Tensor'] * len(Between._fields))})",
    _swiglu_hidden,
    _swiglu_hidden_fake,
)
_swiglu_gemms_op = _define(
    "fp8_swiglu_mlp_backward_gemms(Tensor[] between, Tensor[] saved, str dtype, str dx_sums) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _swiglu_gemms,
    _swiglu_gemms_fake,
)
