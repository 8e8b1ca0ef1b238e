"""The ops, one folder each: definition, public function, kernels."""

from kernel_pytorch.ops import attention, fp8_cast, fp8_matmul, fp8_rms_norm, fp8_swiglu, rms_norm, rope

__all__ = ["attention", "fp8_cast", "fp8_matmul", "fp8_rms_norm", "fp8_swiglu", "rms_norm", "rope"]
