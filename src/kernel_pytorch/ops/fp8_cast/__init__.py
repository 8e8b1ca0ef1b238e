"""fp8_cast: a matrix to an 8-bit floating-point format, both layouts, with its scales and what was lost."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import Function
from kernel_pytorch.hardware_abstraction.op import Call, Kernel
from kernel_pytorch.ops.fp8_cast.definition import FP8_CAST

__all__ = ["KERNEL_TORCH", "KERNEL_TRITON", "Cast", "fp8_cast", "refusal"]

_function = Function(FP8_CAST)


@dataclass(frozen=True)
class Cast:
    """A matrix in an 8-bit format: ``data * inverse`` is about x, ``data_t * inverse_t`` about its transpose."""

    data: torch.Tensor
    """(rows, columns), contiguous."""
    data_t: torch.Tensor
    """(columns, rows), contiguous; (0, 0) where it was not asked for."""
    inverse: torch.Tensor
    """float32, one over the scales of ``data``, in the shape and layout that ``torch._scaled_mm`` takes."""
    inverse_t: torch.Tensor
    """The same for ``data_t``; without elements where that was not asked for."""
    amax: torch.Tensor
    """float32, no dimensions: the largest magnitude among the finite numbers of x."""
    counts: torch.Tensor
    """int64 (2, 4), of data and data_t: numbers that outgrew the history, became zero, were not finite; and all."""
    next_history: torch.Tensor
    """The history for the next cast; without elements where none was given."""

    @property
    def saturated(self) -> torch.Tensor:
        """How many finite numbers were too large for the scale of the history, which was then not used."""
        return self.counts[:, 0]

    @property
    def underflowed(self) -> torch.Tensor:
        """How many numbers other than zero became zero, in ``data`` and in ``data_t``."""
        return self.counts[:, 1]

    @property
    def nonfinite(self) -> torch.Tensor:
        """How many numbers were infinite or NaN, and are NaN in ``data`` and in ``data_t``."""
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
    """``encode(x * scale)`` with scales that use the format's range; no gradient flows through it.

    The scale of a group is the largest float32 that keeps the group's largest magnitude inside the format: nothing
    saturates. Every byte is defined, ``definition.py`` has the equations and what each copy is for.

    Args:
        x: float32, float16 or bfloat16, any strides; leading dimensions count as rows.
        number_format: ``e4m3fn`` or ``e5m2``, or on MI300 ``e4m3fnuz`` or ``e5m2fnuz`` (``precision.for_device``).
        granularity: one scale for the ``tensor``, for each ``row``, for each ``block`` of 128 adjacent numbers of a
            row, or for each ``square`` of 128 x 128.
        transposed: also make the transposed copy. For row and block it has scales of its own: it is x's transpose,
            cast.
        history: the largest magnitudes of earlier casts, newest first, float32: the scale then comes from them and
            x is read once, unless its own amax exceeds that scale or is far below it, and then x is cast again with
            a scale of its own (delayed scaling; granularity tensor alone).
        power_of_two: round the scales down to powers of two, which makes scaling itself exact.
        kernel: pin an implementation by name instead of the best that fits.

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
    if isinstance(x, torch.Tensor):
        x = x.detach() if x.ndim <= 2 else x.detach().flatten(0, -2)
    data, data_t, inverse, inverse_t, amax, counts, next_history = _function(
        x, number_format, granularity, transposed, history, power_of_two, kernel=kernel
    )
    inverse_t = inverse if transposed and granularity == "tensor" else inverse_t
    return Cast(data, data_t, inverse, inverse_t, amax, counts, next_history)


def _supports(call: Call, device: Device) -> str | None:
    if not device.supports("float64"):
        return f"computes scales in float64, which {device.arch} does not"
    return None


def refusal(device: Device, shape: tuple[int, ...], granularity: str) -> str | None:
    """Return why the Triton kernel cannot cast such a matrix on the device, or None.

    1x1 float32 input with 128x128 scaling: ptxas 12.8 stores a register that was never written, and on an H200 the
    transposed data was wrong. ``testing.cross_compile`` looks for that.
    """
    if granularity == "square" and tuple(shape) == (1, 1):
        return "1x1 input with 128x128 scaling is miscompiled by ptxas 12.8"
    if not device.supports("float64"):
        return f"computes scales in float64, which {device.arch} does not"
    return None


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
