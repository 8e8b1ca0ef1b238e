"""benchmarks/million_tokens.py: the chunked model against the plain one, its memory, its checks, its command line."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernel_pytorch as kp

CPU = torch.device("cpu")


def _program() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "million_tokens.py"
    spec = importlib.util.spec_from_file_location("million_tokens", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


program = _program()
TINY = replace(program.SMALL, layers=3, dense_every=3, window=24, sinks=3, chunk=64, loss_chunk=48)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _without_allocator_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # which the program sets where it is not


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return program.Model(config, CPU)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 211])
def test_chunked_model_is_the_plain_one(tokens: int) -> None:
    model = model_of(TINY)
    data, masks = program.synthetic(tokens, TINY.vocab, CPU, block=16), TINY.masks()
    assert len(set(masks)) == 2

    plain = program.plain_loss(model, *data, masks)
    expected = torch.autograd.grad(plain, list(model.parameters()))
    loss = model(*data, masks)
    loss.backward()

    torch.testing.assert_close(loss, plain)
    for (name, parameter), exact in zip(model.named_parameters(), expected, strict=True):
        limit = program.tolerance(TINY, 0) * exact.norm() + 1e-9  # one token alone has no gradient in its q and k
        assert (parameter.grad - exact).norm() <= limit, name


def test_chunk_size_and_accumulation_change_nothing() -> None:
    """Two backwards add up, however each is cut."""
    whole = model_of(replace(TINY, chunk=1000, loss_chunk=1000))
    cut = model_of(replace(TINY, chunk=7, loss_chunk=5))
    data, masks = program.synthetic(90, TINY.vocab, CPU), TINY.masks()
    (2 * whole(*data, masks)).backward()
    for _ in range(2):
        cut(*data, masks).backward()
    for ours, theirs in zip(cut.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_bfloat16_is_within_its_tolerance_and_keeps_float32_gradients() -> None:
    model = model_of(replace(TINY, dtype=torch.bfloat16, check_tokens=150, check_layers=3))
    errors, limit = program.check_gradients(model, CPU)
    assert limit < 0.05
    assert 0 < max(errors.values()) <= limit
    assert set(errors) == {"loss", *(name for name, _ in model.named_parameters())}
    data = program.synthetic(100, TINY.vocab, CPU)
    model(*data, TINY.masks()).backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


class _Largest(TorchDispatchMode):
    """The most numbers that any tensor had."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
        self.numbers = max(self.numbers, *sizes, 0) if sizes else self.numbers
        return made


def test_no_tensor_of_all_tokens_is_wider_than_the_stream() -> None:
    config = replace(TINY, tokens=1500)
    model, masks = model_of(config), config.masks()
    data = program.synthetic(config.tokens, config.vocab, CPU)
    with _Largest() as largest:
        model(*data, masks).backward()
    assert largest.numbers == config.tokens * config.hidden


def test_a_layers_input_is_freed_when_its_backward_is_done() -> None:
    model, masks = model_of(TINY), TINY.masks()
    alive: list[int] = []
    kept: list[Any] = []

    def keep(_: Any, arguments: tuple[Any, ...]) -> None:
        kept.append(torch.multiprocessing.reductions.StorageWeakRef(arguments[0].untyped_storage()))

    def on_layer(phase: str) -> None:
        if phase == "backward":
            alive.append(sum(not reference.expired() for reference in kept))

    for layer in model.layers:
        layer.register_forward_pre_hook(keep)
    model(*program.synthetic(200, TINY.vocab, CPU), masks, on_layer).backward()
    assert alive == [2, 1, 0]


def test_predicted_peak_is_linear_in_tokens_and_fits() -> None:
    quarter = program.FULL.tokens // 4
    sizes = [sum(program.predicted_peak(replace(program.FULL, tokens=i * quarter)).values()) for i in (1, 2, 3, 4)]
    assert len({after - before for before, after in itertools.pairwise(sizes)}) == 1
    assert sizes[-1] < 125 * 2**30
    assert program.predicted_peak(TINY)["inputs of the layers"] == TINY.layers * TINY.tokens * TINY.hidden * 4


def test_parameters_are_counted() -> None:
    assert program.count_parameters(TINY) == sum(p.numel() for p in model_of(TINY).parameters())
    assert 0.95e9 < program.count_parameters(program.FULL) < 1.1e9


def test_data_repeats_from_afar_and_is_the_same_each_time() -> None:
    tokens, targets = program.synthetic(4000, 512, CPU)
    assert tokens.shape == targets.shape == (4000, 1)
    assert torch.equal(tokens[1:], targets[:-1])
    assert torch.equal(tokens, program.synthetic(4000, 512, CPU)[0])
    blocks = tokens[: 15 * 256].view(15, 256)
    assert len(blocks.unique(dim=0)) < 15


@pytest.mark.parametrize("error", [0.2, math.nan])
def test_an_error_above_the_tolerance_stops_the_program(error: float) -> None:
    console = Console(quiet=True)
    program.demand({"a": 0.1, "b": 0.0}, 0.1, "gradients", console)
    with pytest.raises(SystemExit, match="gradients: errors above"):
        program.demand({"a": 0.0, "b": error}, 0.1, "gradients", console)


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check compares with something independent: attention that ignores its mask fails it."""
    model = model_of(replace(TINY, check_tokens=100, check_layers=3))
    attention = kp.attention
    monkeypatch.setattr(
        "kernel_pytorch.distributed.tokenwise.attention", lambda q, k, v, _: attention(q, k, v, kp.masks.causal())
    )
    errors, limit = program.check_gradients(model, CPU)
    assert max(errors.values()) > limit


def test_the_small_step_runs_and_writes_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    program.main(["--small", "--tokens", "1100", "--json", str(path)])
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["tokens"] == 1100
    assert result["parameters"] == program.count_parameters(program.SMALL)
    assert set(result["seconds"]) == {"forward", "backward", "optimizer", "total"}
    assert result["seconds"]["total"] > 0
    assert abs(result["loss"] - math.log(program.SMALL.vocab)) < 1.5
    assert max(result["gradient_errors"].values()) <= result["gradient_tolerance"] == 1e-4
    assert len(result["end_errors"]) == 2
    assert result["predicted_peak_bytes"] == sum(result["predicted_parts"].values())
    if not torch.cuda.is_available():
        assert result["peak_bytes"] is None
    assert "one step on 1,100 tokens" in capsys.readouterr().out


def test_the_size_follows_the_device() -> None:
    console = Console(quiet=True)
    h200, cpu = kp.device("nvidia/h200"), kp.device("cpu")

    def asked(**options: Any) -> Any:
        return SimpleNamespace(**{"small": False, "tokens": None, "layers": None, **options})

    assert program.choose(asked(), h200, console) == program.FULL
    assert program.choose(asked(), cpu, console) == program.SMALL
    assert program.choose(asked(small=True), h200, console) == program.SMALL
    assert program.choose(asked(layers=2), h200, console).check_layers == 2
    with pytest.raises(SystemExit, match="use --small, fewer --tokens or fewer --layers"):
        program.choose(asked(tokens=1 << 22), h200, console)
