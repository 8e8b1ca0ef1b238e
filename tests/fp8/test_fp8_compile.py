"""Converted models under torch.compile, and layers that share the quantized data of their input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import kernel_pytorch as kp
from fp8_models import block, linear, random, same, sqnr, train
from kernel_pytorch.fp8 import monitor as monitor_module
from kernel_pytorch.fp8.recipe import RECIPES

pytestmark = pytest.mark.usefixtures("one_thread", "own_monitors")


# torch.compile


@pytest.mark.parametrize(
    ("recipe", "fuse"),
    [
        ("tensorwise", True),
        ("delayed", True),
        ("delayed", False),
        ("delayed-e4m3", True),
        ("rowwise", True),
        ("auto", True),
    ],
)
def test_compiled_training_has_the_same_bits(recipe: str, fuse: bool) -> None:
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        model = kp.fp8.convert(block(), recipe, fuse_swiglu=fuse)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        losses = train(run, torch.optim.SGD(model.parameters(), lr=0.1), range(3), lambda n: 1.0 + 40 * (n == 2))
        counts = {f"{n}.counts": layer.fp8_counts for n, layer in monitor_module.layers_of(model).items()}
        state = {f"{n}.fp8_state": value for n, value in kp.fp8.state_dict(model).items()}
        found.append((losses, {**model.state_dict(), **state, **counts}))
    assert found[0][0] == found[1][0]
    same(found[0][1], found[1][1])
    if recipe == "delayed":
        assert found[1][1]["first.counts"][0, 0, 0] > 0  # also if the input exceeds the delayed scale
        assert (found[1][1]["mlp.down_proj.fp8_state"][:2, :3] > 0).all()


def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        model = kp.fp8.convert(linear(24, 16), "delayed")
        run = torch.compile(model, fullgraph=True) if compiled else model
        losses = train(run, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
        found.append((losses, dict(model.state_dict())))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    for name, value in found[1][1].items():
        torch.testing.assert_close(value, found[0][1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_several_forwards_before_a_backward(recipe: str, backend: str) -> None:
    """As in pairwise losses: the second forward and its backward do not change what the first has saved."""
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        model = kp.fp8.convert(nn.Sequential(nn.RMSNorm(24), block()), recipe)
        run = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
        for number in range(2):
            xs = [random(32, 24, seed=10 * number + each).requires_grad_() for each in range(3)]
            sum(run(x).square().sum() for x in xs).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        counts = {f"{n}.counts": layer.fp8_counts for n, layer in monitor_module.layers_of(model).items()}
        found.append({**gradients, **{f"x{i}": x.grad for i, x in enumerate(xs)}, **counts})
    for name, value in found[0].items():
        if name.endswith("counts") and recipe != "delayed":  # whose order of backwards does not matter
            assert torch.equal(found[1][name], value), name
        else:
            assert sqnr(found[1][name], value) > 20, name


def test_a_compiled_call_follows_every_change_of_its_layer() -> None:
    """Its guards are few, and must be enough."""
    torch._dynamo.reset()
    layer = kp.fp8.convert(nn.Sequential(nn.Linear(16, 16, dtype=torch.bfloat16)), "delayed")[0]
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = random(6, 16).to(torch.bfloat16)

    changes: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "recipe": lambda: setattr(layer, "fp8_recipe", RECIPES["rowwise"]),
        "evaluation": layer.eval,
        "training": layer.train,
        "fallback": lambda: setattr(layer, "fp8_fallback", "a test"),
    }
    for what, change in changes.items():
        change()
        for needs_grad in (True, False):
            with torch.set_grad_enabled(needs_grad):
                before = (layer.fp8_counts.clone(), layer.fp8_state.clone())
                y = run(x.clone().requires_grad_(needs_grad))
                after = (layer.fp8_counts.clone(), layer.fp8_state.clone())
                layer.fp8_forward_counts.copy_(before[0][:2])
                layer.fp8_history.copy_(before[1][0])
                wanted = layer(x.clone().requires_grad_(needs_grad))
            assert torch.equal(y, wanted), what
            assert torch.equal(after[0], layer.fp8_counts), what
            assert torch.equal(after[1], layer.fp8_state), what
    plain = functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(y, plain)  # in the end


# Inputs that several layers share


class Projections(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor], object] = lambda _: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.change = change

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        h = x * 2
        outputs = []
        for layer in (self.q, self.k, self.v):
            outputs.append(layer(h))
            self.change(h)
        return outputs


def input_numbers(model: Projections) -> list[int]:
    return [int(layer.fp8_counts[0, 0, 3]) for layer in (model.q, model.k, model.v)]


def compiled_if(wanted: bool, model: nn.Module) -> Callable[..., list[torch.Tensor]]:
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="aot_eager") if wanted else model


eager_and_compiled = pytest.mark.parametrize("compiled", [False, True])


@eager_and_compiled
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_layers_with_the_same_input_cast_it_once(recipe: str, compiled: bool) -> None:
    model = kp.fp8.convert(Projections(), recipe)
    apart = kp.fp8.convert(Projections(), recipe)
    x = random(6, 16).requires_grad_()
    found = compiled_if(compiled, model)(x)
    assert input_numbers(model) == [6 * 16, 0, 0]
    wanted = [layer(x * 2) for layer in (apart.q, apart.k, apart.v)]
    assert input_numbers(apart) == [6 * 16] * 3
    for one, two in zip(found, wanted, strict=True):
        assert torch.equal(one, two)
    sum(y.sum() for y in found).backward()
    sum(y.sum() for y in wanted).backward()
    same({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in apart.named_parameters()})


@eager_and_compiled
def test_an_input_written_in_place_is_quantized_again(compiled: bool) -> None:
    model = kp.fp8.convert(Projections(lambda h: h.mul_(3)), "tensorwise")
    x = random(6, 16)
    found = [y.detach() for y in compiled_if(compiled, model)(x.clone().requires_grad_())]
    assert input_numbers(model) == [6 * 16] * 3
    for y, layer, factor in zip(found, (model.q, model.k, model.v), (2, 6, 18), strict=True):
        assert sqnr(y, functional.linear(x * factor, layer.weight, layer.bias).detach()) > 20
    # Without requantization the check above fails: the last layer would see a ninth of its input.
    assert sqnr(found[0] / 9, found[0]) < 20


@eager_and_compiled
def test_a_cast_is_not_shared_between_recipes_or_modes(compiled: bool) -> None:
    model = kp.fp8.convert(Projections(), "tensorwise")
    model.k.fp8_recipe = RECIPES["rowwise"]
    model.v.weight.requires_grad_(False)  # needs no transposed data
    compiled_if(compiled, model)(random(6, 16).requires_grad_())
    assert input_numbers(model) == [6 * 16] * 3


def _through_numpy(x: torch.Tensor) -> None:
    x.detach().numpy()[:] = 5


def _through_data(x: torch.Tensor) -> None:
    x.data.fill_(5)


@pytest.mark.parametrize("fill", [_through_numpy, _through_data])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_an_input_buffer_that_is_refilled_is_quantized_again(
    fill: Callable[[torch.Tensor], None], training: bool, needs_grad: bool
) -> None:
    """An input buffer that a data loader refills."""
    model = kp.fp8.convert(linear(), "tensorwise").train(training)
    x = torch.ones(4, 40, requires_grad=needs_grad)
    with torch.set_grad_enabled(training):
        before = model(x)
        fill(x)
        after = model(x)
    exact = functional.linear(x, model[0].weight, model[0].bias)
    assert sqnr(after.detach(), exact.detach()) > 20
    assert not torch.equal(after, before)


def operators_of(model: Any, ids: torch.Tensor) -> Counter[str]:
    """Count our operators in the graphs of a compiled training step of a language model."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    found: Counter[str] = Counter()

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            functional = "auto_functionalized" in str(node.target)  # of an operator that mutates
            name = str(node.args[0] if functional else node.target)
            if name.startswith("kernel_pytorch."):
                found[name.split(".")[1]] += 1
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    run = torch.compile(model, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler))
    run(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return found


def test_a_compiled_llama_quantizes_inside_its_gemms() -> None:
    """q, k and v share x, which is quantized from the norm's input; attention stays causal, without a mask tensor."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation="kernel_pytorch",
    )  # fmt: skip
    torch.manual_seed(0)
    model = kp.fp8.convert(transformers.LlamaForCausalLM(config).bfloat16(), "delayed")
    assert operators_of(model, torch.arange(32).view(2, 16)) == {
        "attention": 2,
        "attention_backward": 2,
        "fp8_linear_forward": 2 * 2 + 1,  # q and o of each layer, and lm_head
        "fp8_linear_of_quantized": 2 * 2,  # k and v
        "fp8_linear_backward": 2 * 4 + 1,
        "fp8_swiglu_mlp_forward": 2,
        "fp8_swiglu_mlp_backward_hidden": 2,
        "fp8_swiglu_mlp_backward_gemms": 2,
    }
