"""RMSNorm before FP8 layers: which layer's cast a norm serves, unused casts, and the report."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import kernel_pytorch as kp
from fp8_models import pretend_measured, random, same, sqnr
from fp8_norm_models import both_recipes, caster_of, everything, is_cast, model, pair, train
from kernel_pytorch.fp8 import fusion as norm_module
from kernel_pytorch.fp8 import monitor as monitor_module
from kernel_pytorch.fp8 import rms_norm as rms_norm_module
from kernel_pytorch.fp8.module import Float8Linear
from kernel_pytorch.fp8.recipe import PRODUCTS, RECIPES
from kernel_pytorch.fp8.rms_norm import _OUTPUT, CastingNorm

pytestmark = pytest.mark.usefixtures("one_thread", "own_monitors")


# Which casts are served


@both_recipes
def test_an_unused_cast_is_not_repeated(recipe: str) -> None:
    net = kp.fp8.convert(pair(), recipe)
    x = random(9, 40)
    assert [is_cast(net, x) for _ in range(3)] == [False, True, True]
    numbers = net[1].fp8_counts[0, 0, 3].item()
    assert is_cast(net, x, take=False)
    for _ in range(3):
        assert not is_cast(net, x, take=False)
    assert net[1].fp8_counts[0, 0, 3] == numbers + 360  # the one
    assert [is_cast(net, x) for _ in range(3)] == [False, True, True]


@both_recipes
def test_nothing_is_cast_without_gradients(recipe: str) -> None:
    net = kp.fp8.convert(pair(), recipe)
    for _ in range(2):
        is_cast(net, random(9, 40))
    with torch.no_grad():
        y = net[0](random(9, 40))
        assert not hasattr(y, "_fp8_cast")
        assert not hasattr(y, _OUTPUT)
        net(random(9, 40))
    with torch.inference_mode():
        net(random(9, 40))
    assert is_cast(net, random(9, 40))


def test_an_evaluation_does_not_update_histories() -> None:
    net = kp.fp8.convert(pair(), "delayed")
    for _ in range(3):
        is_cast(net, random(9, 40))
    before = net[1].fp8_state
    net.eval()
    for _ in range(3):
        is_cast(net, random(9, 40))
    assert torch.equal(net[1].fp8_state, before)
    net.train()
    assert [is_cast(net, random(9, 40)) for _ in range(2)] == [False, True]
    assert (net[1].fp8_state[0] > 0).sum() == 5


def test_a_layer_alone_in_evaluation() -> None:
    net = kp.fp8.convert(pair(), "delayed")
    for _ in range(3):
        is_cast(net, random(9, 40))
    before = net[1].fp8_state
    net[1].eval()
    for _ in range(3):
        is_cast(net, random(9, 40))
    assert torch.equal(net[1].fp8_state, before)


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "fallback": lambda net: setattr(net[1], "fp8_fallback", "a test says so"),
    "reverted": lambda net: kp.fp8.revert(net[1]),
    "frozen": lambda net: net[1].weight.requires_grad_(False),
    "another recipe": lambda net: setattr(net[1], "fp8_recipe", RECIPES["rowwise"]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_layer_gets_no_outdated_cast(change: Callable[[nn.Sequential], object]) -> None:
    net, plain = kp.fp8.convert(pair(), "delayed"), pair()
    for _ in range(3):
        is_cast(net, random(9, 40))
    counts = net[1].fp8_counts[0, 0, 3].item()
    change(net)
    assert not is_cast(net, random(9, 40))
    assert sqnr(net(random(9, 40).requires_grad_()).detach(), plain(random(9, 40)).detach()) > 20
    if isinstance(net[1], Float8Linear):
        assert net[1].fp8_counts[0, 0, 3] in (counts, counts + 2 * 360)


def test_a_replaced_layer_is_not_served() -> None:
    net = kp.fp8.convert(pair(), "delayed")
    for _ in range(2):
        is_cast(net, random(9, 40))
    gone = weakref.ref(net[1])
    net[1] = nn.Linear(40, 24)
    gc.collect()
    assert gone() is None
    assert not is_cast(net, random(9, 40))
    assert kp.fp8.revert(net)[0].forward.__func__ is nn.RMSNorm.forward


def test_a_hook_that_returns_another_tensor() -> None:
    net, plain = kp.fp8.convert(pair(), "delayed"), pair()
    for each in (net, plain):
        each[0].register_forward_hook(lambda _, __, y: y * 2)
    for number in range(4):
        x = random(9, 40, seed=number)
        assert sqnr(net(x.clone().requires_grad_()).detach(), plain(x).detach()) > 20
    assert caster_of(net[0]).layer() is None


def test_a_norm_with_several_consumers_serves_none() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.one, self.two = nn.RMSNorm(40), nn.Linear(40, 40), nn.Linear(40, 40)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.norm(self.one(self.norm(x)) * 50))

    net, plain = kp.fp8.convert(Shared(), "delayed"), Shared()
    for number in range(4):
        x = random(30, 40, seed=number)
        assert sqnr(net(x.clone().requires_grad_()).detach(), plain(x).detach()) > 15
    assert caster_of(net.norm).layer() is None
    assert [int(layer.fp8_counts[0, 0, 3]) for layer in (net.one, net.two)] == [5 * 1200, 4 * 1200]


def test_two_norm_calls_before_the_layer_runs() -> None:
    net, plain = kp.fp8.convert(pair(), "delayed"), pair()
    for number in range(4):
        inputs = [random(9, 40, seed=number), 5 * random(9, 40, seed=10 + number)]
        both = [net[0](x.clone().requires_grad_()) for x in inputs]
        for x, y in zip(inputs, both, strict=True):
            assert sqnr(net[1](y).detach(), plain(x).detach()) > 20


@both_recipes
def test_micro_batches(recipe: str, input_casts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    net = kp.fp8.convert(model(), recipe)
    losses = train(net, range(3), batches=4)
    assert len(input_casts) == 12 * 2 + 3
    monkeypatch.setattr(CastingNorm, "request", lambda *_: None)
    other = kp.fp8.convert(model(), recipe)
    assert train(other, range(3), batches=4) == losses
    same(everything(net), everything(other))


# Auto


def test_auto_on_a_cpu_fuses_no_norm() -> None:
    net, plain = kp.fp8.convert(model()), model()
    for _ in range(3):
        losses = [train(each, range(1)) for each in (net, plain)]
        assert losses[0] == losses[1]
    same(dict(net.named_parameters()), dict(plain.named_parameters()))


@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_auto_fuses_between_steps(
    checkpointing: bool | None, monkeypatch: pytest.MonkeyPatch, input_casts: list[tuple[int, ...]]
) -> None:
    gains = [True]
    pretend_measured(monkeypatch, lambda *_: PRODUCTS if gains else ())
    net = kp.fp8.convert(model(checkpointing=checkpointing))
    calls: list[int] = []
    run = rms_norm_module._norm
    monkeypatch.setattr(rms_norm_module, "_norm", lambda *given: calls.append(1) or run(*given))
    train(net, range(1), batches=3)
    assert not calls
    train(net, range(1, 2), batches=3)
    assert calls
    if checkpointing is None:
        input_casts.clear()
        train(net, range(2, 3))
        assert input_casts == [(32, 24), (32, 16)]
    gains.clear()
    for layer in monitor_module.layers_of(net).values():
        layer._calls.clear()
    train(net, range(3, 4), batches=2)
    calls.clear()
    train(net, range(4, 5), batches=2)
    assert not calls


def test_auto_does_not_fuse_a_norm_that_the_op_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 16-bit input under autocast, where the norm may return float32."""
    pretend_measured(monkeypatch, lambda *_: PRODUCTS)
    net = kp.fp8.convert(pair())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    found = []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            net(random(16, 40).bfloat16().requires_grad_()).sum().backward()
        found.append((caster_of(net[0]).used(), kp.fp8.report(net).norms["0"]))
        optimizer.step()
    assert found[2:] == [(False, None)] * 4


def test_auto_quantizes_for_the_sizes_that_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_measured(monkeypatch, lambda *key: PRODUCTS if key[2] == 64 else ())
    net = kp.fp8.convert(pair())
    for _ in range(2):
        is_cast(net, random(64, 40))
        with torch.no_grad():
            net[1].weight.mul_(1.0)  # as an optimizer step
    assert is_cast(net, random(64, 40))
    assert not is_cast(net, random(80, 40))
    assert is_cast(net, random(64, 40))


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.shift = nn.Parameter(torch.ones(40)), 1e-5, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (self.weight + self.shift)


def test_a_changed_norm_runs_its_own_forward() -> None:
    net = kp.fp8.convert(nn.Sequential(Shifted(), nn.Linear(40, 16)), "delayed")
    assert list(norm_module.norms_in(net)) == ["0"]
    x = random(8, 40)
    before = net[0](x)
    net[0].eps = 0.5
    assert not torch.allclose(net[0](x), before)
    net[0].eps, net[0].shift = 1e-5, 1.0
    assert torch.equal(net[0](x), Shifted.forward(net[0], x))
    kp.fp8.revert(net)
    assert set(vars(net[0])) == set(vars(Shifted()))


# The report


def test_the_report_has_the_layer_that_each_norm_quantizes_for() -> None:
    net = kp.fp8.convert(model(), "delayed")
    first = kp.fp8.report(net)
    assert first.norms == dict.fromkeys(["block.norm_1", "block.norm_2", "norm"])
    assert (
        "fused norms that have quantized no layer's input in eager mode: block.norm_1, block.norm_2, norm"
        in str(first)
    )
    train(net, range(2))
    report = kp.fp8.report(net)
    assert report.norms == {"block.norm_1": "block.q", "block.norm_2": "block.mlp.gate_proj", "norm": "head"}
    notes = {row.name: row.notes for row in report.layers}
    assert notes["head"] == ("its input is quantized by the norm 'norm'",)
    assert "quantized by the norm 'block.norm_2'" in " ".join(notes["block.mlp.gate_proj"])
    assert notes["block.k"] == ()
    assert "no layer's input" not in str(report)
