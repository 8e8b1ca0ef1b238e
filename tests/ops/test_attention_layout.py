"""kp.attention: leaks, determinism, the batch, strides, heads, and what masks mean."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import kernel_pytorch as kp
from attention_calls import (
    H200,
    any_mask,
    drawn,
    every_kernel,
    everything,
    heads,
    in_float32,
    needs_interpreter,
    on,
)
from kernel_pytorch.masks import Mask, blocks, causal, documents, prefix, sinks, window

pytestmark = pytest.mark.usefixtures("one_thread")

# The future, the batch, the bits.

LEAK_MASKS = [causal(), causal() & (window(20) | sinks(3)), causal() & blocks(torch.ones(9, 9).tril().bool(), 16)]


@every_kernel
@pytest.mark.parametrize("mask", LEAK_MASKS, ids=str)
def test_no_leak_from_the_future(mask: Mask, kernel: str, dtype: torch.dtype) -> None:
    """Other keys and values after t leave outputs and lse at t and before as they are, to the bit."""
    mask = causal() if kernel == "cpu-flash" else mask
    q, k, v = heads(q_heads=1, kv_heads=1, q_len=140, dtype=dtype)
    with on(kernel):
        out, lse = kp.attention(q, k, v, mask, return_lse=True, kernel=kernel)
        for t in (0, 15, 63, 64, 128, 138) if kernel != "triton" else (15, 64, 77):
            other_k, other_v = k.clone(), v.clone()
            other_k[:, :, t + 1 :] = 30 * drawn(*k[:, :, t + 1 :].shape, seed=7).to(dtype)
            other_v[:, :, t + 1 :] = -1000
            changed, changed_lse = kp.attention(q, other_k, other_v, mask, return_lse=True, kernel=kernel)
            assert torch.equal(changed[:, :, : t + 1], out[:, :, : t + 1]), t
            assert torch.equal(changed_lse[:, :, : t + 1], lse[:, :, : t + 1]), t
            assert not torch.equal(changed[:, :, t + 1 :], out[:, :, t + 1 :]), t


@every_kernel
def test_no_gradient_into_the_future(kernel: str, dtype: torch.dtype) -> None:
    q, k, v = (x.requires_grad_() for x in heads(q_len=90, dtype=dtype))
    with on(kernel):
        out = kp.attention(q, k, v, causal(), kernel=kernel)
        dq, dk, dv = torch.autograd.grad(out[:, :, :50].float().sum(), (q, k, v))
    assert (dk[:, :, 50:] == 0).all()
    assert (dv[:, :, 50:] == 0).all()
    assert (dq[:, :, 50:] == 0).all()
    assert (dv[:, :, :50] != 0).any()


@any_mask
def test_the_same_bits_each_time(kernel: str, dtype: torch.dtype) -> None:
    mask = documents([[30, 1, 39], [50, 20]], causal()) & blocks(drawn(2, 3, 3) < 0.8, 32)
    qkv = heads(batch=2, q_heads=2, kv_heads=1, q_len=70, dtype=dtype)
    torch.set_num_threads(2)
    with on(kernel), kp.policy(deterministic=True):
        first = everything(qkv, mask, kernel)
        for _ in range(4 if kernel == "triton" else 19):
            for again, before in zip(everything(qkv, mask, kernel), first, strict=True):
                assert torch.equal(again, before)


def test_kernels_that_are_not_deterministic_are_left_out_on_request() -> None:
    qkv = heads(dtype=torch.bfloat16, dim=128)
    assert kp.explain(kp.attention, *qkv, causal(), device=H200).kernel.name == "cudnn"
    with kp.policy(deterministic=True):
        choice = kp.explain(kp.attention, *qkv, causal(), device=H200)
    assert choice.kernel.name == "triton"
    assert choice.kernel.deterministic


@every_kernel
def test_the_rest_of_the_batch_does_not_matter(kernel: str, dtype: torch.dtype) -> None:
    mask = causal()
    qkv = heads(batch=3, q_len=70, dtype=dtype)
    with on(kernel):
        together = everything(qkv, mask, kernel, lse=False)
        alone = everything(tuple(x[:1] for x in qkv), mask, kernel, lse=False)
    tolerance = {"rtol": 0.0, "atol": 2e-5 if dtype.itemsize >= 4 else 0.03}
    for whole, single in zip(together, alone, strict=True):
        torch.testing.assert_close(whole[:1], single, **tolerance)


# Strides and heads.

LAID_OUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed-heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.cat([x, x], dim=2)[:, :, ::2].clone().repeat_interleave(2, dim=2)[:, :, ::2],
    "every-other-number": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "dim-outermost": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "expanded": lambda x: x[:, :1].expand(x.shape),
    "part-of-a-projection": lambda x: torch.cat([x, x, x], dim=3)[..., x.shape[3] : 2 * x.shape[3]],
}


@every_kernel
@pytest.mark.parametrize("name", LAID_OUT)
def test_any_strides(name: str, kernel: str, dtype: torch.dtype) -> None:
    mask = causal() if kernel == "cpu-flash" else causal() & window(30)
    qkv = tuple(LAID_OUT[name](x) for x in heads(batch=2, q_len=50, dtype=dtype))
    assert not all(x.is_contiguous() for x in qkv)
    with on(kernel):
        strided = everything(qkv, mask, kernel, lse=kernel != "cpu-flash")
        plain = everything(tuple(x.contiguous() for x in qkv), mask, kernel, lse=kernel != "cpu-flash")
    for ours, expected in zip(strided, plain, strict=True):
        torch.testing.assert_close(ours, expected)
    assert strided[0].is_contiguous()


@pytest.mark.parametrize("kernel", ["cpu-flash", "tiled", pytest.param("triton", marks=needs_interpreter)])
@pytest.mark.parametrize("name", ["expanded", "transposed", "every-other"])
def test_output_gradients_of_any_strides(kernel: str, name: str) -> None:
    q, k, v = (x.requires_grad_() for x in heads(q_len=50))
    with_lse = kernel != "cpu-flash"
    mask = window(9, 9) if with_lse else causal()
    dout = {
        "expanded": torch.ones(()).expand(q.shape),
        "transposed": drawn(1, 32, 50, 2).transpose(1, 3),
        "every-other": drawn(1, 2, 50, 64)[..., ::2],
    }[name]
    dlse = drawn(1, 50, 2).transpose(1, 2)
    results = []
    for gradients in ((dout, dlse), (dout.contiguous(), dlse.contiguous())):
        with on(kernel):
            outputs = kp.attention(q, k, v, mask, return_lse=with_lse, kernel=kernel)
            given = gradients if with_lse else gradients[0]
            results.append(torch.autograd.grad(outputs, (q, k, v), given))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


@needs_interpreter
def test_rows_too_far_apart_for_32_bits_are_copied() -> None:
    from kernel_pytorch.ops.attention.triton_kernel import _rows

    near = torch.empty(1, 1 << 14, 32, 64, device="meta").transpose(1, 2)
    far = torch.empty(1, 1 << 20, 32, 64, device="meta").transpose(1, 2)
    assert _rows(near) is near
    assert _rows(far).is_contiguous()


@every_kernel
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 2), (6, 2), (3, 1)])
def test_grouped_heads_equal_repeated_ones(q_heads: int, kv_heads: int, kernel: str, dtype: torch.dtype) -> None:
    q, k, v = heads(2, q_heads, kv_heads, 40, dtype=dtype)
    group = q_heads // kv_heads
    mask = causal() if kernel == "cpu-flash" else causal() & window(20)
    with on(kernel):
        grouped = everything((q, k, v), mask, kernel, lse=False)
        repeated = [q, *(x.repeat_interleave(group, dim=1) for x in (k, v))]
        expected = everything(tuple(repeated), mask, kernel, lse=False)
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype.itemsize < 4 else {"rtol": 1e-4, "atol": 1e-5}
    for ours, theirs in zip(grouped[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
    for ours, theirs in zip(grouped[2:], expected[2:], strict=True):
        torch.testing.assert_close(ours, theirs.unflatten(1, (kv_heads, group)).sum(dim=2), **tolerance)


@in_float32
def test_a_table_for_each_query_head_of_a_group(kernel: str) -> None:
    table = torch.rand(4, 5, 5, generator=torch.Generator().manual_seed(2)) < 0.5
    q, k, v = heads(1, 4, 2, 80)
    with on(kernel):
        out = kp.attention(q, k, v, blocks(table, 16), kernel=kernel)
        for head in range(4):
            own = [x[:, [head // 2]] for x in (k, v)]
            alone = kp.attention(q[:, [head]], *own, blocks(table[head], 16), kernel=kernel)
            torch.testing.assert_close(out[:, [head]], alone)


# What masks mean.


@any_mask
def test_documents_equal_each_document_alone(kernel: str, dtype: torch.dtype) -> None:
    lengths = [[33, 1, 46], [80, 0, 0]]
    inner = causal() & (window(10) | sinks(2))
    q, k, v = heads(2, 2, 1, 80, dtype=dtype)
    with on(kernel):
        out, lse = kp.attention(q, k, v, documents(lengths, inner), return_lse=True, kernel=kernel)
        for b, row in enumerate(lengths):
            start = 0
            for length in row:
                own = [x[b : b + 1, :, start : start + length] for x in (q, k, v)]
                alone, alone_lse = kp.attention(*own, inner, return_lse=True, kernel=kernel)
                close = {} if dtype.itemsize >= 4 else {"rtol": 0.02, "atol": 0.01}
                torch.testing.assert_close(out[b : b + 1, :, start : start + length], alone, **close)
                torch.testing.assert_close(
                    lse[b : b + 1, :, start : start + length], alone_lse, rtol=1e-4, atol=1e-4
                )
                start += length


@in_float32
@pytest.mark.parametrize(
    "mask",
    [causal() & (window(20) | sinks(4)), window(3, 5) | sinks(2), causal() | prefix(30), window(0)],
    ids=str,
)
def test_masks_equal_sdpa_with_the_dense_mask(kernel: str, mask: Mask) -> None:
    q, k, v = (x.requires_grad_() for x in heads(2, 2, 2, 100))
    dout = drawn(*q.shape, seed=5)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense(100, 100))
    with on(kernel):
        ours = kp.attention(q, k, v, mask, kernel=kernel)
        found = torch.autograd.grad(ours, (q, k, v), dout)
    torch.testing.assert_close(ours, theirs)
    for gradient, expected in zip(found, torch.autograd.grad(theirs, (q, k, v), dout), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


@in_float32
def test_fewer_queries_stand_at_the_end(kernel: str) -> None:
    """Decoding: the last queries alone see what they see among all."""
    q, k, v = heads(q_len=90)
    mask = causal() & (window(40) | sinks(4))
    with on(kernel):
        whole = kp.attention(q, k, v, mask, kernel=kernel)
        for last in (1, 5, 33):
            torch.testing.assert_close(
                kp.attention(q[:, :, -last:], k, v, mask, kernel=kernel), whole[:, :, -last:]
            )
