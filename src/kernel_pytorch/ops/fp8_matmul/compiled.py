"""fp8_matmul under torch.compile: ``torch._scaled_mm`` directly, which compiled code calls without Python overhead.

Imported while compiling only: ``assume_constant_result`` imports ``torch._dynamo``.
"""

from __future__ import annotations

import torch

from kernel_pytorch.hardware_abstraction.policy_scope import effective_policy
from kernel_pytorch.hardware_abstraction.registry import device_of
from kernel_pytorch.hardware_abstraction.selection import Policy
from kernel_pytorch.ops.fp8_matmul.definition import OUTPUTS, adds_up_fast
from kernel_pytorch.ops.fp8_matmul.prepared import MatmulSpec, prepare, scaled_mm

__all__ = ["matmul", "serves"]


def serves(
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_a: torch.Tensor,
    inverse_b: torch.Tensor,
    dtype: str,
    accumulation: str,
) -> bool:
    """Return whether ``torch._scaled_mm`` would be prepared for the call, on CUDA with tensorwise scales."""
    if a.device.type != "cuda" or inverse_a.ndim != 0 or inverse_b.ndim != 0:
        return False
    # Only these facts about symbolic sizes become guards; torch requires M in multiples of 16 too.
    aligned = all(size % 16 == 0 and size > 0 for size in (a.shape[1], b.shape[0], a.shape[0]))
    return aligned and _preferred(a.device.index, a.dtype, b.dtype, dtype, accumulation)


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_a: torch.Tensor,
    inverse_b: torch.Tensor,
    dtype: str,
    accumulation: str,
) -> torch.Tensor:
    """Compute the matmul like the kernel scaled-mm."""
    return scaled_mm(a, b, inverse_a, inverse_b, OUTPUTS[dtype], adds_up_fast(accumulation, a.shape[1]))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _preferred(
    index: int | None, a_dtype: torch.dtype, b_dtype: torch.dtype, dtype: str, accumulation: str
) -> bool:
    device = device_of(torch.device("cuda") if index is None else torch.device("cuda", index))
    plain = effective_policy("fp8_matmul", None) == Policy().encoded
    size = torch.Size((16, 16))
    spec = MatmulSpec(size, size, a_dtype, b_dtype, dtype, accumulation)
    return plain and device.backend == "nvidia" and prepare(device, spec) is not None
