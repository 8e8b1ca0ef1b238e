"""What would stay silent stands in the report: calls that are left alone, warnings, compilations, versions."""

from __future__ import annotations

import warnings
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import kernel_pytorch as kp
from kernel_pytorch.optimization import Forward, PlanError, Progress
from kernel_pytorch.optimization.fallbacks import fell_back
from kernel_pytorch.optimization.plan import library_versions
from optimization_fakes import ScriptedTimer, rewrite, unchanged


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)).eval()


def optimised(model: nn.Module, **options: Any) -> Any:
    return kp.optimize(model, (torch.ones(4, 16),), timer=ScriptedTimer(), resume=False, **options)


def leaves_calls_alone(call: Forward, x: torch.Tensor) -> Any:
    fell_back("half-hearted: every call runs the original")
    return call.original(x)


def warns(call: Forward, x: torch.Tensor) -> Any:
    warnings.warn("slow kernel", stacklevel=2)
    return call.original(x)


def test_fallbacks_and_warnings_of_candidates_are_named(only: Any) -> None:
    only(rewrite("half-hearted", leaves_calls_alone), rewrite("warner", warns))
    report = optimised(small()).report
    found = {(one.candidate, one.reason) for one in report.fallbacks}
    assert ("half-hearted", "half-hearted: every call runs the original") in found
    assert any("slow kernel" in reason for _, reason in found)
    assert "fallbacks and warnings" in str(report)


def test_compilations_and_graph_breaks_are_counted(only: Any, tmp_path: Any) -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * (2 if bool(x.sum() > 0) else 3)

    only(compiled=True)
    report = optimised(Breaks().eval()).report
    (step,) = report.steps
    assert step.graphs >= 2
    assert step.breaks >= 1
    assert "graph break" in str(report)
    report.save(tmp_path / "report.html")
    assert "graph break" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("when", ["three", "one + two"])
def test_an_interrupted_search_keeps_and_times_the_best_so_far(only: Any, when: str) -> None:
    only(rewrite("one", unchanged), rewrite("two", unchanged), rewrite("three", unchanged))

    def progress(now: Progress) -> None:
        if now.trying == when:
            raise KeyboardInterrupt

    timer = ScriptedTimer({"one": 0.5, "two": 0.6})
    best = kp.optimize(small(), (torch.ones(4, 16),), timer=timer, resume=False, progress=progress)
    assert [step.candidate for step in best.plan.steps] == ["one"]
    assert best.report.inputs[0].speedup == 2
    assert "interrupted" in best.report.notes[0]


def test_interrupted_twice(only: Any) -> None:
    only(rewrite("one", unchanged))
    tried: list[str] = []

    def progress(now: Progress) -> None:
        tried.append(now.trying)
        if len(tried) > 1:
            raise KeyboardInterrupt

    best = optimised(small(), progress=progress)
    assert not best.plan.steps
    assert best.report.verdict == "left as it is"


def test_a_plan_holds_for_the_versions_of_the_libraries_that_it_calls() -> None:
    pytest.importorskip("transformers")
    from optimization_models import model_of

    model, inputs = model_of("llama")
    plan = kp.optimize(model, inputs, include=("hf-attention",), timer=ScriptedTimer(), resume=False).plan
    assert plan.versions["transformers"] == library_versions()["transformers"]
    other = msgspec.structs.replace(plan, versions={**plan.versions, "transformers": "4.0.0"})
    with pytest.raises(PlanError, match=r"transformers: .* instead of 4\.0\.0"):
        kp.apply(model_of("llama")[0], other)
    assert "transformers" not in optimised(small(), include=("bf16-linear",)).plan.versions


def test_a_candidate_that_loses_to_one_that_excludes_it_says_so(only: Any) -> None:
    only(rewrite("one", unchanged), rewrite("two", unchanged, conflicts=frozenset({"one"})))
    best = kp.optimize(small(), (torch.ones(4, 16),), timer=ScriptedTimer({"one": 0.5, "two": 0.7}), resume=False)
    assert [step.candidate for step in best.plan.steps] == ["one"]
    reasons = {one.candidate: one.reason for one in best.report.refusals}
    assert reasons["two"] == "cannot be combined with one, which gains more"


def test_under_a_compiler_the_one_that_excludes_the_other_is_tried_too(only: Any) -> None:
    only(rewrite("one", unchanged), rewrite("two", unchanged, conflicts=frozenset({"one"})), compiled=True)

    def timer(arms: Any, device: Any, seconds: float) -> list[list[float]]:
        times = {"eager": 1.0, "one": 0.5, "two": 0.7, "compile": 0.9, "one + compile": 0.4, "two + compile": 0.2}
        for arm in arms:
            arm.enter()
            arm.run()
        return [[times[arm.name]] * 5 for arm in arms]

    best = kp.optimize(small(), (torch.ones(4, 16),), timer=timer, resume=False)
    assert [step.candidate for step in best.plan.steps] == ["two", "compile"]


def test_what_is_not_confirmed_gives_way_to_the_next_best(only: Any) -> None:
    only(rewrite("one", unchanged), rewrite("two", unchanged, conflicts=frozenset({"one"})))
    calls: list[str] = []

    def timer(arms: Any, device: Any, seconds: float) -> list[list[float]]:
        names = [arm.name for arm in arms]
        calls.append(names[-1])
        times = {"eager": 1.0, "one": 0.5 if calls.count("one") == 1 else 2.0, "two": 0.7}
        return [[times[name]] * 5 for name in names]

    best = kp.optimize(small(), (torch.ones(4, 16),), timer=timer, resume=False)
    assert [step.candidate for step in best.plan.steps] == ["two"]
    assert "one was taken back: it takes 2.00 times as long as eager" in best.report.notes


def test_steps_are_reported_in_the_order_in_which_they_were_found(only: Any) -> None:
    only(rewrite("neutral", unchanged), rewrite("slow", unchanged), rewrite("fast", unchanged), compiled=True)

    def timer(arms: Any, device: Any, seconds: float) -> list[list[float]]:
        times = []
        for arm in arms:
            arm.enter()
            arm.run()
            names = arm.name.split(" + ")
            factors = {"fast": 0.5, "slow": 1.05 if "compile" in names else 0.9, "compile": 0.6, "neutral": 1.0}
            times.append([torch.tensor([factors.get(name, 1.0) for name in names]).prod().item()] * 5)
        return times

    report = kp.optimize(small(), (torch.ones(4, 16),), timer=timer, resume=False).report
    assert report.chosen == ("fast", "compile")
    assert [step.candidate for step in report.steps][:2] == ["fast", "slow"]
    assert "without slow" in [step.candidate for step in report.steps]
    total = 1.0
    for step in report.steps:
        total *= step.speedup
    assert total == pytest.approx(report.speedup, rel=1e-3)


def test_a_machine_whose_runs_come_in_two_speeds_changes_nothing(only: Any) -> None:
    only(rewrite("one", unchanged))

    def timer(arms: Any, device: Any, seconds: float) -> list[list[float]]:
        times = [1.0, 3.0, 1.0, 1.0, 3.0, 1.0, 3.0, 1.0, 1.0]  # the median says nothing of it
        return [times if arm.name == "eager" else [0.5] * 9 for arm in arms]

    best = kp.optimize(small(), (torch.ones(4, 16),), timer=timer, resume=False)
    assert not best.plan.steps
    assert "some runs take 3.0 times as long as others that are equal" in best.report.notes[0]


def test_a_gain_has_to_show_in_the_undisturbed_runs_too(only: Any) -> None:
    only(rewrite("one", unchanged))

    def timer(arms: Any, device: Any, seconds: float) -> list[list[float]]:
        if arms[-1].name == "eager":
            return [[1.0] * 9, [1.0] * 9]
        return [[1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0], [1.0] * 9]  # eager mode was disturbed

    best = kp.optimize(small(), (torch.ones(4, 16),), timer=timer, resume=False)
    assert not best.plan.steps
