"""fp8_matmul: scaled matmul of two FP8 matrices."""

from __future__ import annotations

import torch

from kernel_pytorch._compat.modes import graph_tracing
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import TORCH_VERSION, Function
from kernel_pytorch.hardware_abstraction.op import Call, Kernel
from kernel_pytorch.ops.fp8_matmul.definition import BLOCK_PAIRS, FP8_MATMUL, granularities

__all__ = ["KERNEL_DEQUANTISED", "KERNEL_SCALED_MM", "fp8_matmul", "needs_padding"]

_function = Function(FP8_MATMUL)


def fp8_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_a: torch.Tensor,
    inverse_b: torch.Tensor,
    dtype: str = "bfloat16",
    sums: str = "float32",
    *,
    kernel: str | None = None,
) -> torch.Tensor:
    """Compute ``(a * inverse_a) @ (b * inverse_b).t()``, rounded once. No gradient flows through it.

    Args:
        a: (M, K) in an FP8 dtype; any strides, any M, K and N.
        b: (N, K) in an FP8 dtype; a and b must not both be e5m2.
        inverse_a: the inverse scales of a from ``fp8_cast``, float32: tensorwise, rowwise or per 1x128 block.
        inverse_b: those of b: with the granularity of a, or per 128x128 block if a has 1x128 blocks.
        dtype: of the result: ``float32``, ``float16`` or ``bfloat16``.
        sums: the accumulation: ``float32``, ``promoted`` (128 products at a time in the matrix units' accumulators,
            their sum in float32) or ``fast`` (all products in the matrix units' accumulators, if K is at most 16384).
        kernel: pin an implementation by name instead of the first that can serve the call.

    Example:
        >>> import torch
        >>> from kernel_pytorch.ops.fp8_cast import fp8_cast
        >>> x = fp8_cast(torch.tensor([[1.0, 2.0]]), power_of_two=True)
        >>> w = fp8_cast(torch.tensor([[3.0, 0.5], [-1.0, 4.0]]), power_of_two=True)
        >>> fp8_matmul(x.data, w.data, x.inverse, w.inverse, "float32")
        tensor([[4., 7.]])
    """
    if kernel is None and graph_tracing():
        from kernel_pytorch.ops.fp8_matmul import compiled

        if compiled.serves(a, b, inverse_a, inverse_b, dtype, sums):
            return compiled.matmul(a, b, inverse_a, inverse_b, dtype, sums)
    return _function(a, b, inverse_a, inverse_b, dtype, sums, kernel=kernel)[0]


def _dequantised_supports(call: Call, device: Device) -> str | None:
    return None


def needs_padding(k: int, n: int) -> bool:
    """Return whether ``torch._scaled_mm`` takes copies padded with zeros: K and N must be multiples of 16."""
    return k % 16 != 0 or n % 16 != 0


def _scaled_mm_supports(call: Call, device: Device) -> str | None:
    a, b = call["a"], call["b"]
    pair = granularities(a.shape, b.shape, call["inverse_a"].shape, call["inverse_b"].shape)
    blocks = pair in BLOCK_PAIRS
    (m, k), n = a.shape, b.shape[0]
    if 0 in (m, k, n):
        return "does not take empty matrices"
    if blocks and (k % 128 or n % 128 or m % 4):
        return f"needs K and N in multiples of 128 and M of 4 for block scaling; M, K, N are {m}, {k}, {n}"
    if device.backend == "cpu":
        if TORCH_VERSION < (2, 13):
            return f"was checked on a CPU with torch 2.13, and this is {torch.__version__}"
        return "does not support block scaling on a CPU" if blocks else None
    if call["sums"] == "float32":
        return f"accumulates in the matrix units of {device.arch}, not in float32; use sums='promoted'"
    for operand in (a, b):
        if operand.format not in device.matrix_formats:
            return f"the matrix units of {device.arch} do not multiply {operand.format}"
    if pair == ("row", "row") and call["dtype"] != "bfloat16":
        return f"supports rowwise scaling with bfloat16 output only, not {call['dtype']}"
    if blocks and device.arch != "sm_90":
        return f"does not support block scaling on {device.arch}"
    # cuBLAS reads such scales in groups of four; on an H200, torch 2.11 did not check that.
    if pair == ("block", "square") and (k // 128) % 4 and n > 128:
        return f"needs K in multiples of 512 for 128x128 block scaling; K is {k}"
    if blocks and call["sums"] == "fast":
        return "accumulates blocks in float32, so it has no fast accumulation; use sums='promoted'"
    return None


KERNEL_DEQUANTISED = Kernel(
    op="fp8_matmul",
    name="dequantised",
    module="kernel_pytorch.ops.fp8_matmul.dequantised_kernel",
    supports=_dequantised_supports,
    language="torch",
    backward=False,
)
KERNEL_SCALED_MM = Kernel(
    op="fp8_matmul",
    name="scaled-mm",
    module="kernel_pytorch.ops.fp8_matmul.scaled_mm_kernel",
    prepare="kernel_pytorch.ops.fp8_matmul.prepared",
    supports=_scaled_mm_supports,
    language="native",
    backward=False,
)
