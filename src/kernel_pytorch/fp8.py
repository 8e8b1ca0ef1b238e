"""FP8 training: convert a model, see what became of it, turn it back; the recipes and the formats.

``kernel-pytorch parity`` compares training in bf16 and in 8 bits.
"""

from __future__ import annotations

from kernel_pytorch.precision.convert import LayerReport, Report, convert, report, revert
from kernel_pytorch.precision.formats import Format
from kernel_pytorch.precision.gathering import gather
from kernel_pytorch.precision.linear import fp8_linear as linear
from kernel_pytorch.precision.monitor import Losses
from kernel_pytorch.precision.ranks import synchronize
from kernel_pytorch.precision.recipe import RECIPES, Recipe

__all__ = [
    "RECIPES",
    "Format",
    "LayerReport",
    "Losses",
    "Recipe",
    "Report",
    "convert",
    "gather",
    "linear",
    "report",
    "revert",
    "synchronize",
]
