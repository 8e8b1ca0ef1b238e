"""The casts of a matrix's shards equal the cast of the matrix."""

from __future__ import annotations

import contextlib

import pytest
import torch

from kernel_pytorch.ops.fp8_cast import fp8_cast
from kernel_pytorch.ops.fp8_cast.part import amax_of_part, cast_of_part, inverses_from
from kernel_pytorch.testing import interpreting, pretend

HERE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [(torch.float32, None), (torch.bfloat16, None)]
if interpreting():  # Triton's interpreter computes bfloat16 wrongly
    KERNELS.append((torch.float32, "nvidia/h200"))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("size", [0.0, 1e-45, 6e-36, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize(("dtype", "pretended"), KERNELS)
def test_the_casts_of_shards_are_the_cast(
    dtype: torch.dtype, pretended: str | None, size: float, power_of_two: bool
) -> None:
    x = (torch.randn(11, 24, generator=torch.Generator().manual_seed(0)) * size).to(HERE, dtype)
    x[3, 4], x[7, 2], x[10, 3] = torch.inf, torch.nan, -torch.inf
    whole, parts = fp8_cast(x, power_of_two=power_of_two), x.split([5, 0, 4, 2])
    counts = torch.zeros(2, 2, 4, dtype=torch.int64, device=HERE)
    with pretend(pretended) if pretended else contextlib.nullcontext():
        amaxes = torch.stack([amax_of_part(part) for part in parts])
        largest = amaxes.max().repeat(3)
        codes = [cast_of_part(part, largest[1], "e4m3fn", power_of_two, counts, 1) for part in parts]
    assert torch.equal(torch.cat([data.view(torch.uint8) for data in codes]), whole.data.view(torch.uint8))
    assert torch.equal(counts[1, 0], whole.counts[0])
    assert counts.sum() == counts[1, 0].sum()
    assert torch.equal(inverses_from(largest, "e4m3fn", power_of_two), whole.inverse.repeat(3))


@pytest.mark.skipif(not interpreting(), reason="Triton's interpreter is not in use")
def test_each_kernel_is_used_where_it_would_be_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_pytorch.ops.fp8_cast import triton_part

    used = []
    for name in ("amax", "cast_by_amax"):
        monkeypatch.setattr(triton_part, name, lambda *_, name=name: used.append(name))
    x, counts = torch.ones(4, 8), torch.zeros(2, 2, 4, dtype=torch.int64)
    for device in ("cpu/avx512", "nvidia/h200"):
        with pretend(device):
            amax_of_part(x)
            cast_of_part(x, torch.tensor(1.0), "e4m3fn", False, counts, 0)
    assert used == ["amax", "cast_by_amax"]
