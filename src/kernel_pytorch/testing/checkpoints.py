"""Tiny checkpoint folders with random weights and a trained tokenizer, for tests and examples without downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

__all__ = ["tiny_checkpoint"]

_TEXT = (
    "once upon a time there was a kernel that computed attention exactly",
    "the quick brown fox jumps over the lazy dog, and the dog says hello",
    "a window and a few sinks keep the memory of a conversation constant",
)
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_checkpoint(folder: Path, kind: str = "llama", seed: int = 0, **sizes: Any) -> Path:
    """Write config, safetensors and tokenizer of a two-layer model; returns the folder.

    Args:
        folder: where to write; created if it does not exist.
        kind: a model type of transformers, such as ``"llama"`` or ``"qwen3"``.
        seed: of the weights.
        sizes: other fields of the model's configuration.

    Example:
        >>> import pathlib, tempfile
        >>> sorted(path.name for path in tiny_checkpoint(pathlib.Path(tempfile.mkdtemp())).iterdir())[0]
        'chat_template.jinja'
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    special = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=160, special_tokens=special, show_progress=False)
    made.train_from_iterator(_TEXT, trainer)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<|begin|>", eos_token="<|end|>")
    tokenizer.chat_template = _TEMPLATE
    given = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "initializer_range": 0.4,  # with the usual 0.02 a random model repeats one token
    }
    default = AutoConfig.for_model(kind)
    known = {*default.to_dict(), *default.attribute_map}  # GPT-2 has no heads of keys of its own
    chosen = {key: value for key, value in given.items() if key in known}
    config = AutoConfig.for_model(kind, **{**chosen, **sizes})
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
