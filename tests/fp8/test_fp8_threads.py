"""kp.fp8.convert and the threads of autograd: whose they are after a conversion, and after it is turned back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import kernel_pytorch as kp

pytestmark = pytest.mark.usefixtures("own_monitors")


def gpus(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)


def threads() -> bool:
    return bool(torch._C._is_multithreading_enabled())


@pytest.mark.parametrize(
    ("number", "asked", "left"),
    [(0, None, True), (1, None, False), (2, None, True), (1, False, True), (8, True, False), (0, True, False)],
)
def test_a_conversion_takes_threads_where_there_is_one_gpu(
    number: int, asked: bool | None, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, number)
    model = kp.fp8.convert(nn.Sequential(nn.Linear(32, 32)), "delayed", one_thread=asked)
    assert threads() is left
    found = kp.fp8.report(model)
    assert found.one_thread is not left
    assert ("one_thread=False" in str(found)) is not left
    model(torch.ones(4, 32)).sum().backward()
    kp.fp8.revert(model)
    assert threads()
    assert not hasattr(model, "_fp8_one_thread")


def test_who_has_turned_them_off_keeps_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    with torch.autograd.set_multithreading_enabled(False):
        model = kp.fp8.convert(nn.Sequential(nn.Linear(32, 32)), "delayed")
        assert kp.fp8.report(model).one_thread
        kp.fp8.revert(model)
        assert not threads()
    assert threads()


def test_it_is_the_setting_of_the_thread_that_converts(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    seen: list[bool] = []

    def convert() -> None:
        kp.fp8.convert(nn.Sequential(nn.Linear(32, 32)), "delayed")
        seen.append(threads())

    other = threading.Thread(target=convert)
    other.start()
    other.join()
    assert seen == [False]
    assert threads()


def test_a_part_that_was_converted_is_turned_back_with_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    kp.fp8.convert(model[1], "delayed")
    assert not threads()
    kp.fp8.revert(model)
    assert threads()
    assert not hasattr(model[1], "_fp8_one_thread")


def test_a_model_without_linears_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    with pytest.warns(UserWarning, match="nothing was converted"):
        kp.fp8.convert(nn.Sequential(nn.ReLU()), "delayed")
    assert threads()


@pytest.mark.parametrize("wrong", [1, "yes"])
def test_a_wrong_answer_is_named(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"one_thread={wrong!r}: use True or False, or None"):
        kp.fp8.convert(nn.Sequential(nn.Linear(32, 32)), one_thread=wrong)
