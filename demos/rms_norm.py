"""Train a small model whose normalisation is ``kp.rms_norm``, and check the op against float64 on its own data.

Run it with ``python demos/rms_norm.py``; it takes a few seconds on a CPU and uses a GPU where one is.
"""

from __future__ import annotations

import torch
from torch import nn

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction import registered_op
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.testing import compare


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kp.rms_norm(x, self.weight)


def main() -> None:
    torch.manual_seed(0)
    device = kp.device()
    where = torch.device(device.torch_device or "cpu")
    print(f"device: {device.name} ({device.arch})\n")

    hidden = 256
    first, norm = nn.Linear(hidden, hidden), RMSNorm(hidden)
    model = nn.Sequential(first, norm, nn.GELU(), nn.Linear(hidden, hidden), RMSNorm(hidden)).to(where)
    x = torch.randn(512, hidden, device=where)
    target = nn.functional.normalize(x.roll(1, dims=-1), dim=-1) * hidden**0.5

    print("Which kernel serves the model's calls, and why:")
    print(kp.explain(kp.rms_norm, x, norm.weight), "\n")

    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(61):
        loss = nn.functional.mse_loss(model(x), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")

    print("\nOutputs and gradients against the float64 definition, on the trained weights:")
    with torch.no_grad():
        arguments = {"x": first(x), "weight": norm.weight.detach(), "eps": 1e-6}
    op = registered_op("rms_norm")
    for comparison in compare(op, function_of(op), arguments):
        print(f"  {comparison}")


if __name__ == "__main__":
    main()
