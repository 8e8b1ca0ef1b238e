"""RMSNorm and SwiGLU before and between FP8 layers inside torch.compile.

In eager mode a norm quantizes its output for the next layer (``matching``). The compiler fuses norms by itself, so
here the first layer quantizes from the norm's inputs, with which the output is tagged; the compiler drops the output
if nothing else reads it. A SwiGLU is one operator forward and two backward. Imported while compiling only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from kernel_pytorch.fp8.fusion.swiglu_ops import (
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
)
from kernel_pytorch.fp8.operators import define_op, revision, skip_version_check
from kernel_pytorch.fp8.quantize import NAMES, WEIGHT, QuantizeSpec, quantize_eager, quantize_norm, weight_spec
from kernel_pytorch.fp8.scaled_tensor import unflatten
from kernel_pytorch.ops.fp8_cast.definition import FP8_CAST
from kernel_pytorch.ops.fp8_swiglu.grad_definition import FP8_SWIGLU_GRAD

__all__ = ["NormInputs", "norm_inputs", "revision", "rms_norm_in_graph", "swiglu_in_graph"]

_MARK = "_fp8_norm_of"


class NormInputs(NamedTuple):
    """What the output of an RMSNorm was computed from; None where that is unknown."""

    x: torch.Tensor | None = None
    """(rows, columns)."""
    rstd: torch.Tensor | None = None
    weight: torch.Tensor | None = None


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def rms_norm_in_graph(_: str, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, whose output is tagged with its inputs if it requires a gradient."""
    y: torch.Tensor
    y, rstd = _Norm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    if y.requires_grad:
        setattr(y, _MARK, (y._version, x, x._version, weight, None if weight is None else weight._version, rstd))
    return y


def norm_inputs(y: torch.Tensor, history: torch.Tensor | None) -> NormInputs:
    """Return the inputs of the RMSNorm that computed y, if neither has been written to since.

    Only delayed scaling can quantize from them: without a history the scale needs all of y first. Writes through
    ``.data`` between a norm and a layer of one graph are not seen.
    """
    mark = getattr(y, _MARK, None)
    if mark is None or history is None:
        return NormInputs()
    version, x, x_version, weight, weight_version, rstd = mark
    if version != y._version or x._version != x_version:
        return NormInputs()
    if weight is not None and weight._version != weight_version:
        return NormInputs()
    x_RH = x.detach().reshape(-1, x.shape[-1])
    return NormInputs(x_RH, rstd.detach().reshape(-1), None if weight is None else weight.detach())


class _Norm(torch.autograd.Function):
    """The operators of torch's own decomposition, which the compiler fuses as it fuses that.

    rstd is a result, not recomputed for the cast: the backward would otherwise start with one more reduction.
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


# SwiGLU


@dataclass(frozen=True)
class _Call:
    """What ``_SwiGLU`` takes besides x and the weights."""

    spec: MLPSpec
    buffers: MLPBuffers
    norm: NormInputs


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def swiglu_in_graph(_: str, x: torch.Tensor, *values: Any) -> torch.Tensor:
    """Compute a SwiGLU of which every gradient is needed.

    Args:
        x: (..., K).
        values: the weights of gate, up and down, then those of ``MLPBuffers`` and ``MLPSpec``.
    """
    buffers, spec = unflatten(values[3:], MLPBuffers, MLPSpec)
    call = _Call(spec, buffers, norm_inputs(x, buffers.x_history))
    y_MN: torch.Tensor = _SwiGLU.apply(x.reshape(-1, x.shape[-1]), *values[:3], call)  # type: ignore[no-untyped-call]
    return y_MN


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, call: _Call
    ) -> torch.Tensor:
        spec, b, norm = call.spec, call.buffers, call.norm
        # A recomputation updates them once more.
        skip_version_check(b.gate_counts, b.up_counts, b.down_counts, b.x_history, b.h_history)
        y: torch.Tensor
        y, *saved = _forward_op(
            x_MK if norm.x is None else norm.x, gate, up, down, spec.dtype, spec.forward_format, spec.power_of_two,
            b.gate_counts, b.up_counts, b.down_counts, b.x_history, b.h_history, norm.rstd, norm.weight,
        )  # fmt: skip
        ctx.save_for_backward(*saved)
        ctx.spec = spec
        ctx.buffers = skip_version_check(
            b.dgate_counts, b.dup_counts, b.dy_counts, b.dgate_history, b.dup_history, b.dy_history
        )
        ctx.dtypes = [tensor.dtype for tensor in (x_MK, gate, up, down)]
        return y

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor) -> Any:
        saved, spec = Saved(*ctx.saved_tensors), ctx.spec
        chunked = in_row_chunks(saved.gate, ctx.buffers[3])
        between = _backward_hidden_op(
            dy_MN, list(saved), spec.forward_format, spec.gradient_format, spec.dx_sums, spec.power_of_two, chunked,
            *ctx.buffers,
        )  # fmt: skip
        dx, dx_of_up, *dweights = _backward_gemms_op(
            list(between), list(saved[2:]), NAMES[dy_MN.dtype], spec.dx_sums
        )
        # The compiler fuses their sum with what follows.
        gradients = (dx + dx_of_up, *dweights)
        return (*(found.to(dtype) for found, dtype in zip(gradients, ctx.dtypes, strict=True)), None)


# The schemas of operators are flat, so these functions take their values one by one.


def _forward(
    x_MK: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    dtype: str,
    number_format: str,
    power_of_two: bool,
    gate_counts: torch.Tensor,
    up_counts: torch.Tensor,
    down_counts: torch.Tensor,
    x_history: torch.Tensor | None,
    h_history: torch.Tensor | None,
    rstd: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Return y of x, or of its norm, and what the backward reads."""
    counts = (gate_counts, up_counts, down_counts)
    buffers = MLPBuffers(x_history, *counts, h_history, *counts, None, None, None)  # no gradient is computed here
    x_spec = QuantizeSpec(number_format, "tensor", True, power_of_two)
    x = quantize_norm(x_MK, rstd, norm_weight, x_spec, gate_counts, x_history)
    of_weights = weight_spec(number_format, "tensor", True, power_of_two)
    gate_8, up_8, down_8 = (
        quantize_eager(weight, of_weights, each, WEIGHT)
        for weight, each in zip((gate, up, down), counts, strict=True)
    )
    spec = MLPSpec(dtype, number_format, number_format, "fast", power_of_two)
    y, saved = swiglu_forward(x, gate_8, up_8, down_8, spec, buffers)
    return y, *saved


def _forward_fake(
    x_MK: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    dtype: str,
    number_format: str,
    power_of_two: bool,
    *_rest: Any,
) -> tuple[torch.Tensor, ...]:
    out = getattr(torch, dtype)
    m, hidden = x_MK.shape[0], gate.shape[0]
    found = [x_MK.new_empty((m, size), dtype=out) for size in (down.shape[0], hidden, hidden)]
    found.append(x_MK.new_empty((), dtype=torch.float32))
    for matrix in (x_MK, gate, up, down):
        _, data_t, inverse, *_others = FP8_CAST.fake(matrix, number_format, "tensor", True, None, power_of_two)
        found += [inverse, data_t]
    return tuple(found)


def _hidden(
    dy_MN: torch.Tensor,
    saved: list[torch.Tensor],
    forward_format: str,
    gradient_format: str,
    dx_sums: str,
    power_of_two: bool,
    chunked: bool,
    dgate_counts: torch.Tensor,
    dup_counts: torch.Tensor,
    dy_counts: torch.Tensor,
    *histories: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    counts = (dgate_counts, dup_counts, dy_counts)
    buffers = MLPBuffers(None, *counts, None, *counts, *histories)  # the forward's are not read
    spec = MLPSpec(NAMES[dy_MN.dtype], forward_format, gradient_format, dx_sums, power_of_two)
    return tuple(backward_hidden(dy_MN, Saved(*saved), spec, buffers, chunked, True))


def _hidden_fake(
    dy_MN: torch.Tensor,
    saved: list[torch.Tensor],
    forward_format: str,
    gradient_format: str,
    dx_sums: str,  # noqa: ARG001
    power_of_two: bool,
    chunked: bool,
    *_rest: Any,
) -> tuple[torch.Tensor, ...]:
    kept = Saved(*saved)
    data, data_t, inverse, *_others = FP8_CAST.fake(dy_MN, gradient_format, "tensor", True, None, power_of_two)
    formats = (gradient_format, forward_format)
    dgate, dgate_t, dgate_inverse, dup, dup_t, dup_inverse, h_t, *_others = FP8_SWIGLU_GRAD.fake(
        kept.gate, kept.gate, kept.up, *formats, kept.h_inverse, None, None, power_of_two
    )
    if chunked:
        data_t, dgate_t, dup_t = data, data.new_empty((0, 0)), data.new_empty((0, 0))
    return data_t, inverse, dgate, dgate_t, dgate_inverse, dup, dup_t, dup_inverse, h_t


def _without_gate_and_up(others: list[torch.Tensor]) -> Saved:
    """Return ``Saved`` with the first two replaced, so that nothing keeps gate and up alive."""
    return Saved(others[0], others[0], *others)


def _gemms(
    between: list[torch.Tensor], saved: list[torch.Tensor], dtype: str, dx_sums: str
) -> tuple[torch.Tensor | None, ...]:
    return backward_gemms([*between], _without_gate_and_up(saved), dtype, dx_sums, Needs())


def _gemms_fake(
    between: list[torch.Tensor], saved: list[torch.Tensor], dtype: str, *_: Any
) -> tuple[torch.Tensor, ...]:
    made, kept, out = Between(*between), _without_gate_and_up(saved), getattr(torch, dtype)
    (m, hidden), k = made.dgate.shape, kept.x_t.shape[0]
    n = made.dy_t.shape[1 if is_chunked(made) else 0]
    shapes = ((m, k), (m, k), (hidden, k), (hidden, k), (n, hidden))
    return tuple(made.dgate.new_empty(shape, dtype=out) for shape in shapes)


_forward_op = define_op(
    "fp8_swiglu_mlp_forward(Tensor x, Tensor gate, Tensor up, Tensor down, str dtype, str number_format, "
    "bool power_of_two, Tensor(a!) gate_counts, Tensor(b!) up_counts, Tensor(c!) down_counts, "
    "Tensor(d!)? x_history, Tensor(e!)? h_history, Tensor? rstd, Tensor? norm_weight) "
    f"-> ({', '.join(['Tensor'] * (1 + len(Saved._fields)))})",
    _forward,
    _forward_fake,
)
_backward_hidden_op = define_op(
    "fp8_swiglu_mlp_backward_hidden(Tensor dy, Tensor[] saved, str forward_format, str gradient_format, str dx_sums, "
    "bool power_of_two, bool chunked, Tensor(a!) dgate_counts, Tensor(b!) dup_counts, Tensor(c!) dy_counts, "
    "Tensor(d!)? dgate_history, Tensor(e!)? dup_history, Tensor(f!)? dy_history) "
    f"-> ({', '.join(['Tensor'] * len(Between._fields))})",
    _hidden,
    _hidden_fake,
)
_backward_gemms_op = define_op(
    "fp8_swiglu_mlp_backward_gemms(Tensor[] between, Tensor[] saved, str dtype, str dx_sums) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gemms,
    _gemms_fake,
)
