"""Tests of the verification itself: candidates with a planted fault must be refused, and the reason must name it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import kernel_pytorch as kp
from kernel_pytorch.optimization import Edits, Forward, Stage
from optimization_fakes import ScriptedTimer, rewrite, unchanged


def small(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(dropout), nn.GELU(), nn.Linear(32, 8))


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (4, 16)), generator=torch.Generator().manual_seed(1))


def refused(
    model: nn.Module, inputs: Any, goal: str = "latency", **options: Any
) -> tuple[dict[str, str], list[str]]:
    """The reasons of refused combinations, and the plan's candidates; the model must be whole afterwards."""
    given = inputs[0] if isinstance(inputs, list) else inputs
    before, state = model(*given), {name: value.clone() for name, value in model.state_dict().items()}
    best = kp.optimize(model, inputs, goal, timer=ScriptedTimer(options.pop("factors", None)), **options)
    report, plan = best.report, best.plan
    best.revert()
    assert torch.equal(model(*given), before) or any(isinstance(m, nn.Dropout) and m.p for m in model.modules())
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    return {one.candidate: one.reason for one in report.refusals}, [one.candidate for one in plan.steps]


def wrong_output(call: Forward, value: torch.Tensor) -> Any:
    return call.original(value) * (1 + 1e-5)


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.001


def wrong_backward(call: Forward, value: torch.Tensor) -> Any:
    return _WrongBackward.apply(call.original(value))


def wrong_at_seven(call: Forward, value: torch.Tensor) -> Any:
    return call.original(value) * (1.01 if value.shape[0] == 7 else 1)


def wrong_under_compile(call: Forward, value: torch.Tensor) -> Any:
    return call.original(value) * (1.01 if torch.compiler.is_compiling() else 1)


def memorised(call: Forward, value: torch.Tensor) -> Any:
    """Right for the values it was tuned on."""
    known = x() if value.shape == x().shape else None
    right = known is None or torch.allclose(value.float(), known, atol=1e-2)
    return call.original(value) * (1 if right else 1.01)


def other_dtype(call: Forward, value: torch.Tensor) -> Any:
    out = call.original(value)
    return out.double() if out.shape[-1] == 8 else out  # of the last layer


def changes_its_weight(call: Forward, value: torch.Tensor) -> Any:
    out = call.original(value)
    with torch.no_grad():
        call.module.get_parameter("weight").mul_(1.0001)
    return out


def changes_its_input(call: Forward, value: torch.Tensor) -> Any:
    out = call.original(value.clone())
    with torch.no_grad():
        value.add_(1)
    return out


def raises(call: Forward, value: torch.Tensor) -> Any:
    raise RuntimeError("no kernel image is available")


def no_dropout(call: Forward, value: torch.Tensor) -> Any:
    return value


def nan_in_one_place(call: Forward, value: torch.Tensor) -> Any:
    out = call.original(value).clone()
    out.view(-1)[-1] = float("nan")
    return out


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (wrong_output, "times its float64 budget"),
        (memorised, "fresh values"),
        (other_dtype, "output.output is float64[4, 8], and float32[4, 8] in the original"),
        (changes_its_weight, "weight.0.weight, which the call changed, is new in the result"),
        (changes_its_input, "argument.0.0 is off"),
        (raises, "RuntimeError: no kernel image is available"),
        (nan_in_one_place, "output.output is off by inf"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_candidate_is_refused(only: Any, forward: Any, words: str) -> None:
    only(rewrite("planted", forward), rewrite("right", unchanged))
    reasons, kept = refused(small().eval(), (x(),))
    assert words in reasons["planted"]
    assert kept == ["right"]


def test_wrong_only_in_the_backward(only: Any) -> None:
    only(rewrite("planted", wrong_backward))
    reasons, kept = refused(small(), (x(),), "training")
    assert "gradient." in reasons["planted"]
    assert not kept
    reasons, kept = refused(small().eval(), (x(),), "latency")
    assert kept == ["planted"]  # nothing is wrong about its outputs


def test_wrong_only_for_one_length(only: Any) -> None:
    only(rewrite("planted", wrong_at_seven))
    lengths = [(x(4, 16),), (x(7, 16),), (x(9, 16),)]
    reasons, kept = refused(small().eval(), lengths)
    assert "(input 7x16)" in reasons["planted"]
    assert not kept


def test_wrong_only_in_combination_names_the_pair(only: Any) -> None:
    def pair(call: Forward, value: torch.Tensor) -> Any:
        marks = []
        inner: Any = call
        while isinstance(inner, Forward):
            marks.append(inner.settings)
            inner = inner.inner
        return call.original(value) * (1.01 if {"first", "third"} <= set(marks) else 1)

    only(rewrite("first", pair), rewrite("second", unchanged), rewrite("third", pair))
    reasons, kept = refused(small().eval(), (x(),), factors={"first": 0.5, "second": 0.6, "third": 0.7})
    assert kept == ["first", "second"]
    assert (
        "first and third are wrong together, and right one without the other" in reasons["first + second + third"]
    )


def test_wrong_only_under_compile_names_the_compiler(only: Any) -> None:
    only(rewrite("planted", wrong_under_compile), compiled=True)
    reasons, kept = refused(small().eval(), (x(),), factors={"planted": 0.5, "compile": 0.9})
    assert "planted and compile are wrong together" in reasons["planted + compile"]
    assert kept == ["planted"]


def test_dropout_that_is_lost_is_noticed(only: Any) -> None:
    only(rewrite("planted", no_dropout, nn.Dropout))
    reasons, kept = refused(small(dropout=0.5), (x(),), "training")
    assert "dropout is not the same" in reasons["planted"]
    assert not kept


def test_a_candidate_that_adds_to_the_state_dict_is_refused(only: Any) -> None:
    def apply(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
        edits.call(
            lambda: model.register_buffer("extra", torch.zeros(1)),
            lambda: model._buffers.pop("extra"),
        )

    only(rewrite("planted", unchanged, apply=apply))
    reasons, kept = refused(small().eval(), (x(),))
    assert reasons["planted"] == "the state dict has other names: extra"
    assert not kept


def test_a_candidate_that_fails_half_way_leaves_the_model_whole(only: Any) -> None:
    def apply(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
        edits.replace_forward(model.get_submodule(sites[0]), wrong_output)
        raise ValueError("cannot go on")

    only(rewrite("planted", unchanged, apply=apply), rewrite("right", unchanged))
    reasons, kept = refused(small().eval(), (x(),))
    assert reasons["planted"] == "ValueError: cannot go on"
    assert kept == ["right"]


def test_an_approximate_candidate_is_held_to_decibels(only: Any) -> None:
    def noisy(call: Forward, value: torch.Tensor) -> Any:
        out = call.original(value)
        pattern = torch.arange(out.numel(), device=out.device).reshape(out.shape) % 2 * 2 - 1
        return out + 0.02 * out.detach().square().mean().sqrt() * pattern  # about 34 dB for each layer

    only(rewrite("noisy", noisy, exact=False))
    _, kept = refused(small().eval(), (x(),), budget_db=20.0)
    assert kept == ["noisy"]
    reasons, kept = refused(small().eval(), (x(),), budget_db=45.0)
    assert "below the budget of 45 dB" in reasons["noisy"]
    assert not kept


def test_an_exact_step_must_not_lose_decibels_on_an_approximate_base(only: Any) -> None:
    def rounds(call: Forward, value: torch.Tensor) -> Any:
        return call.original(value.bfloat16().float())

    def hides(call: Forward, value: torch.Tensor) -> Any:
        """Wrong where an approximate step is below it, by less than its budget."""
        return call.original(value) * (1.01 if call.inner is not None else 1)

    only(
        rewrite("rounds", rounds, exact=False, apply=None),
        rewrite("hides", hides),
    )
    reasons, kept = refused(small().eval(), (x(),), factors={"rounds": 0.5, "hides": 0.6})
    assert kept == ["rounds"]
    assert "before an exact step" in reasons["rounds + hides"]


def test_a_compiled_plan_that_compiles_for_every_length_is_refused(only: Any) -> None:
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            total = self.linear(value)
            for _ in range(value.shape[0]):  # unrolled: one graph for each length
                total = total + 1
            return total

    only(compiled=True)
    lengths = [(x(rows, 16),) for rows in (2, 3, 4, 5)]
    reasons, kept = refused(Unrolled().eval(), lengths)
    assert not kept
    assert "input shapes" in reasons["compile"]


def test_a_compiled_plan_that_compiles_for_every_call_is_refused(only: Any) -> None:
    def count(module: nn.Module, given: Any, out: Any) -> None:
        module.calls = getattr(module, "calls", 0) + 1  # a guard on a number that changes

    model = nn.Sequential(nn.Linear(16, 16))
    model[0].register_forward_hook(count)
    only(compiled=True)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):  # or the number becomes an input of the graph
        reasons, kept = refused(model.eval(), (x(),))
    assert not kept
    assert reasons["compile"] == "compiles anew for each call on input 4x16"


def test_the_order_of_stages_is_kept(only: Any) -> None:
    order: list[str] = []

    def recording(name: str) -> Any:
        def apply(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
            order.append(name)

        return apply

    only(
        rewrite("last", unchanged, apply=recording("last")),
        rewrite("first", unchanged, apply=recording("first")),
    )
    assert Stage.MODULE < Stage.PRECISION < Stage.MEMORY < Stage.LAYOUT < Stage.COMPILE
    _, kept = refused(small().eval(), (x(),))
    assert sorted(kept) == ["first", "last"]


def test_losses_are_held_closer_than_gradients(only: Any) -> None:
    def biased(call: Forward, value: torch.Tensor) -> Any:
        return call.original(value) * 1.05  # 26 dB in the outputs, and 20 dB in the mean of their squares

    only(rewrite("biased", biased, exact=False))
    reasons, kept = refused(small(), (x(),), "training", budget_db=12.0)
    assert "below the 40 dB of losses" in reasons["biased"]
    assert not kept


class _Spectrum(nn.Module):
    """Complex weights and complex outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)
        self.filter = nn.Parameter(torch.randn(9, dtype=torch.complex64))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(self.linear(value)) * self.filter


def in_two_sums(call: Forward, value: torch.Tensor) -> torch.Tensor:
    weight, bias = call.module.get_parameter("weight"), call.module.get_parameter("bias")
    return value[:, :8] @ weight[:, :8].t() + value[:, 8:] @ weight[:, 8:].t() + bias


@pytest.mark.parametrize("goal", ["latency", "training"])
def test_complex_outputs_and_weights_have_a_budget_too(only: Any, goal: str) -> None:
    only(rewrite("wrong", wrong_output), rewrite("other-sums", in_two_sums))
    options = {"loss": lambda found: found.abs().square().mean()} if goal == "training" else {}
    reasons, plan = refused(_Spectrum(), (x(),), goal, resume=False, **options)
    assert "float64 budget" in reasons["wrong"]
    assert plan == ["other-sums"]
