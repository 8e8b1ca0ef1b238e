"""Ahead-of-time part of the ExecuTorch backend: convert a delegated graph to a payload."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram

from kernel_pytorch.lowering.constants import Constants
from kernel_pytorch.lowering.emitter import Emitter, Outside
from kernel_pytorch.lowering.payload import ALIGNMENT, Payload
from kernel_pytorch.lowering.rules import emit_node
from kernel_pytorch.lowering.spool import LEAST_BYTES

__all__ = ["KernelPyTorchBackend", "build_payload", "lowest_sizes"]

_LOWEST = "lowest_sizes"
_CACHES = "kernel_pytorch_caches"
"""Named data of programs with caches: the runtime tells programs apart by their named data, so there must be some."""


_LEAST_SHARED = 4096
"""Constants below this size, in bytes, are stored in each method instead of once."""


@dataclass(frozen=True)
class Bounds:
    """Minimum and maximum size of a dynamic dimension."""

    lower: int
    upper: Any


def lowest_sizes(program: ExportedProgram) -> CompileSpec:
    """Return a compile spec with the lower bounds of an exported program's dynamic dimensions.

    ExecuTorch raises bounds of 0 and 1 to 2 while it decomposes a program, though torch.export admits size 1.
    """
    lowest = {str(symbol): int(bounds.lower) for symbol, bounds in program.range_constraints.items()}
    return CompileSpec(_LOWEST, json.dumps(lowest).encode())


def build_payload(
    program: ExportedProgram, outside: Outside | None = None, compile_specs: Sequence[CompileSpec] = ()
) -> Payload:
    """Return the payload of a graph in which every node has a rule; large constants go to ``outside`` if given."""
    constants = Constants(program)
    ranges: dict[Any, Any] = dict(program.range_constraints)
    for spec in compile_specs:
        if spec.key == _LOWEST:
            lowest = json.loads(bytes(spec.value))
            for symbol, bounds in program.range_constraints.items():
                if lowest.get(str(symbol), 2) < 2 and bounds.lower == 2:
                    ranges[symbol] = Bounds(1, bounds.upper)
    emitter = Emitter(constants, ranges, outside)
    outputs = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if not constants.is_constant_input(node):
                emitter.add_input(node)
        elif node.op == "output":
            outputs = [(source.name, emitter.view(source)) for source in node.args[0]]
        elif isinstance(node.meta.get("val"), (int, torch.SymInt)):
            pass  # a size: its users read the symbolic expression that torch has for it
        elif constants.of(node) is None:
            emit_node(emitter, node)
    return emitter.finish(outputs)


class KernelPyTorchBackend(BackendDetails):  # type: ignore[misc]
    """The delegate's name in the ``.pte``; the C++ library registers itself under the same name."""

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        return _result(edge_program, LEAST_BYTES, compile_specs)

    @classmethod
    def preprocess_multimethod(
        cls, edge_programs: dict[str, list[ExportedProgram]], compile_specs: dict[str, list[list[CompileSpec]]]
    ) -> dict[str, list[PreprocessResult]]:
        """Build the payload of each method; constants shared by several methods are stored once."""
        least = _LEAST_SHARED if len(edge_programs) > 1 else LEAST_BYTES
        return {
            method: [
                _result(program, least, specs)
                for program, specs in zip(programs, compile_specs[method], strict=True)
            ]
            for method, programs in edge_programs.items()
        }


def _result(program: ExportedProgram, least: int, compile_specs: Sequence[CompileSpec]) -> PreprocessResult:
    outside = Outside(least)
    payload = build_payload(program, outside, compile_specs)
    store = NamedDataStore()
    for name, data in outside.data.items():
        store.add_named_data(name, data, alignment=ALIGNMENT)
    if payload.caches:
        store.add_named_data(_CACHES, _CACHES.encode())
    return PreprocessResult(
        processed_bytes=payload.to_bytes(), data_store_output=store.get_named_data_store_output()
    )
