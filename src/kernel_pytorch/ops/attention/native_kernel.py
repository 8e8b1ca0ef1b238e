"""The delegate's attention in C++, in eager mode, on torch's own threads.

The backward is that of cpu-flash for full and causal masks, and that of the tiled kernel for all others.

A call becomes a payload of one op over the tensors where they are, strides and all, which is kept for the next call
of its shapes and mask.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.lowering.direct import DirectProgram
from kernel_pytorch.lowering.payload import Buffer, BufferKind, Op, OpCode, Parameter, Payload, Token, Value
from kernel_pytorch.ops.attention import cpu_flash_kernel, tiled_kernel
from kernel_pytorch.ops.attention.definition import lse_flows

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask

__all__ = ["backward", "forward"]


class _Tables:
    """A payload in the making, whose sizes are all known."""

    def __init__(self) -> None:
        self.payload = Payload()
        self._numbers: dict[int, int] = {}

    def number(self, value: int) -> int:
        if value not in self._numbers:
            self._numbers[value] = len(self.payload.expressions)
            self.payload.expressions.append(((Token.CONSTANT, value),))
        return self._numbers[value]

    def add(
        self, name: str, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, *, out: bool
    ) -> None:
        """A tensor as a view of one flat run of numbers."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        table = self.payload.outputs if out else self.payload.inputs
        table.append(Parameter(name, dtype, (self.number(span),)))
        kind = BufferKind.OUTPUT if out else BufferKind.INPUT
        self.payload.buffers.append(Buffer(kind, dtype, index=len(table) - 1))
        dims, steps = (tuple(self.number(value) for value in values) for values in (shape, strides))
        self.payload.values.append(Value(len(self.payload.buffers) - 1, dims, steps, self.number(0)))


@lru_cache(maxsize=256)
def _program(
    shapes: tuple[tuple[int, ...], ...], strides: tuple[tuple[int, ...], ...], dtype: torch.dtype, mask: Mask,
    scale: float, threads: int,
) -> tuple[DirectProgram, threading.Lock]:  # fmt: skip
    made = _Tables()
    for name, shape, stride in zip("qkv", shapes, strides, strict=True):
        made.add(name, shape, stride, dtype, out=False)
    rows = shapes[0][:3]
    for name, shape, kind in (("out", (*rows, shapes[2][3]), dtype), ("lse", rows, torch.float32)):
        made.add(name, shape, torch.empty(shape, device="meta").stride(), kind, out=True)
    made.payload.ops.append(Op(OpCode.ATTENTION, (0, 1, 2, None), (3, 4), tuple(mask.code.tolist()), (scale,)))
    # A program has one set of scratch memory: calls from two threads take turns.
    return DirectProgram(made.payload, on_torch_threads=threads), threading.Lock()


def _flat(x: torch.Tensor) -> torch.Tensor:
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((span,), (1,))


def forward(
    device: Device, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, wanted: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:  # no row, or rows without a key
        out = q.new_zeros((*q.shape[:3], v.shape[3]))
        return out, q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    shapes, strides = zip(*((tuple(x.shape), tuple(x.stride())) for x in (q, k, v)), strict=True)
    program, lock = _program(shapes, strides, q.dtype, mask, scale, torch.get_num_threads())
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    with lock:
        program([_flat(q), _flat(k), _flat(v)], [_flat(out), _flat(lse)])
    return out, lse


def backward(
    device: Device,
    dout: torch.Tensor,
    dlse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: Mask,
    scale: float,
    wanted: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dense = mask.is_full or (mask.is_causal and q.shape[2] == k.shape[2])
    # What cpu-flash refuses: gradients of lse, empty tensors, two head dimensions, scales of 0 and below.
    served = not lse_flows(wanted) and q.shape[3] == v.shape[3] and q.numel() and k.numel() and scale >= 1e-30
    run = cpu_flash_kernel.backward if dense and served else tiled_kernel.backward
    return run(device, dout, dlse, q, k, v, out, lse, mask, scale, wanted)
