"""fp8_matmul in plain torch operations: any device, any shape, any pair of granularities.

The unscaled FP8 values are multiplied by a float32 matmul, and the scales multiply its result: once, or once per 128
elements of K. The operands have at most four significant bits, so every product is exact even if the user lets torch
round the operands of float32 matmuls to TF32 or bfloat16 (``torch.set_float32_matmul_precision``). Only the
accumulation rounds, in float32. ``torch.autocast`` is switched off: it would round to bfloat16.
"""

from __future__ import annotations

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.ops.fp8_cast.definition import BLOCK
from kernel_pytorch.ops.fp8_matmul.definition import OUTPUTS, granularities

_HEADROOM = 2.0**40


def _scaled(sums_MN: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Compute ``sums * first * second`` without intermediate overflow or underflow.

    The sums are 0 or between 2^-27 and about 2^60, the inverse scales between 2^-126 and 2^128. A sum times the
    larger scale times 2^-40 does not overflow, and loses bits only if the result does too.
    """
    larger, smaller = torch.maximum(first, second), torch.minimum(first, second)
    rest = (smaller * _HEADROOM).clamp_max(torch.finfo(torch.float32).max)  # finite, so that 0 times it is 0
    return sums_MN.mul_(1 / _HEADROOM).mul_(larger).mul_(rest)


def _product(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    with torch.autocast(a_MK.device.type, enabled=False):
        return a_MK @ b_NK.t()


def forward(
    device: Device,
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_a: torch.Tensor,
    inverse_b: torch.Tensor,
    dtype: str,
    sums: str,
) -> tuple[torch.Tensor]:
    pair = granularities(a.shape, b.shape, inverse_a.shape, inverse_b.shape)
    a_MK, b_NK = a.to(torch.float32), b.to(torch.float32)
    if pair in (("tensor", "tensor"), ("row", "row")):
        second = inverse_b if inverse_b.ndim == 0 else inverse_b.t()
        return (_scaled(_product(a_MK, b_NK), inverse_a, second).to(OUTPUTS[dtype]),)
    if pair == ("block", "square"):
        inverse_b = inverse_b.repeat_interleave(BLOCK, dim=0)[: b.shape[0]]
    total_MN = a_MK.new_zeros((a.shape[0], b.shape[0]))
    for block in range(inverse_a.shape[1]):
        along = slice(block * BLOCK, (block + 1) * BLOCK)
        sums_MN = _product(a_MK[:, along], b_NK[:, along])
        total_MN += _scaled(sums_MN, inverse_a[:, block, None], inverse_b[None, :, block])
    return (total_MN.to(OUTPUTS[dtype]),)
