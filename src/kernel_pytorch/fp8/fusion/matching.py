"""Match RMSNorms with the FP8 layers that read them, in eager mode, and detect changed modules.

A fused norm tags its output. The first layer that would quantize that tensor requests the cast, and the norm serves
the request in its next call, with the layer's counts and history. A request ends when a served cast was not used.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from kernel_pytorch.fp8.recipe import Recipe

__all__ = [
    "MARK",
    "SETTINGS",
    "CastRequest",
    "CastingNorm",
    "NormOutput",
    "input_key",
    "module_settings",
    "request_cast",
    "unchanged",
]

MARK = "_fp8_offer"
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
        setattr(y, MARK, output)

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
    output: NormOutput | None = getattr(x, MARK, None)
    if output is not None and not output.met:
        output.met = True
        output.caster.request_cast(output, x, layer, recipe, number_format, transposed)


# Attributes of a matched module that its forward may read.


SETTINGS = "_fp8_settings"
"""The attribute of a module that is fused."""
_PLAIN = (bool, int, float, str, type(None))


def module_settings(module: nn.Module, *apart: str) -> list[tuple[nn.Module, str, Any]]:
    """Numbers, texts, flags and children of a module and of its parts, but for its linear layers.

    Args:
        apart: attributes that whoever runs the module reads himself.
    """
    found: list[tuple[nn.Module, str, Any]] = []
    for part in module.modules():
        if isinstance(part, nn.Linear):
            continue
        plain = [(name, value) for name, value in vars(part).items() if type(value) in _PLAIN]
        children = [(name, child) for name, child in part.named_children() if not isinstance(child, nn.Linear)]
        found += [(part, name, value) for name, value in plain + children if name not in ("training", *apart)]
    return found


def unchanged(settings: list[tuple[nn.Module, str, Any]]) -> bool:
    """Whether all of them are what they were. Read so that torch.compile looks at them before each call."""
    for part, name, value in settings:
        now = getattr(part, name, settings)
        if now is not value and (isinstance(value, nn.Module) or now != value):
            return False
    return True
