"""Ops of the registry that the runtime has no operator for are lowered as their definitions."""

import torch
from torch.export import Dim

import kernel_pytorch as kp
from kernel_pytorch.ops.rope.definition import tables


class Attention(torch.nn.Module):
    """Self-attention with kp.rope and kp.attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        cos, sin = tables(64, 16, False, torch.device("cpu"))
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, 16).permute(2, 0, 3, 1, 4)
        q, k = kp.rope(q, k, self.cos[:, :length], self.sin[:, :length])
        out = kp.attention(q, k, v, kp.masks.causal())
        return self.out(out.transpose(1, 2).reshape(batch, length, 32))


def test_rope_is_written_out_and_the_attention_beside_it_is_delegated() -> None:
    torch.manual_seed(0)
    model = Attention().eval()
    x = torch.randn(1, 24, 32)
    program = kp.lower(model, (x,), dynamic_shapes=({1: Dim("length", min=2, max=64)},))
    assert program.report.count("KernelPyTorchBackend", "kernel_pytorch_lowering::attention") == 1
    assert "kernel_pytorch::rope" not in str(program.report)
    loaded = program.load()
    for length in (24, 7):
        given = torch.randn(1, length, 32)
        with torch.no_grad():
            torch.testing.assert_close(loaded(given), model(given), atol=1e-5, rtol=1e-5)
