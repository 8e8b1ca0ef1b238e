"""fp8_rms_norm in plain torch operations: runs wherever torch does."""

from __future__ import annotations

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.ops.fp8_cast import torch_kernel as fp8_cast
from kernel_pytorch.ops.fp8_rms_norm.definition import without_cast
from kernel_pytorch.ops.rms_norm import torch_kernel as rms_norm


def forward(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    number_format: str | None,
    transposed: bool,
    history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    y, rstd = rms_norm.forward(device, x, weight, eps)
    if number_format is None:
        return (y, rstd, *without_cast(x))
    data, data_t, inverse, _, amax, counts, next_history = fp8_cast.forward(
        device, y, number_format, "tensor", transposed, history, power_of_two
    )
    return y, rstd, data, data_t, inverse, amax, counts, next_history
