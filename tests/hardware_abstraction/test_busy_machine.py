"""On a busy machine nothing is recorded or decided; the times are scripted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch import benchmarking
from kernel_pytorch.cli import bench
from kernel_pytorch.hardware_abstraction import choice_cache, dispatch, timing
from kernel_pytorch.hardware_abstraction.rates import measure_rates
from kernel_pytorch.hardware_abstraction.timing import BusyMachineError, require_quiet, spread

QUIET = [1.00e-3, 1.01e-3, 1.02e-3, 1.03e-3, 1.05e-3]
BUSY = [1.0e-3, 1.1e-3, 1.6e-3, 2.4e-3, 3.0e-3]
CPU = kp.device("cpu")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Script the times of repeated runs, one list per call; the last one repeats."""

    def script(*attempts: list[float]) -> list[int]:
        asked = [0]

        def samples(*_: object) -> list[float]:
            asked[0] += 1
            return attempts[min(asked[0], len(attempts)) - 1]

        monkeypatch.setattr(timing, "sample_seconds", samples)
        monkeypatch.setattr(timing, "MOST_SPREAD", 0.25)
        return asked

    return script


@pytest.fixture(autouse=True)
def own_choices() -> Iterator[None]:
    dispatch.forget_choices()
    yield
    dispatch.forget_choices()


def test_spread() -> None:
    assert spread(QUIET) < 0.06
    assert spread(BUSY) > 1


def test_a_quiet_machine_is_asked_once(scripted: Callable[..., list[int]]) -> None:
    asked = scripted(QUIET)
    require_quiet(CPU)
    assert asked == [1]


def test_a_moment_of_other_work_is_waited_for(scripted: Callable[..., list[int]]) -> None:
    asked = scripted(BUSY, BUSY, QUIET)
    require_quiet(CPU)
    assert asked == [3]


def test_a_busy_machine_is_an_error_with_a_remedy(scripted: Callable[..., list[int]]) -> None:
    scripted(BUSY)
    with pytest.raises(BusyMachineError, match=r"is busy: .*116% apart .*; end other programs or wait") as caught:
        require_quiet(CPU)
    assert repr(CPU.name) in str(caught.value)


def test_rates_of_a_busy_machine_are_not_measured(scripted: Callable[..., list[int]]) -> None:
    scripted(BUSY)
    with pytest.raises(BusyMachineError):
        measure_rates(CPU)
    with pytest.raises(BusyMachineError):
        kp.device("cpu", measure=True)


def test_a_busy_machine_decides_and_caches_nothing(scripted: Callable[..., list[int]]) -> None:
    x = torch.randn(1, 2, 16, 8)
    with kp.policy(measure=True):
        first = kp.explain(kp.attention, x, x, x).kernel.name
    scripted(BUSY)
    with (
        pytest.warns(UserWarning, match="is busy: .*: attention is chosen as without measuring"),
        kp.policy(measure=True),
    ):
        out = kp.attention(x, x, x)
    assert not list(choice_cache.directory().glob("*"))
    torch.testing.assert_close(out, kp.attention(x, x, x, kernel=first), rtol=0, atol=0)


@pytest.mark.parametrize("attempts", [(BUSY,), (QUIET, BUSY)], ids=["before", "after"])
def test_a_busy_machine_records_nothing(
    scripted: Callable[..., list[int]],
    attempts: tuple[list[float], ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted(*attempts)
    monkeypatch.setattr(bench, "clean_commit", lambda _: "a" * 40)
    monkeypatch.setattr(benchmarking, "run", lambda *_: iter(()))
    with pytest.raises(BusyMachineError):
        bench.run(
            "rms_norm",
            cases=("one-row",),
            formats=("float32",),
            device="cpu",
            seconds=0.01,
            record=True,
            out=tmp_path / "evidence",
            command="kernel-pytorch bench",
        )
    assert not (tmp_path / "evidence").exists()
