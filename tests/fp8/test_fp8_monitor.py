"""The monitor of converted models: layers that fall back, and non-finite elements."""

from __future__ import annotations

import copy
import gc
import math
import re
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import optimizer as optimizer_module

import kernel_pytorch as kp
from fp8_models import SwiGLU, block, linear, lossy, random, results, sqnr
from kernel_pytorch.fp8 import monitor as monitor_module
from kernel_pytorch.fp8.recipe import PRODUCTS

pytestmark = pytest.mark.usefixtures("one_thread", "own_monitors")


def steps(model: nn.Module, number: int, x: Callable[[int], torch.Tensor] = lossy) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for seed in range(number):
        model(x(seed)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_layer_that_keeps_underflowing_falls_back(recipe: str, tmp_path: Path) -> None:
    model = nn.Sequential(linear(24, 16), nn.Linear(16, 4))
    kp.fp8.convert(model, recipe, monitor=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, 6)  # three intervals; the last is evaluated a step later
    assert model[0][0].fp8_fallback is None
    with pytest.warns(UserWarning, match=r"layer '0\.0' falls back to float32: input: 9\d% of the elements"):
        steps(model, 1)
    assert "in 3 intervals of 2 steps in a row" in model[0][0].fp8_fallback
    assert model[1].fp8_fallback is None
    x = lossy()
    first = model[0](x)
    assert torch.equal(first, functional.linear(x, model[0][0].weight, model[0][0].bias))
    rows = {row.name: row for row in kp.fp8.report(model).layers}
    assert rows["0.0"].notes[0].startswith("fell back: input: ")
    assert rows["0.0"].products == dict.fromkeys(PRODUCTS, "fp32")
    assert rows["1"].products == dict.fromkeys(PRODUCTS, "fp8")
    assert "fell back: input" in str(kp.fp8.report(model))
    # The state dict has it.
    torch.save({"model": model.state_dict(), "fp8": kp.fp8.state_dict(model)}, tmp_path / "model.pt")
    other = kp.fp8.convert(nn.Sequential(linear(24, 16, seed=1), nn.Linear(16, 4)), recipe)
    saved = torch.load(tmp_path / "model.pt")
    other.load_state_dict(saved["model"])
    kp.fp8.load_state_dict(other, saved["fp8"])
    assert other[0][0].fp8_fallback is not None
    assert other[1].fp8_fallback is None
    assert torch.equal(other[0](x), first)
    assert "fell back" in str(kp.fp8.report(other))
    # Loading a checkpoint without it resets it.
    other.load_state_dict(saved["model"])
    assert other[0][0].fp8_fallback is None


def test_a_good_interval_resets_the_count() -> None:
    model = kp.fp8.convert(linear(24, 16), "tensorwise", monitor=1)
    good = {2, 5, 8}
    steps(model, 11, lambda seed: random(8, 24, seed=seed) if seed in good else lossy(seed))
    assert model[0].fp8_fallback is None
    with pytest.warns(UserWarning, match="falls back to float32"):
        steps(model, 2)


@pytest.mark.parametrize("reports", ["one a step", "two after another"])
def test_reports_do_not_count_as_intervals(reports: str) -> None:
    model = kp.fp8.convert(linear(24, 16), "tensorwise", monitor=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if reports == "one a step":  # three reports, not three intervals
            for _ in range(3):
                steps(model, 1)
                kp.fp8.report(model)
            assert model[0].fp8_fallback is None
        else:  # the second report finds no counts, which is a good interval
            for _ in range(5):
                steps(model, 4)
                kp.fp8.report(model), kp.fp8.report(model)
            assert model[0].fp8_fallback is not None


def test_an_interval_without_a_call_is_skipped() -> None:
    model = kp.fp8.convert(linear(24, 16), "tensorwise", monitor=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            assert model[0].fp8_fallback is None
            steps(model, 1)
            torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert model[0].fp8_fallback is not None


def test_a_spike_in_a_delayed_layer_is_no_reason_to_fall_back() -> None:
    model = kp.fp8.convert(linear(24, 16), "delayed", monitor=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, 20, lambda seed: random(8, 24, seed=seed) * (100.0 if seed == 6 else 1.0))
    assert model[0].fp8_counts[0, 0, 0] > 0
    assert model[0].fp8_fallback is None


def test_an_input_that_keeps_exceeding_its_delayed_scale_is_a_reason() -> None:
    model = kp.fp8.convert(linear(24, 16), "delayed", monitor=2)
    with pytest.warns(UserWarning, match="input: .* of the elements exceeded the delayed scale"):
        steps(model, 8, lambda seed: random(8, 24, seed=seed) * 10.0**seed)
    assert model[0].fp8_fallback is not None


@pytest.mark.parametrize("tensor", ["input", "weight", "gradient"])
def test_a_non_finite_tensor_is_named(tensor: str) -> None:
    model = kp.fp8.convert(nn.Sequential(linear(24, 16)), "tensorwise", monitor=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(6):
            x, dy = random(8, 24, seed=number), random(8, 16, seed=number)
            (x if tensor == "input" else dy)[1, 2] = math.nan if tensor != "weight" and number == 1 else 0.5
            with torch.no_grad():
                model[0][0].weight[3, 3] = math.inf if tensor == "weight" and number == 1 else 0.1
            model(x).backward(dy)
            optimizer.zero_grad()  # a non-finite gradient must not reach the weight
            optimizer.step()
            assert bool(caught) == (number >= 3)
    (warning,) = caught
    assert re.fullmatch(
        rf"fp8: not finite in the last 3 steps: 1 elements of the {tensor} of layer '0\.0'", str(warning.message)
    )
    assert kp.fp8.report(model).layers[0].stats[tensor].nonfinite == 1
    assert model[0][0].fp8_fallback is None


def test_many_non_finite_tensors_are_one_warning() -> None:
    model = kp.fp8.convert(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), "tensorwise", monitor=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(model, 2, lambda seed: random(4, 16, seed=seed) * (math.inf if seed == 0 else 1.0))
    (warning,) = caught
    assert str(warning.message).startswith(
        "fp8: not finite in the last 1 steps: 64 elements of the input of layer '0'; "
    )
    assert str(warning.message).endswith(" more tensors, see kp.fp8.report(model)")


def test_only_steps_of_optimizers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[tuple[monitor_module.Monitor, int]] = []
    monkeypatch.setattr(monitor_module.Monitor, "evaluate", lambda self: looks.append((self, self.steps)))
    model = kp.fp8.convert(linear(24, 16), "tensorwise", monitor=3)
    monitor = monitor_module.monitor_of(model)
    assert monitor is not None
    for _ in range(10):
        model(lossy())
    assert monitor.steps == 0
    fetched = []
    monkeypatch.setattr(monitor_module.Monitor, "_copy_counts", lambda self: fetched.append(self.steps))
    steps(model, 7)
    assert monitor.steps == 7
    assert fetched == [3, 6]
    assert [at for looking, at in looks if looking is monitor] == list(range(1, 8))


def hooks() -> int:
    return len(optimizer_module._global_optimizer_post_hooks)


def test_one_hook_while_a_monitored_model_exists() -> None:
    before = hooks()
    models = [kp.fp8.convert(linear(24, 16), "tensorwise", monitor=3) for _ in range(2)]
    assert hooks() == before + 1
    kp.fp8.revert(models.pop())
    assert hooks() == before + 1
    del models
    gc.collect()
    assert hooks() == before


def test_steps_of_other_optimizers_do_not_count() -> None:
    model = kp.fp8.convert(linear(24, 16), "tensorwise", monitor=3)
    steps(linear(24, 16), 4)
    monitor = monitor_module.monitor_of(model)
    assert monitor is not None
    assert monitor.steps == 0


@pytest.mark.parametrize("in_backward", [True, False])
def test_one_optimizer_per_parameter_counts_one_step(in_backward: bool) -> None:
    model = kp.fp8.convert(nn.Sequential(linear(24, 16), linear(16, 8), nn.LayerNorm(8)), "tensorwise", monitor=2)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.0) for parameter in model.parameters()}
    if in_backward:
        for parameter, optimizer in optimizers.items():
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    monitor = monitor_module.monitor_of(model)
    assert monitor is not None
    for number in range(5):
        model(random(8, 24, seed=number)).sum().backward()
        if not in_backward:
            for optimizer in optimizers.values():
                optimizer.step()
        assert monitor.steps == number + 1


def test_a_new_optimizer_continues_the_count() -> None:
    model = kp.fp8.convert(linear(24, 16), "tensorwise", monitor=50)
    monitor = monitor_module.monitor_of(model)
    assert monitor is not None
    for _ in range(3):
        steps(model, 2, lambda seed: random(8, 24, seed=seed))
    assert monitor.steps == 6


def test_no_monitor_no_action() -> None:
    model = kp.fp8.convert(linear(24, 16), "tensorwise", monitor=None)
    assert monitor_module.monitor_of(model) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, 12)
    assert model[0].fp8_fallback is None
    assert kp.fp8.report(model).layers[0].stats["input"].failed is not None  # it was counted


@pytest.mark.parametrize("make", [linear, block])
def test_a_deleted_model_is_not_monitored(make: Callable[[], nn.Module]) -> None:
    model = kp.fp8.convert(make(), "delayed", monitor=1)
    steps(model, 3, lambda _: random(8, 24 if make is block else 40))
    assert len(monitor_module._monitors) == 1
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(monitor_module._monitors) == 0


def test_a_fallback_inside_a_fused_swiglu(fused_calls: list[int]) -> None:
    model = kp.fp8.convert(SwiGLU(64, 96), "tensorwise", monitor=None)
    plain = results(kp.fp8.revert(copy.deepcopy(model)), random(32, 64))
    model.up_proj.fp8_fallback = "a test says so"
    found = results(model, random(32, 64))
    assert not fused_calls
    for name, value in found.items():
        assert sqnr(value, plain[name]) > 18, name
    assert not model.up_proj.fp8_counts.any()
    assert model.gate_proj.fp8_counts.any()
