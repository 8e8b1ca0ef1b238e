"""Recipes: which numbers an 8-bit linear layer rounds, to which format, with which scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import msgspec

from kernel_pytorch.ops.fp8_matmul.definition import PAIRS

__all__ = ["PRODUCTS", "RECIPES", "Recipe", "recipe_named", "recipe_of"]

PRODUCTS = ("y", "dx", "dW")
"""The three matrix products of a linear layer and its gradients."""
Granularity = Literal["tensor", "row", "block", "square"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to train a linear layer in 8 bits; a value, compared and hashed by what it says.

    A layer y = x W^T + c with x (M, K), W (N, K) and c (N), and the gradient dy (M, N) that reaches it. Let Q(t) be
    a matrix t rounded to an 8-bit format and scaled back:

        Q(t) = decode(encode(t * s)) / s      s = the largest scale that keeps the group of a number inside the format

    (``fp8_cast`` has the details), where x and W are rounded to e4m3 and dy to ``gradient_format``, with one scale
    for each group of ``input``, ``weight`` and ``gradient``: the tensor, a row, 128 numbers of a row (``block``), or
    128 x 128 numbers (``square``). ``power_of_two`` rounds each s down to a power of two; the one scale of a whole
    weight is one in any case. Then

        y  = Q(x) Q(W)^T + c                  sums over K
        dx = Q(dy) Q(W^T)^T                   sums over N
        dW = Q(dy^T) Q(x^T)^T                 sums over M
        dc = the sum of dy over M, in float32

    where Q of a transposed matrix has groups along ITS rows. A product named in ``high_precision`` is that of the
    matrices as they are. y is added up by the matrix units alone (``fast``). With scales of blocks it is as dW always
    is: sums of 128 products are added up in float32 (``promoted``). dx is added up by ``dx_sums``; see
    ``fp8_matmul``. GemmSpec of one sign, as tokens that agree have in dW, would lose most by ``fast``.

    With ``delayed``, the scales of x and dy come from the largest magnitudes of the last 16 steps with a factor 2 of
    headroom, so that one pass over a tensor is enough; a tensor whose amax exceeds that scale or is far below it is
    cast again with a scale of its own in the same step. Weights have scales of their own step.

    Example:
        >>> recipe = RECIPES["tensorwise"]
        >>> recipe.gradient_format, recipe.weight, recipe.high_precision
        ('e5m2', 'tensor', ())
    """

    name: str
    input: Granularity
    weight: Granularity
    gradient: Granularity
    gradient_format: Literal["e4m3", "e5m2"]
    """The family; the device decides between the OCP format and fnuz (``precision.for_device``)."""
    power_of_two: bool = False
    high_precision: tuple[str, ...] = ()
    """Those of ``PRODUCTS`` that are computed in the tensors' own precision."""
    delayed: bool = False
    """Whether the scales of x and dy come from earlier steps."""
    dx_sums: Literal["fast", "promoted"] = "promoted"
    """``fast`` takes fewer instructions, and loses bits of long sums."""

    def __post_init__(self) -> None:
        if self.gradient_format not in ("e4m3", "e5m2"):
            raise ValueError(f"gradient_format={self.gradient_format!r}: use 'e4m3' or 'e5m2'")
        if self.dx_sums not in ("fast", "promoted"):
            raise ValueError(f"dx_sums={self.dx_sums!r}: use 'fast' or 'promoted'")
        for name, flag in (("power_of_two", self.power_of_two), ("delayed", self.delayed)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}={flag!r}: use True or False")
        if not isinstance(self.high_precision, tuple):
            raise TypeError(f"high_precision={self.high_precision!r}: use a tuple")
        for product in self.high_precision:
            if product not in PRODUCTS:
                raise ValueError(f"high_precision={self.high_precision!r}: use some of {', '.join(PRODUCTS)}")
        if self.delayed and (self.input, self.gradient) != ("tensor", "tensor"):
            raise ValueError(
                f"recipe {self.name!r}: delayed scaling has one scale for a tensor; use input='tensor' and "
                f"gradient='tensor', or delayed=False"
            )
        # Where these two fit the weight, they fit each other.
        for product, pair in (("y", (self.input, self.weight)), ("dx", (self.gradient, self.weight))):
            if pair not in PAIRS:
                raise ValueError(
                    f"recipe {self.name!r}: {product} multiplies scales of {pair[0]} and {pair[1]}; use "
                    f"{', '.join(f'{first} and {second}' for first, second in PAIRS)}"
                )

    @property
    def low_precision(self) -> tuple[str, ...]:
        """Those of ``PRODUCTS`` that are computed in 8 bits."""
        return tuple(product for product in PRODUCTS if product not in self.high_precision)

    @property
    def text(self) -> str:
        """All that it says, for ``recipe_of``: a compiled step compares one text at less cost than nine fields."""
        return msgspec.json.encode(self).decode()

    def __str__(self) -> str:
        return self.name


@lru_cache
def recipe_of(text: str) -> Recipe:
    """The recipe with this text.

    Example:
        >>> recipe_of(RECIPES["rowwise"].text) == RECIPES["rowwise"]
        True
    """
    return msgspec.json.decode(text, type=Recipe)


# One scale for a whole tensor must span a wide range, which gradients have: they take the format with more of it.
_TENSOR: dict[str, Any] = {
    "input": "tensor", "weight": "tensor", "gradient": "tensor", "gradient_format": "e5m2", "dx_sums": "fast"
}  # fmt: skip
_ROW: dict[str, Any] = {
    "input": "row", "weight": "row", "gradient": "row", "gradient_format": "e4m3", "dx_sums": "fast"
}  # fmt: skip
_BLOCK: dict[str, Any] = {"input": "block", "weight": "square", "gradient": "block", "gradient_format": "e4m3"}
_KNOWN = (
    Recipe(name="tensorwise", **_TENSOR),
    Recipe(name="tensorwise-high-wgrad", **_TENSOR, high_precision=("dW",)),
    Recipe(name="delayed", **_TENSOR, delayed=True),
    Recipe(name="delayed-e4m3", **{**_TENSOR, "gradient_format": "e4m3"}, delayed=True),
    Recipe(name="delayed-high-wgrad", **_TENSOR, delayed=True, high_precision=("dW",)),
    Recipe(name="rowwise", **_ROW),
    Recipe(name="rowwise-high-wgrad", **_ROW, high_precision=("dW",)),
    Recipe(name="blockwise", **_BLOCK, power_of_two=True),
)


class Recipes(Mapping[str, Recipe]):
    """Recipes by name; nothing can be added.

    Example:
        >>> sorted(RECIPES)[:3]
        ['blockwise', 'delayed', 'delayed-e4m3']
    """

    def __init__(self, known: tuple[Recipe, ...]) -> None:
        self._known = {recipe.name: recipe for recipe in known}

    def __getitem__(self, name: str) -> Recipe:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


RECIPES = Recipes(_KNOWN)


def recipe_named(recipe: Any) -> Recipe:
    """The recipe itself, or that of this name; any other name is an error that lists the known ones.

    Example:
        >>> recipe_named("blockwise").power_of_two
        True
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r}: use a Recipe, or one of {', '.join(RECIPES)}")
    return RECIPES[recipe]
