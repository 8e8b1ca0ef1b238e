"""Ahead-of-time compilation of a delegated graph to a payload, which ``native/payload.h`` reads.

All numbers are little-endian, and 32 bits wide unless said otherwise::

    magic, version, values, inputs, outputs, ops
    for each value: how many float32 it holds
    the values that are inputs; the values that are outputs
    for each op: code, source value, target value; for a linear then
        rows, inputs, outputs, flags (1: int8 weights, 2: bias),
        weights (outputs x inputs, float32, or int8 filled up to 4 bytes), scales if int8, bias if there is one
"""

from __future__ import annotations

import struct

import torch
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from torch._export.utils import (
    get_buffer,
    get_lifted_tensor_constant,
    get_param,
    is_buffer,
    is_lifted_tensor_constant,
    is_param,
)
from torch.export import ExportedProgram
from torch.fx import Node

MAGIC, VERSION = 0x314B504B, 1
RELU, LINEAR = 1, 2
INT8_WEIGHTS, BIAS = 1, 2


def operator(node: Node) -> object:
    """Return the torch operator of a node, before or in ExecuTorch's edge dialect."""
    return node.target._op if isinstance(node.target, EdgeOpOverload) else node.target


def constant_of(program: ExportedProgram, node: object) -> torch.Tensor | None:
    """Return the constant tensor of a node, or None."""
    if not isinstance(node, Node):
        return None
    for known, value in (
        (is_param, get_param),
        (is_buffer, get_buffer),
        (is_lifted_tensor_constant, get_lifted_tensor_constant),
    ):
        if known(program, node):
            return value(program, node).detach()
    return None


def build_payload(program: ExportedProgram) -> bytes:
    """Return the payload of a delegated graph."""
    numbers: dict[Node, int] = {}
    sizes: list[int] = []
    inputs: list[int] = []
    outputs: list[int] = []
    ops: list[bytes] = []

    def value(node: Node) -> int:
        if node not in numbers:
            numbers[node] = len(sizes)
            sizes.append(node.meta["val"].numel())
        return numbers[node]

    for node in program.graph.nodes:
        if node.op == "placeholder" and constant_of(program, node) is None:
            inputs.append(value(node))
        elif node.op == "output":
            outputs = [value(source) for source in node.args[0]]
        elif operator(node) is torch.ops.aten.relu.default:
            ops.append(struct.pack("<3I", RELU, value(node.args[0]), value(node)))
        elif operator(node) is torch.ops.aten.linear.default:
            ops.append(struct.pack("<3I", LINEAR, value(node.args[0]), value(node)) + _linear(program, node))
    head = struct.pack("<6I", MAGIC, VERSION, len(sizes), len(inputs), len(outputs), len(ops))
    table = [*sizes, *inputs, *outputs]
    return head + struct.pack(f"<{len(table)}I", *table) + b"".join(ops)


def _linear(program: ExportedProgram, node: Node) -> bytes:
    source, bias = node.args[1], node.args[2] if len(node.args) > 2 else None
    flags, data = 0, b""
    if constant_of(program, source) is None:  # the weight is dequantized
        weight, scale = (constant_of(program, one) for one in source.args[:2])
        flags |= INT8_WEIGHTS
        data += _bytes(weight.to(torch.int8)) + _bytes(scale.float())
    else:
        weight = constant_of(program, source)
        data += _bytes(weight.float())
    if bias is not None:
        flags |= BIAS
        data += _bytes(constant_of(program, bias).float())
    outputs, inputs = weight.shape
    rows = node.meta["val"].numel() // outputs
    return struct.pack("<4I", rows, inputs, outputs, flags) + data


def _bytes(tensor: torch.Tensor) -> bytes:
    data = tensor.contiguous().numpy().tobytes()
    return data + b"\0" * (-len(data) % 4)


class AcmeBackend(BackendDetails):
    """The backend's name in the ``.pte``; the C++ library registers itself under the same name."""

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        return PreprocessResult(processed_bytes=build_payload(edge_program))
