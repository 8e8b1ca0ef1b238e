"""Casts of weights that converted layers keep, and activation checkpointing."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kernel_pytorch as kp
from fp8_models import Block, block, linear, random, results, same, sqnr, train
from kernel_pytorch.fp8.in_graph import revision
from kernel_pytorch.fp8.kept_cast import Kept, cast_weight
from kernel_pytorch.fp8.layer import Float8Linear
from kernel_pytorch.fp8.monitor import layers_of
from kernel_pytorch.ops.fp8_cast import fp8_cast

pytestmark = pytest.mark.usefixtures("one_thread", "own_monitors", "an_optimizer_has_made_a_step")


class ThroughData(torch.optim.Optimizer):
    """As optimizers do that write past torch's version counter."""

    def __init__(self, parameters: Any, lr: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(1 + group["lr"])


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})


def _copy(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(2 * p)


def _step_through_data(model: nn.Module) -> None:
    ThroughData(model.parameters()).step()


def _new_storage(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = 2 * p.data


CHANGES = {
    "load_state_dict": _load,
    "copy_": _copy,
    "step through data": _step_through_data,
    "data =": _new_storage,
}


def check_fresh(model: nn.Sequential, x: torch.Tensor) -> None:
    """The output is that of the weight as it is now."""
    alike = kp.fp8.convert(linear(), "tensorwise")
    alike.load_state_dict(model.state_dict())
    assert torch.equal(model(x), alike(x))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("forwards", [1, 2, 5])
def test_a_weight_that_changed_is_cast_anew(change: Callable[[nn.Module], None], forwards: int) -> None:
    model, x = kp.fp8.convert(linear(), "tensorwise"), random(9, 40)
    for _ in range(3):
        for _ in range(forwards):
            y = model(x)
            y.sum().backward()
        assert forwards < 5 or model[0]._kept_cast is not None
        change(model)
        check_fresh(model, x)
        assert not torch.equal(model(x), y)


def test_a_stale_cast_would_be_seen() -> None:
    model, x = kp.fp8.convert(linear(), "tensorwise"), random(9, 40)

    def accumulate() -> Kept | None:
        for _ in range(4):
            model(x).sum().backward()
        return model[0]._kept_cast[1]

    stale = accumulate()
    assert isinstance(stale, Kept)
    _copy(model)
    assert accumulate() is not stale
    model[0]._kept_cast = (model[0]._kept_cast[0], stale)
    with pytest.raises(AssertionError):
        check_fresh(model, x)


@pytest.mark.parametrize("training", [True, False])
def test_a_weight_that_changed_through_data_is_cast_anew(training: bool) -> None:
    """As the averaged weights that an EMA copies in for an evaluation."""
    model, x = kp.fp8.convert(linear(), "tensorwise").train(training), random(9, 40)
    with torch.set_grad_enabled(training):
        for _ in range(4):
            check_fresh(model, x)
            for p in model.parameters():
                p.data.mul_(2)


def test_without_an_optimizer_no_cast_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel_pytorch.fp8.weight_uses._steps", 0)
    model = kp.fp8.convert(linear(), "tensorwise")
    for _ in range(4):
        model(random(9, 40)).sum().backward()
    assert model[0]._kept_cast is None


CLEARED = {
    "zero_": lambda p: p.grad is not None and p.grad.zero_(),
    "None": lambda p: setattr(p, "grad", None),
}


@pytest.mark.parametrize("clear", CLEARED.values(), ids=CLEARED)
@pytest.mark.parametrize(
    ("when", "batches"),
    [
        ("after the step", 1),
        ("after the step", 5),
        ("before the step's forward", 5),
        ("before the step's backward", 1),
        pytest.param(
            "before the step's backward",
            5,
            marks=pytest.mark.xfail(
                strict=True,
                reason="weight_uses.py: at that forward a gradient that is cleared later looks accumulated",
            ),
        ),
    ],
)
def test_steps_written_by_hand_are_seen(clear: Callable[[nn.Parameter], object], when: str, batches: int) -> None:
    """Through .data, past the version counter and without an optimizer: only the gradients tell."""
    model, x = kp.fp8.convert(linear(), "tensorwise"), random(9, 40)

    def cleared(now: str) -> None:
        for p in model.parameters() if now == when else ():
            clear(p)

    for _ in range(4):
        cleared("before the step's forward")
        for batch in range(batches):
            alike = kp.fp8.convert(linear(), "tensorwise")
            alike.load_state_dict(model.state_dict())
            y = model(x)
            assert torch.equal(y, alike(x))
            if batch == 0:
                cleared("before the step's backward")
            y.square().sum().backward()
        assert (model[0]._kept_cast is not None) == (batches > 1)
        for p in model.parameters():
            p.data -= 0.01 * p.grad
        cleared("after the step")


def weight_casts(layer: Float8Linear) -> int:
    whole, rest = divmod(int(layer.fp8_counts[1, 0, 3]), layer.weight.numel())
    assert rest == 0
    return whole


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_micro_batches_share_the_cast_of_a_weight(recipe: str, set_to_none: bool) -> None:
    """One is kept from when a gradient was seen to have been added to."""
    model, each_time = kp.fp8.convert(linear(), recipe), kp.fp8.convert(linear(), recipe)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, each_time)]
    for number in range(3):
        for batch in range(6):
            x, dy = random(9, 40, seed=10 * number + batch), random(9, 24, seed=batch)
            for each in (model, each_time):
                each_time[0]._kept_cast = None
                each(x.clone()).backward(dy)
            same(
                {name: p.grad for name, p in model.named_parameters()},
                {name: p.grad for name, p in each_time.named_parameters()},
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    assert weight_casts(each_time[0]) == 18
    assert weight_casts(model[0]) == 3 + 1 + 1


def steps_of(
    model: nn.Module,
    run: Any,
    optimizer: torch.optim.Optimizer,
    number: int,
    batches: int,
    set_to_none: bool = True,
    each_changed: bool = False,
) -> dict[str, torch.Tensor]:
    """Train with the gradients of so many batches a step; the last ones, before the last step."""
    for step in range(number):
        optimizer.zero_grad(set_to_none)
        for batch in range(batches):
            if each_changed:
                with torch.no_grad():
                    torch._foreach_mul_([*model.parameters()], 1.0)
            x = random(32, 24, seed=100 * step + batch).to(next(model.parameters())).requires_grad_()
            run(x).square().mean().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return {**gradients, "x": x.grad.clone()}


def converted(recipe: str, fuse: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = kp.fp8.convert(block(), recipe, fuse_swiglu=fuse)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("batches", [2, 4])
def test_two_batches_are_enough_once_an_optimizer_has_the_weights(batches: int) -> None:
    model, optimizer = converted("tensorwise")
    steps_of(model, model, optimizer, 1, 1)
    before = {name: weight_casts(layer) for name, layer in layers_of(model).items()}
    steps_of(model, model, optimizer, 3, batches)
    for name, layer in layers_of(model).items():
        assert weight_casts(layer) - before[name] == 2 + 1 + 1  # in the first step it is found out


# In compiled steps


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("recipe", "fuse"),
    [("tensorwise", True), ("delayed", True), ("delayed", False), ("rowwise", True), ("blockwise", True)],
)
def test_compiled_micro_batches_share_the_cast_of_a_weight(recipe: str, fuse: bool, backend: str) -> None:
    torch._dynamo.reset()
    eager, optimizer = converted(recipe, fuse)
    wanted = steps_of(eager, eager, optimizer, 3, 4)
    model, optimizer = converted(recipe, fuse)
    run = torch.compile(model, backend=backend, fullgraph=True)
    found = steps_of(model, run, optimizer, 3, 4)
    for name, value in wanted.items():
        if backend == "aot_eager":
            assert torch.equal(found[name], value), name
        else:
            assert sqnr(found[name], value) > 25, name
    for layer in layers_of(model).values():
        assert layer.fp8_codes is not None
        assert weight_casts(layer) == 4 + 1 + 1  # in the first step it is found out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
# What is fused depends on what else is in a graph, and with it how often results are rounded, unless:
@torch._inductor.config.patch(emulate_precision_casts=True)
def test_compiled_micro_batches_on_a_gpu(recipe: str, mode: str) -> None:
    """Also where the forward is captured in a CUDA graph, which casts each time, into the same memory."""
    torch._dynamo.reset()
    found = []
    for each_changed in (True, False):
        torch.manual_seed(0)
        model = kp.fp8.convert(Block(128, 256).to("cuda", torch.bfloat16), recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # Gradients that stay where they are: a CUDA graph would write over those of the batch before.
        how = {"set_to_none": False, "each_changed": each_changed}
        steps_of(model, torch.compile(model), optimizer, 3, 4, **how)
        layers = layers_of(model).values()
        assert all(weight_casts(layer) == (12 if each_changed else 4 + 1 + 1) for layer in layers)
        assert all((layer.fp8_codes is None) == each_changed for layer in layers)
        found.append(steps_of(model, torch.compile(model, mode=mode), optimizer, 5, 3, **how))
    same(*found)


def accumulating(recipe: str = "tensorwise", backend: str = "aot_eager") -> tuple[Any, Any, torch.optim.Optimizer]:
    """A compiled model whose layers have memory for their casts, in the middle of a step."""
    torch._dynamo.reset()
    model, optimizer = converted(recipe)
    run = torch.compile(model, backend=backend, fullgraph=True)
    steps_of(model, run, optimizer, 2, 3)
    optimizer.zero_grad()
    run(random(32, 24)).sum().backward()
    assert all(layer.fp8_codes is not None for layer in layers_of(model).values())
    return model, run, optimizer


def alike(model: nn.Module, recipe: str = "tensorwise") -> nn.Module:
    """A model that has kept nothing."""
    other, _ = converted(recipe)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_compiled_step_casts_a_weight_that_changed_anew(change: Callable[[nn.Module], None]) -> None:
    model, run, _ = accumulating()
    for _ in range(3):
        x = random(32, 24)
        before = run(x)
        before.sum().backward()
        change(model)
        after = run(x)
        assert torch.equal(after, alike(model)(x))
        assert not torch.equal(after, before)
        after.sum().backward()


def test_a_compiled_step_casts_a_weight_anew_that_may_have_changed() -> None:
    """Through .data, and without a backward."""
    model, run, _ = accumulating()
    run(random(32, 24))
    for _ in range(3):
        for p in model.parameters():
            p.data.mul_(2)
        x = random(32, 24)
        assert torch.equal(run(x), alike(model)(x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_several_compiled_forwards_before_a_backward(recipe: str, backend: str) -> None:
    model, run, optimizer = accumulating(recipe, backend)
    other = alike(model, recipe)
    for stepped in (False, True):
        if stepped:
            optimizer.step()
            other.load_state_dict(model.state_dict())
        xs = [random(32, 24, seed=seed) for seed in (7, 8)]
        for each, call in ((model, run), (other, other)):
            each.zero_grad()
            sum(call(x).square().sum() for x in xs).backward()
        for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            assert sqnr(p.grad, q.grad) > 60, name


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_step_between_a_compiled_forward_and_its_backward_is_an_error(backend: str) -> None:
    """As it is without a conversion."""
    _, run, optimizer = accumulating(backend=backend)
    y = run(random(32, 24).requires_grad_())
    optimizer.step()
    run(random(32, 24))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_weights_that_are_not_the_layers_own_are_cast_for_each_call(backend: str) -> None:
    """Two of them in one graph, before its backward: one memory would hold the last."""
    model, *_ = accumulating(backend=backend)
    other = alike(model)
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


@pytest.mark.parametrize("compiled", [False, True])
def test_who_zeroes_gradients_after_writing_through_data_is_seen(compiled: bool) -> None:
    """Of weights in an optimizer's care, as a replay of its step by a CUDA graph does it."""
    model, run, optimizer = accumulating()
    optimizer.zero_grad(set_to_none=False)
    for _ in range(3):
        x = random(32, 24)
        (run if compiled else model)(x).sum().backward()
        for p in model.parameters():
            p.data.mul_(1.5)
        optimizer.zero_grad(set_to_none=False)
        y = (run if compiled else model)(x)
        assert torch.equal(y, alike(model)(x))
        y.sum().backward()


def test_a_layer_that_is_given_the_weight_of_another() -> None:
    model, run, _ = accumulating()
    model.mlp.up_proj.weight = model.mlp.gate_proj.weight
    x = random(32, 24)
    assert torch.equal(run(x), alike(model)(x))


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


def test_memory_for_casts_stays_while_the_weight_does() -> None:
    torch._dynamo.reset()
    model = kp.fp8.convert(block().bfloat16(), "tensorwise")
    run = torch.compile(model, backend="aot_eager", fullgraph=True)

    def accumulated() -> list[tuple[torch.Tensor, ...] | None]:
        steps_of(model, run, torch.optim.SGD(model.parameters(), lr=0.1), 2, 3)
        return [layer.fp8_codes for layer in layers_of(model).values()]

    first = accumulated()
    with torch.no_grad():
        model.eval()(random(32, 24, dtype=torch.bfloat16))
    model.train()
    assert all(one is not None and one is other for one, other in zip(first, accumulated(), strict=True))
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert all(one is not None and one is not other for one, other in zip(first, accumulated(), strict=True))


def test_memory_for_casts_is_not_copied_saved_or_moved() -> None:
    model, run, optimizer = accumulating()
    buffers, state = dict(model.named_buffers()), model.state_dict()
    assert not any("codes" in name for name in (*buffers, *state))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert all(layer.fp8_codes is None for layer in layers_of(other).values())
    x = random(32, 24)
    model.to(torch.bfloat16)
    assert all(layer.fp8_codes is None for layer in layers_of(model).values())
    run(x.bfloat16()).sum().backward()
    optimizer.step()


def test_compiled_checkpoints_share_the_cast() -> None:
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        inner, optimizer = converted("tensorwise")
        model = Checkpointing(inner)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        found.append(steps_of(inner, run, optimizer, 3, 3))
        assert [weight_casts(layer) for layer in layers_of(model).values()] == [3 + 1 + 1] * 5
    same(*found)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_several_compiled_checkpoints_before_a_backward(recipe: str, backend: str) -> None:
    torch._dynamo.reset()
    inner, optimizer = converted(recipe)
    run = torch.compile(Checkpointing(inner), backend=backend, fullgraph=True)
    steps_of(inner, run, optimizer, 2, 3)
    other = alike(inner, recipe)
    for x_needs in (False, True):
        for each, call in ((inner, run), (other, other)):
            each.zero_grad()
            xs = [random(32, 24, seed=seed).requires_grad_(x_needs) for seed in (7, 8)]
            sum(call(x).square().sum() for x in xs).backward()
        for (name, p), q in zip(inner.named_parameters(), other.parameters(), strict=True):
            # A repeated forward may have another scale: it is by the history that the first one has left.
            assert sqnr(p.grad, q.grad) > (60 if recipe == "tensorwise" else 15), name


def test_graphs_name_the_code_behind_what_is_in_them() -> None:
    """Torch's cache knows the functions in a graph by their names alone, inside activation checkpointing."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    model = kp.fp8.convert(nn.Sequential(block(), nn.RMSNorm(16), nn.Linear(16, 8)), "delayed")
    torch.compile(model, backend=keep, fullgraph=True)(random(32, 24))
    (graph,) = graphs
    functions = [node for node in graph.graph.nodes if getattr(node.target, "__module__", "").startswith("kernel_")]
    assert {node.target.__name__ for node in functions} >= {"_whole", "_cast_in_graph", "norm_of"}
    assert all(node.args[0] == revision() for node in functions)


def test_one_forward_a_step_keeps_no_cast() -> None:
    model = kp.fp8.convert(linear(24, 16), "tensorwise")
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(3))
    assert model[0]._kept_cast is None
    assert weight_casts(model[0]) == 3


def test_a_kept_cast_gets_its_transposed_copy_when_it_is_needed() -> None:
    model, dy = kp.fp8.convert(linear(), "tensorwise"), random(9, 24)
    for _ in range(4):
        model(random(9, 40)).backward(dy)  # no gradient of the input
    assert model[0]._kept_cast[1].data_t.numel() == 0
    x = random(9, 40).requires_grad_()
    model(x).backward(dy)
    assert model[0]._kept_cast[1].data_t.shape == (40, 24)
    assert sqnr(x.grad, dy @ model[0].weight.detach()) > 20


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
    """The second forward has one more entry in its histories: another scale than the first at times."""
    model, exact = kp.fp8.convert(Checkpointing(block()), "delayed"), results(block(), random(64, 24))
    for _ in range(3):
        found = results(model, random(64, 24))
    for name, value in found.items():
        assert sqnr(value, exact[name.removeprefix("inner.")]) > 12, name


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_casts_that_are_kept_while_a_forward_is_repeated_are_counted_once(
    set_to_none: bool, reentrant: bool, fuse: bool
) -> None:
    """What a weight loses is counted by forwards, also where it is their repetition that keeps a cast."""
    models = [kp.fp8.convert(block(), "tensorwise", fuse_swiglu=fuse) for _ in range(2)]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(3):
            for batch in range(5):
                x = random(9, 24, seed=10 * number + batch).requires_grad_()
                y = checkpoint(model, x, use_reentrant=reentrant) if model is models[1] else model(x)
                y.square().sum().backward()
            assert all(layer._kept_cast is not None for layer in layers_of(model).values())
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    casts = [{name: weight_casts(layer) for name, layer in layers_of(model).items()} for model in models]
    assert casts[0] == dict.fromkeys(layers_of(models[0]), 3 + 1 + 1)
    # The first forward of a reentrant checkpoint records no gradient, so it keeps no cast.
    assert casts[1] == (dict.fromkeys(casts[0], 3 * 5) if reentrant else casts[0])


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
            cast = cast_weight(weight, "e4m3fn", "tensor", True, False, counts)
            wanted = fp8_cast(weight, "e4m3fn", transposed=True, power_of_two=True)
            assert cast.direct
            for found, name in ((cast.data, "data"), (cast.data_t, "data_t")):
                assert torch.equal(found.view(torch.uint8), getattr(wanted, name).view(torch.uint8))
            assert torch.equal(cast.inverse, wanted.inverse)
            assert torch.equal(counts[1] - before[1], wanted.counts)
        torch.cuda.current_stream().synchronize()
