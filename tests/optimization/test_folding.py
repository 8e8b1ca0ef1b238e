"""Batch norms folded into convolutions: the same outputs, weights that change, what is left alone."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import kernel_pytorch as kp
from kernel_pytorch.optimization import Context, Sites
from kernel_pytorch.optimization.candidates.folding import BATCH_NORM_FOLDING
from optimization_fakes import ScriptedTimer

CPU = Context("latency", torch.device("cpu"), ())


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2),
        nn.BatchNorm2d(16, affine=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    model = nn.Sequential(*layers)
    with torch.no_grad():
        model.train()(torch.randn(16, 3, 12, 12) * 3 + 1)  # statistics that are not zero and one
        model[1].weight.uniform_(0.5, 2)
        model[1].bias.normal_()
    return model.eval()


def image() -> torch.Tensor:
    return torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def run(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(image())


def folded(model: nn.Module, **options: Any) -> Any:
    given = {"include": ("batch-norm-folding",), "timer": ScriptedTimer(), "resume": False, **options}
    return kp.optimize(model, (image(),), **given)


def test_folded_norms_give_the_same_outputs_and_go_away_again() -> None:
    model = network()
    before = run(model)
    best = folded(model)
    assert best.plan.steps[0].sites == ["0", "1", "3", "4"]
    assert not torch.equal(run(best), before)  # other roundings: it does run folded
    assert torch.allclose(run(best), before, atol=1e-5)
    assert torch.allclose(run(copy.deepcopy(best)), run(best))
    assert torch.equal(run(best.revert()), before)


@pytest.mark.parametrize("compiled", [False, True])
def test_changed_weights_and_statistics_are_used_at_once(compiled: bool) -> None:
    model, other = network(), network()
    include = ("batch-norm-folding", "compile") if compiled else ("batch-norm-folding",)
    best = folded(model, include=include)
    assert len(best.plan.steps) == len(include)
    run(best)
    for one in (best, other):
        with torch.no_grad():
            one[0].weight.mul_(2)
            one[1].bias.add_(1)
            one[4].running_mean.add_(0.5)
    assert torch.allclose(run(best), run(other), atol=1e-5)


def test_training_and_calls_with_gradients_run_the_original() -> None:
    model, other = network(), network()
    best = folded(model)
    with pytest.warns(UserWarning, match="records gradients"):
        found = best(image())
    assert torch.equal(found, other(image()))
    found.sum().backward()
    assert best[1].weight.grad is not None
    best.train()
    other.train()
    assert torch.equal(run(best), run(other))
    assert torch.equal(best[1].running_mean, other[1].running_mean)


def test_pairs_that_must_not_be_folded_are_left_alone() -> None:
    hooked = network()
    hooked[1].register_forward_hook(lambda *_: None)
    found = BATCH_NORM_FOLDING.match(hooked, CPU)
    assert isinstance(found, Sites)
    assert found.names == ("3", "4")
    assert "hooks" in found.left_alone["0"]

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
            self.again = self.convolution

    assert "shared" in str(BATCH_NORM_FOLDING.match(Shared(), CPU))
    without = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False))
    assert "running statistics" in str(BATCH_NORM_FOLDING.match(without, CPU))
    assert BATCH_NORM_FOLDING.match(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)), CPU) == (
        "the model has no batch norm right behind a convolution"
    )


def test_a_plan_with_other_pairs_is_refused() -> None:
    plan = folded(network()).plan
    crossed = msgspec.structs.replace(plan.steps[0], sites=["0", "4", "3", "1"])
    model = network()
    with pytest.raises(ValueError, match="'0' and '4' are no convolution with its batch norm"):
        kp.apply(model, msgspec.structs.replace(plan, steps=[crossed]))
    assert torch.equal(run(model), run(network()))


def test_neighbours_that_are_no_pair_are_noticed() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm, self.last = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.convolution(torch.relu(self.norm(self.last(x))))

    model = Crossed().eval()
    with torch.no_grad():
        model.norm.running_mean.fill_(0.5)
    best = folded(model)
    assert not best.plan.steps
    assert "float64 budget" in str(best.report)
