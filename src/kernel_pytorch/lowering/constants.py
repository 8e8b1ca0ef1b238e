"""Constant folding for exported graphs: evaluate nodes that depend on no input, ahead of time."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

__all__ = ["Constants", "fold_constants", "narrowed"]

_MOST_NUMBERS = 1 << 28
_MOST_FOLDED = 1 << 20


def narrowed(weight: torch.Tensor) -> torch.Tensor:
    """Return a float32 tensor in bfloat16 or float16 if that is exact, else unchanged.

    The weights of a bfloat16 checkpoint that was loaded in float32 then take 16 bits; GEMMs stay in float32.

    Example:
        >>> narrowed(torch.tensor([0.5, 3.0])).dtype, narrowed(torch.tensor([0.1])).dtype
        (torch.bfloat16, torch.float32)
    """
    if weight.dtype != torch.float32:
        return weight
    for dtype in (torch.bfloat16, torch.float16):
        # A few elements suffice to reject nearly every tensor that needs float32.
        if all(torch.equal(part.to(dtype).float(), part) for part in (weight.flatten()[:256], weight)):
            return weight.to(dtype)
    return weight


class Constants:
    """Values of the nodes of a program that depend on no input.

    Buffers that the program writes to are not constants.
    """

    def __init__(self, program: ExportedProgram) -> None:
        signature = program.graph_signature
        written = set(signature.buffers_to_mutate.values()) | set(
            getattr(signature, "parameters_to_mutate", {}).values()
        )
        self._tensors: dict[str, torch.Tensor] = {}
        for names in (signature.inputs_to_parameters, signature.inputs_to_buffers):
            for node, target in names.items():
                found = program.state_dict.get(target, program.constants.get(target))
                if target not in written and isinstance(found, torch.Tensor):
                    self._tensors[node] = found
        for node, target in signature.inputs_to_lifted_tensor_constants.items():
            found = program.constants.get(target)
            if isinstance(found, torch.Tensor):
                self._tensors[node] = found
        self._known: dict[Node, Any] = {}
        self._unknown: set[Node] = set()

    def is_constant_input(self, node: Node) -> bool:
        return node.op == "placeholder" and node.name in self._tensors

    def of(self, node: Node) -> Any:
        """Return the node's value, or None if it depends on an input or a symbol."""
        if node in self._known:
            return self._known[node]
        if node in self._unknown:
            return None
        # Not recursive: chains of constants can be as long as a model is deep.
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self._known or top in self._unknown:
                stack.pop()
                continue
            waiting = [
                source
                for source in top.all_input_nodes
                if source not in self._known and source not in self._unknown
            ]
            if waiting and not any(source in self._unknown for source in top.all_input_nodes):
                stack.extend(waiting)
                continue
            stack.pop()
            found = self._computed(top)
            if found is None:
                self._unknown.add(top)
            else:
                self._known[top] = found
        return self._known.get(node)

    def _computed(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self._tensors.get(node.name)
        if node.op != "call_function" or any(source in self._unknown for source in node.all_input_nodes):
            return None
        shape = getattr(node.meta.get("val"), "shape", ())
        if any(not isinstance(size, int) for size in shape) or torch.Size(shape).numel() > _MOST_NUMBERS:
            return None
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or not callable(node.target):
            return None
        arguments, options = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: self._known[source])
        with torch.no_grad():
            return node.target(*arguments, **options)


def fold_constants(program: ExportedProgram) -> None:
    """Replace nodes that depend on constants only, such as a mask or rotary angles, by their values.

    Several delegates may then read them. Parameters and quantized tensors keep their operators, which partitioners
    match, and so do constants of more than a million elements.
    """
    from executorch.backends.transforms.utils import create_constant_placeholder

    constants, graph = Constants(program), program.graph
    parameters = program.graph_signature.inputs_to_parameters
    foldable: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            fits = constants.is_constant_input(node) and node.name not in parameters
        else:
            fits = node.op == "call_function" and "quantize" not in str(node.target)
            fits = fits and foldable.issuperset(node.all_input_nodes) and constants.of(node) is not None
        if fits:
            foldable.add(node)
    first = next(iter(graph.nodes))
    for node in [node for node in graph.nodes if node in foldable and node.op == "call_function"]:
        found = constants.of(node)
        users = [user for user in node.users if user not in foldable and user.op == "call_function"]
        if not users or not isinstance(found, torch.Tensor) or found.numel() > _MOST_FOLDED:
            continue
        with graph.inserting_before(first):
            name, data = f"folded_{node.name}", found.contiguous().clone()
            folded = create_constant_placeholder(program, graph, name, InputKind.CONSTANT_TENSOR, data)
        for user in users:
            user.replace_input_with(node, folded)
    graph.eliminate_dead_code()
