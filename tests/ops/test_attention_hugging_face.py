"""attn_implementation="kernel_pytorch" against eager attention, on tiny models with random weights."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch

import kernel_pytorch as kp

transformers = pytest.importorskip("transformers")

NAME = "kernel_pytorch"
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Mixtral": {"sliding_window": 6, **EXPERTS},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "Qwen3": {},
    "Gemma": {},
    "Gemma2": {"sliding_window": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "Gemma3Text": {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "GptOss": {"sliding_window": 6, **EXPERTS},
    "Phi": {},
    "Phi3": {"sliding_window": 7},
    "Olmo2": {},
    "Granite": {},
    "Cohere": {},
    "StableLm": {},
    "Starcoder2": {"sliding_window": 6},
    "GPTNeoX": {},
    "SmolLM3": {},
    "Olmo3": {"sliding_window": 6},
    "Cohere2": {"sliding_window": 6},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "experts_implementation": "eager",
    },
}


def pair(config: Any, kind: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The same random weights with our attention and with eager."""
    torch.manual_seed(0)
    ours = kind.from_config(copy.deepcopy(config), attn_implementation=NAME).to(dtype).eval()
    eager = kind.from_config(copy.deepcopy(config), attn_implementation="eager").to(dtype).eval()
    for name, parameter in ours.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    eager.load_state_dict(ours.state_dict())
    assert (ours.config._attn_implementation, eager.config._attn_implementation) == (NAME, "eager")
    return ours, eager


def decoder(name: str, **options: Any) -> tuple[Any, Any]:
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **DECODERS[name]})
    return pair(config, transformers.AutoModelForCausalLM, **options)


def tokens(batch: int = 2, length: int = 11) -> torch.Tensor:
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks of every call of kp.attention."""
    import kernel_pytorch.ops.attention as ours

    calls: list[Any] = []
    original = ours.attention

    def attention(q, k, v, mask=None, **options):
        calls.append((mask, options))
        return original(q, k, v, mask, **options)

    monkeypatch.setattr(ours, "attention", attention)
    return calls


@pytest.mark.parametrize("name", DECODERS)
def test_generates_the_tokens_of_eager(name, counted):
    """Left-padded, with a dynamic and with a static cache."""
    ours, eager = decoder(name)
    ids, real = tokens(), torch.ones(2, 11, dtype=torch.int64)
    real[0, :4] = 0
    for cache in ({}, {"cache_implementation": "static"}):
        options = {"attention_mask": real, "max_new_tokens": 6, "do_sample": False, **cache}
        assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))
    assert len(counted) == 2 * 2 * 6  # layers, caches, tokens


@pytest.mark.parametrize("name", DECODERS)
def test_trains_as_eager(name, counted):
    """Loss and gradients of every parameter, padded on the right and packed; float64 says how far float32 may be."""
    ours, eager = decoder(name)
    exact = copy.deepcopy(eager).double()
    ids, real = tokens(), torch.ones(2, 11, dtype=torch.int64)
    real[1, 8:] = 0
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 2, 3, 4, 5, 0, 1, 2]])
    for inputs in ({"attention_mask": real}, {"position_ids": packed}):
        labels = ids.masked_fill(inputs.get("attention_mask", torch.ones_like(ids)) == 0, -100)
        found = []
        for model in (ours, eager, exact):
            model.train()
            model.zero_grad()
            options = {} if "attention_mask" in inputs else {"use_cache": False}
            loss = model(ids, labels=labels, **inputs, **options).loss
            loss.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            found.append(torch.cat([x.double().flatten() for x in (loss.detach(), *gradients)]))
        budget = 4 * (found[1] - found[2]).norm() + 1e-6 * found[2].norm()
        assert (found[0] - found[2]).norm() <= budget
    assert counted


def test_masks_are_expressions(counted):
    ours, _ = decoder("Mistral")
    ids, real = tokens(), torch.ones(2, 11, dtype=torch.int64)
    real[0, :4] = 0
    ours(ids, attention_mask=real)
    band = kp.masks.window(5, 1 << 30) & kp.masks.causal()
    assert counted[0][0] == band & kp.masks.padding([7, 11], "left")
    ours(ids)
    assert counted[-1][0] == band
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]]).expand(2, -1)
    ours(ids, position_ids=packed, use_cache=False)
    assert counted[-1][0] == band & kp.masks.documents([4, 7])


def test_evaluated_masks_equal_expressions():
    from transformers import masking_utils as hf

    from kernel_pytorch.ops.attention import hugging_face_masks as ours

    real = torch.ones(2, 9, dtype=torch.bool)
    real[0, :3] = False
    packed = torch.tensor([[0] * 4 + [1] * 5] * 2)
    functions = (
        hf.causal_mask_function,
        hf.bidirectional_mask_function,
        hf.sliding_window_causal_mask_function(4),
        hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(packed)),
        hf.or_masks(hf.causal_mask_function, hf.sliding_window_overlay(2)),
    )
    for function in functions:
        span = ours._Span(2, 0, 9, 0, 9)
        known = ours._expression(function, span)
        assert known is not None
        evaluated = ours._evaluated(function, None, span, False, torch.device("cpu"))
        assert torch.equal(known.dense(9, 9).expand(2, 1, 9, 9), evaluated.dense(9, 9).expand(2, 1, 9, 9))
        dense = hf.sdpa_mask(2, 9, 9, mask_function=function, attention_mask=real, allow_is_causal_skip=False)
        made = ours.make_mask(batch_size=2, q_length=9, kv_length=9, mask_function=function, attention_mask=real)
        assert torch.equal(made.kernel_pytorch_mask.dense(9, 9).expand(2, 1, 9, 9), dense)
        by_vmap = ours._evaluated(function, real, span, True, torch.device("cpu"))
        assert torch.equal(by_vmap.dense(9, 9).expand(2, 1, 9, 9), dense)


def test_scattered_padding_is_honoured():
    ours, eager = decoder("Llama", dtype=torch.float64)
    ids, real = tokens(), torch.ones(2, 11, dtype=torch.int64)
    real[0, 3], real[1, [2, 7]] = 0, 0
    found, known = ours(ids, attention_mask=real).logits, eager(ids, attention_mask=real).logits
    torch.testing.assert_close(found[real.bool()], known[real.bool()])


def test_a_mask_of_four_dimensions_is_honoured():
    ours, eager = decoder("Llama", dtype=torch.float64)
    ids = tokens()
    added = torch.randn(2, 1, 11, 11, dtype=torch.float64).masked_fill_(
        ~torch.ones(11, 11).tril().bool(), -torch.inf
    )
    torch.testing.assert_close(ours(ids, attention_mask=added).logits, eager(ids, attention_mask=added).logits)


def test_t5(counted):
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    ours, eager = pair(config, transformers.AutoModelForSeq2SeqLM, torch.float64)
    ids, real = tokens(), torch.ones(2, 11, dtype=torch.int64)
    real[0, 8:] = 0
    options = {"attention_mask": real, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))
    gradients = []
    for model in (ours, eager):
        model.train()
        model(ids, attention_mask=real, labels=tokens(2, 7)).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert any("relative_attention_bias" in name for name in gradients[0])
    torch.testing.assert_close(*gradients)
    assert any(options["bias"] is not None for _, options in counted)


ENCODERS = {"Bert": {}, "Roberta": {}, "ModernBert": {"local_attention": 6}, "Electra": {}}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name, counted):
    config = getattr(transformers, f"{name}Config")(
        **{**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, **ENCODERS[name]
    )
    ours, eager = pair(config, transformers.AutoModel, torch.float64)
    ids, real = tokens(), torch.ones(2, 11, dtype=torch.int64)
    real[0, 6:] = 0
    found, known = (model(ids, attention_mask=real).last_hidden_state[real.bool()] for model in (ours, eager))
    torch.testing.assert_close(found, known)
    assert counted


def test_set_attn_implementation_and_a_compiled_model():
    ours, eager = decoder("Llama", dtype=torch.float64)
    eager.set_attn_implementation(NAME)
    assert eager.config._attn_implementation == NAME
    ids, real = tokens(), torch.ones(2, 11, dtype=torch.int64)
    real[0, :4] = 0
    expected = ours(ids, attention_mask=real).logits
    torch.testing.assert_close(eager(ids, attention_mask=real).logits, expected)
    compiled = torch.compile(ours, backend="eager")
    torch.testing.assert_close(compiled(ids, attention_mask=real).logits, expected)


def test_an_export_without_values_is_refused():
    model, _ = decoder("Llama")
    for inputs in ({"input_ids": tokens()}, {"input_ids": tokens(), "attention_mask": torch.ones_like(tokens())}):
        with pytest.raises(
            NotImplementedError, match=r'under torch\.export: call set_attn_implementation\("sdpa"\)'
        ):
            torch.export.export(model, (), {**inputs, "use_cache": False})


def test_unsupported_calls_raise_errors():
    config = transformers.BertConfig(**SMALL)  # its default has dropout
    model = transformers.AutoModel.from_config(config, attn_implementation=NAME).train()
    with pytest.raises(
        ValueError, match=r"BertSelfAttention trains with an attention dropout of 0.1.*set it to 0.0"
    ):
        model(tokens())
    ours, _ = decoder("Llama")
    with pytest.raises(ValueError, match=r'output_attentions=True.*attn_implementation="eager"'):
        kp.ops.attention.hugging_face.attention_forward(
            ours, *torch.zeros(3, 1, 1, 2, 4), None, output_attentions=True
        )


OWN_ATTENTION = {
    "Bloom": {"n_layer": 1, "n_head": 4},
    "CodeGen": {"n_layer": 1, "n_head": 4, "n_embd": 32},
    "Mpt": {},
}


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_a_model_with_attention_of_its_own_is_refused(name):
    """They add the mask to their scores without asking transformers' registry."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "d_model": 32, "n_heads": 4, "n_layers": 1, "rotary_dim": 4}
    config = getattr(transformers, f"{name}Config")(**sizes, **OWN_ATTENTION[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    with pytest.raises(NotImplementedError, match=f'{name} computes attention in its own code.*"eager"'):
        model(tokens())


def test_a_model_that_computes_with_its_mask_is_refused():
    from kernel_pytorch.ops.attention.hugging_face import attention_forward, carried

    changed = torch.nn.functional.pad(carried(kp.masks.causal()).view(torch.int64), (1, 0), value=3).view(
        torch.uint64
    )
    with pytest.raises(NotImplementedError, match=r'Linear computes with its attention mask.*"eager"'):
        attention_forward(torch.nn.Linear(1, 1), *torch.zeros(3, 1, 1, 2, 4), changed)


def test_a_window_of_nothing_that_no_layer_uses():
    """Qwen2-MoE makes the mask of its windows although it has none."""
    config = transformers.Qwen2MoeConfig(**SMALL, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32)
    assert config.sliding_window == 0
    ours, eager = pair(config, transformers.AutoModelForCausalLM)
    torch.testing.assert_close(ours(tokens()).logits, eager(tokens()).logits)


@pytest.mark.parametrize("first", ["kernel_pytorch", "transformers"])
def test_importing_either_first_registers(first):
    second = {"kernel_pytorch": "transformers", "transformers": "kernel_pytorch"}[first]
    script = f"""
import sys
import {first}
if {first!r} == "kernel_pytorch":
    assert "transformers" not in sys.modules
import {second}
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
assert "kernel_pytorch" in ALL_ATTENTION_FUNCTIONS
assert "kernel_pytorch" in ALL_MASK_ATTENTION_FUNCTIONS
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("kernel_pytorch")]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
