"""fp8_linear: its three GEMMs against float64 of the dequantized operands, and against float32."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fp8_models import random
from fp8_products import casts, fresh, leaves, step, within_budget, y_sums
from kernel_pytorch.fp8.autograd import COUNTS_SHAPE, STATE_SHAPE, fp8_linear
from kernel_pytorch.fp8.recipe import PRODUCTS, RECIPES, Recipe, recipe_named, recipe_of
from kernel_pytorch.ops import fp8_matmul as matmul_module
from kernel_pytorch.ops.fp8_cast import fp8_cast
from kernel_pytorch.testing import interpreting, pretend

autograd = sys.modules["kernel_pytorch.fp8.autograd"]  # the package has a function of that name
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=str)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = [(7, 37, 11), (130, 257, 129), (1, 1, 1), (5, 128, 1), (3, 1, 200), (64, 256, 128)]
LONG = [(3, 32768, 4), (3, 4, 32768), (32768, 3, 4)]
"""Shapes with a long reduction in y, dx or dW."""


@every_recipe
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemms_are_those_of_the_quantized_operands(
    recipe: Recipe, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    m, k, n = shape
    x, weight, _ = leaves(m, k, n, dtype)
    dy = random(m, n, seed=3, dtype=dtype) / 8
    y, dx, dweight = step(recipe, x, weight, None, dy)
    operands = casts(recipe, x, weight, dy)
    assert (y.dtype, dx.dtype, dweight.dtype) == (dtype, dtype, dtype)
    within_budget(y, operands["y"])
    within_budget(dx, operands["dx"])
    if "dW" in recipe.high_precision:
        assert torch.equal(dweight, torch.mm(dy.t(), x.detach()))
    else:
        within_budget(dweight, operands["dweight"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_recipe
@pytest.mark.parametrize("shape", [*SHAPES, *LONG, (128, 512, 512)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemms_on_a_gpu(recipe: Recipe, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, k, n = shape
    x, weight = (value.detach().cuda().requires_grad_() for value in leaves(m, k, n, dtype)[:2])
    dy = random(m, n, seed=3, dtype=dtype).cuda() / 8
    found = step(recipe, x, weight, None, dy)
    operands = casts(recipe, x, weight, dy)
    sums = (y_sums(recipe), recipe.dx_sums, "promoted")
    for product, name, value, allowed in zip(PRODUCTS, operands, found, sums, strict=True):
        if product not in recipe.high_precision:
            within_budget(value, operands[name], allowed)


@every_recipe
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_is_added_and_its_gradient_is_a_float32_sum(recipe: Recipe, dtype: torch.dtype) -> None:
    x, weight, bias = leaves(1000, 40, 24, dtype)
    dy = random(1000, 24, seed=3, dtype=dtype)
    without, with_bias = step(recipe, x, weight, None, dy), step(recipe, x, weight, bias, dy)
    assert torch.equal(with_bias[0], without[0] + bias)
    assert torch.equal(with_bias[1], without[1])
    assert torch.equal(with_bias[2], without[2])
    exact = dy.double().sum(0)
    bound = 1000 * 2.0**-24 * dy.double().abs().sum(0) + torch.finfo(dtype).eps / 2 * exact.abs()
    assert ((with_bias[3].double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "delayed-e4m3", "rowwise", "blockwise"])
def test_long_reductions(name: str) -> None:
    recipe = RECIPES[name]
    for number, (m, k, n) in enumerate(LONG):
        x, weight, _ = leaves(m, k, n)
        dy = random(m, n, seed=3)
        product = ("y", "dx", "dweight")[number]  # the one with the long reduction
        within_budget(step(recipe, x, weight, None, dy)[number], casts(recipe, x, weight, dy)[product])


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_at_least_20_decibels_against_exact_products(recipe: Recipe, dtype: torch.dtype) -> None:
    x, weight, _ = leaves(512, 768, 384, dtype)
    dy = random(512, 384, seed=3, dtype=dtype) * 1e-4
    found = step(recipe, x, weight, None, dy)
    wide_x, wide_weight, wide_dy = (value.detach().double() for value in (x, weight, dy))
    exact = (wide_x @ wide_weight.t(), wide_dy @ wide_weight, wide_dy.t() @ wide_x)
    for name, out, wanted in zip(("y", "dx", "dweight"), found, exact, strict=True):
        sqnr = 10 * math.log10(float(wanted.square().sum() / (out.double() - wanted).square().sum()))
        assert sqnr >= 20, f"{recipe} {name}: {sqnr:.1f} dB"


def test_gradients_in_e4m3_have_half_the_noise() -> None:
    x, weight, _ = leaves(256, 384, 320)
    dy = random(256, 320, seed=3) * 1e-4
    exact = (dy.double() @ weight.detach().double(), dy.double().t() @ x.detach().double())
    noise = {}
    for name in ("delayed", "delayed-e4m3"):
        found = step(RECIPES[name], x, weight, None, dy)[1:3]
        noise[name] = [
            float((out.double() - wanted).square().sum()) for out, wanted in zip(found, exact, strict=True)
        ]
    assert all(coarse > 2 * fine for coarse, fine in zip(*noise.values(), strict=True))


# Shapes


@every_recipe
def test_leading_dimensions_are_rows(recipe: Recipe) -> None:
    x, weight, bias = leaves(24, 150, 20)
    dy = random(24, 20, seed=3)
    flat = step(recipe, x, weight, bias, dy)
    deep = step(recipe, x.detach().view(2, 3, 4, 150).requires_grad_(), weight, bias, dy.view(2, 3, 4, 20))
    assert deep[0].shape == (2, 3, 4, 20)
    assert deep[1].shape == (2, 3, 4, 150)
    for one, other in zip(flat, deep, strict=True):
        assert torch.equal(one.flatten(), other.flatten())
    single = fp8_linear(x[0].detach(), weight, bias, recipe, **fresh(recipe))
    assert torch.equal(single, fp8_linear(x[:1].detach(), weight, bias, recipe, **fresh(recipe))[0])


@every_recipe
@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)], ids=str)
def test_empty_tensors(recipe: Recipe, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    y, dx, dweight, dbias = step(recipe, *leaves(m, k, n), random(m, n, seed=3))
    assert (y.shape, dx.shape, dweight.shape, dbias.shape) == ((m, n), (m, k), (n, k), (n,))
    assert dx.eq(0).all() or n
    assert dweight.eq(0).all() or m
    assert fp8_linear(torch.zeros(2, 0, 5), torch.zeros(3, 5), recipe=recipe, **fresh(recipe)).shape == (2, 0, 3)


@every_recipe
def test_strides_do_not_matter(recipe: Recipe) -> None:
    base, other, upstream = random(150, 60), random(40, 150, seed=1), random(30, 40, seed=3)
    for x, weight, dy in (
        (base.t()[:30], other, upstream),
        (base.t()[::2], other.t().contiguous().t(), upstream),
        (base[:, :1].t().expand(30, 150), other, upstream[:, :1].expand(30, 40)),
    ):
        plain = [value.clone(memory_format=torch.contiguous_format) for value in (x, weight, dy)]
        found = step(recipe, x.requires_grad_(), weight.requires_grad_(), None, dy)
        wanted = step(recipe, plain[0].requires_grad_(), plain[1].requires_grad_(), None, plain[2])
        for one, two in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5 * float(two.abs().max()))
        x.requires_grad_(False), weight.requires_grad_(False)


# Computed GEMMs, saved tensors and counts


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The shape and accumulation of every FP8 GEMM."""
    seen: list[tuple[Any, ...]] = []

    def watched(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append((a.shape[0], a.shape[1], b.shape[0], rest[3]))
        return matmul_module.fp8_matmul(a, b, *rest[:4])

    monkeypatch.setattr(autograd, "scaled_matmul", watched)
    return seen


def saved_shapes(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[tuple[torch.dtype, tuple[int, ...]]]]:
    kept: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tensor.dtype, tuple(tensor.shape)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return run(), kept


@every_recipe
def test_only_requested_gradients_are_computed_and_saved_for(
    recipe: Recipe, products: list[tuple[Any, ...]]
) -> None:
    m, k, n = 6, 160, 10
    high = "dW" in recipe.high_precision
    dx_product, dweight_product = (m, n, k, recipe.dx_sums), (n, m, k, "promoted")
    for wants_x in (True, False):
        for wants_weight in (True, False):
            x, weight, bias = (value.detach() for value in leaves(m, k, n))
            x.requires_grad_(wants_x), weight.requires_grad_(wants_weight), bias.requires_grad_()
            products.clear()
            y, kept = saved_shapes(
                lambda x=x, weight=weight, bias=bias: fp8_linear(x, weight, bias, recipe, **fresh(recipe))
            )
            assert products == [(m, k, n, y_sums(recipe))]
            shapes = [shape for dtype, shape in kept if dtype == torch.float8_e4m3fn]
            assert shapes == [(k, n)] * wants_x + [(k, m)] * (wants_weight and not high)
            assert [shape for dtype, shape in kept if dtype == torch.float32].count((m, k)) == (
                wants_weight and high
            )
            y.backward(random(m, n, seed=3))
            assert products[1:] == [dx_product] * wants_x + [dweight_product] * (wants_weight and not high)
            assert ((x.grad is None), (weight.grad is None)) == (not wants_x, not wants_weight)
    x, weight, bias = leaves(m, k, n)
    with torch.no_grad():
        y, kept = saved_shapes(lambda: fp8_linear(x, weight, bias, recipe, **fresh(recipe)))
    assert not kept
    assert not y.requires_grad


@every_recipe
def test_counts_are_those_of_the_casts(recipe: Recipe) -> None:
    x, weight, _ = leaves(12, 260, 20)
    with torch.no_grad():
        x[0, 0], weight[1, 1], x[2] = math.nan, math.inf, x[2] * 1e-6
        x[2, 0] = 1e4
    dy = random(12, 20, seed=3)
    dy[0, 0] = math.inf
    counts = torch.zeros(COUNTS_SHAPE, dtype=torch.int64)
    high = "dW" in recipe.high_precision
    gradient = {"e4m3": "e4m3fn", "e5m2": "e5m2"}[recipe.gradient_format]
    power_of_two = recipe.power_of_two
    expected = [
        fp8_cast(x, "e4m3fn", recipe.input, transposed=not high, power_of_two=power_of_two),
        fp8_cast(
            weight, "e4m3fn", recipe.weight, transposed=True, power_of_two=power_of_two or recipe.weight == "tensor"
        ),
        fp8_cast(dy, gradient, recipe.gradient, transposed=not high, power_of_two=power_of_two),
    ]
    for number in (1, 2):
        step(recipe, x.detach().requires_grad_(), weight, None, dy, counts=counts)
        assert torch.equal(counts, number * torch.stack([cast.counts for cast in expected]))
    assert counts[:, 0, 3].tolist() == [2 * 12 * 260, 2 * 20 * 260, 2 * 12 * 20]
    assert counts[:, 0, 2].tolist() == [2, 2, 2]
    assert counts[0, 0, 1] > 0
    assert not counts[:, :, 0].any()


@every_recipe
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_non_finite_element_makes_exactly_the_dependent_elements_nan(recipe: Recipe, bad: float) -> None:
    def missing(where: str) -> list[list[bool]]:
        values = dict(zip(("x", "weight", "bias"), (v.detach() for v in leaves(5, 200, 4)), strict=True))
        values["dy"] = random(5, 4, seed=3)
        values[where][1, 2] = bad
        x, weight, bias, dy = values.values()
        found = step(recipe, x.requires_grad_(), weight.requires_grad_(), bias, dy)
        # Finite elements equal the result with zero in place of the bad element.
        for value in found:
            assert (value.isfinite() | value.isnan()).all() or "dW" in recipe.high_precision
        return [(~value.isfinite()).nonzero().tolist() for value in found]

    every = {"m": range(5), "k": range(200), "n": range(4)}
    in_x, in_weight, in_dy = missing("x"), missing("weight"), missing("dy")
    assert in_x == [[[1, n] for n in every["n"]], [], [[n, 2] for n in every["n"]]]
    assert in_weight == [[[m, 1] for m in every["m"]], [[m, 2] for m in every["m"]], []]
    assert in_dy == [[], [[1, k] for k in every["k"]], [[2, k] for k in every["k"]]]


@every_recipe
def test_runs_are_bitwise_repeatable(recipe: Recipe) -> None:
    values = (*leaves(130, 200, 140), random(130, 140, seed=3))
    for one, two in zip(step(recipe, *values), step(recipe, *values), strict=True):
        assert torch.equal(one, two)


# torch.compile, checkpointing, autocast


@every_recipe
def test_compiled_whole_with_the_same_bits_and_counts(recipe: Recipe) -> None:
    x, weight, bias = leaves(2 * 9, 150, 20)
    dy = random(2, 9, 20, seed=3)

    def run(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, counts: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        more = {"state": state} if recipe.delayed else {}
        return fp8_linear((x * 2).view(2, 9, 150), weight, bias, recipe, counts=counts, **more).square()

    torch._dynamo.reset()
    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        counts, state = torch.zeros(COUNTS_SHAPE, dtype=torch.int64), torch.zeros(STATE_SHAPE)
        found = []
        for size in (1.0, 1.5, 30.0):  # the last exceeds the delayed scale
            given = x.detach().mul(size).requires_grad_()
            y = function(given, weight, bias, counts, state)
            found += [y, *torch.autograd.grad(y, (given, weight, bias), dy)]
        results.append((*found, counts, state))
    assert bool(state.any()) == bool(counts[:, :, 0].any()) == recipe.delayed
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_compiled_for_any_number_of_rows() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(fp8_linear, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (5, 9, 130):
        x, weight, bias = leaves(m, 40, 24)
        for recipe in ("rowwise", "blockwise"):
            y, wanted = compiled(x, weight, bias, recipe), fp8_linear(x, weight, bias, recipe)
            assert torch.equal(y, wanted)
            dy = random(m, 24, seed=3)
            assert torch.equal(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(wanted, x, dy)[0])


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES.values() if not recipe.delayed], ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_no_bit(recipe: Recipe, reentrant: bool) -> None:
    x, weight, bias = leaves(9, 150, 20)
    dy = random(9, 150, seed=3)

    def block(x: torch.Tensor) -> torch.Tensor:
        return x + fp8_linear(torch.relu(fp8_linear(x, weight, bias, recipe)), weight.t(), recipe=recipe)

    def gradients(y: torch.Tensor) -> list[torch.Tensor]:
        x.grad = weight.grad = bias.grad = None
        y.backward(dy)
        return [value.grad.clone() for value in (x, weight, bias)]

    plain = gradients(block(x))
    for one, two in zip(gradients(checkpoint(block, x, use_reentrant=reentrant)), plain, strict=True):
        assert torch.equal(one, two)


def test_gradients_accumulate() -> None:
    x, weight, bias = leaves(9, 50, 20)
    dy = random(9, 20, seed=3)
    once = step("rowwise", x, weight, bias, dy)[2]
    for _ in range(2):
        fp8_linear(x, weight, bias, "rowwise").backward(dy)
    assert torch.equal(weight.grad, 2 * once)


def test_autocast_decides_the_format_of_the_result() -> None:
    for recipe in RECIPES:
        x, weight, bias = leaves(9, 50, 20)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = fp8_linear(x, weight, bias, recipe, **fresh(recipe))
        assert y.dtype == torch.bfloat16
        gradients = torch.autograd.grad(y, (x, weight, bias), random(9, 20, seed=3, dtype=torch.bfloat16))
        assert [value.dtype for value in gradients] == [torch.float32] * 3
        assert torch.equal(y, (fp8_linear(x, weight, None, recipe, **fresh(recipe)).bfloat16() + bias).bfloat16())


def test_mixed_formats_of_x_and_weight() -> None:
    for recipe in RECIPES:
        x, weight, bias = leaves(9, 50, 20)
        narrow = x.detach().bfloat16().requires_grad_()
        y, dx, dweight, dbias = step(recipe, narrow, weight, bias, random(9, 20, seed=3, dtype=torch.bfloat16))
        assert [value.dtype for value in (y, dx, dweight, dbias)] == [torch.bfloat16] * 2 + [torch.float32] * 2


@every_recipe
def test_no_second_derivative(recipe: Recipe) -> None:
    x, weight, bias = leaves(4, 8, 6)
    y = fp8_linear(x, weight, bias, recipe, **fresh(recipe))
    dx, dweight, dbias = torch.autograd.grad(y.square().sum(), (x, weight, bias), create_graph=True)
    for gradient in (dx, dweight, dbias):
        with pytest.raises(
            NotImplementedError, match="fp8_linear has no second derivative: leave out create_graph"
        ):
            gradient.square().sum().backward(retain_graph=True)


@pytest.mark.skipif(not interpreting(), reason="a CPU stands for a GPU where Triton's kernels are interpreted")
def test_formats_follow_the_device() -> None:
    x, weight, _ = leaves(4, 32, 16)
    with pretend("amd/mi300x"):
        y, kept = saved_shapes(lambda: fp8_linear(x, weight, recipe="rowwise"))
        y.sum().backward()
    assert {dtype for dtype, _ in kept} == {torch.float8_e4m3fnuz, torch.float32}


def test_meta_tensors_have_shapes() -> None:
    x, weight = torch.empty(2, 3, 40, device="meta", requires_grad=True), torch.empty(24, 40, device="meta")
    for recipe in RECIPES:
        state = torch.zeros(STATE_SHAPE, device="meta") if RECIPES[recipe].delayed else None
        y = fp8_linear(x, weight, recipe=recipe, state=state)
        y.sum().backward()
        assert (y.shape, x.grad.shape) == ((2, 3, 24), (2, 3, 40))


# Recipes and wrong arguments


def test_recipes_are_frozen_values_under_their_names() -> None:
    kinds = ("tensorwise", "delayed", "rowwise")
    named = [name for kind in kinds for name in (kind, f"{kind}-high-wgrad")]
    named.insert(named.index("delayed") + 1, "delayed-e4m3")
    assert list(RECIPES) == [*named, "blockwise"]
    for name, recipe in RECIPES.items():
        assert (recipe.name, str(recipe), recipe_named(name)) == (name, name, recipe)
        assert recipe_named(recipe) is recipe
        assert recipe_of(recipe.text) == recipe
        assert dataclasses.replace(recipe) == recipe
        assert hash(dataclasses.replace(recipe)) == hash(recipe)
        with pytest.raises(dataclasses.FrozenInstanceError):
            recipe.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        RECIPES["other"] = recipe  # type: ignore[index]


def test_a_recipe_without_a_matching_gemm_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"^input='row', weight='tensor': no GEMM multiplies these granularities for y; use tensor and tensor",
    ):
        Recipe(name="odd", input="row", weight="tensor", gradient="row", gradient_format="e4m3")
    with pytest.raises(
        ValueError, match=r"^gradient='row', weight='tensor': no GEMM multiplies these granularities for dx"
    ):
        Recipe(name="odd", input="tensor", weight="tensor", gradient="row", gradient_format="e4m3")
    with pytest.raises(ValueError, match="gradient_format='e3m4': use 'e4m3' or 'e5m2'"):
        Recipe(name="odd", input="row", weight="row", gradient="row", gradient_format="e3m4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^weight='rows': use one of tensor, row, block, square$"):
        Recipe(name="odd", input="row", weight="rows", gradient="row", gradient_format="e4m3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^name=3: use a string$"):
        Recipe(name=3, input="row", weight="row", gradient="row", gradient_format="e4m3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dx_sums='slow': use 'fast' or 'promoted'"):
        dataclasses.replace(RECIPES["rowwise"], dx_sums="slow")
    with pytest.raises(TypeError, match="power_of_two=1: use True or False"):
        dataclasses.replace(RECIPES["rowwise"], power_of_two=1)
    with pytest.raises(ValueError, match=r"high_precision=\('dw',\): use some of y, dx, dW"):
        dataclasses.replace(RECIPES["rowwise"], high_precision=("dw",))
    with pytest.raises(
        ValueError, match="'rowwise': delayed scaling has one scale for a tensor; use input='tensor'"
    ):
        dataclasses.replace(RECIPES["rowwise"], delayed=True)


@pytest.mark.parametrize("high", [c for size in range(4) for c in itertools.combinations(("y", "dx", "dW"), size)])
@pytest.mark.parametrize("name", ["tensorwise", "delayed", "blockwise"])
def test_every_set_of_gemms_in_high_precision(
    name: str, high: tuple[str, ...], products: list[tuple[Any, ...]]
) -> None:
    """The named GEMMs take the unquantized matrices, bit for bit; the others the quantized operands."""
    recipe = dataclasses.replace(RECIPES[name], high_precision=high)
    assert recipe.low_precision == tuple(product for product in ("y", "dx", "dW") if product not in high)
    x, weight, _ = leaves(9, 150, 20)
    dy = random(9, 20, seed=3)
    found = dict(zip(("y", "dx", "dW"), step(recipe, x, weight, None, dy), strict=True))
    shapes = {"y": (9, 150, 20, y_sums(recipe)), "dx": (9, 20, 150, recipe.dx_sums), "dW": (20, 9, 150, "promoted")}
    assert products == [shapes[product] for product in recipe.low_precision]
    plain_x, plain_weight = x.detach(), weight.detach()
    plain = {
        "y": lambda: torch.mm(plain_x, plain_weight.t()),
        "dx": lambda: torch.mm(dy, plain_weight),
        "dW": lambda: torch.mm(dy.t(), plain_x),
    }
    operands = dict(zip(("y", "dx", "dW"), casts(recipe, x, weight, dy).values(), strict=True))
    for product, out in found.items():
        if product in high:
            assert torch.equal(out, plain[product]())
        else:
            within_budget(out, operands[product])


# Delayed scaling


@pytest.mark.parametrize("name", ["delayed", "delayed-e4m3", "delayed-high-wgrad"])
def test_state_has_the_amax_of_the_last_16_steps(name: str) -> None:
    state = torch.zeros(STATE_SHAPE)
    weight = leaves(6, 40, 8)[1]
    sizes: list[list[float]] = [[], []]
    for number in range(20):
        x, dy = random(6, 40, seed=number).requires_grad_(), random(6, 8, seed=100 + number)
        step(name, x, weight, None, dy, state=state)
        sizes[0].insert(0, float(x.detach().abs().max()))
        sizes[1].insert(0, float(dy.abs().max()))
        wanted = torch.tensor([(history + [0.0] * 16)[:16] for history in sizes])
        assert torch.equal(state, wanted)


def test_scales_come_from_the_state() -> None:
    """With a history of 4, x is quantized with the scale of amax 8 and not with its own."""
    x, weight, _ = leaves(6, 40, 8)
    state = torch.zeros(STATE_SHAPE)
    state[:, 3] = 4.0
    dy = random(6, 8, seed=3)
    x.data.clamp_(-2.5, 2.5), dy.clamp_(-2.5, 2.5)
    y, dx, _ = step("delayed", x, weight, None, dy, state=state.clone())
    cast = fp8_cast(x, "e4m3fn", history=state[0])
    assert float(cast.inverse) == pytest.approx(8.0 / 448)
    operands = casts(RECIPES["tensorwise"], x, weight, dy)
    within_budget(y, (cast, operands["y"][1]))
    within_budget(dx, (fp8_cast(dy, "e5m2", history=state[1]), operands["dx"][1]))
    own = step("tensorwise", x.detach().requires_grad_(), weight, None, dy)
    assert not torch.equal(own[0], y)
    assert not torch.equal(own[1], dx)


def test_elements_beyond_the_delayed_scale_are_counted_and_requantized() -> None:
    x, weight, _ = leaves(64, 96, 32)
    dy = random(64, 32, seed=3)
    state = torch.full(STATE_SHAPE, 0.02)  # 100 times too small
    counts = torch.zeros(COUNTS_SHAPE, dtype=torch.int64)
    found = step("delayed", x, weight, None, dy, state=state, counts=counts)
    own = step("tensorwise", x.detach().requires_grad_(), weight, None, dy)
    for one, two in zip(found, own, strict=True):
        assert torch.equal(one, two)
    assert (counts[0::2, 0, 0] > counts[0::2, 0, 3] // 2).all()
    assert not counts[1, :, 0].any()
    assert state[0, 0] == x.detach().abs().max()


def test_a_custom_recipe() -> None:
    own = Recipe(name="own", input="block", weight="block", gradient="block", gradient_format="e5m2")
    x, weight, _ = leaves(9, 300, 20)
    dy = random(9, 20, seed=3)
    y, dx, dweight = step(own, x, weight, None, dy)
    operands = casts(own, x, weight, dy)
    for found, pair in zip((y, dx, dweight), operands.values(), strict=True):
        within_budget(found, pair)


X, W = torch.ones(4, 6), torch.ones(5, 6)
WRONG = {
    "no tensor": (([1.0], W), {}, TypeError, r"x=\[1.0\]: expected a tensor"),
    "no weight": ((X, None), {}, TypeError, "weight=None: expected a tensor"),
    "dtype": ((X.double(), W), {}, TypeError, "x has dtype torch.float64: use float32, float16 or bfloat16"),
    "scalar": ((X[0, 0], W), {}, ValueError, r"x has shape \[\] and weight \[5, 6\]"),
    "columns": ((X[:, 1:], W), {}, ValueError, r"x has shape \[4, 5\] and weight \[5, 6\]: the last dimension"),
    "weight": ((X, W[0]), {}, ValueError, r"weight has shape \[6\]: expected a matrix"),
    "bias": ((X, W, W[0]), {}, ValueError, r"bias has shape \[6\]: weight of shape \[5, 6\] takes \[5\]"),
    "device": ((X, W.to("meta")), {}, ValueError, "weight is on meta and x on cpu: move one"),
    "recipe": ((X, W, None, "fp8"), {}, ValueError, "recipe='fp8': use a Recipe, or one of tensorwise, "),
    "counts": ((X, W), {"counts": torch.zeros(3)}, ValueError, r"counts=.*: use torch.zeros\(\(3, 2, 4\)"),
    "counts dtype": (
        (X, W),
        {"counts": torch.zeros(COUNTS_SHAPE)},
        ValueError,
        r"^counts=tensor[^:]*: use torch.zeros\(\(3, 2, 4\), dtype=torch.int64\), or None",
    ),
    "counts device": (
        (X, W),
        {"counts": torch.zeros(COUNTS_SHAPE, dtype=torch.int64, device="meta")},
        ValueError,
        "counts is on meta and x on cpu",
    ),
    "no state": (
        (X, W, None, "delayed"),
        {},
        ValueError,
        "state=None with the recipe 'delayed', .* kp.fp8.convert",
    ),
    "state": (
        (X, W, None, "delayed"),
        {"state": torch.zeros(2, 15)},
        ValueError,
        r"^state=tensor[^:]*: use torch.zeros\(\(2, 16\), dtype=torch.float32\), or None",
    ),
}


@pytest.mark.parametrize(("arguments", "keywords", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named_with_a_remedy(
    arguments: tuple[Any, ...], keywords: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        fp8_linear(*arguments, **keywords)
