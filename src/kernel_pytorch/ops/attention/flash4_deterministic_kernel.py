"""FlashAttention-4 with the deterministic backward."""

from functools import partial

from kernel_pytorch.ops.attention import flash4_kernel

forward = flash4_kernel.forward
backward = partial(flash4_kernel.backward, deterministic=True)
