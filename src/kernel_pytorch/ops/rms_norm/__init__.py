"""RMSNorm: root-mean-square layer normalisation with its backward."""

from __future__ import annotations

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import Function
from kernel_pytorch.hardware_abstraction.op import Call, Kernel
from kernel_pytorch.ops.rms_norm.definition import RMS_NORM

__all__ = ["KERNEL_TORCH", "KERNEL_TRITON", "rms_norm"]

_function = Function(RMS_NORM)
_TRITON_WIDEST = 32768  # a row of float32 x, dy and dweight must fit in one program's registers


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, kernel: str | None = None
) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32, rounded once.

    Args:
        x: any shape, strides and number of rows; float64, float32, float16 or bfloat16.
        weight: (hidden,), in x's dtype or float32; None for none.
        eps: added to the mean square; finite and not negative.
        kernel: pin an implementation by name (``kp.explain`` lists them).

    Returns:
        A contiguous tensor of x's shape and dtype. Gradients flow to x and weight.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> x = torch.randn(4, 4096, dtype=torch.bfloat16)
        >>> kp.rms_norm(x, torch.ones(4096, dtype=torch.bfloat16)).shape
        torch.Size([4, 4096])
    """
    return _function(x, weight, eps, kernel=kernel)[0]


def _torch_supports(call: Call, device: Device) -> str | None:
    return None


def _triton_supports(call: Call, device: Device) -> str | None:
    x = call["x"]
    if x.dtype == torch.float64:
        return "computes in float32, and x is float64; use float32 or the torch kernel"
    if not device.supports(x.format):
        return f"{device.arch} does not compute in {x.format}"
    if x.shape[-1] > _TRITON_WIDEST:
        return f"holds a row in registers: {x.shape[-1]} numbers exceed {_TRITON_WIDEST}"
    return None


KERNEL_TORCH = Kernel(
    op="rms_norm",
    name="torch",
    module="kernel_pytorch.ops.rms_norm.torch_kernel",
    supports=_torch_supports,
    language="torch",
)
KERNEL_TRITON = Kernel(
    op="rms_norm",
    name="triton",
    module="kernel_pytorch.ops.rms_norm.triton_kernel",
    supports=_triton_supports,
    language="triton",
)
