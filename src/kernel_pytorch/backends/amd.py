"""AMD GPUs through ROCm."""

from pathlib import Path

from kernel_pytorch.evidence import evidence_directory
from kernel_pytorch.hardware_abstraction.catalogue import catalogue_of
from kernel_pytorch.hardware_abstraction.probe import probe_amd
from kernel_pytorch.hardware_abstraction.registry import Backend
from kernel_pytorch.ops import attention, fp8_cast, fp8_matmul, fp8_rms_norm, fp8_swiglu, rms_norm, rope

BACKEND = Backend(
    name="amd",
    title="AMD GPUs: CDNA2 and later, RDNA3 and later",
    probe=probe_amd,
    catalogue=catalogue_of("amd"),
    kernels=(
        attention.KERNEL_FLASH,
        attention.KERNEL_TRITON_SPLIT_KV,
        attention.KERNEL_TRITON,
        attention.KERNEL_TILED,
        attention.KERNEL_SCORE_MOD_TRITON,
        attention.KERNEL_SCORE_MOD_TILED,
        attention.KERNEL_PAGED_TRITON,
        attention.KERNEL_PAGED_GATHER,
        rms_norm.KERNEL_TRITON,
        rms_norm.KERNEL_TORCH,
        rope.KERNEL_TRITON,
        rope.KERNEL_TORCH,
        fp8_cast.KERNEL_TRITON,
        fp8_cast.KERNEL_TORCH,
        fp8_rms_norm.KERNEL_TRITON,
        fp8_rms_norm.KERNEL_TORCH,
        fp8_swiglu.KERNEL_TRITON,
        fp8_swiglu.KERNEL_TORCH,
        fp8_swiglu.GRAD_KERNEL_TRITON,
        fp8_swiglu.GRAD_KERNEL_TORCH,
        fp8_matmul.KERNEL_DEQUANTISED,
    ),
    install_hint="a ROCm build of torch",
    evidence=evidence_directory(),
    notes=Path(__file__).with_suffix(".md"),
)
