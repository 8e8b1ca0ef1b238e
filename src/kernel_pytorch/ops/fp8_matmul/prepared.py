"""``torch._scaled_mm`` prepared once per kind of call, for operands that need no padding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.op import Call, TensorSpec
from kernel_pytorch.ops.fp8_matmul.definition import OUTPUTS, adds_up_fast

__all__ = ["MatmulSpec", "prepare", "scaled_mm", "scaled_mm_call"]


class MatmulSpec(NamedTuple):
    """A kind of scaled matmul of contiguous matrices with tensorwise scales."""

    a_shape: torch.Size
    b_shape: torch.Size
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    dtype: str
    accumulation: str


def prepare(device: Device, spec: MatmulSpec) -> Callable[..., torch.Tensor] | None:
    """Return a function of ``(a, b, inverse_a, inverse_b)``; None if the registry must select a kernel."""
    from kernel_pytorch.ops.fp8_matmul import KERNEL_SCALED_MM, needs_padding

    (_, k), n = spec.a_shape, spec.b_shape[0]
    if needs_padding(k, n) or KERNEL_SCALED_MM.refusal(scaled_mm_call(spec), device) is not None:
        return None
    return partial(scaled_mm, dtype=OUTPUTS[spec.dtype], fast=adds_up_fast(spec.accumulation, k))


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_a: torch.Tensor,
    inverse_b: torch.Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """``torch._scaled_mm`` of a and the transpose of b."""
    return torch._scaled_mm(a, b.t(), inverse_a, inverse_b, out_dtype=dtype, use_fast_accum=fast)


def scaled_mm_call(spec: MatmulSpec) -> Call:
    """Return the spec as the ``Call`` that ``Kernel.supports`` takes."""
    matrices = ((spec.a_shape, spec.a_dtype), (spec.b_shape, spec.b_dtype))
    a, b = (TensorSpec(tuple(shape), (shape[1], 1), dtype, "") for shape, dtype in matrices)
    scale = TensorSpec((), (), torch.float32, "")
    values = (a, b, scale, scale, spec.dtype, spec.accumulation)
    names = ("a", "b", "inverse_a", "inverse_b", "dtype", "sums")
    return Call("fp8_matmul", "forward", tuple(zip(names, values, strict=True)))
