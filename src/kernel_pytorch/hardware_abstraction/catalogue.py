"""Devices that can be named without owning one: their architecture's facts and their data sheet's numbers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from kernel_pytorch.hardware_abstraction.architectures import ARCHITECTURES
from kernel_pytorch.hardware_abstraction.device import Device, Rates

__all__ = ["CATALOGUE", "catalogue_device"]

# What vendors print as GB of device memory counts in 2**30. The driver keeps some of it, most where ECC bits
# live in it (L4), so a probe finds a little less.
_GB = 1 << 30


def _device(
    name: str, arch: str, *, memory_bytes: int = 0, compute_units: int = 0, rates: Rates | None = None
) -> Device:
    return ARCHITECTURES[arch].device(name, memory_bytes=memory_bytes, compute_units=compute_units, rates=rates)


# An entry is what torch shows as one device, which is not always one card. Matmul rates are dense: where a
# data sheet prints the figure for 2:4 sparsity, half of it stands here. float32 without a matrix unit for it
# is the rate of the vector units.
_DEVICES = (
    # NVIDIA A100 Tensor Core GPU data sheet (80GB SXM).
    _device(
        "nvidia/a100",
        "sm_80",
        memory_bytes=80 * _GB,
        compute_units=108,
        rates=Rates(
            bandwidth=2.039e12,
            matmul={
                "float64": 19.5e12,
                "float32": 19.5e12,
                "tfloat32": 156e12,
                "float16": 312e12,
                "bfloat16": 312e12,
                "int8": 624e12,
                "int4": 1248e12,
            },
            source="datasheet",
        ),
    ),
    # NVIDIA L4 Tensor Core GPU data sheet, which prints sparse figures; 7,424 CUDA cores, 128 a
    # multiprocessor.
    _device(
        "nvidia/l4",
        "sm_89",
        memory_bytes=24 * _GB,
        compute_units=58,
        rates=Rates(
            bandwidth=300e9,
            matmul={
                "float32": 30.3e12,
                "tfloat32": 60e12,
                "float16": 121e12,
                "bfloat16": 121e12,
                "float8_e4m3fn": 242.5e12,
                "float8_e5m2": 242.5e12,
                "int8": 242.5e12,
            },
            source="datasheet",
        ),
    ),
    # NVIDIA H100 Tensor Core GPU Architecture white paper, SXM5; bandwidth from the data sheet.
    _device(
        "nvidia/h100",
        "sm_90",
        memory_bytes=80 * _GB,
        compute_units=132,
        rates=Rates(
            bandwidth=3.35e12,
            matmul={
                "float64": 66.9e12,
                "float32": 66.9e12,
                "tfloat32": 494.7e12,
                "float16": 989.4e12,
                "bfloat16": 989.4e12,
                "float8_e4m3fn": 1978.9e12,
                "float8_e5m2": 1978.9e12,
                "int8": 1978.9e12,
            },
            source="datasheet",
        ),
    ),
    # NVIDIA H200 Tensor Core GPU data sheet (SXM): the H100's compute with more and faster memory.
    _device(
        "nvidia/h200",
        "sm_90",
        memory_bytes=141 * _GB,
        compute_units=132,
        rates=Rates(
            bandwidth=4.8e12,
            matmul={
                "float64": 66.9e12,
                "float32": 66.9e12,
                "tfloat32": 494.7e12,
                "float16": 989.4e12,
                "bfloat16": 989.4e12,
                "float8_e4m3fn": 1978.9e12,
                "float8_e5m2": 1978.9e12,
                "int8": 1978.9e12,
            },
            source="datasheet",
        ),
    ),
    # NVIDIA Blackwell architecture technical brief and HGX B200 data sheet (an eighth of the board), the
    # lower where they differ. Their 8 TB/s is rounded up: the driver reports 7680 bits at 3996 MHz
    # (pytorch/ao #4002).
    _device(
        "nvidia/b200",
        "sm_100",
        memory_bytes=180 * _GB,
        compute_units=148,
        rates=Rates(
            bandwidth=7.67e12,
            matmul={
                "float64": 37e12,
                "float32": 75e12,
                "tfloat32": 1.1e15,
                "float16": 2.25e15,
                "bfloat16": 2.25e15,
                "float8_e4m3fn": 4.5e15,
                "float8_e5m2": 4.5e15,
                "float4_e2m1fn_x2": 9e15,
                "int8": 4.5e15,
            },
            source="datasheet",
        ),
    ),
    # NVIDIA RTX Blackwell GPU Architecture white paper, accumulating in float32 as torch does: GeForce halves
    # its float16 and float8 rates for that.
    _device(
        "nvidia/rtx5090",
        "sm_120",
        memory_bytes=32 * _GB,
        compute_units=170,
        rates=Rates(
            bandwidth=1.792e12,
            matmul={
                "float32": 104.8e12,
                "tfloat32": 104.8e12,
                "float16": 209.5e12,
                "bfloat16": 209.5e12,
                "float8_e4m3fn": 419e12,
                "float8_e5m2": 419e12,
                "float4_e2m1fn_x2": 1676e12,
                "int8": 838e12,
            },
            source="datasheet",
        ),
    ),
    # AMD Instinct MI250X data sheet, halved: torch shows each of the card's two dies (GCDs) as a device.
    _device(
        "amd/mi250x",
        "gfx90a",
        memory_bytes=64 * _GB,
        compute_units=110,
        rates=Rates(
            bandwidth=1.6384e12,
            matmul={
                "float64": 47.9e12,
                "float32": 47.9e12,
                "float16": 191.5e12,
                "bfloat16": 191.5e12,
                "int8": 191.5e12,
            },
            source="datasheet",
        ),
    ),
    # AMD Instinct MI300X data sheet; unpartitioned (SPX), as it leaves the factory.
    _device(
        "amd/mi300x",
        "gfx942",
        memory_bytes=192 * _GB,
        compute_units=304,
        rates=Rates(
            bandwidth=5.3e12,
            matmul={
                "float64": 163.4e12,
                "float32": 163.4e12,
                "tfloat32": 653.7e12,
                "float16": 1307.4e12,
                "bfloat16": 1307.4e12,
                "float8_e4m3fnuz": 2614.9e12,
                "float8_e5m2fnuz": 2614.9e12,
                "int8": 2614.9e12,
            },
            source="datasheet",
        ),
    ),
    # AMD Instinct MI355X data sheet; unpartitioned (SPX).
    _device(
        "amd/mi355x",
        "gfx950",
        memory_bytes=288 * _GB,
        compute_units=256,
        rates=Rates(
            bandwidth=8.0e12,
            matmul={
                "float64": 78.6e12,
                "float32": 157.3e12,
                "float16": 2516.6e12,
                "bfloat16": 2516.6e12,
                "float8_e4m3fn": 5033.2e12,
                "float8_e5m2": 5033.2e12,
                "float4_e2m1fn_x2": 10066.3e12,
                "int8": 5033.2e12,
            },
            source="datasheet",
        ),
    ),
    # AMD Radeon RX 7900 XTX product page; WMMA does 512 operations per clock and compute unit (GPUOpen, "How
    # to accelerate AI applications on RDNA 3 using WMMA"), here at 2.5 GHz. torch counts the 96 compute units
    # in pairs: HIP's multiprocessor on RDNA is the work-group processor.
    _device(
        "amd/rx7900xtx",
        "gfx1100",
        memory_bytes=24 * _GB,
        compute_units=48,
        rates=Rates(
            bandwidth=960e9,
            matmul={
                "float32": 61.4e12,
                "float16": 122.8e12,
                "bfloat16": 122.8e12,
                "int8": 122.8e12,
            },
            source="datasheet",
        ),
    ),
    # Intel Data Center GPU Max 1550 product specifications; XMX does 4096 float16 operations per clock and Xe
    # core (oneAPI GPU Optimization Guide), here at 1.6 GHz. One of the card's two stacks ("tiles"): Level
    # Zero shows each as a device unless ZE_FLAT_DEVICE_HIERARCHY says otherwise, so that is what torch sees.
    _device(
        "intel/max1550",
        "xe-hpc",
        memory_bytes=64 * _GB,
        compute_units=64,
        rates=Rates(
            bandwidth=1.6384e12,
            matmul={
                "float32": 26.2e12,
                "tfloat32": 209.7e12,
                "float16": 419.4e12,
                "bfloat16": 419.4e12,
                "int8": 838.8e12,
            },
            source="datasheet",
        ),
    ),
    # Intel Arc B580 product specifications: 233 TOPS in int8; XMX does half as many operations in 16 bits.
    _device(
        "intel/b580",
        "xe2-hpg",
        memory_bytes=12 * _GB,
        compute_units=20,
        rates=Rates(
            bandwidth=456e9,
            matmul={
                "float32": 13.7e12,
                "float16": 116.5e12,
                "bfloat16": 116.5e12,
                "int8": 233e12,
            },
            source="datasheet",
        ),
    ),
    # Classes of machine, so memory, cores and rates are not theirs to give.
    _device("cpu/avx2", "avx2"),
    _device("cpu/avx512", "avx512"),
    _device("cpu/amx", "amx"),
    _device("cpu/neon", "neon"),
)

CATALOGUE: Mapping[str, Device] = MappingProxyType({known.name: known for known in _DEVICES})


def catalogue_device(name: str) -> Device:
    """The catalogue's device of this name; an unknown name is an error that lists the known ones.

    Example:
        >>> h200 = catalogue_device("nvidia/h200")
        >>> h200.arch, h200.compute_units, h200.present
        ('sm_90', 132, False)
    """
    if name in CATALOGUE:
        return CATALOGUE[name]
    # 0.5 and not the default 0.6, so that a bare "h200" still finds "nvidia/h200".
    close = difflib.get_close_matches(name.lower(), CATALOGUE, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(repr(match) for match in close)}?" if close else "."
    raise ValueError(f"name={name!r}: not in the catalogue{hint} It has {', '.join(CATALOGUE)}")
