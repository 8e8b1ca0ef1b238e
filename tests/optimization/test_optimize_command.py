"""``kernel-pytorch optimize``: models from functions and folders, its files and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch.cli import main
from kernel_pytorch.cli.optimize import seconds_of
from optimization_fakes import ScriptedTimer
from optimization_models import model_of

FACTORY = """
import torch

def small():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64)).eval(), (torch.randn(8, 64),)
"""


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ScriptedTimer:
    from kernel_pytorch.optimization import driver

    timer = ScriptedTimer()
    monkeypatch.setattr(driver.optimize, "__kwdefaults__", {**driver.optimize.__kwdefaults__, "timer": timer})
    (tmp_path / "factories_of_test_optimize.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return timer


def command(*arguments: str) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(["optimize", *arguments])
    return ended.value.code or 0


def test_a_model_from_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = ("--plan", "plan.json", "--report", "report.html")
    assert command("factories_of_test_optimize:small", "--exclude", "compile", *written) == 0
    out = capsys.readouterr().out
    assert "1.25x over eager with bf16-linear" in out
    assert "written to plan.json" in out
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).eval()
    assert kp.apply(model, tmp_path / "plan.json").plan.steps[0].candidate == "bf16-linear"


def test_a_config_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "tiny")
    lengths = ("--length", "8", "--length", "12")
    assert command("--hf", "tiny", "--exclude", "compile", "--plan", "plan.json", *lengths) == 0
    assert "LlamaForCausalLM for latency on cpu" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "plan.json").read_text())["inputs"]) == 2


@pytest.mark.parametrize("goal", ["latency", "training"])
@pytest.mark.parametrize("name", ["t5", "vit", "whisper"])
def test_inputs_are_drawn_for_encoders_and_decoders_images_and_speech(name: str, goal: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    kind = type(model_of(name)[0])
    config = model_of(name)[0].config
    config.architectures = [kind.__name__]
    config.save_pretrained(tmp_path / name)
    torch.set_num_threads(1)
    arguments = ("--goal", goal, "--include", "hf-attention", "--length", "6", "--plan", "plan.json")
    assert command("--hf", name, *arguments) == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [step["candidate"] for step in found["steps"]] == ["hf-attention"]


def test_slower_than_a_baseline_is_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    import kernel_pytorch.cli.optimize as module

    arguments = ("factories_of_test_optimize:small", "--exclude", "compile")
    assert command(*arguments, "--fail-if-slower") == 0
    monkeypatch.setattr(module, "optimize", lambda *_, **__: 0.9)
    assert command(*arguments) == 0
    assert command(*arguments, "--fail-if-slower") == 1


def test_wrong_arguments_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        ((), "give either package.module:function or --hf FOLDER"),
        (("factories_of_test_optimize:none",), "has no function 'none'"),
        (("--hf", "nowhere"), "there is no config.json"),
        (("factories_of_test_optimize:small", "--budget", "soon"), "use a duration such as 90s, 5m or 1h"),
        (("factories_of_test_optimize:small", "--plan", "nowhere/plan.json"), "there is no folder 'nowhere'"),
        (("factories_of_test_optimize:small", "--report", "."), "--report='.' is a folder: name a file"),
        (("factories_of_test_optimize:small", "--goal", "speed"), "goal='speed': use one of latency"),
    ):
        assert command(*arguments) == 1
        assert words in " ".join(capsys.readouterr().err.split())


def test_durations() -> None:
    assert [seconds_of(text) for text in ("90", "1.5s", "5m", "1h")] == [90.0, 1.5, 300.0, 3600.0]
