"""Random modules of common layers, with hooks, shared modules, tied weights and odd outputs, from a seed."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

__all__ = ["Generated", "check"]

WIDTHS = (16, 32, 48)
PIECES = (
    "linear",
    "norm",
    "rms",
    "activation",
    "dropout",
    "attention",
    "convolution",
    "batch norm",
    "shared",
    "branch",
    "buffer",
)


class Counter(nn.Module):
    """Has a buffer that each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class Attention(nn.Module):
    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.inner, self.causal = nn.MultiheadAttention(width, 2, batch_first=True), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1) if self.causal else None
        found: torch.Tensor = self.inner(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x + found


class Convolution(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(1, 4, 3, padding=1)
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x.unsqueeze(1)).mean(1)


class Normalized(nn.Module):
    """A convolution with a batch norm whose statistics are not zero and one."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=draw.random() < 0.5), nn.BatchNorm2d(4))
        self.inner[1].running_mean.normal_()
        self.inner[1].running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x.unsqueeze(1)).mean(1)


class Branch(nn.Module):
    """Control flow that depends on data."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) if bool(x.abs().mean() > 100) else self.two(x)


class Generated(nn.Module):
    """A chain of pieces; its output is a tensor, a tuple or a dictionary."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.width = draw.choice(WIDTHS)
        self.pieces = nn.ModuleList()
        self.kinds = [draw.choice(PIECES) for _ in range(draw.randint(2, 7))]
        for kind in self.kinds:
            self.pieces.append(self._piece(kind, draw))
        self.form = draw.choice(("tensor", "tuple", "dict"))
        self.residual = draw.random() < 0.5
        self.hooked = 0
        if draw.random() < 0.4:
            draw.choice(list(self.pieces)).register_forward_hook(_count)
        if draw.random() < 0.3:
            linears = [module for module in self.modules() if type(module) is nn.Linear]
            if len(linears) > 1 and linears[0].weight.shape == linears[-1].weight.shape:
                linears[-1].weight = linears[0].weight
        if draw.random() < 0.2:
            for parameter in list(self.parameters())[:2]:
                parameter.requires_grad_(False)
        self.rows, self.length = draw.randint(1, 3), draw.randint(2, 9)

    def _piece(self, kind: str, draw: random.Random) -> nn.Module:
        width = self.width
        if kind == "shared" and len(self.pieces):
            return draw.choice(list(self.pieces))
        made = {
            "norm": lambda: nn.LayerNorm(width),
            "rms": lambda: nn.RMSNorm(width, eps=1e-6),
            "activation": lambda: draw.choice((nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh))(),
            "dropout": lambda: nn.Dropout(0.25),
            "attention": lambda: Attention(width, draw.random() < 0.5),
            "convolution": lambda: Convolution(width),
            "batch norm": lambda: Normalized(draw),
            "branch": lambda: Branch(width),
            "buffer": Counter,
        }
        return made.get(kind, lambda: nn.Linear(width, width, bias=draw.random() < 0.7))()

    def forward(self, x: torch.Tensor) -> Any:
        first = x
        for piece in self.pieces:
            x = piece(x)
        x = x + first if self.residual else x
        return {"tensor": x, "tuple": (x, first), "dict": {"x": x, "none": None}}[self.form]

    def example(self) -> tuple[torch.Tensor, ...]:
        return (torch.randn(self.rows, self.length, self.width),)


def _count(module: nn.Module, given: Any, out: Any) -> None:
    module.hook_calls = getattr(module, "hook_calls", 0) + 1


def check(seed: int, **options: Any) -> str:
    """Optimise one generated model and check everything that must hold; return what was done, in words."""
    import kernel_pytorch as kp
    from kernel_pytorch.optimization.examples import leaves

    model = Generated(seed)
    goal = ("latency", "training", "throughput", "memory")[seed % 4]
    if not any(parameter.requires_grad for parameter in model.parameters()):
        goal = "latency"  # nothing to train
    inputs = model.example()
    model.eval()

    def outputs() -> list[torch.Tensor]:
        with torch.no_grad():
            return [tensor.clone() for _, tensor in leaves(model(*inputs))]

    def state() -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in model.state_dict().items()}

    before, first = outputs(), state()
    best = kp.optimize(model, inputs, goal, resume=False, **options)
    after = state()
    assert first.keys() == after.keys(), f"seed {seed}: the state dict has other names"
    for name, value in first.items():
        assert torch.equal(after[name], value), f"seed {seed}: {name} was changed"
    for one, other in zip(before, outputs(), strict=True):
        noise, signal = (other - one).double().square().sum(), one.double().square().sum()
        assert float(noise) <= float(signal) * 10 ** (-17 / 10), f"seed {seed}: {best.report}"
    steps = [step.candidate for step in best.plan.steps]
    best.revert()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(first[name])  # calls count
    for one, other in zip(before, outputs(), strict=True):
        assert torch.equal(one, other), f"seed {seed}: the model is not what it was"
    assert not any("forward" in vars(module) for module in model.modules()), f"seed {seed}: a forward is left"
    return f"{goal}: {' + '.join(steps) or 'left as it is'}"
