"""fp8_cast: quantize a matrix to FP8 in both layouts, with scales and saturated, underflowed, non-finite counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import Function
from kernel_pytorch.hardware_abstraction.op import Call, Kernel
from kernel_pytorch.ops.fp8_cast.definition import FP8_CAST, as_matrix, without_float64

__all__ = ["KERNEL_TORCH", "KERNEL_TRITON", "Cast", "fp8_cast", "refusal"]

_function = Function(FP8_CAST)


@dataclass(frozen=True)
class Cast:
    """A matrix in FP8: ``data * inverse`` approximates x, ``data_t * inverse_t`` its transpose."""

    data: torch.Tensor
    """(rows, columns), contiguous."""
    data_t: torch.Tensor
    """(columns, rows), contiguous; (0, 0) if not requested."""
    inverse: torch.Tensor
    """float32, the inverse scales of ``data``, in the shape and layout that ``torch._scaled_mm`` takes."""
    inverse_t: torch.Tensor
    """The same for ``data_t``; empty if not requested."""
    amax: torch.Tensor
    """float32 scalar: the amax of the finite elements of x."""
    counts: torch.Tensor
    """int64 (2, 4), for data and data_t: saturated, underflowed, non-finite and all elements."""
    next_history: torch.Tensor
    """The amax history for the next cast; empty if none was given."""

    @property
    def saturated(self) -> torch.Tensor:
        """The number of finite elements that exceeded the delayed scale, which was then not used."""
        return self.counts[:, 0]

    @property
    def underflowed(self) -> torch.Tensor:
        """The number of nonzero elements that became zero, in ``data`` and in ``data_t``."""
        return self.counts[:, 1]

    @property
    def nonfinite(self) -> torch.Tensor:
        """The number of infinite and NaN elements, which are NaN in ``data`` and in ``data_t``."""
        return self.counts[:, 2]


def fp8_cast(
    x: torch.Tensor,
    number_format: str = "e4m3fn",
    granularity: str = "tensor",
    *,
    transposed: bool = False,
    history: torch.Tensor | None = None,
    power_of_two: bool = False,
    kernel: str | None = None,
) -> Cast:
    """Quantize a matrix to FP8: ``encode(x * scale)``. No gradient flows through it.

    The scale of a group is the largest float32 that keeps the group's amax inside the format, so nothing saturates.
    Every byte is defined; ``definition.py`` has the equations and the purpose of each layout.

    Args:
        x: float32, float16 or bfloat16, any strides; leading dimensions count as rows.
        number_format: ``e4m3fn`` or ``e5m2``, or on MI300 ``e4m3fnuz`` or ``e5m2fnuz``
            (``hardware_abstraction.formats.for_device``).
        granularity: one scale per ``tensor``, per ``row``, per ``block`` (1x128) or per ``square`` (128x128).
        transposed: also return the quantized transpose. For row and block it has scales of its own.
        history: amax of earlier casts, newest first, float32, for delayed scaling (granularity tensor only). The
            scale then comes from the history and x is read once. If x's amax exceeds that scale or is far below it,
            x is requantized with its own amax.
        power_of_two: round the scales down to powers of two, so that scaling is exact.
        kernel: pin an implementation by name instead of the first that can serve the call.

    Example:
        >>> import torch
        >>> x = torch.tensor([[1.0, -2.1, 0.7], [0.0, 3.5, float("inf")]])
        >>> cast = fp8_cast(x)
        >>> cast.data.float() * cast.inverse
        tensor([[ 1.0000, -2.0000,  0.6875],
                [ 0.0000,  3.5000,     nan]])
        >>> cast.amax.item(), cast.nonfinite[0].item(), cast.saturated[0].item()
        (3.5, 1, 0)
    """
    x = as_matrix(x)
    data, data_t, inverse, inverse_t, amax, counts, next_history = _function(
        x, number_format, granularity, transposed, history, power_of_two, kernel=kernel
    )
    inverse_t = inverse if transposed and granularity == "tensor" else inverse_t
    return Cast(data, data_t, inverse, inverse_t, amax, counts, next_history)


def _supports(call: Call, device: Device) -> str | None:
    return without_float64(device)


def refusal(device: Device, shape: tuple[int, ...], granularity: str) -> str | None:
    """Return why the Triton kernel cannot cast such a matrix on the device, or None.

    1x1 float32 input with 128x128 scaling: ptxas 12.8 stores a register that was never written, and on an H200 the
    transposed data was wrong. ``testing.cross_compile`` checks for such stores.
    """
    if granularity == "square" and tuple(shape) == (1, 1):
        return "1x1 input with 128x128 scaling is miscompiled by ptxas 12.8"
    return without_float64(device)


def _triton_supports(call: Call, device: Device) -> str | None:
    return refusal(device, call["x"].shape, call["granularity"])


KERNEL_TRITON = Kernel(
    op="fp8_cast",
    name="triton",
    module="kernel_pytorch.ops.fp8_cast.triton_kernel",
    prepare="kernel_pytorch.ops.fp8_cast.prepared",
    supports=_triton_supports,
    language="triton",
    backward=False,
)
KERNEL_TORCH = Kernel(
    op="fp8_cast",
    name="torch",
    module="kernel_pytorch.ops.fp8_cast.torch_kernel",
    supports=_supports,
    language="torch",
    backward=False,
)
