"""Replace ops that the C++ runtime has no operator for by their definitions in PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram

from kernel_pytorch.hardware_abstraction.op import Op, registered_ops
from kernel_pytorch.lowering.inlining import definition_of
from kernel_pytorch.lowering.rewrite import REWRITTEN

__all__ = ["with_definitions"]


def with_definitions(program: ExportedProgram) -> ExportedProgram:
    """Return the program with each registered op that the runtime lacks, such as ``kp.rope``, decomposed."""
    targets = {node.target for node in program.graph.nodes}
    table: dict[Any, Callable[..., Any]] = {}
    for op in registered_ops():
        overload = getattr(torch.ops.kernel_pytorch, op.name).default
        if overload in targets and overload not in REWRITTEN and not op.exact:
            table[overload] = _definition(op)
    return program.run_decompositions(table) if table else program


def _definition(op: Op) -> Callable[..., Any]:
    definition = definition_of(op)

    def written_out(*values: Any) -> Any:
        outputs = definition(*values[:-1])  # the last one is the policy
        return outputs[0] if len(outputs) == 1 else outputs

    return written_out
