"""cuDNN's attention over intervals of keys, with the deterministic backward."""

from functools import partial

from kernel_pytorch.ops.attention import cudnn_flex_kernel

forward = cudnn_flex_kernel.forward
backward = partial(cudnn_flex_kernel.backward, deterministic=True)
