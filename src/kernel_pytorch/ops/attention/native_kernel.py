"""The C++ runtime's attention in eager mode, on torch's threads.

A call becomes a program with one operator on the tensors in place, with their strides. Programs are cached by shapes
and mask. New shapes, such as those of a step of decoding, are written into the template of their mask.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.lowering.direct import DirectProgram
from kernel_pytorch.lowering.payload import (
    Buffer,
    BufferKind,
    Op,
    OpCode,
    Parameter,
    Payload,
    Token,
    Value,
    with_constants,
)
from kernel_pytorch.ops.attention.definition import lse_flows

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask

__all__ = ["backward", "forward"]


class _Template(NamedTuple):
    """A payload with one operator on tensors whose sizes and strides are placeholders."""

    data: bytes
    dtypes: tuple[torch.dtype, ...]
    """Of the inputs, then of the outputs."""
    inputs: int


def _template(op: Op, tensors: Sequence[tuple[str, torch.dtype, int]], inputs: int) -> _Template:
    """Return the template of an operator on tensors of (name, dtype, number of dimensions), inputs first."""
    payload = Payload(ops=[op])
    payload.expressions.append(((Token.CONSTANT, 0),))
    for at, (name, dtype, rank) in enumerate(tensors):
        span = len(payload.expressions)
        payload.expressions += [((Token.CONSTANT, 1),)] * (1 + 2 * rank)
        table = payload.inputs if at < inputs else payload.outputs
        table.append(Parameter(name, dtype, (span,)))
        kind = BufferKind.INPUT if at < inputs else BufferKind.OUTPUT
        payload.buffers.append(Buffer(kind, dtype, index=len(table) - 1))
        sizes = range(span + 1, span + 1 + 2 * rank)
        payload.values.append(Value(at, tuple(sizes[:rank]), tuple(sizes[rank:]), 0))
    return _Template(payload.to_bytes(), tuple(dtype for _, dtype, _ in tensors), inputs)


class _Program:
    """A program on tensors of fixed shapes, strides and dtypes, called with their addresses, inputs first.

    Each tensor is a strided view of flat memory. A program has one set of scratch memory: calls from two threads take
    turns.
    """

    def __init__(self, template: _Template, shapes: Shapes, strides: Shapes, threads: int) -> None:
        sizes, spans = [0], []
        for shape, stride in zip(shapes, strides, strict=True):
            span = 1  # the elements in memory from the first to the last
            for size, step in zip(shape, stride, strict=True):
                span += (size - 1) * step
            spans.append(span)
            sizes += (span, *shape, *stride)
        described = list(zip(template.dtypes, spans, strict=True))
        program = DirectProgram(with_constants(template.data, sizes), on_torch_threads=threads)
        self._run = program.at_addresses(described[: template.inputs], described[template.inputs :])
        self._lock = threading.Lock()

    def __call__(self, *addresses: int) -> None:
        with self._lock:
            self._run(*addresses)


Shapes = Sequence[Sequence[int]]


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@lru_cache(maxsize=256)
def _forward_template(dtype: torch.dtype, mask: Mask, scale: float) -> _Template:
    tensors = [*((name, dtype, 4) for name in ("q", "k", "v", "out")), ("lse", torch.float32, 3)]
    return _template(Op(OpCode.ATTENTION, (0, 1, 2, None), (3, 4), tuple(mask.code.tolist()), (scale,)), tensors, 3)


@lru_cache(maxsize=256)
def _forward_program(
    shapes: Shapes, strides: Shapes, dtype: torch.dtype, mask: Mask, scale: float, threads: int
) -> _Program:
    rows = shapes[0][:3]
    made = (*rows, shapes[2][3]), rows
    template = _forward_template(dtype, mask, scale)
    return _Program(template, (*shapes, *made), (*strides, *map(_contiguous, made)), threads)


@lru_cache(maxsize=256)
def _backward_template(dtype: torch.dtype, mask: Mask, scale: float, with_dlse: bool) -> _Template:
    rows = ("lse", "dlse")[: 1 + with_dlse]
    first = 5 + len(rows)
    op = Op(
        OpCode.ATTENTION_BACKWARD,
        (0, 1, 2, 3, 5, 4, 6 if with_dlse else None),
        (first, first + 1, first + 2),
        tuple(mask.code.tolist()),
        (scale,),
    )
    tensors = [
        *((name, dtype, 4) for name in ("q", "k", "v", "out", "dout")),
        *((name, torch.float32, 3) for name in rows),
        *(("dq", dtype, 4), ("dk", torch.float32, 4), ("dv", torch.float32, 4)),
    ]
    return _template(op, tensors, first)


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
    rows, (batch, *rest) = shapes[0][:3], shapes[1]
    made = (
        *(rows,) * (1 + with_dlse),
        shapes[0],
        (parts * batch, *rest),
        (parts * batch, *rest[:2], shapes[2][3]),
    )
    template = _backward_template(dtype, mask, scale, with_dlse)
    return _Program(template, (*shapes, *made), (*strides, *map(_contiguous, made)), threads)


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
        (q.shape, k.shape, v.shape, out.shape, dout.shape),
        (q.stride(), k.stride(), v.stride(), out.stride(), dout.stride()),
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
