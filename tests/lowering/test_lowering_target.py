"""A backend's lowering as a record: what is refused, and whose delegates a program registers."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction import backend, registry
from kernel_pytorch.lowering import PartitionerOptions, lowering_of, target
from kernel_pytorch.lowering.build import runtime_prefix
from kernel_pytorch.lowering.target import lowering_from, register_delegates
from kernel_pytorch.ops.attention import kernels as attention_op

LATER: list[str] = []
THEIRS = replace(lowering_of("cpu"), delegate="TheirBackend", register=lambda: LATER.append("registered"))


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> None:
    record = replace(backend("cpu"), name="theirs", catalogue=(), lowering=f"{__name__}:THEIRS", notes=None)
    monkeypatch.setitem(registry._load().backends, "theirs", record)
    LATER.clear()


@pytest.mark.parametrize("path", ["", "package", "package:", ":NAME", "package/module:NAME"])
def test_a_path_that_names_nothing_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"use 'package\.module:NAME'"):
        replace(backend("cpu"), lowering=path)


def test_a_path_that_names_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="names a function, not a Lowering"):
        lowering_from("kernel_pytorch.lowering.target:lowering_of")


def test_options_of_another_kind_are_refused() -> None:
    with pytest.raises(TypeError, match="KernelPyTorchBackend takes a PartitionerOptions"):
        kp.lower(torch.nn.ReLU().eval(), (torch.ones(2),), options=3)
    assert lowering_of("cpu").checked(None) == PartitionerOptions()


def test_a_delegate_is_registered_for_the_programs_that_name_it(third_party: None) -> None:
    register_delegates(b"... KernelPyTorchBackend ...")
    assert LATER == []
    register_delegates(b"... TheirBackend ...")
    assert LATER == ["registered"]


def test_a_broken_third_party_warns_and_other_programs_run(
    third_party: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = replace(registry._load().backends["theirs"], lowering="no_such_package.lowering:LOWERING")
    monkeypatch.setitem(registry._load().backends, "theirs", record)
    program = kp.lower(torch.nn.Softmax(-1).eval(), (torch.ones(2, 4),))
    with pytest.warns(UserWarning, match="backend 'theirs' cannot be used: No module named 'no_such_package'"):
        found = kp.load(program.buffer)(torch.ones(2, 4))
    torch.testing.assert_close(found, torch.full((2, 4), 0.25))


def test_our_own_record_is_the_one_that_lower_uses() -> None:
    assert lowering_of("cpu") is target.CPU


def test_attention_runs_where_executorch_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.distribution

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name == "executorch":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    q, k, v = torch.randn(3, 1, 2, 37, 16)
    asked = (runtime_prefix, attention_op._runtime_missing)
    for question in asked:
        question.cache_clear()
    try:
        choice = kp.explain(kp.attention, q, k, v, kp.masks.causal() & kp.masks.window(5))
    finally:
        for question in asked:
            question.cache_clear()
    assert choice.kernel.name == "tiled"
    assert any("ExecuTorch is not installed: pip install" in verdict.reason for verdict in choice.verdicts)
