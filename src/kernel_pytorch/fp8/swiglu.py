"""``down(silu(gate(x)) * up(x))`` of three converted layers as one function, forward and backward.

The activation h is quantized as it is computed, and its gradients in both layouts, so none of them is written in high
precision. h is not saved; the backward recomputes its transposed data from gate and up. The backward has two halves.
The first returns the gradients of gate and up in FP8, after which gate and up can be freed. A step's memory peaks in
that half, so a large dh is computed in row chunks, and its transposed data later.

``fusion`` finds the modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kernel_pytorch.fp8.autograd import (
    Buffers,
    compute_dtype,
    formats_on,
    quantize_input,
    quantize_layer_weight,
    quantize_of,
    refuse_double_backward,
)
from kernel_pytorch.fp8.quantize import (
    INPUT,
    NAMES,
    WEIGHT,
    QuantizeSpec,
    ScaledTensor,
    scaled_matmul,
    transpose_data,
    weight_spec,
)
from kernel_pytorch.fp8.recipe import Recipe
from kernel_pytorch.fp8.rms_norm import NormInputs, norm_inputs, request_cast
from kernel_pytorch.hardware_abstraction import dispatch
from kernel_pytorch.ops.fp8_swiglu import fp8_swiglu, fp8_swiglu_grad
from kernel_pytorch.ops.fp8_swiglu.definition import FP8_SWIGLU
from kernel_pytorch.ops.fp8_swiglu.grad_definition import FP8_SWIGLU_GRAD
from kernel_pytorch.ops.fp8_swiglu.prepared import SwiGLUGradSpec, SwiGLUSpec

if TYPE_CHECKING:
    from kernel_pytorch.fp8.module import Float8Linear

__all__ = [
    "Between",
    "MLPBuffers",
    "MLPSpec",
    "Needs",
    "Saved",
    "backward_gemms",
    "backward_hidden",
    "fp8_swiglu_mlp",
    "in_row_chunks",
    "is_chunked",
    "swiglu_backward",
    "swiglu_forward",
    "traced_swiglu",
]

_CHUNK_ROWS = 4096
"""Rows of a chunk of dh: enough to keep the matrix units busy."""
_LARGE = 1 << 27
"""Number of elements of dh above which it is computed in row chunks."""


class Saved(NamedTuple):
    """The tensors that the backward reads."""

    gate: torch.Tensor
    up: torch.Tensor
    h_inverse: torch.Tensor
    x_inverse: torch.Tensor
    x_t: torch.Tensor
    gate_inverse: torch.Tensor
    gate_t: torch.Tensor
    up_inverse: torch.Tensor
    up_t: torch.Tensor
    down_inverse: torch.Tensor
    down_t: torch.Tensor


class MLPSpec(NamedTuple):
    """How the GEMMs of a SwiGLU are computed."""

    dtype: str
    forward_format: str
    gradient_format: str
    dx_sums: str
    power_of_two: bool


class MLPBuffers(NamedTuple):
    """Counts and amax histories of the three layers. x is quantized with gate's history, h and dy with down's."""

    gate: Buffers
    up: Buffers
    down: Buffers


class Needs(NamedTuple):
    """Which gradients are needed."""

    dx: bool = True
    dh: bool = True
    dgate: bool = True
    dup: bool = True
    ddown: bool = True


def fp8_swiglu_mlp(
    x: torch.Tensor, gate: Float8Linear, up: Float8Linear, down: Float8Linear, recipe: Recipe
) -> torch.Tensor:
    """``down(silu(gate(x)) * up(x))`` with activations and gradients between the layers in FP8."""
    recording = torch.is_grad_enabled()
    layers = (gate, up, down)
    weights = [layer.weight for layer in layers]
    buffers = MLPBuffers(*(layer.fp8_buffers(recipe) for layer in layers))
    needs_dw = [recording and weight.requires_grad for weight in weights]
    needs_dx = recording and x.requires_grad
    needs_dh = needs_dx or needs_dw[0] or needs_dw[1]
    needs = Needs(needs_dx, needs_dh, *needs_dw)
    forward_format, gradient_format = formats_on(x.device.type, x.device.index, recipe.gradient_format)
    spec = MLPSpec(NAMES[compute_dtype(x)], forward_format, gradient_format, recipe.dx_sums, recipe.power_of_two)
    transposed = (needs_dx, needs_dx, needs_dh)  # for the gradients of x and h
    quantized = [
        layer.quantized_weight(recipe, forward_format, each) for layer, each in zip(layers, transposed, strict=True)
    ]
    y_MN: torch.Tensor
    if torch.compiler.is_compiling():
        from kernel_pytorch.fp8.operators import revision, swiglu_in_graph

        gathered = [tensor for w in quantized for tensor in ((None, None) if w is None else (w.data, w.inverse))]
        of_layers = [tensor for each in buffers for tensor in each]
        y_MN = swiglu_in_graph(revision(), x, *weights, *gathered, *of_layers, *spec, *needs)
        return y_MN.reshape(*x.shape[:-1], y_MN.shape[-1])
    x_transposed = needs_dw[0] or needs_dw[1]
    request_cast(x, gate, recipe, forward_format, x_transposed)
    x_quantized = quantize_input(x, recipe, forward_format, transposed=x_transposed, buffers=buffers.gate)
    for i, (weight, own) in enumerate(zip(weights, buffers, strict=True)):
        if quantized[i] is None:
            quantized[i] = quantize_layer_weight(
                weight, recipe, forward_format, transposed=transposed[i], counts=own.counts
            )
    x_MK = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y_MN = _SwiGLU.apply(x_MK, *weights, buffers, spec, needs, x_quantized, quantized)  # type: ignore[no-untyped-call]
    return y_MN.reshape(*x.shape[:-1], y_MN.shape[-1])


def traced_swiglu(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    gathered: list[ScaledTensor | None],
    buffers: MLPBuffers,
    spec: MLPSpec,
    needs: Needs,
) -> torch.Tensor:
    """``fp8_swiglu_mlp`` for torch.compile: one operator forward and two backward if every gradient is needed."""
    x_MK = x.reshape(-1, x.shape[-1])
    y_MN: torch.Tensor
    if all(needs) and gathered == [None] * 3:
        norm = norm_inputs(x, buffers.gate.history)
        y_MN = _SwiGLU.apply(x_MK, *weights, buffers, spec, needs, None, None, True, norm)  # type: ignore[no-untyped-call]
        return y_MN
    from kernel_pytorch.fp8.operators import traced_quantize

    x_spec = QuantizeSpec(spec.forward_format, "tensor", needs.dgate or needs.dup, spec.power_of_two)
    x_quantized = traced_quantize(x_MK.detach(), x_spec, buffers.gate.counts, INPUT, buffers.gate.history)
    quantized = [
        traced_quantize(
            weight.detach(),
            weight_spec(spec.forward_format, "tensor", transposed, spec.power_of_two),
            own.counts,
            WEIGHT,
        )
        if given is None
        else given
        for weight, given, own, transposed in zip(
            weights, gathered, buffers, (needs.dx, needs.dx, needs.dh), strict=True
        )
    ]
    y_MN = _SwiGLU.apply(x_MK, *weights, buffers, spec, needs, x_quantized, quantized, True)  # type: ignore[no-untyped-call]
    return y_MN


_NO_GRADIENTS = (None,) * 7
"""Number of arguments of ``_SwiGLU`` after x and the weights: they have no gradients."""


class _SwiGLU(torch.autograd.Function):
    """The autograd of eager mode and, by ``operators.swiglu_in_graph``, of torch.compile."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        buffers: MLPBuffers,
        spec: MLPSpec,
        needs: Needs,
        x: ScaledTensor | None,
        quantized: list[ScaledTensor] | None,
        traced: bool = False,
        norm: NormInputs | None = None,
    ) -> torch.Tensor:
        if traced:
            from kernel_pytorch.fp8.operators import skip_version_check, swiglu_mlp_forward

            for each in buffers:
                skip_version_check(*each)  # a recomputation updates the forward's once more
        ctx.to_transpose = []
        if norm is not None:
            y, saved = swiglu_mlp_forward(x_MK, (gate, up, down), buffers, spec, norm)
        else:
            assert x is not None
            assert quantized is not None
            y, saved = swiglu_forward(x, quantized, spec, buffers)
            named = zip(("gate_t", "up_t", "down_t"), quantized, strict=True)
            ctx.to_transpose = [name for name, weight in named if weight.data_t is weight.data]
        ctx.save_for_backward(*(saved if needs.dh or needs.ddown else ()))
        ctx.buffers, ctx.spec, ctx.needs, ctx.traced, ctx.fused = buffers, spec, needs, traced, norm is not None
        ctx.dtypes = (x_MK.dtype, gate.dtype, up.dtype, down.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor) -> Any:
        saved = Saved(*ctx.saved_tensors)
        dx: torch.Tensor | None
        dweights: Sequence[torch.Tensor | None]
        if ctx.fused:
            from kernel_pytorch.fp8.operators import swiglu_mlp_backward

            of_gate, of_up, *dweights = swiglu_mlp_backward(dy_MN, saved, ctx.buffers, ctx.spec)
            dx = of_gate + of_up  # the compiler fuses the sum with what follows
        else:
            saved = saved._replace(**{name: transpose_data(getattr(saved, name)) for name in ctx.to_transpose})
            dx, dx_of_up, *dweights = swiglu_backward(dy_MN, saved, ctx.spec, ctx.needs, ctx.buffers, ctx.traced)
            if dx is not None and dx_of_up is not None:
                dx = dx.add_(dx_of_up)
        gradients = [
            None if found is None else found.to(dtype)
            for found, dtype in zip((dx, *dweights), ctx.dtypes, strict=True)
        ]
        if torch.is_grad_enabled() and not ctx.traced:  # create_graph=True
            gradients = [refuse_double_backward(gradient, dy_MN) for gradient in gradients]
        return *gradients, *_NO_GRADIENTS


def swiglu_forward(
    x: ScaledTensor,
    quantized: Sequence[ScaledTensor],
    spec: MLPSpec,
    buffers: MLPBuffers,
) -> tuple[torch.Tensor, Saved]:
    """Return y of the quantized x and weights, and the tensors that the backward reads."""
    dtype, direct = spec.dtype, x.direct
    gate, up, down = quantized
    gate_MF = scaled_matmul(x.data, gate.data, x.inverse, gate.inverse, dtype, "fast", direct)
    up_MF = scaled_matmul(x.data, up.data, x.inverse, up.inverse, dtype, "fast", direct)
    data, inverse = _hidden(gate_MF, up_MF, spec, buffers)
    y = scaled_matmul(data, down.data, inverse, down.inverse, dtype, "fast", direct)
    weights = (gate.inverse, gate.data_t, up.inverse, up.data_t, down.inverse, down.data_t)
    return y, Saved(gate_MF, up_MF, inverse, x.inverse, x.data_t, *weights)


class Between(NamedTuple):
    """The tensors that the first half of the backward passes to the second."""

    dy_t: torch.Tensor
    """dy itself if dh was computed in row chunks; the transposed data of dgate and dup is then empty."""
    dy_inverse: torch.Tensor
    dgate: torch.Tensor
    dgate_t: torch.Tensor
    dgate_inverse: torch.Tensor
    dup: torch.Tensor
    dup_t: torch.Tensor
    dup_inverse: torch.Tensor
    h_t: torch.Tensor


def is_chunked(between: Between) -> bool:
    return between.dgate_t.numel() != between.dgate.numel()


def in_row_chunks(gate: torch.Tensor, history: torch.Tensor | None) -> bool:
    """Return whether dh is computed in row chunks. Needs delayed scaling, whose scale is known before all of dh."""
    rows, columns = gate.shape
    # No guard on symbolic rows.
    large = statically_known_true(rows > _CHUNK_ROWS) and statically_known_true(rows * columns >= _LARGE)
    return large and history is not None


def swiglu_backward(
    dy_MN: torch.Tensor, saved: Saved, spec: MLPSpec, needs: Needs, buffers: MLPBuffers, traced: bool
) -> tuple[torch.Tensor | None, ...]:
    """Return the two terms of dx, from gate and from up, and the gradients of the three weights."""
    dtype = NAMES[dy_MN.dtype]
    if needs.dh:
        chunked = not traced and in_row_chunks(saved.gate, buffers.gate.gradient_history)
        between = backward_hidden(dy_MN, saved, spec, buffers, chunked, needs.ddown, traced)
        return backward_gemms(between, saved, dtype, spec.dx_sums, needs)
    ddown = None
    if needs.ddown:  # gate and up are frozen: only the transposed h is needed
        dy = _quantize_dy(dy_MN, spec, buffers, True, traced)
        h = fp8_swiglu(saved.gate, saved.up, spec.forward_format, power_of_two=spec.power_of_two)
        h_t = transpose_data(h.data)
        ddown = scaled_matmul(dy.data_t, h_t, dy.inverse, h.inverse, dtype, "promoted", dy.direct)
    return None, None, None, None, ddown


def _quantize_dy(
    dy_MN: torch.Tensor, spec: MLPSpec, buffers: MLPBuffers, transposed: bool, traced: bool
) -> ScaledTensor:
    how = QuantizeSpec(spec.gradient_format, "tensor", transposed, spec.power_of_two)
    return quantize_of(traced)(dy_MN, how, buffers.down.gradient_counts, INPUT, buffers.down.gradient_history)


def backward_hidden(
    dy_MN: torch.Tensor,
    saved: Saved,
    spec: MLPSpec,
    buffers: MLPBuffers,
    chunked: bool,
    needs_ddown: bool,
    traced: bool = False,
) -> list[torch.Tensor]:
    """Return what ``Between`` lists."""
    dtype = NAMES[dy_MN.dtype]
    dy = _quantize_dy(dy_MN, spec, buffers, needs_ddown, traced)
    data, data_t, inverse, direct = dy.data, dy.data_t, dy.inverse, dy.direct
    del dy
    if chunked:
        data_t = data  # the second half transposes it, when gate and up are freed

    h_inverse = saved.h_inverse if needs_ddown else None
    factors = (saved.down_t, inverse, saved.down_inverse, dtype, spec.dx_sums, direct)
    hidden = None
    if chunked:
        rows_of_dh = partial(_rows_of_matmul, data, factors)
        hidden = _hidden_gradients_in_chunks(rows_of_dh, saved, h_inverse, spec, buffers)
    if hidden is None:
        dh = scaled_matmul(data, *factors)
        del data  # free memory as early as possible
        g, g_t, g_inverse, u, u_t, u_inverse, h_t = _hidden_gradients(dh, saved, h_inverse, spec, buffers)
    else:
        g, g_inverse, u, u_inverse, h_t = hidden
    if chunked:  # the results of a custom operator must not alias
        g_t, u_t = g.new_empty((0, 0)), u.new_empty((0, 0))
    return [data_t, inverse, g, g_t, g_inverse, u, u_t, u_inverse, h_t]


def _rows_of_matmul(a: torch.Tensor, factors: tuple[Any, ...], first: int, last: int) -> torch.Tensor:
    return scaled_matmul(a[first:last], *factors)


def backward_gemms(
    between: list[torch.Tensor], saved: Saved, dtype: str, dx_sums: str, needs: Needs
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of ``swiglu_backward`` from the first half. Gate and up are not read."""
    dx = dx_of_up = dgate = dup = ddown = None
    chunked = is_chunked(Between(*between))
    dy_t, dy_inverse, g, g_t, g_inverse, u, u_t, u_inverse, h_t = between
    between.clear()
    direct = dispatch.plain_call(g)
    if needs.ddown:
        dy_t = transpose_data(dy_t) if chunked else dy_t
        ddown = scaled_matmul(dy_t, h_t, dy_inverse, saved.h_inverse, dtype, "promoted", direct)
    del dy_t, h_t
    if needs.dx:
        dx = scaled_matmul(g, saved.gate_t, g_inverse, saved.gate_inverse, dtype, dx_sums, direct)
    if needs.dgate:
        g_t = transpose_data(g) if chunked else g_t
        del g
        dgate = scaled_matmul(g_t, saved.x_t, g_inverse, saved.x_inverse, dtype, "promoted", direct)
    g = g_t = g_inverse  # free gate's tensors before up's GEMMs
    if needs.dx:
        dx_of_up = scaled_matmul(u, saved.up_t, u_inverse, saved.up_inverse, dtype, dx_sums, direct)
    if needs.dup:
        u_t = transpose_data(u) if chunked else u_t
        del u
        dup = scaled_matmul(u_t, saved.x_t, u_inverse, saved.x_inverse, dtype, "promoted", direct)
    return dx, dx_of_up, dgate, dup, ddown


# Quantized activation and its gradients, with their counts and histories.


def _hidden(
    gate: torch.Tensor, up: torch.Tensor, spec: MLPSpec, buffers: MLPBuffers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``silu(gate) * up``: data and inverse scale."""
    counts, history = buffers.down.counts, buffers.down.history
    length = 0 if history is None else history.shape[0]
    kind = SwiGLUSpec(gate.shape, gate.stride(), up.stride(), spec.forward_format, length, spec.power_of_two)
    cast = dispatch.prepared(FP8_SWIGLU, kind, gate)
    if cast is not None:
        data, inverse = cast(gate, up, counts, history)
        return data, inverse
    h = fp8_swiglu(gate, up, spec.forward_format, history=history, power_of_two=spec.power_of_two)
    _count(counts, h.counts, h.data.numel())
    if history is not None:
        history.copy_(h.next_history)
    return h.data, h.inverse


def _hidden_gradients(
    dh: torch.Tensor, saved: Saved, h_inverse: torch.Tensor | None, spec: MLPSpec, buffers: MLPBuffers
) -> tuple[torch.Tensor, ...]:
    """Quantize dgate and dup, both layouts, and the transposed h: the results of ``fp8_swiglu_grad``."""
    gate, up = saved.gate, saved.up
    counts = (buffers.gate.gradient_counts, buffers.up.gradient_counts)
    gate_history, up_history = buffers.gate.gradient_history, buffers.up.gradient_history
    length = 0 if gate_history is None else gate_history.shape[0]
    kind = SwiGLUGradSpec(
        gate.shape, dh.stride(), gate.stride(), up.stride(), spec.gradient_format, spec.forward_format,
        h_inverse is not None, length, spec.power_of_two,
    )  # fmt: skip
    cast = dispatch.prepared(FP8_SWIGLU_GRAD, kind, gate)
    if cast is not None:
        found: tuple[torch.Tensor, ...] = cast(dh, gate, up, h_inverse, counts, (gate_history, up_history))
        return found
    hidden = fp8_swiglu_grad(
        dh,
        gate,
        up,
        spec.gradient_format,
        spec.forward_format,
        h_inverse=h_inverse,
        gate_history=gate_history,
        up_history=up_history,
        power_of_two=spec.power_of_two,
    )
    for each, lost in zip(counts, hidden.counts, strict=True):
        _count(each, lost, gate.numel())
    if gate_history is not None and up_history is not None:
        gate_history.copy_(hidden.gate_next_history)
        up_history.copy_(hidden.up_next_history)
    dgate, dup = (
        (hidden.dgate, hidden.dgate_t, hidden.dgate_inverse),
        (hidden.dup, hidden.dup_t, hidden.dup_inverse),
    )
    return *dgate, *dup, hidden.h_t


def _hidden_gradients_in_chunks(
    rows_of_dh: Callable[[int, int], torch.Tensor],
    saved: Saved,
    h_inverse: torch.Tensor | None,
    spec: MLPSpec,
    buffers: MLPBuffers,
) -> tuple[torch.Tensor, ...] | None:
    """``_hidden_gradients`` for row chunks of dh, without transposed data; None if no prepared kernel serves."""
    gate, up = saved.gate, saved.up
    histories = (buffers.gate.gradient_history, buffers.up.gradient_history)
    assert histories[0] is not None
    kind = SwiGLUGradSpec(
        gate.shape, None, gate.stride(), up.stride(), spec.gradient_format, spec.forward_format,
        h_inverse is not None, histories[0].shape[0], spec.power_of_two, _CHUNK_ROWS,
    )  # fmt: skip
    cast = dispatch.prepared(FP8_SWIGLU_GRAD, kind, gate)
    if cast is None:
        return None
    counts = (buffers.gate.gradient_counts, buffers.up.gradient_counts)
    found: tuple[torch.Tensor, ...] = cast(rows_of_dh, gate, up, h_inverse, counts, histories)
    return found


def _count(counts: torch.Tensor | None, lost: torch.Tensor, elements: int) -> None:
    """Add the counts of one tensor to the rows of data and of data_t."""
    assert counts is not None
    counts[0, :, :3].add_(lost)
    counts[0, :, 3].add_(elements)
