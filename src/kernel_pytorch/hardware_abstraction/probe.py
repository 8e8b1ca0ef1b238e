"""Probes of the hardware in this machine. They never raise; without a device they return an empty tuple."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from kernel_pytorch.hardware_abstraction.architectures import (
    ARCHITECTURES,
    Architecture,
    amd_architecture,
    nvidia_architecture,
)
from kernel_pytorch.hardware_abstraction.device import Device

__all__ = ["probe_amd", "probe_cpu", "probe_intel", "probe_nvidia"]

Probe = Callable[[], tuple[Device, ...]]


def _never_raises(probe: Probe) -> Probe:
    @wraps(probe)
    def guarded() -> tuple[Device, ...]:
        try:
            return probe()
        except Exception:  # a driver can fail in any way; there is then no usable device
            return ()

    return guarded


@_never_raises
def probe_nvidia() -> tuple[Device, ...]:
    """Return the NVIDIA GPUs that torch.cuda sees."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            nvidia_architecture(properties.major, properties.minor).device(
                properties.name,
                memory_bytes=properties.total_memory,
                compute_units=properties.multi_processor_count,
                warp_size=properties.warp_size,
                shared_memory_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
                torch_device=f"cuda:{index}",
            )
        )
    return tuple(found)


@_never_raises
def probe_amd() -> tuple[Device, ...]:
    """Return the AMD GPUs. A ROCm build of torch has them in torch.cuda."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        architecture = amd_architecture(properties.gcnArchName)
        found.append(
            architecture.device(
                properties.name,
                memory_bytes=properties.total_memory,
                compute_units=properties.multi_processor_count,
                warp_size=properties.warp_size,
                shared_memory_bytes=getattr(
                    properties, "shared_memory_per_block", architecture.shared_memory_bytes
                ),
                torch_device=f"cuda:{index}",
            )
        )
    return tuple(found)


@_never_raises
def probe_intel() -> tuple[Device, ...]:
    """Return the Intel GPUs that torch.xpu sees. Formats and matrix units are from the driver's flags."""
    if not hasattr(torch, "xpu") or not torch.xpu.is_available():
        return ()
    found = []
    for index in range(torch.xpu.device_count()):
        properties = torch.xpu.get_device_properties(index)

        def has(flag: str, properties: Any = properties) -> bool:
            return bool(getattr(properties, flag, False))

        formats = {"float32", "int8"}
        formats |= {"float16"} if has("has_fp16") else set()
        formats |= {"float64"} if has("has_fp64") else set()
        formats |= {"bfloat16"} if has("has_bfloat16_conversions") else set()
        matrix = has("has_subgroup_matrix_multiply_accumulate")
        sub_groups = getattr(properties, "sub_group_sizes", None) or [16]
        found.append(
            Device(
                name=properties.name,
                backend="intel",
                vendor="intel",
                arch=_intel_arch(properties),
                memory_bytes=properties.total_memory,
                # Xe cores, as in the catalogue; SYCL's own max_compute_units counts their vector engines.
                compute_units=int(getattr(properties, "gpu_subslice_count", 0)),
                warp_size=16 if 16 in sub_groups else int(max(sub_groups)),
                shared_memory_bytes=int(getattr(properties, "local_mem_size", 65536)),
                formats=frozenset(formats),
                matrix_formats=frozenset(formats & {"float16", "bfloat16", "int8"}) if matrix else frozenset(),
                matrix_units=frozenset({"xmx"}) if matrix else frozenset(),
                torch_device=f"xpu:{index}",
            )
        )
    return tuple(found)


# Graphics IP release (major, minor) -> family, from the releases Intel's compiler documents.
_INTEL_FAMILIES = {
    (12, 55): "xe-hpg",
    (12, 56): "xe-hpg",
    (12, 57): "xe-hpg",
    (12, 60): "xe-hpc",
    (12, 61): "xe-hpc",
    (20, 1): "xe2-hpg",
}


def _intel_arch(properties: Any) -> str:
    """Return the architecture of the graphics IP release in SYCL's number: major from bit 30, minor in 22 to 29."""
    number = int(getattr(properties, "architecture", 0))
    return _INTEL_FAMILIES.get((number >> 30, (number >> 22) & 0xFF), "xe")


@_never_raises
def probe_cpu() -> tuple[Device, ...]:
    """Return this machine's CPU: its vector instruction set, physical cores and memory."""
    flags = _cpu_flags()
    architecture = _cpu_architecture(flags)
    formats = architecture.formats
    if flags & {"avx512_fp16", "fphp"}:
        formats |= {"float16"}
    return (
        architecture.device(
            _cpu_name(),
            memory_bytes=_memory_bytes(),
            compute_units=_cores(),
            torch_device="cpu",
            formats=formats,
            features=architecture.features | {name for flag, name in _CPU_FEATURES.items() if flag in flags},
        ),
    )


# Linux CPU flag -> feature, as the architecture table names it.
_CPU_FEATURES = {
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "avx512_vnni": "vnni",
    "bf16": "bf16",
    "i8mm": "i8mm",
    "sve": "sve",
}


def _cpu_architecture(flags: frozenset[str]) -> Architecture:
    machine = platform.machine().lower()
    if machine in ("arm64", "aarch64"):
        return ARCHITECTURES["neon"]
    if "amx_tile" in flags and flags & {"amx_bf16", "amx_int8"}:
        return ARCHITECTURES["amx"]
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
        return ARCHITECTURES["avx512"]
    if "avx2" in flags:
        return ARCHITECTURES["avx2"]
    return ARCHITECTURES["scalar"]


def _text_of(path: Path) -> str:
    """Return the contents of a system file, or an empty string if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _cpuinfo() -> str:
    return _text_of(Path("/proc/cpuinfo"))


def _cpu_flags() -> frozenset[str]:
    for line in _cpuinfo().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    # No /proc (macOS, Windows): use the vector instruction set that torch has detected.
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "AVX512": frozenset({"avx2", "avx512f", "avx512bw", "avx512vl", "avx512dq"}),
        "AVX2": frozenset({"avx2"}),
    }.get(capability, frozenset())


def _cpu_name() -> str:
    for line in _cpuinfo().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    """Return the number of physical cores that this process may run on, or of logical ones if that is unknown."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = set()
    for cpu in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(_text_of(path).strip() or str(cpu))
    return len(siblings)


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return 0
