"""Low-precision training: the 8-bit number formats. Recipes, layers and conversion build on them."""

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

__all__ = [
    "E4M3FN",
    "E4M3FNUZ",
    "E5M2",
    "E5M2FNUZ",
    "FORMATS",
    "Format",
    "FormatPair",
    "for_device",
    "format_named",
]
