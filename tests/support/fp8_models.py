"""Small models for the tests of kp.fp8.convert, what they compute and how they train."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kernel_pytorch.fp8 import autotune as autotune
from kernel_pytorch.fp8 import fusion as swiglu_module
from kernel_pytorch.fp8 import module as fp8_module
from kernel_pytorch.fp8.recipe import RECIPES
from kernel_pytorch.hardware_abstraction import dispatch

every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=str)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sqnr(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB."""
    error = (found.double() - exact.double()).square().sum()
    return 10 * math.log10(float(exact.double().square().sum() / error)) if error > 0 else math.inf


def prepared_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Serve prepared Triton kernels to CPU tensors, in the interpreter; the ops served. Matmuls stay as they are."""
    served: list[str] = []

    def prepared(op: Any, spec: Any, tensor: torch.Tensor, *, checked: bool = False) -> Any:
        if op.name == "fp8_matmul":
            return None
        run = dispatch._prepare(op.name, tensor.device, spec)
        served.append(op.name)
        return run

    monkeypatch.setattr(dispatch, "prepared", prepared)
    return served


class SwiGLU(nn.Module):
    """RMSNorm as in Hugging Face's models."""

    def __init__(self, width: int = 32, hidden: int = 48, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=bias)
        self.up_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)
        self.act_fn: Callable[[torch.Tensor], torch.Tensor] = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A layer before and one after a SwiGLU."""

    def __init__(self, width: int = 32, hidden: int = 48) -> None:
        super().__init__()
        self.first = nn.Linear(24, width)
        self.mlp = SwiGLU(width, hidden)
        self.last = nn.Linear(width, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        return self.last(h + self.mlp(h))


def block(seed: int = 0) -> Block:
    torch.manual_seed(seed)
    return Block()


def linear(k: int = 40, n: int = 24, bias: bool = True, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(k, n, bias=bias))


def results(model: nn.Module, x: torch.Tensor, dy: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The output and the gradients of the input and of all parameters."""
    model.zero_grad()
    given = x.detach().requires_grad_()
    y = model(given)
    y.backward(random(*y.shape, seed=9).to(y) if dy is None else dy)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"y": y.detach(), "x": given.grad, **gradients}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, size: Callable[[int], float] = lambda _: 1.0
) -> list[float]:
    """Regression to a fixed function; step n always has the same batch. The losses."""
    teacher = random(24, 16, seed=77) / 5
    losses = []
    for number in steps:
        x = random(32, 24, seed=1000 + number) * size(number)
        loss = (model(x) - torch.tanh(x @ teacher)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def is_fused(module: nn.Module) -> bool:
    return bool(swiglu_module.fused_in(module))


def lossy(seed: int = 0) -> torch.Tensor:
    """One large element: with its scale, the others underflow in FP8."""
    x = 1e-8 * random(8, 24, seed=seed)
    x[0, 0] = 1e3
    return x


def pretend_measured(monkeypatch: pytest.MonkeyPatch, choice: Callable[..., tuple[str, ...]]) -> None:
    """Make ``auto`` choose these GEMMs, also on a CPU."""
    monkeypatch.setattr(autotune, "_measured_gemms", choice)
    monkeypatch.setattr(fp8_module, "may_have_matrix_units", lambda _: True)
