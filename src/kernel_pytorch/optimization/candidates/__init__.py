"""The built-in candidates, in the order of the report."""

from __future__ import annotations

from kernel_pytorch.optimization.candidates.attention import HF_ATTENTION
from kernel_pytorch.optimization.candidates.compilers import COMPILE, COMPILE_MAX_AUTOTUNE, COMPILE_REDUCE_OVERHEAD
from kernel_pytorch.optimization.candidates.folding import BATCH_NORM_FOLDING
from kernel_pytorch.optimization.candidates.fp8 import FP8_LINEAR, FP8_TRAINING, FP8_TRAINING_DELAYED
from kernel_pytorch.optimization.candidates.layout import CHANNELS_LAST
from kernel_pytorch.optimization.candidates.liger import (
    LIGER_CROSS_ENTROPY,
    LIGER_GATED_MLP,
    LIGER_LAYER_NORM,
    LIGER_RMS_NORM,
    LIGER_ROPE,
)
from kernel_pytorch.optimization.candidates.linear_cross_entropy import CHUNKED_CROSS_ENTROPY
from kernel_pytorch.optimization.candidates.memory import ACTIVATION_CHECKPOINTING, ACTIVATION_OFFLOADING
from kernel_pytorch.optimization.candidates.norms import RMS_NORM
from kernel_pytorch.optimization.candidates.others import (
    FLASH_ATTENTION,
    HUB_KERNELS,
    QUACK_RMS_NORM,
    TORCHAO_FLOAT8,
)
from kernel_pytorch.optimization.candidates.precision import (
    BF16_AUTOCAST,
    BF16_LINEAR,
    FLOAT16_AUTOCAST,
    INT8_LINEAR,
    TF32,
)
from kernel_pytorch.optimization.candidates.rotary import ROPE
from kernel_pytorch.optimization.candidates.sdpa import MULTIHEAD_ATTENTION, SDPA_ATTENTION

__all__ = ["BUILT_IN"]

BUILT_IN = (
    HF_ATTENTION,
    SDPA_ATTENTION,
    MULTIHEAD_ATTENTION,
    RMS_NORM,
    ROPE,
    BATCH_NORM_FOLDING,
    CHUNKED_CROSS_ENTROPY,
    BF16_LINEAR,
    BF16_AUTOCAST,
    FLOAT16_AUTOCAST,
    INT8_LINEAR,
    TF32,
    FP8_TRAINING,
    FP8_TRAINING_DELAYED,
    FP8_LINEAR,
    ACTIVATION_CHECKPOINTING,
    ACTIVATION_OFFLOADING,
    CHANNELS_LAST,
    LIGER_RMS_NORM,
    LIGER_LAYER_NORM,
    LIGER_GATED_MLP,
    LIGER_ROPE,
    LIGER_CROSS_ENTROPY,
    QUACK_RMS_NORM,
    *FLASH_ATTENTION,
    TORCHAO_FLOAT8,
    HUB_KERNELS,
    COMPILE,
    COMPILE_REDUCE_OVERHEAD,
    COMPILE_MAX_AUTOTUNE,
)
