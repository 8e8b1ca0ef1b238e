"""RMSNorm that also quantizes its output for the FP8 layer behind it, in one pass.

In eager mode a fused norm tags its output. The first layer that would quantize that tensor requests the cast, and the
norm serves the request in its next call, with the layer's counts and history. A request ends when a served cast was
not used. torch.compile fuses norms by itself, so in its graph the first layer quantizes from the norm's inputs, with
which the output is tagged; the compiler drops the output if nothing else reads it.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from kernel_pytorch.fp8.quantize import ScaledTensor
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

_OUTPUT = "_fp8_offer"
"""The attribute of a norm's output that says which norm it is of."""


def input_key(x: torch.Tensor, recipe: Recipe, transposed: bool) -> tuple[Any, ...]:
    """What two casts of a tensor have in common that are the same."""
    return (x._version, recipe.input, recipe.power_of_two, recipe.delayed, transposed)


class CastRequest(NamedTuple):
    """The cast that a layer would make of a norm's output."""

    layer: weakref.ref[Any]
    recipe: Recipe
    number_format: str
    transposed: bool
    conditions: tuple[Any, ...]
    """What it depends on that may be another at the next call."""


class NormOutput:
    """What a norm puts on its output."""

    __slots__ = ("again", "caster", "met", "request", "version")

    def __init__(self, caster: CastingNorm, again: bool, request: CastRequest | None, version: int) -> None:
        self.caster, self.again, self.request, self.version = caster, again, request, version
        self.met = False
        """Whether a layer has requested the cast of this tensor."""


class CastingNorm:
    """Of one norm: how it computes, and for whom it casts. Copies and pickles find that out anew.

    Forwards that a backward repeats, of activation checkpointing, are kept apart from the others: the layer behind
    may lie outside of what is repeated.
    """

    def __init__(self, width: int, eps: str, rounds_to_input: bool, auto: bool, traced: bool) -> None:
        self.width, self.auto = width, auto
        self.traced = traced
        """Whether ``traced_norm`` is used inside torch.compile."""
        self.eps = eps
        """The name of the module's attribute with eps."""
        self.rounds_to_input = rounds_to_input
        """Whether the result is in x's dtype also with a weight in float32."""
        self._requests: dict[bool, CastRequest] = {}
        self._last: dict[bool, NormOutput] = {}
        self._shared = False
        """Whether different layers come first in different calls: then nothing is cast for any."""
        self._met, self._used = False, not auto
        self._consumer: weakref.ref[Any] | None = None
        self._weight_version = 0
        """Of the consumer's weight, when ``_used`` was last decided."""
        self.declined = False
        """Whether our op could not take a call: from then on, whether it can is known before a layer is met."""

    def __reduce__(self) -> Any:
        return CastingNorm, (self.width, self.eps, self.rounds_to_input, self.auto, self.traced)

    def used(self) -> bool:
        """Whether the norm computes by our op; else it is as it was.

        Always by the op, with or without a cast, where a recipe was asked for: so y has the same bits in the first
        call and in the next, in a resumed run and in an evaluation. With ``auto`` only where the consuming layer
        gains by FP8. That is decided again when the consumer's weight has changed, so that a forward and its
        recomputation for activation checkpointing agree.
        """
        consumer = None if self._consumer is None else self._consumer()
        if self.auto and consumer is not None:
            version = _version_of(consumer.weight)
            if version != self._weight_version:
                self._weight_version, self._used, self._met = version, self._met, False
        return self._used

    def request(self, x: torch.Tensor, again: bool) -> CastRequest | None:
        """The cast to make of the result for x."""
        request, last = self._requests.get(again), self._last.get(again)
        if request is None:
            return None
        if last is not None and last.request is not None and not last.met:
            del self._requests[again]
            return None
        layer = request.layer()
        if layer is None or request.conditions != self._conditions(layer, x):
            return None
        return request

    def mark(self, y: torch.Tensor, again: bool, request: CastRequest | None) -> None:
        """Let the layers behind know whose output it is."""
        output = self._last[again] = NormOutput(self, again, request, y._version)
        setattr(y, _OUTPUT, output)

    def request_cast(
        self, output: NormOutput, y: torch.Tensor, layer: Any, recipe: Recipe, number_format: str, transposed: bool
    ) -> None:
        """Record the request of the first layer that quantizes y."""
        self._met = True
        if self.auto and (self._consumer is None or self._consumer() is None):
            self._consumer, self._weight_version = weakref.ref(layer), _version_of(layer.weight)
        request, unchanged = output.request, y._version == output.version
        wanted = (recipe, number_format, transposed)
        served = request is not None and unchanged and request.layer() is layer and request[1:4] == wanted
        if served or self._shared:
            return
        if recipe.input != "tensor" or not unchanged:
            # Other scales are not the norm's to make, and what was changed in place is not the norm's any more.
            self._requests.pop(output.again, None)
            return
        known = request or self._requests.get(output.again)
        other = None if known is None else known.layer()
        if other is not None and other is not layer:
            self._shared = True
            self._requests.clear()
            y.__dict__.pop("_fp8_cast", None)  # by the other's history
            return
        self._requests[output.again] = CastRequest(weakref.ref(layer), *wanted, self._conditions(layer, y))

    def forget(self) -> None:
        """Drop all requests: the op cannot take this norm's calls."""
        self._requests.clear()

    def layer(self) -> Any:
        """The layer that it casts for, or None."""
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
        # What auto has chosen is for a size and a format.
        return (*found, x.shape, x.dtype, torch.is_autocast_enabled(x.device.type)) if self.auto else found


def _version_of(weight: torch.Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def request_cast(x: torch.Tensor, layer: Any, recipe: Recipe, number_format: str, transposed: bool) -> None:
    """Request the cast of x from the norm that computed it, if one did."""
    output: NormOutput | None = getattr(x, _OUTPUT, None)
    if output is not None and not output.met:
        output.met = True
        output.caster.request_cast(output, x, layer, recipe, number_format, transposed)


def _norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, request: CastRequest | None
) -> tuple[torch.Tensor, torch.Tensor, ScaledTensor | None]:
    """Return y, rstd and the requested cast, whose counts are added to those of the layer behind.

    Where no gradient is recorded.
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
    if x.ndim != 2:  # no view, so that whoever is given y may change it in place
        y = torch.ops.aten._unsafe_view.default(y, x.shape)
    return y, rstd, cast


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, where no gradient is recorded."""
    return _norm(x, weight, eps, None)[0]


def recorded_rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, request: CastRequest | None
) -> torch.Tensor:
    """RMSNorm that autograd records, with the requested cast kept on the output."""
    casts: list[ScaledTensor | None] = []
    y: torch.Tensor = _Norm.apply(x, weight, eps, request, casts)  # type: ignore[no-untyped-call]
    (cast,) = casts
    if request is not None and cast is not None:
        y._fp8_cast = (input_key(y, request.recipe, request.transposed), cast)  # type: ignore[attr-defined]
    return y


class _Norm(torch.autograd.Function):
    """With or without a cast the same is saved: what a backward repeats may differ in that."""

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
        else:  # the operator refuses a second derivative by name
            dx, dweight = torch.ops.kernel_pytorch.rms_norm_backward.default(*values, policy)
        needs_dx, needs_dweight, *_ = ctx.needs_input_grad
        return dx if needs_dx else None, dweight if needs_dweight else None, None, None, None


# Inside torch.compile.


_INPUTS = "_fp8_norm_of"
"""The attribute of a traced norm's output with what it was computed from."""


class NormInputs(NamedTuple):
    """What the output of an RMSNorm was computed from; None where that is unknown."""

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

    Only delayed scaling can quantize from them: without a history the scale needs all of y first. Writes through
    ``.data`` between a norm and a layer of one graph are not seen.
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
