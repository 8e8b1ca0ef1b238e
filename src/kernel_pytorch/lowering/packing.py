"""Pack integer weights for the C++ operator ``QUANTIZED_LINEAR``: 4 or 8 bits, one scale per group of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_pytorch.lowering.payload import PANEL

__all__ = ["PackedWeights", "pack_quantized_weights", "packing_refusal"]

MOST_INPUTS = 65536  # the int32 accumulator does not overflow


@dataclass(frozen=True)
class PackedWeights:
    """The constant operands and ``ints`` of a ``QUANTIZED_LINEAR``."""

    weights: torch.Tensor
    """int8 (panels, steps, 128): a step holds 4 inputs of 32 outputs, or with 4 bits 8 inputs, two per byte."""
    scales: torch.Tensor
    """float32 (panels, groups, 32)."""
    sums: torch.Tensor
    """float32 (panels, 32): the sum of each output's dequantized weights, to correct for the zero point of x."""
    bits: int
    group: int


def packing_refusal(inputs: int, groups: int, bits: int) -> str | None:
    """Return why weights of a shape cannot be packed, or None.

    Example:
        >>> packing_refusal(32, 5, bits=4)
        'scales has 5 groups for 32 inputs; a group must be a multiple of 8 inputs'
    """
    step = _inputs_of_a_step(bits)
    if groups > 1 and (inputs % groups or inputs // groups % step):
        return f"scales has {groups} groups for {inputs} inputs; a group must be a multiple of {step} inputs"
    if inputs > MOST_INPUTS:
        return f"weight has {inputs} inputs; {MOST_INPUTS} are the most"
    return None


def _inputs_of_a_step(bits: int) -> int:
    return 8 if bits == 4 else 4


def pack_quantized_weights(weight: torch.Tensor, scales: torch.Tensor, *, bits: int) -> PackedWeights:
    """Pack symmetric integer weights.

    Args:
        weight: int8 (outputs, inputs), from -8 to 7 with 4 bits.
        scales: float32 (outputs, groups), one per ``inputs / groups`` consecutive inputs.
        bits: 4 or 8.

    Example:
        >>> packed = pack_quantized_weights(torch.ones(3, 64, dtype=torch.int8), torch.ones(3, 2), bits=4)
        >>> packed.weights.shape, packed.group
        (torch.Size([1, 8, 128]), 32)
    """
    outputs, inputs = weight.shape
    groups = scales.shape[1]
    step = _inputs_of_a_step(bits)
    if bits not in (4, 8):
        raise ValueError(f"bits={bits}: use 4 or 8")
    if weight.dtype != torch.int8:
        raise TypeError(f"weight is {weight.dtype}; pass the integers as torch.int8")
    if bits == 4 and (int(weight.min()) < -8 or int(weight.max()) > 7):
        raise ValueError(f"weight is from {int(weight.min())} to {int(weight.max())}; 4 bits hold -8 to 7")
    refusal = packing_refusal(inputs, groups, bits)
    if refusal is not None:
        raise ValueError(refusal)
    group = inputs // groups if groups > 1 else -(-inputs // step) * step
    more_inputs, more_outputs = groups * group - inputs, -outputs % PANEL
    padded = torch.nn.functional.pad(weight, (0, more_inputs, 0, more_outputs))
    panels = padded.view(-1, PANEL, groups * group // step, step).transpose(1, 2)  # (panels, steps, 32, inputs)
    if bits == 4:
        low, high = (panels + 8).unflatten(-1, (2, 4)).unbind(-2)
        panels = low | high << 4
    wide = torch.nn.functional.pad(scales.float(), (0, 0, 0, more_outputs))
    sums = (padded.view(-1, groups, group).sum(-1).double() * wide.double()).sum(-1)
    return PackedWeights(
        panels.contiguous().view(panels.shape[0], panels.shape[1], PANEL * 4),
        wide.view(-1, PANEL, groups).transpose(1, 2).contiguous(),
        sums.float().view(-1, PANEL),
        bits,
        group,
    )
