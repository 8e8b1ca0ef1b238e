"""Models and example inputs for commands: from a user's function, or from a Hugging Face folder."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["from_function", "from_hugging_face"]


def from_function(source: str) -> tuple[torch.nn.Module, Any]:
    """Call ``package.module:function``, which returns (model, inputs)."""
    module_name, _, name = source.partition(":")
    if not name:
        raise ValueError(f"source={source!r}: use package.module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")  # like python -m, find modules in the current folder
    function = getattr(importlib.import_module(module_name), name, None)
    if not callable(function):
        raise ValueError(f"source={source!r}: {module_name} has no function {name!r}")
    found = function()
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], torch.nn.Module):
        raise TypeError(f"source={source!r}: it must return (model, inputs), and returned {type(found).__name__}")
    return found[0], found[1]


def from_hugging_face(
    folder: Path, *, batch: int, lengths: tuple[int, ...], labels: bool, dtype: str | None, device: str | None
) -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    """Load a text model from a checkpoint folder, or create it with random weights if there is only a config.

    The inputs are random tokens, one example per length, with labels for training.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"--hf {folder}: there is no config.json; give a folder made by save_pretrained")
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is None:
        raise ValueError(
            f"--hf {folder}: a {type(config).__name__} has no vocab_size to draw tokens from; write a function that "
            "returns (model, inputs), and pass package.module:function"
        )
    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0]) if names else transformers.AutoModelForCausalLM
    chosen = getattr(torch, dtype) if dtype else None
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        model = kind.from_pretrained(folder, local_files_only=True, **({"dtype": chosen} if chosen else {}))
    else:
        torch.manual_seed(0)
        model = kind(config) if names else kind.from_config(config)
        model = model.to(chosen) if chosen else model
    model = model.to(device or "cpu")
    generator = torch.Generator().manual_seed(0)
    examples = []
    for length in lengths:
        tokens = torch.randint(vocabulary, (batch, length), generator=generator).to(model.device)
        examples.append({"input_ids": tokens, **({"labels": tokens} if labels else {})})
    return model, examples
