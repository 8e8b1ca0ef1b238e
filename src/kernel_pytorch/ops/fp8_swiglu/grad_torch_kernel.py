"""fp8_swiglu_grad in plain torch operations: runs wherever torch does."""

from __future__ import annotations

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.formats import FORMATS, Format
from kernel_pytorch.ops.fp8_cast import torch_kernel as fp8_cast
from kernel_pytorch.ops.fp8_swiglu.definition import gradients


def _turned(h_MF: torch.Tensor, inverse: torch.Tensor, chosen: Format) -> torch.Tensor:
    """Quantize h with a given scale and transpose it as bytes: not every device copies strided FP8 tensors."""
    product = h_MF * inverse.double().reciprocal().float()
    number = h_MF.isfinite() & (product == product)
    inside = torch.where(number, product.clamp(-chosen.largest, chosen.largest), torch.nan)
    data_MF = h_MF.new_empty(h_MF.shape, dtype=chosen.dtype).copy_(inside)
    data_FM = h_MF.new_empty(h_MF.shape[::-1], dtype=torch.uint8)
    return data_FM.copy_(data_MF.view(torch.uint8).t()).view(chosen.dtype)


def forward(
    device: Device,
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    number_format: str,
    h_format: str,
    h_inverse: torch.Tensor | None,
    gate_history: torch.Tensor | None,
    up_history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    dgate_MF, dup_MF, h_MF = gradients(dh.float(), gate.float(), up.float())
    chosen = FORMATS[h_format]
    h_t = h_MF.new_empty((0, 0), dtype=chosen.dtype) if h_inverse is None else _turned(h_MF, h_inverse, chosen)
    dgate, dgate_t, dgate_inverse, _, _, dgate_counts, gate_next = fp8_cast.forward(
        device, dgate_MF, number_format, "tensor", True, gate_history, power_of_two
    )
    dup, dup_t, dup_inverse, _, _, dup_counts, up_next = fp8_cast.forward(
        device, dup_MF, number_format, "tensor", True, up_history, power_of_two
    )
    counts = torch.stack([dgate_counts[0, :3], dup_counts[0, :3]])
    return dgate, dgate_t, dgate_inverse, dup, dup_t, dup_inverse, h_t, counts, gate_next, up_next
