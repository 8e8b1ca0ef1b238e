"""Intel GPUs through torch.xpu."""

from pathlib import Path

from kernel_pytorch.evidence import evidence_directory
from kernel_pytorch.hardware_abstraction.catalogue import catalogue_of
from kernel_pytorch.hardware_abstraction.probe import probe_intel
from kernel_pytorch.hardware_abstraction.registry import Backend
from kernel_pytorch.ops import attention, fp8_cast, fp8_matmul, fp8_rms_norm, fp8_swiglu, rms_norm, rope

BACKEND = Backend(
    name="intel",
    title="Intel GPUs: Data Center Max, Arc",
    probe=probe_intel,
    catalogue=catalogue_of("intel"),
    kernels=(
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
        fp8_cast.KERNEL_TORCH,
        fp8_rms_norm.KERNEL_TORCH,
        fp8_swiglu.KERNEL_TORCH,
        fp8_swiglu.GRAD_KERNEL_TORCH,
        fp8_matmul.KERNEL_DEQUANTISED,
    ),
    install_hint="an XPU build of torch and its Triton",
    evidence=evidence_directory(),
    notes=Path(__file__).with_suffix(".md"),
)
