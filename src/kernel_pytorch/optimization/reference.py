"""The float64 run of a model and the yardsticks of its rounding errors.

The truth is the model itself with weights, inputs and intermediate results in float64. The yardsticks are the model
in its own dtype, as it is and with its weights moved at random by one rounding: they show how far results of the
same quality are from the truth. Where a model cannot run in float64, the original run is the truth.

Memory in float64, in bytes: 8 for each weight, gradient and activation at once; outputs and gradients that are kept
wait in host memory. By this count the training step of ``benchmarks/optimize.py`` on a GPU fits an H200. Where memory
runs out, the original run is the truth, and the report says so.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from kernel_pytorch.optimization.edits import Edits
from kernel_pytorch.optimization.examples import Example, widened
from kernel_pytorch.optimization.workload import Observation, Workload

__all__ = ["Expected", "Reference", "difference", "reference_of"]

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
_MOVED = (1, 2)  # seeds of the moved runs
_SCORES = 1 << 28  # attention scores in float64 at once: 2 GiB
_PIECE = 1 << 26  # elements compared in float64 at once: 512 MiB


class _Float64(TorchFunctionMode):
    """Turns casts to a narrower dtype inside a model, as of norms that compute in float32, into float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].double()
        if func is functional.scaled_dot_product_attention:
            return _attention_in_rows(*args, **(kwargs or {}))
        args = tuple(torch.float64 if any(value is kind for kind in _NARROW) else value for value in args)
        given = {
            name: torch.float64 if any(value is kind for kind in _NARROW) else value
            for name, value in (kwargs or {}).items()
        }
        return func(*args, **given)


def _attention_in_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Attend some query rows at a time: all scores of a long sequence in float64 do not fit a device."""
    attend = functional.scaled_dot_product_attention
    q_len, kv_len = query.shape[-2], key.shape[-2]
    rows = max(1, _SCORES // max(1, math.prod(query.shape[:-2]) * kv_len))
    if rows >= q_len or dropout_p:
        return attend(query, key, value, attn_mask, dropout_p, is_causal, **options)
    pieces = []
    for start in range(0, q_len, rows):
        part, mask = query[..., start : start + rows, :], attn_mask
        if is_causal:
            mask = torch.ones(part.shape[-2], kv_len, dtype=torch.bool, device=query.device).tril(start)
        elif mask is not None and mask.shape[-2] > 1:
            mask = mask[..., start : start + rows, :]
        pieces.append(checkpoint(attend, part, key, value, mask, use_reentrant=False, **options))
    return torch.cat(pieces, dim=-2)


@dataclass(frozen=True)
class Expected:
    """What one tensor of a run must be, and how far runs of the original's quality are off."""

    truth: torch.Tensor
    """In float64; in float32 where the original has 16 bits."""
    dtype: torch.dtype
    usable: torch.Tensor | None
    """Where the original and the truth are finite; None where both are everywhere."""
    signal: float
    """Sum of the squares of the truth."""
    magnitude: float
    """Largest absolute value of the truth."""
    distance: float = 0.0
    """The largest difference from the truth in any of the yardsticks."""
    noise: float = 0.0
    """Sum of the squared differences of the original from the truth."""


@dataclass(frozen=True)
class Reference:
    """What one example gives, by name of the tensor."""

    tensors: dict[str, Expected]
    float64: str | None
    """None, or why the model does not run in float64; the original is the truth then."""


def reference_of(workload: Workload, example: Example, seed: int, steps: int = 0, rate: float = 0.0) -> Reference:
    """Run the original model in its own dtype, in float64, and with moved weights."""
    original = workload.observe(example, seed, steps, rate)
    truth: Observation = {}
    try:
        with _changed(workload, widened), _Float64():
            wide = example.map(lambda _, tensor: widened(tensor))
            # Gradients and outputs in float64 wait in host memory: the optimizer steps need room for their own.
            truth = workload.observe(wide, seed, steps, rate, to_host=True)
        problem = _disagreement(truth, original)
    except Exception as error:  # a kernel without float64, or a tensor that is neither parameter nor buffer
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if problem is not None:
        truth = dict(original)
    tensors = {name: _expected(truth.pop(name).to(value.device), value) for name, value in original.items()}
    del original
    for number in _MOVED:
        with _changed(workload, lambda tensor, number=number: _moved(tensor, number)):  # type: ignore[misc]
            moved = workload.observe(example, seed, steps, rate)
        for name, one in tensors.items():
            tensors[name] = replace(one, distance=max(one.distance, difference(moved[name], one)[0]))
    return Reference(tensors, problem)


def _expected(truth: torch.Tensor, original: torch.Tensor) -> Expected:
    if not truth.is_floating_point():
        return Expected(original, original.dtype, None, 0.0, 0.0)
    truth = truth.to(torch.float32 if original.dtype.itemsize < 4 else torch.float64)
    usable: torch.Tensor | None = original.isfinite() & truth.isfinite()
    if usable is not None and bool(usable.all()):
        usable = None
    zero = Expected(
        torch.zeros((), dtype=truth.dtype, device=truth.device).expand_as(truth), truth.dtype, usable, 0, 0
    )
    magnitude, signal = difference(truth, zero)
    expected = Expected(truth, original.dtype, usable, signal, magnitude)
    distance, noise = difference(original, expected)
    return replace(expected, distance=distance, noise=noise)


def difference(tensor: torch.Tensor, expected: Expected) -> tuple[float, float]:
    """Return the largest absolute difference and the sum of squared differences; infinite where NaN or infinite."""
    largest, squares = 0.0, 0.0
    flat, truth = tensor.detach().reshape(-1), expected.truth.reshape(-1)
    usable = None if expected.usable is None else expected.usable.reshape(-1)
    for start in range(0, flat.numel(), _PIECE):
        piece = slice(start, start + _PIECE)
        off = flat[piece].double() - truth[piece].double()
        if usable is not None:
            off = off[usable[piece]]
        if off.numel():
            found = torch.stack([off.abs().max(), off.square().sum()]).tolist()
            if not all(map(math.isfinite, found)):
                return math.inf, math.inf
            largest, squares = max(largest, found[0]), squares + found[1]
    return largest, squares


@contextlib.contextmanager
def _changed(workload: Workload, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Give every floating-point or complex parameter and buffer other data, and put it back on the way out."""
    edits = Edits()
    gradients = {parameter: parameter.grad for parameter in workload.model.parameters()}
    for parameter in gradients:
        parameter.grad = None
    try:
        for tensor in (*workload.model.parameters(), *workload.model.buffers()):
            if tensor.is_floating_point() or tensor.is_complex():
                edits.set_data(tensor, change(tensor.detach()))
        yield
    finally:
        for parameter in gradients:
            parameter.grad = None
        edits.undo()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def _moved(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator(tensor.device).manual_seed(seed)
    step = torch.rand(tensor.shape, generator=generator, device=tensor.device).sub_(0.5).to(tensor.dtype)
    return tensor + tensor * step * torch.finfo(tensor.dtype).eps


def _disagreement(truth: Observation, original: Observation) -> str | None:
    """Why a float64 run is no truth: it ran, and returned something else."""
    if truth.keys() != original.keys():
        return f"returns other tensors in float64: {', '.join(sorted(truth.keys() ^ original.keys())[:3])}"
    for name, exact in truth.items():
        if exact.shape != original[name].shape:
            return f"{name} has shape {list(exact.shape)} in float64 and {list(original[name].shape)} otherwise"
    return None
