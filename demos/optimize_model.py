"""Automatic optimisation: kp.optimize on an unchanged model, verified and timed on this machine, and taken back.

Run it with ``python demos/optimize_model.py``; it needs ``pip install transformers``. The model has random weights.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

import kernel_pytorch as kp

torch.manual_seed(0)
torch.set_num_threads(1)
config = transformers.MistralConfig(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
    sliding_window=64,
)
model = transformers.MistralForCausalLM(config).eval()
inputs = {"input_ids": torch.randint(512, (1, 1024)), "use_cache": False}
with torch.no_grad():
    before = model(**inputs).logits

best = kp.optimize(model, inputs, goal="latency", exclude=("compile",), budget=8)  # seconds
with torch.no_grad():
    difference = float((best(**inputs).logits - before).abs().max())
folder = Path(tempfile.mkdtemp())
best.plan.save(folder / "plan.json")
report = best.report
report.save(folder / "report.html")
print(report)

best.revert()
with torch.no_grad():
    exact = torch.equal(model(**inputs).logits, before)
table = Table("input", "eager", "optimised", "gain", "largest difference of the logits", "after revert")
for one in report.inputs:
    times = (f"{seconds * 1e3:.1f} ms" for seconds in (one.eager_seconds, one.best_seconds))
    table.add_row(one.label, *times, f"{one.speedup:.2f}x", f"{difference:.1e}", "equal" if exact else "differs")
Console().print(table, f"plan and report: {folder}")
