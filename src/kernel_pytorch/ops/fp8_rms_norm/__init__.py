"""fp8_rms_norm: RMSNorm with its result in x's dtype and in an 8-bit format, both layouts at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import Function
from kernel_pytorch.hardware_abstraction.op import Call, Kernel
from kernel_pytorch.ops.fp8_rms_norm.definition import FP8_RMS_NORM

__all__ = ["KERNEL_TORCH", "KERNEL_TRITON", "Normal", "fp8_rms_norm"]

_function = Function(FP8_RMS_NORM)


@dataclass(frozen=True)
class Normal:
    """y = RMSNorm of x, and its copies: ``data * inverse`` is about y, ``data_t * inverse`` about its transpose.

    Without a number format y and rstd are all; the others have no elements.
    """

    y: torch.Tensor
    """(rows, columns), contiguous, in x's dtype."""
    rstd: torch.Tensor
    """float32 (rows,): 1 / sqrt(mean(x^2) + eps). The backward of ``rms_norm`` takes it."""
    data: torch.Tensor
    """(rows, columns), contiguous: to the byte what ``fp8_cast`` makes of y, as all that follows."""
    data_t: torch.Tensor
    """(columns, rows), contiguous; (0, 0) where it was not asked for."""
    inverse: torch.Tensor
    """float32, no dimensions: one over the scale of both."""
    amax: torch.Tensor
    """float32, no dimensions: the largest magnitude among the finite numbers of y."""
    counts: torch.Tensor
    """int64 (2, 4), of data and data_t: numbers that outgrew the history, became zero, were not finite; and all."""
    next_history: torch.Tensor
    """The history for the next call; without elements where none was given."""


def fp8_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    number_format: str | None = "e4m3fn",
    *,
    transposed: bool = False,
    history: torch.Tensor | None = None,
    power_of_two: bool = False,
    kernel: str | None = None,
) -> Normal:
    """``rms_norm`` and the ``fp8_cast`` of its result with one scale; no gradient flows through it.

    With a history x comes from memory once, and y is written and not read.

    Args:
        x: float32, float16 or bfloat16, any strides; leading dimensions count as rows.
        weight: one number per column, in x's dtype or float32; None for none.
        eps: added to the mean square; finite and not negative.
        number_format: ``e4m3fn`` or ``e5m2``, or on MI300 ``e4m3fnuz`` or ``e5m2fnuz`` (``precision.for_device``);
            None for y alone, with the same bits.
        transposed: also make the transposed copy.
        history: the largest magnitudes of y in earlier calls, newest first, float32: the scale then comes from them,
            unless y's amax exceeds that scale or is far below it (delayed scaling).
        power_of_two: round the scale down to a power of two, which makes scaling itself exact.
        kernel: pin an implementation by name instead of the best that fits.

    Example:
        >>> import torch
        >>> x = torch.tensor([[1.0, -2.0, 2.0], [0.0, 30.0, -40.0]])
        >>> found = fp8_rms_norm(x, torch.tensor([1.0, 1.0, 0.5]), power_of_two=True)
        >>> found.y
        tensor([[ 0.5774, -1.1547,  0.5774],
                [ 0.0000,  1.0392, -0.6928]])
        >>> found.data.float() * found.inverse
        tensor([[ 0.5625, -1.1250,  0.5625],
                [ 0.0000,  1.0000, -0.6875]])
    """
    if isinstance(x, torch.Tensor):
        x = x.detach() if x.ndim <= 2 else x.detach().flatten(0, -2)
    if isinstance(weight, torch.Tensor):
        weight = weight.detach()
    return Normal(*_function(x, weight, eps, number_format, transposed, history, power_of_two, kernel=kernel))


def _supports(call: Call, device: Device) -> str | None:
    if call["number_format"] is not None and not device.supports("float64"):
        return f"computes scales in float64, which {device.arch} does not"
    return None


KERNEL_TRITON = Kernel(
    op="fp8_rms_norm",
    name="triton",
    module="kernel_pytorch.ops.fp8_rms_norm.triton_kernel",
    prepare="kernel_pytorch.ops.fp8_rms_norm.prepared",
    supports=_supports,
    language="triton",
    backward=False,
)
KERNEL_TORCH = Kernel(
    op="fp8_rms_norm",
    name="torch",
    module="kernel_pytorch.ops.fp8_rms_norm.torch_kernel",
    supports=_supports,
    language="torch",
    backward=False,
)
