"""Models with RMSNorm before FP8 layers, for the tests of fused norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8_models import SwiGLU, random
from kernel_pytorch.fp8 import fusion as norm_module
from kernel_pytorch.fp8 import monitor as monitor_module
from kernel_pytorch.fp8.rms_norm import CastingNorm

both_recipes = pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])


class Block(nn.Module):
    """Norms before three projections, and before a SwiGLU."""

    def __init__(self, width: int = 32, norm: Callable[[int], nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = norm(width), norm(width)
        self.q, self.k, self.v = nn.Linear(width, 16), nn.Linear(width, 16), nn.Linear(width, 16)
        self.o = nn.Linear(16, width, bias=False)
        self.mlp = SwiGLU(width, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_1(x)
        x = x + self.o(torch.tanh(self.q(y) * self.k(y)) * self.v(y))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.RMSNorm, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(24, 32)
        self.block = Block(norm=norm)
        self.norm = norm(32)
        self.head = nn.Linear(32, 16)
        self.checkpointing = checkpointing
        """Whether the block and the last norm are reentrant; None for no checkpointing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.checkpointing is None:
            return self.head(self.norm(self.block(x)))
        x = checkpoint(self.block, x, use_reentrant=self.checkpointing)
        return self.head(checkpoint(self.norm, x, use_reentrant=self.checkpointing))


class Llama(nn.Module):
    """RMSNorm as in Hugging Face's models."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


def model(seed: int = 0, **how: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**how)


def pair(width: int = 40, norm: nn.Module | None = None) -> nn.Sequential:
    """A norm followed by a layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.RMSNorm(width) if norm is None else norm, nn.Linear(width, 24))


def train(
    net: nn.Module, steps: range, size: Callable[[int], float] = lambda _: 1.0, batches: int = 1
) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for number in steps:
        for batch in range(batches):
            x = random(4, 8, 24, seed=100 * number + batch) * size(number)
            loss = net(x).square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def everything(net: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, counts and histories."""
    found = {name: p.detach() for name, p in net.named_parameters()}
    for name, layer in monitor_module.layers_of(net).items():
        found |= {f"{name}.counts": layer.fp8_counts, f"{name}.state": layer.fp8_state}
    return found


def caster_of(module: nn.Module) -> CastingNorm:
    caster = getattr(module, norm_module._CASTER)
    assert isinstance(caster, CastingNorm)
    return caster


def is_cast(net: nn.Sequential, x: torch.Tensor, take: bool = True) -> bool:
    """Return whether a call of the norm serves a cast; its result is passed to the layer."""
    y = net[0](x.requires_grad_())
    found = hasattr(y, "_fp8_cast")
    if take:
        net[1](y)
    return found
