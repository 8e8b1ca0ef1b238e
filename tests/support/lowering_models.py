"""Models that several test files lower."""

import torch

import kernel_pytorch as kp


class Block(torch.nn.Module):
    """A transformer block with grouped heads, rotary embedding and a gated feed-forward."""

    def __init__(self, mask: kp.masks.Mask | None = None, dim: int = 64, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.mask, self.heads, self.kv_heads, self.head_dim = mask, heads, kv_heads, dim // heads
        self.first, self.second = torch.nn.RMSNorm(dim), torch.nn.LayerNorm(dim)
        self.q = torch.nn.Linear(dim, dim)
        self.kv = torch.nn.Linear(dim, 2 * kv_heads * self.head_dim)
        self.out, self.gate, self.up = torch.nn.Linear(dim, dim), torch.nn.Linear(dim, 96), torch.nn.Linear(dim, 96)
        self.down = torch.nn.Linear(96, dim)
        angles = torch.arange(128.0)[:, None] * 10000 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        self.register_buffer("cos", torch.cat([angles, angles], dim=-1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], dim=-1).sin())

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        length = x.shape[2]
        return x * self.cos[:length] + torch.cat([-right, left], dim=-1) * self.sin[:length]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        normed = self.first(x)
        q = self.q(normed).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k, v = self.kv(normed).view(batch, length, 2, self.kv_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k = self.rotated(q), self.rotated(k)
        if self.mask is not None:
            y = kp.attention(q, k, v, self.mask)
        else:
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, dim))
        normed = self.second(x)
        return x + self.down(torch.nn.functional.silu(self.gate(normed)) * self.up(normed))
