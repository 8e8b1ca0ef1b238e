"""Models whose lowering used to end in an error of a library underneath: lowered, or refused with the remedy."""

import pytest
import torch
import transformers

import kernel_pytorch as kp
from kernel_pytorch.lowering import LoweredProgram

OURS = "KernelPyTorchBackend"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class Logits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


def lowered(model: torch.nn.Module) -> LoweredProgram:
    program = kp.lower(Logits(model).eval(), (torch.randint(0, 64, (1, 12)),))
    (difference,) = program.compare()
    assert difference.snr > 100, difference
    return program


def experts(kind: str) -> torch.nn.Module:
    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    if kind == "Mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    rotary = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.GptOssConfig(**sizes, head_dim=8, sliding_window=8, rope_parameters=rotary)
    return transformers.GptOssForCausalLM(config)


def test_a_constant_mask_that_several_delegates_read() -> None:
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=8))
    assert len(lowered(model).report.ours) > 1  # softcapped scores go back and forth


def test_one_head_of_keys_for_all_queries() -> None:
    torch.manual_seed(0)
    config = transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    program = lowered(transformers.FalconForCausalLM(config))
    assert program.report.count(OURS, "kernel_pytorch_lowering::attention") == 2


class Pairs(torch.nn.Module):
    """Rows of (token, expert) pairs: what stands between the two products sees twice the number of tokens alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = x.reshape(-1, 1, 4)
        weight = torch.ones(1, 4, 8).expand(pairs.shape[0], 4, 8)
        gate, value = torch.bmm(pairs, weight).chunk(2, dim=-1)
        return torch.bmm(torch.nn.functional.silu(gate) * value, weight[:, :, :4]).sum(dim=(1, 2))


def test_a_delegate_that_sees_a_multiple_of_a_dimension() -> None:
    tokens = torch.export.Dim("tokens", min=2, max=16)
    program = kp.lower(Pairs().eval(), (torch.randn(5, 8),), dynamic_shapes=({0: tokens},))
    assert program.report.ours
    for count in (2, 5, 16):
        (difference,) = program.compare(torch.randn(count, 8))
        assert difference.snr > 100, difference


@pytest.mark.parametrize("kind", ["Mixtral", "gpt-oss"])
def test_experts(kind: str) -> None:
    model = experts(kind)
    with pytest.raises(
        ValueError, match=r"grouped_mm_fallback in 'model.model.layers.0.mlp.experts' has no .*batched_mm"
    ):
        lowered(model)
    model.set_experts_implementation("batched_mm")
    lowered(model)
