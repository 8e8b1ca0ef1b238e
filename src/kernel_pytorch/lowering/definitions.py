"""Replace ops that the C++ runtime has no operator for by their definitions in PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram

from kernel_pytorch.hardware_abstraction.op import Op, registered_ops
from kernel_pytorch.lowering.rewrite import REWRITTEN

__all__ = ["with_definitions"]


def with_definitions(program: ExportedProgram) -> ExportedProgram:
    """The program with every registered op, ``kp.rope`` for one, written out unless the runtime has it."""
    targets = {node.target for node in program.graph.nodes}
    table: dict[Any, Callable[..., Any]] = {}
    for op in registered_ops():
        overload = getattr(torch.ops.kernel_pytorch, op.name).default
        if overload in targets and overload not in REWRITTEN and not op.exact:
            table[overload] = _definition(op)
    return program.run_decompositions(table) if table else program


def _definition(op: Op) -> Callable[..., Any]:
    def written_out(*values: Any) -> Any:
        arguments = values[:-1]  # the last one is the policy
        wide = [_float32(value) for value in arguments]
        outputs = op.reference(*wide)
        wanted = op.fake(*arguments)
        narrow = [output.to(like.dtype) for output, like in zip(outputs, wanted, strict=True)]
        return narrow[0] if len(narrow) == 1 else tuple(narrow)

    return written_out


def _float32(value: Any) -> Any:
    """16-bit tensors in float32, in which every kernel of an op computes."""
    half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value
