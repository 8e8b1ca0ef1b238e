"""kp.fp8.convert and SwiGLU: which modules are fused, and that fusion changes no result."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn import functional

import kernel_pytorch as kp
from fp8_models import SwiGLU, block, is_fused, random, results, same, sqnr
from kernel_pytorch.fp8 import fusion as swiglu_module
from kernel_pytorch.fp8 import swiglu as swiglu_ops
from kernel_pytorch.fp8.module import Float8Linear

pytestmark = pytest.mark.usefixtures("one_thread", "own_monitors")
fused_recipes = pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "delayed-e4m3"])


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(32, 48, bias=False)
        self.w2 = nn.Linear(48, 32, bias=False)
        self.w3 = nn.Linear(32, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Swapped(SwiGLU):
    """The activation applied to the layer named up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class WithScale(SwiGLU):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) * scale


class WithResidual(SwiGLU):
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + residual


class WithDropout(SwiGLU):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(super().forward(x))


class FunctionalDropout(SwiGLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(super().forward(x), 0.5, self.training)


class Half(SwiGLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


class Gelu(SwiGLU):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.GELU()


class Clamped(SwiGLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-100, 100)


class WithNorm(SwiGLU):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


RECOGNISED = {
    "gate, up, down": (SwiGLU, ("gate_proj", "up_proj", "down_proj")),
    "w1, w2, w3": (Llama, ("w1", "w3", "w2")),
    "swapped": (Swapped, ("up_proj", "gate_proj", "down_proj")),
    "square": (lambda: SwiGLU(32, 32), ("gate_proj", "up_proj", "down_proj")),
    "no dropout": (lambda: WithDropout(0.0), ("gate_proj", "up_proj", "down_proj")),
    "optional argument": (WithScale, ("gate_proj", "up_proj", "down_proj")),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "gelu": Gelu,
    "dropout": lambda: WithDropout(0.1),
    "dropout in eval": lambda: WithDropout(0.1).eval(),
    "functional dropout": FunctionalDropout,
    "bias": lambda: SwiGLU(bias=True),
    "another argument": WithResidual,
    "another factor": Half,
    "norm": WithNorm,
    "no module": lambda: nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 48), nn.Linear(48, 32)),
}


@pytest.mark.parametrize(("make", "roles"), RECOGNISED.values(), ids=RECOGNISED)
def test_a_swiglu_is_matched_by_its_results(make: Callable[[], nn.Module], roles: tuple[str, ...]) -> None:
    model = nn.Sequential(make())
    kp.fp8.convert(model, "tensorwise")
    assert swiglu_module.fused_in(model) == {f"0.{role}": "0" for role in roles}
    assert getattr(model[0], swiglu_module._MARK) == roles
    assert str(kp.fp8.report(model)).count("part of the fused SwiGLU '0'") == 3


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_a_module_that_computes_something_else_is_not_fused(make: Callable[[], nn.Module]) -> None:
    model = make()
    kp.fp8.convert(model, "tensorwise")
    assert not is_fused(model)
    assert "forward" not in model.__dict__
    assert all(isinstance(layer, Float8Linear) for layer in model.modules() if isinstance(layer, nn.Linear))


@pytest.mark.parametrize("make", [lambda: FunctionalDropout().eval(), Clamped], ids=["functional dropout", "clamp"])
def test_a_module_that_sometimes_computes_something_else_is_not_fused(make: Callable[[], nn.Module]) -> None:
    """Dropout in training, or clamping of large elements: fusion would change the model."""
    model = make()
    kp.fp8.convert(model, "tensorwise")
    assert not is_fused(model)


def test_matching_a_module_leaves_no_trace() -> None:
    model = block()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    kp.fp8.convert(model, "tensorwise")
    same(dict(model.state_dict()), state)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(not layer.fp8_counts.any() for layer in model.modules() if isinstance(layer, Float8Linear))
    assert all(layer.fp8_fallback is None for layer in model.modules() if isinstance(layer, Float8Linear))


@fused_recipes
@pytest.mark.parametrize("make", [lambda: SwiGLU(64, 96), Llama], ids=["gate, up, down", "w1, w2, w3"])
def test_fused_is_as_unfused(recipe: str, make: Callable[[], nn.Module], fused_calls: list[int]) -> None:
    torch.manual_seed(0)
    model = make()
    width = next(model.parameters()).shape[1]
    x = random(4, 33, width)
    plain = results(model, x)
    unfused = kp.fp8.convert(copy.deepcopy(model), recipe, fuse_swiglu=False)
    assert not is_fused(unfused)
    fused = kp.fp8.convert(model, recipe)
    for _ in range(2):  # a first step without a history, and one with
        found, other = results(fused, x), results(unfused, x)
    assert len(fused_calls) == 2
    assert found.keys() == other.keys() == plain.keys()
    for name, value in found.items():
        assert value.shape == other[name].shape
        assert sqnr(value, other[name]) > 20, (name, sqnr(value, other[name]))
        assert sqnr(value, plain[name]) > 18, (name, sqnr(value, plain[name]))


@fused_recipes
@pytest.mark.parametrize("trained", ["gate_proj", "up_proj", "down_proj", "none"])
def test_fused_with_frozen_weights(recipe: str, trained: str) -> None:
    torch.manual_seed(0)
    plain = SwiGLU(64, 96)
    for name, p in plain.named_parameters():
        p.requires_grad_(name == f"{trained}.weight")
    model = kp.fp8.convert(copy.deepcopy(plain), recipe)
    assert is_fused(model)
    for wants_x in (True, False) if trained != "none" else (True,):
        outputs = []
        for each in (model, plain):
            x = random(40, 64).requires_grad_(wants_x)
            each.zero_grad()
            y = each(x)
            y.backward(random(40, 64, seed=3))
            outputs.append([y.detach(), x.grad, *(p.grad for p in each.parameters())])
        for found, exact in zip(*outputs, strict=True):
            assert (found is None) == (exact is None)
            assert found is None or sqnr(found, exact) > 18


@fused_recipes
@pytest.mark.parametrize("compiled", [False, True])
def test_fused_gemms_accumulate_as_the_recipe_says(
    recipe: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    seen: list[tuple[Any, ...]] = []

    def watched(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        if not isinstance(a, FakeTensor):
            seen.append((a.dtype, rest[3]))
        return product(a, b, *rest)

    product = swiglu_ops.scaled_matmul
    monkeypatch.setattr(swiglu_ops, "scaled_matmul", watched)
    model = kp.fp8.convert(SwiGLU(64, 96), recipe)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    run(random(40, 64).requires_grad_()).sum().backward()
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    gradients = e4m3 if recipe == "delayed-e4m3" else e5m2
    assert seen[:3] == [(e4m3, "fast")] * 3
    assert Counter(seen[3:]) == Counter([(gradients, "fast")] * 3 + [(gradients, "promoted")] * 3)


@fused_recipes
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [SwiGLU, lambda: nn.Linear(32, 16)], ids=["SwiGLU", "linear"])
def test_another_format_of_x_is_an_error_that_names_it(
    recipe: str, compiled: bool, make: Callable[[], nn.Module]
) -> None:
    torch._dynamo.reset()
    model = kp.fp8.convert(nn.Sequential(make()), recipe)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    with pytest.raises(TypeError, match=r"x has dtype torch\.float64: use float32, float16 or bfloat16"):
        run(random(6, 32).double())


def test_fused_under_autocast() -> None:
    model = kp.fp8.convert(SwiGLU(64, 96), "tensorwise")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(model, random(40, 64))
    assert found.pop("y").dtype == torch.bfloat16
    assert {value.dtype for value in found.values()} == {torch.float32}


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "tensorwise-high-wgrad"])
def test_other_recipes_run_the_layers_one_by_one(recipe: str, fused_calls: list[int]) -> None:
    model = SwiGLU()
    unfused = kp.fp8.convert(copy.deepcopy(model), recipe, fuse_swiglu=False)
    kp.fp8.convert(model, recipe)
    same(results(model, random(9, 32)), results(unfused, random(9, 32)))
    assert not fused_calls


class Flagged(SwiGLU):
    limit: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.limit, self.drop = None, nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(super().forward(x))
        return y if self.limit is None else y.clamp(-self.limit, self.limit)


class ByRows(SwiGLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if x.shape[0] < 100 else y.clamp(-0.01, 0.01)


SETTINGS: dict[str, Callable[[Flagged], object]] = {
    "activation": lambda module: setattr(module, "act_fn", nn.GELU()),
    "flag": lambda module: setattr(module, "limit", 0.1),
    "flag of a child": lambda module: setattr(module.drop, "p", 1.0),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", SETTINGS.values(), ids=SETTINGS)
def test_a_module_that_changed_runs_as_it_is(change: Callable[[Flagged], object], compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Flagged()
    model = kp.fp8.convert(copy.deepcopy(plain), "tensorwise")
    assert is_fused(model)
    copied = copy.deepcopy(model)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    x = random(9, 32)
    assert sqnr(run(x), plain(x)) > 18
    for each in (plain, model, copied):
        change(each)
    assert not is_fused(model)  # to the report
    wanted = plain(x)
    for found in (run(x), copied(x)):
        assert torch.equal(found, wanted) if not wanted.any() else sqnr(found, wanted) > 18


def test_one_that_depends_on_the_number_of_rows_is_not_fused() -> None:
    assert not is_fused(kp.fp8.convert(ByRows(), "tensorwise"))


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "forward": lambda layer, hook: layer.register_forward_hook(hook),
    "forward pre": lambda layer, hook: layer.register_forward_pre_hook(hook),
    "backward": lambda layer, hook: layer.register_full_backward_hook(hook),
    "backward pre": lambda layer, hook: layer.register_full_backward_pre_hook(hook),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("role", ["gate_proj", "up_proj", "down_proj"])
def test_a_hook_on_a_layer_is_called(kind: str, role: str, fused_calls: list[int]) -> None:
    model = SwiGLU()
    unfused = kp.fp8.convert(copy.deepcopy(model), "tensorwise", fuse_swiglu=False)
    kp.fp8.convert(model, "tensorwise")
    seen: list[nn.Module] = []
    handle = HOOKS[kind](getattr(model, role), lambda module, *_: seen.append(module))
    found = results(model, random(9, 32))
    assert seen == [getattr(model, role)]
    assert not fused_calls
    same(found, results(unfused, random(9, 32)))
    handle.remove()
    results(model, random(9, 32))
    assert len(fused_calls) == 1


def test_a_call_with_more_arguments_is_the_modules_own(fused_calls: list[int]) -> None:
    model = kp.fp8.convert(WithScale(), "tensorwise")
    y = model(random(9, 32))
    assert len(fused_calls) == 1
    for doubled in (model(random(9, 32), 2.0), model(random(9, 32), scale=2.0)):
        assert sqnr(doubled, 2 * y) > 20
    assert len(fused_calls) == 1


class NamedDifferently(SwiGLU):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states)


def test_the_input_may_be_given_by_its_name() -> None:
    model = kp.fp8.convert(NamedDifferently(), "tensorwise")
    y = model(random(9, 32))
    assert torch.equal(model(hidden_states=random(9, 32)), y)


def test_a_layer_that_is_replaced_is_called(fused_calls: list[int]) -> None:
    model = kp.fp8.convert(SwiGLU(), "tensorwise")
    model.up_proj = nn.Linear(32, 48, bias=False)
    y = model(random(9, 32))
    assert not fused_calls
    x = random(9, 32)
    h = functional.silu(functional.linear(x, model.gate_proj.weight)) * model.up_proj(x)
    assert sqnr(y, functional.linear(h, model.down_proj.weight)) > 20
