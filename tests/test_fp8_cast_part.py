"""The casts of the parts of a matrix, wherever they lie, are its cast."""

from __future__ import annotations

import pytest
import torch

from kernel_pytorch.ops.fp8_cast import fp8_cast
from kernel_pytorch.ops.fp8_cast.part import amax_of_part, cast_of_part, inverses_from
from kernel_pytorch.testing import interpreting, pretend

PLACES = [(torch.float32, "cpu/avx512"), (torch.bfloat16, "cpu/avx512")]
if interpreting():  # Triton's interpreter computes bfloat16 wrongly
    PLACES.append((torch.float32, "nvidia/h200"))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("size", [0.0, 1e-45, 6e-36, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize(("dtype", "device"), PLACES)
def test_the_casts_of_parts_are_the_cast(dtype: torch.dtype, device: str, size: float, power_of_two: bool) -> None:
    x = (torch.randn(11, 24, generator=torch.Generator().manual_seed(0)) * size).to(dtype)
    x[3, 4], x[7, 2], x[10, 3] = torch.inf, torch.nan, -torch.inf
    whole, parts = fp8_cast(x, power_of_two=power_of_two), x.split([5, 0, 4, 2])
    counts = torch.zeros(2, 2, 4, dtype=torch.int64)
    with pretend(device):
        amaxes = torch.stack([amax_of_part(part) for part in parts])
        amax = amaxes.max()
        codes = [cast_of_part(part, amax, "e4m3fn", power_of_two, counts, 1) for part in parts]
    assert torch.equal(torch.cat([data.view(torch.uint8) for data in codes]), whole.data.view(torch.uint8))
    assert torch.equal(counts[1, 0], whole.counts[0])
    assert counts.sum() == counts[1, 0].sum()
    assert torch.equal(inverses_from(amaxes.max().repeat(2), "e4m3fn", power_of_two), whole.inverse.repeat(2))
