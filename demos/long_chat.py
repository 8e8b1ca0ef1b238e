"""A long chat on a device: attention with sinks and a window over a cache of fixed size, without PyTorch.

Run it with ``python demos/long_chat.py``; it needs ``pip install 'kernel-pytorch[lowering]'`` and a C++ compiler.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction.timing import median_seconds

HEADS, DIM, WINDOW, SINKS, PART = 4, 32, 512, 4, 256


class Layer(nn.Module):
    """A layer of a chat: its keys and values stay in the program, in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HEADS * DIM, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, HEADS * DIM)
        self.cache = kp.KVCache(HEADS, DIM, window=WINDOW, sinks=SINKS, longest=PART, dtype=torch.int8)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        return self.out(self.cache(q, k, v, position).transpose(1, 2).flatten(2))


torch.manual_seed(0)
layer, start = Layer().eval(), torch.tensor([0])
part, token = torch.randn(1, PART, HEADS * DIM), torch.randn(1, 1, HEADS * DIM)
program = kp.lower(layer, {"prefill": (part, start), "decode": (token, start)}).load()

history = torch.randn(1, 16 * PART, HEADS * DIM)  # what the chat has said so far
q, k, v = layer.qkv(history).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
mask = kp.masks.causal() & (kp.masks.window(WINDOW) | kp.masks.sinks(SINKS))
with torch.no_grad():
    exact = layer.out(kp.attention(q, k, v, mask).transpose(1, 2).flatten(2))  # over the whole history

held = sum(buffer.nbytes for buffer in layer.cache.buffers())
table = Table("tokens so far", "one more token", "cache", "keys and values of all", "from the exact result")
for at in range(0, history.shape[1], PART):
    out = program.run("prefill", (history[:, at : at + PART], torch.tensor([at])))
    tokens = at + PART
    if tokens in (PART, 4 * PART, 8 * PART, 16 * PART):
        now = torch.tensor([tokens])
        seconds = median_seconds(lambda now=now: program.run("decode", (token, now)), kp.device("cpu"))
        wanted = exact[:, at:tokens]
        decibels = -20 * torch.log10((out - wanted).norm() / wanted.norm()).item()
        whole = 2 * tokens * HEADS * DIM * 4
        table.add_row(f"{tokens:,}", f"{seconds * 1e6:.0f} us", f"{held:,}", f"{whole:,}", f"{decibels:.0f} dB")
        assert decibels > 30
Console().print(table)
