"""The C++ runtime's attention in eager mode, on torch's threads.

A call becomes a program with one operator on the tensors in place, with their strides. Programs are cached by shapes
and mask.
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
from kernel_pytorch.ops.attention.definition import lse_flows

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask

__all__ = ["backward", "forward"]


class _Tables:
    """Builder of a payload with static sizes."""

    def __init__(self) -> None:
        self.payload = Payload()
        self.spans: dict[str, int] = {}
        """The elements in memory from the first to the last of each tensor."""
        self._numbers: dict[int, int] = {}

    def number(self, value: int) -> int:
        if value not in self._numbers:
            self._numbers[value] = len(self.payload.expressions)
            self.payload.expressions.append(((Token.CONSTANT, value),))
        return self._numbers[value]

    def add(
        self, name: str, shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, *, out: bool
    ) -> None:
        """Add a tensor as a strided view of flat memory; contiguous if ``strides`` is None."""
        if strides is None:
            strides = torch.empty(shape, device="meta").stride()
        self.spans[name] = span = _span(shape, strides)
        table = self.payload.outputs if out else self.payload.inputs
        table.append(Parameter(name, dtype, (self.number(span),)))
        kind = BufferKind.OUTPUT if out else BufferKind.INPUT
        self.payload.buffers.append(Buffer(kind, dtype, index=len(table) - 1))
        dims, steps = (tuple(self.number(value) for value in values) for values in (shape, strides))
        self.payload.values.append(Value(len(self.payload.buffers) - 1, dims, steps, self.number(0)))


class _Program:
    """A program on tensors of fixed shapes, strides and dtypes, called with their addresses, inputs first.

    It has one set of scratch memory: calls from two threads take turns.
    """

    def __init__(self, made: _Tables, threads: int) -> None:
        tables = [
            [(table.dtype, made.spans[table.name]) for table in tables]
            for tables in (made.payload.inputs, made.payload.outputs)
        ]
        self._run = DirectProgram(made.payload, on_torch_threads=threads).at_addresses(*tables)
        self._lock = threading.Lock()

    def __call__(self, *addresses: int) -> None:
        with self._lock:
            self._run(*addresses)


Shapes = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=256)
def _forward_program(
    shapes: Shapes, strides: Shapes, dtype: torch.dtype, mask: Mask, scale: float, threads: int
) -> _Program:
    made = _Tables()
    for name, shape, stride in zip("qkv", shapes, strides, strict=True):
        made.add(name, shape, stride, dtype, out=False)
    rows = shapes[0][:3]
    made.add("out", (*rows, shapes[2][3]), None, dtype, out=True)
    made.add("lse", rows, None, torch.float32, out=True)
    made.payload.ops.append(Op(OpCode.ATTENTION, (0, 1, 2, None), (3, 4), tuple(mask.code.tolist()), (scale,)))
    return _Program(made, threads)


@lru_cache(maxsize=256)
def _backward_program(
    shapes: Shapes,
    strides: Shapes,
    dtype: torch.dtype,
    mask: Mask,
    scale: float,
    with_dlse: bool,
    parts: int,
    threads: int,
) -> _Program:
    made = _Tables()
    for name, shape, stride in zip(("q", "k", "v", "out", "dout"), shapes, strides, strict=True):
        made.add(name, shape, stride, dtype, out=False)
    rows, (batch, *rest) = shapes[0][:3], shapes[1]
    for name in ("lse", "dlse")[: 1 + with_dlse]:
        made.add(name, rows, None, torch.float32, out=False)
    made.add("dq", shapes[0], None, dtype, out=True)
    made.add("dk", (parts * batch, *rest), None, torch.float32, out=True)
    made.add("dv", (parts * batch, *rest[:2], shapes[2][3]), None, torch.float32, out=True)
    first = 6 + with_dlse
    made.payload.ops.append(
        Op(
            OpCode.ATTENTION_BACKWARD,
            (0, 1, 2, 3, 5, 4, 6 if with_dlse else None),
            (first, first + 1, first + 2),
            tuple(mask.code.tolist()),
            (scale,),
        )
    )
    return _Program(made, threads)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last element of a tensor in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def forward(
    device: Device, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, wanted: str
) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = q.shape, k.shape, v.shape
    rows = shapes[0][:3]
    if not (q.numel() and k.numel() and v.numel()):  # no rows, or rows without keys
        return q.new_zeros((*rows, shapes[2][3])), q.new_full(rows, -torch.inf, dtype=torch.float32)
    strides = q.stride(), k.stride(), v.stride()
    run = _forward_program(shapes, strides, q.dtype, mask, scale, torch.get_num_threads())
    out = q.new_empty((*rows, shapes[2][3]))
    lse = torch.empty(rows, dtype=torch.float32)
    run(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
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
    if not (q.numel() and k.numel() and v.numel()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    flows, threads, batch = lse_flows(wanted), torch.get_num_threads(), q.shape[0]
    lse, dlse = lse.contiguous(), dlse.contiguous()
    tensors = q, k, v, out, dout
    parts = _parts(batch * k.shape[1], q.shape[2], threads)
    run = _backward_program(
        tuple(x.shape for x in tensors),
        tuple(x.stride() for x in tensors),
        q.dtype,
        mask,
        scale,
        flows,
        parts,
        threads,
    )
    dq = q.new_empty(q.shape)
    dk, dv = (torch.empty((parts * batch, *x.shape[1:]), dtype=torch.float32) for x in (k, v))
    run(*(x.data_ptr() for x in (*tensors, lse, *((dlse,) if flows else ()), dq, dk, dv)))
    if parts > 1:
        dk, dv = (x.unflatten(0, (parts, batch)).sum(dim=0) for x in (dk, dv))
    return dq, dk.to(q.dtype), dv.to(q.dtype)


def _parts(entries: int, q_len: int, threads: int) -> int:
    """Into how many parts the rows are divided, so that all threads have work: each needs memory for dk and dv."""
    if entries >= 2 * threads or threads == 1:
        return 1
    return max(1, min(-(-2 * threads // entries), q_len // 32, 16))
