"""fp8_matmul through ``torch._scaled_mm``: the matrix units' own 8-bit product.

Verified: tensor and row granularities on a CPU with torch 2.13, where torch computes it in float32. Not run on any
GPU yet, so no GPU backend lists it.
"""

from __future__ import annotations

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.ops.fp8_matmul.definition import OUTPUTS


def _contiguous(data: torch.Tensor) -> torch.Tensor:
    """As bytes, for not every device copies 8-bit floats with strides."""
    return data if data.is_contiguous() else data.view(torch.uint8).contiguous().view(data.dtype)


def forward(
    device: Device, a: torch.Tensor, b: torch.Tensor, inverse_a: torch.Tensor, inverse_b: torch.Tensor, dtype: str
) -> tuple[torch.Tensor]:
    out: torch.Tensor = torch._scaled_mm(
        _contiguous(a),
        _contiguous(b).t(),
        inverse_a,
        inverse_b.t() if inverse_b.ndim == 2 else inverse_b,
        out_dtype=OUTPUTS[dtype],
        use_fast_accum=False,
    )
    return (out,)
