"""What a graph computes from its constants alone, worked out ahead of time."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

__all__ = ["Constants"]

_MOST_NUMBERS = 1 << 28


class Constants:
    """The tensors behind a program's nodes, for the nodes that depend on no input.

    Buffers that the program writes to are no constants.
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
        """What the node computes, or None where that depends on an input or a symbol."""
        if node in self._known:
            return self._known[node]
        if node in self._unknown:
            return None
        # Without recursion: chains of constants can be as long as a model is deep.
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
