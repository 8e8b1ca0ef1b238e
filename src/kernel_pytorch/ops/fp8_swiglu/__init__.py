"""fp8_swiglu: silu(gate) * up quantized to FP8, and its gradients quantized to FP8 in both layouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import Function
from kernel_pytorch.hardware_abstraction.op import Call, Kernel
from kernel_pytorch.ops.fp8_cast.definition import as_matrix, without_float64
from kernel_pytorch.ops.fp8_swiglu.definition import FP8_SWIGLU
from kernel_pytorch.ops.fp8_swiglu.grad_definition import FP8_SWIGLU_GRAD

__all__ = [
    "GRAD_KERNEL_TORCH",
    "GRAD_KERNEL_TRITON",
    "Hidden",
    "HiddenGradients",
    "KERNEL_TORCH",
    "KERNEL_TRITON",
    "fp8_swiglu",
    "fp8_swiglu_grad",
]

_function = Function(FP8_SWIGLU)
_function_grad = Function(FP8_SWIGLU_GRAD)


@dataclass(frozen=True)
class Hidden:
    """h = silu(gate) * up in FP8: ``data * inverse`` approximates h."""

    data: torch.Tensor
    """(M, F), contiguous."""
    inverse: torch.Tensor
    """float32 scalar: the inverse scale. ``fp8_swiglu_grad`` takes it too."""
    amax: torch.Tensor
    """float32 scalar: the amax of the finite elements of h."""
    counts: torch.Tensor
    """int64 (3,): saturated, underflowed and non-finite counts."""
    next_history: torch.Tensor
    """The amax history for the next call; empty if none was given."""


@dataclass(frozen=True)
class HiddenGradients:
    """The gradients of gate and up in FP8, in both layouts, and the transposed h."""

    dgate: torch.Tensor
    """(M, F), contiguous: ``dgate * dgate_inverse`` approximates the gradient of gate."""
    dgate_t: torch.Tensor
    """(F, M), contiguous: its transpose, to the byte."""
    dgate_inverse: torch.Tensor
    """float32, no dimensions: one over the scale of both."""
    dup: torch.Tensor
    """(M, F), contiguous: ``dup * dup_inverse`` approximates the gradient of up."""
    dup_t: torch.Tensor
    """(F, M), contiguous: its transpose, to the byte."""
    dup_inverse: torch.Tensor
    """float32, no dimensions: one over the scale of both."""
    h_t: torch.Tensor
    """(F, M), contiguous: ``h_t * h_inverse`` approximates the transpose of h; (0, 0) without an h_inverse."""
    counts: torch.Tensor
    """int64 (2, 3), of dgate and of dup: saturated, underflowed and non-finite counts."""
    gate_next_history: torch.Tensor
    """The amax history of dgate for the next call; empty if none was given."""
    up_next_history: torch.Tensor
    """The amax history of dup for the next call; empty if none was given."""


def fp8_swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    number_format: str = "e4m3fn",
    *,
    history: torch.Tensor | None = None,
    power_of_two: bool = False,
    kernel: str | None = None,
) -> Hidden:
    """Compute ``silu(gate) * up`` in float32 and quantize it tensorwise. No gradient flows through it.

    h is written in FP8 only. With a history, gate and up are read once.

    Args:
        gate: float32, float16 or bfloat16, any strides; leading dimensions count as rows.
        up: of gate's shape and dtype, such as the other half of the columns of one matrix.
        number_format: ``e4m3fn`` or ``e5m2``, or on MI300 ``e4m3fnuz`` or ``e5m2fnuz``
            (``hardware_abstraction.formats.for_device``).
        history: amax of h in earlier calls, newest first, float32, for delayed scaling: the scale comes from it,
            unless h's amax exceeds that scale or is far below it.
        power_of_two: round the scale down to a power of two, so that scaling is exact.
        kernel: pin an implementation by name instead of the first that can serve the call.

    Example:
        >>> import torch
        >>> gate, up = torch.tensor([[2.0, -1.0, 0.0], [5.0, -200.0, 1.0]]), torch.full((2, 3), 2.0)
        >>> h = fp8_swiglu(gate, up, power_of_two=True)
        >>> h.data.float() * h.inverse
        tensor([[ 3.5000, -0.5625,  0.0000],
                [10.0000, -0.0000,  1.5000]])
        >>> h.amax, h.counts.tolist()
        (tensor(9.9331), [0, 0, 0])
    """
    gate, up = as_matrix(gate), as_matrix(up)
    return Hidden(*_function(gate, up, number_format, history, power_of_two, kernel=kernel))


def fp8_swiglu_grad(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    number_format: str = "e5m2",
    h_format: str = "e4m3fn",
    *,
    h_inverse: torch.Tensor | None = None,
    gate_history: torch.Tensor | None = None,
    up_history: torch.Tensor | None = None,
    power_of_two: bool = False,
    kernel: str | None = None,
) -> HiddenGradients:
    """Compute the gradients of ``h = silu(gate) * up`` in float32, and quantize them and h's transpose.

    Each gradient has one scale. With histories, dh, gate and up are read once, and one pass writes all five operands
    of the backward's GEMMs.

    Args:
        dh: the gradient of h, of gate's shape and dtype.
        gate: as passed to ``fp8_swiglu``.
        up: as passed to ``fp8_swiglu``.
        number_format: the format of the gradients, as in ``fp8_swiglu``.
        h_format: the format of ``h_t``: the one passed to ``fp8_swiglu``.
        h_inverse: the ``inverse`` that ``fp8_swiglu`` returned, with which h is requantized; None to omit ``h_t``.
        gate_history: amax of dgate in earlier calls, newest first, float32, for delayed scaling: the scale comes from
            it, unless dgate's amax exceeds that scale or is far below it. Pass both histories or neither.
        up_history: the same for dup, of the same length.
        power_of_two: round the scales down to powers of two, so that scaling is exact.
        kernel: pin an implementation by name instead of the first that can serve the call.

    Example:
        >>> import torch
        >>> gate, up = torch.tensor([[2.0, -1.0, 0.0]]), torch.tensor([[2.0, 2.0, 4.0]])
        >>> h = fp8_swiglu(gate, up)
        >>> found = fp8_swiglu_grad(torch.ones(1, 3), gate, up, "e4m3fn", h_inverse=h.inverse)
        >>> found.dgate.float() * found.dgate_inverse
        tensor([[2.1816, 0.1461, 2.0257]])
        >>> (found.h_t.float() * h.inverse).shape, torch.equal(found.dup_t.float(), found.dup.float().t())
        (torch.Size([3, 1]), True)
    """
    dh, gate, up = as_matrix(dh), as_matrix(gate), as_matrix(up)
    return HiddenGradients(
        *_function_grad(
            dh,
            gate,
            up,
            number_format,
            h_format,
            h_inverse,
            gate_history,
            up_history,
            power_of_two,
            kernel=kernel,
        )
    )


def _supports(call: Call, device: Device) -> str | None:
    return without_float64(device)


KERNEL_TRITON = Kernel(
    op="fp8_swiglu",
    name="triton",
    module="kernel_pytorch.ops.fp8_swiglu.triton_kernel",
    prepare="kernel_pytorch.ops.fp8_swiglu.prepared",
    supports=_supports,
    language="triton",
    backward=False,
)
KERNEL_TORCH = Kernel(
    op="fp8_swiglu",
    name="torch",
    module="kernel_pytorch.ops.fp8_swiglu.torch_kernel",
    supports=_supports,
    language="torch",
    backward=False,
)
GRAD_KERNEL_TRITON = Kernel(
    op="fp8_swiglu_grad",
    name="triton",
    module="kernel_pytorch.ops.fp8_swiglu.grad_triton_kernel",
    prepare="kernel_pytorch.ops.fp8_swiglu.prepared",
    supports=_supports,
    language="triton",
    backward=False,
)
GRAD_KERNEL_TORCH = Kernel(
    op="fp8_swiglu_grad",
    name="torch",
    module="kernel_pytorch.ops.fp8_swiglu.grad_torch_kernel",
    supports=_supports,
    language="torch",
    backward=False,
)
