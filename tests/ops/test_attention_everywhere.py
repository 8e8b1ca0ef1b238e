"""kp.attention_everywhere against scaled_dot_product_attention: every kind of mask, gradients, what is left."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn import functional

import kernel_pytorch as kp

sdpa = functional.scaled_dot_product_attention


def drawn(q_len: int = 9, kv_len: int = 9, heads: int = 4, kv_heads: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(2, heads, q_len, 8), (2, kv_heads, kv_len, 8), (2, kv_heads, kv_len, 8)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def compare(tensors: list[torch.Tensor], **options) -> kp.ops.attention.everywhere.ReplacedCalls:
    expected = sdpa(*tensors, **options)
    with kp.attention_everywhere() as calls:
        found = sdpa(*tensors, **options)
    torch.testing.assert_close(found, expected)
    leaves = [*tensors] + [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(expected, leaves, upstream)
    )
    return calls


def test_full_and_causal():
    assert dict(compare(drawn()).masks) == {"full()": 1}
    assert dict(compare(drawn(), is_causal=True).masks) == {"causal()": 1}
    assert dict(compare(drawn(), scale=0.3).masks) == {"full()": 1}


@pytest.mark.parametrize("lengths", [(5, 9), (9, 5)])
def test_causal_counts_from_the_first_query_and_key(lengths):
    assert compare(drawn(*lengths), is_causal=True).served == 1


BAND = kp.masks.causal() & kp.masks.window(3)
BOOLEANS = {
    "all true": (torch.ones(9, 9, dtype=torch.bool), "full()"),
    "causal": (kp.masks.causal().dense(9, 9), "causal()"),
    "band": (BAND.dense(9, 9)[0], "intervals(9 queries, 1 a query)"),
    "left padding": (kp.masks.padding([3, 9], "left").dense(9, 9), "intervals(batch=2, 9 queries, 1 a query)"),
    "keys alone": (torch.arange(9).view(1, 1, 1, 9) < 5, "intervals(9 queries, 1 a query)"),
    "rows without a key": (torch.arange(9).view(1, 9, 1) > 3, "intervals(9 queries, 1 a query)"),
    "by head": (torch.rand(1, 4, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.7, "full() with a bias"),
}


@pytest.mark.parametrize("name", BOOLEANS)
def test_boolean_masks(name):
    keep, shown = BOOLEANS[name]
    assert dict(compare(drawn(), attn_mask=keep).masks) == {shown: 1}


def test_additive_masks():
    for lowest in (-torch.inf, torch.finfo(torch.float32).min):
        added = torch.zeros(9, 9, dtype=torch.float64).masked_fill_(~BAND.dense(9, 9)[0, 0], lowest)
        assert dict(compare(drawn(), attn_mask=added).masks) == {"intervals(9 queries, 1 a query)": 1}
    learned = torch.randn(1, 4, 9, 9, dtype=torch.float64, requires_grad=True)
    assert dict(compare(drawn(), attn_mask=learned).masks) == {"full() with a bias": 1}


def test_a_mask_that_changes_is_read_again():
    tensors, keep = drawn(), torch.ones(9, 9, dtype=torch.bool)
    with kp.attention_everywhere() as calls:
        for _ in range(2):
            sdpa(*tensors, attn_mask=keep)
        keep.tril_()
        found = sdpa(*tensors, attn_mask=keep)
    assert dict(calls.masks) == {"full()": 2, "causal()": 1}
    torch.testing.assert_close(found, sdpa(*tensors, attn_mask=keep))


def test_grouped_heads_and_three_dimensions():
    assert compare(drawn(kv_heads=2), enable_gqa=True).served == 1
    three = [x.detach()[0].requires_grad_() for x in drawn()]
    assert compare(three, is_causal=True).served == 1
    assert compare(three, attn_mask=torch.rand(4, 9, 9) < 0.8).served == 1


def test_calls_left_to_torch():
    q, k, v = drawn()
    with kp.attention_everywhere() as calls:
        torch.manual_seed(3)
        dropped = sdpa(q, k, v, dropout_p=0.5)
        sdpa(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0))
        sdpa(q, k[:1], v[:1])
        with pytest.raises(RuntimeError):
            sdpa(q, k[:, :2], v[:, :2])
        torch.func.vmap(sdpa)(q[None], k[None], v[None])
    torch.manual_seed(3)
    torch.testing.assert_close(dropped, sdpa(q, k, v, dropout_p=0.5))
    assert calls.served == 0
    reasons = " | ".join(calls.left_to_torch)
    for reason in ("dropout_p=0.5", "query has 5 dimensions", "are broadcast", "without enable_gqa", "torch.func"):
        assert reason in reasons
    assert str(calls).count("left to torch") == len(calls.left_to_torch)


def test_a_pinned_kernel_that_refuses_leaves_the_call_to_torch():
    q, k, v = (x.detach() for x in drawn())
    with kp.attention_everywhere(kernel="native") as calls:
        sdpa(q, k, v)
    assert calls.served == 0
    assert "native" in next(iter(calls.left_to_torch))


def test_other_threads_keep_theirs():
    q, k, v = drawn()
    with kp.attention_everywhere() as calls:
        thread = threading.Thread(target=lambda: sdpa(q, k, v))
        thread.start()
        thread.join()
        assert calls.served == 0
        sdpa(q, k, v)
    assert calls.served == 1


MULTI_HEAD_MASKS = {
    "none": {},
    "causal flag": {"attn_mask": torch.ones(7, 7, dtype=torch.bool).triu(1), "is_causal": True},
    "band": {"attn_mask": ~BAND.dense(7, 7)[0, 0]},
    "padding": {"key_padding_mask": torch.arange(7) >= torch.tensor([[4], [7]])},
    "addends": {"attn_mask": torch.randn(7, 7, dtype=torch.float64)},
    "addends of each head and padding": {
        "attn_mask": torch.randn(8, 7, 7, dtype=torch.float64),
        "key_padding_mask": torch.arange(7) >= torch.tensor([[4], [7]]),
    },
    "causal flag and padding": {
        "attn_mask": torch.ones(7, 7, dtype=torch.bool).triu(1),
        "is_causal": True,
        "key_padding_mask": torch.arange(7) >= torch.tensor([[4], [7]]),
    },
}


@pytest.mark.parametrize("masks", MULTI_HEAD_MASKS)
@pytest.mark.parametrize("other", ["self", "cross", "other sizes", "not batched"])
def test_multi_head_attention(masks, other):
    torch.manual_seed(0)
    sizes = {"kdim": 12, "vdim": 20} if other == "other sizes" else {}
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=other == "cross", **sizes, dtype=torch.float64)
    torch.nn.init.normal_(layer.in_proj_bias)
    options = dict(MULTI_HEAD_MASKS[masks])
    if other == "self":
        inputs = [torch.randn(7, 2, 16, dtype=torch.float64, requires_grad=True)] * 3
    elif other == "cross":
        inputs = [torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    elif other == "other sizes":
        inputs = [torch.randn(7, 2, size, dtype=torch.float64, requires_grad=True) for size in (16, 12, 20)]
    else:
        inputs = [torch.randn(7, 16, dtype=torch.float64, requires_grad=True)] * 3
        options = {name: x[0] if name == "key_padding_mask" else x for name, x in options.items()}
        if "of each head" in masks:
            options["attn_mask"] = options["attn_mask"][:4]
    expected, _ = layer(*inputs, need_weights=False, **options)
    with kp.attention_everywhere() as calls:
        found, weights = layer(*inputs, need_weights=False, **options)
    assert (calls.served, weights) == (1, None), calls
    torch.testing.assert_close(found, expected)
    leaves = [*dict.fromkeys(inputs), *layer.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), leaves), torch.autograd.grad(expected.square().sum(), leaves)
    )


@pytest.mark.parametrize("training", [True, False])
def test_transformers_of_torch(training):
    torch.manual_seed(0)
    model = torch.nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True).train(training)
    source, target = torch.randn(2, 7, 16), torch.randn(2, 5, 16)
    masks = {
        "tgt_mask": torch.nn.Transformer.generate_square_subsequent_mask(5),
        "src_key_padding_mask": torch.arange(7) >= torch.tensor([[4], [7]]),
        "memory_key_padding_mask": torch.arange(7) >= torch.tensor([[4], [7]]),
    }
    with torch.set_grad_enabled(training):
        expected = model(source, target, **masks)
        with kp.attention_everywhere() as calls:
            found = model(source, target, **masks)
    assert calls.served == 6  # two layers of the encoder, two of the decoder with two attentions each
    assert not calls.left_to_torch
    torch.testing.assert_close(found, expected)


def test_what_multi_head_attention_leaves_to_torch():
    x = torch.randn(7, 2, 16)
    with kp.attention_everywhere() as calls:
        torch.nn.MultiheadAttention(16, 4)(x, x, x)
        torch.nn.MultiheadAttention(16, 4, dropout=0.1)(x, x, x, need_weights=False)
        torch.nn.MultiheadAttention(16, 4, add_bias_kv=True)(x, x, x, need_weights=False)
        torch.nn.MultiheadAttention(16, 4, add_zero_attn=True)(x, x, x, need_weights=False)
    assert calls.served == 0
    reasons = " | ".join(calls.left_to_torch)
    for reason in ("need_weights=True", "dropout_p=0.1", "bias_k", "add_zero_attn"):
        assert reason in reasons


def operators(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if "attention" in str(node.target)]


def test_compiled():
    """In one graph, with our operators in it: is_causal, masks as tensors, and torch's layers."""
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _inputs):
        graphs.append(operators(graph))
        return graph.forward

    tensors, keep = drawn(), torch.rand(2, 1, 9, 9) < 0.7
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 7, 16, dtype=torch.float64)

    def attend(q, k, v, keep, x):
        dropped = sdpa(q, k, v, dropout_p=0.5) * 0
        return sdpa(q, k, v, is_causal=True) + sdpa(q, k, v, attn_mask=keep) + dropped, layer(x)

    expected = attend(*tensors, keep, x)
    with kp.attention_everywhere():
        found = torch.compile(attend, backend=backend, fullgraph=True)(*tensors, keep, x)
    torch.testing.assert_close(found, expected)
    ours = [name for name in graphs[0] if "kernel_pytorch" in name]
    assert (len(graphs), len(ours), len(graphs[0])) == (1, 3, 4)
    torch.testing.assert_close(
        torch.autograd.grad(found[0].sum(), tensors), torch.autograd.grad(expected[0].sum(), tensors)
    )


def test_exported():
    """An exported program has torch's own operator, whatever is active."""

    class Block(torch.nn.Module):
        def forward(self, q):
            return sdpa(q, q, q, is_causal=True)

    q = drawn()[0].detach()
    with kp.attention_everywhere():
        program = torch.export.export(Block(), (q,))
    assert operators(program.graph_module) == ["aten.scaled_dot_product_attention.default"]
    torch.testing.assert_close(program.module()(q), Block()(q))
