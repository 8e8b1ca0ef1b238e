"""parallelize(verify=True) compares the sharded with the unsharded model and raises if they differ."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import kernel_pytorch as kp
from ranks import Ranks, started

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 1,
    "attn_implementation": "sdpa",
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with started(2) as running:
        yield running


class Mixes(nn.Module):
    """A model with attention and another operation across tokens."""

    def __init__(self, mixing: bool) -> None:
        super().__init__()
        self.qkv, self.mixing = nn.Linear(16, 48), mixing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return out - out.mean(dim=1, keepdim=True) if self.mixing else out


def model_and_inputs(what: str) -> tuple[nn.Module, Any, dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    tokens = torch.randint(3, 40, (1, 24))
    causal, full = kp.masks.causal(), kp.masks.full()
    llama = {"input_ids": tokens}
    match what.removesuffix(", unverified"):
        case "bert loss":
            labels = tokens.masked_fill(torch.rand(1, 24) < 0.5, -100)
            model = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))
            return model, full, {**llama, "labels": labels}, {}
        case "roberta positions":
            return (
                transformers.RobertaModel(transformers.RobertaConfig(**SMALL), add_pooling_layer=False),
                full,
                llama,
                {},
            )
        case "dynamic rope":
            rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
            config = transformers.LlamaConfig(**{**SMALL, "max_position_embeddings": 16}, rope_parameters=rope)
            return transformers.LlamaForCausalLM(config), causal, llama, {}
        case "logits_to_keep":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
            return model, causal, {**llama, "logits_to_keep": 1}, {}
        case "cross-attention":
            config = transformers.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True)
            return (
                transformers.BertLMHeadModel(config),
                causal,
                {**llama, "encoder_hidden_states": torch.randn(1, 24, 32)},
                {},
            )
        case "encoder-decoder":
            config = transformers.T5Config(vocab_size=40, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
            return transformers.T5ForConditionalGeneration(config), full, llama, {}
        case "wrong mask":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)), full, llama, {}
        case "all ones":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
            return model, causal, {**llama, "attention_mask": torch.ones_like(tokens), "labels": tokens}, {}
        case "documents":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
            return model, kp.masks.documents([10, 14], causal), llama, {}
        case "ours":
            config = transformers.LlamaConfig(**{**SMALL, "attn_implementation": "kernel_pytorch"})
            return transformers.LlamaForCausalLM(config), causal, llama, {}
        case "gpt-2 loss":
            config = transformers.GPT2Config(
                vocab_size=40, n_embd=32, n_layer=1, n_head=2, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
            )
            return transformers.GPT2LMHeadModel(config), causal, {**llama, "labels": tokens}, {}
        case "sinks":
            options = {**SMALL, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
            config = transformers.GptOssConfig(
                **{**options, "attn_implementation": "kernel_pytorch"}, layer_types=["full_attention"]
            )
            return transformers.GptOssForCausalLM(config), causal, {**llama, "labels": tokens}, {}
        case "softcap":
            config = transformers.Gemma2Config(
                **{**SMALL, "attn_implementation": "kernel_pytorch"}, head_dim=16, layer_types=["full_attention"]
            )
            return transformers.Gemma2ForCausalLM(config), causal, llama, {}
        case "mixes" | "mixes not":
            return Mixes(what != "mixes not"), causal, {"x": torch.randn(1, 24, 16)}, {"positions": None}
    raise AssertionError(what)


def called(group: dist.ProcessGroup, what: str) -> str:
    warnings.simplefilter("error")
    try:
        model, mask, inputs, options = model_and_inputs(what)
        verify = {"verify": False} if "unverified" in what else {}
        model.train()
        kp.context_parallel.parallelize(model, group, mask, **options, **verify)
        for _ in range(2):
            outputs = model(**inputs)
        assert all(module.training for module in model.modules())
        (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "served"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("bert loss", r"ValueError: model: sharded over 2 ranks it returns another output\['loss'\] .*token_mean"),
        ("roberta positions", r"ValueError: model: .*another output\['last_hidden_state'\].*positions"),
        ("dynamic rope", "NotImplementedError: 24 tokens: .*changes beyond 16.*rope_type other than dynamic"),
        ("logits_to_keep", "ValueError: logits_to_keep=1: .*slice the logits"),
        ("cross-attention", "NotImplementedError: encoder_hidden_states: cross-attention is not sharded"),
        ("encoder-decoder", "NotImplementedError: model: T5ForConditionalGeneration has cross-attention"),
        ("wrong mask", r"ValueError: model: .*mask is not what the model attends to"),
        (
            "softcap",
            "NotImplementedError: model: Gemma2Attention attends with softcap, which attention across ranks",
        ),
        ("mixes", "ValueError: model: sharded over 2 ranks it returns another output"),
    ],
)
def test_a_silently_wrong_model_raises_an_error(ranks: Ranks, what: str, message: str) -> None:
    said = ranks.run(called, 2, what)
    assert any(re.search(message, one, re.DOTALL) for one in said), said
    assert all(re.search(message, one, re.DOTALL) or "RankError" in one for one in said), said


@pytest.mark.parametrize(
    "what", ["all ones", "documents", "ours", "gpt-2 loss", "sinks", "mixes not", "mixes, unverified"]
)
def test_correct_models_are_served(ranks: Ranks, what: str) -> None:
    assert ranks.run(called, 2, what) == ["served"] * 2
