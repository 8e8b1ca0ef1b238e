"""Tiny models with random weights for the tests of kp.optimize: architectures of transformers and plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def _transformers() -> Any:
    import transformers

    return transformers


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(96, (rows, length), generator=torch.Generator().manual_seed(seed))


def _decoder(kind: str, **fields: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    library = _transformers()
    config = getattr(library, f"{kind}Config")(**{**TEXT, "num_key_value_heads": 1, **fields})
    ids = tokens(2, 12)
    return getattr(library, f"{kind}ForCausalLM")(config), {"input_ids": ids, "labels": ids}


def _convolutions() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2),
        nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    return model, (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)),)


def _encoder_and_decoder() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = nn.Transformer(32, 2, 1, 1, 64, batch_first=True)
    generator = torch.Generator().manual_seed(1)
    return model, tuple(torch.randn(2, length, 32, generator=generator) for length in (7, 5))


def model_of(name: str) -> tuple[nn.Module, Any]:
    """Return a model with the same weights each time, and an input for it."""
    torch.manual_seed(0)
    if name in ("llama", "qwen3", "gemma", "mistral", "mixtral"):
        fields: dict[str, Any] = {
            "qwen3": {"head_dim": 16},
            "gemma": {"head_dim": 16},
            "mistral": {"sliding_window": 4, "head_dim": 16},
            "mixtral": {"num_local_experts": 2, "sliding_window": None},
        }.get(name, {})
        return _decoder(name.capitalize(), **fields)
    if name == "cnn":
        return _convolutions()
    if name == "nn.Transformer":
        return _encoder_and_decoder()
    library = _transformers()
    ids = tokens(2, 12)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    image = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "gpt2":
        config = library.GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2, n_positions=32)
        return library.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}
    if name == "bert":
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[1, 8:] = 0
        return library.BertModel(library.BertConfig(**TEXT)), {"input_ids": ids, "attention_mask": mask}
    if name == "modernbert":
        config = library.ModernBertConfig(**TEXT, pad_token_id=0, local_attention=8)
        return library.ModernBertModel(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "vit":
        return library.ViTModel(library.ViTConfig(**image, image_size=32, patch_size=8)), {"pixel_values": pixels}
    if name == "dinov2":
        config = library.Dinov2Config(**image, image_size=32, patch_size=8)
        return library.Dinov2Model(config), {"pixel_values": pixels}
    if name == "convnext":
        config = library.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
        return library.ConvNextModel(config), {"pixel_values": pixels}
    if name == "whisper":
        config = library.WhisperConfig(
            vocab_size=96, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=16,
            decoder_start_token_id=1, pad_token_id=0, eos_token_id=2, bos_token_id=1,
        )  # fmt: skip
        features = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))
        return library.WhisperModel(config), {"input_features": features, "decoder_input_ids": tokens(2, 6)}
    if name == "t5":
        config = library.T5Config(
            vocab_size=96, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        return library.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": tokens(2, 6)}
    raise ValueError(f"name={name!r} is no model of these tests")


ARCHITECTURES = (
    "llama", "qwen3", "gemma", "mistral", "mixtral", "gpt2", "bert", "modernbert", "vit", "dinov2", "convnext",
    "whisper", "t5", "cnn", "nn.Transformer",
)  # fmt: skip
