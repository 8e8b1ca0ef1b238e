"""How a norm and the layers behind it find each other, in eager mode.

A norm marks its output. The first layer that is given that very tensor, and would cast it, says so: it wishes for the
cast, and the norm makes it in its next call, with the layer's own counts and history. What the layer then finds on
the tensor is what it would have made. A wish lasts as long as it is granted to somebody: a cast that nobody took is
not made again.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from kernel_pytorch.fp8.recipe import Recipe

__all__ = ["MARK", "Caster", "Offer", "Wish", "input_key", "meet"]

MARK = "_fp8_offer"
"""The attribute of a norm's output that says which norm it is of."""


def input_key(x: torch.Tensor, recipe: Recipe, transposed: bool) -> tuple[Any, ...]:
    """What two casts of a tensor have in common that are the same."""
    return (x._version, recipe.input, recipe.power_of_two, recipe.delayed, transposed)


class Wish(NamedTuple):
    """The cast that a layer would make of a norm's output."""

    layer: weakref.ref[Any]
    recipe: Recipe
    number_format: str
    transposed: bool
    conditions: tuple[Any, ...]
    """What it depends on that may be another at the next call."""


class Offer:
    """What a norm puts on its output."""

    __slots__ = ("again", "caster", "met", "version", "wish")

    def __init__(self, caster: Caster, again: bool, wish: Wish | None, version: int) -> None:
        self.caster, self.again, self.wish, self.version = caster, again, wish, version
        self.met = False
        """Whether a layer has been given the tensor and wants it in 8 bits."""


class Caster:
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
        self._wishes: dict[bool, Wish] = {}
        self._last: dict[bool, Offer] = {}
        self._shared = False
        """Whether different layers come first in different calls: then nothing is cast for any."""
        self._met, self._used = False, not auto
        self._consumer: weakref.ref[Any] | None = None
        self._weight_version = 0
        """Of the consumer's weight, when ``_used`` was last decided."""
        self.declined = False
        """Whether our op could not take a call: from then on, whether it can is known before a layer is met."""

    def __reduce__(self) -> Any:
        return Caster, (self.width, self.eps, self.rounds_to_input, self.auto, self.traced)

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

    def wish(self, x: torch.Tensor, again: bool) -> Wish | None:
        """The cast to make of the result for x."""
        wish, last = self._wishes.get(again), self._last.get(again)
        if wish is None:
            return None
        if last is not None and last.wish is not None and not last.met:
            del self._wishes[again]
            return None
        layer = wish.layer()
        if layer is None or wish.conditions != self._conditions(layer, x):
            return None
        return wish

    def mark(self, y: torch.Tensor, again: bool, wish: Wish | None) -> None:
        """Let the layers behind know whose output it is."""
        offer = self._last[again] = Offer(self, again, wish, y._version)
        setattr(y, MARK, offer)

    def meet(
        self, offer: Offer, y: torch.Tensor, layer: Any, recipe: Recipe, number_format: str, transposed: bool
    ) -> None:
        """A layer, the first of those that are given y, wants it in 8 bits."""
        self._met = True
        if self.auto and (self._consumer is None or self._consumer() is None):
            self._consumer, self._weight_version = weakref.ref(layer), _version_of(layer.weight)
        wish, unchanged = offer.wish, y._version == offer.version
        wanted = (recipe, number_format, transposed)
        granted = wish is not None and unchanged and wish.layer() is layer and wish[1:4] == wanted
        if granted or self._shared:
            return
        if recipe.input != "tensor" or not unchanged:
            # Other scales are not the norm's to make, and what was changed in place is not the norm's any more.
            self._wishes.pop(offer.again, None)
            return
        known = wish or self._wishes.get(offer.again)
        other = None if known is None else known.layer()
        if other is not None and other is not layer:
            self._shared = True
            self._wishes.clear()
            y.__dict__.pop("_fp8_cast", None)  # by the other's history
            return
        self._wishes[offer.again] = Wish(weakref.ref(layer), *wanted, self._conditions(layer, y))

    def forget(self) -> None:
        """What a layer wished for that the norm cannot give."""
        self._wishes.clear()

    def layer(self) -> Any:
        """The layer that it casts for, or None."""
        wish = self._wishes.get(False) or self._wishes.get(True)
        return None if wish is None else wish.layer()

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


def meet(x: torch.Tensor, layer: Any, recipe: Recipe, number_format: str, transposed: bool) -> None:
    """A layer is about to take x in 8 bits: where that is a norm's output, the norm learns of it."""
    offer: Offer | None = getattr(x, MARK, None)
    if offer is not None and not offer.met:
        offer.met = True
        offer.caster.meet(offer, x, layer, recipe, number_format, transposed)
