"""Triton RMSNorm and cast prepared once per kind of call, which update counts and the amax history in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernel_pytorch.hardware_abstraction.device import Device

__all__ = ["NormCastSpec", "NormSpec", "prepare"]


class NormSpec(NamedTuple):
    """A kind of RMSNorm, with a cast of its output unless ``number_format`` is None."""

    shape: torch.Size
    stride: tuple[int, ...]
    eps: float
    number_format: str | None
    transposed: bool
    history_length: int
    power_of_two: bool


class NormCastSpec(NamedTuple):
    """A kind of cast of an RMSNorm whose output is not written, from its input and rstd."""

    shape: torch.Size
    stride: tuple[int, ...]
    number_format: str
    history_length: int
    power_of_two: bool
    has_weight: bool


def prepare(device: Device, spec: NormSpec | NormCastSpec) -> Callable[..., Any] | None:
    """Return a function for calls of the kind ``spec``; None if no kernel can serve them.

    A norm takes ``(x, weight, counts, history)`` and returns y, rstd, data, data_t and inverse. A cast takes
    ``(x, rstd, weight, counts, history)`` and returns data, data_t and inverse. Both add to ``counts[0]``.
    """
    from kernel_pytorch.ops.triton_launch import Place

    if not device.supports("float64"):
        return None
    arguments: Any = tuple(spec)
    if isinstance(spec, NormCastSpec):
        from kernel_pytorch.ops.fp8_rms_norm.triton_cast import PreparedNormCast

        cast = PreparedNormCast(device, *arguments)

        def run_cast(
            x: torch.Tensor, rstd: torch.Tensor, weight: Any, counts: torch.Tensor, history: torch.Tensor
        ) -> Any:
            return cast(x, rstd, weight, Place(counts, torch.int64), Place(history, torch.float32))

        return run_cast
    from kernel_pytorch.ops.fp8_rms_norm.triton_kernel import PreparedNorm

    norm = PreparedNorm(device, *arguments)

    def run(x: torch.Tensor, weight: Any, counts: torch.Tensor | None, history: torch.Tensor | None) -> Any:
        return norm(
            x,
            weight,
            None if counts is None else Place(counts, torch.int64),
            None if history is None else Place(history, torch.float32),
        )

    return run
