"""kp.attention: bad input, nothing to attend to, gradients, selection."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernel_pytorch as kp
from attention_calls import (
    H200,
    any_mask,
    budgeted,
    drawn,
    everything,
    heads,
    in_float32,
    needs_interpreter,
    on,
)
from kernel_pytorch.hardware_abstraction import registry
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.op import Kernel
from kernel_pytorch.hardware_abstraction.selection import Policy
from kernel_pytorch.masks import Mask, blocks, causal, documents, full, prefix, sinks, window
from kernel_pytorch.ops.attention.definition import ATTENTION
from kernel_pytorch.testing import compare, poisoned
from kernel_pytorch.testing.budget import exceeded

pytestmark = pytest.mark.usefixtures("one_thread")

# Bad input, before any kernel runs.

Q, K, V = heads()
TABLE = torch.ones(3, 3, dtype=torch.bool)


def swapped(**changed: Any) -> tuple[Any, ...]:
    return tuple(({"q": Q, "k": K, "v": V, "mask": causal()} | changed).values())


BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "q-3d": (swapped(q=Q[0]), {}, ValueError, r"q has shape \[2, 40, 32\]: use \(batch, heads, length, head_dim\)"),
    "k-5d": (swapped(k=K[None]), {}, ValueError, r"k has shape \[1, 1, 2, 40, 32\]: use"),
    "v-2d": (swapped(v=V[0, 0]), {}, ValueError, r"v has shape \[40, 32\]: use"),
    "q-scalar": (swapped(q=torch.tensor(1.0)), {}, ValueError, r"q has shape \[\]: use"),
    "q-list": (swapped(q=[1.0]), {}, TypeError, r"q=\[1\.0\]: expected a tensor"),
    "q-none": (swapped(q=None), {}, TypeError, "q=None: expected a tensor"),
    "v-list": (swapped(v=[1.0]), {}, TypeError, r"v=\[1\.0\]: expected a tensor"),
    "q-int": (swapped(q=Q.int()), {}, TypeError, "q has dtype int32: use float64, float32, float16 or bfloat16"),
    "k-dtype": (swapped(k=K.half()), {}, TypeError, "k has dtype float16 and q float32: use one dtype"),
    "v-dtype": (swapped(v=V.double()), {}, TypeError, "v has dtype float64 and q float32: use one dtype"),
    "k-device": (swapped(k=K.to("meta")), {}, ValueError, r"k is on meta and q on cpu: move one with \.to\(\)"),
    "v-device": (swapped(v=V.to("meta")), {}, ValueError, r"v is on meta and q on cpu: move one with \.to\(\)"),
    "k-batch": (swapped(k=K.expand(3, -1, -1, -1)), {}, ValueError, "k has batch 3 and q 1: they must be equal"),
    "v-batch": (swapped(v=V.expand(2, -1, -1, -1)), {}, ValueError, "v has batch 2 and q 1: they must be equal"),
    "kv-length": (swapped(v=V[:, :, :39]), {}, ValueError, "k has 2 heads of length 40 and v 2 of 39: they must"),
    "kv-heads": (swapped(v=V[:, :1]), {}, ValueError, "k has 2 heads of length 40 and v 1 of 40: they must"),
    "head-dim": (swapped(k=K[..., :31]), {}, ValueError, "k has head_dim 31 and q 32: they must be equal"),
    "groups": (swapped(q=drawn(1, 3, 40, 32)), {}, ValueError, "q has 3 heads and k 2: .* multiple of k's"),
    "fewer-q-heads": (swapped(q=Q[:, :1]), {}, ValueError, "q has 1 heads and k 2: .* multiple of k's"),
    "no-heads": (swapped(q=Q[:, :0]), {}, ValueError, "q has 0 heads and head_dim 32: use at least 1"),
    "no-dim": (swapped(q=Q[..., :0], k=K[..., :0]), {}, ValueError, "q has 2 heads and head_dim 0: use at least 1"),
    "q-numpy": (swapped(q=Q.numpy()), {}, TypeError, r"q=a numpy\.ndarray: expected a tensor"),
    "k-sparse": (swapped(k=K.to_sparse()), {}, TypeError, r"k has layout torch\.sparse_coo: use .*\.to_dense\(\)"),
    "q-nested": (
        swapped(q=torch.nested.nested_tensor([Q[0], Q[0]])),
        {},
        TypeError,
        r"q is a nested tensor: .* kp\.masks\.documents",
    ),
    "scale-nan": (swapped(), {"scale": math.nan}, ValueError, "scale=nan: use a finite number"),
    "scale-inf": (swapped(), {"scale": -math.inf}, ValueError, "scale=-inf: use a finite number"),
    "scale-bool": (swapped(), {"scale": True}, ValueError, "scale=True: use a finite number"),
    "scale-text": (swapped(), {"scale": "1"}, ValueError, "scale='1': use a finite number"),
    "scale-tensor": (swapped(), {"scale": torch.tensor(1.0)}, ValueError, r"scale=a tensor of float32\[\]: use a"),
    "mask-tensor": (
        swapped(mask=torch.ones(40, 40).bool()),
        {},
        TypeError,
        r"mask=.*; kp\.masks\.from_dense takes",
    ),
    "mask-text": (swapped(mask="causal"), {}, TypeError, "mask='causal': expected a mask"),
    "mask-function": (swapped(mask=causal), {}, TypeError, "mask=<function causal.*: expected a mask"),
    "table-size": (swapped(mask=blocks(TABLE, 16) & blocks(TABLE[:2], 16)), {}, ValueError, "table has 2x3 .* 3x3"),
    "table-lengths": (swapped(mask=blocks(TABLE)), {}, ValueError, "table has 3x3 tiles of 128: 40 queries"),
    "documents": (swapped(mask=documents([20, 21])), {}, ValueError, "lengths sum to 41: there are 40 keys"),
    "mask-batch": (swapped(mask=documents([[40]] * 3)), {}, ValueError, "mask is for a batch of 3 and q has 1"),
    "mask-heads": (
        swapped(mask=blocks(TABLE.expand(4, 3, 3), 16)),
        {},
        ValueError,
        "mask is for 4 heads and q has 2: give a table for each q head or one",
    ),
    "kernel-unknown": (
        swapped(),
        {"kernel": "flash3"},
        ValueError,
        "kernel='flash3': attention has no such kernel on cpu; it has native, cpu-flash, tiled",
    ),
    "kernel-refuses": (
        swapped(mask=window(3)),
        {"kernel": "cpu-flash"},
        kp.UnsupportedCallError,
        r"cpu-flash: knows full and causal with as many queries as keys; the mask is window\(3\)",
    ),
    "kernel-refuses-dim": (
        swapped(v=V[..., :16]),
        {"kernel": "cpu-flash"},
        kp.UnsupportedCallError,
        "cpu-flash: needs one head_dim; v has 16 and q 32",
    ),
}


@pytest.mark.parametrize(("arguments", "keywords", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_kernel(*_: Any) -> Any:
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr(Kernel, "function", no_kernel)
    with pytest.raises(error, match=message):
        kp.attention(*arguments, **keywords)
    with pytest.raises(error, match=message):
        kp.explain(kp.attention, *arguments, **keywords)


def test_a_good_call_before_does_not_let_a_bad_one_pass() -> None:
    kp.attention(Q, K, V, causal(), scale=1.0)
    with pytest.raises(ValueError, match="scale=True"):
        kp.attention(Q, K, V, causal(), scale=True)
    with pytest.raises(ValueError, match="lengths sum to 41"):
        torch.ops.kernel_pytorch.attention.default(Q, K, V, documents([41]).code, 1.0, "grad", "")


def test_jit_trace_is_refused() -> None:
    with pytest.raises(
        NotImplementedError, match=r"torch\.jit\.trace cannot trace kp\.attention: use torch\.export"
    ):
        torch.jit.trace(lambda q: kp.attention(q, K, V), Q)


def test_no_mask_is_the_full_mask() -> None:
    assert torch.equal(kp.attention(Q, K, V), kp.attention(Q, K, V, full()))
    expected = torch.nn.functional.scaled_dot_product_attention(Q, K, V)
    torch.testing.assert_close(kp.attention(Q, K, V, None), expected)


# Nothing to compute, nothing to attend to.


@any_mask
@pytest.mark.parametrize(
    "shape", [{"q_len": 0, "kv_len": 7}, {"q_len": 5, "kv_len": 0}, {"q_len": 0}, {"batch": 0}], ids=str
)
@pytest.mark.parametrize("mask", [full(), causal() & (window(3) | sinks(1))], ids=str)
def test_empty_tensors(shape: dict[str, int], mask: Mask, kernel: str, dtype: torch.dtype) -> None:
    qkv = heads(**shape, dtype=dtype)
    with on(kernel):
        for pinned in (kernel, None):
            out, lse, *gradients = everything(qkv, mask, pinned)
            assert out.shape == qkv[0].shape
            assert lse.shape == out.shape[:3]
            assert (out == 0).all()
            assert (lse == -math.inf).all()
            for gradient, x in zip(gradients, qkv, strict=True):
                assert gradient.shape == x.shape
                assert (gradient == 0).all()


NOTHING: dict[str, tuple[Mask, Callable[[torch.Tensor], torch.Tensor]]] = {
    "more-queries": (causal(), lambda i: i < 30),
    "window-before-the-keys": (window(4), lambda i: i < 30),
    "no-sinks": (sinks(0), lambda i: i >= 0),
    "documents": (documents([7, 33]), lambda i: i < 30),
    "an-empty-block-row": (
        blocks(torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 1], [1, 1, 1], [1, 1, 1]], dtype=torch.bool), 16),
        lambda i: (i >= 16) & (i < 32),
    ),
    "some-of-a-tile": (causal() & prefix(3), lambda i: (i < 30) | (i >= 33)),
}


@any_mask
@pytest.mark.parametrize("name", NOTHING)
def test_queries_that_attend_to_nothing(name: str, kernel: str, dtype: torch.dtype) -> None:
    """Zeros and -inf exactly, no gradient at all, and no NaN anywhere, whatever the others do."""
    mask, rows = NOTHING[name]
    qkv = heads(batch=2, q_len=70, kv_len=40, dtype=dtype)
    nothing = rows(torch.arange(70))
    assert torch.equal(~mask.dense(70, 40).any(dim=-1)[0, 0], nothing)
    with on(kernel):
        out, lse, dq, dk, dv = everything(qkv, mask, kernel)
    assert (out[:, :, nothing] == 0).all()
    assert (lse[:, :, nothing] == -math.inf).all()
    assert (dq[:, :, nothing] == 0).all()
    assert lse[:, :, ~nothing].isfinite().all()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))
    unseen = ~mask.dense(70, 40).any(dim=-2)[0, 0]
    assert (dk[:, :, unseen] == 0).all()
    assert (dv[:, :, unseen] == 0).all()


@in_float32
def test_huge_scores_of_pairs_that_do_not_attend(kernel: str) -> None:
    """exp() of what is masked may overflow on the way: nothing of it may stay."""
    q, k, v = heads(q_len=70)
    k = k.clone()
    k[:, :, 40:] *= 1e4
    with on(kernel):
        found = everything((q, k, v), causal() & window(50), kernel)
        small = everything((q[:, :, :40], k[:, :, :40], v[:, :, :40]), causal() & window(50), kernel)
    assert all(x.isfinite().all() for x in found)
    torch.testing.assert_close(found[0][:, :, :40], small[0])
    torch.testing.assert_close(found[1][:, :, :40], small[1])


# Gradients.


@pytest.mark.parametrize(
    "mask",
    [causal(), window(2, 1), causal() & (window(2) | sinks(1)), documents([2, 4], causal()), prefix(3)],
    ids=str,
)
def test_gradcheck(mask: Mask) -> None:
    q, k, v = (x.requires_grad_() for x in heads(1, 2, 1, 7, 6, 3, 2, dtype=torch.float64))

    def both(*qkv: torch.Tensor) -> Any:
        out, lse = kp.attention(*qkv, mask, return_lse=True, kernel="tiled")
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(both, (q, k, v))
    assert torch.autograd.gradcheck(lambda *qkv: kp.attention(*qkv, mask, kernel="tiled"), (q, k, v))


@any_mask
def test_lse_takes_a_gradient(kernel: str, dtype: torch.dtype) -> None:
    budgeted(heads(q_len=50, dtype=dtype), causal() & window(20), kernel, lse_grad=True)


@in_float32
def test_only_the_lse_takes_a_gradient(kernel: str) -> None:
    """Its derivative by the scores is the softmax: the gradient of v is zero, that of q the mean key."""
    q, k, v = (x.requires_grad_() for x in heads(q_len=33))
    with on(kernel):
        _, lse = kp.attention(q, k, v, causal(), scale=0.5, return_lse=True, kernel=kernel)
        dq, dv = torch.autograd.grad(lse.sum(), (q, v))
    p = torch.where(causal().dense(33, 33), q @ k.mT * 0.5, -math.inf).softmax(dim=-1)
    torch.testing.assert_close(dq, p @ k * 0.5)
    assert (dv == 0).all()


def test_an_unused_lse_changes_nothing() -> None:
    with_lse = everything((Q, K, V), window(5), "tiled", lse=False)
    leaves = [x.detach().requires_grad_() for x in (Q, K, V)]
    out, lse = kp.attention(*leaves, window(5), return_lse=True, kernel="tiled")
    assert (lse.dtype, lse.requires_grad) == (torch.float32, True)
    found = torch.autograd.grad(out, leaves, drawn(*out.shape, seed=99))
    for ours, expected in zip((out, *found), with_lse, strict=True):
        assert torch.equal(ours, expected)


def test_lse_without_gradients_stays_with_the_fast_kernel() -> None:
    assert kp.explain(kp.attention, Q, K, V, causal(), return_lse=True).kernel.name == "native"
    leaf = Q.clone().requires_grad_()
    choice = kp.explain(kp.attention, leaf, K, V, causal(), return_lse=True)
    assert choice.kernel.name == "native"
    assert any("no gradient through the log-sum-exp" in verdict.reason for verdict in choice.verdicts)


@pytest.mark.parametrize("scale", [-0.3, 0.0, -0.0, 1e-3, 3])
@pytest.mark.parametrize("mask", [causal(), causal() & window(9)], ids=str)
@in_float32
def test_any_scale(kernel: str, mask: Mask, scale: float) -> None:
    budgeted(heads(q_len=40), mask, kernel, scale=scale)


def test_torch_is_not_asked_for_a_scale_it_gets_wrong() -> None:
    """Its causal mask multiplies -inf by the scale: NaN at zero, and infinity below."""
    for scale in (-0.3, 0.0, 1e-60):
        choice = kp.explain(kp.attention, Q, K, V, causal(), scale=scale)
        assert choice.kernel.name == "native"
        assert any("takes a positive scale" in verdict.reason for verdict in choice.verdicts)
        assert kp.attention(Q, K, V, causal(), scale=scale).isfinite().all()


# Selection.


@pytest.mark.parametrize(
    ("device", "dtype", "dim", "mask", "kernel"),
    [
        (None, torch.float32, 64, full(), "native"),
        (None, torch.bfloat16, 64, causal(), "native"),
        (None, torch.float64, 64, causal(), "cpu-flash"),
        (None, torch.float32, 300, causal(), "native"),
        (None, torch.float32, 64, window(5), "native"),
        (None, torch.float64, 64, window(5), "tiled"),
        (H200, torch.bfloat16, 128, causal(), "cudnn"),
        (H200, torch.float16, 64, full(), "cudnn"),
        (H200, torch.bfloat16, 256, causal(), "flash"),
        (H200, torch.bfloat16, 128, causal() & window(20), "triton"),
        (H200, torch.float32, 128, causal(), "triton"),
        (H200, torch.bfloat16, 300, causal(), "tiled"),
        (H200, torch.float64, 64, causal(), "tiled"),
        ("nvidia/a100", torch.bfloat16, 64, causal(), "flash"),
        ("amd/mi300x", torch.bfloat16, 64, window(5), "triton"),
    ],
)
def test_selection(device: str | None, dtype: torch.dtype, dim: int, mask: Mask, kernel: str) -> None:
    choice = kp.explain(kp.attention, *heads(dim=dim, dtype=dtype), mask, device=device)
    assert choice.kernel.name == kernel, str(choice)
    assert {verdict.kernel for verdict in choice.verdicts} == {
        each.name for each in registry.backend(choice.device.backend).kernels if each.op == "attention"
    }
    assert [verdict.kernel for verdict in choice.verdicts if verdict.chosen] == [kernel]
    assert all(len(verdict.reason) > 10 for verdict in choice.verdicts)
    assert str(mask) in str(choice)


MIXED = [
    pytest.param(
        first,
        second,
        case,
        id=f"{first}-{second}-{case}",
        marks=[needs_interpreter] * ("triton" in (first, second)),
    )
    for case, kernels in (
        ("causal", ("cpu-flash", "native", "tiled", "triton")),
        ("window-and-sinks", ("native", "tiled", "triton")),
    )
    for first in kernels
    for second in kernels
    if first != second
]


@pytest.mark.parametrize(("first", "second", "case"), MIXED)
def test_a_backward_takes_the_results_of_another_kernels_forward(first: str, second: str, case: str) -> None:
    """Records choose the two apart, so that all kernels must mean the same by out and lse."""
    function = function_of(ATTENTION)

    class Mixed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            with on(first):
                out, lse = function.run("forward", arguments, Policy(kernel=first).encoded)
            ctx.saved = (*arguments[:3], out, lse, *arguments[3:])
            return out, lse

        @staticmethod
        def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> Any:
            with on(second):
                found = function.run("backward", (dout, dlse, *ctx.saved), Policy(kernel=second).encoded)
            return (*found, None, None, None)

    def run(*arguments: Any) -> Any:
        out, lse = Mixed.apply(*arguments)
        return out, lse.detach()

    compared = compare(ATTENTION, run, ATTENTION.case(case).arguments(torch.float32, torch.device("cpu")))
    assert {one.tensor for one in compared} == {"out", "lse", "dq", "dk", "dv"}
    assert not exceeded(compared), exceeded(compared)


def test_causal_with_unequal_lengths_is_not_left_to_torch() -> None:
    """torch aligns causal to the first key; ours is aligned to the last."""
    choice = kp.explain(kp.attention, *heads(q_len=20, kv_len=40), causal())
    assert choice.kernel.name == "native"
    assert any("as many queries as keys" in verdict.reason for verdict in choice.verdicts)
    assert (
        kp.explain(kp.attention, *heads(q_len=20, kv_len=40, dtype=torch.float64), full()).kernel.name
        == "cpu-flash"
    )


@pytest.mark.parametrize(
    ("mask", "q_len", "simple"),
    [
        (causal(), 1, full()),
        (causal() & window(500), 40, causal()),
        (causal() & full(), 40, causal()),
        (documents([40]), 40, full()),
        (window(40, 40), 40, full()),
        (causal() & window(20), 40, None),
    ],
    ids=str,
)
def test_masks_that_are_full_or_causal_reach_the_dense_kernels(mask: Mask, q_len: int, simple: Mask | None) -> None:
    q, k, v = heads(q_len=q_len, kv_len=40, dtype=torch.bfloat16)
    choice = kp.explain(kp.attention, q, k, v, mask, device=H200)
    assert choice.call["mask"] == (mask if simple is None else simple)
    assert choice.kernel.name == ("triton" if simple is None else "cudnn")


def test_grouped_keys_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_pytorch.ops.attention import cpu_flash_kernel

    if cpu_flash_kernel.TORCH_VERSION < (2, 13):
        pytest.skip("torch's operators for processors take grouped heads from 2.13 on")
    monkeypatch.setattr(cpu_flash_kernel, "repeated", None)
    leaves = [x.requires_grad_() for x in heads(q_len=40)]
    kp.attention(*leaves, causal(), kernel="cpu-flash").sum().backward()


@pytest.mark.parametrize(
    "mask", [causal() & window(20), documents([0, 30, 10], causal()), blocks(TABLE, 16)], ids=str
)
def test_without_gradients_out_is_the_same(mask: Mask) -> None:
    """Where nobody needs the log-sum-exp a kernel may leave it out, and nothing else."""
    function = function_of(ATTENTION)
    with poisoned():
        out, _ = function(Q, K, V, mask, 0.2, "out", kernel="tiled")
        whole, _ = function(Q, K, V, mask, 0.2, "grad", kernel="tiled")
    torch.testing.assert_close(out, whole)
