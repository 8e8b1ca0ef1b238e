"""Allocation without torch's dispatcher, and integer matmul."""

from __future__ import annotations

import torch

from kernel_pytorch._compat.private import private

__all__ = ["empty_strided_cuda", "int8_matmul"]

empty_strided_cuda = private(
    "torch._C._dynamo.guards._empty_strided_cuda",
    test=callable,
    without="results are allocated through the dispatcher, in about twice the time",
    otherwise=lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype, device="cuda"),
)
"""``empty_strided(sizes, strides, dtype)`` on the current GPU, as compiled code allocates."""

int8_matmul = private(
    "torch._int_mm",
    test=callable,
    without="int8 matrices are multiplied in int32",
    otherwise=lambda a, b: torch.mm(a.int(), b.int()),
)
"""The int32 product of int8 matrices."""
