"""Raise an error for operators without a runtime kernel, with the operator, the module and the remedy."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kernel_pytorch._compat.structures import OpOverload, has_composite_kernel

__all__ = ["module_of", "refuse_without_kernels"]

_REMEDIES = {
    "transformers::grouped_mm_fallback": "call model.set_experts_implementation('batched_mm') before lowering",
}
# Our and torchao's operators are delegated; those of core PyTorch are decomposed or have an out variant.
_KNOWN = ("aten", "prims", "export", "kernel_pytorch", "kernel_pytorch_lowering", "quantized_decomposed", "torchao")


def module_of(node: Node) -> str:
    """Return the module in whose forward a node was traced, such as ``model.layers.0.mlp``; empty for the root."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def refuse_without_kernels(program: ExportedProgram) -> None:
    """Raise an error for a custom operator without an out variant, because ExecuTorch only runs out variants."""
    for node in program.graph.nodes:
        target = node.target
        if not isinstance(target, OpOverload) or target.namespace in _KNOWN:
            continue
        name = target._schema.name
        packet = getattr(getattr(torch.ops, target.namespace), name.partition("::")[2])
        decomposes = has_composite_kernel(target)
        if decomposes or any(overload == "out" or overload.endswith("_out") for overload in packet.overloads()):
            continue
        where = f" in {module_of(node)!r}" if module_of(node) else ""
        remedy = _REMEDIES.get(name, "write it with PyTorch's own operators, or register an out variant of it")
        raise ValueError(f"{name}{where} has no kernel that ExecuTorch could run: {remedy}")
