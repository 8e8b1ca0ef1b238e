"""Calls of kp.attention for tests: kernels with their dtypes, tensors, and all results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.masks import Mask
from kernel_pytorch.ops.attention.definition import ATTENTION
from kernel_pytorch.testing import compare, interpreting, poisoned, pretend

H200 = "nvidia/h200"
needs_interpreter = pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter")
# Kernel and the format it is tested in: the interpreter computes bfloat16 wrongly.
EVERY = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}", marks=marks)
    for name, dtypes, marks in (
        ("cpu-flash", (torch.float32, torch.bfloat16), ()),
        ("native", (torch.float32, torch.float16, torch.bfloat16), ()),
        ("tiled", (torch.float32, torch.float16, torch.bfloat16, torch.float64), ()),
        ("triton", (torch.float32, torch.float16), (needs_interpreter,)),
    )
    for dtype in dtypes
]
every_kernel = pytest.mark.parametrize(("kernel", "dtype"), EVERY)
# Kernels that support every mask.
any_mask = pytest.mark.parametrize(("kernel", "dtype"), [each for each in EVERY if each.values[0] != "cpu-flash"])
in_float32 = pytest.mark.parametrize("kernel", ["native", "tiled", pytest.param("triton", marks=needs_interpreter)])


@contextlib.contextmanager
def on(kernel: str) -> Iterator[None]:
    """Run on the kernel's device, with poisoned memory."""
    with pretend(H200) if kernel == "triton" else contextlib.nullcontext(), poisoned():
        yield


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads(
    batch: int = 1,
    q_heads: int = 2,
    kv_heads: int = 2,
    q_len: int = 40,
    kv_len: int | None = None,
    dim: int = 32,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kv_len = q_len if kv_len is None else kv_len
    return (
        drawn(batch, q_heads, q_len, dim, seed=3 * seed, dtype=dtype),
        drawn(batch, kv_heads, kv_len, dim, seed=3 * seed + 1, dtype=dtype),
        drawn(batch, kv_heads, kv_len, value_dim or dim, seed=3 * seed + 2, dtype=dtype),
    )


def everything(
    qkv: tuple[torch.Tensor, ...],
    mask: Mask | None,
    kernel: str | None = None,
    *,
    lse: bool = True,
    **keywords: Any,
) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv, with fixed gradients of out, and of lse where it takes one."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    returned = kp.attention(*leaves, mask, return_lse=lse, kernel=kernel, **keywords)
    out, sums = returned if lse else (returned, None)
    one = drawn(1, *out.shape[1:], seed=99).to(out.dtype)  # the same for every entry of the batch
    upstream = [one.expand(out.shape).contiguous()]
    upstream += [drawn(*sums.shape, seed=98).to(sums.dtype)] if lse else []
    found = torch.autograd.grad([out, sums] if lse else [out], leaves, upstream)
    return [x.detach() for x in ((out, sums) if lse else (out,))] + list(found)


def budgeted(
    qkv: tuple[torch.Tensor, ...], mask: Mask, kernel: str, scale: float = 0.2, lse_grad: bool = True
) -> None:
    """Outputs and gradients within the budget that float64 sets."""
    arguments = dict(zip(ATTENTION.argument_names, (*qkv, mask, scale, "lse" if lse_grad else "grad"), strict=True))
    function = function_of(ATTENTION)
    with on(kernel):
        compared = compare(ATTENTION, lambda *values: function(*values, kernel=kernel), arguments)
    failed = [str(comparison) for comparison in compared if not comparison.ok]
    assert not failed, "\n".join(failed)
