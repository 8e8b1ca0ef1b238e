"""kernel-pytorch parity: paired runs, statistics, resumption, and the report."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import kernel_pytorch as kp
from kernel_pytorch import benchmarking, cli
from kernel_pytorch.cli import parity as parity_command
from kernel_pytorch.evidence import Benchmark, EvidenceError, read_record
from kernel_pytorch.fp8.autograd import fp8_linear
from kernel_pytorch.fp8.monitor import layers_of
from kernel_pytorch.hardware_abstraction.device import Rates
from kernel_pytorch.parity import model as parity_model
from kernel_pytorch.parity import report as parity_report
from kernel_pytorch.parity import training as parity
from kernel_pytorch.parity.model import SIZES, Language, Transformer, batches, held_out_batches
from kernel_pytorch.parity.statistics import smoothed, summarize
from kernel_pytorch.parity.training import Finished, Results, Settings, Started, Steps, train

TINY = replace(
    SIZES["small"], name="tiny", vocab=64, hidden=32, layers=1, heads=2, ffn=48, length=16, batch=2, held_out=2
)
STEPS = 12


def with_linears(linear: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]) -> parity.Convert:
    """A converter that computes each linear layer with this function."""

    def convert(module: nn.Module, recipe: str) -> nn.Module:
        if recipe == "nine-bits":
            raise ValueError(f"recipe={recipe!r}: unknown")
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = types.MethodType(  # type: ignore[method-assign]
                    lambda self, x: linear(x, self.weight, recipe), layer
                )
        return module

    return convert


in_8_bits = with_linears(lambda x, weight, recipe: fp8_linear(x, weight, None, recipe))
unchanged = with_linears(lambda x, weight, _: functional.linear(x, weight))


def poisoned(after: int) -> parity.Convert:
    """Layers whose output is NaN from a call on."""
    calls = [0]

    def linear(x: torch.Tensor, weight: torch.Tensor, _: str) -> torch.Tensor:
        calls[0] += 1
        return functional.linear(x, weight) * (float("nan") if calls[0] > after else 1.0)

    return with_linears(linear)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(SIZES, "tiny", TINY)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads on small tensors are slow on busy cores
    yield
    torch.set_num_threads(before)


def settings(steps: int = STEPS, compiled: bool = False) -> Settings:
    return Settings("tiny", steps, "cpu", "a CPU", "2.13", compiled)


def run_arm(
    results: Results, arm: str, seed: int = 0, convert: parity.Convert = in_8_bits, **options: Any
) -> Finished:
    steps = results.settings.steps
    return train(results, arm, seed, batches(TINY, steps, seed), held_out_batches(TINY), convert, **options)


# Text and model


def test_text_is_the_same_for_a_seed_and_different_for_another() -> None:
    first = batches(TINY, 5, seed=3)
    assert torch.equal(first, batches(TINY, 5, seed=3))
    assert not torch.equal(first, batches(TINY, 5, seed=4))
    assert not torch.equal(first[:2], held_out_batches(TINY))
    assert first.shape == (5, TINY.batch, TINY.length + 1)
    assert int(first.min()) >= 0
    assert int(first.max()) < TINY.vocab


def test_text_has_frequencies_successors_topics_and_repeats() -> None:
    language = Language(256)
    text = language.sample(400, 128, torch.Generator().manual_seed(0))
    counts = torch.bincount(text.flatten(), minlength=256).sort(descending=True).values
    assert counts[0] > 5 * counts[20] > 5 * counts[200]
    following = (language._successors_VR[text[:, :-1]] == text[:, 1:].unsqueeze(-1)).any(-1)
    assert following.float().mean() > 0.85
    # Which successor is the likeliest differs between sequences.
    ranks = (language._successors_VR[text[:, :-1]] == text[:, 1:].unsqueeze(-1)).float().argmax(-1)
    common = torch.stack([torch.bincount(row, minlength=16).argmax() for row in ranks])
    assert len(common.unique()) > 8
    row = text[0].tolist()
    grams = [tuple(row[i : i + 6]) for i in range(len(row) - 5)]
    assert len(set(grams)) < len(grams)


def test_text_too_short_to_repeat_is_refused() -> None:
    with pytest.raises(ValueError, match=r"length=8: .* at least 16"):
        Language(64).sample(1, 8, torch.Generator())


def test_parameters_and_flops_are_those_of_the_model() -> None:
    model = Transformer(TINY, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == TINY.parameters
    assert SIZES["100m"].parameters == pytest.approx(100e6, rel=0.05)
    with FlopCounterMode(display=False) as counter:
        model(batches(TINY, 1, 0)[0]).backward()
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert products == TINY.step_flops - 6 * TINY.layers * TINY.hidden * TINY.batch * TINY.length**2


def test_model_sees_no_later_token() -> None:
    model = Transformer(TINY, seed=0)
    tokens = batches(TINY, 1, 0)[0]
    changed = tokens.clone()
    changed[:, -2:] = (changed[:, -2:] + 1) % TINY.vocab
    seen: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda _module, _inputs, out: seen.append(out))
    model(tokens), model(changed)
    torch.testing.assert_close(seen[0][:, :-1], seen[1][:, :-1])
    assert not torch.equal(seen[0][:, -1], seen[1][:, -1])


@pytest.mark.parametrize("size", ["large", "", "Small"])
def test_unknown_size_is_refused(size: str) -> None:
    with pytest.raises(ValueError, match=r"size=.*use one of small, 100m"):
        parity_model.size_named(size)


# Runs


def test_arms_are_paired_bit_for_bit(tmp_path: Path) -> None:
    """A converter that changes nothing changes no loss: parameters, batches and all else are the same."""
    results = Results(tmp_path, settings())
    first, second = run_arm(results, "bf16"), run_arm(results, "same", convert=unchanged)
    assert results.losses["bf16", 0] == results.losses["same", 0]
    assert first.held_out == second.held_out == second.held_out_bf16
    assert results.losses["bf16", 0][-1] < results.losses["bf16", 0][0]
    assert len(results.seconds["bf16", 0]) == STEPS


def test_fp8_trains_and_evaluates_both_ways(tmp_path: Path) -> None:
    results = Results(tmp_path, settings())
    run_arm(results, "bf16")
    run = run_arm(results, "rowwise")
    losses, reference = results.losses["rowwise", 0], results.losses["bf16", 0]
    assert losses != reference
    np.testing.assert_allclose(losses, reference, rtol=0.05)
    assert run.held_out is not None
    assert run.held_out_bf16 is not None
    assert run.held_out != run.held_out_bf16
    assert run.held_out == pytest.approx(run.held_out_bf16, rel=0.02)


def test_compiled_blocks_train_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append((type(self), options)))
    results = Results(tmp_path, settings(compiled=True))
    run_arm(results, "bf16")
    assert compiled == [(parity_model.Block, {"dynamic": False})] * TINY.layers


def test_renamed_parameters_are_an_error(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *arguments: torch.Tensor) -> Any:
            return self.inner(*arguments)

    def convert(module: nn.Module, recipe: str) -> nn.Module:
        assert isinstance(module, nn.ModuleList)
        return nn.ModuleList(Wrapped(block) for block in module)

    with pytest.raises(RuntimeError, match=r"changed the names of parameters: blocks\.0"):
        run_arm(Results(tmp_path, settings()), "wrapped", convert=convert)


def test_a_loss_that_is_not_finite_ends_the_run_and_is_named(tmp_path: Path) -> None:
    results = Results(tmp_path, settings())
    run_arm(results, "bf16")
    run = run_arm(results, "poisoned", convert=poisoned(after=7 * 5))  # seven layers a step
    assert (run.failed_step, run.failed_loss, run.held_out) == (5, "nan", None)
    assert len(results.losses["poisoned", 0]) == 5
    again = Results(tmp_path)
    assert str(again.failed("poisoned")) == "poisoned seed 0: the loss is nan at step 5"
    summary, files, _ = parity_report.write_report(again, tmp_path)
    assert not summary.passes
    assert "poisoned seed 0: the loss is nan at step 5" in files[0].read_text()


# The file


def test_an_interrupted_run_is_repeated_and_finished_ones_are_kept(tmp_path: Path) -> None:
    results = Results(tmp_path, settings())
    run_arm(results, "bf16")
    kept = results.losses["bf16", 0]

    def interrupt(steps: Steps) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_arm(results, "rowwise", on_steps=interrupt)
    with results.path.open("ab") as file:
        file.write(b'{"kind":"steps","arm":"rowwi')  # an incomplete write
    again = Results(tmp_path, settings())
    assert again.losses["bf16", 0] == kept
    assert set(again.finished) == {("bf16", 0)}
    assert len(again.losses["rowwise", 0]) == 10
    assert summarize(again).verdicts[0].reason == "no seed is finished in both bf16 and rowwise"
    run_arm(again, "rowwise")
    assert set(Results(tmp_path).finished) == {("bf16", 0), ("rowwise", 0)}
    assert len(Results(tmp_path).losses["rowwise", 0]) == STEPS


def test_results_of_other_settings_are_not_continued(tmp_path: Path) -> None:
    Results(tmp_path, settings())
    with pytest.raises(ValueError, match=r"steps=12 and this run has 20: name another folder with --out"):
        Results(tmp_path, settings(steps=20))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}\n", "line 1, cannot be read"), ('{"kind":"started","arm":"bf16","seed":0}\n', "begin with its settings")],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / parity.RESULTS_FILE).write_text(text)
    with pytest.raises(ValueError, match=message):
        Results(tmp_path, settings())


# Statistics


def written(
    folder: Path, runs: dict[tuple[str, int], tuple[list[float], float, float]], steps: int = 100
) -> Results:
    """Results with these (losses, held-out loss, seconds of a step)."""
    results = Results(folder, settings(steps))
    for (arm, seed), (losses, held_out, seconds) in runs.items():
        results.write(Started(arm, seed))
        results.write(Steps(arm, seed, losses, [9.0] * 10 + [seconds] * (len(losses) - 10)))
        results.write(Finished(arm, seed, "abc", held_out=held_out, held_out_bf16=held_out))
    return results


def falling(final: float) -> list[float]:
    return [*np.linspace(6.0, final, 50).tolist(), *[final] * 50]


def test_statistics_of_known_curves(tmp_path: Path) -> None:
    runs = {
        ("bf16", 0): (falling(2.00), 2.10, 0.2),
        ("bf16", 1): (falling(2.04), 2.12, 0.2),
        ("tensorwise", 0): (falling(2.01), 2.11, 0.1),
        ("tensorwise", 1): (falling(2.05), 2.13, 0.1),
    }
    summary = summarize(written(tmp_path, runs))
    (verdict,) = summary.verdicts
    training, held_out = verdict.gaps
    assert (summary.window, summary.warmup) == (5, 10)
    assert training.mean == pytest.approx(0.01)
    assert training.spread == pytest.approx(0.04)
    assert training.allowed == pytest.approx(0.02)  # the held-out losses' spread: no batches differ in it
    assert training.deviation == pytest.approx(0.04 / 2**0.5)
    assert training.by_seed == pytest.approx({0: 0.01, 1: 0.01})
    assert held_out.relative == pytest.approx(0.01 / 2.11)
    assert held_out.allowed == pytest.approx(0.02)
    assert verdict.passes
    assert verdict.speedup == pytest.approx(2.0)
    assert summary.target == pytest.approx(2.02 * 1.0025)
    assert summary.baseline.steps_to_loss is not None
    assert summary.baseline.seconds_to_loss == pytest.approx(0.2 * summary.baseline.steps_to_loss)
    assert 49 <= summary.baseline.steps_to_loss <= 54
    matched = verdict.matched[0]
    assert matched[0] == 0
    assert matched[-1] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("spread", "gap", "passes"),
    [(0.0, 0.0049, True), (0.0, 0.0051, False), (0.05, 0.049, True), (0.05, 0.051, False), (0.0, -0.0051, False)],
)
def test_a_gap_passes_within_the_spread_or_a_quarter_percent(
    tmp_path: Path, spread: float, gap: float, passes: bool
) -> None:
    low, high = 2.0 - spread / 2, 2.0 + spread / 2
    runs = {
        ("bf16", 0): (falling(low), low, 0.1),
        ("bf16", 1): (falling(high), high, 0.1),
        ("rowwise", 0): (falling(low + gap), low + gap, 0.1),
        ("rowwise", 1): (falling(high + gap), high + gap, 0.1),
    }
    (verdict,) = summarize(written(tmp_path, runs)).verdicts
    assert verdict.passes is passes
    assert bool(verdict.reason) is not passes


def test_a_recipe_does_not_pass_on_fewer_seeds(tmp_path: Path) -> None:
    same = (falling(2.0), 2.0, 0.1)
    summary = summarize(written(tmp_path, {("bf16", 0): same, ("bf16", 1): same, ("rowwise", 0): same}))
    assert summary.verdicts[0].reason == "bf16 has finished seeds [0, 1] and rowwise [0]"


def test_a_loss_that_is_not_reached_has_no_time(tmp_path: Path) -> None:
    runs = {("bf16", 0): (falling(2.0), 2.0, 0.1), ("rowwise", 0): (falling(2.5), 2.5, 0.1)}
    results = written(tmp_path, runs)
    assert summarize(results).verdicts[0].arm.seconds_to_loss is None
    assert "not reached" in parity_report.page(results, summarize(results), None)


def test_smoothing_is_a_trailing_mean() -> None:
    losses = np.random.default_rng(0).normal(size=50)
    expected = [losses[max(0, i - 6) : i + 1].mean() for i in range(50)]
    np.testing.assert_allclose(smoothed(losses, 7), expected)


# The command


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    monkeypatch.setattr(parity_command.run, "__kwdefaults__", {"convert": in_8_bits})

    def call(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(["parity", *arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), " ".join((out + err).split())

    return call


def small(folder: Path, *more: str) -> tuple[str, ...]:
    return ("--size", "tiny", "--steps", str(STEPS), "--device", "cpu", "--out", str(folder), *more)


def test_command_trains_reports_continues_and_redraws(command: Any, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    _, text = command(*small(folder, "--seeds", "2", "--recipe", "tensorwise"))
    assert "bf16 seed 1: held-out loss" in text
    assert re.search(r"tensorwise (passes|does not pass): ", text)
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert 'name="viewport"' in page
    assert "http" not in page  # nothing beside the file
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    before = (folder / parity.RESULTS_FILE).read_bytes()
    _, text = command(*small(folder, "--seeds", "2", "--recipe", "rowwise"))
    assert "2 of 4 runs are in" in text
    assert (folder / parity.RESULTS_FILE).read_bytes().startswith(before)
    (folder / "report.html").unlink()
    command("--from", str(folder))
    page = (folder / "report.html").read_text()
    assert "rowwise, seed 1" in page
    assert "tensorwise, seed 1" in page


def test_command_converts_with_the_default_recipe(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As users run it: kp.fp8.convert, with histories, fused modules and a monitor."""
    converted: list[nn.Module] = []

    def convert(module: nn.Module, recipe: str) -> nn.Module:
        converted.append(module)
        return parity.default_convert(module, recipe)

    monkeypatch.setattr(parity_command.run, "__kwdefaults__", {"convert": convert})
    _, text = command(*small(tmp_path / "runs", "--seeds", "1"))
    assert re.search(r"delayed (passes|does not pass): ", text)
    report = kp.fp8.report(converted[-1])
    assert len(report.layers) == 7 * TINY.layers
    assert all(row.recipe == "delayed" and "fell back" not in str(row.notes) for row in report.layers)
    rows = STEPS * TINY.batch * TINY.length
    assert all(row.stats["gradient"].elements == rows * row.outputs for row in report.layers)
    results = Results(tmp_path / "runs")
    losses, reference = results.losses["delayed", 0], results.losses["bf16", 0]
    assert losses != reference
    np.testing.assert_allclose(losses, reference, rtol=0.05)


def test_layers_that_fell_back_do_not_pass(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They train as bf16 does, which says nothing about FP8."""

    def convert(module: nn.Module, recipe: str) -> nn.Module:
        kp.fp8.convert(module, recipe)
        for layer in layers_of(module).values():
            layer.fp8_fallback = "a test"
        return module

    monkeypatch.setattr(parity_command.run, "__kwdefaults__", {"convert": convert})
    code, text = command(*small(tmp_path / "runs", "--seeds", "1"))
    assert code == 1
    assert f"delayed does not pass: {7 * TINY.layers} layers fell back to bf16, such as 'blocks.0." in text
    results = Results(tmp_path / "runs")
    assert len(results.finished["delayed", 0].fell_back) == 7 * TINY.layers
    assert results.finished["bf16", 0].fell_back == ()
    assert "complete, 7 layers fell back" in (tmp_path / "runs" / "report.html").read_text()


def test_command_without_matplotlib_says_how_to_draw_later(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = (falling(2.0), 2.0, 0.1)
    written(tmp_path, {("bf16", 0): same, ("rowwise", 0): same})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, text = command("--from", str(tmp_path))
    assert code == 0
    assert "matplotlib is not installed. Install kernel-pytorch[plots] and draw them with --from" in text
    assert not (tmp_path / "report.png").exists()
    assert "matplotlib is not installed" in (tmp_path / "report.html").read_text()


def test_command_ends_an_arm_at_a_loss_that_is_not_finite(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity_command.run, "__kwdefaults__", {"convert": poisoned(after=7 * 3)})
    code, text = command(*small(tmp_path, "--seeds", "2", "--recipe", "odd"))
    assert code == 1
    assert "odd seed 0: the loss is nan at step 3" in text
    assert "left out odd seed 1" in text
    assert "bf16 seed 1: held-out loss" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--size", "huge"), "size='huge': use one of small, 100m"),
        (("--recipe", "bf16"), "recipe='bf16': that arm is always there"),
        (("--recipe", "auto", "--device", "cpu"), "so nothing is compared; use delayed"),
        (("--recipe", "nine-bits"), "recipe='nine-bits'"),
        (("--device", "tpu"), "device='tpu': not here"),
        (("--record", "--from", "."), "--record with --from"),
    ],
)
def test_command_refuses_before_it_trains(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(parity, "train", lambda *_, **__: pytest.fail("trained"))
    monkeypatch.setattr(benchmarking, "checkout", lambda: tmp_path)
    code, text = command("--out", str(tmp_path / "runs"), *arguments)
    assert code == 1
    assert message in text
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for records, and a clean checkout at commit aaa."""
    folder = tmp_path / "evidence"
    rates = Rates(bandwidth=1e11, matmul={})
    monkeypatch.setattr(parity_command, "evidence_directory", lambda: folder)
    monkeypatch.setattr(parity_command, "clean_commit", lambda _: "a" * 40)
    monkeypatch.setattr(benchmarking, "measure_rates", lambda _: rates)
    return folder


def test_record_holds_times_gaps_and_curves(
    command: Any, tmp_path: Path, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity_command.run, "__kwdefaults__", {"convert": unchanged})
    code, _ = command(*small(tmp_path / "runs", "--seeds", "2", "--recipe", "same", "--record"))
    assert code == 0
    (path,) = recording.glob("*.json")
    record = read_record(path)
    assert isinstance(record, Benchmark)
    assert record.op == "fp8-parity"
    assert record.commit == "a" * 40
    assert "--out" not in record.command
    baseline, ours = record.measurements
    assert (baseline.subject, ours.subject) == ("baseline:bf16", "kernel:same")
    assert (baseline.case, baseline.format, baseline.phase) == (ours.case, ours.format, ours.phase)
    assert ours.error == 0
    assert ours.budget is not None
    assert ours.budget >= 0.0025
    curves = path.with_suffix(".jsonl").read_bytes()
    assert curves == (tmp_path / "runs" / parity.RESULTS_FILE).read_bytes()
    assert path.with_suffix(".png").exists()


def test_failed_recipes_are_not_recorded(
    command: Any, tmp_path: Path, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity_command.run, "__kwdefaults__", {"convert": poisoned(after=7)})
    code, text = command(*small(tmp_path / "runs", "--seeds", "1", "--recipe", "odd", "--record"))
    assert code == 1
    assert "not recorded: odd does not pass" in text
    assert not recording.exists()


def test_runs_of_another_commit_are_not_recorded(
    tmp_path: Path, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {
        "size": "tiny", "steps": STEPS, "seeds": 1, "recipes": ("same",), "device": "cpu", "compiled": False,
        "out": tmp_path / "runs", "command": "kernel-pytorch parity", "convert": unchanged,
    }  # fmt: skip
    parity_command.run(**arguments, record=False)
    monkeypatch.setattr(parity_command, "clean_commit", lambda _: "b" * 40)
    with pytest.raises(EvidenceError, match="holds runs of commit aaaaaaaaaa and this is bbbbbbbbbb"):
        parity_command.run(**arguments, record=True)
