"""The ahead-of-time half of the ExecuTorch backend: a delegated graph becomes a payload."""

from __future__ import annotations

import torch
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram

from kernel_pytorch.lowering.constants import Constants
from kernel_pytorch.lowering.emitter import Emitter
from kernel_pytorch.lowering.payload import ALIGNMENT, Payload
from kernel_pytorch.lowering.rules import emit_node

__all__ = ["KernelPyTorchBackend", "build_payload"]


_CACHES = "kernel_pytorch_caches"
"""Named data of programs with caches: the runtime tells programs apart by their named data, so there must be some."""


def build_payload(program: ExportedProgram, shared: dict[str, bytes] | None = None) -> Payload:
    """The payload of a graph whose every node has a rule; large constants go to ``shared`` where it is given."""
    constants = Constants(program)
    emitter = Emitter(constants, dict(program.range_constraints), shared)
    outputs = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if not constants.is_constant_input(node):
                emitter.add_input(node)
        elif node.op == "output":
            outputs = [(source.name, emitter.view(source)) for source in node.args[0]]
        elif isinstance(node.meta.get("val"), (int, torch.SymInt)):
            pass  # a size: wherever it is used, it is the expression of symbols that torch knows
        elif constants.of(node) is None:
            emit_node(emitter, node)
    return emitter.finish(outputs)


class KernelPyTorchBackend(BackendDetails):  # type: ignore[misc]
    """Named in the ``.pte``; the C++ library registers itself under the same name."""

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        return _result(edge_program, None)

    @classmethod
    def preprocess_multimethod(
        cls, edge_programs: dict[str, list[ExportedProgram]], compile_specs: dict[str, list[list[CompileSpec]]]
    ) -> dict[str, list[PreprocessResult]]:
        """Constants that several methods use are in the program once."""
        several = len(edge_programs) > 1
        return {
            method: [_result(program, {} if several else None) for program in programs]
            for method, programs in edge_programs.items()
        }


def _result(program: ExportedProgram, shared: dict[str, bytes] | None) -> PreprocessResult:
    payload = build_payload(program, shared)
    store = NamedDataStore()
    for name, data in (shared or {}).items():
        store.add_named_data(name, data, alignment=ALIGNMENT)
    if payload.caches:
        store.add_named_data(_CACHES, _CACHES.encode())
    return PreprocessResult(
        processed_bytes=payload.to_bytes(), data_store_output=store.get_named_data_store_output()
    )
