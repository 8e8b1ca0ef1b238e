"""Third parties' kernels for our backends, short device names, and devices that no backend describes."""

import importlib.metadata
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction import (
    AddedKernel,
    backend,
    backends,
    broken_backends,
    registered_ops,
    registry,
)
from kernel_pytorch.hardware_abstraction.dispatch import forget_choices
from kernel_pytorch.ops.rms_norm import KERNEL_TORCH

MINE = replace(KERNEL_TORCH, name="mine")


def _caches() -> tuple[Any, ...]:
    return registry._load, registry._generic, registry.devices, registry._present


@pytest.fixture
def added(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Entry points of the group, by name, each with what it loads."""
    real = importlib.metadata.entry_points

    class Entry:
        def __init__(self, name: str, loads: object) -> None:
            self.name, self.value, self.load = name, f"their_package:{name}", lambda: loads

    def entry_points(*, group: str) -> Any:
        if group == registry.KERNEL_ENTRY_POINT_GROUP:
            return [Entry(name, loads) for name, loads in request.param.items()]
        return real(group=group)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    for cached in _caches():
        cached.cache_clear()
    forget_choices()
    yield
    monkeypatch.undo()
    for cached in _caches():
        cached.cache_clear()
    forget_choices()


def _names() -> list[str]:
    return [kernel.name for kernel in backend("cpu").kernels if kernel.op == "rms_norm"]


@pytest.mark.parametrize(
    "added", [{"mine": AddedKernel(backend="cpu", kernel=MINE, before="torch")}], indirect=True, ids=["before"]
)
@pytest.mark.usefixtures("added")
def test_a_kernel_is_added_before_another() -> None:
    assert _names() == ["mine", "torch"]
    assert kp.explain(kp.rms_norm, torch.ones(2, 8)).kernel.name == "mine"


@pytest.mark.parametrize("added", [{"mine": AddedKernel(backend="cpu", kernel=MINE)}], indirect=True, ids=["last"])
@pytest.mark.usefixtures("added")
def test_a_kernel_is_added_last() -> None:
    assert _names() == ["torch", "mine"]
    assert kp.explain(kp.rms_norm, torch.ones(2, 8)).kernel.name == "torch"
    assert kp.explain(kp.rms_norm, torch.ones(2, 8), kernel="mine").kernel.name == "mine"


@pytest.mark.parametrize(
    ("added", "error"),
    [
        ({"it": AddedKernel(backend="acme", kernel=MINE)}, "backend='acme': no such backend"),
        (
            {"it": AddedKernel(backend="cpu", kernel=MINE, before="fast")},
            "before='fast': rms_norm has no such",
        ),
        ({"it": AddedKernel(backend="cpu", kernel=KERNEL_TORCH)}, "lists kernel 'torch' of 'rms_norm' twice"),
        ({"it": AddedKernel(backend="cpu", kernel=replace(MINE, op="rmsnorm"))}, "op='rmsnorm': no such op"),
        ({"it": 3}, "is a int; the entry point must name an AddedKernel"),
    ],
    indirect=["added"],
    ids=["backend", "before", "twice", "op", "type"],
)
@pytest.mark.usefixtures("added")
def test_a_broken_kernel_is_reported_and_left_out(error: str) -> None:
    assert _names() == ["torch"]
    (found,) = broken_backends()
    assert error in found.error


def test_names_in_capitals_and_third_parties_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kp.device("NVIDIA/H200") is kp.device("nvidia/h200")
    theirs = replace(kp.device("h200"), name="acme/npu1", backend="acme")
    acme = replace(backend("cpu"), name="acme", catalogue=(theirs,), probe=tuple)
    monkeypatch.setattr(registry, "backends", lambda: (*backends(), acme))
    assert kp.device("NPU1") is theirs
    with pytest.raises(ValueError, match=r"did you mean 'acme/npu1'.* It has .*acme/npu1"):
        kp.device("npu2")


def test_short_names_of_the_catalogue() -> None:
    assert kp.device("h200") is kp.device("nvidia/h200")
    assert kp.device("MI300X").name == "amd/mi300x"
    with pytest.raises(ValueError, match="name='h20': not in the catalogue"):
        kp.device("h20")


def test_a_device_without_a_backend_gets_the_torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="device='mps': torch has no such device here"):
        kp.device("mps")
    monkeypatch.setattr(registry, "_runs", lambda kind: kind == "mps")
    monkeypatch.setattr(registry, "_present", registry._present.__wrapped__)
    mps = kp.device("mps")
    assert (mps.backend, mps.torch_device) == ("generic", "mps")
    kernels = backend("generic").kernels
    assert {kernel.language for kernel in kernels} == {"torch"}
    for op in ("attention", "rms_norm"):
        assert any(kernel.op == op for kernel in kernels)
    q = torch.ones(1, 1, 4, 8)
    assert kp.explain(kp.attention, q, q, q, kp.masks.window(2), device=mps).kernel.name == "tiled"
    with pytest.raises(ValueError, match="device='cuda:7': torch has no such device here"):
        kp.device("cuda:7")


def test_no_baseline_has_a_kernels_name() -> None:
    """In a table of times, "torch" beside "torch" would say nothing."""
    for op in registered_ops():
        kernels = {kernel.name for record in backends() for kernel in record.kernels if kernel.op == op.name}
        assert kernels
        assert kernels.isdisjoint(op.baselines), op.name
