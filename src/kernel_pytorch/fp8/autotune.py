"""Recipe auto: choose which of a layer's three GEMMs run in FP8 by measuring them for the layer's own shapes.

Every set of GEMMs is timed as it would run: forward and backward of the layer, queued without synchronizing, so host
time counts where the device waits for it. A set is chosen only if it is faster than the layer's dtype by a margin, so
a converted layer is never slower than before.

A timing loop takes less host time per call than a training step with other code in between. Inside a model the other
layers hide the difference. A layer that is converted alone must be faster even with ``ALONE`` times the measured host
time. A layer under torch.compile cannot be timed as it will run: inside a model it takes less host time than an eager
call, alone up to ``COMPILED`` times as much.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from kernel_pytorch._compat.compiler import constant_in_graph
from kernel_pytorch._compat.modes import fake_mode_active
from kernel_pytorch.fp8.autograd import (
    COUNTS_SHAPE,
    STATE_SHAPE,
    Buffers,
    checked_linear,
    gemm_spec_for,
    gemm_spec_of,
)
from kernel_pytorch.fp8.recipe import PRODUCTS, Recipe, recipe_of
from kernel_pytorch.fp8.transforms import refuse_transforms
from kernel_pytorch.hardware_abstraction import choice_cache
from kernel_pytorch.hardware_abstraction.registry import device_of

__all__ = [
    "LayerCall",
    "Measured",
    "call_of",
    "can_measure",
    "may_have_matrix_units",
    "measured_choice",
    "measured_for",
    "rounded",
]

CLEARLY = 0.98
"""A set of FP8 GEMMs must take at most this fraction of the time in the layer's dtype."""
ALONE = 1.3
"""Host time of a layer's call in a training step, divided by that in a timing loop."""
COMPILED = 1.5
"""Upper bound of the host time of a call of one compiled layer, divided by that of an eager call."""
_ROUNDS, _SECONDS_A_ROUND = 5, 0.004
_OWN = "own"
"""The name of the empty set: no GEMM in FP8."""


@dataclass(frozen=True)
class Measured:
    """Timings of the GEMMs of one layer shape."""

    rows: int
    seconds: tuple[tuple[tuple[str, ...], float], ...]
    """(GEMMs in FP8, seconds for forward and backward); () is the layer in its dtype."""

    @property
    def best(self) -> tuple[str, ...]:
        """The GEMMs to compute in FP8."""
        products, seconds = min(self.seconds, key=lambda entry: entry[1])
        return products if seconds <= CLEARLY * self.plain else ()

    @property
    def plain(self) -> float:
        return dict(self.seconds)[()]

    @property
    def speedup(self) -> float:
        return self.plain / dict(self.seconds)[self.best]


@constant_in_graph
def call_of(
    text: str,
    training: bool,
    rows: int,
    alone: bool,
    compiled: bool,
    kind: str,
    index: int | None,
    dtype: torch.dtype,
    weight_shape: tuple[int, int],
    weight_dtype: torch.dtype,
    bias: bool,
    needs_dx: bool,
    needs_dw: bool,
) -> tuple[Recipe, tuple[Any, ...]] | None:
    """Return the recipe and the values of the ``GemmSpec`` for calls of one kind; None if no GEMM is in FP8.

    torch.compile treats the result as a constant, without guards. Such a function takes plain values only.

    Args:
        text: ``Recipe.text`` of the layer's recipe.
        training: whether the layer is in training mode.
        rows: the number of rows to measure the GEMMs for, from ``rounded``; 0 to run in FP8 whatever the recipe says.
        alone: whether the layer is the only converted one of its model.
        compiled: whether torch.compile traces the call.
        dtype: of the output.
    """
    recipe = recipe_of(text)
    if rows:
        host_time_factor = ALONE * (COMPILED if compiled else 1) if alone else 0.0
        low = _measured_gemms(
            kind, index, rows, weight_shape, dtype, weight_dtype, bias, recipe, needs_dx, needs_dw, host_time_factor
        )
        recipe = replace(recipe, high_precision=tuple(product for product in PRODUCTS if product not in low))
    if len(recipe.high_precision) == len(PRODUCTS):
        return None
    # Eager calls check again in ``Float8Linear._call_for``; compiled ones and torch.jit.trace only here.
    refuse_transforms()
    if recipe.delayed and not training:  # evaluation must not update the amax histories of training
        recipe = replace(recipe, delayed=False)
    return recipe, tuple(gemm_spec_for(kind, index, dtype, needs_dx, needs_dw, recipe))


def rounded(rows: int) -> int:
    """Round rows up to two significant bits, so that batches of all sizes need few measurements.

    Uses comparisons only: with dynamic shapes, torch.compile then gets an int, with guards for the range of rows.
    """
    size = 1
    while size < rows:
        size += 1 << max(0, size.bit_length() - 2)
    return size


def may_have_matrix_units(kind: str) -> bool:
    """Return whether this kind of device may have FP8 matrix units; without them FP8 GEMMs run in float32."""
    return kind in ("cuda", "xpu")


def can_measure(kind: str) -> bool:
    """Return whether calls can be timed: not while a CUDA graph is captured or under ``FakeTensorMode``."""
    if kind == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    return not fake_mode_active()


def _measured_gemms(kind: str, index: int | None, *call: Any) -> tuple[str, ...]:
    """Return those of ``PRODUCTS`` that are faster in FP8."""
    if not can_measure(kind):
        return ()
    return measured_choice(LayerCall(torch.device(kind, 0 if index is None else index), *call)).best


class LayerCall(NamedTuple):
    """The kind of call that a measurement is for."""

    device: torch.device
    rows: int
    weight_shape: tuple[int, ...]
    dtype: torch.dtype
    """Of the output."""
    weight_dtype: torch.dtype
    bias: bool
    recipe: Recipe
    needs_dx: bool = True
    needs_dw: bool = True
    host_time_factor: float = 0.0
    """Multiple of an FP8 call's host time that must be shorter than the call in the layer's dtype."""


_measurements: dict[LayerCall, Measured] = {}


def measured_for(weight: torch.Tensor, bias: bool, recipe: Recipe, needs_dx: bool) -> tuple[Measured, ...]:
    """Return every measurement in training of layers with such a weight, by ascending rows."""
    same = (weight.device, tuple(weight.shape), weight.dtype, bias, recipe, needs_dx, True)
    found = [
        kept
        for of, kept in _measurements.items()
        if (of.device, of.weight_shape, of.weight_dtype, of.bias, of.recipe, of.needs_dx, of.needs_dw) == same
    ]
    return tuple(sorted(found, key=lambda measured: measured.rows))


def measured_choice(call: LayerCall) -> Measured:
    """Return the measurement of one kind of call: from this process, from the user's cache directory, or made now.

    The cache makes a resumed run choose the same GEMMs.
    """
    found = _measurements.get(call)
    if found is None:
        name = _name_of(call)
        before = choice_cache.load(name)
        if before is None:
            found = _measure(call)
            timings = {" ".join(products) or _OWN: seconds for products, seconds in found.seconds}
            choice_cache.store(choice_cache.MeasuredChoice(name, timings))
        else:
            timed = before.timings.items()
            found = Measured(
                call.rows, tuple((() if of == _OWN else tuple(of.split()), took) for of, took in timed)
            )
        _measurements[call] = found
    return found


def _name_of(call: LayerCall) -> str:
    """Return the key of a measurement in the cache of choices."""
    parts = ", ".join(part.text if isinstance(part, Recipe) else str(part) for part in call[1:])
    return f"fp8 products of {parts} {choice_cache.surroundings(device_of(call.device))}"


def _measure(call: LayerCall) -> Measured:
    """Time every set of GEMMs for one kind of call in alternating rounds, and return the medians."""
    device, rows, weight_shape, dtype, weight_dtype, bias, recipe, needs_dx, needs_dw, host_time_factor = call
    refuse_transforms()
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
        memory = Buffers(
            counts=zeros((2, *COUNTS_SHAPE[1:]), dtype=torch.int64),
            history=zeros(STATE_SHAPE[1:]) if recipe.delayed else None,
            gradient_counts=zeros((1, *COUNTS_SHAPE[1:]), dtype=torch.int64),
            gradient_history=zeros(STATE_SHAPE[1:]) if recipe.delayed else None,
        )

        def step(products: tuple[str, ...]) -> None:
            if products:
                chosen, how = calls[products]
                fresh = x.detach().requires_grad_(needs_dx)  # x could carry cached quantized data
                y = checked_linear(fresh, weight, shift, chosen, how, memory, None)
            else:
                y = torch.nn.functional.linear(x, weight.to(dtype), None if shift is None else shift.to(dtype))
            if y.requires_grad:
                y.backward(dy)
                weight.grad = x.grad = None

        useful = [p for p in PRODUCTS if p == "y" or (p == "dx" and needs_dx) or (p == "dW" and needs_dw)]
        choices = [c for size in range(len(useful) + 1) for c in itertools.combinations(useful, size)]
        # GEMMs that the recipe keeps in high precision stay there.
        choices = [c for c in choices if not set(c) & set(recipe.high_precision)]
        calls = {}  # as a layer caches them
        for choice in choices:
            chosen = replace(recipe, high_precision=tuple(p for p in PRODUCTS if p not in choice))
            calls[choice] = (chosen, gemm_spec_of(x, weight, chosen))
        repeats = {choice: _repeats(partial(step, choice), device) for choice in choices}
        times: dict[tuple[str, ...], list[float]] = {choice: [] for choice in choices}
        for _ in range(_ROUNDS):
            for choice in choices:
                taken = _seconds(partial(step, choice), repeats[choice], device)
                if host_time_factor and choice:
                    taken = max(taken, host_time_factor * _host_seconds(partial(step, choice), device))
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


def _host_seconds(run: Callable[[], None], device: torch.device) -> float:
    """Return the host time of a call: 10 calls fit into the device's queue, so the host never waits."""
    module = torch.get_device_module(device.type)
    module.synchronize(device)
    started = time.perf_counter()
    for _ in range(10):
        run()
    return (time.perf_counter() - started) / 10
