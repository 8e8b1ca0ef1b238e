"""kp.optimize on real architectures: outputs within budget, plans that work in another process, exact reverts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kernel_pytorch as kp
from kernel_pytorch.optimization.examples import leaves
from optimization_fakes import ScriptedTimer
from optimization_models import ARCHITECTURES, model_of

pytest.importorskip("transformers")


def outputs(model: nn.Module, inputs: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        found = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return dict(leaves(found))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def signal_to_noise(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    def decibels(name: str) -> float:
        noise = (found[name].double() - expected[name].double()).square().sum()
        return float(10 * torch.log10(expected[name].double().square().sum() / noise.clamp_min(1e-300)))

    return min(decibels(name) for name in expected if expected[name].is_floating_point())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans and outputs of all architectures, for the test in another process at the end."""
    return tmp_path_factory.mktemp("plans")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_inference_stays_within_budget_and_reverts_exactly(name: str, saved: Path) -> None:
    model, inputs = model_of(name)
    model.eval()
    before = outputs(model, inputs)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    best = kp.optimize(model, inputs, exclude=("compile",), timer=ScriptedTimer(), resume=False)
    assert best.plan.steps, str(best.report)
    now = outputs(best, inputs)
    assert signal_to_noise(now, before) > 27  # both are compared with float64, at 30 dB
    assert state.keys() == best.state_dict().keys()
    best.plan.save(saved / f"{name}.json")
    torch.save(now, saved / f"{name}.pt")
    assert same(outputs(best.revert(), inputs), before)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "gemma", "mistral", "gpt2", "t5", "cnn", "nn.Transformer"])
def test_training_steps_stay_within_budget(name: str) -> None:
    model, inputs = model_of(name)
    before = outputs(model.eval(), inputs)
    best = kp.optimize(model, inputs, "training", exclude=("compile",), timer=ScriptedTimer(), resume=False)
    assert best.plan.steps, str(best.report)
    assert best.report.inputs[0].best_bytes is not None
    assert not best.training
    assert same(outputs(best.revert(), inputs), before)


APPLY = """
import json, sys, torch
sys.path[:0] = {folders!r}
from pathlib import Path
import kernel_pytorch as kp
from optimization_models import model_of
from test_architectures import outputs, same
torch.set_num_threads(1)
found = {{}}
for path in sorted(Path({saved!r}).glob("*.json")):
    model, inputs = model_of(path.stem)
    before = outputs(model.eval(), inputs)
    best = kp.apply(model, path)
    expected = torch.load(path.with_suffix(".pt"))
    found[path.stem] = [same(outputs(best, inputs), expected), same(outputs(best.revert(), inputs), before)]
print(json.dumps(found))
"""


def test_all_plans_are_applied_in_another_process(saved: Path) -> None:
    if not any(saved.glob("*.json")):
        pytest.skip("the plans are made by the tests above")
    code = APPLY.format(folders=[folder for folder in sys.path if "tests" in folder], saved=str(saved))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {name: [True, True] for name in found}


def test_the_window_of_mistral_is_recognised() -> None:
    model, inputs = model_of("mistral")
    seen: list[Any] = []
    original = kp.optimization.candidates.attention.attention

    def watched(q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        seen.append(str(mask))
        return original(q, k, v, mask, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernel_pytorch.optimization.candidates.attention.attention", watched)
        best = kp.optimize(model, inputs, include=("hf-attention",), timer=ScriptedTimer(), resume=False)
        assert [step.candidate for step in best.plan.steps] == ["hf-attention"]
        seen.clear()
        outputs(best, inputs)
    assert set(seen) == {"causal() & window(3)"}


def test_a_window_that_no_input_reaches_is_left_alone() -> None:
    model, inputs = model_of("mistral")
    short = {name: value[:, :4] for name, value in inputs.items()}
    best = kp.optimize(model, short, include=("hf-attention",), timer=ScriptedTimer(), resume=False)
    assert not best.plan.steps
    refusals = {one.candidate: one.reason for one in best.report.refusals}
    assert "no input is longer than its sliding window of 4" in refusals["hf-attention"]


def test_padding_and_generation_stay_right() -> None:
    model, inputs = model_of("llama")
    model.eval()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    given = {"input_ids": inputs["input_ids"], "attention_mask": mask}
    expected = model.generate(**given, max_new_tokens=4, do_sample=False)
    best = kp.optimize(model, given, include=("hf-attention", "rms-norm"), timer=ScriptedTimer(), resume=False)
    assert len(best.plan.steps) == 2
    assert torch.equal(best.generate(**given, max_new_tokens=4, do_sample=False), expected)


def test_memory_is_saved_by_checkpointing_and_chunks() -> None:
    model, inputs = model_of("llama")
    best = kp.optimize(
        model,
        inputs,
        "memory",
        include=("activation-checkpointing", "chunked-cross-entropy"),
        timer=ScriptedTimer(),
        resume=False,
    )
    assert [step.candidate for step in best.plan.steps] == ["chunked-cross-entropy", "activation-checkpointing"]
    row = best.report.inputs[0]
    assert row.best_bytes < 0.7 * row.eager_bytes
    assert "activation-checkpointing leaves out the output past_key_values" in str(best.report)


def test_logits_are_left_out_only_where_the_report_says_so() -> None:
    model, inputs = model_of("llama")
    include = ("chunked-cross-entropy",)
    best = kp.optimize(model, inputs, "training", include=include, timer=ScriptedTimer(), resume=False)
    assert "chunked-cross-entropy leaves out the output logits" in str(best.report)
    best.train()
    assert best(**inputs).logits is None
    assert best(input_ids=inputs["input_ids"]).logits is not None
    best.eval()
    assert best(**inputs).logits is not None


@pytest.mark.parametrize("name", ["llama", "cnn"])
def test_compiled_as_well(name: str) -> None:
    model, inputs = model_of(name)
    model.eval()
    before = outputs(model, inputs)
    include = ("compile", "bf16-linear" if name == "llama" else "channels-last")
    best = kp.optimize(model, inputs, include=include, timer=ScriptedTimer(), resume=False)
    assert best.plan.steps[-1].candidate == "compile"
    assert best.report.inputs[0].compile_seconds is not None
    assert signal_to_noise(outputs(best, inputs), before) > 27
    with torch.no_grad():
        for parameter in best.parameters():
            parameter.mul_(0.5)  # weights that change are seen by compiled graphs too
    changed = outputs(best, inputs)
    assert signal_to_noise(changed, outputs(best.revert(), inputs)) > 20


def test_several_lengths_share_a_compiled_plan() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval()
    lengths = [(torch.randn(1, length, 64),) for length in (5, 9, 14)]
    best = kp.optimize(model, lengths, include=("compile",), timer=ScriptedTimer(), resume=False)
    assert [step.candidate for step in best.plan.steps] == ["compile"], str(best.report)
    assert len(best.plan.speedup_over_eager) == 3


def test_a_cache_that_a_call_extends_is_the_same_for_every_run() -> None:
    model, inputs = model_of("llama")
    with torch.no_grad():
        past = model.eval()(input_ids=inputs["input_ids"], use_cache=True).past_key_values
    given = {"input_ids": inputs["input_ids"][:, :1], "past_key_values": past, "use_cache": True}
    best = kp.optimize(model, given, include=("rms-norm",), timer=ScriptedTimer(), resume=False)
    assert [step.candidate for step in best.plan.steps] == ["rms-norm"], str(best.report)
    assert past.get_seq_length() == 12
    assert best.report.inputs[0].label == "2x1, 2x1x12x16"
