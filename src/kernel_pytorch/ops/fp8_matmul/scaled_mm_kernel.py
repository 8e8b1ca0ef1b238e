"""fp8_matmul by ``torch._scaled_mm``, on FP8 matrix units.

torch requires K and N in multiples of 16; other sizes are padded with zeros in a copy. Verified on a CPU with torch
2.13, which computes it in float32, and on an H200 with torch 2.11.
"""

from __future__ import annotations

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.ops.fp8_matmul.definition import OUTPUTS, adds_up_fast

_MULTIPLE = 16


def _filled(data: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the data contiguous and padded with zeros, copied as bytes: not every device copies strided FP8."""
    if data.shape == (rows, columns):
        return data if data.is_contiguous() else data.view(torch.uint8).contiguous().view(data.dtype)
    filled = data.new_zeros((rows, columns), dtype=torch.uint8)
    filled[: data.shape[0], : data.shape[1]] = data.view(torch.uint8)
    return filled.view(data.dtype)


def _up(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE


def forward(
    device: Device,
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_a: torch.Tensor,
    inverse_b: torch.Tensor,
    dtype: str,
    sums: str,
) -> tuple[torch.Tensor]:
    (m, k), n = a.shape, b.shape[0]
    if inverse_b.ndim == 2:
        if n % _MULTIPLE and inverse_b.shape == (n, 1):
            inverse_b = torch.nn.functional.pad(inverse_b, (0, 0, 0, _up(n) - n), value=1.0)
        inverse_b = inverse_b.t()
    out: torch.Tensor = torch._scaled_mm(
        _filled(a, m, _up(k)),
        _filled(b, _up(n), _up(k)).t(),
        inverse_a,
        inverse_b,
        out_dtype=OUTPUTS[dtype],
        use_fast_accum=adds_up_fast(sums, k),
    )
    return (out if out.shape[1] == n else out[:, :n].contiguous(),)
