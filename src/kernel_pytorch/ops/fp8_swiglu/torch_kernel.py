"""fp8_swiglu in plain torch operations: runs wherever torch does."""

from __future__ import annotations

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.ops.fp8_cast import torch_kernel as fp8_cast
from kernel_pytorch.ops.fp8_swiglu.definition import hidden


def forward(
    device: Device,
    gate: torch.Tensor,
    up: torch.Tensor,
    number_format: str,
    history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    h_MF = hidden(gate.float(), up.float())
    data, _, inverse, _, amax, counts, next_history = fp8_cast.forward(
        device, h_MF, number_format, "tensor", False, history, power_of_two
    )
    return data, inverse, amax, counts[0, :3], next_history
