"""The candidates that come with the library, in the order in which the report lists them."""

from __future__ import annotations

from kernel_pytorch.optimization.candidates.compilers import COMPILE, COMPILE_MAX_AUTOTUNE, COMPILE_REDUCE_OVERHEAD
from kernel_pytorch.optimization.candidates.layout import CHANNELS_LAST
from kernel_pytorch.optimization.candidates.norms import RMS_NORM
from kernel_pytorch.optimization.candidates.precision import BF16_AUTOCAST, BF16_LINEAR, INT8_LINEAR, TF32

__all__ = ["BUILT_IN"]

BUILT_IN = (
    RMS_NORM,
    BF16_LINEAR,
    BF16_AUTOCAST,
    INT8_LINEAR,
    TF32,
    CHANNELS_LAST,
    COMPILE,
    COMPILE_REDUCE_OVERHEAD,
    COMPILE_MAX_AUTOTUNE,
)
