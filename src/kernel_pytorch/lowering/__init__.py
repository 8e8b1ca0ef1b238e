"""KernelPyTorch as an out-of-tree ExecuTorch backend: lower a model to a ``.pte``, and run it.

Names are imported when they are first used: ExecuTorch takes seconds, and what runs payloads without it needs none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel_pytorch.lowering.language_model import CachedLanguageModel
    from kernel_pytorch.lowering.partitioner import KernelPartitioner, PartitionerOptions, Refusal
    from kernel_pytorch.lowering.probes import Probe, probe
    from kernel_pytorch.lowering.program import Difference, LoweredProgram, lower
    from kernel_pytorch.lowering.quantizer import KernelQuantizer
    from kernel_pytorch.lowering.recipes import RECIPES, QuantizationRecipe
    from kernel_pytorch.lowering.report import Delegate, Report
    from kernel_pytorch.lowering.runtime import LoadedProgram, load, registered
    from kernel_pytorch.lowering.target import Lowering, lowering_of

_MODULES = {
    "language_model": ("CachedLanguageModel",),
    "partitioner": ("KernelPartitioner", "PartitionerOptions", "Refusal"),
    "probes": ("Probe", "probe"),
    "program": ("Difference", "LoweredProgram", "lower"),
    "quantizer": ("KernelQuantizer",),
    "recipes": ("RECIPES", "QuantizationRecipe"),
    "report": ("Delegate", "Report"),
    "runtime": ("LoadedProgram", "load", "registered"),
    "target": ("Lowering", "lowering_of"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


__all__ = [
    "CachedLanguageModel",
    "Delegate",
    "Difference",
    "KernelPartitioner",
    "KernelQuantizer",
    "LoadedProgram",
    "LoweredProgram",
    "Lowering",
    "PartitionerOptions",
    "Probe",
    "QuantizationRecipe",
    "RECIPES",
    "Refusal",
    "Report",
    "load",
    "lower",
    "lowering_of",
    "probe",
    "registered",
]
