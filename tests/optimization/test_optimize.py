"""kp.optimize on small models with a scripted timer: what is kept, refused, saved, applied and reverted."""

from __future__ import annotations

import copy
import importlib
import json
import linecache
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import kernel_pytorch as kp
from kernel_pytorch.optimization import Edits, Plan, PlanError, Progress, registered_candidates
from kernel_pytorch.optimization.timing import alternate, noise_of
from optimization_fakes import ScriptedTimer, rewrite, unchanged

EAGER_ONLY = ("compile",)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.GELU(), nn.RMSNorm(128, eps=1e-6), nn.Linear(128, 32)
    return nn.Sequential(*layers).eval()


def x(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))


def run(model: nn.Module, rows: int = 8) -> torch.Tensor:
    with torch.no_grad():
        return model(x(rows))


def optimised(model: nn.Module, inputs: Any, goal: str = "latency", **options: Any) -> Any:
    given = {"exclude": EAGER_ONLY, "timer": ScriptedTimer(), **options}
    return kp.optimize(model, inputs, goal, **given)


def test_the_result_is_the_same_model_with_a_report_a_plan_and_a_way_back() -> None:
    model = small()
    before, state = run(model), {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    best = optimised(model, (x(),))
    assert best is model
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert [step.candidate for step in best.plan.steps] == ["rms-norm", "bf16-linear"]
    assert best.plan.steps[1].sites == ["0", "3"]
    assert not torch.equal(run(best), before)  # bf16
    assert torch.allclose(run(best), before, rtol=0.05, atol=0.02)
    assert state.keys() == best.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in best.state_dict().items())
    assert best.report.speedup == pytest.approx(1 / 0.8**2)
    assert best.revert() is model
    assert torch.equal(run(model), before)
    assert not {"forward", "plan", "report", "revert"} & set(vars(model))
    assert all("forward" not in vars(module) for module in model.modules())


def test_copies_and_pickles_work_and_can_be_reverted() -> None:
    model = small()
    before = run(model)
    best = optimised(model, (x(),))
    for copied in (copy.deepcopy(best), pickle.loads(pickle.dumps(best))):
        assert torch.equal(run(copied), run(best))
        assert torch.equal(run(copied.revert()), before)
    assert best.plan is not None


def test_a_changed_weight_is_used_at_once() -> None:
    best = optimised(small(), (x(),), include=("bf16-linear",))
    run(best)
    with torch.no_grad():
        best[3].weight.zero_()
        best[3].bias.zero_()
    assert not run(best).any()


def test_calls_with_gradients_run_in_full_precision_after_a_plan_for_inference() -> None:
    model = small()
    expected = torch.autograd.grad(model(x()).sum(), list(model.parameters()))
    best = optimised(model, (x(),), include=("bf16-linear", "int8-linear"))
    found = torch.autograd.grad(best(x()).sum(), list(best.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_nothing_is_kept_that_does_not_win_on_every_input(only: Any) -> None:
    only(rewrite("slower", unchanged), rewrite("same", unchanged), rewrite("faster", unchanged))
    timer = ScriptedTimer({"slower": 1.2, "same": 0.995, "faster": 0.5})
    best = optimised(small(), (x(),), timer=timer, exclude=())
    assert [step.candidate for step in best.plan.steps] == ["faster"]
    reasons = {refusal.candidate: refusal.reason for refusal in best.report.refusals}
    assert reasons["slower"] == "takes 1.20 times the time on input 8x64"
    assert reasons["same"] == "gains 0.5% of the time on input 8x64, within the noise of 1.0%"


def test_a_step_that_wins_on_one_length_only_is_refused(only: Any) -> None:
    only(rewrite("long-only", unchanged))
    calls = []

    def timer(arms: Any, device: Any, seconds: float) -> list[list[float]]:
        calls.append(arms)
        lengthy = (len(calls) - 1) % 2  # the inputs come in turns
        return [[1.0 if arm.name == "eager" or not lengthy else 0.5] * 5 for arm in arms]

    best = optimised(small(), [(x(8),), (x(16),)], timer=timer, exclude=())
    assert not best.plan.steps
    assert "on input 8x64" in best.report.refusals[-1].reason


def test_a_noisy_machine_changes_nothing() -> None:
    def timer(arms: Any, device: Any, seconds: float) -> list[list[float]]:
        return [[1.0, 1.5, 0.7, 1.2, 2.0], [1.5, 0.6, 1.3, 0.9, 0.8]][: len(arms)]

    model = small()
    before = model(x())
    best = optimised(model, (x(),), timer=timer)
    assert not best.plan.steps
    assert "too noisy to decide" in best.report.notes[0]
    assert torch.equal(best(x()), before)


def test_noise_is_never_below_one_per_cent_and_grows_with_the_spread() -> None:
    assert noise_of([1.0] * 5, [1.0] * 5) == 0.01
    assert noise_of([1.0] * 5, [1.1] * 5) == pytest.approx(0.1)
    assert noise_of([1.0] * 5, [0.8, 0.9, 1.0, 1.1, 1.2]) > 0.1


def test_the_real_timer_alternates_and_enters_each_arm() -> None:
    from kernel_pytorch.optimization.timing import Arm

    seen: list[str] = []
    arms = [Arm(name, lambda name=name: seen.append(name), lambda: torch.ones(1)) for name in "ab"]
    samples = alternate(arms, torch.device("cpu"), 0.0)
    assert len(samples[0]) == len(samples[1]) == 5
    assert "".join(seen).startswith("ababba")


def test_a_step_that_pays_under_the_compiler_alone_is_found(only: Any) -> None:
    only(rewrite("fast", unchanged), rewrite("without-mask", unchanged), compiled=True)

    def timer(arms: Any, device: Any, seconds: float) -> list[list[float]]:
        times = []
        for arm in arms:
            arm.enter()
            arm.run()
            names = set(arm.name.split(" + "))
            time = 0.7 if "fast" in names else 1.0
            if "compile" in names:
                time *= 0.6 if "without-mask" in names else 1.2
            times.append([time] * 5)
        return times

    best = optimised(small(), (x(),), timer=timer, exclude=())
    assert {step.candidate for step in best.plan.steps} == {"fast", "without-mask", "compile"}


def test_an_interrupt_keeps_the_best_so_far(only: Any) -> None:
    only(rewrite("one", unchanged), rewrite("two", unchanged))
    timer = ScriptedTimer({"one": 0.5, "two": 0.4})
    tried: list[str] = []

    def progress(now: Progress) -> None:
        tried.append(now.trying)
        if now.trying == "two + one":
            raise KeyboardInterrupt

    best = optimised(small(), (x(),), timer=timer, exclude=(), progress=progress)
    assert tried[:3] == ["eager, twice", "one", "two"]
    assert "interrupted" in best.report.notes[0]
    best.revert()


def test_a_second_run_resumes() -> None:
    first = ScriptedTimer()
    optimised(small(), (x(),), timer=first)
    second = ScriptedTimer()
    best = optimised(small(), (x(),), timer=second)
    assert len(second.arms) < len(first.arms) / 2
    assert "trials were read from an earlier run" in " ".join(best.report.notes)
    third = ScriptedTimer()
    optimised(small(), (x(),), timer=third, resume=False)
    assert len(third.arms) == len(first.arms)


def test_a_second_run_does_not_trust_times_of_a_noisier_machine() -> None:
    class Noisy(ScriptedTimer):
        def __call__(self, arms: Any, device: torch.device, seconds: float) -> list[list[float]]:
            times = super().__call__(arms, device, seconds)
            if arms[0].name == arms[1].name == "eager":
                times[1] = [1.2 * value for value in times[1]]
            return times

    noisy = optimised(small(), (x(),), timer=Noisy(default=0.9), resume=True)
    assert not noisy.plan.steps
    assert "within the noise of 20.0%" in str(noisy.report)
    quiet = optimised(small(), (x(),), timer=ScriptedTimer(default=0.9), resume=True)
    assert quiet.plan.steps
    assert "read from an earlier run" not in str(quiet.report)


def test_a_second_run_does_not_trust_trials_of_other_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model_with_other_source.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    resumed = []
    for factor in (2, 30, 30):
        text = f"return {factor} * super().forward(x)"
        file.write_text(f"import torch\n\nclass Own(torch.nn.ReLU):\n    def forward(self, x):\n        {text}\n")
        sys.modules.pop(file.stem, None)
        linecache.checkcache()
        own = importlib.import_module(file.stem).Own()
        report = str(optimised(nn.Sequential(*small(), own), (x(),)).report)
        resumed.append("read from an earlier run" in report)
    assert resumed == [False, False, True]


def test_the_budget_ends_the_search() -> None:
    best = optimised(small(), (x(),), budget=1e-9)
    assert not best.plan.steps
    assert "the budget ran out" in " ".join(best.report.notes)


APPLY = """
import sys, torch, kernel_pytorch as kp
sys.path[:0] = {folders!r}
from test_optimize import run, small
best = kp.apply(small(), {plan!r})
torch.save(run(best), {out!r})
"""


def test_a_plan_is_applied_in_another_process(tmp_path: Path) -> None:
    best = optimised(small(), (x(),))
    plan, out = tmp_path / "plan.json", tmp_path / "out.pt"
    best.plan.save(plan)
    code = APPLY.format(folders=[folder for folder in sys.path if "tests" in folder], plan=str(plan), out=str(out))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert torch.equal(torch.load(out), run(best))


def test_a_plan_holds_nothing_but_data_and_is_checked_when_read(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    optimised(small(), (x(),)).plan.save(plan)
    data = json.loads(plan.read_text())
    assert data["kind"] == "plan"
    assert data["steps"][0]["candidate"] == "rms-norm"
    plan.write_text(json.dumps({**data, "code": "import os"}))
    with pytest.raises(PlanError, match="code"):
        kp.apply(small(), plan)
    with pytest.raises(PlanError, match="not a plan that can be read"):
        kp.apply(small(), tmp_path / "missing.json")


def test_a_plan_that_does_not_fit_says_what_differs() -> None:
    plan: Plan = optimised(small(), (x(),)).plan
    other = small()
    other[0] = nn.Linear(64, 128, bias=False)
    with pytest.raises(PlanError, match="number of parameters"):
        kp.apply(other, plan)
    frozen = small().requires_grad_(False)
    with pytest.raises(PlanError, match="names, shapes, dtypes, requires_grad or ties"):
        kp.apply(frozen, plan, force=True)
    import msgspec

    elsewhere = msgspec.structs.replace(plan, device="NVIDIA H200")
    with pytest.raises(PlanError, match="the device: cpu"):
        kp.apply(small(), elsewhere)
    assert kp.apply(small(), elsewhere, force=True).plan == elsewhere
    unknown = msgspec.structs.replace(plan, steps=[msgspec.structs.replace(plan.steps[0], candidate="no-such")])
    doubled = msgspec.structs.replace(plan, steps=[*plan.steps, plan.steps[0]])
    with pytest.raises(PlanError, match="which exclude each other"):
        kp.apply(small(), doubled)
    with pytest.raises(PlanError, match="goal 'speed'"):
        kp.apply(small(), msgspec.structs.replace(plan, goal="speed"))
    with pytest.raises(TypeError, match="plan=None: use a plan"):
        kp.apply(small(), None)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="'no-such', which is not installed"):
        kp.apply(small(), unknown)


def test_inputs_may_be_a_tensor_a_tuple_a_mapping_or_a_list() -> None:
    for inputs in (x(), (x(),), {"input": x()}, [(x(4),), (x(6),), x(8)]):
        best = optimised(small(), inputs)
        assert len(best.plan.inputs) == (3 if isinstance(inputs, list) else 1)
    with pytest.raises(TypeError, match="an example is a tuple"):
        optimised(small(), "words")
    with pytest.raises(ValueError, match="at least one example"):
        optimised(small(), [])


def test_arguments_that_are_wrong_are_named() -> None:
    sparse = nn.Linear(64, 64)
    sparse.weight = nn.Parameter(sparse.weight.detach().to_sparse())
    with pytest.raises(ValueError, match="goal='speed': use one of latency"):
        optimised(small(), (x(),), "speed")
    with pytest.raises(ValueError, match=r"exclude=\['nothing'\]: use some of"):
        optimised(small(), (x(),), exclude=("nothing",))
    with pytest.raises(TypeError, match="exclude='compile': use a tuple"):
        optimised(small(), (x(),), exclude="compile")
    with pytest.raises(ValueError, match="budget='5m'"):
        optimised(small(), (x(),), budget="5m")
    with pytest.raises(ValueError, match=r"inputs: the model fails on input 8x63 with RuntimeError") as failed:
        optimised(small(), [(x(),), (torch.randn(8, 63),)])
    assert isinstance(failed.value.__cause__, RuntimeError)
    with pytest.raises(TypeError, match="loss=3: use a function"):
        optimised(small(), (x(),), "training", loss=3)
    with pytest.raises(ValueError, match=r"loss: returned float32\[8, 32\]; return a tensor of one element"):
        optimised(small(), (x(),), "training", loss=lambda y: y)
    with pytest.raises(ValueError, match="no parameter requires gradients"):
        optimised(small().requires_grad_(False), (x(),), "training")
    with pytest.raises(TypeError, match=r"weight is a torch\.sparse_coo tensor"):
        optimised(sparse, (x(),))
    with pytest.raises(ValueError, match="budget=0"):
        optimised(small(), (x(),), budget=0)
    best = optimised(small(), (x(),))
    with pytest.raises(ValueError, match="is optimised already"):
        optimised(best, (x(),))
    named = small()
    named.plan = 3
    with pytest.raises(ValueError, match="attribute 'plan' of its own"):
        optimised(named, (x(),))
    with pytest.raises(TypeError, match="DataParallel"):
        optimised(nn.DataParallel(small()), (x(),))
    with torch.inference_mode(), pytest.raises(TypeError, match=r"0\.weight was made under torch\.inference_mode"):
        optimised(small(), (x(),))
    compiled = small()
    compiled.compile()
    with pytest.raises(ValueError, match="is compiled already"):
        optimised(compiled, (x(),))


def test_exact_candidates_only_with_an_infinite_budget() -> None:
    best = optimised(small(), (x(),), budget_db=math.inf)
    assert [step.candidate for step in best.plan.steps] == ["rms-norm"]
    assert best.plan.budget_db is None
    assert "allows exact candidates only" in str(best.report)


def test_modes_gradients_buffers_and_hooks_are_left_as_they_were() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 64))
    model[1].eval()
    modes = [module.training for module in model.modules()]
    model[0].weight.grad = torch.ones(64, 64)
    seen: list[Any] = []
    model[3].register_forward_hook(lambda *_: seen.append(1))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    best = optimised(model, (x(),), "training")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model[0].weight.grad, torch.ones(64, 64))
    assert model[3].weight.grad is None
    assert all(torch.equal(value, state[name]) for name, value in best.state_dict().items())
    seen.clear()
    best(x())
    assert seen == [1]


def test_what_must_not_be_rewritten_is_left_alone_with_a_reason() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(64, 64), Own(64, 64), nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)))
    model.append(nn.Linear(64, 64)).eval()
    model[3].forward = lambda value: nn.Linear.forward(model[3], value)
    best = optimised(model, (x(),), include=("bf16-linear",))
    assert best.plan.steps[0].sites == ["0"]
    reasons = {row.name: row.left_alone[0] for row in best.report.modules if row.left_alone}
    assert reasons["1"] == "bf16-linear: is a Own, not an nn.Linear"
    assert reasons["3"] == "bf16-linear: its forward was replaced by something else"
    assert set(reasons) == {"1", "2", "3"}


def test_outputs_that_cannot_be_compared_change_nothing() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.linear(value) + torch.randn(64)

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(64, 64), 0

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.linear(value) + self.calls

    for model, change in ((Noisy(), "with the random seed"), (Counts(), "from call to call")):
        best = optimised(model, (x(),))
        assert not best.plan.steps
        assert f"changes {change}" in best.report.notes[0]


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    model[1].weight = model[0].weight
    best = optimised(model, (x(),))
    assert best[0].weight is best[1].weight
    assert best.revert()[0].weight is best[1].weight


def test_the_text_report_names_everything() -> None:
    text = str(optimised(small(), (x(),)).report)
    for words in (
        "1.56x over eager with rms-norm + bf16-linear",
        "8x64",
        "compile: excluded",
        "noise 1.0%",
        "torch",
    ):
        assert words in text


def test_the_page_is_one_file_that_needs_no_other(tmp_path: Path) -> None:
    report = optimised(small(), [(x(8),), (x(16),)], "training").report
    report.save(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    ElementTree.fromstring(
        text.removeprefix("<!doctype html>")
        .replace('<meta charset="utf-8">', "")
        .replace('<meta name="viewport" content="width=device-width, initial-scale=1">', "")
    )
    assert "width=device-width" in text
    assert "http" not in text
    assert "<script" not in text
    for words in ("bf16-autocast", "8x64", "16x64", "excluded", "saved for backward", "bars", "noise"):
        assert words in text


def test_undone_edits_leave_no_trace() -> None:
    layer, edits = nn.Linear(2, 2), Edits()
    before = dict(vars(layer))
    edits.replace_forward(layer, unchanged)
    edits.replace_forward(layer, unchanged)
    edits.set(layer, "note", 1)
    edits.set(layer, "in_features", 3)
    edits.set_data(layer.weight, torch.zeros(2, 2))
    edits.undo()
    edits.undo()
    assert vars(layer) == before
    assert layer.weight.any()
    edits.redo()
    assert layer.in_features == 3
    assert not layer.weight.any()


@pytest.mark.parametrize("change", ["values", "dtype"])
def test_reverting_a_memory_format_keeps_weights_that_changed_since(change: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3))
    image = torch.randn(2, 4, 9, 9)
    best = optimised(model, (image,), "training", include=("channels-last",))
    assert [step.candidate for step in best.plan.steps] == ["channels-last"], str(best.report)
    with torch.no_grad():
        best[0].weight.mul_(0.5)  # as an optimizer or load_state_dict does
    if change == "dtype":
        best.to(torch.bfloat16)
    now = best[0].weight.detach().clone()
    assert not now.is_contiguous()
    best.revert()
    assert model[0].weight.is_contiguous()
    assert model[0].weight.dtype is now.dtype
    assert torch.equal(model[0].weight, now)
    assert model(image.to(now.dtype)).dtype is now.dtype


@pytest.mark.parametrize("name", ["bf16-linear", "int8-linear"])
def test_an_adapter_that_peft_merges_is_used_at_once(name: str) -> None:
    class Adapted(nn.Module):  # as PEFT's layer: it merges in place, through .data
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(64, 64)
            self.delta = nn.Parameter(torch.randn(64, 64), requires_grad=False)
            self.merged_adapters: list[str] = []

        def merge(self) -> None:
            self.base_layer.weight.data += self.delta.data
            self.merged_adapters.append("default")

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            out = self.base_layer(value)
            return out if self.merged_adapters else out + nn.functional.linear(value, self.delta)

    torch.manual_seed(0)
    model = Adapted().eval()
    before = run(model)
    best = optimised(model, (x(),), include=(name,))
    assert best.plan.steps[0].sites == ["base_layer"]
    run(best)
    best.merge()
    assert (run(best) - before).norm() < 0.03 * before.norm()


def test_candidates_have_names_summaries_and_goals() -> None:
    found = registered_candidates()
    assert len({candidate.name for candidate in found}) == len(found)
    names = {candidate.name for candidate in found}
    for candidate in found:
        assert candidate.summary
        assert candidate.goals
        assert candidate.conflicts <= names
