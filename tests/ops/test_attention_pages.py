"""kp.attention(..., pages=): keys in pages give what the same keys in a row give."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import kernel_pytorch as kp
from attention_calls import H200, drawn, needs_interpreter
from kernel_pytorch.masks import Mask, causal, dilated, full, padding, prefix, sinks, window
from kernel_pytorch.testing import poisoned, pretend

pytestmark = pytest.mark.usefixtures("one_thread")

both_kernels = pytest.mark.parametrize(
    "kernel", ["gather", pytest.param("triton-split-kv", marks=needs_interpreter)]
)
LENGTHS = (37, 0, 5, 64)


def on(kernel: str) -> contextlib.AbstractContextManager[Any]:
    return pretend(H200) if kernel == "triton-split-kv" else contextlib.nullcontext()


def call(page_size: int = 16, q_len: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    width = -(-max(LENGTHS) // page_size)
    q = drawn(len(LENGTHS), 4, q_len, 32, dtype=dtype)
    k, v = (drawn(30 * width, 2, page_size, 32, seed=seed, dtype=dtype) for seed in (1, 2))
    table = torch.randperm(30 * width, generator=torch.Generator().manual_seed(0))[: len(LENGTHS) * width]
    return q, k, v, kp.PageTable(table.view(len(LENGTHS), width).int(), torch.tensor(LENGTHS).int())


def keys_of(x: torch.Tensor, pages: kp.PageTable, row: int) -> torch.Tensor:
    """The keys of a row, looked up one by one."""
    found = [x[pages.table[row, n // x.shape[2]], :, n % x.shape[2]] for n in range(int(pages.lengths[row]))]
    return torch.stack(found, dim=1)[None] if found else x.new_zeros(1, x.shape[1], 0, x.shape[3])


@both_kernels
@pytest.mark.parametrize("page_size", [1, 16, 24])
@pytest.mark.parametrize(
    "mask", [None, causal(), causal() & window(9), causal() & (window(20) | sinks(3)), window(4, 4)], ids=str
)
def test_the_same_as_without_pages(mask: Mask | None, page_size: int, kernel: str) -> None:
    q, k, v, pages = call(page_size, q_len=3)
    with on(kernel), poisoned():
        out, lse = kp.attention(q, k, v, mask, pages=pages, return_lse=True, kernel=kernel)
    for row in range(len(LENGTHS)):
        own_k, own_v = keys_of(k, pages, row), keys_of(v, pages, row)
        wanted = kp.attention(q[row : row + 1], own_k, own_v, mask, return_lse=True, kernel="tiled")
        torch.testing.assert_close(out[row : row + 1], wanted[0])
        torch.testing.assert_close(lse[row : row + 1], wanted[1])


@both_kernels
def test_other_pages_and_the_rest_of_the_last_page_are_not_read(kernel: str) -> None:
    q, k, v, pages = call()
    with on(kernel), poisoned():
        out = kp.attention(q, k, v, causal(), pages=pages, kernel=kernel)
        other_k, other_v = torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
        for row, length in enumerate(LENGTHS):
            for n in range(length):
                page, at = pages.table[row, n // 16], n % 16
                other_k[page, :, at], other_v[page, :, at] = k[page, :, at], v[page, :, at]
            pages.table[row, -(-length // 16) :] = -7  # what is behind the last key may be anything
        again = kp.attention(q, other_k, other_v, causal(), pages=pages, kernel=kernel)
    assert torch.equal(out, again)
    assert (out[1] == 0).all()


@needs_interpreter
def test_pages_in_a_projections_layout() -> None:
    """(pages, page_size, heads, dim) in memory, and lengths that are every second number of a tensor."""
    q, k, v, pages = call()
    k_strided, v_strided = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    strided = kp.PageTable(pages.table, pages.lengths.repeat_interleave(2)[::2])
    with on("triton-split-kv"), poisoned():
        wanted = kp.attention(q, k, v, causal(), pages=pages)
        assert torch.equal(kp.attention(q, k_strided, v_strided, causal(), pages=strided), wanted)


def test_which_kernel() -> None:
    q, k, v, pages = call(dtype=torch.bfloat16)

    def name(mask: Mask, device: str = H200) -> str:
        return kp.explain(kp.attention, q, k, v, mask, pages=pages, device=device).kernel.name

    assert name(causal() & (window(4) | sinks(2))) == name(full()) == "triton-split-kv"
    assert name(prefix(4)) == name(dilated(2, 3)) == name(causal(), "cpu/amx") == "gather"


def test_compiled() -> None:
    q, k, v, pages = call()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=False)
    def run(q, k, v, mask, table, lengths):
        return kp.attention(q, k, v, mask, pages=kp.PageTable(table, lengths)) + 1

    with torch.no_grad():
        found = run(q, k, v, causal(), pages.table, pages.lengths)
        assert torch.equal(found, kp.attention(q, k, v, causal(), pages=pages) + 1)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"pages": "table"}, TypeError, r"pages='table': expected a kp.PageTable"),
        ({"table": "long"}, TypeError, r"pages.table=int64: expected a tensor of int32"),
        ({"table": "flat"}, ValueError, r"pages.table has shape \[16\]: use \(batch, most pages of a row\)"),
        ({"table": "short"}, ValueError, r"pages.table has 3 rows and q a batch of 4: they must be equal"),
        ({"lengths": "float"}, TypeError, r"pages.lengths=float32: expected a tensor of int32"),
        ({"lengths": [1, 2]}, TypeError, r"pages.lengths=\[1, 2\]: expected a tensor of int32"),
        ({"k": "flat"}, ValueError, r"k has shape .*: use \(pages, heads, page_size, head_dim\)"),
        ({"v": "fewer"}, ValueError, r"k has 120 pages of 16 keys and v 119 of 16: they must be equal"),
        ({"k": "double"}, TypeError, r"k has dtype float64 and q float32"),
        ({"mask": padding([3, 3, 3, 3])}, ValueError, r"mask=padding.*: each row of pages has its own length"),
        ({"softcap": 3.0}, NotImplementedError, r"pages: attention over pages has no softcap"),
        ({"sink_logits": torch.zeros(4)}, NotImplementedError, r"pages: attention over pages has no sink_logits"),
        (
            {"grad": True},
            NotImplementedError,
            r"has no gradient, and q, k or v requires one: call it under torch.no",
        ),
    ],
)
def test_errors(change: dict[str, Any], error: type[Exception], words: str) -> None:
    q, k, v, pages = call()
    ways = {
        "long": lambda x: x.long(),
        "float": lambda x: x.float(),
        "flat": lambda x: x.reshape(-1),
        "short": lambda x: x[:3],
        "fewer": lambda x: x[1:],
        "double": lambda x: x.double(),
    }
    given: dict[str, Any] = {"k": k, "v": v, "table": pages.table, "lengths": pages.lengths, "mask": causal()}
    changed = {
        name: ways[way](given[name]) if isinstance(way, str) and name in given else way
        for name, way in change.items()
    }
    given |= {name: value for name, value in changed.items() if name in given}
    keywords = {name: value for name, value in changed.items() if name not in (*given, "grad")}
    keywords.setdefault("pages", kp.PageTable(given["table"], given["lengths"]))
    q.requires_grad_("grad" in change)
    with pytest.raises(error, match=words):
        kp.attention(q, given["k"], given["v"], given["mask"], **keywords)
