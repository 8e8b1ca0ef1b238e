"""Private names of adopted attention libraries: FlashAttention-4's forward and backward, a cuDNN plan's tensors.

The public ``flash_attn_func`` is one autograd node; selection needs the forward and the backward as two functions.
The names are looked up when such a kernel first runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from kernel_pytorch._compat.private import private

__all__ = ["flash_4_backward", "flash_4_forward", "plan_tensors"]

_WITHOUT = "the kernel flash-4 cannot run; pin another one, or install the version that its error names"


def _takes(*names: str) -> Callable[[Any], bool]:
    def test(function: Any) -> bool:
        return set(names) <= set(inspect.signature(function).parameters)

    return test


@cache
def flash_4_forward() -> Callable[..., Any]:
    found: Callable[..., Any] = private(
        "flash_attn.cute.interface._flash_attn_fwd",
        test=_takes("q", "k", "v", "cu_seqlens_q", "causal", "window_size_left", "mask_mod", "out", "lse"),
        without=_WITHOUT,
    )
    return found


@cache
def flash_4_backward() -> Callable[..., Any]:
    found: Callable[..., Any] = private(
        "flash_attn.cute.interface._flash_attn_bwd",
        test=_takes("q", "k", "v", "out", "dout", "lse", "deterministic", "dq", "dk", "dv", "dlse"),
        without=_WITHOUT,
    )
    return found


def plan_tensors(plan: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a ``cudnn.flex_attention.MaskPlan`` holds, to count their memory."""
    waiting = [getattr(plan, "_packed_plan", None)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, tuple):
            waiting.extend(item)
