"""Prepared kernels: the calls that ``dispatch.prepared`` serves, with the results of the registry's kernels."""

from __future__ import annotations

import pytest
import torch

import kernel_pytorch as kp
from fp8_models import block, prepared_on_cpu, random, results, same
from kernel_pytorch.fp8.monitor import layers_of
from kernel_pytorch.hardware_abstraction import dispatch
from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE
from kernel_pytorch.ops.fp8_cast.definition import FP8_CAST
from kernel_pytorch.ops.fp8_cast.prepared import CastSpec
from kernel_pytorch.ops.fp8_cast.prepared import prepare as prepare_cast
from kernel_pytorch.ops.fp8_matmul import KERNEL_SCALED_MM
from kernel_pytorch.ops.fp8_matmul.prepared import MatmulSpec, scaled_mm_call
from kernel_pytorch.ops.fp8_matmul.prepared import prepare as prepare_matmul
from kernel_pytorch.testing import interpreting, pretend

pytestmark = pytest.mark.usefixtures("one_thread", "own_monitors")


@pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("recipe", "fuse"),  # rowwise has no fused SwiGLU
    [("tensorwise", True), ("tensorwise", False), ("delayed", True), ("delayed", False), ("rowwise", False)],
)
def test_prepared_kernels_equal_the_registry(recipe: str, fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for prepared in (True, False):
        with pretend("nvidia/h200"):
            served = prepared_on_cpu(monkeypatch) if prepared else []
            model = kp.fp8.convert(block(), recipe, fuse_swiglu=fuse)
            sizes = (1.0, 1.0, 1e-2) if recipe == "delayed" else (1.0, 1.0)  # the last is far below its history
            for seed, size in enumerate(sizes):
                outputs = results(model, size * random(32, 24, seed=seed))
            monkeypatch.undo()
        swiglu = {"fp8_swiglu", "fp8_swiglu_grad"} if fuse else set()
        assert set(served) == ({"fp8_cast"} | swiglu if prepared else set())
        state = {name: layer.fp8_counts for name, layer in layers_of(model).items()}
        state |= {f"{name} history": layer.fp8_state for name, layer in layers_of(model).items()}
        found.append(outputs | state)
    same(*found)


def test_nothing_is_prepared_on_a_cpu() -> None:
    x = random(32, 32)
    spec = CastSpec(x.shape, x.stride(), "e4m3fn", "tensor", True, 0, False, False)
    assert dispatch.prepared(FP8_CAST, spec, x) is None


def test_a_cast_that_the_kernel_refuses_is_not_prepared() -> None:
    one = CastSpec(torch.Size((1, 1)), (1, 1), "e4m3fn", "square", True, 0, True, False)
    assert prepare_cast(CATALOGUE["nvidia/h200"], one) is None


@pytest.mark.parametrize("device", ["nvidia/h200", "nvidia/a100", "amd/mi300x"])
@pytest.mark.parametrize("size", [(0, 32, 32), (32, 32, 32), (7, 32, 32), (32, 24, 32), (32, 32, 24)])
@pytest.mark.parametrize("accumulation", ["fast", "promoted", "float32"])
def test_a_matmul_is_prepared_where_scaled_mm_serves_without_padding(
    device: str, size: tuple[int, int, int], accumulation: str
) -> None:
    m, k, n = size
    dtypes = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    spec = MatmulSpec(torch.Size((m, k)), torch.Size((n, k)), *dtypes, "bfloat16", accumulation)
    where = CATALOGUE[device]
    served = KERNEL_SCALED_MM.refusal(scaled_mm_call(spec), where) is None
    assert (prepare_matmul(where, spec) is not None) == (served and k % 16 == 0 and n % 16 == 0)
    assert served == (device == "nvidia/h200" and m > 0 and accumulation != "float32")
