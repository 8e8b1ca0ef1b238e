"""Which of a layer's three products are in 8 bits: measured on this device, for the layer's own shapes.

Every choice of products is timed as it would run: forward and backward of the layer, one after another without
waiting, so that what Python costs counts where the device waits for it. One that is not clearly faster than the
layer in its own precision is not taken, so a converted layer is never slower than it was.

In a loop of the same calls the CPU is quicker than in a step, where other code comes in between. Inside a model the
work of other layers makes up for that; a layer that is alone must be faster even if it waits for ``ALONE`` times the
CPU's part of such a call. A layer that is being compiled cannot be timed as it will run: inside a model it is less
work for the CPU than an eager call, which then errs on the safe side, and alone ``COMPILED`` times as much.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kernel_pytorch.precision.linear import (
    COUNTS_SHAPE,
    STATE_SHAPE,
    Memory,
    checked_linear,
    products_of,
    working_dtype,
)
from kernel_pytorch.precision.recipe import FIELDS, PRODUCTS, Recipe

__all__ = ["Measured", "measured_choice", "measured_for", "measured_recipe"]

CLEARLY = 0.98
"""A choice must take at most this part of the time of the layer as it was."""
ALONE = 1.3
"""The CPU's part of a layer's call in a step, over that in a loop."""
COMPILED = 1.5
"""The CPU's part of a call of one compiled layer, over that of an eager call, at most."""
_ROUNDS, _SECONDS_A_ROUND = 5, 0.004


@dataclass(frozen=True)
class Measured:
    """What the products of one shape of layer take."""

    rows: int
    seconds: tuple[tuple[tuple[str, ...], float], ...]
    """(products in 8 bits, seconds for forward and backward), the layer as it was among them as ()."""

    @property
    def best(self) -> tuple[str, ...]:
        """The products to compute in 8 bits."""
        products, seconds = min(self.seconds, key=lambda entry: entry[1])
        return products if seconds <= CLEARLY * self.plain else ()

    @property
    def plain(self) -> float:
        return dict(self.seconds)[()]

    @property
    def speedup(self) -> float:
        return self.plain / dict(self.seconds)[self.best]


def measured_recipe(x: torch.Tensor, weight: torch.Tensor, bias: bool, recipe: Recipe, alone: bool) -> Recipe:
    """The recipe with those products in high precision that gain nothing in 8 bits for a call of this size.

    Args:
        alone: whether nothing else of the model is computed in 8 bits.
    """
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    kind = x.device.type
    dtype = working_dtype(x)
    training = torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad)
    waits = 0.0
    if alone:
        waits = ALONE * COMPILED if torch.compiler.is_compiling() else ALONE
    high = _high_precision(
        kind, x.device.index, rounded(rows), tuple(weight.shape), dtype, weight.dtype, bias, _fields(recipe),
        training and x.requires_grad, training and weight.requires_grad, waits,
    )  # fmt: skip
    return replace(recipe, high_precision=high)


def _fields(recipe: Recipe) -> tuple[tuple[str, Any], ...]:
    return tuple((name, getattr(recipe, name)) for name in FIELDS)


def rounded(rows: int) -> int:
    """Rows as they are measured: up to two significant bits, so that batches of all sizes need few measurements."""
    if rows <= 16:
        return max(rows, 1)
    step = 1 << (rows.bit_length() - 2)
    return -(-rows // step) * step


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _high_precision(
    kind: str,
    index: int | None,
    rows: int,
    weight: tuple[int, ...],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias: bool,
    fields: tuple[Any, ...],
    needs_dx: bool,
    needs_dw: bool,
    waits: float,
) -> tuple[str, ...]:
    """A constant to torch.compile, which takes no objects as arguments of such a function."""
    if kind not in ("cuda", "xpu"):  # no matrix unit for 8 bits: the exact arithmetic is emulated, and slow
        return PRODUCTS
    if kind == "cuda" and torch.cuda.is_current_stream_capturing():
        return PRODUCTS  # nothing can be timed inside a graph capture
    device = torch.device(kind, 0 if index is None else index)
    recipe = Recipe(**dict(fields))
    measured = measured_choice(device, rows, weight, dtype, weight_dtype, bias, recipe, needs_dx, needs_dw, waits)
    best = measured.best
    return tuple(product for product in PRODUCTS if product not in best)


_kept: dict[tuple[object, ...], Measured] = {}


def measured_for(weight: torch.Tensor, bias: bool, recipe: Recipe) -> tuple[Measured, ...]:
    """Every measurement of layers of this shape in training, in the order of their rows."""
    same = (weight.device, tuple(weight.shape), weight.dtype, bias, recipe, True, True)
    found = [kept for key, kept in _kept.items() if (key[0], key[2], key[4], *key[5:9]) == same]
    return tuple(sorted(found, key=lambda measured: measured.rows))


def measured_choice(
    device: torch.device,
    rows: int,
    weight_shape: tuple[int, ...],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias: bool,
    recipe: Recipe,
    needs_dx: bool = True,
    needs_dw: bool = True,
    waits: float = 0.0,
) -> Measured:
    """The measurement of one shape: kept for the process, made where it is not there.

    Args:
        waits: how often the CPU's part of a call in 8 bits must fit into the time of the layer as it was.
    """
    key = (device, rows, weight_shape, dtype, weight_dtype, bias, recipe, needs_dx, needs_dw, waits)
    found = _kept.get(key)
    if found is None:
        found = _kept[key] = _measure(*key)
    return found


def _measure(
    device: torch.device,
    rows: int,
    weight_shape: tuple[int, ...],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias: bool,
    recipe: Recipe,
    needs_dx: bool,
    needs_dw: bool,
    waits: float,
) -> Measured:
    """Time every choice of products for one shape, each several times in turn; the medians count."""
    n, k = weight_shape
    with (
        torch.random.fork_rng(devices=[device], device_type=device.type),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        torch.manual_seed(0)
        x = torch.randn(rows, k, device=device, dtype=dtype, requires_grad=needs_dx)
        weight = torch.randn(n, k, device=device, dtype=weight_dtype, requires_grad=needs_dw)
        shift = torch.zeros(n, device=device, dtype=weight_dtype) if bias else None
        dy = torch.randn(rows, n, device=device, dtype=dtype)
        zeros = partial(torch.zeros, device=device)
        memory = Memory(
            counts=zeros((2, *COUNTS_SHAPE[1:]), dtype=torch.int64),
            history=zeros(STATE_SHAPE[1:]) if recipe.delayed else None,
            gradient_counts=zeros((1, *COUNTS_SHAPE[1:]), dtype=torch.int64),
            gradient_history=zeros(STATE_SHAPE[1:]) if recipe.delayed else None,
        )

        def step(products: tuple[str, ...]) -> None:
            if products:
                chosen, how = calls[products]
                fresh = x.detach().requires_grad_(needs_dx)  # a cast that is kept on the tensor would be reused
                y = checked_linear(fresh, weight, shift, chosen, how, memory, None)
            else:
                y = torch.nn.functional.linear(x, weight.to(dtype), None if shift is None else shift.to(dtype))
            if y.requires_grad:
                y.backward(dy)
                weight.grad = x.grad = None

        useful = [p for p in PRODUCTS if p == "y" or (p == "dx" and needs_dx) or (p == "dW" and needs_dw)]
        choices = [c for size in range(len(useful) + 1) for c in itertools.combinations(useful, size)]
        # The products that are in high precision already stay there.
        choices = [c for c in choices if not set(c) & set(recipe.high_precision)]
        calls = {}  # as a layer keeps them
        for choice in choices:
            chosen = replace(recipe, high_precision=tuple(p for p in PRODUCTS if p not in choice))
            calls[choice] = (chosen, products_of(x, weight, chosen))
        repeats = {choice: _repeats(partial(step, choice), device) for choice in choices}
        times: dict[tuple[str, ...], list[float]] = {choice: [] for choice in choices}
        for _ in range(_ROUNDS):
            for choice in choices:
                taken = _seconds(partial(step, choice), repeats[choice], device)
                if waits and choice:
                    taken = max(taken, waits * _issuing(partial(step, choice), device))
                times[choice].append(taken)
    return Measured(rows, tuple((choice, statistics.median(found)) for choice, found in times.items()))


def _repeats(run: Callable[[], None], device: torch.device) -> int:
    for _ in range(2):
        run()
    return max(1, min(200, int(_SECONDS_A_ROUND / _seconds(run, 2, device))))


def _seconds(run: Callable[[], None], repeats: int, device: torch.device) -> float:
    module = torch.get_device_module(device.type)
    module.synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    module.synchronize(device)
    return (time.perf_counter() - started) / repeats


def _issuing(run: Callable[[], None], device: torch.device) -> float:
    """The CPU's part: few enough calls for the device's queue to take them all."""
    module = torch.get_device_module(device.type)
    module.synchronize(device)
    started = time.perf_counter()
    for _ in range(10):
        run()
    return (time.perf_counter() - started) / 10
