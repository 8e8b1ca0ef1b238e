"""The ops, one folder each: definition, public function, kernels."""

from kernel_pytorch.ops import rms_norm

__all__ = ["rms_norm"]
