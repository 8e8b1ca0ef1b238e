"""Attention in chunks on one device: results, gradients, and the memory formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch import masks
from kernel_pytorch.distributed.chunks import _gathered
from kernel_pytorch.hardware_abstraction.op import registered_op
from kernel_pytorch.testing.budget import compare, exceeded

ATTENTION = registered_op("attention")
TABLE = torch.rand(4, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.4
MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "window and sinks": masks.causal() & (masks.window(17) | masks.sinks(3)),
    "documents": masks.documents([[60, 40], [1, 99]], masks.causal()),
    "table": masks.causal() & masks.blocks(TABLE, 16),
    "nothing": masks.blocks(torch.zeros(7, 7, dtype=torch.bool), 16),
}


def drawn(length: int = 100, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((2, 4, length, 16), (2, 2, length, 16), (2, 2, length, 8))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


@pytest.mark.parametrize(
    "chunks", [kp.context_parallel.Chunks(n, offload) for n, offload in ((16, False), (33, True))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_chunks_meet_the_budget(name: str, dtype: torch.dtype, chunks: Any) -> None:
    def run(q: Any, k: Any, v: Any, mask: Any, scale: float, _wanted: str) -> Any:
        return kp.attention(q, k, v, mask, scale=scale, group=chunks, return_lse=True)

    arguments = dict(zip(ATTENTION.argument_names, (*drawn(dtype=dtype), MASKS[name], 0.25, "lse"), strict=True))
    assert exceeded(compare(ATTENTION, run, arguments)) == ""


@pytest.mark.parametrize("length", [1, 7, 64])
def test_any_length(length: int) -> None:
    q, k, v = drawn(length)
    whole = kp.attention(q, k, v, masks.causal())
    for tokens in (1, 5, 64, 1000):
        chunked = kp.attention(q, k, v, masks.causal(), group=kp.context_parallel.Chunks(tokens))
        torch.testing.assert_close(chunked, whole)


def test_no_tokens() -> None:
    q, k, v = (x[:, :, :0].requires_grad_() for x in drawn(8))
    out = kp.attention(q, k, v, group=kp.context_parallel.Chunks(4))
    assert out.shape == (2, 4, 0, 8)
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [x.shape for x in (q, k, v)]


def test_runs_give_the_same_bits() -> None:
    def once() -> list[torch.Tensor]:
        leaves = [x.requires_grad_() for x in drawn()]
        out = kp.attention(*leaves, masks.causal(), group=kp.context_parallel.Chunks(32))
        return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]

    for first, again in zip(once(), once(), strict=True):
        assert torch.equal(first, again)


def test_the_memory_formula_is_linear() -> None:
    def peak(length: int, offload: bool = False) -> int:
        shapes = ((1, 8, length, 128), (1, 2, length, 128), (1, 2, length, 128))
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
        return kp.context_parallel.Chunks(1024, offload).peak_bytes(q, k, v)

    steps = [peak((n + 1) << 16) - peak(n << 16) for n in range(1, 4)]
    assert max(steps) == min(steps) > 0
    assert peak(1 << 20) < 8 * peak(1 << 18)


def test_chunks_are_gathered_head_by_head() -> None:
    x = torch.randn(2, 3, 50, 4)
    found = _gathered(x, ((3, 10), (20, 21), (40, 50)), torch.device("cpu"))
    assert torch.equal(found, torch.cat([x[:, :, 3:10], x[:, :, 20:21], x[:, :, 40:50]], dim=2))


def test_wrong_calls_raise_errors() -> None:
    q, k, v = drawn()
    with pytest.raises(ValueError, match="tokens=0: use a whole number of 1 or more"):
        kp.context_parallel.Chunks(0)
    with pytest.raises(ValueError, match="q has 50 tokens and k 100: chunks take as many queries as keys"):
        kp.attention(q[:, :, :50], k, v, group=kp.context_parallel.Chunks(32))
    with pytest.raises(ValueError, match="k has head_dim 8 and q 16"):
        kp.attention(q, v, v, group=kp.context_parallel.Chunks(32))
    with pytest.raises(TypeError, match="expected a process group"):
        kp.attention(q, k, v, group=32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_keys_in_host_memory(name: str, dtype: torch.dtype) -> None:
    """Keys and their gradients stay on the host; results equal those of keys on the device."""
    mask, results = MASKS[name], []
    for on_host in (False, True):
        q, k, v = (x.cuda() for x in drawn(dtype=dtype))
        if on_host:
            k, v = k.cpu().pin_memory(), v.cpu().pin_memory()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = kp.attention(*leaves, mask, group=kp.context_parallel.Chunks(32))
        gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert [x.device for x in gradients] == [x.device for x in leaves]
        results.append([x.detach().cpu() for x in (out, *gradients)])
    for there, here in zip(*results, strict=True):
        assert torch.equal(there, here)
