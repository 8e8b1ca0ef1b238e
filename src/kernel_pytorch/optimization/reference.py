"""The float64 run of a model and the yardsticks of its rounding errors.

The truth is the model itself with weights, inputs and intermediate results in float64. The yardsticks are the model
in its own dtype, as it is and with its weights moved at random by one rounding: they show how far results of the
same quality are from the truth. Where a model cannot run in float64, the original run is the truth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kernel_pytorch.optimization.edits import Edits
from kernel_pytorch.optimization.examples import Example
from kernel_pytorch.optimization.workload import Observation, Workload

__all__ = ["Reference", "reference_of"]

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
_MOVED = (1, 2)  # seeds of the moved runs


class _Float64(TorchFunctionMode):
    """Turns casts to a narrower dtype inside a model, as of norms that compute in float32, into float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].double()
        args = tuple(torch.float64 if any(value is kind for kind in _NARROW) else value for value in args)
        given = {
            name: torch.float64 if any(value is kind for kind in _NARROW) else value
            for name, value in (kwargs or {}).items()
        }
        return func(*args, **given)


@dataclass(frozen=True)
class Reference:
    """What one example gives: the truth, the original, and how far runs of the original's quality are off."""

    truth: Observation
    original: Observation
    yardsticks: tuple[Observation, ...]
    float64: str | None
    """None, or why the model does not run in float64; the original is the truth then."""


def reference_of(workload: Workload, example: Example, seed: int, steps: int = 0, rate: float = 0.0) -> Reference:
    """Run the original model in its own dtype, in float64, and with moved weights."""
    original = workload.observe(example, seed, steps, rate)
    moved = []
    for number in _MOVED:
        with _changed(workload, lambda tensor, number=number: _moved(tensor, number)):  # type: ignore[misc]
            moved.append(workload.observe(example, seed, steps, rate))
    try:
        with _changed(workload, lambda tensor: tensor.double()), _Float64():
            wide = example.map(lambda _, tensor: tensor.double() if tensor.is_floating_point() else tensor)
            truth = workload.observe(wide, seed, steps, rate)
        problem = _disagreement(truth, original)
    except Exception as error:  # a kernel without float64, or a tensor that is neither parameter nor buffer
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if problem is not None:
        return Reference(original, original, tuple(moved), problem)
    return Reference(truth, original, (original, *moved), None)


@contextlib.contextmanager
def _changed(workload: Workload, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Give every floating-point parameter and buffer other data, and put it back on the way out."""
    edits = Edits()
    gradients = {parameter: parameter.grad for parameter in workload.model.parameters()}
    for parameter in gradients:
        parameter.grad = None
    try:
        for tensor in (*workload.model.parameters(), *workload.model.buffers()):
            if tensor.is_floating_point():
                edits.set_data(tensor, change(tensor.detach()))
        yield
    finally:
        for parameter in gradients:
            parameter.grad = None
        edits.undo()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def _moved(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    step = torch.rand(tensor.shape, generator=generator).sub_(0.5).to(tensor.device, tensor.dtype)
    return tensor + tensor * step * torch.finfo(tensor.dtype).eps


def _disagreement(truth: Observation, original: Observation) -> str | None:
    """Why a float64 run is no truth: it ran, and returned something else."""
    if truth.keys() != original.keys():
        return f"returns other tensors in float64: {', '.join(sorted(truth.keys() ^ original.keys())[:3])}"
    for name, exact in truth.items():
        if exact.shape != original[name].shape:
            return f"{name} has shape {list(exact.shape)} in float64 and {list(original[name].shape)} otherwise"
    return None
