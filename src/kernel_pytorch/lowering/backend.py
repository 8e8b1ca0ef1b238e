"""The ahead-of-time half of the ExecuTorch backend: a delegated graph becomes a payload."""

from __future__ import annotations

import torch
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram

from kernel_pytorch.lowering.constants import Constants
from kernel_pytorch.lowering.emitter import Emitter
from kernel_pytorch.lowering.payload import Payload
from kernel_pytorch.lowering.rules import emit_node

__all__ = ["KernelPyTorchBackend", "build_payload"]


def build_payload(program: ExportedProgram) -> Payload:
    """The payload of a graph whose every node has a rule."""
    constants = Constants(program)
    emitter = Emitter(constants, dict(program.range_constraints))
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
        return PreprocessResult(processed_bytes=build_payload(edge_program).to_bytes())
