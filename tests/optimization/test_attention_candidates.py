"""kp.attention in models: SDPA calls, nn.MultiheadAttention, padding and documents of Hugging Face models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import kernel_pytorch as kp
from kernel_pytorch.optimization import Context, Edits, Sites
from kernel_pytorch.optimization.candidates import attention as hugging_face
from kernel_pytorch.optimization.candidates import memory, sdpa
from kernel_pytorch.optimization.fallbacks import recorded
from optimization_fakes import ScriptedTimer
from optimization_models import model_of

CPU = Context("training", torch.device("cpu"), ())


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def helper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        return self.out(helper(q, k, v).transpose(1, 2).flatten(2))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The masks of the calls that kp.attention served."""
    masks: list[str] = []
    original = kp.ops.attention.attention

    def watched(q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        masks.append(str(mask) if options.get("bias") is None else f"{mask} with a bias")
        return original(q, k, v, mask, **options)

    monkeypatch.setattr(sdpa, "attention", watched)
    monkeypatch.setattr("kernel_pytorch.ops.attention.attention", watched)
    return masks


@pytest.mark.parametrize("goal", ["latency", "training"])
def test_calls_of_sdpa_are_served_in_one_model(goal: str, served: list[str]) -> None:
    torch.manual_seed(0)
    model, other, x = nn.Sequential(Attention(), Attention()), Attention(), drawn(2, 9, 16)
    before = model(x)
    best = kp.optimize(model, (x,), goal, include=("sdpa-attention",), timer=ScriptedTimer(), resume=False)
    assert [step.candidate for step in best.plan.steps] == ["sdpa-attention"], str(best.report)
    served.clear()
    assert torch.allclose(best(x), before, atol=1e-5)
    assert served == ["causal()"] * 2
    other(x)
    assert len(served) == 2
    assert torch.equal(best.revert()(x), before)
    assert len(served) == 2


def test_calls_of_sdpa_are_served_under_compile() -> None:
    model, x, graphs = Attention(), drawn(2, 9, 16), []
    expected = model(x)
    sdpa.SDPA_ATTENTION.apply(model, ("",), Edits())

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    assert torch.allclose(torch.compile(model, backend=keep, fullgraph=True)(x), expected, atol=1e-5)
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert any("kernel_pytorch.attention" in name for name in names)


def test_models_without_calls_of_sdpa_are_not_matched() -> None:
    assert "no file that defines its modules calls" in str(sdpa.SDPA_ATTENTION.match(nn.Linear(8, 8), CPU))
    assert isinstance(sdpa.SDPA_ATTENTION.match(nn.Sequential(Attention()), CPU), Sites)


PADDING = torch.tensor([[False] * 5 + [True] * 2, [False] * 7])
CAUSAL = torch.ones(7, 7, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(
    ("given", "mask"),
    [
        ({}, "full()"),
        ({"attn_mask": CAUSAL}, "causal()"),
        ({"attn_mask": nn.Transformer.generate_square_subsequent_mask(7), "is_causal": True}, "causal()"),
        ({"key_padding_mask": PADDING}, "intervals("),
        ({"key_padding_mask": PADDING, "attn_mask": CAUSAL}, ""),
        ({"attn_mask": drawn(4, 7, 7, seed=3)}, "full() with a bias"),
    ],
    ids=["full", "causal", "hinted", "padding", "both", "bias"],
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_is_the_same(given: dict[str, Any], mask: str, batch_first: bool, served: Any) -> None:
    torch.manual_seed(0)
    module, edits = nn.MultiheadAttention(16, 2, batch_first=batch_first), Edits()
    nn.init.normal_(module.in_proj_bias)
    x = drawn(2, 7, 16) if batch_first else drawn(7, 2, 16)

    def run() -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        out, weights = module(leaf, leaf, leaf, need_weights=False, **given)
        assert weights is None
        return [out, *torch.autograd.grad(out.square().sum(), [leaf, *module.parameters()])]

    expected = run()
    sdpa.MULTIHEAD_ATTENTION.apply(module, ("",), edits)
    for one, other in zip(run(), expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    assert mask in served[0]
    edits.undo()
    assert torch.equal(run()[0], expected[0])


def test_multihead_attention_with_other_widths_and_calls_that_are_left_alone(served: Any) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 2, kdim=12, vdim=10, bias=False, batch_first=True, dropout=0.5).eval()
    q, k, v = drawn(2, 5, 16), drawn(2, 7, 12, seed=1), drawn(2, 7, 10, seed=2)
    expected, weights = module(q, k, v)
    sdpa.MULTIHEAD_ATTENTION.apply(module, ("",), Edits())
    assert torch.allclose(module(q, k, v, need_weights=False)[0], expected, atol=1e-6)
    assert served == ["full()"]
    found, same = module(q, k, v)  # the weights are asked for
    assert torch.equal(found, expected)
    assert torch.equal(same, weights)
    module.train()(q, k, v, need_weights=False)  # dropout
    module.eval()(q[0], k[0], v[0], need_weights=False)  # no batch
    assert served == ["full()"]


def test_multihead_attention_that_adds_keys_is_left_alone() -> None:
    reason = sdpa.MULTIHEAD_ATTENTION.match(nn.MultiheadAttention(16, 2, add_zero_attn=True), CPU)
    assert "add_bias_kv or add_zero_attn" in str(reason)


def test_encoder_layers_train_on_kp_attention(served: list[str]) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    best = kp.optimize(
        model, (drawn(2, 7, 16),), "training", include=("multihead-attention",), timer=ScriptedTimer(), resume=False
    )
    assert best.plan.steps[0].sites == ["layers.0.self_attn", "layers.1.self_attn"]
    assert set(served) == {"full()"}


def test_offloading_keeps_weights_and_small_tensors_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = memory.ACTIVATION_OFFLOADING.match(nn.Linear(8, 8), Context("memory", torch.device("cpu"), ()))
    assert "the model is on cpu" in str(reason)
    moved: list[tuple[int, ...]] = []

    original = torch.autograd.graph.saved_tensors_hooks

    def elsewhere(pack: Any, unpack: Any) -> Any:
        def watched(tensor: torch.Tensor) -> Any:
            packed = pack(tensor)
            if isinstance(packed, torch.Tensor):
                moved.append(tuple(tensor.shape))
            return packed

        return original(watched, unpack)

    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", elsewhere)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), drawn(4, 8).requires_grad_()
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    memory.ACTIVATION_OFFLOADING.apply(model, ("",), Edits())
    found = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert moved


def packed() -> dict[str, torch.Tensor]:
    ids = torch.randint(96, (1, 12), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "position_ids": torch.tensor([[*range(5), *range(4), *range(3)]])}


def padded(side: str) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, slice(0, 5) if side == "left" else slice(7, 12)] = 0
    return {"input_ids": torch.randint(96, (2, 12)), "attention_mask": mask}


@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
@pytest.mark.parametrize("form", ["left", "right", "packed"])
def test_padding_and_documents_are_recognised(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    if (name, form) == ("bert", "packed"):
        pytest.skip("BERT has no documents by positions")
    model, _ = model_of(name)
    inputs = {
        **(packed() if form == "packed" else padded(form)),
        **({} if name == "bert" else {"use_cache": False}),
    }
    seen: list[str] = []
    original = hugging_face.attention

    def watched(q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        seen.append(str(mask))
        return original(q, k, v, mask, **options)

    monkeypatch.setattr(hugging_face, "attention", watched)
    with torch.no_grad():
        expected = model.eval()(**inputs)[0]
    best = kp.optimize(model, inputs, include=("hf-attention",), timer=ScriptedTimer(), resume=False)
    assert [step.candidate for step in best.plan.steps] == ["hf-attention"], str(best.report)
    assert not best.report.fallbacks
    seen.clear()
    with torch.no_grad():
        found = best(**inputs)[0]
    words = {"left": "padding", "right": "padding", "packed": "documents"}[form]
    assert len(seen) == 2
    assert all(words in one and ("window" in one) == (name == "mistral") for one in seen)
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_recognised_mask_and_dropout_go_to_sdpa_together() -> None:
    pytest.importorskip("transformers")
    model, _ = model_of("llama")
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    inputs = padded("left")
    torch.manual_seed(0)
    expected = model.train()(**inputs, use_cache=False).logits
    edits = Edits()
    hugging_face.HF_ATTENTION.apply(model, ("",), edits)
    torch.manual_seed(0)
    with recorded() as found:
        out = model(**inputs, use_cache=False).logits
    assert torch.allclose(out, expected, atol=1e-5)
    assert found == ["hf-attention: attention with dropout or a change of the scores goes to SDPA"]
