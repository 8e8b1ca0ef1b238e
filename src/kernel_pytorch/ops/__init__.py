"""The ops, one folder each: definition, public function, kernels."""

from kernel_pytorch.ops import attention, rms_norm

__all__ = ["attention", "rms_norm"]
