"""Attention calls for tests: shapes, strides, dtypes and masks, and a Hypothesis strategy of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from mask_expressions import Expression, built, expressions

HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FORMATS = {"float32": torch.float32, **HALF}


@dataclass(frozen=True)
class Shape:
    batch: int
    kv_heads: int
    group: int
    q_len: int
    kv_len: int
    dim: int
    value_dim: int
    dtype: str
    expression: Expression
    lse_grad: bool
    layout: str

    def arguments(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.q_len * 1000 + self.kv_len)

        def tensor(heads: int, length: int, dim: int) -> torch.Tensor:
            x = torch.randn(self.batch, heads, length, dim, generator=generator).to(FORMATS[self.dtype])
            return x.transpose(1, 2).contiguous().transpose(1, 2) if self.layout == "projected" else x

        return {
            "q": tensor(self.kv_heads * self.group, self.q_len, self.dim),
            "k": tensor(self.kv_heads, self.kv_len, self.dim),
            "v": tensor(self.kv_heads, self.kv_len, self.value_dim),
            "mask": built(self.expression),
            "scale": self.dim**-0.5,
            "wanted": "lse" if self.lse_grad else "grad",
        }


@st.composite
def shapes(
    draw: st.DrawFn,
    formats: tuple[str, ...],
    longest: int,
    dense: bool = False,
    dims: tuple[int, ...] = (32, 64, 80, 96),
) -> Shape:
    """Any call; with ``dense`` the few that torch's own kernels take."""
    batch, kv_heads, group = (draw(st.sampled_from(sizes)) for sizes in ([1, 1, 2], [1, 2], [1, 1, 2, 3]))
    lengths = st.integers(1, longest) | st.sampled_from([1, 16, 17, 64, 127, 128, 129, 150]).filter(
        lambda n: n <= longest
    )
    kv_len = draw(lengths)
    q_len = draw(st.sampled_from([kv_len, 0]).flatmap(lambda same: st.just(same) if same else lengths))
    expression: Expression = ("full",)
    if not dense:
        expression = draw(expressions(q_len, kv_len, batch, kv_heads * group))
    elif q_len == kv_len:
        expression = draw(st.sampled_from([("causal",), ("full",)]))
    dim = draw(st.sampled_from(dims))
    return Shape(
        batch=batch,
        kv_heads=kv_heads,
        group=group,
        q_len=q_len,
        kv_len=kv_len,
        dim=dim,
        value_dim=dim if dense else draw(st.sampled_from([dim, dim, 32, 48])),
        dtype=draw(st.sampled_from(formats)),
        expression=expression,
        lse_grad=False if dense else draw(st.booleans()),
        layout=draw(st.sampled_from(["plain", "projected"])),
    )


def one_key_mostly(shape: Shape) -> bool:
    """Whether most rows of dq or dk are mere rounding: where a query has one key, its score has no gradient."""
    dense = built(shape.expression).dense(shape.q_len, shape.kv_len)
    keys = dense.sum(dim=-1)
    live = (dense & (keys > 1).unsqueeze(-1)).any(dim=-2)
    queries, columns = int((keys > 0).sum()), int(dense.any(dim=-2).sum())
    return int((keys > 1).sum()) < 0.6 * queries or int(live.sum()) < 0.6 * columns
