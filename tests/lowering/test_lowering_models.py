"""Real architectures with random weights: lowered whole, equal to eager, all attention and norms in our delegate."""

import pytest
import torch
import transformers

import kernel_pytorch as kp
from kernel_pytorch.lowering.rules import RULES

OURS = "KernelPyTorchBackend"
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": 128, "max_position_embeddings": 128}
GROUPED = {**SMALL, **TEXT, "num_key_value_heads": 2}


class Output(torch.nn.Module):
    """One tensor of a Hugging Face model's output, without a cache."""

    def __init__(self, model: torch.nn.Module, argument: str, output: str, **options: object) -> None:
        super().__init__()
        self.model, self.argument, self.output, self.options = model, argument, output, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(**{self.argument: x}, **self.options)[self.output]


def llama() -> tuple[torch.nn.Module, torch.Tensor]:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
    return Output(model, "input_ids", "logits", use_cache=False), torch.randint(0, 128, (1, 24))


def qwen() -> tuple[torch.nn.Module, torch.Tensor]:
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, head_dim=16))
    return Output(model, "input_ids", "logits", use_cache=False), torch.randint(0, 128, (1, 24))


def gpt2() -> tuple[torch.nn.Module, torch.Tensor]:
    config = transformers.GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    model = transformers.GPT2LMHeadModel(config)
    return Output(model, "input_ids", "logits", use_cache=False), torch.randint(0, 128, (1, 24))


def bert() -> tuple[torch.nn.Module, torch.Tensor]:
    model = transformers.BertModel(transformers.BertConfig(**SMALL, **TEXT))
    return Output(model, "input_ids", "last_hidden_state"), torch.randint(0, 128, (2, 24))


def vit() -> tuple[torch.nn.Module, torch.Tensor]:
    model = transformers.ViTModel(transformers.ViTConfig(**SMALL, image_size=32, patch_size=8))
    return Output(model, "pixel_values", "last_hidden_state"), torch.randn(1, 3, 32, 32)


def whisper() -> tuple[torch.nn.Module, torch.Tensor]:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = transformers.WhisperConfig(
        d_model=64, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=128, num_mel_bins=16, vocab_size=128,
        max_source_positions=50, decoder_layers=1, decoder_attention_heads=4,
    )  # fmt: skip
    return Output(WhisperEncoder(config), "input_features", "last_hidden_state"), torch.randn(1, 16, 100)


NORMS = {llama: 5, qwen: 9, gpt2: 5, bert: 5, vit: 5, whisper: 5}


@pytest.mark.parametrize("make", NORMS, ids=lambda make: make.__name__)
def test_a_model_is_equal_to_eager_with_attention_and_norms_in_our_delegate(make) -> None:
    torch.manual_seed(0)
    model, x = make()
    program = kp.lower(model.eval(), (x,))
    report = program.report
    (difference,) = program.compare()
    assert difference.snr > 100, difference
    assert report.count(OURS, "kernel_pytorch_lowering::attention") == 2, report
    norms = [name for name, rule in RULES.items() if rule.kind == "norm"]
    assert sum(report.count(OURS, name) for name in norms) == NORMS[make], report
    left = {refusal.operator for refusal in report.left}
    assert left <= {"aten::embedding", "aten::view_copy", "aten::gather"}, (
        report
    )  # look-ups, and views of token ids


@pytest.mark.parametrize("make", [llama, bert], ids=lambda make: make.__name__)
def test_a_model_of_dynamic_length_has_its_mask_as_data(make) -> None:
    torch.manual_seed(0)
    model, x = make()
    length = torch.export.Dim("length", min=2, max=100)
    program = kp.lower(model.eval(), (x,), dynamic_shapes=({1: length},))
    assert program.report.count(OURS, "kernel_pytorch_lowering::attention") == 2, program.report
    assert not any(refusal.operator in ("aten::le.Tensor", "aten::cumsum") for refusal in program.report.left)
    for tokens in (2, 24, 77, 100):
        (difference,) = program.compare(torch.randint(0, 128, (x.shape[0], tokens)))
        assert difference.snr > 100, difference
