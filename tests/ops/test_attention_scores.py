"""Soft-capping, bias, ALiBi and sink logits of kp.attention, in eager mode, compiled and exported; autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.masks import Mask, blocks, causal, full, padding, window
from kernel_pytorch.ops.attention.hugging_face import attention_forward
from kernel_pytorch.ops.attention.score_mod import SCORE_MOD_ATTENTION
from kernel_pytorch.testing.budget import compare, exceeded
from kernel_pytorch.testing.devices import pretend


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
        ({"bias": torch.zeros(3, 9, 9)}, ValueError, r"bias has shape \[1, 3, 9, 9\].*here \[1, 2, 9, 9\]"),
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
            {"sink_logits": torch.zeros(2, device="meta")},
            ValueError,
            "sink_logits is on meta and q on cpu: move one",
        ),
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


@pytest.mark.parametrize("shape", [(9,), (9, 9), (2, 9, 9), (9, 1), ()])
def test_a_bias_broadcasts_from_fewer_dimensions(shape):
    q, bias = torch.randn(1, 2, 9, 8), torch.randn(shape, requires_grad=True)
    whole = bias.detach().expand(1, 2, 9, 9).clone().requires_grad_()
    out, expected = (kp.attention(q, q, q, causal(), bias=b) for b in (bias, whole))
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(bias.grad, whole.grad.sum_to_size(shape))


def test_autocast_is_honoured():
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = kp.attention(q, k, v, causal())
        known = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.dtype == known.dtype == torch.bfloat16
    wide = [x.double() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        assert kp.attention(*wide, causal()).dtype == torch.float64


# The Triton kernel, in the interpreter, against float64.


def arguments(
    shape: tuple[int, int, int, int, int, int],
    mask: Mask,
    *,
    bias: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    wanted: str = "lse",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    torch.manual_seed(0)
    batch, heads, kv_heads, q_len, kv_len, dim = shape
    return {
        "q": torch.randn(batch, heads, q_len, dim, dtype=dtype),
        "k": torch.randn(batch, kv_heads, kv_len, dim, dtype=dtype),
        "v": torch.randn(batch, kv_heads, kv_len, dim, dtype=dtype),
        "mask": mask,
        "scale": dim**-0.5,
        "wanted": wanted,
        "bias": bias,
        "slopes": slopes,
        "sinks": sinks,
        "softcap": softcap,
        "bias_grad": bias is not None,
    }


def held_to_budget(values: dict[str, Any]) -> None:
    with pretend(kp.device("nvidia/h200")):
        compared = compare(SCORE_MOD_ATTENTION, function_of(SCORE_MOD_ATTENTION).pinned("triton"), values)
    assert not exceeded(compared), exceeded(compared)
    assert all(torch.tensor(row.budget).isfinite() for row in compared)


SHAPE = (2, 4, 2, 19, 23, 16)


@pytest.mark.parametrize(
    "of",
    [
        (1, 1, 1, 1),
        (1, 4, 1, 1),
        (2, 1, 19, 1),
        (1, 1, 1, 23),
        (2, 4, 1, 23),
        (2, 4, 19, 23),
        (1, 4, 19, 23),
        (2, 1, 19, 23),
    ],
    ids=str,
)
def test_triton_bias_broadcast_in_each_dimension(of):
    held_to_budget(arguments(SHAPE, causal(), bias=torch.randn(of), sinks=torch.randn(4)))


def test_triton_batch_entries_that_share_a_bias_add_up_over_launches(monkeypatch):
    from kernel_pytorch.ops.attention import triton_kernel

    bytes_of_two_entries = 2 * 4 * 2 * 20 * 20
    monkeypatch.setattr(triton_kernel, "_BIAS_GRADIENT_BYTES", bytes_of_two_entries)
    entries = []
    buffers = triton_kernel._bias_gradients
    monkeypatch.setattr(
        triton_kernel, "_bias_gradients", lambda *a: (found := buffers(*a), entries.append(len(found[0])))[0]
    )
    held_to_budget(arguments((5, 2, 1, 20, 20, 16), full(), bias=torch.randn(1, 2, 20, 20), softcap=3.0))
    assert entries == [2]


def left_out_rows(like: torch.Tensor) -> torch.Tensor:
    like[..., ::3] = -torch.inf
    like[..., 5, :] = -torch.inf
    return like


TERMS: dict[str, Callable[[], dict[str, Any]]] = {
    "transposed bias": lambda: {"bias": torch.randn(1, 4, 23, 19).transpose(2, 3)},
    "float64 bias": lambda: {"bias": torch.randn(1, 1, 19, 23, dtype=torch.float64)},
    "rows left out": lambda: {"bias": left_out_rows(torch.randn(1, 4, 19, 23))},
    "rows left out beside sinks": lambda: {
        "bias": left_out_rows(torch.randn(2, 1, 19, 23)),
        "sinks": torch.tensor([0.5, -torch.inf, 30.0, -30.0]),
    },
    "softcap 1e-3": lambda: {"softcap": 1e-3},
    "softcap 1e4": lambda: {"softcap": 1e4},
    "steep slopes": lambda: {"slopes": torch.tensor([1e3, 30.0, 0.0, 1.0])},
    "everything": lambda: {
        "softcap": 2.0,
        "slopes": torch.rand(4),
        "bias": torch.randn(1, 4, 19, 23),
        "sinks": torch.randn(4),
    },
}


@pytest.mark.parametrize("mask", [window(9, 4), blocks(torch.eye(2, dtype=torch.bool), block=16)], ids=str)
@pytest.mark.parametrize("name", TERMS)
def test_triton_terms(name, mask):
    held_to_budget(arguments(SHAPE, mask, **TERMS[name]()))


@pytest.mark.parametrize("wanted", ["grad", "parts"])
def test_triton_mixed_formats(wanted):
    terms = {"bias": torch.randn(1, 4, 19, 23), "sinks": torch.randn(4, dtype=torch.bfloat16)}
    held_to_budget(arguments(SHAPE, causal(), dtype=torch.float16, wanted=wanted, softcap=5.0, **terms))


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)], ids=str)
def test_triton_empty_tensors(lengths):
    held_to_budget(arguments((1, 2, 1, *lengths, 16), full(), sinks=torch.randn(2), softcap=1.0))


def test_triton_stores_no_score_gradients_for_a_bias_without_gradient(monkeypatch):
    from kernel_pytorch.ops.attention import triton_kernel

    made = []
    buffers = triton_kernel._bias_gradients
    monkeypatch.setattr(triton_kernel, "_bias_gradients", lambda *a: (made.append(found := buffers(*a)), found)[1])
    q = torch.randn(1, 2, 20, 16, requires_grad=True)
    bias = torch.randn(1, 2, 20, 20)
    with pretend(kp.device("nvidia/h200")):
        for trained in (bias, bias.clone().requires_grad_()):
            kp.attention(q, q, q, bias=trained, kernel="triton").sum().backward()
    assert made[0] == (None, None)
    assert made[1][0].shape == (1, 2, 20, 20)


# What a model on an H200 gets.


def explained(function: Callable[..., Any], *values: Any, **terms: Any) -> tuple[str, str]:
    choice = kp.explain(function, *values, device="nvidia/h200", **terms)
    return choice.call.op, choice.kernel.name


@pytest.mark.parametrize(
    "terms",
    [
        {"softcap": 50.0, "is_causal": True},
        {"s_aux": torch.zeros(4, dtype=torch.bfloat16)},
        {"position_bias": torch.zeros(1, 4, 32, 32, dtype=torch.bfloat16, requires_grad=True), "is_causal": False},
        {"attention_mask": torch.randn(2, 1, 32, 32)},
    ],
    ids=["Gemma 2", "gpt-oss", "T5", "additive mask"],
)
def test_hugging_face_models_reach_triton(terms):
    q = torch.zeros(2, 4, 32, 64, dtype=torch.bfloat16)
    mask = terms.get("attention_mask")
    rest = {name: value for name, value in terms.items() if name != "attention_mask"}
    found = explained(attention_forward, torch.nn.Module(), q, q, q, mask, **rest)
    assert found == ("score_mod_attention", "triton")


def test_attention_everywhere_reaches_triton():
    q = torch.zeros(2, 4, 32, 64, dtype=torch.bfloat16)

    def model():
        with kp.attention_everywhere():
            return functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.randn(32, 32).to(q.dtype))

    assert explained(model) == ("score_mod_attention", "triton")


def test_a_wide_head_is_refused_with_its_reason():
    q = torch.zeros(1, 2, 9, 288, dtype=torch.bfloat16)
    choice = kp.explain(kp.attention, q, q, q, softcap=3.0, device="nvidia/h200")
    assert choice.kernel.name == "tiled"
    assert "triton  holds a head in registers: head_dim 288 exceeds 256" in str(choice)
