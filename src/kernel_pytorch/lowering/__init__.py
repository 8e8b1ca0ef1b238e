"""KernelPyTorch as an out-of-tree ExecuTorch backend: lower a model to a ``.pte``, and run it.

Names are imported on first use, because importing ExecuTorch takes seconds and running a payload directly does not
need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kernel_pytorch.lowering.quiet import quiet_imports

if TYPE_CHECKING:
    from kernel_pytorch.lowering.checkpoint import TextProgram, lower_checkpoint
    from kernel_pytorch.lowering.difference import Difference
    from kernel_pytorch.lowering.encoder_decoder import decoded, lower_encoder_decoder
    from kernel_pytorch.lowering.entry import lower
    from kernel_pytorch.lowering.inlining import PackagedCall
    from kernel_pytorch.lowering.language_model import CachedLanguageModel
    from kernel_pytorch.lowering.package import LoadedPackage, PackagedProgram, PackageReport
    from kernel_pytorch.lowering.partitioner import KernelPartitioner, PartitionerOptions, Refusal
    from kernel_pytorch.lowering.probes import Probe, probe
    from kernel_pytorch.lowering.program import LoweredProgram
    from kernel_pytorch.lowering.quantizer import KernelQuantizer
    from kernel_pytorch.lowering.recipes import RECIPES, QuantizationRecipe
    from kernel_pytorch.lowering.report import Delegate, Report
    from kernel_pytorch.lowering.runtime import LoadedProgram, load, registered
    from kernel_pytorch.lowering.sampling import Sampling
    from kernel_pytorch.lowering.target import Lowering, lowering_of
    from kernel_pytorch.lowering.text_generator import Conversation, Generation, TextGenerator

_MODULES = {
    "checkpoint": ("TextProgram", "lower_checkpoint"),
    "difference": ("Difference",),
    "encoder_decoder": ("decoded", "lower_encoder_decoder"),
    "entry": ("lower",),
    "inlining": ("PackagedCall",),
    "language_model": ("CachedLanguageModel",),
    "package": ("LoadedPackage", "PackageReport", "PackagedProgram"),
    "partitioner": ("KernelPartitioner", "PartitionerOptions", "Refusal"),
    "probes": ("Probe", "probe"),
    "program": ("LoweredProgram",),
    "quantizer": ("KernelQuantizer",),
    "recipes": ("RECIPES", "QuantizationRecipe"),
    "report": ("Delegate", "Report"),
    "runtime": ("LoadedProgram", "load", "registered"),
    "sampling": ("Sampling",),
    "target": ("Lowering", "lowering_of"),
    "text_generator": ("Conversation", "Generation", "TextGenerator"),
}
_NEEDED = ("executorch", "torchao", "transformers", "tokenizers")
_INSTALL = "pip install 'kernel-pytorch[lowering]'"
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return imported(_HOME[name], name)


def imported(module: str, name: str) -> object:
    """Return a name of a module of this package; raise ImportError with what to install if a library is missing.

    Example:
        >>> imported("sampling", "Sampling").__name__
        'Sampling'
    """
    try:
        with quiet_imports():  # torchao names each extension that does not fit this machine
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _NEEDED:
            raise
        raise ImportError(f"{name} needs {missing}, which is not installed: {_INSTALL}") from error


__all__ = [
    "CachedLanguageModel",
    "Conversation",
    "Delegate",
    "Difference",
    "Generation",
    "KernelPartitioner",
    "KernelQuantizer",
    "LoadedPackage",
    "LoadedProgram",
    "LoweredProgram",
    "Lowering",
    "PackageReport",
    "PackagedCall",
    "PackagedProgram",
    "PartitionerOptions",
    "Probe",
    "QuantizationRecipe",
    "RECIPES",
    "Refusal",
    "Report",
    "Sampling",
    "TextGenerator",
    "TextProgram",
    "decoded",
    "load",
    "lower",
    "lower_checkpoint",
    "lower_encoder_decoder",
    "lowering_of",
    "probe",
    "registered",
]
