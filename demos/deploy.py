"""Deployment: a model becomes a program that runs without PyTorch, at every length up to a maximum, quantized or not.

Run it with ``python demos/deploy.py``; it needs ``pip install 'kernel-pytorch[lowering]'`` and a C++ compiler.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction.timing import median_seconds

MASK = kp.masks.causal() & (kp.masks.window(64) | kp.masks.sinks(4))


class Block(nn.Module):
    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(kp.attention(q, k, v, MASK).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


torch.manual_seed(0)
torch.set_num_threads(1)
model, x = Block().eval(), torch.randn(1, 512, 128)
length = torch.export.Dim("length", min=2, max=1024)

table = Table("program", "bytes", "who runs it", "512 tokens", "against eager", title="one thread")
with torch.no_grad():
    table.add_row("eager", "", "PyTorch", f"{median_seconds(lambda: model(x), kp.device('cpu')) * 1e3:.1f} ms", "")
for recipe in (None, "int8-weight"):
    program = kp.lower(model, (x,), recipe=recipe, dynamic_shapes=({1: length},))
    path = Path(tempfile.mkdtemp()) / "block.pte"
    program.save(path)
    loaded = kp.load(path)  # what a C++ program loads as well
    seconds = median_seconds(lambda loaded=loaded: loaded(x), kp.device("cpu"))
    with torch.no_grad():
        exact = model(x)
    noise = (loaded(x) - exact).norm() / exact.norm()
    assert not program.report.left, "every operator has a delegate"
    assert loaded(x[:, :37]).shape == (1, 37, 128), "another length, the same program"
    who = ", ".join(sorted({delegate.backend for delegate in program.report.delegates}))
    decibels = f"{-20 * torch.log10(noise).item():.0f} dB"
    table.add_row(recipe or "float32", f"{path.stat().st_size:,}", who, f"{seconds * 1e3:.1f} ms", decibels)
Console().print(table)
