"""FP8 training: convert a model, report what is in FP8, revert it; recipes and formats.

``kernel-pytorch parity`` compares training in bf16 and in FP8.
"""

from __future__ import annotations

from kernel_pytorch.fp8.autograd import fp8_linear as linear
from kernel_pytorch.fp8.checkpoint import load_state_dict, state_dict, synchronize
from kernel_pytorch.fp8.conversion import convert, revert
from kernel_pytorch.fp8.module import accumulate
from kernel_pytorch.fp8.monitor import CastStats
from kernel_pytorch.fp8.recipe import RECIPES, Recipe
from kernel_pytorch.fp8.summary import LayerGroup, LayerReport, Report, report
from kernel_pytorch.hardware_abstraction.formats import Format

__all__ = [
    "RECIPES",
    "CastStats",
    "Format",
    "LayerGroup",
    "LayerReport",
    "Recipe",
    "Report",
    "accumulate",
    "convert",
    "linear",
    "load_state_dict",
    "report",
    "revert",
    "state_dict",
    "synchronize",
]
