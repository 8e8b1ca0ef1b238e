"""fp8_matmul inside torch.compile: torch's own operator, which the compiler calls without Python in between.

A module of its own, imported while compiling: what marks a function as constant to the compiler loads all of it.
"""

from __future__ import annotations

import torch

from kernel_pytorch.hardware_abstraction import dispatch
from kernel_pytorch.hardware_abstraction.registry import device_of
from kernel_pytorch.hardware_abstraction.selection import Policy
from kernel_pytorch.ops.fp8_matmul.definition import OUTPUTS, adds_up_fast

__all__ = ["product", "serves"]


def serves(a: torch.Tensor, b: torch.Tensor, inverse_a: torch.Tensor, sums: str) -> bool:
    """Whether torch's own product would be chosen for a call: with scales of tensors on a GPU that has it."""
    multiples = all(size % 16 == 0 and size > 0 for size in (a.shape[1], b.shape[0], a.shape[0]))
    whole = inverse_a.ndim == 0 and sums != "float32"
    return a.device.type == "cuda" and whole and multiples and _has_units(a.device.index)


def product(
    a: torch.Tensor, b: torch.Tensor, inverse_a: torch.Tensor, inverse_b: torch.Tensor, dtype: str, sums: str
) -> torch.Tensor:
    """As the kernel scaled-mm computes it."""
    fast = adds_up_fast(sums, a.shape[1])
    return torch._scaled_mm(a, b.t(), inverse_a, inverse_b, out_dtype=OUTPUTS[dtype], use_fast_accum=fast)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_units(index: int | None) -> bool:
    device = device_of(torch.device("cuda") if index is None else torch.device("cuda", index))
    multiplies = {"float8_e4m3fn", "float8_e5m2"} <= set(device.matrix_formats)
    plain = dispatch.effective_policy("fp8_matmul", None) == Policy().encoded
    return device.backend == "nvidia" and multiplies and plain
