"""A training step on a million tokens of a model of a billion parameters, on one GPU.

Run it with ``python demos/million_tokens.py``; on a smaller device a small model takes the same steps. Attention is
exact, and its memory grows with the tokens instead of their square. The rest of the model runs in chunks of tokens,
and each layer is run again in the backward. ``benchmarks/million_tokens.py`` checks every gradient and measures.
"""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy, embedding, linear, silu

import kernel_pytorch as kp

here = kp.device()
device = torch.device(here.torch_device or "cpu")
if device.type != "cpu" and here.memory_bytes > 120 << 30:
    TOKENS, LAYERS, WIDTH, HEADS, KV_HEADS, FFN, VOCABULARY = 1 << 20, 16, 2048, 16, 4, 8192, 32768
    WINDOW, CHUNK, DTYPE = 4096, 32768, torch.bfloat16
else:
    TOKENS, LAYERS, WIDTH, HEADS, KV_HEADS, FFN, VOCABULARY = 4096, 4, 64, 4, 2, 192, 512
    WINDOW, CHUNK, DTYPE = 256, 512, torch.float32
DIM = WIDTH // HEADS
NEAR = kp.masks.causal() & (kp.masks.window(WINDOW) | kp.masks.sinks(64))
MASKS = [kp.masks.causal() if layer == LAYERS - 1 else NEAR for layer in range(LAYERS)]


def weight(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns, device=device) * columns**-0.5)


def turns(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For kp.rope; angles in float64, because at position one million float32 is off by hundredths."""
    place = torch.arange(first, first + count, dtype=torch.float64, device=device)[:, None]
    angle = place * 500_000.0 ** (-torch.arange(0, DIM, 2, device=device).double() / DIM)
    return angle.cos().float().repeat(1, 2), angle.sin().float().repeat(1, 2)


class Layer(nn.Module):
    """Attention and a gated feed-forward; parameters are float32, and rounded where they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = weight((HEADS + 2 * KV_HEADS) * DIM, WIDTH), weight(WIDTH, WIDTH)
        self.gate_up, self.down = weight(2 * FFN, WIDTH), weight(WIDTH, FFN)

    def project(self, first: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = linear(kp.rms_norm(x), self.qkv.to(x.dtype)).unflatten(-1, (-1, DIM))
        q, k, v = (y.transpose(0, 1)[None] for y in heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1))
        return *kp.rope(q, k, *turns(first, len(x))), v

    def finish(self, _: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + linear(attended[0].transpose(0, 1).flatten(1), self.out.to(x.dtype))
        gate, up = linear(kp.rms_norm(x), self.gate_up.to(x.dtype)).chunk(2, dim=-1)
        return x + linear(silu(gate) * up, self.down.to(x.dtype))


torch.manual_seed(0)
table, layers = weight(VOCABULARY, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))
optimizer = torch.optim.AdamW([table, *layers.parameters()], lr=3e-4)


def losses(_: int, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = linear(kp.rms_norm(x), table.to(x.dtype)).float()
    return cross_entropy(logits, targets[:, 0], reduction="none")[:, None]


def step(text: torch.Tensor) -> float:
    whole = {"chunk": CHUNK // 4, "parameters": [table]}
    x = kp.context_parallel.tokenwise(lambda _, t: embedding(t[:, 0], table).to(DTYPE), text[:-1], **whole)
    for layer, mask in zip(layers, MASKS, strict=True):
        own = {"chunk": CHUNK, "parameters": list(layer.parameters())}
        x = kp.context_parallel.chunked_layer(x, mask, layer.project, layer.finish, **own)
    loss = kp.context_parallel.tokenwise(losses, x, text[1:], **whole).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.item()


size = sum(p.numel() for p in (table, *layers.parameters()))
rows = Table("tokens", "loss", "seconds", "tokens/s", "peak memory", "one dense mask", title=f"{size:,} parameters")
for tokens in (TOKENS // 16, TOKENS // 4, TOKENS):  # the first one warms up
    text = torch.randint(VOCABULARY, (tokens + 1, 1), device=device)
    began = time.perf_counter()
    loss = step(text)
    seconds = time.perf_counter() - began
    peak = 0 if device.type == "cpu" else torch.get_device_module(device).max_memory_allocated()
    cells = f"{tokens:,}", f"{loss:.2f}", f"{seconds:.1f}", f"{tokens / seconds:,.0f}"
    rows.add_row(
        *cells, f"{peak / 2**30:.1f} GiB" if peak else "not measured on a CPU", f"{tokens**2 / 2**30:,.2g} GiB"
    )
Console().print(rows)
