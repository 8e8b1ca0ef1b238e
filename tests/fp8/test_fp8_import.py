"""What ``import kernel_pytorch.fp8`` imports, and models patched by other libraries."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import kernel_pytorch as kp
from fp8_models import random, sqnr

pytestmark = pytest.mark.usefixtures("one_thread", "own_monitors")


def test_fp8_imports_no_compiler_and_a_conversion_no_transformers() -> None:
    code = (
        "import sys, torch, kernel_pytorch.fp8 as fp8\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'triton') if name in sys.modules])\n"
        "fp8.convert(torch.nn.Sequential(torch.nn.Linear(8, 8)), 'delayed')\n"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "False"]


class InPlace(torch.autograd.Function):
    """``silu(gate) * up`` whose backward writes into the saved tensors and its gradient, as Liger's kernels do."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, dh: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        s = torch.sigmoid(gate)
        dup = dh * gate * s
        gate.copy_(dh.mul_(up) * s * (1 + gate * (1 - s)))
        up.copy_(dup)
        return gate, up


class InPlaceNorm(torch.autograd.Function):
    """RMSNorm whose backward returns its gradient in the memory of dy, as Liger's does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        normal = x * rstd
        dweight = (dy * normal).sum(0)
        dy.mul_(weight)
        dy.sub_(normal * (dy * normal).mean(-1, keepdim=True)).mul_(rstd)
        return dy, dweight, None


class Patched(nn.Module):
    """A block whose norm and SwiGLU are another library's classes."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.in_place, self.eps = in_place, 1e-6
        self.weight = nn.Parameter(torch.rand(32) + 0.5)
        self.gate_proj, self.up_proj = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False)
        self.down_proj = nn.Linear(48, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            y = InPlaceNorm.apply(x, self.weight, self.eps)
            return x + self.down_proj(InPlace.apply(self.gate_proj(y), self.up_proj(y)))
        y = nn.functional.rms_norm(x, (32,), self.weight, self.eps)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_backward_that_writes_in_place_trains_as_one_that_does_not(recipe: str, compiled: bool) -> None:
    torch._dynamo.reset()
    found = []
    for in_place in (True, False):
        model = kp.fp8.convert(nn.Sequential(Patched(in_place), Patched(in_place)), recipe, fuse_swiglu=False)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for seed in range(3):
            optimizer.zero_grad()
            x = random(16, 32, seed=seed).requires_grad_()
            run(x).square().mean().backward()
            optimizer.step()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert sqnr(one, other) > 15
