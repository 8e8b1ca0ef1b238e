"""Soft-capping, bias, ALiBi and sink logits of kp.attention, in eager mode, compiled and exported; autocast."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import kernel_pytorch as kp
from kernel_pytorch.masks import causal, padding, window


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def with_sinks(q, k, v, sinks, keep):
    """The definition: one more column of scores, whose probability is dropped."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~keep, -torch.inf)
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    every = torch.cat([scores, column], dim=-1)
    return every.softmax(-1)[..., :-1] @ v, every.logsumexp(-1)


@pytest.mark.parametrize("mask", [causal(), causal() & window(5), causal() & padding([9, 4, 17], "left")], ids=str)
def test_sink_logits_in_float64(mask):
    torch.manual_seed(0)
    tensors = [drawn(3, 4, 17, 8), drawn(3, 2, 17, 8), drawn(3, 2, 17, 8), drawn(4)]
    out, lse = kp.attention(*tensors[:3], mask, sink_logits=tensors[3], return_lse=True)
    expected = with_sinks(*tensors, mask.dense(17, 17))
    torch.testing.assert_close((out, lse), expected)
    upstream = [torch.randn_like(x) for x in expected]
    found = torch.autograd.grad((out, lse), tensors, upstream)
    torch.testing.assert_close(found, torch.autograd.grad(expected, tensors, upstream))


def test_a_sink_of_minus_infinity_changes_nothing():
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    out, lse = kp.attention(q, k, v, causal(), return_lse=True)
    sinks = torch.full((2,), -torch.inf, requires_grad=True)
    found, found_lse = kp.attention(q, k, v, causal(), sink_logits=sinks, return_lse=True)
    torch.testing.assert_close((found, found_lse), (out, lse))
    nothing = kp.attention(q, k[:, :, :3], v[:, :, :3], causal(), sink_logits=sinks)
    assert (nothing[:, :, :3] == 0).all()
    nothing.sum().backward()
    assert not sinks.grad.isnan().any()


def test_bf16_sinks_round_once():
    torch.manual_seed(0)
    tensors = [drawn(2, 4, 64, 32, dtype=torch.bfloat16) for _ in range(3)] + [drawn(4, dtype=torch.bfloat16)]
    exact, _ = with_sinks(*(x.double() for x in tensors), causal().dense(64, 64))
    out = kp.attention(*tensors[:3], causal(), sink_logits=tensors[3])
    assert out.dtype == torch.bfloat16
    error = (out.double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + 1e-5).all()  # one rounding to 8 bits
    out.float().sum().backward()
    assert all(x.grad.dtype == torch.bfloat16 for x in tensors)


SCORES = {
    "softcap": lambda: {"softcap": 2.0},
    "bias": lambda: {"bias": torch.randn(1, 2, 9, 9, requires_grad=True)},
    "alibi": lambda: {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "sinks": lambda: {"sink_logits": torch.randn(2, requires_grad=True)},
}


@pytest.mark.parametrize("name", SCORES)
def test_compiled_and_exported(name):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    terms = SCORES[name]()

    class Attends(torch.nn.Module):
        def forward(self, q, k, v, terms):
            return kp.attention(q, k, v, causal(), **terms)

    leaves = [x.requires_grad_() for x in (q, k, v)] + [
        x for x in terms.values() if isinstance(x, torch.Tensor) and x.requires_grad
    ]
    expected = Attends()(q, k, v, terms)
    wanted = torch.autograd.grad(expected.square().sum(), leaves)
    compiled = torch.compile(Attends(), fullgraph=True, backend="aot_eager")(q, k, v, terms)
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(torch.autograd.grad(compiled.square().sum(), leaves), wanted)
    exported = torch.export.export(Attends(), (q, k, v, terms)).module()
    torch.testing.assert_close(exported(q, k, v, terms), expected)


def test_plain_calls_keep_their_op():
    q = torch.ones(1, 2, 9, 8)
    assert kp.explain(kp.attention, q, q, q, causal()).call.op == "attention"
    assert kp.explain(kp.attention, q, q, q, causal(), sink_logits=torch.zeros(2)).call.op == "attention"
    choice = kp.explain(kp.attention, q, q, q, causal(), softcap=3.0, device="nvidia/h200")
    assert (choice.call.op, choice.kernel.name) == ("score_mod_attention", "triton")


@pytest.mark.parametrize(
    ("terms", "error", "message"),
    [
        ({"dropout_p": 0.1}, ValueError, "dropout_p=0.1: kp.attention is exact.*attention_dropout=0.0"),
        ({"softcap": 0.0}, ValueError, "softcap=0: use a number above 0"),
        ({"softcap": -1.0}, ValueError, "softcap=-1.0: use a number above 0"),
        ({"bias": torch.zeros(9, 9)}, ValueError, r"bias has shape \[9, 9\].*here \[1, 2, 9, 9\]"),
        (
            {"bias": torch.zeros(1, 1, 9, 9, dtype=torch.int64)},
            TypeError,
            "bias=int64: expected a tensor of float64",
        ),
        (
            {"alibi_slopes": torch.zeros(3)},
            ValueError,
            r"alibi_slopes has shape \[3\]: use one for each of 2 q heads",
        ),
        ({"alibi_slopes": torch.zeros(2, requires_grad=True)}, ValueError, "alibi_slopes requires a gradient"),
        (
            {"sink_logits": torch.zeros(3)},
            ValueError,
            r"sink_logits has shape \[3\]: use one for each of 2 q heads",
        ),
        ({"sink_logits": 1.0}, TypeError, "sink_logits=1.0: expected a tensor"),
        (
            {"softcap": 1.0, "kernel": "triton"},
            ValueError,
            "kernel='triton': score_mod_attention has no such kernel",
        ),
    ],
)
def test_bad_input(terms, error, message):
    q = torch.ones(1, 2, 9, 8)
    with pytest.raises(error, match=message):
        kp.attention(q, q, q, causal(), **terms)


def test_autocast_is_honoured():
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = kp.attention(q, k, v, causal())
        known = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.dtype == known.dtype == torch.bfloat16
    wide = [x.double() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        assert kp.attention(*wide, causal()).dtype == torch.float64
