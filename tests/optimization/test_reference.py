"""The float64 reference of kp.optimize: attention in pieces, comparisons in pieces, what is kept of the truth."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from kernel_pytorch.optimization import reference
from kernel_pytorch.optimization.examples import examples_of
from kernel_pytorch.optimization.workload import Workload


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("form", ["full", "causal", "boolean", "one row", "grouped"])
def test_attention_in_rows_is_attention(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_SCORES", 2 * 4 * 9 * 2)  # two rows at a time
    q, v = drawn(2, 4, 7, 8), drawn(2, 4, 9, 8, seed=2)
    k = drawn(2, 2 if form == "grouped" else 4, 9, 8, seed=1)
    given: dict[str, Any] = {
        "full": {},
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": drawn(7, 9, seed=3) > -1},
        "one row": {"attn_mask": drawn(2, 1, 1, 9, seed=3)},
        "grouped": {"enable_gqa": True, "scale": 0.3},
    }[form]
    v = v[:, : k.shape[1]]

    def run(attend: Any) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, **given)
        out.square().sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    for one, other in zip(
        run(reference._attention_in_rows), run(functional.scaled_dot_product_attention), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_differences_are_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    truth, found = drawn(5, 7), drawn(5, 7, seed=1)
    usable = torch.ones(5, 7, dtype=torch.bool)
    usable[1, 2] = False
    expected = reference.Expected(truth, torch.float64, usable, 1.0, 1.0)
    whole = reference.difference(found, expected)
    monkeypatch.setattr(reference, "_PIECE", 4)
    assert reference.difference(found, expected) == pytest.approx(whole)
    found[1, 2] = math.nan  # where the original is not finite either
    assert reference.difference(found, expected) == pytest.approx(whole)
    found[4, 6] = math.nan
    assert reference.difference(found, expected) == (math.inf, math.inf)


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)], ids=str
)
def test_the_truth_is_far_finer_than_the_model(dtype: torch.dtype, kept: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(dtype)
    (example,) = examples_of((drawn(3, 8, dtype=dtype),))
    found = reference.reference_of(Workload(model, True), example, 0)
    assert found.float64 is None
    assert found.tensors["gradient.0.weight"].truth.dtype == kept
    assert found.tensors["output.output"].dtype == dtype
    assert found.tensors["output.output"].distance > 0
    assert found.tensors["output.output"].noise > 0
