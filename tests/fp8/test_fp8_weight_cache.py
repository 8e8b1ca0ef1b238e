"""Quantized weights shared by micro-batches (``kp.fp8.accumulate``), and activation checkpointing."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kernel_pytorch as kp
from fp8_models import block, linear, random, results, same, sqnr
from kernel_pytorch.fp8.module import Float8Linear
from kernel_pytorch.fp8.monitor import layers_of
from kernel_pytorch.fp8.operators import revision
from kernel_pytorch.fp8.quantize import WEIGHT, quantize, weight_spec
from kernel_pytorch.ops.fp8_cast import fp8_cast

pytestmark = pytest.mark.usefixtures("one_thread", "own_monitors")


def weight_casts(layer: Float8Linear) -> int:
    whole, rest = divmod(int(layer.fp8_counts[1, 0, 3]), layer.weight.numel())
    assert rest == 0
    return whole


def accumulated(model: nn.Module, run: Any, steps: int = 3, batches: int = 4, scope: bool = True) -> Any:
    """Train with accumulated gradients; return all gradients of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        with kp.fp8.accumulate(model if scope else nn.Module()):
            for batch in range(batches):
                x = random(32, 24, seed=100 * step + batch).requires_grad_()
                run(x).square().mean().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return {**gradients, "x": x.grad}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    ("recipe", "fuse"),
    [("tensorwise", True), ("delayed", True), ("delayed", False), ("rowwise", True), ("blockwise", True)],
)
def test_micro_batches_share_the_quantized_weight(recipe: str, fuse: bool, checkpointed: bool) -> None:
    found = []
    for scope in (True, False):
        model = kp.fp8.convert(block(), recipe, fuse_swiglu=fuse)
        run = Checkpointing(model) if checkpointed else model
        found.append(accumulated(model, run, scope=scope))
        assert {weight_casts(layer) for layer in layers_of(model).values()} == {3 if scope else 12}
        assert all(layer.weight_cache is None for layer in layers_of(model).values())
    same(*found)


def test_a_compiled_step_quantizes_in_every_forward() -> None:
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        model = kp.fp8.convert(block(), "tensorwise")
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        found.append(accumulated(model, run))
        assert {weight_casts(layer) for layer in layers_of(model).values()} == {12 if compiled else 3}
    same(*found)


def test_writing_to_a_weight_inside_the_scope_is_an_error() -> None:
    model = kp.fp8.convert(nn.Sequential(linear(40, 24), nn.Linear(24, 8)), "tensorwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with kp.fp8.accumulate(model):
        model(random(9, 40)).sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"0\.0\.weight was changed inside kp\.fp8\.accumulate"):
            model(random(9, 40))
    model(random(9, 40)).sum().backward()


def test_a_weight_written_between_two_scopes_is_quantized_again() -> None:
    model, x = kp.fp8.convert(linear(), "tensorwise"), random(9, 40)
    for _ in range(3):
        with kp.fp8.accumulate(model):
            y = model(x)
            alike = kp.fp8.convert(linear(), "tensorwise")
            alike.load_state_dict(model.state_dict())
            assert torch.equal(y, alike(x))
            assert torch.equal(y, model(x))
        for p in model.parameters():
            p.data.mul_(2)  # the version counter does not see it


def test_nested_scopes_share_one_cache() -> None:
    model = kp.fp8.convert(linear(), "tensorwise")
    with kp.fp8.accumulate(model):
        model(random(9, 40))
        with kp.fp8.accumulate(model):
            model(random(9, 40))
        model(random(9, 40))
    assert weight_casts(model[0]) == 1
    assert model[0].weight_cache is None


def test_the_transposed_data_is_added_when_it_is_needed() -> None:
    model, dy = kp.fp8.convert(linear(), "tensorwise"), random(9, 24)
    x = random(9, 40).requires_grad_()
    with kp.fp8.accumulate(model):
        model(random(9, 40)).backward(dy)  # no gradient of the input
        model(x).backward(dy)
        model(random(9, 40)).backward(dy)
    assert weight_casts(model[0]) == 2
    assert sqnr(x.grad, dy @ model[0].weight.detach()) > 20


def test_a_layer_reverted_inside_the_scope() -> None:
    model = kp.fp8.convert(linear(), "tensorwise")
    with kp.fp8.accumulate(model):
        model(random(9, 40))
        kp.fp8.revert(model)
    assert "weight_cache" not in vars(model[0])


def test_copies_and_pickles_have_no_cache() -> None:
    model = kp.fp8.convert(linear(), "tensorwise")
    with kp.fp8.accumulate(model):
        model(random(9, 40))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert other[0].weight_cache is None


# Compiled steps


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_weights_of_another_layer_are_quantized_in_each_call(backend: str) -> None:
    """Two weights for one layer in one graph, before its backward; one layer alone is enough for Inductor."""
    torch._dynamo.reset()
    make: Callable[[], nn.Module] = block if backend == "aot_eager" else partial(linear, k=24)
    model, other = (kp.fp8.convert(make(), "tensorwise") for _ in range(2))
    weights = [nn.Parameter(p.detach() * size) for size in (1.0, -3.0) for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]

    def both(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        halves = weights[: len(names)], weights[len(names) :]
        found = (torch.func.functional_call(module, dict(zip(names, half, strict=True)), (x,)) for half in halves)
        return sum(y.square().sum() for y in found)

    gradients = []
    for module, run in ((model, torch.compile(both, backend=backend, fullgraph=True)), (other, both)):
        x = random(32, 24, seed=3).requires_grad_()
        run(module, x).backward()
        gradients.append([x.grad, *(weight.grad.clone() for weight in weights)])
        for weight in weights:
            weight.grad = None
    for found, wanted in zip(*gradients, strict=True):
        assert sqnr(found, wanted) > (60 if backend == "inductor" else 300)


def test_tied_layers_of_which_one_is_reverted() -> None:
    torch._dynamo.reset()
    model = linear(32, 32)
    model.append(nn.Linear(32, 32))
    model[1].weight = model[0].weight
    kp.fp8.convert(model, "tensorwise")
    kp.fp8.revert(model[1])
    x = random(8, 32)
    assert torch.equal(torch.compile(model, backend="aot_eager")(x), model(x))


def test_weights_made_in_inference_mode() -> None:
    torch._dynamo.reset()
    with torch.inference_mode():
        model = kp.fp8.convert(block(), "tensorwise")
        x = random(32, 24)
        assert torch.equal(torch.compile(model, backend="aot_eager")(x), model(x))


def test_graphs_name_the_code_behind_what_is_in_them() -> None:
    """Inside activation checkpointing, torch's cache identifies functions in a graph by name only."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    model = kp.fp8.convert(nn.Sequential(block(), nn.RMSNorm(16), nn.Linear(16, 8)), "delayed")
    torch.compile(model, backend=keep, fullgraph=True)(random(32, 24))
    (graph,) = graphs
    functions = [node for node in graph.graph.nodes if getattr(node.target, "__module__", "").startswith("kernel_")]
    assert {node.target.__name__ for node in functions} >= {
        "linear_in_graph",
        "swiglu_in_graph",
        "rms_norm_in_graph",
    }
    assert all(node.args[0] == revision() for node in functions)


# Activation checkpointing


class Checkpointing(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_activation_checkpointing_changes_no_bit(recipe: str, fuse: bool) -> None:
    plain = results(kp.fp8.convert(block(), recipe, fuse_swiglu=fuse), random(9, 24))
    found = results(kp.fp8.convert(Checkpointing(block()), recipe, fuse_swiglu=fuse), random(9, 24))
    same({name.removeprefix("inner."): value for name, value in found.items()}, plain)


def test_activation_checkpointing_of_delayed_layers_stays_near() -> None:
    """The recomputed forward has one more entry in its histories, so its scale may differ."""
    model, exact = kp.fp8.convert(Checkpointing(block()), "delayed"), results(block(), random(64, 24))
    for _ in range(3):
        found = results(model, random(64, 24))
    for name, value in found.items():
        assert sqnr(value, exact[name.removeprefix("inner.")]) > 12, name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("apart", [False, True], ids=["default stream", "another stream"])
@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
def test_the_scale_of_the_last_cast_is_tried_and_makes_no_difference(
    default: torch.dtype, apart: bool, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(default)
    counts = torch.zeros(2, 2, 4, dtype=torch.int64, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream() if apart else torch.cuda.default_stream()):
        for size in (1.0, 1.0, 1.01, 5.0, 1e-3, 0.0, 1.0):
            weight = torch.randn(320, 176, device="cuda", dtype=torch.bfloat16) * size
            before = counts.clone()
            cast = quantize(weight, weight_spec("e4m3fn", "tensor", True, False), counts, WEIGHT)
            wanted = fp8_cast(weight, "e4m3fn", transposed=True, power_of_two=True)
            assert cast.direct
            for found, name in ((cast.data, "data"), (cast.data_t, "data_t")):
                assert torch.equal(found.view(torch.uint8), getattr(wanted, name).view(torch.uint8))
            assert torch.equal(cast.inverse, wanted.inverse)
            assert torch.equal(counts[1] - before[1], wanted.counts)
        torch.cuda.current_stream().synchronize()
