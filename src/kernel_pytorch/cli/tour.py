"""``kernel-pytorch tour``: a first minute with the framework, on whatever machine this is."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.rule import Rule

import kernel_pytorch as kp
from kernel_pytorch import benchmarking
from kernel_pytorch.cli.bench import measurement_table
from kernel_pytorch.cli.doctor import diagnose, show
from kernel_pytorch.hardware_abstraction.op import registered_op

__all__ = ["run"]


def run() -> None:
    console = Console()
    console.print(Rule("1. What is here: kernel-pytorch doctor"))
    show(diagnose())

    console.print(Rule("2. One op: RMSNorm, and which kernel serves it"))
    best = kp.device()
    where = best.torch_device or "cpu"
    x = torch.randn(1024, 1024, device=where, requires_grad=True)
    weight = torch.randn(1024, device=where, requires_grad=True)
    console.print("kp.explain(kp.rms_norm, x, weight)", style="green")
    console.print(str(kp.explain(kp.rms_norm, x, weight)), highlight=False)
    console.print("\nThe same call on hardware that need not be here:")
    for name in ("nvidia/h200", "amd/mi300x"):
        console.print(f"\nkp.explain(kp.rms_norm, x, weight, device={name!r})", style="green")
        console.print(str(kp.explain(kp.rms_norm, x, weight, device=name)), highlight=False)

    console.print(Rule("3. It trains"))
    console.print("kp.rms_norm(x, weight).square().mean().backward()", style="green")
    gradients = torch.autograd.grad(kp.rms_norm(x, weight).square().mean(), (x, weight))
    console.print("gradient norms: x {:.4g}, weight {:.4g}".format(*(gradient.norm() for gradient in gradients)))

    console.print(Rule("4. Attention: what to attend to is data"))
    mask = kp.masks.causal() & (kp.masks.window(12) | kp.masks.sinks(4))
    console.print(
        "mask = kp.masks.causal() & (kp.masks.window(12) | kp.masks.sinks(4)); print(mask.show(64))", style="green"
    )
    console.print(mask.show(64, size=24), highlight=False)
    q, k, v = (torch.randn(1, 8, 64, 64, device=where) for _ in range(3))
    console.print("kp.explain(kp.attention, q, k, v, mask)", style="green")
    console.print(str(kp.explain(kp.attention, q, k, v, mask)), highlight=False)

    console.print(Rule("5. Correct first: every kernel against float64, then timed beside torch"))
    measurements = []
    for op_name, case_name in (("rms_norm", "4096x4096"), ("attention", "window-4k-d64")):
        work = benchmarking.plan(registered_op(op_name), best, (case_name,), ("float32",))
        for step in work.steps:
            with console.status(f"{op_name} {step}: checking, then timing"):
                measurements += list(benchmarking.run(work, step, 0.3))
    console.print(measurement_table(measurements))

    console.print(Rule("Next"))
    console.print("kernel-pytorch bench attention   every benchmark case of an op", highlight=False)
    console.print("docs/README.md                   the documentation", highlight=False)
