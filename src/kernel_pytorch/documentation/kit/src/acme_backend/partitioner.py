"""The partitioner: selects the nodes that Acme runs, with a reason for each node that it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import tag_constant_data
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from acme_backend.delegate import AcmeBackend, constant_of, operator
from kernel_pytorch.lowering import Refusal

LINEAR = torch.ops.aten.linear.default
RELU = torch.ops.aten.relu.default
DEQUANTIZE = torch.ops.quantized_decomposed.dequantize_per_channel.default


@dataclass(frozen=True)
class AcmeOptions:
    """Options of the partitioner."""

    linear: bool = True
    """Take linears with constant weights, in float32 or in int8 with one scale per output channel."""
    relu: bool = True
    """Take ReLU."""


@dataclass(eq=False)
class AcmePartitioner(Partitioner):
    """Partitioner for ``to_edge_transform_and_lower``; ``refusals`` then has the reason for each node not taken."""

    options: AcmeOptions = field(default_factory=AcmeOptions)
    refusals: list[Refusal] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        super().__init__()

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[torch._ops.OpOverload], Callable[[Node], bool] | None]:
        # Only keep operators that are taken: ExecuTorch has no kernel for an undelegated linear.
        return [LINEAR], lambda node: self._reason(node, ep) is None

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        graph = exported_program.graph_module
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        reasons = {node: self._reason(node, exported_program) for node in nodes}
        for node in nodes:  # weights are dequantized inside the linear, so both go or neither
            if operator(node) is DEQUANTIZE and all(reasons.get(user, "") is None for user in node.users):
                reasons[node] = None
        taken = {node for node, reason in reasons.items() if reason is None}
        spec = DelegationSpec(AcmeBackend.__name__, [])
        tags: dict[str, DelegationSpec] = {}
        found = CapabilityBasedPartitioner(graph, _Taken(taken), allows_single_node_partition=True)
        for number, partition in enumerate(found.propose_partitions()):
            tags[f"acme_{number}"] = spec
            for node in partition.nodes:
                node.meta["delegation_tag"] = f"acme_{number}"
        tag_constant_data(exported_program)
        self.refusals[:] = [
            Refusal(node.name, _name(node), reason) for node, reason in reasons.items() if reason is not None
        ]
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)

    def _reason(self, node: Node, program: ExportedProgram) -> str | None:
        """Return why a node is not taken, or None."""
        if operator(node) not in (LINEAR, RELU):
            return "no rule for this operator"
        for value in (node.meta["val"], *(source.meta["val"] for source in node.all_input_nodes)):
            if value.dtype != torch.float32:
                return f"has {str(value.dtype).removeprefix('torch.')}; float32 is taken"
            if not all(isinstance(size, int) for size in value.shape):
                return "has a shape that may change; fixed shapes are taken"
        if operator(node) is RELU:
            return None if self.options.relu else "the options leave out relu"
        if not self.options.linear:
            return "the options leave out linear"
        weight, *bias = [source for source in node.args[1:3] if source is not None]
        if isinstance(weight, Node) and operator(weight) is DEQUANTIZE:
            weight = weight.args[0]
        if any(constant_of(program, source) is None for source in (weight, *bias)):
            return "its weights are not known ahead of time"
        return None


class _Taken(OperatorSupportBase):
    def __init__(self, taken: set[Node]) -> None:
        self.taken = taken

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> bool:
        return node in self.taken


def _name(node: Node) -> str:
    found = operator(node)
    return str(found.name()) if hasattr(found, "name") else str(found)
