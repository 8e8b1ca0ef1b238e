"""Helpers for tests of FP8 linears: random operands, a step, quantized operands of its GEMMs, their budget."""

from __future__ import annotations

import math
from typing import Any

import torch

from fp8_models import random
from kernel_pytorch.fp8.autograd import STATE_SHAPE, fp8_linear
from kernel_pytorch.fp8.recipe import Recipe, recipe_named
from kernel_pytorch.ops.fp8_cast import Cast, fp8_cast
from kernel_pytorch.ops.fp8_matmul.definition import FP8_MATMUL
from kernel_pytorch.testing import compare
from kernel_pytorch.testing.budget import exceeded


def leaves(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    x, weight = random(m, k, dtype=dtype), random(n, k, seed=1, dtype=dtype) / math.sqrt(max(1, k))
    return x.requires_grad_(), weight.requires_grad_(), random(n, seed=2, dtype=dtype).requires_grad_()


def fresh(recipe: Recipe | str, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """The keyword arguments of a first call with a recipe."""
    return {"state": torch.zeros(STATE_SHAPE, device=device)} if recipe_named(recipe).delayed else {}


def y_sums(recipe: Recipe) -> str:
    """The accumulation of the output GEMM on a GPU's matrix units, by granularity."""
    return "promoted" if recipe.input == "block" else "fast"


def step(
    recipe: Recipe | str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dy: torch.Tensor,
    **more: Any,
) -> tuple[torch.Tensor, ...]:
    """Return output and gradients; a delayed recipe has no history, so it uses the current amax."""
    y = fp8_linear(x, weight, bias, recipe, **{**fresh(recipe, x.device), **more})
    inputs = [value for value in (x, weight, bias) if value is not None and value.requires_grad]
    return (y.detach(), *torch.autograd.grad(y, inputs, dy))


def casts(recipe: Recipe, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> dict[str, tuple[Cast, Cast]]:
    """The quantized operands of each GEMM, with transposed ones quantized separately."""
    gradient = {"e4m3": "e4m3fn", "e5m2": "e5m2"}[recipe.gradient_format]

    def cast(t: torch.Tensor, granularity: str, name: str = "e4m3fn", of_weight: bool = False) -> Cast:
        power_of_two = recipe.power_of_two or (of_weight and granularity == "tensor")
        return fp8_cast(t.detach(), name, granularity, power_of_two=power_of_two)

    return {
        "y": (cast(x, recipe.input), cast(weight, recipe.weight, of_weight=True)),
        "dx": (cast(dy, recipe.gradient, gradient), cast(weight.t(), recipe.weight, of_weight=True)),
        "dweight": (cast(dy.t(), recipe.gradient, gradient), cast(x.t(), recipe.input)),
    }


def within_budget(found: torch.Tensor, pair: tuple[Cast, Cast], sums: str = "float32") -> None:
    """Compare the GEMMs with float64 of the quantized operands, within the op's budget.

    A CPU accumulates in float32 whatever is allowed; other tests check the allowed accumulation.
    """
    a, b = pair
    arguments = {
        "a": a.data,
        "b": b.data,
        "inverse_a": a.inverse,
        "inverse_b": b.inverse,
        "dtype": str(found.dtype).removeprefix("torch."),
        "sums": sums,
    }
    comparisons = compare(FP8_MATMUL, lambda *_: (found,), arguments, gradients=False)
    assert not exceeded(comparisons), exceeded(comparisons)
