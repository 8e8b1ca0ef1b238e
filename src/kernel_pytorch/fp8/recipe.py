"""FP8 training recipes: format, scaling granularity and accumulation of each operand of a linear layer's GEMMs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import msgspec

from kernel_pytorch.ops.fp8_cast.definition import GRANULARITIES
from kernel_pytorch.ops.fp8_matmul.definition import PAIRS

__all__ = ["PRODUCTS", "RECIPES", "Recipe", "recipe_named", "recipe_of"]

PRODUCTS = ("y", "dx", "dW")
"""The three GEMMs of a linear layer: output, input gradient, weight gradient."""
Granularity = Literal["tensor", "row", "block", "square"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a linear layer is trained in FP8. Frozen: compared and hashed by its fields.

    The layer is y = x W^T + c with x (M, K), W (N, K) and c (N); dy (M, N) is the gradient of y. Let Q(t) be a matrix
    t quantized to FP8 and dequantized:

        Q(t) = decode(encode(t * s)) / s      s = the largest scale with which the group of an element fits the format

    ``fp8_cast`` has the details. x and W are quantized to e4m3 and dy to ``gradient_format``. ``input``, ``weight``
    and ``gradient`` are the scaling granularities: one scale per tensor (``tensor``), per row (``row``), per 1x128
    block (``block``) or per 128x128 block (``square``). ``power_of_two`` rounds each s down to a power of two; the
    scale of a tensorwise weight always is one. Then

        y  = Q(x) Q(W)^T + c                  reduces over K
        dx = Q(dy) Q(W^T)^T                   reduces over N
        dW = Q(dy^T) Q(x^T)^T                 reduces over M
        dc = the sum of dy over M, in float32

    where Q of a transposed matrix has groups along ITS rows. A GEMM named in ``high_precision`` takes the matrices
    unquantized. y uses ``fast`` accumulation, inside the matrix units, or with block scaling ``promoted``
    accumulation, where the partial sums of 128 products are added in float32. dW always is ``promoted``: its terms
    often have one sign, where ``fast`` loses most. ``dx_sums`` sets the accumulation of dx; see ``fp8_matmul``.

    With ``delayed``, the scales of x and dy come from the amax of the last 16 steps with a factor 2 of headroom, so
    one pass over a tensor is enough. A tensor whose amax exceeds the delayed scale or is far below it is requantized
    with its own amax in the same step. Weights are scaled by their current amax.

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
    """The family; the device decides between OCP and fnuz (``hardware_abstraction.formats.for_device``)."""
    power_of_two: bool = False
    high_precision: tuple[str, ...] = ()
    """The GEMMs (of ``PRODUCTS``) that run in the layer's dtype."""
    delayed: bool = False
    """Whether the scales of x and dy come from earlier steps."""
    dx_sums: Literal["fast", "promoted"] = "promoted"
    """Accumulation of dx. ``fast`` takes fewer instructions and loses accuracy in long reductions."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name={self.name!r}: use a string")
        for operand in ("input", "weight", "gradient"):
            granularity = getattr(self, operand)
            if granularity not in GRANULARITIES:
                raise ValueError(f"{operand}={granularity!r}: use one of {', '.join(GRANULARITIES)}")
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
        # dW needs no check: granularities that both fit the weight's also fit each other.
        for product, pair in (("y", (self.input, self.weight)), ("dx", (self.gradient, self.weight))):
            if pair not in PAIRS:
                operands = ("input", "weight") if product == "y" else ("gradient", "weight")
                given = ", ".join(f"{operand}={each!r}" for operand, each in zip(operands, pair, strict=True))
                raise ValueError(
                    f"{given}: no GEMM multiplies these granularities for {product}; use "
                    f"{', '.join(f'{first} and {second}' for first, second in PAIRS)}"
                )

    @property
    def low_precision(self) -> tuple[str, ...]:
        """The GEMMs (of ``PRODUCTS``) that run in FP8."""
        return tuple(product for product in PRODUCTS if product not in self.high_precision)

    @property
    def text(self) -> str:
        """All fields as JSON, for ``recipe_of``: compiled code guards on one string instead of nine fields."""
        return msgspec.json.encode(self).decode()

    def __str__(self) -> str:
        return self.name


@lru_cache
def recipe_of(text: str) -> Recipe:
    """Return the recipe with this ``Recipe.text``.

    Example:
        >>> recipe_of(RECIPES["rowwise"].text) == RECIPES["rowwise"]
        True
    """
    return msgspec.json.decode(text, type=Recipe)


# Gradients have a wide range, so with one scale per tensor they take e5m2, the format with the wider range.
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
    """Read-only mapping of recipes by name.

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
    """Return the recipe, or the one with this name; raise an error that lists the names if there is none.

    Example:
        >>> recipe_named("blockwise").power_of_two
        True
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r}: use a Recipe, or one of {', '.join(RECIPES)}")
    return RECIPES[recipe]
