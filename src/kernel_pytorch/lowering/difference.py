"""Compare the outputs of a lowered program with those of eager PyTorch: largest difference and SNR."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from kernel_pytorch._compat.structures import pytree

__all__ = ["Difference", "differences"]


@dataclass(frozen=True)
class Difference:
    """The difference of one output from eager PyTorch."""

    output: int
    largest: float
    """The largest absolute difference."""
    snr: float
    """Signal-to-noise ratio in decibels; infinite if the outputs are equal."""

    def __str__(self) -> str:
        return f"output {self.output}: largest difference {self.largest:.3g}, {self.snr:.1f} dB"


def difference(output: int, found: torch.Tensor, wanted: torch.Tensor) -> Difference:
    if found.shape != wanted.shape:
        raise AssertionError(f"output {output} has shape {list(found.shape)}, eager {list(wanted.shape)}")
    exact, noise = wanted.double(), found.double() - wanted.double()
    if exact.numel() == 0 or not bool(noise.any()):
        return Difference(output, 0.0, math.inf)
    power = exact.square().sum().item()
    ratio = power / noise.square().sum().item()
    return Difference(output, noise.abs().max().item(), 10 * math.log10(ratio) if ratio > 0 else -math.inf)


def differences(found: Any, wanted: Any) -> tuple[Difference, ...]:
    """Return the difference of each output of a program from eager PyTorch's."""
    pairs = pytree.tree_leaves(found), pytree.tree_leaves(wanted)
    if len(pairs[0]) != len(pairs[1]):
        raise AssertionError(f"the program has {len(pairs[0])} outputs, eager {len(pairs[1])}")
    return tuple(difference(n, *pair) for n, pair in enumerate(zip(*pairs, strict=True)))
