"""The model and data of parity runs: a transformer of plain modules, and synthetic text.

Shapes: B sequences, T tokens, E hidden, H heads, D head dimension, F feed-forward width, V vocabulary, R ranks of a
token's successors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

__all__ = ["SIZES", "Language", "Size", "Transformer", "batches", "held_out_batches", "size_named"]


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a model, its batches and its schedule.

    Example:
        >>> SIZES["100m"].parameters, SIZES["100m"].batch * SIZES["100m"].length
        (97536768, 8192)
    """

    name: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    length: int
    """Tokens per sequence."""
    batch: int
    """Sequences per step."""
    steps: int
    """Default number of steps."""
    learning_rate: float
    """Peak learning rate."""
    held_out: int
    """Number of held-out batches."""

    @property
    def parameters(self) -> int:
        block = self.hidden * (4 * self.hidden + 3 * self.ffn + 2)
        return self.layers * block + 2 * self.vocab * self.hidden + self.hidden

    @property
    def step_flops(self) -> int:
        """FLOPs of one step's matmuls, forward and backward: linear layers and causal attention."""
        weights = self.layers * self.hidden * (4 * self.hidden + 3 * self.ffn) + self.vocab * self.hidden
        return 6 * self.batch * self.length * (weights + self.layers * self.hidden * self.length)


_KNOWN = (
    Size(
        name="small", vocab=512, hidden=128, layers=2, heads=4, ffn=352, length=64, batch=8, steps=200,
        learning_rate=1e-3, held_out=16,
    ),
    Size(
        name="100m", vocab=8192, hidden=768, layers=12, heads=12, ffn=2048, length=512, batch=16, steps=1000,
        learning_rate=3e-4, held_out=32,
    ),
)  # fmt: skip
SIZES = {known.name: known for known in _KNOWN}


def size_named(size: str) -> Size:
    """Return the size of this name; raise an error that lists the names if there is none.

    Example:
        >>> size_named("small").layers
        2
    """
    if size not in SIZES:
        raise ValueError(f"size={size!r}: use one of {', '.join(SIZES)}")
    return SIZES[size]


# Data


class Language:
    """Synthetic text with structure at several distances, drawn from one fixed random grammar.

    - Frequencies follow Zipf's law.
    - Most tokens are one of the 16 successors of their predecessor, some much likelier than others.
    - Each sequence has a topic, which permutes the probabilities of every token's successors. It can only be inferred
      from many tokens.
    - Passages are repeated verbatim later in the sequence.

    Example:
        >>> import torch
        >>> text = Language(512).sample(2, 64, torch.Generator().manual_seed(0))
        >>> text.shape, bool((text < 512).all())
        (torch.Size([2, 64]), True)
    """

    successors = 16
    fresh = 0.1
    """Fraction of tokens that do not depend on their predecessor."""
    repeats = 2

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self._frequency = _cumulative(vocab, 1.0)
        self._rank = _cumulative(self.successors, 1.5)
        generator = torch.Generator().manual_seed(271828)  # the grammar is the same for every seed
        self._successors_VR = self._draw(self._frequency, (vocab, self.successors), generator)

    @staticmethod
    def _draw(cumulative: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        uniform = torch.rand(shape, generator=generator)
        return torch.searchsorted(cumulative, uniform).clamp_max_(len(cumulative) - 1)

    def sample(self, rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Return (rows, length) int64 tokens on the CPU, the same on every machine."""
        if length < 16:
            raise ValueError(f"length={length}: repeated passages need at least 16 tokens")
        topic_B = torch.randint(self.successors, (rows,), generator=generator)
        rank_TB = self._draw(self._rank, (length, rows), generator) ^ topic_B
        fresh_TB = torch.rand((length, rows), generator=generator) < self.fresh
        text_TB = self._draw(self._frequency, (length, rows), generator)
        for t in range(1, length):  # vectorized over sequences
            following_B = self._successors_VR[text_TB[t - 1], rank_TB[t]]
            text_TB[t] = torch.where(fresh_TB[t], text_TB[t], following_B)
        text_BT = text_TB.t()
        for _ in range(self.repeats):
            text_BT = self._repeated(text_BT, generator)
        return text_BT.contiguous()

    @staticmethod
    def _repeated(text_BT: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Copy one passage of each sequence over a later one."""
        rows, length = text_BT.shape
        size, source, target = torch.rand((3, rows, 1), generator=generator)
        size = (length / 16 + size * (length * 3 / 16)).long()
        source = (source * (length - 2 * size)).long()
        target = source + size + (target * (length - source - 2 * size + 1)).long()
        position = torch.arange(length)
        inside = (position >= target) & (position < target + size)
        return text_BT.gather(1, torch.where(inside, position - (target - source), position))


def _cumulative(count: int, exponent: float) -> torch.Tensor:
    weight = torch.arange(1, count + 1, dtype=torch.float64) ** -exponent
    return (weight.cumsum(0) / weight.sum()).float()


def batches(size: Size, steps: int, seed: int) -> torch.Tensor:
    """Return (steps, B, T + 1) tokens, which every arm trains on for a seed, in this order.

    Example:
        >>> batches(SIZES["small"], 3, seed=0).shape
        torch.Size([3, 8, 65])
    """
    return _text(size, steps, torch.Generator().manual_seed(2 * seed))


def held_out_batches(size: Size) -> torch.Tensor:
    """Return (size.held_out, B, T + 1) tokens that no run trains on, the same for every run."""
    return _text(size, size.held_out, torch.Generator().manual_seed(2**31 - 1))  # odd, unlike those of the runs


def _text(size: Size, count: int, generator: torch.Generator) -> torch.Tensor:
    text = Language(size.vocab).sample(count * size.batch, size.length + 1, generator)
    return text.view(count, size.batch, size.length + 1)


# Model


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(size.hidden, size.hidden, bias=False) for _ in range(4)
        )

    def forward(self, x_BTE: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x_BTE).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotated(q, cos_TD, sin_TD), _rotated(k, cos_TD, sin_TD)
        out_BHTD = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended: torch.Tensor = self.o_proj(out_BHTD.transpose(1, 2).flatten(2))
        return attended


def _rotated(x_BHTD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    a, b = x_BHTD.float().chunk(2, dim=-1)
    return (x_BHTD.float() * cos_TD + torch.cat([-b, a], dim=-1) * sin_TD).to(x_BHTD.dtype)


class FeedForward(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.ffn, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.ffn, bias=False)
        self.down_proj = nn.Linear(size.ffn, size.hidden, bias=False)

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x_BTE)) * self.up_proj(x_BTE))
        return out


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(size.hidden, eps=1e-6)
        self.self_attn = Attention(size)
        self.post_attention_layernorm = nn.RMSNorm(size.hidden, eps=1e-6)
        self.mlp = FeedForward(size)

    def forward(self, x_BTE: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
        x_BTE = x_BTE + self.self_attn(self.input_layernorm(x_BTE), cos_TD, sin_TD)
        out: torch.Tensor = x_BTE + self.mlp(self.post_attention_layernorm(x_BTE))
        return out


class Transformer(nn.Module):
    """A Llama-shaped decoder of plain modules; its forward returns the mean next-token loss.

    Example:
        >>> import torch
        >>> size = SIZES["small"]
        >>> model = Transformer(size, seed=0)
        >>> sum(parameter.numel() for parameter in model.parameters()) == size.parameters
        True
        >>> model(batches(size, 1, seed=0)[0]).shape
        torch.Size([])
    """

    cosine: torch.Tensor  # (T, D)
    sine: torch.Tensor

    def __init__(self, size: Size, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocab, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, eps=1e-6)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)
        half = size.hidden // size.heads // 2
        rate = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(size.length, dtype=torch.float64).unsqueeze(-1) * torch.cat([rate, rate])
        self.register_buffer("cosine", angle.cos().float(), persistent=False)
        self.register_buffer("sine", angle.sin().float(), persistent=False)
        generator = torch.Generator().manual_seed(2 * seed + 1)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                deviation = 0.02 / math.sqrt(2 * size.layers) if into_stream else 0.02
                nn.init.normal_(weight, std=deviation, generator=generator)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTE = self.embedding(tokens_BT[:, :-1])
        for block in self.blocks:
            x_BTE = block(x_BTE, self.cosine, self.sine)
        logits_BTV = self.head(self.norm(x_BTE))
        return functional.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())
