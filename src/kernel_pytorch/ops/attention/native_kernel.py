"""The C++ runtime's attention in eager mode, on torch's threads.

The backward is cpu-flash's for full and causal masks and for small calls, and the tiled kernel's for all others.

A call becomes a program with one operator on the tensors in place, with their strides. Programs are cached by shapes
and mask.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
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

_SMALL_PAIRS = 1 << 14


class _Tables:
    """Builder of a payload with static sizes."""

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
        """Add a tensor as a strided view of flat memory."""
        span = _span(shape, strides)
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
) -> tuple[Callable[..., None], threading.Lock]:  # fmt: skip
    made = _Tables()
    for name, shape, stride in zip("qkv", shapes, strides, strict=True):
        made.add(name, shape, stride, dtype, out=False)
    rows = shapes[0][:3]
    for name, shape, kind in (("out", (*rows, shapes[2][3]), dtype), ("lse", rows, torch.float32)):
        made.add(name, shape, torch.empty(shape, device="meta").stride(), kind, out=True)
    made.payload.ops.append(Op(OpCode.ATTENTION, (0, 1, 2, None), (3, 4), tuple(mask.code.tolist()), (scale,)))
    # A program has one scratch buffer, so calls from several threads take a lock.
    taken = [(dtype, _span(shape, stride)) for shape, stride in zip(shapes, strides, strict=True)]
    given = [(dtype, math.prod(rows) * shapes[2][3]), (torch.float32, math.prod(rows))]
    return DirectProgram(made.payload, on_torch_threads=threads).at_addresses(taken, given), threading.Lock()


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
    run, lock = _program(shapes, strides, q.dtype, mask, scale, torch.get_num_threads())
    out = q.new_empty((*rows, shapes[2][3]))
    lse = torch.empty(rows, dtype=torch.float32)
    with lock:
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
    # cpu-flash does not support gradients of lse, empty tensors, two head dimensions, or scales up to 0.
    if lse_flows(wanted) or q.shape[3] != v.shape[3] or scale < 1e-30 or not (q.numel() and k.numel()):
        return tiled_kernel.backward(device, dout, dlse, q, k, v, out, lse, mask, scale, wanted)
    known = mask.simplified(q.shape[2], k.shape[2])
    if known.is_full or (known.is_causal and q.shape[2] == k.shape[2]):
        return cpu_flash_kernel.backward(device, dout, dlse, q, k, v, out, lse, mask, scale, wanted)
    addends = _small_addends(mask, q.shape[2], k.shape[2], lse.dtype)
    if addends is None:
        return tiled_kernel.backward(device, dout, dlse, q, k, v, out, lse, mask, scale, wanted)
    return cpu_flash_kernel.masked_backward(dout, q, k, v, out, lse, scale, addends)


@lru_cache(maxsize=64)
def _small_addends(mask: Mask, q_len: int, kv_len: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the mask as additive values, 0 and -inf, for calls so small that skipping tiles is not faster.

    None for larger calls, and for masks with a query that attends to nothing.
    """
    if q_len * kv_len > _SMALL_PAIRS:
        return None
    keep = mask.dense(q_len, kv_len)
    if keep.numel() > 16 * _SMALL_PAIRS or not bool(keep.any(dim=-1).all()):
        return None
    with torch.inference_mode(False):
        return torch.zeros(keep.shape, dtype=dtype).masked_fill_(~keep, -torch.inf)
