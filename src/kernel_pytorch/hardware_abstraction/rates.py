"""Measure a device's memory bandwidth and matmul rates."""

from __future__ import annotations

from functools import partial

import torch

from kernel_pytorch.hardware_abstraction.device import Device, Rates
from kernel_pytorch.hardware_abstraction.timing import median_seconds, require_quiet

__all__ = ["measure_rates"]


def measure_rates(device: Device) -> Rates:
    """Return the bandwidth of a large copy (bytes read plus written) and dense matmul rates, on random data.

    Raises:
        BusyMachineError: other programs are running, so the times would not be the device's own.

    Example:
        >>> import kernel_pytorch as kp
        >>> kp.device("cpu", measure=True).rates.source
        'measured'
    """
    if device.torch_device is None:
        raise ValueError(f"device={device.name!r} is not here; its rates cannot be measured")
    require_quiet(device)
    place = torch.device(device.torch_device)
    on_cpu = place.type == "cpu"
    # Much larger than the caches, much smaller than the memory.
    copied = 256 << 20 if on_cpu else 4 << 30
    if device.memory_bytes:  # 0 if unknown
        copied = min(copied, device.memory_bytes // 8)
    source = torch.empty(copied // 4, dtype=torch.float32, device=place).normal_()
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / median_seconds(partial(target.copy_, source), device, 0.2)
    del source, target

    sizes = (256, 1024) if on_cpu else (8192,)
    matmul: dict[str, float] = {}
    for name in ("float32", "float16", "bfloat16"):
        if name not in device.formats:
            continue
        dtype = getattr(torch, name)
        for size in sizes:
            left = torch.randn(size, size, device=place).to(dtype)
            right = torch.randn(size, size, device=place).to(dtype)
            seconds = median_seconds(partial(torch.matmul, left, right), device, 0.2)
            matmul[name] = 2 * size**3 / seconds
            if seconds > 5e-3:  # no fast instructions for this format: the larger GEMM would take seconds
                break
    return Rates(bandwidth=bandwidth, matmul=matmul, source="measured")
