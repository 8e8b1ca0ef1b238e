"""RMSNorm that also quantizes its output for the FP8 layer that follows, in one pass.

In eager mode a fused norm tags its output. The first layer that would quantize that tensor requests the cast, and the
norm serves the request in its next call, with the layer's counts and history. A request is dropped when a served cast
was not used. torch.compile fuses norms itself, so in its graph the output is tagged with the norm's inputs, and the
first layer quantizes from them. The compiler drops the output if nothing else reads it.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from kernel_pytorch.fp8.quantize import ScaledTensor, cache_cast, drop_cached_cast
from kernel_pytorch.fp8.recipe import Recipe
from kernel_pytorch.hardware_abstraction import dispatch, policy_scope
from kernel_pytorch.ops.fp8_rms_norm import fp8_rms_norm
from kernel_pytorch.ops.fp8_rms_norm.definition import FP8_RMS_NORM
from kernel_pytorch.ops.fp8_rms_norm.prepared import NormSpec
from kernel_pytorch.ops.rms_norm.definition import RMS_NORM

__all__ = [
    "CastRequest",
    "CastingNorm",
    "NormInputs",
    "NormOutput",
    "input_key",
    "norm_inputs",
    "recorded_rms_norm",
    "request_cast",
    "rms_norm",
    "traced_rms_norm",
]

_OUTPUT = "_fp8_norm_output"
"""The attribute of a norm's output with its ``NormOutput``."""


def input_key(x: torch.Tensor, recipe: Recipe, transposed: bool) -> tuple[Any, ...]:
    """Return the key of quantized data cached on a tensor: equal keys, equal data."""
    return (x._version, recipe.input, recipe.power_of_two, recipe.delayed, transposed)


class CastRequest(NamedTuple):
    """The cast that a layer would make of a norm's output."""

    layer: weakref.ref[Any]
    recipe: Recipe
    number_format: str
    transposed: bool
    conditions: tuple[Any, ...]
    """Other properties of the layer and the input; the request is served only while they are equal."""


class NormOutput:
    """The tag of a norm's output."""

    __slots__ = ("caster", "recomputed", "request", "requested", "version")

    def __init__(self, caster: CastingNorm, recomputed: bool, request: CastRequest | None, version: int) -> None:
        self.caster, self.recomputed, self.request, self.version = caster, recomputed, request, version
        self.requested = False
        """Whether a layer has requested the cast of this tensor."""


class CastingNorm:
    """The state of one fused norm: its formula, and the layer whose cast it serves, which copies and pickles drop.

    Recomputed forwards (activation checkpointing) have requests of their own: the layer that follows may lie outside
    the recomputed region.
    """

    def __init__(self, width: int, eps: str, rounds_to_input: bool, auto: bool, traced: bool) -> None:
        self.width, self.auto = width, auto
        self.traced = traced
        """Whether ``traced_norm`` is used inside torch.compile."""
        self.eps = eps
        """The name of the module's attribute with eps."""
        self.rounds_to_input = rounds_to_input
        """Whether the result has x's dtype even if the weight is float32."""
        self._requests: dict[bool, CastRequest] = {}
        self._last: dict[bool, NormOutput] = {}
        self._shared = False
        """Whether the first layer differs between calls. No cast is served then."""
        self._was_requested, self._used = False, not auto
        self._consumer: weakref.ref[Any] | None = None
        self._weight_version = 0
        """The version of the consumer's weight when ``_used`` was last decided."""
        self.declined = False
        """Whether ``fp8_rms_norm`` has refused a call. Later calls are then checked before they are tagged."""

    def __reduce__(self) -> Any:
        return CastingNorm, (self.width, self.eps, self.rounds_to_input, self.auto, self.traced)

    def used(self) -> bool:
        """Return whether the norm runs by ``fp8_rms_norm`` instead of the module's own forward.

        With an explicit recipe always, with or without a cast, so that y has the same bits in the first call and the
        next, in a resumed run and in evaluation. With ``auto`` only if the consuming layer runs in FP8. That is
        decided again when the consumer's weight has changed, so that a forward and its recomputation for activation
        checkpointing agree.
        """
        consumer = None if self._consumer is None else self._consumer()
        if self.auto and consumer is not None:
            version = _version_of(consumer.weight)
            if version != self._weight_version:
                self._weight_version, self._used, self._was_requested = version, self._was_requested, False
        return self._used

    def request(self, x: torch.Tensor, recomputed: bool) -> CastRequest | None:
        """Return the request to serve with the result for x, or None."""
        request, last = self._requests.get(recomputed), self._last.get(recomputed)
        if request is None:
            return None
        if last is not None and last.request is not None and not last.requested:
            del self._requests[recomputed]
            return None
        layer = request.layer()
        if layer is None or request.conditions != self._conditions(layer, x):
            return None
        return request

    def tag(self, y: torch.Tensor, recomputed: bool, request: CastRequest | None) -> None:
        """Tag y, so that the layer that follows can request its cast."""
        output = self._last[recomputed] = NormOutput(self, recomputed, request, y._version)
        setattr(y, _OUTPUT, output)

    def request_cast(
        self, output: NormOutput, y: torch.Tensor, layer: Any, recipe: Recipe, number_format: str, transposed: bool
    ) -> None:
        """Record the request of the first layer that quantizes y."""
        self._was_requested = True
        if self.auto and (self._consumer is None or self._consumer() is None):
            self._consumer, self._weight_version = weakref.ref(layer), _version_of(layer.weight)
        request, unchanged = output.request, y._version == output.version
        wanted = (recipe, number_format, transposed)
        served = request is not None and unchanged and request.layer() is layer and request[1:4] == wanted
        if served or self._shared:
            return
        if recipe.input != "tensor" or not unchanged:
            # The norm quantizes with tensorwise scaling only, and y must not have been written to since.
            self._requests.pop(output.recomputed, None)
            return
        known = request or self._requests.get(output.recomputed)
        other = None if known is None else known.layer()
        if other is not None and other is not layer:
            self._shared = True
            self._requests.clear()
            drop_cached_cast(y)  # it was quantized with the other layer's history
            return
        self._requests[output.recomputed] = CastRequest(weakref.ref(layer), *wanted, self._conditions(layer, y))

    def drop_requests(self) -> None:
        """Drop all requests: the op cannot take this norm's calls."""
        self._requests.clear()

    def layer(self) -> Any:
        """Return the layer that the norm quantizes for, or None."""
        request = self._requests.get(False) or self._requests.get(True)
        return None if request is None else request.layer()

    def _conditions(self, layer: Any, x: torch.Tensor) -> tuple[Any, ...]:
        found = (
            layer.training,
            layer.weight.requires_grad,
            layer.weight.device == x.device,
            getattr(layer, "fp8_recipe", None),
            getattr(layer, "fp8_fallback", None),
        )
        # The choice of auto is for one shape and dtype.
        return (*found, x.shape, x.dtype, torch.is_autocast_enabled(x.device.type)) if self.auto else found


def _version_of(weight: torch.Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def request_cast(x: torch.Tensor, layer: Any, recipe: Recipe, number_format: str, transposed: bool) -> None:
    """Request the cast of x from the norm that computed it, if one did."""
    output: NormOutput | None = getattr(x, _OUTPUT, None)
    if output is not None and not output.requested:
        output.requested = True
        output.caster.request_cast(output, x, layer, recipe, number_format, transposed)


def _norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, request: CastRequest | None
) -> tuple[torch.Tensor, torch.Tensor, ScaledTensor | None]:
    """Return y, rstd and the requested cast, and add its counts to those of the requesting layer.

    Must run without autograd.
    """
    x_RH = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    weight_H = weight if weight is None or weight.is_contiguous() else weight.contiguous()
    number_format, transposed, power_of_two, counts, history = None, False, False, None, None
    layer = None if request is None else request.layer()
    if request is not None and layer is not None:
        number_format, transposed, power_of_two = (
            request.number_format,
            request.transposed,
            request.recipe.power_of_two,
        )
        counts, history, _, _ = layer.fp8_buffers(request.recipe)
    length = 0 if history is None else history.shape[0]
    spec = NormSpec(x_RH.shape, x_RH.stride(), eps, number_format, transposed, length, power_of_two)
    run = dispatch.prepared(FP8_RMS_NORM, spec, x)
    if run is not None:
        y, rstd, data, data_t, inverse = run(x_RH, weight_H, counts, history)
    else:
        found = fp8_rms_norm(
            x_RH, weight_H, eps, number_format, transposed=transposed, history=history, power_of_two=power_of_two
        )
        y, rstd, data, data_t, inverse = found.y, found.rstd, found.data, found.data_t, found.inverse
        if counts is not None:
            counts[0].add_(found.counts)
        if history is not None:
            history.copy_(found.next_history)
    cast = None
    if number_format is not None:
        cast = ScaledTensor(data, data_t, inverse, inverse if transposed else inverse.new_empty(0), run is not None)
    if x.ndim != 2:  # not a view, so that the caller may write to y in place
        y = torch.ops.aten._unsafe_view.default(y, x.shape)
    return y, rstd, cast


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, without autograd."""
    return _norm(x, weight, eps, None)[0]


def recorded_rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, request: CastRequest | None
) -> torch.Tensor:
    """RMSNorm with autograd; the requested cast is cached on the output."""
    casts: list[ScaledTensor | None] = []
    y: torch.Tensor = _Norm.apply(x, weight, eps, request, casts)  # type: ignore[no-untyped-call]
    (cast,) = casts
    if request is not None and cast is not None:
        cache_cast(y, input_key(y, request.recipe, request.transposed), cast)
    return y


class _Norm(torch.autograd.Function):
    """Saves the same tensors with and without a cast, since a recomputed forward may differ in that."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        request: CastRequest | None,
        casts: list[ScaledTensor | None],
    ) -> torch.Tensor:
        y, rstd, cast = _norm(x, weight, eps, request)
        casts.append(cast)
        ctx.save_for_backward(x, weight, rstd)
        ctx.policy = policy_scope.effective_policy("rms_norm", None)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        policy, values = ctx.policy, (dy, x, weight, rstd)
        if not torch.is_grad_enabled() and dispatch.plain_call(dy):
            dx, dweight = dispatch.function_of(RMS_NORM).run("backward", values, policy)
        else:  # the operator raises its own error for a second derivative
            dx, dweight = torch.ops.kernel_pytorch.rms_norm_backward.default(*values, policy)
        needs_dx, needs_dweight, *_ = ctx.needs_input_grad
        return dx if needs_dx else None, dweight if needs_dweight else None, None, None, None


# Inside torch.compile.


_INPUTS = "_fp8_norm_of"
"""The attribute of a traced norm's output with its ``NormInputs``."""


class NormInputs(NamedTuple):
    """The inputs of an RMSNorm; None where they are unknown."""

    x: torch.Tensor | None = None
    """(rows, columns)."""
    rstd: torch.Tensor | None = None
    weight: torch.Tensor | None = None


def traced_rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, whose output is tagged with its inputs if it requires a gradient."""
    y: torch.Tensor
    y, rstd = _TracedNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    if y.requires_grad:
        setattr(y, _INPUTS, (y._version, x, x._version, weight, None if weight is None else weight._version, rstd))
    return y


def norm_inputs(y: torch.Tensor, history: torch.Tensor | None) -> NormInputs:
    """Return the inputs of the RMSNorm that computed y, if neither has been written to since.

    Needs delayed scaling: without a history the scale depends on all of y. Writes through ``.data`` between a norm
    and a layer of one graph are not seen.
    """
    mark = getattr(y, _INPUTS, None)
    if mark is None or history is None:
        return NormInputs()
    version, x, x_version, weight, weight_version, rstd = mark
    if version != y._version or x._version != x_version:
        return NormInputs()
    if weight is not None and weight._version != weight_version:
        return NormInputs()
    x_RH = x.detach().reshape(-1, x.shape[-1])
    return NormInputs(x_RH, rstd.detach().reshape(-1), None if weight is None else weight.detach())


class _TracedNorm(torch.autograd.Function):
    """RMSNorm by the operators of torch's decomposition, which Inductor fuses in the same way.

    rstd is an output: recomputing it for the cast would add a reduction to the start of the backward.
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
