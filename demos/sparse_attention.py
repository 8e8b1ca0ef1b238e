"""Sparse attention: a window with sinks, and a few blocks, beside SDPA with the same mask as a dense tensor.

Run it with ``python demos/sparse_attention.py``. The times are of this run on this machine, on one thread.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention as sdpa

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction.timing import median_seconds

HEADS, LENGTH, DIM = 2, 2048, 64

torch.manual_seed(0)
torch.set_num_threads(1)
q, k, v = (torch.randn(1, HEADS, LENGTH, DIM) for _ in range(3))
tenth = torch.rand(LENGTH // 128, LENGTH // 128) < 0.1
masks = {
    "everything before": kp.masks.causal(),
    "window(128) | sinks(16)": kp.masks.causal() & (kp.masks.window(128) | kp.masks.sinks(16)),
    "random blocks": kp.masks.blocks(tenth | torch.eye(len(tenth), dtype=torch.bool)),
}

table = Table(
    "mask",
    "pairs",
    "kp.attention",
    "SDPA, dense mask",
    "error",
    "mask, bytes",
    title="forward, one thread, float32",
)
for name, mask in masks.items():
    dense = mask.dense(LENGTH, LENGTH)
    exact = sdpa(q.double(), k.double(), v.double(), attn_mask=dense)
    with torch.no_grad():
        ours = median_seconds(lambda mask=mask: kp.attention(q, k, v, mask), kp.device("cpu"))
        theirs = median_seconds(lambda dense=dense: sdpa(q, k, v, attn_mask=dense), kp.device("cpu"))
        error = float((kp.attention(q, k, v, mask).double() - exact).abs().max())
    layout = mask.layout(LENGTH, LENGTH)
    ready = sum(part.nbytes for part in (*layout.intervals(), *layout.walk(128, 128).tensors()))
    table.add_row(
        name,
        f"{mask.density(LENGTH, LENGTH):.0%}",
        f"{ours * 1e3:.1f} ms",
        f"{theirs * 1e3:.1f} ms",
        f"{error:.0e}",
        f"{ready:,} for {dense.nbytes:,}",
    )
Console().print(table)
print("\nwindow(128) | sinks(16), drawn small:")
print(masks["window(128) | sinks(16)"].show(LENGTH, size=24))
