"""Table of instruction-set architectures: the facts that all devices of one architecture share.

A probe starts from these records and overwrites what the driver reports; the catalogue adds data-sheet numbers.
Where sources disagree or are silent, the record claims less: an unused kernel costs time, an unsupported one crashes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from kernel_pytorch.hardware_abstraction.device import Device

__all__ = ["ARCHITECTURES", "Architecture", "amd_architecture", "architecture", "nvidia_architecture"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """The facts that every device of one instruction set shares; ``Device`` documents the fields.

    Example:
        >>> ARCHITECTURES["sm_90"].shared_memory_bytes
        232448
    """

    name: str
    vendor: str
    backend: str
    warp_size: int
    shared_memory_bytes: int
    formats: frozenset[str]
    matrix_formats: frozenset[str] = frozenset()
    mx_formats: frozenset[str] = frozenset()
    matrix_units: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    """``mx_scale``: matrix units that take block scales; ``vnni``: AVX-512 VNNI; the rest as vendors do."""

    def device(self, name: str, *, memory_bytes: int, compute_units: int, **facts: Any) -> Device:
        """Return a device of this architecture; ``facts`` add to or replace the architecture's."""
        common = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "name"}
        return Device(
            **{**common, **facts},
            name=name,
            arch=self.name,
            memory_bytes=memory_bytes,
            compute_units=compute_units,
        )


_OCP_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_FNUZ_FLOAT8 = ("float8_e4m3fnuz", "float8_e5m2fnuz")
_FLOAT4 = "float4_e2m1fn_x2"

# What the vector units of nearly everything below compute with or convert.
_VECTOR = ("float64", "float32", "float16", "bfloat16", "int8")


def _record(
    name: str,
    vendor: str,
    *,
    backend: str | None = None,
    warp_size: int,
    shared_kib: int,
    vector: Collection[str] = _VECTOR,
    matrix: Collection[str] = (),
    mx: Collection[str] = (),
    units: Collection[str] = (),
    features: Collection[str] = (),
) -> Architecture:
    """Return one record. The matrix formats are added to ``formats``, so that the table lists them once."""
    return Architecture(
        name=name,
        vendor=vendor,
        backend=backend or vendor,
        warp_size=warp_size,
        shared_memory_bytes=shared_kib * 1024,
        formats=frozenset(vector) | frozenset(matrix),
        matrix_formats=frozenset(matrix),
        mx_formats=frozenset(mx),
        matrix_units=frozenset(units),
        features=frozenset(features),
    )


# NVIDIA.
# Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": the most one
# thread block can opt in to, which is the multiprocessor's less the 1 KiB the driver keeps per block. CCCL
# has the same numbers (cuda/__device/arch_traits.h).
# Instructions: PTX ISA, target notes of cp.async (sm_80), mma with .e4m3 and .e5m2 (sm_89),
# cp.async.bulk.tensor and .cluster (sm_90), wgmma (sm_90a), tcgen05 (sm_100f, sm_110f), mma with .block_scale
# (sm_120f).
# float64: mma takes it from sm_80 on, but only sm_80, sm_90 and sm_100 have tensor cores for it (A100, H100
# and Blackwell architecture papers); elsewhere it runs no faster than on the vector units and is not listed.
# int4: in the A100 and Ada architecture papers' tensor-core tables, gone from the H100's; later targets still
# assemble it and run it as int8.
_NVIDIA_MATRIX = ("tfloat32", "float16", "bfloat16", "int8")
# Block scales: PTX ISA, .kind::mxf8f6f4, .kind::mxf4 and .kind::mxf4nvf4 of tcgen05.mma and of mma with .block_scale.
_NVIDIA_MX = ("mxfp8", "mxfp6", "mxfp4", "nvfp4")
_HOPPER_FEATURES = ("cp_async", "tma", "tma_multicast", "clusters")

_NVIDIA = (
    _record(
        "sm_80",
        "nvidia",
        warp_size=32,
        shared_kib=163,
        matrix=(*_NVIDIA_MATRIX, "float64", "int4"),
        units=("mma",),
        features=("cp_async",),
    ),
    _record(
        "sm_86",
        "nvidia",
        warp_size=32,
        shared_kib=99,
        matrix=(*_NVIDIA_MATRIX, "int4"),
        units=("mma",),
        features=("cp_async",),
    ),
    _record(
        "sm_89",
        "nvidia",
        warp_size=32,
        shared_kib=99,
        matrix=(*_NVIDIA_MATRIX, "int4", *_OCP_FLOAT8),
        units=("mma",),
        features=("cp_async",),
    ),
    _record(
        "sm_90",
        "nvidia",
        warp_size=32,
        shared_kib=227,
        matrix=(*_NVIDIA_MATRIX, "float64", *_OCP_FLOAT8),
        units=("mma", "wgmma"),
        features=_HOPPER_FEATURES,
    ),
    _record(
        "sm_100",
        "nvidia",
        warp_size=32,
        shared_kib=227,
        matrix=(*_NVIDIA_MATRIX, "float64", *_OCP_FLOAT8, _FLOAT4),
        mx=_NVIDIA_MX,
        units=("mma", "tcgen05"),
        features=(*_HOPPER_FEATURES, "mx_scale"),
    ),
    # tcgen05 has no integers here (cuBLASDx documentation, "Blackwell Pipeline"): int8 is left to mma.
    _record(
        "sm_103",
        "nvidia",
        warp_size=32,
        shared_kib=227,
        matrix=(*_NVIDIA_MATRIX, *_OCP_FLOAT8, _FLOAT4),
        mx=_NVIDIA_MX,
        units=("mma", "tcgen05"),
        features=(*_HOPPER_FEATURES, "mx_scale"),
    ),
    # Not a small sm_100: no tcgen05, no TMA multicast, and GEMM clusters of one block only (CUTLASS,
    # examples/79_blackwell_geforce_gemm), so clusters are not claimed either.
    _record(
        "sm_120",
        "nvidia",
        warp_size=32,
        shared_kib=99,
        matrix=(*_NVIDIA_MATRIX, *_OCP_FLOAT8, _FLOAT4),
        mx=_NVIDIA_MX,
        units=("mma",),
        features=("cp_async", "tma", "mx_scale"),
    ),
)

# AMD.
# Wavefront and LDS: ROCm documentation, "AMD GPU specifications". For RDNA that table gives the 128 KiB of a
# work-group processor; one work-group can have 64 KiB of them (RDNA 3 and RDNA 4 ISA reference guides).
# Matrix formats: the MFMA and WMMA chapters of the CDNA 2, 3, 4 and RDNA 3, 4 ISA reference guides. The
# tfloat32 instructions ("xf32") are on gfx942 only: CDNA 4 dropped them (LLVM, AMDGPU feature xf32-insts).
# float8: ROCm documentation, "Data types and precision support": FNUZ on CDNA 3, OCP on CDNA 4 and RDNA 4.
# Block scales: CDNA 4 ISA reference guide, V_MFMA_SCALE; its multipliers take FP8, FP6 and FP4.
_CDNA_MATRIX = ("float64", "float32", "float16", "bfloat16", "int8")
_RDNA_MATRIX = ("float16", "bfloat16", "int8", "int4")

_AMD = (
    _record("gfx90a", "amd", warp_size=64, shared_kib=64, matrix=_CDNA_MATRIX, units=("mfma",)),
    _record(
        "gfx942",
        "amd",
        warp_size=64,
        shared_kib=64,
        matrix=(*_CDNA_MATRIX, "tfloat32", *_FNUZ_FLOAT8),
        units=("mfma",),
    ),
    _record(
        "gfx950",
        "amd",
        warp_size=64,
        shared_kib=160,
        matrix=(*_CDNA_MATRIX, *_OCP_FLOAT8, _FLOAT4),
        mx=("mxfp8", "mxfp6", "mxfp4"),
        units=("mfma",),
        features=("mx_scale",),
    ),
    _record("gfx1100", "amd", warp_size=32, shared_kib=64, matrix=_RDNA_MATRIX, units=("wmma",)),
    _record("gfx1201", "amd", warp_size=32, shared_kib=64, matrix=(*_RDNA_MATRIX, *_OCP_FLOAT8), units=("wmma",)),
)

# Intel GPUs.
# Each runs several sub-group sizes; given is the one XMX executes with, N in the SYCL joint_matrix extension
# (sycl_ext_oneapi_matrix, "Intel XMX Supported Combinations"), which is also where most matrix formats are
# from; int4 is documented for Xe-HPG (Intel support article 000098346) and, with tfloat32, for the other two
# by LLVM (XeGPU uArch, IntelGpuXe2.h).
# Shared local memory per work-group: Intel GPU Occupancy Calculator (Xe-HPG gives one work-group half of its
# core's 128 KiB) and, for Xe2, maxProgrammableSlmSize in Intel's compute-runtime; the same table there says
# that Xe2 has float64 in hardware, and Xe-HPG only emulates it.
_XMX_MATRIX = ("float16", "bfloat16", "int8", "int4")

_INTEL = (
    # Ponte Vecchio: Data Center GPU Max.
    _record(
        "xe-hpc",
        "intel",
        warp_size=16,
        shared_kib=128,
        matrix=(*_XMX_MATRIX, "tfloat32"),
        units=("xmx",),
    ),
    # Alchemist: Arc A-series, Data Center GPU Flex.
    _record(
        "xe-hpg",
        "intel",
        warp_size=8,
        shared_kib=64,
        vector=("float32", "float16", "bfloat16", "int8"),
        matrix=_XMX_MATRIX,
        units=("xmx",),
    ),
    # Battlemage: Arc B-series.
    _record(
        "xe2-hpg",
        "intel",
        warp_size=16,
        shared_kib=128,
        matrix=(*_XMX_MATRIX, "tfloat32"),
        units=("xmx",),
    ),
)

# CPUs: what every machine of the class has; a probe adds the optional extensions it finds.
# Intel 64 and IA-32 Architectures Software Developer's Manual; Intel Architecture Instruction Set Extensions
# Programming Reference (AMX); Arm Architecture Reference Manual for A-profile.
# bfloat16 is the upper half of a float32, so a vector unit widens it with a shift. float16 takes a conversion
# instruction: F16C, which PyTorch's AVX2 code is built with, or Arm's FCVTL. None computes in 8-bit floats.
_CPU = (
    _record(
        "scalar",
        "unknown",
        backend="cpu",
        warp_size=1,
        shared_kib=0,
        vector=("float64", "float32", "int8"),
    ),
    _record("avx2", "x86", backend="cpu", warp_size=1, shared_kib=0),
    # F, BW, DQ and VL, as in Skylake-SP: VNNI came with Cascade Lake, BF16 with Cooper Lake.
    _record("avx512", "x86", backend="cpu", warp_size=1, shared_kib=0),
    # As in Sapphire Rapids: float16 tiles came later, with Granite Rapids.
    _record(
        "amx",
        "x86",
        backend="cpu",
        warp_size=1,
        shared_kib=0,
        matrix=("bfloat16", "int8"),
        units=("amx",),
        features=("vnni", "avx512_bf16", "avx512_fp16"),
    ),
    # Armv8.0-A: I8MM and BF16 are optional extensions of it.
    _record("neon", "arm", backend="cpu", warp_size=1, shared_kib=0),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {known.name: known for known in (*_NVIDIA, *_AMD, *_INTEL, *_CPU)}
)


def architecture(name: str) -> Architecture | None:
    """Return the architecture of exactly this name, or None.

    Example:
        >>> architecture("gfx942").warp_size, architecture("sm_60")
        (64, None)
    """
    return ARCHITECTURES.get(name)


_CAPABILITIES: Mapping[tuple[int, int], Architecture] = MappingProxyType(
    {divmod(int(known.name.removeprefix("sm_")), 10): known for known in _NVIDIA}
)


def nvidia_architecture(major: int, minor: int) -> Architecture:
    """Return the architecture of an NVIDIA compute capability, whether or not the table has it.

    An unlisted capability gets the facts of the newest listed one that is not newer. PTX carries only baseline
    features over to a later major version, so across majors everything that needs a target with a suffix (wgmma,
    tcgen05, float4, block scales) is left out. A capability older than all listed ones gets vector formats only.

    Example:
        >>> nvidia_architecture(9, 0).name
        'sm_90'
        >>> spark = nvidia_architecture(12, 1)
        >>> spark.name, spark.matrix_units == ARCHITECTURES["sm_120"].matrix_units
        ('sm_121', True)
    """
    name = f"sm_{major}{minor}"
    older = [capability for capability in _CAPABILITIES if capability <= (major, minor)]
    if not older:
        # 48 KiB is what every capability gives a block; bfloat16 and the matrix units we use start at sm_80.
        vector = ("float64", "float32", "float16")
        return _record(name, "nvidia", warp_size=32, shared_kib=48, vector=vector)
    nearest = max(older)
    known = replace(_CAPABILITIES[nearest], name=name)
    if nearest[0] == major:
        return known
    return replace(
        known,
        formats=known.formats - {_FLOAT4},
        matrix_formats=known.matrix_formats - {_FLOAT4},
        matrix_units=known.matrix_units & {"mma"},
        mx_formats=frozenset(),
        features=known.features - {"mx_scale"},
    )


def amd_architecture(gcn_arch_name: str) -> Architecture:
    """Return the architecture of an AMD GPU, from torch's ``gcnArchName``; its feature flags are ignored.

    An unlisted one gets the formats of every GPU that ROCm supports, and no matrix units: neither float8 encodings
    nor matrix instruction layouts carry over between generations.

    Example:
        >>> amd_architecture("gfx942:sramecc+:xnack-").name
        'gfx942'
        >>> sorted(amd_architecture("gfx1030").formats)
        ['bfloat16', 'float16', 'float32']
    """
    name = gcn_arch_name.partition(":")[0]
    known = ARCHITECTURES.get(name)
    if known is not None and known.vendor == "amd":
        return known
    return _record(
        name,
        "amd",
        warp_size=64 if name.startswith("gfx9") else 32,
        shared_kib=64,
        vector=("float32", "float16", "bfloat16"),
    )
