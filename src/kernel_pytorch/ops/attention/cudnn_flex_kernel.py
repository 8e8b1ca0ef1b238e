"""cuDNN's attention over intervals of keys, from cuDNN's frontend library. A new mask needs no compilation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kernel_pytorch._compat.adopted import plan_tensors
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.masks.layout import Layout
from kernel_pytorch.ops.attention.definition import lse_flows

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask


@dataclass(frozen=True)
class _Plan:
    """A ``cudnn.flex_attention.MaskPlan``, cached on the layout that it was made from."""

    plan: Any

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(plan_tensors(self.plan))


def interval_ends(known: Layout, batch: int) -> torch.Tensor:
    """Return the intervals in cuDNN's format: (1, odd, batch * q_len), with [0, F0), [F1, F2), ... for each query."""
    first, last = (x.expand(batch, -1, -1) for x in known.intervals())
    empty = last <= first
    first, last = (torch.where(empty, known.kv_len, x) for x in (first, last))
    if bool(((first[:, 0] == 0) | empty[:, 0]).all()):
        last = torch.cat([torch.where(empty[:, :1], 0, last[:, :1]), last[:, 1:]], dim=1)
        first, begins = first[:, 1:], [last[:, 0]]
        last = last[:, 1:]
    else:
        begins = [torch.zeros_like(first[:, 0])]
    ends = [*begins, *torch.stack([first, last], dim=2).flatten(1, 2).unbind(1)]
    return torch.stack([end.reshape(-1) for end in ends]).to(torch.int32).unsqueeze(0).contiguous()


def _made(known: Layout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, trains: bool) -> _Plan:
    from cudnn.flex_attention import create_mask_plan

    ends = interval_ends(known, len(q)).to(q.device)
    return _Plan(create_mask_plan(ends, q, k, v, build_backward=trains))


def _plan(mask: Mask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, trains: bool) -> Any:
    """Return the plan of a mask for tensors of one kind, (batch, length, heads, dim), cached on the mask's layout."""
    known = mask.layout(q.shape[1], k.shape[1])
    key = ("cudnn-flex", str(q.device), q.dtype, len(q), q.shape[2:], k.shape[2], v.shape[3], trains)
    return known.keep(key, partial(_made, q=q, k=k, v=v, trains=trains)).plan


def _signature(x: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(x.shape), x.stride(), x.dtype, str(x.device))


_compiled: OrderedDict[tuple[Any, ...], Any] = OrderedDict()


def _compiled_for(tensors: tuple[torch.Tensor, ...], plan: Any, make: Callable[[], Any], *rest: Any) -> Any:
    """Return the library's compiled kernel for tensors of these shapes and strides, from a cache of 64.

    Kernels of different shapes share machine code; a cache miss only rebuilds the library's call descriptor.
    """
    key = (*(_signature(x) for x in tensors), plan.metadata, *rest)
    found = _compiled.get(key)
    if found is None:
        found = make()
        found.check_support()
        found.compile()
        _compiled[key] = found
        if len(_compiled) > 64:
            _compiled.popitem(last=False)
    _compiled.move_to_end(key)
    return found


def _rows(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return (batch, heads, length, dim) as (batch, length, heads, dim), copied only if alignment requires it."""
    return tuple(x.transpose(1, 2) if _aligned(x) else x.contiguous().transpose(1, 2) for x in tensors)


def _aligned(x: torch.Tensor) -> bool:
    step = 16 // x.element_size()
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s and s % step == 0 for s in x.stride()[:-1])


def forward(
    device: Device, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, wanted: str
) -> tuple[torch.Tensor, torch.Tensor]:
    from cudnn.flex_attention import FlexAttentionFwd

    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    q, k, v = _rows(q, k, v)
    own = out.transpose(1, 2)
    kept = None if wanted == "out" else lse
    plan = _plan(mask, q, k, v, wanted != "out")
    compiled = _compiled_for((q, k, v), plan, lambda: FlexAttentionFwd(q, k, v, own, plan, kept), kept is None)
    workspace = torch.empty(compiled.workspace_size, dtype=torch.uint8, device=q.device)
    compiled.execute(q, k, v, own, plan, kept, workspace=workspace, softmax_scale=scale)
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
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from cudnn.flex_attention import FlexAttentionBwd

    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    inputs = (*_rows(q, k, v, out, dout), lse.contiguous())
    results = tuple(x.transpose(1, 2) for x in (dq, dk, dv))
    plan = _plan(mask, inputs[0], inputs[1], inputs[2], trains=True)
    through_lse = dlse.contiguous() if lse_flows(wanted) else None
    compiled = _compiled_for(
        inputs,
        plan,
        lambda: FlexAttentionBwd(*inputs, *results, plan, through_lse, deterministic=deterministic),
        through_lse is None,
        deterministic,
    )
    workspace = torch.empty(compiled.workspace_size, dtype=torch.uint8, device=q.device)
    compiled.execute(*inputs, *results, plan, through_lse, workspace=workspace, softmax_scale=scale)
    return dq, dk, dv
