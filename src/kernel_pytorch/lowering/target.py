"""The ``Lowering`` record of a backend, which ``kp.lower``, the command line, the probe and the pages read.

``CPU`` is our own. A third party's ``Backend`` refers to its record by ``lowering="package.module:NAME"``.
"""

from __future__ import annotations

import importlib
import mmap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from executorch.exir.backend.partitioner import Partitioner
from torch.export import ExportedProgram
from torch.fx import Node

from kernel_pytorch.hardware_abstraction.registry import backend, backends
from kernel_pytorch.lowering.backend import KernelPyTorchBackend
from kernel_pytorch.lowering.build import SOURCES, Runtime, build
from kernel_pytorch.lowering.partitioner import KernelPartitioner, PartitionerOptions
from kernel_pytorch.lowering.probes import PROBES, Probe
from kernel_pytorch.lowering.quiet import quiet_imports
from kernel_pytorch.lowering.recipes import RECIPES, QuantizationRecipe, quantized

__all__ = ["CPU", "Lowering", "lowering_from", "lowering_of", "register_delegates"]

Quantize = Callable[
    [QuantizationRecipe, torch.nn.Module, Mapping[str, tuple[Any, ...]], Mapping[str, Any]],
    tuple[dict[str, ExportedProgram], dict[str, torch.nn.Module]],
]


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """A backend's partitioners, recipes, C++ runtime and probes.

    Example:
        >>> lowering_of("cpu").delegate
        'KernelPyTorchBackend'
    """

    delegate: str
    """The delegate's name in a ``.pte``; the C++ library registers itself under it."""
    options: type
    """The partitioner's options: a frozen dataclass, each field with a docstring under it."""
    partitioners: Callable[[Any], tuple[Partitioner, ...]]
    """Return the partitioners for the options, the backend's own first. The report shows its ``refusals``, if any."""
    recipes: Mapping[str, QuantizationRecipe]
    """Quantization recipes by name; empty if the backend has none."""
    quantize: Quantize
    """Return the quantized model for (recipe, model, inputs, dynamic shapes): exported, and as a module that runs in
    eager mode. Inputs, shapes and both results are mappings from method names."""
    register: Callable[[], object]
    """Register the delegate with ExecuTorch's runtime in this process."""
    sources: Path
    """The folder with the ``CMakeLists.txt`` of the runtime, which builds against the ExecuTorch wheel."""
    native_name: str
    """Name in the CMake project: ``libNAME_backend``, ``NAME_runner``, ``NAME::backend``."""
    probes: tuple[Probe, ...]
    """A small model per operator; lowering and running them gives the table of operators."""
    alternatives: Mapping[str, Any] = field(default_factory=dict)
    """Other options by their name in the report, which ``measure=True`` compares with the default options."""
    probe_options: Any = None
    """Options for probing; None for the default options."""
    bundled: str = "Not part of ExecuTorch's pre-built libraries, on any platform: build it from source."
    """Sentence for the pages: whether applications can get the runtime without building it."""

    def checked(self, options: Any) -> Any:
        """Return the options, or the default options for None; raise an error for another type."""
        if options is None:
            return self.options()
        if not isinstance(options, self.options):
            raise TypeError(f"options={options!r}: {self.delegate} takes a {self.options.__name__}")
        return options

    def build(self, tell: Callable[[str], None] | None = None) -> Runtime:
        """Return the C++ runtime; build it if it is not cached. ``tell`` is called with a line for each step."""
        return build(sources=self.sources, name=self.native_name, tell=tell or (lambda text: None))


def _register() -> object:
    from kernel_pytorch.lowering.runtime import registered

    return registered()


def xnnpack_partitioner() -> Partitioner:
    """Return XNNPACK's partitioner without the nodes that its delegate refuses later."""
    from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
    from executorch.backends.xnnpack.partition.config.node_configs import MaxDimConfig
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    class KeptDimension(MaxDimConfig):  # type: ignore[misc]
        """``max.dim``: the delegate supports only dimensions 2 and 3 with keepdim, the partitioner any (1.5.1)."""

        def check_constraints(self, node: Node, ep: ExportedProgram) -> bool:
            return len(node.args) == 3 and node.args[1] in (2, 3) and super().check_constraints(node, ep)

    return XnnpackPartitioner([KeptDimension if own is MaxDimConfig else own for own in ALL_PARTITIONER_CONFIGS])


def _partitioners(options: PartitionerOptions) -> tuple[Partitioner, ...]:
    xnnpack = xnnpack_partitioner()
    return KernelPartitioner(options, beside=(xnnpack,)), xnnpack


CPU = Lowering(
    delegate=KernelPyTorchBackend.__name__,
    options=PartitionerOptions,
    partitioners=_partitioners,
    recipes=RECIPES,
    quantize=quantized,
    register=_register,
    sources=SOURCES,
    native_name="kernel_pytorch",
    probes=PROBES,
    alternatives={
        "attention, norms and softmax in our delegate": PartitionerOptions(linears=False, activations=False),
        "XNNPACK alone": PartitionerOptions(
            attention=False, linears=False, norms=False, softmax=False, activations=False, glue=False
        ),
    },
    probe_options=PartitionerOptions(glue_alone=True),
)


def lowering_from(path: str) -> Lowering:
    """Return the record that ``"package.module:NAME"`` refers to."""
    module, _, attribute = path.partition(":")
    with quiet_imports():  # a third party's module may be the first to import ExecuTorch and torchao
        found = getattr(importlib.import_module(module), attribute, None)
    if not isinstance(found, Lowering):
        raise TypeError(f"lowering={path!r} names a {type(found).__name__}, not a Lowering")
    return found


def lowering_of(name: str) -> Lowering:
    """Return a backend's ``Lowering``; raise an error that lists the backends that have one if it has none."""
    path = backend(name).lowering
    if path is None:
        able = ", ".join(record.name for record in backends() if record.lowering is not None)
        package = "; runtime='aoti' makes a .pt2 package for it" if name in ("nvidia", "amd", "intel") else ""
        raise ValueError(
            f"backend={name!r}: no .pte path for this target yet; programs are lowered for {able}{package}"
        )
    return lowering_from(path)


def register_delegates(program: bytes | mmap.mmap) -> None:
    """Register the third-party delegates that a program uses."""
    for record in backends():
        if record.lowering is None or record.name == "cpu":
            continue
        try:
            target = lowering_from(record.lowering)
        except Exception as error:  # a plug-in may raise anything; programs that do not use it still run
            warnings.warn(f"backend {record.name!r} cannot be used: {error}", stacklevel=2)
            continue
        if program.find(target.delegate.encode()) >= 0:
            target.register()
