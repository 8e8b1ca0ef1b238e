"""KernelPyTorch as an out-of-tree ExecuTorch backend: lower a model to a ``.pte``, and run it.

Importing this package registers the delegate with ``executorch.runtime`` in this process.
"""

from kernel_pytorch.lowering.language_model import CachedLanguageModel
from kernel_pytorch.lowering.partitioner import KernelPartitioner, PartitionerOptions, Refusal
from kernel_pytorch.lowering.probes import Probe, probe
from kernel_pytorch.lowering.program import Difference, LoweredProgram, lower
from kernel_pytorch.lowering.recipes import RECIPES, QuantizationRecipe
from kernel_pytorch.lowering.report import Delegate, Report
from kernel_pytorch.lowering.runtime import LoadedProgram, load, registered
from kernel_pytorch.lowering.target import Lowering, lowering_of

__all__ = [
    "CachedLanguageModel",
    "Delegate",
    "Difference",
    "KernelPartitioner",
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
