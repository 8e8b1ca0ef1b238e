"""Recipes: which numbers an 8-bit linear layer rounds, to which format, with which scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from kernel_pytorch.ops.fp8_matmul.definition import PAIRS

__all__ = ["RECIPES", "Recipe", "recipe_named"]

Granularity = Literal["tensor", "row", "block", "square"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to train a linear layer in 8 bits; a value, compared and hashed by what it says.

    A layer y = x W^T + c with x (M, K), W (N, K) and c (N), and the gradient dy (M, N) that reaches it. Let Q(t) be
    a matrix t rounded to an 8-bit format and scaled back:

        Q(t) = decode(encode(t * s)) / s      s = the largest scale that keeps the group of a number inside the format

    (``fp8_cast`` has the details), where x and W are rounded to e4m3 and dy to ``gradient_format``, with one scale
    for each group of ``input``, ``weight`` and ``gradient``: the tensor, a row, 128 numbers of a row (``block``), or
    128 x 128 numbers (``square``). ``power_of_two`` rounds each s down to a power of two. Then

        y  = Q(x) Q(W)^T + c                  sums over K
        dx = Q(dy) Q(W^T)^T                   sums over N
        dW = Q(dy^T) Q(x^T)^T                 sums over M; dy^T x with ``high_precision_weight_gradient``
        dc = the sum of dy over M, in float32

    where Q of a transposed matrix has groups along ITS rows. Sums are in float32.

    Example:
        >>> recipe = RECIPES["tensorwise"]
        >>> recipe.gradient_format, recipe.weight, recipe.high_precision_weight_gradient
        ('e5m2', 'tensor', False)
    """

    name: str
    input: Granularity
    weight: Granularity
    gradient: Granularity
    gradient_format: Literal["e4m3", "e5m2"]
    """The family; the device decides between the OCP format and fnuz (``precision.for_device``)."""
    power_of_two: bool = False
    high_precision_weight_gradient: bool = False
    """Whether dW is computed from dy and x as they are."""

    def __post_init__(self) -> None:
        if self.gradient_format not in ("e4m3", "e5m2"):
            raise ValueError(f"gradient_format={self.gradient_format!r}: use 'e4m3' or 'e5m2'")
        # Where these two fit the weight, they fit each other.
        for product, pair in (("y", (self.input, self.weight)), ("dx", (self.gradient, self.weight))):
            if pair not in PAIRS:
                raise ValueError(
                    f"recipe {self.name!r}: {product} multiplies scales of {pair[0]} and {pair[1]}; use "
                    f"{', '.join(f'{first} and {second}' for first, second in PAIRS)}"
                )

    def __str__(self) -> str:
        return self.name


def _recipes() -> dict[str, Recipe]:
    known = [
        Recipe(
            name=f"{kind}wise{suffix}",
            input=kind,
            weight=kind,
            gradient=kind,
            gradient_format=gradients,
            high_precision_weight_gradient=bool(suffix),
        )
        for kind, gradients in _WHOLE
        for suffix in ("", "-high-wgrad")
    ]
    known.append(
        Recipe(
            name="blockwise",
            input="block",
            weight="square",
            gradient="block",
            gradient_format="e4m3",
            power_of_two=True,
        )
    )
    return {recipe.name: recipe for recipe in known}


# One scale for a whole tensor must span a wide range, which gradients have: they take the format with more of it.
_WHOLE: tuple[tuple[Granularity, Literal["e4m3", "e5m2"]], ...] = (("tensor", "e5m2"), ("row", "e4m3"))
RECIPES: Mapping[str, Recipe] = MappingProxyType(_recipes())


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
