"""Time a function on a device: events on a GPU, wall-clock times on a CPU, and detection of a busy machine."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from kernel_pytorch.hardware_abstraction.device import Device

__all__ = [
    "MOST_SPREAD",
    "BusyMachineError",
    "median_seconds",
    "quantiles",
    "readable",
    "require_quiet",
    "sample_seconds",
    "spread",
]

MOST_SPREAD = 0.25
"""Largest accepted difference of the 5 % and 95 % quantiles of a repeated run, relative to its median.

The environment variable ``KERNEL_PYTORCH_MOST_SPREAD`` overrides it, for tests on shared machines."""
_ATTEMPTS = 3


class BusyMachineError(RuntimeError):
    """Other programs are running: repeated runs take different times, so nothing can be measured."""


def sample_seconds(
    function: Callable[[], object], device: Device, seconds: float = 0.2, *, least: int = 20
) -> list[float]:
    """Run the function for about ``seconds`` after a warm-up and return the time of each run in seconds.

    There are at least ``least`` runs on a GPU, and three on a CPU. On a GPU the second-level cache is flushed before
    each run, as between the layers of a model, and the device is kept busy while a run is queued, so that the result
    is device time.
    """
    if device.torch_device is None:
        raise ValueError(f"device={device.name!r} is not here; nothing can be timed on it")
    if torch.device(device.torch_device).type == "cpu":
        return _sample_cpu(function, seconds)
    return _sample_accelerator(function, device.torch_device, seconds, least)


def _sample_cpu(function: Callable[[], object], seconds: float) -> list[float]:
    started = time.perf_counter()
    function()  # warm-up
    once = time.perf_counter() - started
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    batch = max(1, int(5e-6 / max(once, 1e-9)))  # reading the clock must take a negligible part
    while len(times) < 3 or time.perf_counter() < deadline:
        started = time.perf_counter()
        for _ in range(batch):
            function()
        times.append((time.perf_counter() - started) / batch)
    return times


def _sample_accelerator(
    function: Callable[[], object], torch_device: str, seconds: float, least: int
) -> list[float]:
    module = torch.get_device_module(torch_device)
    cache = torch.empty(256 << 20, dtype=torch.int8, device=torch_device)  # larger than any L2
    wait = getattr(module, "_sleep", None)  # CUDA and ROCm only

    def timed(count: int) -> list[float]:
        starts = [module.Event(enable_timing=True) for _ in range(count)]
        ends = [module.Event(enable_timing=True) for _ in range(count)]
        for start, end in zip(starts, ends, strict=True):
            cache.zero_()
            if wait is not None:
                wait(2_000_000)  # about a millisecond: long enough to queue a backward pass from Python
            start.record()
            function()
            end.record()
        module.synchronize(torch_device)
        return [start.elapsed_time(end) * 1e-3 for start, end in zip(starts, ends, strict=True)]

    timed(3)
    once = statistics.median(timed(5))
    # Count the flush and the wait of each run too, or short kernels would be sampled for minutes.
    return timed(min(2000, max(least, int(seconds / (once + 1.2e-3)))))


def median_seconds(function: Callable[[], object], device: Device, seconds: float = 0.05) -> float:
    """Return the median time of a run in seconds."""
    return statistics.median(sample_seconds(function, device, seconds))


def readable(seconds: float) -> str:
    """Format a time with a fitting unit.

    Example:
        >>> readable(0.001234), readable(3.2e-8)
        ('1.23 ms', '32 ns')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def quantiles(samples: list[float]) -> tuple[float, float, float]:
    """Return the 20 %, 50 % and 80 % quantiles.

    Example:
        >>> quantiles([1.0, 2.0, 3.0, 4.0, 5.0])
        (1.8, 3.0, 4.2)
    """
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return round(cuts[1], 12), round(cuts[4], 12), round(cuts[7], 12)


def spread(samples: list[float]) -> float:
    """Return the difference of the 5 % and 95 % quantiles relative to the median.

    On busy cores, a run of half a millisecond takes several times as long when it is interrupted; the other runs are
    not affected. So the slowest runs show that other programs are running.

    Example:
        >>> round(spread([1.0, 2.0, 3.0, 4.0, 5.0]), 3)
        1.2
    """
    cuts = statistics.quantiles(samples, n=20, method="inclusive")
    return (cuts[18] - cuts[0]) / cuts[9]


def require_quiet(device: Device) -> None:
    """Time one matmul repeatedly; raise BusyMachineError if its times are far apart in each of three attempts.

    Example:
        >>> import kernel_pytorch as kp
        >>> require_quiet(kp.device("cpu"))  # doctest: +SKIP
    """
    if device.torch_device is None:
        raise ValueError(f"device={device.name!r} is not here; nothing can be timed on it")
    most = float(os.environ.get("KERNEL_PYTORCH_MOST_SPREAD", MOST_SPREAD))
    size = 384 if torch.device(device.torch_device).type == "cpu" else 4096
    left, right = (torch.ones(size, size, device=device.torch_device) for _ in range(2))  # draws no random numbers
    found: list[float] = []
    for _ in range(_ATTEMPTS):
        found.append(spread(sample_seconds(partial(torch.mm, left, right), device, 0.2)))
        if found[-1] <= most:
            return
    raise BusyMachineError(
        f"device={device.name!r} is busy: the times of one repeated matmul are {min(found):.0%} apart (5 % to 95 % "
        f"quantile), and more than {most:.0%} cannot be measured with; end other programs or wait, and run "
        "again"
    )
