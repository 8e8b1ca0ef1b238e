"""Shared test set-up. Without a GPU, Triton kernels run in the interpreter."""

import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ranks import SIZES, Ranks, started
from requirements import pytest_pycollect_makemodule
from scheduling import Clock, pytest_xdist_make_scheduler

__all__ = ["pytest_pycollect_makemodule", "pytest_xdist_make_scheduler"]

HAS_GPU = torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel module is imported


def _reduced(reduction: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """Reduce by halves. Triton's interpreter reduces element by element if it does not know the combine function."""
    values = [numpy.moveaxis(given.handle.data, reduction.axis, 0) for given in inputs]
    while (half := len(values[0]) // 2) > 0:
        halves = [value[part] for part in (slice(half), slice(half, None)) for value in values]
        found = reduction.combine_fn.fn(
            *(reduction.to_tensor(part, given.dtype) for part, given in zip(halves, inputs * 2, strict=True))
        )
        values = [value.handle.data for value in (found if isinstance(found, tuple) else (found,))]
    last = [numpy.expand_dims(value[0], reduction.axis) if reduction.keep_dims else value[0] for value in values]
    return [reduction.to_tensor(value, given.dtype) for value, given in zip(last, inputs, strict=True)]


@pytest.fixture(autouse=True, scope="session")
def _quick_reductions() -> Iterator[None]:
    if HAS_GPU or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.interpreter import ReduceOps

    slow = ReduceOps.generic_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ReduceOps,
            "generic_reduce",
            lambda of, given: slow(of, given) if of.axis is None else _reduced(of, given),
        )
        yield


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no":  # in pytest-xdist's controller
        config.pluginmanager.register(Clock())


@pytest.fixture(autouse=True)
def _own_choice_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty cache of measured choices."""
    monkeypatch.setenv("KERNEL_PYTORCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _measure_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow measuring although tests run in parallel; test_busy_machine.py scripts the times."""
    monkeypatch.setattr("kernel_pytorch.hardware_abstraction.timing.MOST_SPREAD", float("inf"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: several are slow for small tensors on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def own_monitors() -> None:
    """Start without monitors of earlier tests."""
    from kernel_pytorch.fp8 import monitor

    for model in list(monitor._monitors):
        monitor.unwatch(model)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of every FP8 GEMM of an unfused layer."""
    autograd = sys.modules["kernel_pytorch.fp8.autograd"]
    from kernel_pytorch.ops import fp8_matmul as matmul_module

    seen: list[tuple[int, ...]] = []

    def watched(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append((a.shape[0], a.shape[1], b.shape[0]))
        return matmul_module.fp8_matmul(a, b, *rest[:4])

    monkeypatch.setattr(autograd, "scaled_matmul", watched)
    return seen


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per run of the fused SwiGLU."""
    from kernel_pytorch.fp8 import fusion as swiglu_module

    calls: list[int] = []
    run = swiglu_module.fp8_swiglu_mlp

    def watched(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        return run(*arguments)

    monkeypatch.setattr(swiglu_module, "fp8_swiglu_mlp", watched)
    return calls


@pytest.fixture
def input_casts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the inputs that layers quantize themselves."""
    autograd = sys.modules["kernel_pytorch.fp8.autograd"]

    seen: list[tuple[int, ...]] = []
    cast = autograd.quantize

    def watched(x: torch.Tensor, *rest: Any) -> Any:
        if rest[2] == 0 and torch._C._current_graph_task_id() == -1:  # neither a weight nor a gradient
            seen.append(tuple(x.shape))
        return cast(x, *rest)

    monkeypatch.setattr(autograd, "quantize", watched)
    return seen


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Ranks for all tests of a module, RANKS of them where it says so; they read no measured choices of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNEL_PYTORCH_CACHE", str(tmp_path_factory.mktemp("ranks") / "cache"))
        with started(getattr(request.module, "RANKS", max(SIZES))) as ranks:
            yield ranks
    assert not multiprocessing.active_children()
