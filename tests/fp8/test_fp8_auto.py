"""Recipe auto: measurements, the choice of GEMMs, caching, and layers that stay in their dtype."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import kernel_pytorch as kp
from fp8_models import block, linear, pretend_measured, random, results, same, sqnr, train
from kernel_pytorch.fp8 import autotune as autotune
from kernel_pytorch.fp8 import module as fp8_module
from kernel_pytorch.fp8.autotune import LayerCall, Measured, measured_choice, rounded
from kernel_pytorch.fp8.recipe import PRODUCTS, RECIPES
from kernel_pytorch.hardware_abstraction import choice_cache

pytestmark = pytest.mark.usefixtures("one_thread", "own_monitors")


def test_auto_on_a_cpu_runs_no_gemm_in_fp8(products: list[tuple[int, ...]]) -> None:
    model, plain = kp.fp8.convert(block()), block()
    for rows in (1, 5, 64):
        same(results(model, random(rows, 24)), results(plain, random(rows, 24)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(results(model, random(9, 24)), results(plain, random(9, 24)))
    assert not products
    report = kp.fp8.report(model)
    assert {row.recipe for row in report.layers} == {"auto (delayed)"}
    assert all(row.products == dict.fromkeys(PRODUCTS, "fp32") for row in report.layers)
    assert all("no FP8 matrix units on cpu" in row.notes for row in report.layers)


@pytest.mark.parametrize("low", [PRODUCTS, ("y", "dW"), ("dx",), ()])
def test_auto_computes_what_was_measured_to_be_faster(
    low: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, products: list[tuple[int, ...]]
) -> None:
    asked: list[Any] = []

    def choice(*key: Any) -> tuple[str, ...]:
        asked.append(key)
        return low

    pretend_measured(monkeypatch, choice)
    model = kp.fp8.convert(linear())
    found, exact = results(model, random(2, 17, 40)), results(linear(), random(2, 17, 40))
    shapes = {"y": (34, 40, 24), "dx": (34, 24, 40), "dW": (24, 34, 40)}
    assert products == [shape for product, shape in shapes.items() if product in low]
    for name, product in (("y", "y"), ("x", "dx"), ("0.weight", "dW")):
        assert sqnr(found[name], exact[name]) >= 20
        assert (sqnr(found[name], exact[name]) > 60) == (product not in low)
    results(model, random(2, 17, 40))
    assert len(asked) == 1  # a known size is not looked up again
    kind, _, rows, shape, dtype, weight_dtype, bias, recipe, needs_dx, needs_dw, host_time_factor = asked[0]
    assert (kind, rows, shape, bias, needs_dx, needs_dw) == ("cpu", 48, (24, 40), True, True, True)
    assert host_time_factor == autotune.ALONE  # no other layer is there
    assert (dtype, weight_dtype, recipe) == (torch.float32, torch.float32, RECIPES["delayed"])


def test_an_evaluation_does_not_decide_for_training(
    monkeypatch: pytest.MonkeyPatch, products: list[tuple[int, ...]]
) -> None:
    """y alone is not faster in FP8, the three GEMMs together are."""
    pretend_measured(monkeypatch, lambda *key: PRODUCTS if key[-2] else ())
    model = kp.fp8.convert(linear())
    with torch.no_grad():
        model.eval()(random(64, 40))
    results(model.train(), random(32, 40))
    assert len(products) == 3


def test_a_layer_left_in_its_dtype_costs_one_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    pretend_measured(monkeypatch, lambda *key: asked.append(key) or ())
    model = kp.fp8.convert(linear())
    for rows in (64, 32, 7):
        results(model, random(rows, 40))
    assert len(asked) == 1
    results(model, random(128, 40))
    assert len(asked) == 2


def test_a_choice_for_one_dtype_does_not_hold_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast changes the dtype unless the weights are 16-bit already."""
    asked: list[torch.dtype] = []

    def choice(*key: Any) -> tuple[str, ...]:
        asked.append(key[4])
        return () if key[4] == torch.bfloat16 else PRODUCTS

    pretend_measured(monkeypatch, choice)
    model = kp.fp8.convert(linear())
    layer = model[0]
    x = random(64, 40)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
            assert layer.fp8_gains_nothing(x)
            assert not layer.fp8_gains_nothing(random(128, 40))
        assert not layer.fp8_gains_nothing(x)
        assert layer(x).dtype == torch.float32
    assert sorted(set(asked), key=str) == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_left_in_two_dtypes_costs_one_comparison_in_both(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_measured(monkeypatch, lambda *_: ())
    layer = kp.fp8.convert(linear())[0]
    for mixed in (first, not first):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            layer(random(64, 40))
    for mixed in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            assert layer.fp8_gains_nothing(random(64, 40))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_choice_without_an_input_gradient_does_not_hold_with_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, products: list[tuple[int, ...]]
) -> None:
    pretend_measured(monkeypatch, lambda *key: PRODUCTS if key[-3] else ())
    model = kp.fp8.convert(linear().to(dtype))
    x = random(64, 40).to(dtype)
    for _ in range(2):
        model(x)
    assert model[0].fp8_gains_nothing(x)
    assert not products
    results(model, x)
    assert len(products) == 3


def test_a_layer_left_in_training_is_not_measured_without_dx(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    pretend_measured(monkeypatch, lambda *key: asked.append(key) or ())
    model = kp.fp8.convert(linear().bfloat16())
    x = random(64, 40).bfloat16()
    results(model, x)
    assert len(asked) == 1
    assert model[0].fp8_gains_nothing(x)
    model(x)
    assert len(asked) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_measurements_are_not_in_an_exported_program(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_measured(monkeypatch, lambda *_: ())
    model = kp.fp8.convert(linear().to(dtype))
    model(random(50, 40).to(dtype).requires_grad_())
    rows = {0: torch.export.Dim("rows", min=49, max=64)}  # which auto decides about together
    x = random(60, 40).to(dtype)
    program = torch.export.export(model.eval(), (x,), dynamic_shapes=(rows,), strict=False).module()
    for count in (49, 64):
        x = random(count, 40).to(dtype)
        assert torch.equal(program(x), model(x))


def test_weights_of_another_dtype_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    pretend_measured(monkeypatch, lambda *key: asked.append(key) or ())
    model = kp.fp8.convert(linear().bfloat16())
    model(random(64, 40).bfloat16().requires_grad_())
    model.load_state_dict({name: value.float() for name, value in model.state_dict().items()}, assign=True)
    model(random(64, 40).requires_grad_())
    assert len(asked) == 2


def test_fake_tensors_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(fp8_module, "may_have_matrix_units", lambda _: True)
    monkeypatch.setattr(autotune, "measured_choice", lambda call: asked.append(call) or Measured(64, (((), 1.0),)))
    with FakeTensorMode():
        fake = kp.fp8.convert(linear())
        assert fake(torch.empty(64, 40, requires_grad=True)).shape == (64, 24)
    assert not asked
    model = kp.fp8.convert(linear())
    model(random(64, 40).requires_grad_())
    assert len(asked) == 1


def test_a_layer_inside_a_transform_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()[0].bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.func.vmap(self.layer)(x)

    pretend_measured(monkeypatch, lambda *_: ())
    model = kp.fp8.convert(Mapped())
    model.layer(random(50, 40).bfloat16().requires_grad_())
    x = random(4, 60, 40).bfloat16()
    rows = {1: torch.export.Dim("rows", min=49, max=64)}
    program = torch.export.export(model, (x,), dynamic_shapes=(rows,), strict=False).module()
    assert torch.equal(program(x), model(x))


def test_a_copied_layer_measures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_measured(monkeypatch, lambda *_: ())
    model = kp.fp8.convert(linear())
    x = random(64, 40).requires_grad_()
    model(x)
    assert model[0].fp8_gains_nothing(x)
    assert not copy.deepcopy(model)[0].fp8_gains_nothing(x)


def test_a_trace_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_measured(monkeypatch, lambda *_: ())
    model = kp.fp8.convert(linear())
    traced = torch.jit.trace(model, random(64, 40))
    assert not model[0].fp8_gains_nothing(random(7, 40))
    assert torch.equal(traced(random(7, 40)), model(random(7, 40)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_measurements_cause_no_recompilation(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_measured(monkeypatch, lambda *_: ())
    model = kp.fp8.convert(linear().to(dtype))
    graphs = CompileCounter()
    compiled = torch.compile(model, backend=graphs, dynamic=False)
    for rows in (3, 64, 128):
        compiled(random(64, 40).to(dtype))
        x = random(rows, 40).to(dtype)
        model(x)
        model(x.clone().requires_grad_())
        assert model[0].fp8_gains_nothing(x)
    assert graphs.frame_count == 1


def test_a_parametrized_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_measured(monkeypatch, lambda *_: ())
    plain, model = linear(), kp.fp8.convert(linear())
    for each in (plain, model):
        nn.utils.parametrizations.weight_norm(each[0])
    for _ in range(2):
        same(results(model, random(64, 40)), results(plain, random(64, 40)))
    assert model[0].fp8_gains_nothing(random(64, 40).requires_grad_())


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_compiled_call_is_for_a_range_of_rows(monkeypatch: pytest.MonkeyPatch, dynamic: bool | None) -> None:
    asked: list[int] = []

    def choice(*key: Any) -> tuple[str, ...]:
        asked.append(key[2])
        return PRODUCTS if key[2] < 64 else ("dW",)

    pretend_measured(monkeypatch, choice)
    torch._dynamo.reset()
    wanted = {rows: kp.fp8.convert(linear())(random(rows, 40)).detach() for rows in (7, 41, 47, 45, 60, 63)}
    asked.clear()
    run = torch.compile(kp.fp8.convert(linear()), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows, y in wanted.items():
        assert sqnr(run(random(rows, 40)).detach(), y) > 25
    assert asked == [8, 48, 64]


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "format": lambda model: model.bfloat16(),
    "recipe": lambda model: setattr(model[0], "fp8_recipe", RECIPES["rowwise"]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_layer_left_in_its_dtype_is_measured_again_after_a_change(
    change: Callable[[nn.Sequential], object], monkeypatch: pytest.MonkeyPatch, products: list[tuple[int, ...]]
) -> None:
    """A change of the layer's device, dtype or recipe."""
    pretend_measured(
        monkeypatch, lambda *key: () if (key[4], key[7].name) == (torch.float32, "delayed") else PRODUCTS
    )
    model = kp.fp8.convert(linear())
    results(model, random(64, 40))
    assert not products
    change(model)
    results(model, random(64, 40).to(model[0].weight.dtype))
    assert len(products) == 3


def test_auto_on_meta() -> None:
    model = kp.fp8.convert(block().to("meta"))
    x = torch.empty(8, 24, device="meta")
    assert [model(x).shape for _ in range(2)] == [(8, 16)] * 2


SECONDS = {(): 10.0, ("y",): 9.0, ("y", "dx"): 8.0, ("dW",): 10.5}


@pytest.mark.parametrize(
    ("seconds", "best", "speedup"),
    [
        (SECONDS, ("y", "dx"), 1.25),
        ({(): 10.0, ("y",): 9.9}, (), 1.0),  # within the noise
        ({(): 10.0, ("y",): 9.8}, ("y",), 10 / 9.8),
        ({(): 10.0, PRODUCTS: 12.0}, (), 1.0),
        ({(): 10.0}, (), 1.0),
    ],
)
def test_the_best_choice(seconds: dict[tuple[str, ...], float], best: tuple[str, ...], speedup: float) -> None:
    measured = Measured(64, tuple(seconds.items()))
    assert measured.best == best
    assert measured.plain == 10.0
    assert measured.speedup == pytest.approx(speedup)


@pytest.fixture
def fabricated(monkeypatch: pytest.MonkeyPatch) -> list[LayerCall]:
    """Replace measurements by scripted ones; return the measured calls."""
    asked: list[LayerCall] = []

    def measure(call: LayerCall) -> Measured:
        asked.append(call)
        return Measured(call.rows, tuple(SECONDS.items()))

    monkeypatch.setattr(autotune, "_measurements", {})
    monkeypatch.setattr(autotune, "_measure", measure)
    return asked


def test_a_shape_is_measured_once(fabricated: list[LayerCall]) -> None:
    call = LayerCall(torch.device("cpu"), 64, (24, 40), torch.float32, torch.float32, True, RECIPES["delayed"])
    assert measured_choice(call) is measured_choice(call)
    assert len(fabricated) == 1
    measured_choice(call._replace(needs_dx=False))
    measured_choice(call._replace(dtype=torch.bfloat16))
    measured_choice(call._replace(recipe=RECIPES["tensorwise"]))
    assert len(fabricated) == 4


def test_a_later_process_reads_the_measurements(fabricated: list[LayerCall]) -> None:
    call = LayerCall(torch.device("cpu"), 64, (24, 40), torch.float32, torch.bfloat16, True, RECIPES["delayed"])
    first = measured_choice(call)
    autotune._measurements.clear()
    assert measured_choice(call) == first
    assert len(fabricated) == 1
    measured_choice(call._replace(host_time_factor=1.3))
    assert len(fabricated) == 2


def test_an_unreadable_measurement_is_repeated(fabricated: list[LayerCall]) -> None:
    call = LayerCall(torch.device("cpu"), 64, (24, 40), torch.float32, torch.float32, True, RECIPES["delayed"])
    first = measured_choice(call)
    (kept,) = choice_cache.directory().iterdir()
    kept.write_text("{}")
    autotune._measurements.clear()
    with pytest.warns(choice_cache.ChoiceCacheWarning, match="is corrupt"):
        assert measured_choice(call) == first
    assert len(fabricated) == 2


@pytest.mark.parametrize(
    ("issuing", "alone", "compiled"), [(0.1, PRODUCTS, PRODUCTS), (6.0, PRODUCTS, ()), (8.0, (), ())]
)
def test_a_single_layer_must_win_with_its_host_time(
    monkeypatch: pytest.MonkeyPatch, issuing: float, alone: tuple[str, ...], compiled: tuple[str, ...]
) -> None:
    """A faster choice is not taken if the host time would make it slower."""
    monkeypatch.setattr(autotune, "_measurements", {})
    monkeypatch.setattr(autotune, "_repeats", lambda *_: 1)
    monkeypatch.setattr(
        autotune, "_seconds", lambda run, *_: 10.0 - len(run.args[0])
    )  # faster with more GEMMs in FP8
    monkeypatch.setattr(torch.random, "fork_rng", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(autotune, "_host_seconds", lambda *_: issuing)
    call = LayerCall(torch.device("cpu"), 64, (24, 40), torch.float32, torch.float32, True, RECIPES["tensorwise"])
    assert measured_choice(call).best == PRODUCTS
    assert measured_choice(call._replace(host_time_factor=autotune.ALONE)).best == alone
    assert measured_choice(call._replace(host_time_factor=autotune.ALONE * autotune.COMPILED)).best == compiled


def test_the_report_has_what_was_measured(fabricated: list[LayerCall]) -> None:
    model = kp.fp8.convert(linear())
    call = ((24, 40), torch.float32, torch.float32, True, RECIPES["delayed"])
    for rows in (96, 64):
        measured_choice(LayerCall(torch.device("cpu"), rows, *call))
    measured_choice(LayerCall(torch.device("cpu"), 8, (24, 41), *call[1:]))  # another layer's
    (row,) = kp.fp8.report(model).layers
    assert [(found.rows, found.best) for found in row.measured] == [(64, ("y", "dx")), (96, ("y", "dx"))]
    assert row.products == {"y": "fp8", "dx": "fp8", "dW": "fp32"}
    text = str(kp.fp8.report(model))
    assert "measured: 1.25x at 64 rows, 1.25x at 96 rows" in text
    assert "recipe: auto (delayed)" in text
    assert re.search(r"fp8 +fp8 +fp32", text)


def test_the_report_of_a_layer_whose_input_needs_no_gradient(
    fabricated: list[LayerCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer of a model has measurements without dx, also next to another layer of its shape."""
    monkeypatch.setattr(fp8_module, "may_have_matrix_units", lambda _: True)
    monkeypatch.setattr(
        autotune,
        "_measured_gemms",
        lambda kind, _, *call: measured_choice(LayerCall(torch.device(kind), *call)).best,
    )
    measure = autotune._measure
    monkeypatch.setattr(
        autotune,
        "_measure",
        lambda call: measure(call) if call.needs_dx else Measured(call.rows, (((), 10.0), (("y", "dW"), 5.0))),
    )
    model = kp.fp8.convert(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24)))
    model(random(64, 24)).sum().backward()
    with torch.no_grad():
        model(random(32, 24))
    first, second = kp.fp8.report(model).layers
    assert [found.best for found in first.measured] == [("y", "dW")]
    assert first.products == {"y": "fp8", "dx": "fp32", "dW": "fp8"}
    assert [found.best for found in second.measured] == [("y", "dx")]
    assert second.products == {"y": "fp8", "dx": "fp8", "dW": "fp32"}


@pytest.mark.parametrize(
    ("needs_dx", "needs_dw", "choices"),
    [
        (True, True, {(), ("y",), ("dx",), ("y", "dx")}),
        (False, True, {(), ("y",)}),
        (True, False, {(), ("y",), ("dx",), ("y", "dx")}),
    ],
)
def test_measuring_times_every_choice_that_a_recipe_allows(
    needs_dx: bool, needs_dw: bool, choices: set[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where FP8 is not faster: each choice runs and is timed."""
    monkeypatch.setattr(
        torch.random, "fork_rng", lambda **_: contextlib.nullcontext()
    )  # fork_rng needs an accelerator
    monkeypatch.setattr(autotune, "_SECONDS_A_ROUND", 1e-6)
    recipe = RECIPES["delayed-high-wgrad"]
    call = LayerCall(
        torch.device("cpu"), 4, (8, 16), torch.float32, torch.float32, True, recipe, needs_dx, needs_dw
    )
    measured = autotune._measure(call._replace(host_time_factor=1.0 if needs_dx else 0.0))
    assert {choice for choice, _ in measured.seconds} == choices
    assert all(seconds > 0 for _, seconds in measured.seconds)
    assert measured.rows == 4


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(0, 1 << 40))
def test_rows_are_rounded_up_to_two_significant_bits(rows: int) -> None:
    up = rounded(rows)
    assert max(rows, 1) <= up
    assert up == rounded(up)
    assert up <= rounded(rows + 1)
    assert up < 1.5 * max(rows, 1)
    assert rows > 4 or up == max(rows, 1)
    assert up % (1 << max(0, up.bit_length() - 2)) == 0


@pytest.mark.parametrize("in_8", [PRODUCTS, ("dx", "dW"), ()])
def test_what_was_measured_is_compiled(monkeypatch: pytest.MonkeyPatch, in_8: tuple[str, ...]) -> None:
    """Also in a SwiGLU, whose three layers must use the same GEMMs."""
    pretend_measured(monkeypatch, lambda *_: in_8)
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = kp.fp8.convert(block(), "auto")
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        losses = train(run, torch.optim.SGD(model.parameters(), lr=0.1), range(3))
        found.append((losses, dict(model.state_dict())))
        assert bool(model.mlp.down_proj.fp8_counts[2].any()) == bool(in_8)
    assert found[0][0] == found[1][0]
    same(found[0][1], found[1][1])
