"""RoPE: rotary position embedding of queries and keys, with its backward."""

from __future__ import annotations

from typing import overload

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import Function
from kernel_pytorch.hardware_abstraction.op import Call, Kernel
from kernel_pytorch.ops.rope.definition import ROPE

__all__ = ["KERNEL_TORCH", "KERNEL_TRITON", "rope"]

_function = Function(ROPE)
_TRITON_WIDEST = 1024  # rotary dimensions: cos, sin and a head's pairs of one token must fit in registers


@overload
def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def rope(
    q: torch.Tensor,
    k: None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    kernel: str | None = None,
) -> tuple[torch.Tensor, None]: ...
def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotary position embedding of q and k: ``x * cos + rotate(x) * sin``, computed in float32, rounded once.

    Takes what Hugging Face's ``apply_rotary_pos_emb`` takes, and computes q and k in one kernel launch.

    Args:
        q: (batch, q_heads, length, head_dim), any strides.
        k: (batch, k_heads, length, head_dim); None to rotate q alone.
        cos, sin: (batch or 1, length, rotary_dim), or (length, rotary_dim), in q's dtype or float32. The first
            rotary_dim elements of a head are rotated, the others are copied. No gradient flows to them.
        interleaved: whether elements 2i and 2i + 1 form a pair, as in GPT-J and Cohere, instead of i and
            i + rotary_dim / 2, as in Llama.
        kernel: pin an implementation by name (``kp.explain`` lists them).

    Returns:
        The rotated q and k, contiguous, with their shapes and dtype; None in place of k if k is None.
        Gradients flow to q and k.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> q, k = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64)
        >>> angles = torch.arange(16.0)[:, None] * 10000 ** (-torch.arange(0, 64, 2) / 64)
        >>> angles = torch.cat([angles, angles], dim=-1)
        >>> q, k = kp.rope(q, k, angles.cos(), angles.sin())
        >>> q.shape, k.shape
        (torch.Size([1, 8, 16, 64]), torch.Size([1, 2, 16, 64]))
    """
    for name, table in (("cos", cos), ("sin", sin)):
        if torch.is_grad_enabled() and isinstance(table, torch.Tensor) and table.requires_grad:
            raise ValueError(f"{name} requires a gradient, and rope has none for it: pass {name}.detach()")
    cos, sin = (table.unsqueeze(0) if getattr(table, "ndim", 0) == 2 else table for table in (cos, sin))
    q_out, k_out = _function(q, k, cos, sin, interleaved, kernel=kernel)
    return q_out, None if k is None else k_out


def _torch_supports(call: Call, device: Device) -> str | None:
    return None


def _triton_supports(call: Call, device: Device) -> str | None:
    q = call["q" if call.phase == "forward" else "dq_out"]
    rotary = call["cos"].shape[-1]
    if q.dtype == torch.float64:
        return "computes in float32, and q is float64; use float32 or the torch kernel"
    if not device.supports(q.format):
        return f"{device.arch} does not compute in {q.format}"
    if max(rotary, q.shape[-1] - rotary) > _TRITON_WIDEST:
        return f"holds a head of a token in registers: head_dim {q.shape[-1]} exceeds {_TRITON_WIDEST}"
    return None


KERNEL_TORCH = Kernel(
    op="rope",
    name="torch",
    module="kernel_pytorch.ops.rope.torch_kernel",
    supports=_torch_supports,
    language="torch",
)
KERNEL_TRITON = Kernel(
    op="rope",
    name="triton",
    module="kernel_pytorch.ops.rope.triton_kernel",
    supports=_triton_supports,
    language="triton",
)
