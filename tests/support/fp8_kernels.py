"""Random tensors where the kernels of FP8 ops run: on the GPU, or on the CPU without one."""

from __future__ import annotations

import torch

__all__ = ["HERE", "random"]

HERE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(HERE, dtype)
