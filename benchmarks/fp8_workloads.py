"""The workloads of ``benchmarks/fp8.py``: linear layers, a SwiGLU MLP and Llama blocks, and a grid of shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

__all__ = ["EACH", "PEERS", "RECIPES", "WATCHED", "WORKLOADS", "Workload", "grid", "module", "small"]

RECIPES = ("delayed", "tensorwise", "rowwise", "auto")
PEERS = ("torchao tensorwise", "torchao rowwise")
WATCHED = " watched"
"""Suffix of a recipe whose monitor is active."""
EACH = " casting each batch"
"""Suffix of a recipe that quantizes the weights in each batch of a step."""
HEAD = 128


@dataclass(frozen=True)
class Workload:
    """One module, with an input of shape (*rows, width)."""

    name: str
    part: str
    """The record it belongs to."""
    case: str
    kind: str
    rows: tuple[int, ...]
    width: int
    hidden: int
    """Outputs of a linear layer, the inner width of an MLP."""
    heads: tuple[int, int] = (0, 0)
    """Query heads and key heads."""
    head: int = HEAD
    recipes: tuple[str, ...] = RECIPES
    peers: tuple[str, ...] = PEERS
    modes: tuple[str, ...] = ("eager", "compiled")
    """Of ``fp8.Arm``, for every recipe."""
    others: tuple[str, ...] = ()
    """Modes with less host time, for the first recipe only."""
    twin: bool = False
    """Whether the bf16 layer is timed twice, to measure the noise."""
    memory: bool = False
    batches: int = 1
    """Batches per step whose gradients are accumulated; several are followed by an optimizer step."""

    @property
    def floor(self) -> float:
        """The smallest accepted signal-to-noise ratio in dB; noise accumulates over layers."""
        return 20.0 if self.kind == "linear" else 17.0

    @property
    def flops(self) -> int:
        """FLOPs of the matmuls of forward and backward; causal attention counts half."""
        tokens = math.prod(self.rows)
        weights = self.width * self.hidden * (1 if self.kind == "linear" else 3)
        attention = 0
        if self.kind == "block":
            queries, keys = self.heads
            weights += 2 * self.width * self.head * (queries + keys)
            attention = 2 * tokens * self.rows[-1] * queries * self.head * 7 // 2  # the backward has 2.5 forwards
        return self.batches * (6 * tokens * weights + attention)


WORKLOADS = (
    Workload("linear-4096", "linears", "linear M 8192, 4096 -> 4096", "linear", (8192,), 4096, 4096,
             others=("eager in one thread", "compiled in one thread", "graphs", "graphs in one thread",
                     "eager in two threads", "compiled in two threads")),
    Workload("linear-14336", "linears", "linear M 8192, 4096 -> 14336", "linear", (8192,), 4096, 14336,
             recipes=("delayed", "tensorwise")),
    Workload("linear-28672", "linears", "linear M 16384, 8192 -> 28672", "linear", (16384,), 8192, 28672,
             recipes=("delayed", "tensorwise")),
    Workload("mlp", "blocks", "SwiGLU MLP 4096/14336, 16384 tokens", "mlp", (16384,), 4096, 14336,
             recipes=(*RECIPES, "delayed-e4m3")),
    Workload("block-4096", "blocks", "Llama block 4096/14336, 4 x 4096", "block", (4, 4096), 4096, 14336, (32, 8),
             recipes=(*RECIPES, "delayed-e4m3"), memory=True),
    Workload("block-2048", "small-block", "Llama block 2048/5632, 8 x 2048", "block", (8, 2048), 2048, 5632, (16, 8),
             recipes=(*RECIPES, f"delayed{WATCHED}", "blockwise"),
             others=("eager in one thread", "compiled in one thread")),
    Workload("batches", "batches", "Llama block 4096/14336, 8 batches of 1 x 4096", "block", (1, 4096), 4096, 14336,
             (32, 8), recipes=("delayed", f"delayed{EACH}"), batches=8),
)  # fmt: skip


def grid() -> Iterator[Workload]:
    """Yield large, small and odd shapes, on none of which recipe auto may be slower than bf16.

    In one thread: most of them run the same kernels as bf16, and a second thread adds more noise than any difference.
    The twin of the bf16 layer shows the remaining noise.
    """
    compiled = {(8192, 4096, 4096), (128, 1024, 1024), (1000, 1000, 3000)}
    for width, hidden in ((256, 256), (1024, 1024), (2048, 2048), (1000, 3000), (4096, 4096)):
        for rows in (16, 128, 1000, 2048, 8192):
            case = f"any shape: linear M {rows}, {width} -> {hidden}"
            modes = ("eager", "compiled") if (rows, width, hidden) in compiled else ("eager",)
            yield Workload("grid", "grid", case, "linear", (rows,), width, hidden, recipes=("auto",), peers=(),
                           modes=tuple(f"{mode} in one thread" for mode in modes), twin=True)  # fmt: skip


def small(work: Workload) -> Workload:
    """Return the workload at a size that a CPU computes quickly in emulated FP8."""
    sizes: dict[str, Any] = {"rows": (48,) if len(work.rows) == 1 else (2, 24), "width": 64, "hidden": 96}
    if work.part == "grid":
        sizes = {"rows": (min(work.rows[0], 24),), "width": work.width // 32, "hidden": work.hidden // 32}
    return replace(work, case=f"small {work.case}", heads=(4, 2) if work.heads[0] else (0, 0), head=16, **sizes)


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, **where: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False, **where)
        self.up_proj = nn.Linear(width, hidden, bias=False, **where)
        self.down_proj = nn.Linear(hidden, width, bias=False, **where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Attention(nn.Module):
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, width: int, heads: tuple[int, int], head: int, length: int, **where: Any) -> None:
        super().__init__()
        self.head = head
        self.q_proj = nn.Linear(width, heads[0] * head, bias=False, **where)
        self.k_proj = nn.Linear(width, heads[1] * head, bias=False, **where)
        self.v_proj = nn.Linear(width, heads[1] * head, bias=False, **where)
        self.o_proj = nn.Linear(heads[0] * head, width, bias=False, **where)
        frequencies = 500000.0 ** -(torch.arange(0, head, 2, device=where["device"]) / head)
        angles = torch.arange(length, device=where["device"])[:, None] * frequencies.repeat(2)
        self.register_buffer("cos", angles.cos().to(where["dtype"]), persistent=False)
        self.register_buffer("sin", angles.sin().to(where["dtype"]), persistent=False)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = nn.functional.scaled_dot_product_attention(
            self.rotated(q), self.rotated(k), v, is_causal=True, enable_gqa=True
        )
        result: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    def __init__(self, work: Workload, **where: Any) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(work.width, eps=1e-5, **where)
        self.attention = Attention(work.width, work.heads, work.head, work.rows[-1], **where)
        self.mlp_norm = nn.RMSNorm(work.width, eps=1e-5, **where)
        self.mlp = Mlp(work.width, work.hidden, **where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


def module(work: Workload, device: torch.device) -> nn.Module:
    """Return the workload's module, always with the same weights."""
    where: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    model: nn.Module
    if work.kind == "linear":
        model = nn.Linear(work.width, work.hidden, bias=False, **where)
    elif work.kind == "mlp":
        model = Mlp(work.width, work.hidden, **where)
    else:
        model = Block(work, **where)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
    return model
