"""Decompose a program once for all partitioners.

``to_edge_transform_and_lower`` decomposes a program twice for each partitioner that checks nodes, which takes most of
the time of lowering. ``decomposed`` first asks all partitioners which nodes must not be decomposed, hides these
behind operators without a decomposition, and decomposes the rest in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from executorch.exir.backend.partitioner import Partitioner, PartitionResult
from executorch.exir.tracer import _default_decomposition_table
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from kernel_pytorch._compat.structures import OpOverload

__all__ = ["decomposed"]

_HIDDEN = "kernel_pytorch_hidden"
_LIBRARY = torch.library.Library(_HIDDEN, "DEF")


class _Asked(Partitioner):  # type: ignore[misc]
    """Wraps a partitioner whose program has already been decomposed."""

    def __init__(self, partitioner: Partitioner, whole: set[OpOverload]) -> None:
        super().__init__()
        self._partitioner, self._whole = partitioner, whole
        self._partitioned = False

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[OpOverload], Callable[[Node], bool] | None]:
        # ExecuTorch asks again afterwards, to check that these nodes were taken.
        return list(self._whole if self._partitioned else self._whole | _operators(ep)), None

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        self._partitioned = True
        return self._partitioner.partition(exported_program)


@cache
def _hidden(op: OpOverload) -> OpOverload:
    """Return the same operator under a name that is in no decomposition table."""
    schema = str(op._schema).partition("::")[2]
    name, _, overload = schema.partition("(")[0].partition(".")
    _LIBRARY.define(schema)
    _LIBRARY.impl(f"{name}.{overload}" if overload else name, op, "CompositeExplicitAutograd")
    return getattr(getattr(getattr(torch.ops, _HIDDEN), name), overload or "default")  # type: ignore[no-any-return]


def _can_hide(op: OpOverload) -> bool:
    """Return False for operators that mutate or alias an argument: functionalization needs their own names."""
    returns_views = any(value.alias_info is not None for value in op._schema.returns)
    return not op._schema.is_mutable and (not returns_views or op.namespace == "torchao")


def decomposed(
    program: ExportedProgram, partitioners: Sequence[Partitioner]
) -> tuple[ExportedProgram, list[Partitioner]]:
    """Return the program, decomposed except for the partitioners' nodes, and partitioners that keep no more nodes."""
    for partitioner in partitioners:
        program = partitioner.transform_for_pre_decomposition(program)
    if any(_is_unfinished(node) for module in _graphs(program) for node in module.graph.nodes):
        program = program.run_decompositions({})
    wanted = [partitioner.ops_to_not_decompose(program) for partitioner in partitioners]
    # Ask all partitioners before hiding any node: a check may look at the surrounding operators.
    whole = [
        node
        for module in _graphs(program)
        for node in module.graph.nodes
        if node.op == "call_function"
        and any(node.target in ops and (check is None or check(node)) for ops, check in wanted)
        and _can_hide(node.target)
    ]
    originals: dict[OpOverload, OpOverload] = {}
    for node in whole:
        original: Any = node.target
        originals[_hidden(original)] = original
        node.target = _hidden(original)
    program = program.run_decompositions(_default_decomposition_table())
    for module in _graphs(program):
        for node in module.graph.nodes:
            node.target = originals.get(node.target, node.target)
        module.recompile()
    return program, [_Asked(partitioner, set(originals.values())) for partitioner in partitioners]


def _graphs(program: ExportedProgram) -> list[GraphModule]:
    """Return the program's graph and those of its branches and loops."""
    return [module for module in program.graph_module.modules() if isinstance(module, GraphModule)]


def _operators(program: ExportedProgram) -> set[OpOverload]:
    targets = {node.target for module in _graphs(program) for node in module.graph.nodes}
    return {target for target in targets if isinstance(target, OpOverload)}


def _is_unfinished(node: Node) -> bool:
    """Return whether a node is in place or reads a tensor subclass, which checks do not recognize as a constant."""
    if "access_subclass_inner_tensor" in str(node.target):
        return True
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable
