"""``kernel-pytorch lower``, ``run`` and ``build-runtime``, with progress."""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

__all__ = ["build_runtime", "lower", "run"]


def build_runtime(backend: str, *, only_path: bool = False) -> None:
    from kernel_pytorch.lowering.target import lowering_of

    with Console(stderr=only_path).status("looking for the runtime") as status:
        ready = lowering_of(backend).build(tell=status.update)
    said = str(ready.prefix) if only_path else f"the runtime is in {ready.prefix}"
    Console().print(said, markup=False, highlight=False, soft_wrap=True)


def _model(source: str) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    module_name, _, name = source.partition(":")
    if not name:
        raise ValueError(f"source={source!r}: use package.module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as python -m does: a module in this folder can be named
    function = getattr(importlib.import_module(module_name), name, None)
    if not callable(function):
        raise ValueError(f"source={source!r}: {module_name} has no function {name!r}")
    found = function()
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], torch.nn.Module):
        raise TypeError(f"source={source!r}: it must return (model, inputs), and returned {type(found).__name__}")
    return found[0].eval(), tuple(found[1])


def lower(source: str, out: Path, backend: str, recipe: str | None) -> None:
    from kernel_pytorch.lowering.program import lower as lower_model

    console = Console()
    model, inputs = _model(source)
    with console.status("exporting the model") as status:
        program = lower_model(model, inputs, backend=backend, recipe=recipe, tell=status.update)
        program.save(out)
        status.update("comparing with eager PyTorch")
        differences = program.compare()
    console.print(str(program.report), markup=False, soft_wrap=True)
    for difference in differences:
        console.print(str(difference), markup=False)
    console.print(f"written to {out}", markup=False, soft_wrap=True)


def run(program: Path, given: tuple[Path, ...], method: str, repeat: int) -> None:
    from kernel_pytorch.lowering.runtime import load

    console = Console()
    loaded = load(program)
    inputs = [torch.load(path, weights_only=True) for path in given] or loaded.ones(method)
    seconds = []
    outputs: Any = None
    with console.status(f"running {program.name}"):
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
