"""fp8_rms_norm: RMSNorm that returns its result in x's dtype and in FP8, in both layouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import Function
from kernel_pytorch.hardware_abstraction.op import Call, Kernel
from kernel_pytorch.ops.fp8_cast.definition import as_matrix, without_float64
from kernel_pytorch.ops.fp8_rms_norm.definition import FP8_RMS_NORM

__all__ = ["KERNEL_TORCH", "KERNEL_TRITON", "Normal", "fp8_rms_norm"]

_function = Function(FP8_RMS_NORM)


@dataclass(frozen=True)
class Normal:
    """y = RMSNorm of x, quantized: ``data * inverse`` approximates y, ``data_t * inverse`` its transpose.

    With number_format=None all fields except y and rstd are empty.
    """

    y: torch.Tensor
    """(rows, columns), contiguous, in x's dtype."""
    rstd: torch.Tensor
    """float32 (rows,): 1 / sqrt(mean(x^2) + eps). The backward of ``rms_norm`` takes it."""
    data: torch.Tensor
    """(rows, columns), contiguous: byte for byte that of ``fp8_cast`` of y, like all following fields."""
    data_t: torch.Tensor
    """(columns, rows), contiguous; (0, 0) if not requested."""
    inverse: torch.Tensor
    """float32 scalar: the inverse scale of both."""
    amax: torch.Tensor
    """float32 scalar: the amax of the finite elements of y."""
    counts: torch.Tensor
    """int64 (2, 4), for data and data_t: saturated, underflowed, non-finite and all elements."""
    next_history: torch.Tensor
    """The amax history for the next call; empty if none was given."""


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
    """Compute ``rms_norm`` and the tensorwise ``fp8_cast`` of its result. No gradient flows through it.

    With a history, x is read from memory once, and y is written but not read.

    Args:
        x: float32, float16 or bfloat16, any strides; leading dimensions count as rows.
        weight: one element per column, in x's dtype or float32; None for none.
        eps: added to the mean square; finite and not negative.
        number_format: ``e4m3fn`` or ``e5m2``, or on MI300 ``e4m3fnuz`` or ``e5m2fnuz``
            (``hardware_abstraction.formats.for_device``); None for y only, with the same bits.
        transposed: also return the transposed data.
        history: amax of y in earlier calls, newest first, float32, for delayed scaling: the scale comes from it,
            unless y's amax exceeds that scale or is far below it.
        power_of_two: round the scale down to a power of two, so that scaling is exact.
        kernel: pin an implementation by name instead of the first that can serve the call.

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
    if isinstance(weight, torch.Tensor):
        weight = weight.detach()
    return Normal(
        *_function(as_matrix(x), weight, eps, number_format, transposed, history, power_of_two, kernel=kernel)
    )


def _supports(call: Call, device: Device) -> str | None:
    return None if call["number_format"] is None else without_float64(device)


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
