"""Any processor torch runs on."""

from pathlib import Path

from kernel_pytorch.evidence import evidence_directory
from kernel_pytorch.hardware_abstraction.catalogue import catalogue_of
from kernel_pytorch.hardware_abstraction.probe import probe_cpu
from kernel_pytorch.hardware_abstraction.registry import Backend
from kernel_pytorch.ops import attention, fp8_cast, fp8_matmul, fp8_rms_norm, fp8_swiglu, rms_norm, rope

BACKEND = Backend(
    name="cpu",
    title="Processors: x86 with AVX2, AVX-512 or AMX, and Arm with NEON",
    probe=probe_cpu,
    catalogue=catalogue_of("cpu"),
    kernels=(
        attention.KERNEL_NATIVE,
        attention.KERNEL_CPU_FLASH,
        attention.KERNEL_TILED,
        attention.KERNEL_SCORE_MOD_TILED,
        attention.KERNEL_PAGED_GATHER,
        rms_norm.KERNEL_TORCH,
        rope.KERNEL_TORCH,
        fp8_cast.KERNEL_TORCH,
        fp8_rms_norm.KERNEL_TORCH,
        fp8_swiglu.KERNEL_TORCH,
        fp8_swiglu.GRAD_KERNEL_TORCH,
        fp8_matmul.KERNEL_DEQUANTISED,
        fp8_matmul.KERNEL_SCALED_MM,
    ),
    install_hint="",
    evidence=evidence_directory(),
    notes=Path(__file__).with_suffix(".md"),
    lowering="kernel_pytorch.lowering.target:CPU",
)
