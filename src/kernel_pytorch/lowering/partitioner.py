"""The partitioner of the ExecuTorch delegate. Also usable on its own in ``to_edge_transform_and_lower``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import tag_constant_data
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from kernel_pytorch._compat.structures import OpOverload
from kernel_pytorch.lowering.backend import KernelPyTorchBackend, lowest_sizes
from kernel_pytorch.lowering.constants import Constants
from kernel_pytorch.lowering.rewrite import rewritten
from kernel_pytorch.lowering.rules import RULES, operator_name, refusal

__all__ = ["KernelPartitioner", "PartitionerOptions", "Refusal"]


_LINEAR = torch.ops.aten.linear.default


@dataclass(frozen=True)
class PartitionerOptions:
    """Selects the operators that the partitioner takes.

    Example:
        >>> PartitionerOptions(activations=False).activations
        False
    """

    attention: bool = True
    """Take attention: all forms of ``scaled_dot_product_attention``, and ``kp.attention`` with any mask."""
    linears: bool = True
    """Take linears with constant floating-point weights: measured, they are faster than XNNPACK's, and no tensor has
    to move between delegates. The same holds for linears with int8 or int4 weights, with floating-point activations
    or dynamic quantization. Linears with calibrated (static) activation scales are left to XNNPACK."""
    norms: bool = True
    """Take RMS norms and layer norms."""
    softmax: bool = True
    """Take softmax outside of attention."""
    activations: bool = True
    """Take GELU, SiLU, sigmoid, tanh and erf, with the multiplications that gate them."""
    glue: bool = True
    """Take views, additions and other pointwise operators that are adjacent to taken ones, because fused they need no
    extra pass over memory. Glue without such a neighbour is left to the other backends."""
    glue_alone: bool = False
    """Also take glue without such a neighbour, for tests of single operators."""


@dataclass(frozen=True)
class Refusal:
    """A node that was not taken, with the reason."""

    node: str
    operator: str
    reason: str


class _Support(OperatorSupportBase):
    def __init__(self, taken: set[Node]) -> None:
        self._taken = taken

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> bool:
        return node in self._taken


@dataclass(eq=False)
class KernelPartitioner(Partitioner):  # type: ignore[misc]
    """Assigns to the delegate the nodes that it supports; pass it before other partitioners.

    After lowering, ``refusals`` has the reason for each node that was not taken.

    Example:
        >>> KernelPartitioner(PartitionerOptions(norms=False)).options.norms
        False
    """

    options: PartitionerOptions = field(default_factory=PartitionerOptions)
    beside: tuple[Partitioner, ...] = ()
    """The partitioners after this one. While ExecuTorch runs one partitioner, it decomposes operators that only later
    ones keep whole, so this one requests theirs too."""
    refusals: list[Refusal] = field(default_factory=list, init=False)
    _specs: list[CompileSpec] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__init__()

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """Replace attention, RMS norms and linears by operators that are not decomposed later."""
        chosen = self.options
        self._specs = [lowest_sizes(exported_program)]
        return rewritten(exported_program, attention=chosen.attention, norms=chosen.norms, linears=chosen.linears)

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[OpOverload], Callable[[Node], bool] | None]:
        wishes = [partitioner.ops_to_not_decompose(ep) for partitioner in self.beside]
        constants = Constants(ep)

        def keep(node: Node) -> bool:
            own = self.options.linears and node.target is _LINEAR and refusal(node, constants) is None
            return own or any(node.target in kept and (check is None or check(node)) for kept, check in wishes)

        return [_LINEAR, *(op for kept, _ in wishes for op in kept)], keep

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        module = exported_program.graph_module
        constants = Constants(exported_program)
        reasons = {node: self._reason(node, constants) for node in module.graph.nodes if node.op == "call_function"}
        known = {node for node in reasons if constants.of(node) is not None}
        taken = {node for node, reason in reasons.items() if reason is None and node not in known}
        tags: dict[str, DelegationSpec] = {}
        spec = DelegationSpec(KernelPyTorchBackend.__name__, self._specs)
        others = cache(lambda: self._nodes_of_others(exported_program))  # takes seconds, and few models need it
        # Decide on all partitions before tagging any, because calling the other partitioners tags nodes too.
        partitions = _partitions(module, taken)
        handed = {node for found in partitions for node in self._better_beside(found, others)}
        if handed:
            reasons.update(dict.fromkeys(handed, "stands between convolutions; their backend runs it as fast"))
            partitions = _partitions(module, taken - handed)
        weighed = [(found, self._not_worth_it(found, others)) for found in partitions]
        for number, (partition, why_not) in enumerate(weighed):
            if why_not is not None:
                reasons.update(dict.fromkeys(partition, why_not))
                continue
            tag = f"kernel_pytorch_{number}"
            tags[tag] = spec
            for node in (*partition, *_private_constants(partition, known)):
                node.meta["delegation_tag"] = tag
                reasons[node] = None
        tag_constant_data(exported_program)
        self.refusals[:] = [
            Refusal(node.name, operator_name(node), reason) for node, reason in reasons.items() if reason
        ]
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)

    def _reason(self, node: Node, constants: Constants) -> str | None:
        if isinstance(node.meta.get("kernel_pytorch_refusal"), str):
            return str(node.meta["kernel_pytorch_refusal"])
        reason = refusal(node, constants)
        if reason is not None:
            return reason
        kind = _kind(node)
        wanted = {
            "attention": self.options.attention,
            "linear": self.options.linears,
            "norm": self.options.norms,
            "softmax": self.options.softmax,
            "activation": self.options.activations,
        }.get(kind, self.options.glue)
        return None if wanted else f"the options leave out {kind}"

    def _nodes_of_others(self, exported_program: ExportedProgram) -> set[Node]:
        """Return the nodes that the other partitioners would take without this one."""
        found: set[Node] = set()
        for partitioner in self.beside:
            partitioner.partition(exported_program)
            for node in exported_program.graph.nodes:
                if node.meta.pop("delegation_tag", None) is not None and node.op == "call_function":
                    found.add(node)
        return found

    def _better_beside(self, partition: Sequence[Node], beside: Callable[[], set[Node]]) -> set[Node]:
        """Return linears and activations to leave to other backends: those between convolutions, as in ConvNeXt.

        The norms of such a partition split the other backend's delegate in any case. Its linears are not faster here,
        and taking them would also move the residual addition into this delegate.
        """
        kinds = {_kind(node) for node in partition}
        if self.options.glue_alone or "attention" in kinds or "norm" not in kinds:
            return set()
        if not kinds & {"linear", "activation"} or not all(_neighbours(partition, beside())):
            return set()
        return {node for node in partition if _kind(node) in ("linear", "activation")} & beside()

    def _not_worth_it(self, partition: Sequence[Node], beside: Callable[[], set[Node]]) -> str | None:
        """Return why a partition is left to other backends, or None.

        Each delegate adds a call and a pass over memory at its inputs and outputs. A partition between convolutions
        that could share a delegate with them gains less than that, unless it has attention or a norm.
        """
        if self.options.glue_alone:
            return None
        kinds = {_kind(node) for node in partition}
        if kinds & {"attention", "norm"}:
            return None
        if not kinds & {"linear", "softmax", "activation"}:
            return "touches nothing else that is taken; other backends do it well"
        others = beside()
        if not others.issuperset(partition):
            return None
        if any(_neighbours(partition, others)):
            return "stands beside work of another backend; a delegate of its own costs more than it gains"
        return None


def _neighbours(partition: Sequence[Node], others: set[Node]) -> tuple[bool, bool]:
    """Return whether other backends run any of a partition's inputs, and any of its users."""
    inside = set(partition)
    sources = {source for node in partition for source in node.all_input_nodes} - inside
    users = {user for node in partition for user in node.users} - inside
    return bool(sources & others), bool(users & others)


def _kind(node: Node) -> str:
    rule = RULES.get(operator_name(node))
    return rule.kind if rule is not None else "view"


def _private_constants(partition: Sequence[Node], known: set[Node]) -> list[Node]:
    """Return the constant nodes that only this partition reads; they are evaluated when its payload is built.

    A constant that two delegates read must be computed outside of both, with all of its inputs. Inside one delegate,
    it would become an input of the other, which could then not fold what depends on it.
    """
    inside = set(partition)
    for node in reversed(partition[0].graph.nodes):  # users first
        if node in known and node.users and all(user in inside for user in node.users):
            inside.add(node)
    own = inside & known
    while True:
        outside = {node for node in own if not inside.issuperset(known.intersection(node.all_input_nodes))}
        outside |= {node for node in own if not inside.issuperset(node.users)}
        if not outside:
            return list(own)
        own -= outside
        inside -= outside


def _partitions(module: GraphModule, taken: set[Node]) -> list[list[Node]]:
    found = CapabilityBasedPartitioner(module, _Support(taken), allows_single_node_partition=True)
    return [list(partition.nodes) for partition in found.propose_partitions()]
