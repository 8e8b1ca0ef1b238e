"""Pretended devices: run kernel selection, and interpreted kernels, as if CPU tensors were on another device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from kernel_pytorch.hardware_abstraction import registry
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import forget_choices
from kernel_pytorch.hardware_abstraction.op import Kernel

__all__ = ["cannot_run", "interpreting", "pretend", "test_device"]


@contextlib.contextmanager
def pretend(device: Device | str, torch_type: str = "cpu") -> Iterator[Device]:
    """Treat tensors of this torch device type as if they were on the given device, inside the block.

    Triton kernels then run in Triton's interpreter if ``TRITON_INTERPRET=1`` was set before their import.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> with pretend("amd/mi300x"):
        ...     kp.explain(kp.rms_norm, torch.ones(2, 64)).kernel.name
        'triton'
    """
    chosen = registry.device(device) if isinstance(device, str) else device
    before = dict(registry._pretended)
    registry._pretended[torch_type] = chosen
    forget_choices()
    try:
        yield chosen
    finally:
        registry._pretended.clear()
        registry._pretended.update(before)
        forget_choices()


def interpreting() -> bool:
    """Return whether Triton kernels imported in this process run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def test_device(backend_name: str) -> Device:
    """Return the device to test a backend on: a present one, else the first of its catalogue."""
    record = registry.backend(backend_name)
    here = [device for device in registry.devices() if device.backend == backend_name]
    if here:
        return here[0]
    if record.catalogue:
        return record.catalogue[0]
    raise ValueError(f"backend {backend_name!r}: no device is here and its catalogue is empty; add a Device to it")


test_device.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it as a test


def cannot_run(kernel: Kernel, device: Device, dtype: torch.dtype) -> str | None:
    """Return why a kernel cannot be executed in this process for this device, or None if it can."""
    if device.present:
        if kernel.language == "triton" and interpreting() and device.backend != "cpu":
            return "TRITON_INTERPRET=1 is set; unset it to test on the device"
        return None
    if kernel.language == "torch":
        return None  # plain torch operations also run on the CPU
    if kernel.language == "triton":
        if not interpreting():
            return f"needs a {device.backend} device, or TRITON_INTERPRET=1 for the interpreter"
        if dtype not in (torch.float32, torch.float16):
            return f"Triton's interpreter computes {str(dtype).removeprefix('torch.')} wrongly"
        return None
    return f"needs a {device.backend} device"
