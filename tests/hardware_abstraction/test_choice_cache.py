"""The cache of measured choices: written, read back, and robust against bad files and disks."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction import choice_cache, registry
from kernel_pytorch.hardware_abstraction.choice_cache import ChoiceCacheWarning, MeasuredChoice
from kernel_pytorch.hardware_abstraction.dispatch import forget_choices
from kernel_pytorch.hardware_abstraction.op import Call, Kernel
from kernel_pytorch.ops.rms_norm import torch_kernel

X = torch.randn(4, 64)


class Slow:
    """A slow second kernel on the CPU that counts its calls; the backend lists it first."""

    def __init__(self) -> None:
        self.calls = 0
        self.recorded_graph = False

    def forward(self, device: kp.Device, *arguments: Any) -> Any:
        self.calls += 1
        time.sleep(2e-3)
        outputs = torch_kernel.forward(device, *arguments)
        self.recorded_graph |= outputs[0].requires_grad
        return outputs

    def backward(self, device: kp.Device, *arguments: Any) -> Any:
        self.calls += 1
        time.sleep(2e-3)
        return torch_kernel.backward(device, *arguments)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    counted = Slow()
    module = ModuleType("slow_rms_norm")
    module.forward, module.backward = counted.forward, counted.backward  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kernel = Kernel(op="rms_norm", name="slow", module=module.__name__, supports=lambda *_: None, language="native")
    cpu = registry.backend("cpu")
    monkeypatch.setitem(registry._load().backends, "cpu", dataclasses.replace(cpu, kernels=(kernel, *cpu.kernels)))
    forget_choices()
    yield counted
    monkeypatch.undo()
    forget_choices()


def files(pattern: str = "*") -> list[Path]:
    return sorted(choice_cache.directory().glob(pattern))


def measured_call(x: torch.Tensor = X) -> torch.Tensor:
    with kp.policy(measure=True):
        return kp.rms_norm(x)


def test_a_measured_choice_is_cached(slow: Slow) -> None:
    expected = kp.rms_norm(X, kernel="torch")
    assert torch.equal(measured_call(), expected)
    measured = slow.calls
    assert measured >= 3, "a median needs several runs"
    (path,) = files()
    kept = json.loads(path.read_bytes())
    assert kept["timings"]["slow"] > kept["timings"]["torch"] > 0

    measured_call()
    forget_choices()  # as in a new process
    assert torch.equal(measured_call(), expected)
    assert slow.calls == measured
    assert files() == [path]


def test_the_fastest_runs_and_is_explained(slow: Slow) -> None:
    assert kp.explain(kp.rms_norm, X).kernel.name == "slow"
    measured_call()
    measured = slow.calls
    with kp.policy(measure=True):
        choice = kp.explain(kp.rms_norm, X)
    assert choice.kernel.name == "torch"
    assert choice.verdicts[0].reason.startswith("the fastest of 2 measured here")
    assert choice.verdicts[1].reason.startswith("fits; measured ")
    assert slow.calls == measured


def test_without_the_policy_nothing_is_measured_or_cached(slow: Slow) -> None:
    kp.rms_norm(X)
    assert slow.calls == 1
    assert not files()


def test_one_kernel_that_fits_is_not_measured(slow: Slow) -> None:
    with kp.policy(measure=True):
        kp.rms_norm(X, kernel="slow")
    assert slow.calls == 1
    assert not files()


def test_forward_and_backward_are_measured_separately(slow: Slow) -> None:
    x = X.clone().requires_grad_()
    measured_call(x).sum().backward()
    assert len(files()) == 2
    assert not slow.recorded_graph, "a measured forward must not pay for an autograd graph"
    assert x.grad is not None


def test_a_cached_choice_is_used(slow: Slow) -> None:
    measured_call()
    (path,) = files()
    kept = json.loads(path.read_bytes())
    kept["timings"] = {"slow": 1e-6, "torch": 1.0}
    path.write_text(json.dumps(kept))
    measured = slow.calls
    forget_choices()
    measured_call()
    assert slow.calls == measured + 1, "it says that slow is faster, so slow runs, once"


def call(*shape: int, dtype: torch.dtype = torch.float32, eps: float = 1e-6) -> Call:
    return kp.explain(kp.rms_norm, torch.empty(*shape, dtype=dtype), None, eps).call


def test_the_key_holds_what_a_measurement_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    h200, asked, kernels = kp.device("nvidia/h200"), call(4, 64), ("triton", "torch")
    same = choice_cache.choice_key(asked, h200, kernels)
    assert choice_cache.choice_key(call(4, 64), kp.device("nvidia/h200"), kernels) == same
    strided = kp.explain(kp.rms_norm, torch.empty(64, 4).t()).call
    others = [
        choice_cache.choice_key(call(8, 64), h200, kernels),
        choice_cache.choice_key(call(4, 64, dtype=torch.float16), h200, kernels),
        choice_cache.choice_key(strided, h200, kernels),
        choice_cache.choice_key(dataclasses.replace(asked, phase="backward"), h200, kernels),
        choice_cache.choice_key(asked, kp.device("nvidia/h100"), kernels),
        choice_cache.choice_key(asked, dataclasses.replace(h200, compute_units=66), kernels),
        choice_cache.choice_key(asked, dataclasses.replace(h200, memory_bytes=1), kernels),
        choice_cache.choice_key(asked, h200, ("triton",)),
    ]
    monkeypatch.setattr(kp, "__version__", "9.9.9")
    others.append(choice_cache.choice_key(asked, h200, kernels))
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    others.append(choice_cache.choice_key(asked, h200, kernels))
    monkeypatch.setattr(choice_cache, "triton_version", lambda: "9.9.9")
    others.append(choice_cache.choice_key(asked, h200, kernels))
    assert len({same, *others}) == 1 + len(others)


def test_another_shape_is_measured_again(slow: Slow) -> None:
    measured_call()
    measured = slow.calls
    measured_call(torch.randn(5, 64))
    assert slow.calls > measured
    assert len(files()) == 2


Spoil = Callable[[bytes], bytes]


def _changed(field: str, value: object) -> Spoil:
    return lambda content: json.dumps(json.loads(content) | {field: value}).encode()


CORRUPT: dict[str, Spoil] = {
    "empty": lambda _: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "binary": lambda content: b"\xff\x00\xfe" + content,
    "not-an-object": lambda _: b"[1, 2]",
    "wrong-type": _changed("timings", {"slow": "fast"}),
    "timings-a-list": _changed("timings", [1.0]),
    "no-timings": _changed("timings", {}),
    "negative-time": _changed("timings", {"slow": -1.0, "torch": 1.0}),
    "unknown-field": _changed("more", 1),
    "key-of-another": _changed("key", "rms_norm on a toaster"),
    "key-missing": lambda _: b'{"timings": {"slow": 1.0}}',
}


@pytest.mark.parametrize("spoil", CORRUPT.values(), ids=CORRUPT)
def test_a_corrupt_file_is_renamed_and_replaced(slow: Slow, spoil: Spoil) -> None:
    measured_call()
    (path,) = files()
    bad = spoil(path.read_bytes())
    path.write_bytes(bad)
    forget_choices()
    measured = slow.calls
    with pytest.warns(ChoiceCacheWarning, match="is corrupt.*set aside as .*measuring again"):
        out = measured_call()
    assert torch.equal(out, kp.rms_norm(X, kernel="torch"))
    assert slow.calls > measured
    (aside,) = files("*.corrupt-*")
    assert aside.read_bytes() == bad
    assert files() == sorted([path, aside])
    forget_choices()
    measured = slow.calls
    measured_call()  # a warning would be an error here
    assert slow.calls == measured


def _full(*arguments: object, **keywords: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class _FullFile:
    """A file on a full disk: it opens, and nothing can be written to it."""

    def __init__(self, handle: int, mode: str) -> None:
        self.handle = handle

    def __enter__(self) -> _FullFile:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.handle)

    write = _full


@pytest.mark.parametrize("where", ["write", "rename", "mkdir"])
def test_a_disk_that_takes_nothing_is_a_warning(slow: Slow, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    if where == "write":
        monkeypatch.setattr(os, "fdopen", _FullFile)
    else:
        monkeypatch.setattr(Path, "replace" if where == "rename" else "mkdir", _full)
    with pytest.warns(ChoiceCacheWarning, match="No space left on device; set KERNEL_PYTORCH_CACHE to a writable"):
        out = measured_call()
    assert torch.equal(out, kp.rms_norm(X, kernel="torch"))
    assert not files(), "nothing half-written stays behind"
    measured = slow.calls
    measured_call()
    assert slow.calls == measured, "the choice holds in this process although it could not be kept"


def test_a_file_where_the_directory_should_be(slow: Slow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("not a directory")
    monkeypatch.setenv("KERNEL_PYTORCH_CACHE", str(tmp_path / "taken"))
    with pytest.warns(ChoiceCacheWarning) as caught:
        measured_call()
    assert any("cannot keep the measured choice" in str(warning.message) for warning in caught)


def test_the_environment_names_the_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERNEL_PYTORCH_CACHE", str(tmp_path / "here"))
    assert choice_cache.directory() == tmp_path / "here" / "choices"
    monkeypatch.delenv("KERNEL_PYTORCH_CACHE")
    assert choice_cache.directory().name == "choices"
    assert "kernel_pytorch" in str(choice_cache.directory())


def test_store_and_load() -> None:
    assert choice_cache.load("some key") is None
    choice = MeasuredChoice("some key", {"a": 1e-6, "b": 2.5e-6})
    choice_cache.store(choice)
    assert choice_cache.load("some key") == choice
    assert choice_cache.load("another key") is None


WRITER = """
import sys, warnings
warnings.simplefilter("error")
from kernel_pytorch.hardware_abstraction.choice_cache import MeasuredChoice, load, store
print("ready", flush=True)
sys.stdin.readline()
for number in range(150):
    store(MeasuredChoice("shared", {f"kernel_{i}": float(1 + number + i) for i in range(40)}))
    found = load("shared")
    assert found is not None and len(found.timings) == 40
"""


def test_processes_that_write_the_same_choice_at_once() -> None:
    pipe = subprocess.PIPE
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER], stdin=pipe, stdout=pipe, stderr=pipe) for _ in range(4)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
    for writer in writers:  # all start at once
        assert writer.stdin is not None
        writer.stdin.write(b"\n")
        writer.stdin.flush()
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors.decode()
    (path,) = files()  # no temporary file, none set aside
    assert path.suffix == ".json"
    kept = choice_cache.load("shared")
    assert kept is not None
    assert len(kept.timings) == 40
