"""``kernel-pytorch run``: run a .pte file, and print its outputs and time."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

__all__ = ["run"]


def run(program: Path, given: tuple[Path, ...], method: str, repeat: int) -> None:
    from kernel_pytorch.lowering.quiet import quiet_native
    from kernel_pytorch.lowering.runtime import load

    console = Console()
    with quiet_native():
        loaded = load(program)
    inputs = [torch.load(path, weights_only=True) for path in given] or loaded.ones(method)
    seconds = []
    outputs: Any = None
    with console.status(f"running {program.name}"), quiet_native():
        for _ in range(repeat):
            start = time.perf_counter()
            outputs = loaded.run(method, inputs)
            seconds.append(time.perf_counter() - start)
    for number, output in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
        if isinstance(output, torch.Tensor):
            kind = str(output.dtype).removeprefix("torch.")
            console.print(
                f"output {number}: {kind}{list(output.shape)}, mean {output.double().mean():.6g}", markup=False
            )
        else:
            console.print(f"output {number}: {output}", markup=False)
    console.print(f"median of {repeat}: {statistics.median(seconds) * 1e3:.3f} ms", markup=False)
