"""FP8 training: the same small model trained in full precision and with an FP8 recipe, and what the casts lost.

Run it with ``python demos/fp8_training.py``. Without FP8 matrix units the arithmetic is the same, and slow.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy

import kernel_pytorch as kp

VOCABULARY, WIDTH, STEPS = 64, 64, 61


def trained(recipe: str | None) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.RMSNorm(WIDTH),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, WIDTH),
        nn.Linear(WIDTH, VOCABULARY),
    )
    if recipe is not None:
        kp.fp8.convert(model, recipe, layers=lambda name, _: name != "5")  # the head stays as it is
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    successor = torch.randperm(VOCABULARY)  # what there is to learn: each token has one that follows
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (128,))
        loss = cross_entropy(model(tokens), successor[tokens])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


torch.set_num_threads(1)
full, _ = trained(None)
table = Table("step", "float32", title="loss")
columns = [full]
for recipe in ("delayed", "rowwise", "blockwise"):
    losses, model = trained(recipe)
    table.add_column(recipe)
    columns.append(losses)
for step in range(0, STEPS, 10):
    table.add_row(str(step), *(f"{losses[step]:.4f}" for losses in columns))
print(kp.fp8.report(model))
Console().print(table)
worst = max(abs(losses[-1] - full[-1]) for losses in columns)
print(f"The last losses differ by at most {worst:.1e}.")
assert worst < 0.25
