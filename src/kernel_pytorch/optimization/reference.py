"""Float64 references of a model, and baseline runs that measure its rounding errors.

The reference is the model itself with weights, inputs and intermediate results in float64. The baselines are the
model in its own dtype, unchanged and with its weights perturbed at random by one rounding: they show how much results
of the same quality differ from the reference. If a model cannot run in float64, the original run is the reference.

The float64 run needs 8 bytes for each weight, gradient and live activation; outputs and gradients that are kept are
moved to host memory. By this count the training step of ``benchmarks/optimize.py`` on a GPU fits an H200. If memory
runs out, the original run is the reference, and the report states this.
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
_MOVED = (1, 2)  # seeds of the perturbed runs
_SCORES = 1 << 28  # attention scores in float64 at once: 2 GiB
_PIECE = 1 << 26  # elements compared in float64 at once: 512 MiB


class _Float64(TorchFunctionMode):
    """Replaces casts to a narrower dtype inside a model, such as a norm's cast to float32, by casts to float64."""

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
    """Compute attention in chunks of query rows: the float64 scores of a long sequence do not fit a device."""
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
    """The expected value of one tensor, and the errors of the baseline runs."""

    truth: torch.Tensor
    """The reference in float64; in float32 if the original has 16 bits."""
    dtype: torch.dtype
    usable: torch.Tensor | None
    """Mask of elements where the original and the reference are finite; None if all are."""
    signal: float
    """Sum of the squares of the reference."""
    magnitude: float
    """amax of the reference."""
    distance: float = 0.0
    """Largest difference of any baseline run from the reference."""
    noise: float = 0.0
    """Sum of the squared differences of the original from the reference."""


@dataclass(frozen=True)
class Reference:
    """The expected tensors of one example, by name."""

    tensors: dict[str, Expected]
    float64: str | None
    """None, or why the model does not run in float64; the original run is then the reference."""


def reference_of(workload: Workload, example: Example, seed: int, steps: int = 0, rate: float = 0.0) -> Reference:
    """Run the original model in its own dtype, in float64, and with perturbed weights."""
    original = workload.observe(example, seed, steps, rate)
    truth: Observation = {}
    try:
        with _changed(workload, widened), _Float64():
            wide = example.map(lambda _, tensor: widened(tensor))
            # Keep float64 gradients and outputs in host memory: the optimizer steps need the device memory.
            truth = workload.observe(wide, seed, steps, rate, to_host=True)
        problem = _disagreement(truth, original)
    except Exception as error:  # no float64 kernel, or a tensor that is neither parameter nor buffer
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
    """Replace the data of every floating-point or complex parameter and buffer inside the block."""
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
    """Return how the tensors of a float64 run differ from the original's in name or shape, or None."""
    if truth.keys() != original.keys():
        return f"returns other tensors in float64: {', '.join(sorted(truth.keys() ^ original.keys())[:3])}"
    for name, exact in truth.items():
        if exact.shape != original[name].shape:
            return f"{name} has shape {list(exact.shape)} in float64 and {list(original[name].shape)} otherwise"
    return None
