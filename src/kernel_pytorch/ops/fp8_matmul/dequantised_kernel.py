"""fp8_matmul in plain torch operations: any device, any shape, any pair of granularities.

The 8-bit numbers go into a float32 product as they are, and the scales multiply its result: once, or once for each
128 of the sum. So the numbers that are multiplied have at most four significant bits, and every product is exact
also where the user lets torch round the operands of float32 products to TF32 or bfloat16 on the way
(``torch.set_float32_matmul_precision``). Only the sums round, in float32, also under ``torch.autocast``, which
would have them in bfloat16.
"""

from __future__ import annotations

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.ops.fp8_cast.definition import BLOCK
from kernel_pytorch.ops.fp8_matmul.definition import OUTPUTS, granularities

_HEADROOM = 2.0**40


def _scaled(sums_MN: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``sums * first * second`` without leaving float32 on the way where the result is inside it.

    The sums are 0 or between 2^-27 and about 2^60, the inverse scales between 2^-126 and 2^128. Times the larger
    scale, and 2^40 smaller, a sum overflows nowhere, and loses bits only where the result does too.
    """
    larger, smaller = torch.maximum(first, second), torch.minimum(first, second)
    rest = (smaller * _HEADROOM).clamp_max(torch.finfo(torch.float32).max)  # finite: 0 times it must be 0
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
