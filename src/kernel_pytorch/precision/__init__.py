"""Low-precision training: the 8-bit number formats, recipes, and the linear function on them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kernel_pytorch.precision.formats import (
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    FORMATS,
    Format,
    FormatPair,
    for_device,
    format_named,
)

if TYPE_CHECKING:
    from kernel_pytorch.precision.linear import COUNTS_SHAPE, STATE_SHAPE, fp8_linear
    from kernel_pytorch.precision.recipe import PRODUCTS, RECIPES, Recipe, recipe_named

__all__ = [
    "COUNTS_SHAPE",
    "E4M3FN",
    "E4M3FNUZ",
    "E5M2",
    "E5M2FNUZ",
    "FORMATS",
    "Format",
    "FormatPair",
    "PRODUCTS",
    "RECIPES",
    "Recipe",
    "STATE_SHAPE",
    "for_device",
    "format_named",
    "fp8_linear",
    "recipe_named",
]

# Imported when first used: they stand on the ops, and the ops on the formats.
_ABOVE_THE_OPS = {
    "COUNTS_SHAPE": "linear",
    "STATE_SHAPE": "linear",
    "fp8_linear": "linear",
    "PRODUCTS": "recipe",
    "RECIPES": "recipe",
    "Recipe": "recipe",
    "recipe_named": "recipe",
}


def __getattr__(name: str) -> object:
    if name in _ABOVE_THE_OPS:
        return getattr(importlib.import_module(f"{__name__}.{_ABOVE_THE_OPS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
