"""A window with sinks on the CPU: ``kp.attention`` beside SDPA with the same mask as a dense tensor of booleans.

Run it with ``python demos/attention.py``; it takes a few seconds. The times are of this run on this machine, on
one thread, so that whatever else the machine does disturbs both alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction.timing import median_seconds

HEADS, LENGTH, DIM = 8, 2048, 64


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    console = Console()
    cpu = kp.device("cpu")
    q, k, v = (torch.randn(1, HEADS, LENGTH, DIM, requires_grad=True) for _ in range(3))
    mask = kp.masks.causal() & (kp.masks.window(128) | kp.masks.sinks(16))

    console.print(f"{mask}: {mask.density(LENGTH, LENGTH):.1%} of {LENGTH} x {LENGTH} pairs", highlight=False)
    console.print(mask.show(LENGTH, size=16), highlight=False)
    console.print("\nWhich kernel serves it, and why:")
    console.print(str(kp.explain(kp.attention, q, k, v, mask)), "\n", highlight=False, soft_wrap=True)

    dense = mask.dense(LENGTH, LENGTH)
    gradient = torch.randn_like(q)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "SDPA, dense mask": lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=dense),
        "kp.attention": lambda: kp.attention(q, k, v, mask),
    }
    exact = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=dense)
    exact_gradients = torch.autograd.grad(exact, (q, k, v), gradient.double())

    table = Table("", "forward", "with backward", "error of out", "of gradients", title="this run, on one thread")
    for name, way in ways.items():

        def train(way: Callable[[], torch.Tensor] = way) -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(way(), (q, k, v), gradient)

        def forward(way: Callable[[], torch.Tensor] = way) -> torch.Tensor:
            with torch.no_grad():
                return way()

        times = [f"{median_seconds(run, cpu) * 1e3:.1f} ms" for run in (forward, train)]
        error = float((forward() - exact.detach()).abs().max())
        errors = [float((ours - truth).abs().max()) for ours, truth in zip(train(), exact_gradients, strict=True)]
        table.add_row(name, *times, f"{error:.1e}", f"{max(errors):.1e}")
    console.print(table)
    known = mask.layout(LENGTH, LENGTH)
    ours = sum(part.nbytes for part in (*known.intervals(), *known.walk(128, 128).tensors()))
    console.print(f"The dense mask takes {dense.nbytes:,} bytes. Ours, made ready for a kernel, takes {ours:,}.")


if __name__ == "__main__":
    main()
