"""Transforms of FP8 layers raise an error with the remedy, before any state changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

import kernel_pytorch as kp
from fp8_models import block, is_fused, random, same
from kernel_pytorch.fp8 import autotune as autotune
from kernel_pytorch.fp8.autograd import COUNTS_SHAPE, fp8_linear
from kernel_pytorch.fp8.monitor import layers_of
from kernel_pytorch.fp8.recipe import RECIPES

pytestmark = [
    pytest.mark.usefixtures("one_thread", "own_monitors"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning"),
]

X = random(6, 24)
REMEDY = "or do without FP8, with kp.fp8.revert(model)"
Call = Callable[[torch.Tensor], torch.Tensor]


def dual(function: Call, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS: dict[str, tuple[Callable[[Call], Any], str]] = {
    "grad": (
        lambda f: torch.func.grad(lambda x: f(x).sum())(X),
        "torch.func.grad (or vjp, jacrev) of an FP8 linear layer: use loss.backward() or torch.autograd.grad, ",
    ),
    "vjp": (lambda f: torch.func.vjp(f, X), "torch.func.grad (or vjp, jacrev) of"),
    "jacrev": (lambda f: torch.func.jacrev(f)(X), "torch.func.grad (or vjp, jacrev) of"),
    "vmap": (
        lambda f: torch.vmap(f)(X),
        "torch.func.vmap of an FP8 linear layer: call it with the batch as one more dimension of its input, ",
    ),
    "vmap of something else": (lambda f: torch.vmap(lambda z: f(X) + z)(random(3, 6, 16)), "torch.func.vmap of"),
    "vmap without gradients": (lambda f: torch.no_grad()(torch.vmap(f))(X), "torch.func.vmap of"),
    "jvp": (
        lambda f: torch.func.jvp(f, (X,), (X,)),
        "torch.func.jvp (or jacfwd) of an FP8 linear layer: use loss.",
    ),
    "jacfwd": (lambda f: torch.func.jacfwd(f)(X), "torch.func.jvp (or jacfwd) of"),
    "functionalize": (lambda f: torch.func.functionalize(f)(X), "torch.func.functionalize of"),
    "forward_ad": (
        lambda f: dual(f, X),
        "a forward-mode derivative (torch.autograd.forward_ad) of an FP8 linear",
    ),
    "trace": (
        lambda f: torch.jit.trace(f, (X,)),
        "torch.jit.trace of an FP8 linear layer: use torch.compile, ",
    ),
}
every_transform = pytest.mark.parametrize(("transform", "text"), TRANSFORMS.values(), ids=TRANSFORMS)


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{buffer}": value.clone()
        for name, layer in layers_of(model).items()
        for buffer, value in layer.named_buffers()
    }


@every_transform
@pytest.mark.parametrize("recipe", ["delayed", "rowwise-high-wgrad"])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("called", [True, False])
def test_a_transform_of_a_model_is_refused_by_name(
    transform: Callable[[Call], Any], text: str, recipe: str, fuse: bool, called: bool
) -> None:
    model = kp.fp8.convert(block(), recipe, fuse_swiglu=fuse)
    assert is_fused(model) == fuse
    for _ in range(3 * called):  # cached calls and cached quantized data must not matter
        model(X).sum().backward()
    before = everything(model)
    with pytest.raises(NotImplementedError, match=f"^{re.escape(text)}.*{re.escape(REMEDY)}"):
        transform(model)
    same(everything(model), before)
    assert model(X).shape == (6, 16)


@every_transform
def test_a_transform_of_the_function_is_refused_by_name(transform: Callable[[Call], Any], text: str) -> None:
    weight, counts = random(16, 24).requires_grad_(), torch.zeros(COUNTS_SHAPE, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=f"^{re.escape(text)}"):
        transform(lambda x: fp8_linear(x, weight, counts=counts))
    assert not counts.any()


@pytest.mark.parametrize("fuse", [True, False])
def test_a_transform_over_parameters(fuse: bool) -> None:
    model = kp.fp8.convert(block(), "delayed", fuse_swiglu=fuse)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def run(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(model, given, (X,))

    expected = model(X)
    with pytest.raises(NotImplementedError, match=re.escape("torch.func.grad (or vjp, jacrev) of")):
        torch.func.grad(lambda given: run(given).sum())(parameters)
    with pytest.raises(NotImplementedError, match=r"torch.func.vmap of"):
        torch.vmap(run)({name: torch.stack([p, p]) for name, p in parameters.items()})
    name = "mlp.down_proj.weight"
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"a forward-mode derivative"):
        run({**parameters, name: forward_ad.make_dual(parameters[name], parameters[name])})
    kp.fp8.revert(model)
    found = torch.func.grad(lambda given: run(given).sum())(parameters)  # the remedy
    assert found.keys() == parameters.keys()
    kp.fp8.convert(model, "delayed", fuse_swiglu=fuse)
    assert torch.equal(run(parameters), expected)  # no transform: it works as before


def test_a_level_of_forward_mode_is_no_derivative() -> None:
    model = kp.fp8.convert(block(), "tensorwise")
    with forward_ad.dual_level():
        other = forward_ad.make_dual(X, X)
        assert torch.equal(model(X), model(X.clone()))
        assert forward_ad.unpack_dual(other * 2).tangent is not None


@pytest.mark.parametrize("how", ["auto", "fallback"])
def test_an_unconverted_layer_supports_transforms(how: str) -> None:
    model, plain = kp.fp8.convert(block(), "auto" if how == "auto" else "delayed"), block()
    for layer in layers_of(model).values():
        layer.fp8_fallback = None if how == "auto" else "a test"
    for transform, _ in TRANSFORMS.values():
        found, expected = transform(model), transform(plain)
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("of", ["layer", "swiglu", "function", "layer in its own precision"])
def test_a_transform_inside_what_is_compiled(of: str, fullgraph: bool) -> None:
    """torch would return zeros for such gradients."""
    whole = kp.fp8.convert(block(), "auto" if "own" in of else "tensorwise")
    weight = whole.mlp.gate_proj.weight.detach()
    calls: dict[str, Call] = {"swiglu": whole.mlp, "function": lambda x: kp.fp8.linear(x, weight)}
    function, x = calls.get(of, whole.mlp.gate_proj), random(6, 32)

    @torch.compile(fullgraph=fullgraph, backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda each: function(each).square().sum())(x)

    if "own" in of:
        expected = torch.func.grad(lambda each: function(each).square().sum())(x)
        torch.testing.assert_close(compiled(x), expected)
        return
    with pytest.raises(Exception, match=re.escape("torch.func.grad (or vjp, jacrev) of an FP8 linear layer")):
        compiled(x)


@pytest.mark.parametrize("how", ["delayed", "auto"])
def test_scripting_is_refused_by_name(how: str) -> None:
    model = kp.fp8.convert(block(), how)
    with pytest.raises(
        NotImplementedError,
        match=f"^torch.jit.script of .* FP8 linear layer: use torch.compile, {re.escape(REMEDY)}",
    ):
        torch.jit.script(model)
    torch.jit.script(kp.fp8.revert(model))


def gradients(y: torch.Tensor, x: torch.Tensor, dys: torch.Tensor, way: str) -> torch.Tensor:
    """Gradients of x for a batch of dy."""

    def one(dy: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(y, x, dy, retain_graph=True)[0]

    if way == "vmap":
        return torch.vmap(one)(dys)
    if way == "is_grads_batched":
        return torch.autograd.grad(y, x, dys, retain_graph=True, is_grads_batched=True)[0]
    return torch.stack([one(dy) for dy in dys])


@pytest.mark.parametrize("way", ["vmap", "is_grads_batched"])
@pytest.mark.parametrize("fuse", [True, False])
def test_a_batched_backward_is_refused_by_name(way: str, fuse: bool) -> None:
    model, x = kp.fp8.convert(block(), "delayed", fuse_swiglu=fuse), X.clone().requires_grad_()
    y = model(x)
    before = everything(model)
    with pytest.raises(
        NotImplementedError, match=r"^a batch of gradients at once .* FP8 linear layer: take each by itself, or"
    ):
        gradients(y, x, random(3, 6, 16), way)
    same(everything(model), before)
    assert gradients(y, x, random(3, 6, 16), "one by one").shape == (3, 6, 24)


@pytest.mark.filterwarnings("ignore:.*batching rule")
def test_a_batched_backward_without_counts() -> None:
    x, weight, dys = X.clone().requires_grad_(), random(16, 24), random(3, 6, 16)
    y = fp8_linear(x, weight, recipe="rowwise")
    assert torch.equal(gradients(y, x, dys, "vmap"), gradients(y, x, dys, "one by one"))
    with pytest.raises(NotImplementedError, match=r"^a batch of gradients at once"):
        gradients(y, x, dys, "is_grads_batched")


def test_nothing_is_timed_inside_a_transform() -> None:
    def timed(x: torch.Tensor) -> torch.Tensor:
        kind = (torch.device("cpu"), 4, (16, 24), torch.float32, torch.float32, False, RECIPES["delayed"])
        autotune.measured_choice(autotune.LayerCall(*kind))
        return x

    with pytest.raises(NotImplementedError, match=r"torch.func.vmap of"):
        torch.vmap(timed)(X)
