"""``kernel-pytorch lower``: lower a model, report what was delegated, and compare with eager PyTorch."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

__all__ = ["lower"]


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
