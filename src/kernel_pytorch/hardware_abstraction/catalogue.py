"""Catalogue of devices, usable without the hardware: facts of the architecture and numbers of the data sheet."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kernel_pytorch.hardware_abstraction.architectures import ARCHITECTURES
from kernel_pytorch.hardware_abstraction.device import Device, Rates

__all__ = ["CATALOGUE", "catalogue_device", "catalogue_of"]

# What vendors print as GB of device memory counts in 2**30. The driver keeps some of it, most where ECC bits
# live in it (L4), so a probe finds a little less.
_GB = 1 << 30
_MIB = 1 << 20

# What is cited more than once.
_A100 = "NVIDIA A100 Tensor Core GPU data sheet (80GB SXM)"
_H100 = "NVIDIA H100 Tensor Core GPU Architecture white paper, SXM5; bandwidth from the data sheet"
_H100_TABLE = "https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html, which repeats NVIDIA's data sheet"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet (SXM): the H100's compute with more and faster memory"
_B200 = (
    "NVIDIA Blackwell architecture technical brief and HGX B200 data sheet (an eighth of the board), the lower where "
    "they differ; their 8 TB/s is rounded up, see https://github.com/pytorch/ao/pull/4002"
)
_B200_DRIVER = "what the driver reports: https://github.com/pytorch/ao/pull/4002"
_BLACKWELL_ULTRA = "https://verda.com/blog/gb300-nvl72-architecture: table of GB300, GB200, B300 and B200"
_L40S = "NVIDIA L40S data sheet, https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"
_RTX4090 = "NVIDIA Ada GPU Architecture white paper; https://waredb.com/processor/nvidia-geforce-rtx-4090"
_RTX_PRO = "https://gpu.name/posts/nvidia-unveils-rtx-pro-6000-blackwell-gpu-with-24-064-cores-and-96gb-memory"
_GB202 = "https://www.topcpu.net/es/news/nvidia-launches-96gb-rtx-5090-model-with-a-whopping-price-tag-of-10000"
_RTX_BLACKWELL = (
    "NVIDIA RTX Blackwell GPU Architecture white paper, accumulating in float32 as torch does: GeForce halves its "
    "float16 and float8 rates for that"
)
_ROCM = "ROCm documentation, 'AMD GPU specifications': https://rocm.docs.amd.com/en/latest/reference/gpu-specs.html"
_MI250X = "https://zexron.com/amd-mi250-x-aldebaran-as-mcm-with-up-to-479-teraflop-s-and-560-watt-tdp"
_MI325X = "AMD Instinct MI325X data sheet, as in https://awesomeagents.ai/hardware/amd-mi325x"
_MI350X = "AMD Instinct MI350X GPU brochure, as PyTorch keeps it in torch/_inductor/analysis/device_info.py"
_MI350_POWER = (
    "AMD at Hot Chips 2025, https://wccftech.com/amd-instinct-mi350-gpuai-hardware-powerhouse-3nm-3d-chiplet"
)
_RX9070XT = "AMD Radeon RX 9070 XT, https://multiplayer.it/notizie/amd-radeon-rx-9070-xt-rx-9070-specifiche.html"
_MAX1550 = "https://glennklockwood.com/garden/processors/pvc, from Intel's product specifications"
_ARC = "https://fpsbench.com/compare/gpu/intel-arc-b580-vs-intel-uhd-graphics-730"
_GAUDI3 = "Intel at Hot Chips 2024, 'Intel Gaudi 3 AI Accelerator': https://www.sgpjbg.com/baogao/465025.html"
_GRACE = "https://developer.nvidia.com/blog/nvidia-grace-cpu-superchip-architecture-in-depth/"
_GRAVITON = "AWS Graviton Technical Guide: https://github.com/aws/aws-graviton-getting-started"
_M4_MAX = "Apple's announcement, https://macmegasite.com/2024/10/30/m4-max-chip-has-16-core-cpu-40-core-gpu"

# Why a format has no rate.
_NOT_PRINTED = "the data sheet prints none"
_NO_MATRIX_UNIT = "no matrix unit multiplies it, and the data sheet prints none"
_NOT_FOUND = "no source was found"


def _device(
    name: str,
    arch: str,
    *,
    backend: str | None = None,
    vendor: str = "",
    memory_gb: int = 0,
    units: int = 0,
    l2_mib: float | None = None,
    link: tuple[str, float | None] | None = None,
    watts: int | None = None,
    bandwidth: float | None = None,
    tera: Mapping[str, float] | None = None,
    unknown: Mapping[str, str] | None = None,
    sources: Mapping[str, str] | None = None,
    formats: str = "",
    features: str = "",
) -> Device:
    """Return a catalogue entry. Keys are names of formats or fields, separated by spaces where they share a value.

    Args:
        name: ``"vendor/model"``.
        arch: of ``ARCHITECTURES``, or torch's kind of device where no backend describes it.
        backend: the architecture's when left out; ``"generic"`` where no backend describes the device.
        vendor: the architecture's when left out.
        memory_gb: device memory as the vendor prints it.
        units: multiprocessors, compute units, Xe cores, TPCs or physical cores.
        l2_mib: second-level cache of the whole device.
        link: the interconnect to its peers, and its bytes per second in total, sent plus received.
        watts: maximum power.
        bandwidth: bytes per second through device memory.
        tera: 10^12 multiply-adds a second, times two, by format.
        unknown: formats without a rate, with the reason.
        sources: the source of each fact, or why it is unknown.
        formats: the formats of a device whose architecture is not listed.
        features: in addition to the architecture's.
    """
    rates = None
    if bandwidth is not None:
        spread = {one: rate * 1e12 for names, rate in (tera or {}).items() for one in names.split()}
        reasons = {one: reason for names, reason in (unknown or {}).items() for one in names.split()}
        rates = Rates(bandwidth=bandwidth, matmul=spread, unknown=reasons, source="datasheet")
    facts: dict[str, Any] = {
        "l2_bytes": None if l2_mib is None else int(l2_mib * _MIB),
        "interconnect": link[0] if link else None,
        "interconnect_bandwidth": link[1] if link else None,
        "power_watts": watts,
        "rates": rates,
        "sources": {one: text for names, text in (sources or {}).items() for one in names.split()},
    }
    memory_bytes = memory_gb * _GB
    if arch in ARCHITECTURES:
        known = ARCHITECTURES[arch]
        if features:
            facts["features"] = known.features | set(features.split())
        if vendor:
            facts["vendor"] = vendor
        return known.device(name, memory_bytes=memory_bytes, compute_units=units, **facts)
    return Device(
        name=name,
        backend=backend or "generic",
        vendor=vendor,
        arch=arch,
        memory_bytes=memory_bytes,
        compute_units=units,
        warp_size=1,
        shared_memory_bytes=0,
        formats=frozenset(formats.split()),
        **facts,
    )


_HOPPER = {
    "float64 float32": 66.9,
    "tfloat32": 494.7,
    "float16 bfloat16": 989.4,
    "float8_e4m3fn float8_e5m2 int8": 1978.9,
}
_CDNA3 = {
    "float64 float32": 163.4,
    "tfloat32": 653.7,
    "float16 bfloat16": 1307.4,
    "float8_e4m3fnuz float8_e5m2fnuz int8": 2614.9,
}

# An entry is what torch shows as one device, which is not always one card. Matmul rates are dense: where a
# data sheet prints the figure for 2:4 sparsity, half of it stands here. float32 without a matrix unit for it
# is the rate of the vector units. Where sources disagree, the lower figure stands here.
_DEVICES = (
    _device(
        "nvidia/a100", "sm_80", memory_gb=80, units=108, l2_mib=40, link=("NVLink 3", 600e9), watts=400,
        bandwidth=2.039e12,
        tera={"float64 float32": 19.5, "tfloat32": 156, "float16 bfloat16": 312, "int8": 624, "int4": 1248},
        sources={
            "memory_bytes compute_units rates": _A100,
            "l2_bytes interconnect power_watts": "https://www.thundercompute.com/blog/nvidia-a100-specs-full-guide",
        },
    ),
    _device(
        "nvidia/l4", "sm_89", memory_gb=24, units=58, bandwidth=300e9,
        tera={
            "float32": 30.3, "tfloat32": 60, "float16 bfloat16": 121, "float8_e4m3fn float8_e5m2 int8": 242.5,
        },
        unknown={"float64": _NO_MATRIX_UNIT, "int4": _NOT_PRINTED},
        sources={
            "memory_bytes compute_units rates":
                "NVIDIA L4 Tensor Core GPU data sheet, which prints sparse figures; 7,424 CUDA cores, 128 each",
            "l2_bytes interconnect power_watts": f"unknown: {_NOT_FOUND}",
        },
    ),
    _device(
        "nvidia/l40s", "sm_89", memory_gb=48, units=142, link=("PCIe 4.0 x16", 64e9), watts=350, bandwidth=864e9,
        tera={"float32": 91.6, "tfloat32": 183, "float16 bfloat16": 362.05, "float8_e4m3fn float8_e5m2": 733},
        unknown={"float64": _NO_MATRIX_UNIT, "int8 int4": _NOT_FOUND},
        sources={
            "memory_bytes rates power_watts": f"{_L40S}, repeated at https://www.mullet.se/product.html?product_id=355414",
            "compute_units": f"{_L40S}: 18,176 CUDA cores, 128 a multiprocessor",
            "interconnect": "https://www.itcreations.com/nvidia-gpu/nvidia-l40s-gpu-accelerator",
            "l2_bytes": "unknown: sources disagree (48 MB, and 96 MB for the whole AD102)",
        },
    ),
    _device(
        "nvidia/rtx4090", "sm_89", memory_gb=24, units=128, l2_mib=72, watts=450,
        bandwidth=1.008e12,
        tera={
            "float32 tfloat32": 82.58, "float16 bfloat16": 165.15, "float8_e4m3fn float8_e5m2": 330.3,
            "int8": 660.6, "int4": 1321.2, "float64": 1.29,
        },
        sources={
            "memory_bytes compute_units l2_bytes rates": f"{_RTX4090}, accumulating in float32 as torch does",
            "power_watts": "https://www.thefpsreview.com/gpu-family/nvidia-geforce-rtx-4090-gpu-family-specifications",
            "interconnect": f"unknown: {_NOT_FOUND}",
        },
    ),
    _device(
        "nvidia/h100", "sm_90", memory_gb=80, units=132, l2_mib=50, link=("NVLink 4", 900e9), watts=700,
        bandwidth=3.35e12, tera=_HOPPER,
        sources={
            "memory_bytes compute_units rates": _H100, "l2_bytes interconnect power_watts": _H100_TABLE,
        },
    ),
    _device(
        "nvidia/h200", "sm_90", memory_gb=141, units=132, l2_mib=50, link=("NVLink 4", 900e9), watts=700,
        bandwidth=4.8e12, tera=_HOPPER,
        sources={
            "memory_bytes compute_units rates": _H200,
            "l2_bytes": f"as the H100, whose chip it has: {_H100_TABLE}",
            "interconnect power_watts":
                "NVIDIA's MLPerf entry H200-SXM-141GBx8: https://github.com/mlcommons/inference_results_v4.1",
        },
    ),
    _device(
        "nvidia/gh200", "sm_90", memory_gb=96, units=132, l2_mib=50, link=("NVLink-C2C, NVLink 4", 900e9),
        bandwidth=3.35e12, tera=_HOPPER,
        sources={
            "memory_bytes compute_units": "https://wikimili.com/en/Hopper_(microarchitecture): the one with HBM3",
            "rates l2_bytes": f"the GPU is an H100 with more HBM3, so its bandwidth is at least the H100's: {_H100}",
            "interconnect": f"{_GRACE}: 900 GB/s between the CPU and the GPU",
            "power_watts": "unknown: up to 1000 W is printed for the module with its CPU, none for the GPU",
        },
    ),
    _device(
        "nvidia/b200", "sm_100", memory_gb=180, units=148, l2_mib=126.5, link=("NVLink 5", 1.8e12), watts=1000,
        bandwidth=7.67e12,
        tera={
            "float64": 37, "float32": 75, "tfloat32": 1100, "float16 bfloat16": 2250,
            "float8_e4m3fn float8_e5m2 int8": 4500, "float4_e2m1fn_x2": 9000,
        },
        sources={
            "memory_bytes rates": _B200, "compute_units l2_bytes": _B200_DRIVER,
            "interconnect power_watts": _BLACKWELL_ULTRA,
        },
    ),
    _device(
        "nvidia/gb200", "sm_100", memory_gb=186, link=("NVLink 5", 1.8e12), watts=1200, bandwidth=7.7e12,
        tera={
            "float32": 75, "tfloat32": 1100, "float16 bfloat16": 2250, "float8_e4m3fn float8_e5m2 int8": 4500,
            "float4_e2m1fn_x2": 9000,
        },
        unknown={"float64": "sources disagree"},
        sources={
            "memory_bytes": "MLPerf entry GB200-NVL72_GB200-186GB: https://github.com/mlcommons/inference_results_v6.1",
            "compute_units l2_bytes": f"unknown: {_NOT_FOUND}",
            "rates interconnect power_watts": f"{_BLACKWELL_ULTRA}; one of the superchip's two GPUs",
        },
    ),
    _device(
        "nvidia/b300", "sm_103", memory_gb=268, link=("NVLink 5", 1.8e12), watts=1100, bandwidth=7.7e12,
        tera={
            "float64": 1.25, "float32": 75, "tfloat32": 1100, "float16 bfloat16": 2250,
            "float8_e4m3fn float8_e5m2": 4500, "float4_e2m1fn_x2": 13125, "int8": 125,
        },
        sources={
            "memory_bytes": "what the driver shows of 288 GB: runs on 'NVIDIA B300 SXM6 AC' in public logs",
            "compute_units l2_bytes": f"unknown: {_NOT_FOUND}",
            "rates":
                "an eighth of the HGX B300, https://www.fibermall.com/blog/nvidia-hgx-b300-overview.htm and "
                f"https://glennklockwood.com/garden/processors/B300; bandwidth from {_BLACKWELL_ULTRA}",
            "interconnect power_watts": _BLACKWELL_ULTRA,
        },
    ),
    _device(
        "nvidia/rtx5090", "sm_120", memory_gb=32, units=170, l2_mib=96, watts=575,
        bandwidth=1.792e12,
        tera={
            "float32 tfloat32": 104.8, "float16 bfloat16": 209.5, "float8_e4m3fn float8_e5m2": 419,
            "float4_e2m1fn_x2": 1676, "int8": 838,
        },
        unknown={"float64": _NO_MATRIX_UNIT},
        sources={
            "memory_bytes compute_units rates": _RTX_BLACKWELL, "l2_bytes": _GB202,
            "power_watts": "https://www.svethardware.cz/nvidia-rozesila-testovaci-vzorky-rtx-pro-6000-x-s-96-gb-vram/61667",
            "interconnect": f"unknown: {_NOT_FOUND}",
        },
    ),
    _device(
        "nvidia/rtxpro6000", "sm_120", memory_gb=96, units=188, l2_mib=128, link=("PCIe 5.0 x16", 128e9), watts=600,
        bandwidth=1.792e12, tera={"float32": 125, "float4_e2m1fn_x2": 2000},
        unknown={
            "float64": _NO_MATRIX_UNIT, "tfloat32 float16 bfloat16 float8_e4m3fn float8_e5m2 int8": _NOT_FOUND,
        },
        sources={
            "memory_bytes power_watts": f"{_RTX_PRO}; Workstation Edition",
            "compute_units l2_bytes rates": f"{_GB202}: 4000 TOPS in float4 with sparsity",
            "interconnect": f"{_RTX_PRO}; 64 GB/s in each direction over 16 lanes of PCI Express 5.0",
        },
    ),
    _device(
        "amd/mi250x", "gfx90a", memory_gb=64, units=110, l2_mib=8, watts=280, link=("Infinity Fabric", None),
        bandwidth=1.6384e12, tera={"float64 float32": 47.9, "float16 bfloat16 int8": 191.5},
        sources={
            "power_watts": f"{_MI250X}: 560 W for both dies",
            "memory_bytes compute_units rates":
                "AMD Instinct MI250X data sheet, halved: torch shows each of the card's two dies (GCDs) as a device",
            "l2_bytes": _ROCM, "interconnect": f"{_MI250X}: eight links; bandwidth unknown: {_NOT_FOUND}",
        },
    ),
    _device(
        "amd/mi300x", "gfx942", memory_gb=192, units=304, l2_mib=32, watts=750, link=("Infinity Fabric", 896e9),
        bandwidth=5.3e12, tera=_CDNA3,
        sources={
            "power_watts": "https://yobitel.com/knowledge-base/amd-mi325x: table of MI325X and MI300X",
            "memory_bytes compute_units rates":
                "AMD Instinct MI300X data sheet; unpartitioned (SPX), as it leaves the factory",
            "l2_bytes": _ROCM, "interconnect": "AMD Instinct MI300X data sheet: seven links, 64 GB/s a direction",
        },
    ),
    _device(
        "amd/mi325x", "gfx942", memory_gb=256, units=304, l2_mib=32, watts=1000, link=("Infinity Fabric", None),
        bandwidth=6e12, tera=_CDNA3,
        sources={
            "rates": f"{_MI325X}; the chip, and so float64 and int8, as in the MI300X data sheet",
            "memory_bytes compute_units l2_bytes": _ROCM, "power_watts": _MI325X,
            "interconnect": f"https://wiaix.com/amd-instincttm-mi325x-accelerators; bandwidth: {_NOT_FOUND}",
        },
    ),
    _device(
        "amd/mi350x", "gfx950", memory_gb=288, units=256, l2_mib=32, watts=1000, link=("Infinity Fabric", None),
        bandwidth=8e12,
        tera={
            "float64": 72.1, "float32": 144.2, "float16 bfloat16": 2309.6, "float8_e4m3fn float8_e5m2 int8": 4614,
        },
        unknown={"float4_e2m1fn_x2": _NOT_FOUND},
        sources={
            "memory_bytes compute_units l2_bytes": _ROCM, "rates": _MI350X, "power_watts": _MI350_POWER,
            "interconnect": f"AMD Instinct MI350X GPU brochure; bandwidth unknown: {_NOT_FOUND}",
        },
    ),
    _device(
        "amd/mi355x", "gfx950", memory_gb=288, units=256, l2_mib=32, watts=1400, link=("Infinity Fabric", None),
        bandwidth=8e12,
        tera={
            "float64": 78.6, "float32": 157.3, "float16 bfloat16": 2516.6, "float8_e4m3fn float8_e5m2 int8": 5033.2,
            "float4_e2m1fn_x2": 10066.3,
        },
        sources={
            "memory_bytes compute_units rates": "AMD Instinct MI355X data sheet; unpartitioned (SPX)",
            "l2_bytes": _ROCM, "power_watts": _MI350_POWER,
            "interconnect": f"AMD Instinct MI355X data sheet; bandwidth unknown: {_NOT_FOUND}",
        },
    ),
    # torch counts RDNA's compute units in pairs: HIP's multiprocessor there is the work-group processor.
    _device(
        "amd/rx7900xtx", "gfx1100", memory_gb=24, units=48, l2_mib=6, watts=355,
        bandwidth=960e9, tera={"float32": 61.4, "float16 bfloat16 int8": 122.8},
        unknown={"float64": _NO_MATRIX_UNIT, "int4": _NOT_PRINTED},
        sources={
            "memory_bytes compute_units rates":
                "AMD Radeon RX 7900 XTX product page; WMMA does 512 operations per clock and compute unit (GPUOpen, "
                "'How to accelerate AI applications on RDNA 3 using WMMA'), here at 2.5 GHz",
            "l2_bytes": _ROCM,
            "power_watts": "https://hmc-tech.com/gpu/amd-radeon-rx-9070-xt-vs-amd-radeon-rx-7900-xtx",
            "interconnect": f"unknown: {_NOT_FOUND}",
        },
    ),
    _device(
        "amd/rx9070xt", "gfx1201", memory_gb=16, units=32, l2_mib=8, watts=304, link=("PCIe 5.0 x16", 128e9),
        bandwidth=640e9, tera={"float32": 48.7, "int8": 389.5, "int4": 778.5},
        unknown={"float64": _NO_MATRIX_UNIT, "float16 bfloat16 float8_e4m3fn float8_e5m2": _NOT_FOUND},
        sources={
            "memory_bytes compute_units l2_bytes": f"{_ROCM}: 64 compute units",
            "power_watts interconnect": _RX9070XT,
            "rates":
                f"{_RX9070XT}; half of 779 and 1557 TOPS with sparsity, https://www.purepc.pl/amd-radeon-rx-9070-xt-oraz-"
                "radeon-rx-9070-specyfikacja-cena-i-wydajnosc-kart-graficznych-rdna-4",
        },
    ),
    # One of the card's two stacks ("tiles"): Level Zero shows each as a device unless ZE_FLAT_DEVICE_HIERARCHY
    # says otherwise, so that is what torch sees.
    _device(
        "intel/max1550", "xe-hpc", memory_gb=64, units=64, watts=300, link=("Xe Link", None), bandwidth=1.6384e12,
        tera={"float32": 26.2, "tfloat32": 209.7, "float16 bfloat16": 419.4, "int8": 838.8},
        unknown={"float64 int4": _NOT_FOUND},
        sources={
            "memory_bytes compute_units rates":
                "Intel Data Center GPU Max 1550 product specifications; XMX does 4096 float16 operations per clock "
                "and Xe core (oneAPI GPU Optimization Guide), here at 1.6 GHz",
            "power_watts": f"{_MAX1550}: 600 W for both stacks",
            "interconnect": f"{_MAX1550}: eight links a stack; bandwidth unknown: {_NOT_FOUND}",
            "l2_bytes": f"unknown: {_NOT_FOUND}",
        },
    ),
    _device(
        "intel/b580", "xe2-hpg", memory_gb=12, units=20, l2_mib=18, watts=190, link=("PCIe 4.0 x8", 32e9),
        bandwidth=456e9, tera={"float64": 1.709, "float32": 13.7, "float16 bfloat16": 116.5, "int8": 233},
        unknown={"tfloat32 int4": _NOT_PRINTED},
        sources={
            "memory_bytes compute_units rates":
                "Intel Arc B580 product specifications: 233 TOPS in int8; XMX does half as many operations in 16 "
                f"bits; float64 from {_ARC}",
            "l2_bytes power_watts interconnect": _ARC,
        },
    ),
    _device(
        "intel/a770", "xe-hpg", memory_gb=16, units=32, l2_mib=16, watts=225, link=("PCIe 4.0 x16", 64e9),
        bandwidth=560e9, tera={"float32": 17.2},
        unknown={"float16 bfloat16 int8 int4": _NOT_FOUND},
        sources={
            "memory_bytes compute_units power_watts":
                "Intel's specifications, https://www.svethardware.cz/intel-zverejnil-oficialni-specifikace-grafickych-karet-arc",
            "rates": "the same page: 4,096 lanes at 2.1 GHz, 560 GB/s",
            "l2_bytes interconnect":
                "the whole ACM-G10, as in https://fpsbench.com/compare/gpu/intel-arc-a770m-vs-intel-iris-pro-graphics-p580",
        },
    ),
    # No built-in backend describes the next two: they get the plain torch kernels, like any device that torch runs.
    # ``arch`` is torch's device type.
    _device(
        "intel/gaudi3", "hpu", vendor="intel", memory_gb=128, units=64, l2_mib=96, watts=900,
        link=("24 ports of 200 GbE", 1.2e12), bandwidth=3.67e12,
        formats="float32 bfloat16 float8_e4m3fn float8_e5m2",
        tera={"bfloat16 float8_e4m3fn float8_e5m2": 1835}, unknown={"float32": _NOT_PRINTED},
        sources={"memory_bytes compute_units l2_bytes interconnect power_watts rates": f"{_GAUDI3}; 64 TPCs"},
    ),
    _device(
        "apple/m4max", "mps", vendor="apple", memory_gb=128, units=40, bandwidth=546e9,
        formats="float32 float16 bfloat16",
        unknown={"float32 float16 bfloat16": "Apple prints none"},
        sources={
            "memory_bytes": "http://www.notebookcheck.net/Apple-M4-Max-official-with-incremental-upgrades-over-the-M3-Max",
            "compute_units rates": f"{_M4_MAX}: 40 GPU cores, the most memory that is sold",
            "l2_bytes interconnect power_watts": "unknown: Apple prints none",
        },
    ),
    _device(
        "cpu/grace", "neon", vendor="nvidia", memory_gb=960, units=144, l2_mib=144, watts=500,
        link=("NVLink-C2C", 900e9), bandwidth=1e12, tera={"float64": 7.1},
        unknown={"float32 float16 bfloat16 int8": _NOT_PRINTED}, features="sve bf16 i8mm",
        sources={
            "memory_bytes compute_units l2_bytes interconnect power_watts rates":
                f"{_GRACE}: the superchip with two CPUs, 72 Neoverse V2 cores with 1 MB each",
        },
    ),
    _device(
        "cpu/graviton4", "neon", vendor="aws", units=96, l2_mib=192, bandwidth=536.7e9,
        unknown={"float64 float32 float16 bfloat16 int8": "AWS prints none"}, features="sve bf16 i8mm",
        sources={
            "memory_bytes": "unknown: it depends on the instance",
            "compute_units l2_bytes": f"{_GRAVITON}: 96 Neoverse V2 cores with 2 MB each",
            "rates": "AnandTech, 'Amazon Unveils Graviton4: A 96-Core ARM CPU with 536.7 GBps Memory Bandwidth'",
            "interconnect power_watts": "unknown: AWS prints none",
        },
    ),
    # Classes of machine: memory, cores and rates differ between machines.
    _device("cpu/avx2", "avx2"),
    _device("cpu/avx512", "avx512"),
    _device("cpu/amx", "amx"),
    _device("cpu/neon", "neon"),
)  # fmt: skip

CATALOGUE: Mapping[str, Device] = MappingProxyType({known.name: known for known in _DEVICES})


def catalogue_of(backend: str) -> tuple[Device, ...]:
    """Return the catalogue's devices of one backend.

    Example:
        >>> [device.name for device in catalogue_of("amd")][:2]
        ['amd/mi250x', 'amd/mi300x']
    """
    return tuple(device for device in CATALOGUE.values() if device.backend == backend)


def catalogue_device(name: str, catalogue: Mapping[str, Device] = CATALOGUE) -> Device:
    """Return the catalogue's device of this name, in any case and with or without the vendor.

    Raises an error with similar names, the devices of an architecture of this name, and all names.

    Example:
        >>> h200 = catalogue_device("nvidia/h200")
        >>> h200.arch, h200.compute_units, h200.present
        ('sm_90', 132, False)
        >>> catalogue_device("H200") is h200
        True
    """
    lower = name.lower()
    found = [known for full, known in catalogue.items() if lower in (full.lower(), full.lower().partition("/")[2])]
    exact = [known for known in found if known.name == name]
    if exact or len(found) == 1:
        return (exact or found)[0]
    of_arch = [repr(known.name) for known in catalogue.values() if lower in (known.arch, known.vendor)]
    spelled = {full.partition("/")[2]: full for full in catalogue} | {full: full for full in catalogue}
    close = dict.fromkeys(repr(spelled[match]) for match in difflib.get_close_matches(lower, spelled, n=4))
    meant = [repr(known.name) for known in found] or of_arch or [*close]
    hint = f"; did you mean {' or '.join(meant)}?" if meant else "."
    raise ValueError(f"name={name!r}: not in the catalogue{hint} It has {', '.join(catalogue)}")
