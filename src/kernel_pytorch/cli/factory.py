"""Models and example inputs for commands: from a user's function, or from a Hugging Face folder."""

from __future__ import annotations

import importlib
import inspect
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


_DTYPES = ("float32", "float16", "bfloat16", "float64")


def from_hugging_face(
    folder: Path, *, batch: int, lengths: tuple[int, ...], labels: bool, dtype: str | None, device: str | None
) -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    """Load a model from a checkpoint folder, or create it with random weights if there is only a config.

    The inputs are random: tokens, one example per length; the pixels or audio features that the config describes; and
    labels for training.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"--hf {folder}: there is no config.json; give a folder made by save_pretrained")
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"--dtype {dtype}: use one of {', '.join(_DTYPES)}")
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    names = getattr(config, "architectures", None) or []
    if names and not hasattr(transformers, names[0]):
        raise ValueError(
            f"--hf {folder}: its architecture {names[0]} is not in transformers; write a function that returns "
            "(model, inputs), and pass package.module:function"
        )
    kind = getattr(transformers, names[0]) if names else transformers.AutoModelForCausalLM
    chosen = getattr(torch, dtype) if dtype else None
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        model = kind.from_pretrained(folder, local_files_only=True, **({"dtype": chosen} if chosen else {}))
    else:
        torch.manual_seed(0)
        model = kind(config) if names else kind.from_config(config)
        model = model.to(chosen) if chosen else model
    try:
        model = model.to(device or "cpu")
    except RuntimeError as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from error
    generator = torch.Generator().manual_seed(0)
    examples = [_example(model, folder, batch, length, labels, generator) for length in lengths]
    return model, examples if model.main_input_name == "input_ids" else examples[:1]


def _example(
    model: Any, folder: Path, batch: int, length: int, labels: bool, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return random arguments of one call."""
    config, name = model.config, model.main_input_name
    shape = _shape(config, name, batch, length)
    vocabulary: int = getattr(config, "vocab_size", None) or 0
    needs_tokens = name == "input_ids" or config.is_encoder_decoder
    if shape is None or (needs_tokens and not vocabulary):
        raise ValueError(
            f"--hf {folder}: a {type(config).__name__} does not say what its {name} are; write a function that "
            "returns (model, inputs), and pass package.module:function"
        )

    def tokens(*size: int, below: int) -> torch.Tensor:
        return torch.randint(below, size, generator=generator).to(model.device)

    if name == "input_ids":
        example = {name: tokens(*shape, below=vocabulary)}
    else:
        example = {name: torch.randn(*shape, generator=generator).to(model.device, model.dtype)}
    labels = labels and "labels" in inspect.signature(model.forward).parameters  # else the mean square of outputs
    if not labels:
        more = {"decoder_input_ids": tokens(batch, length, below=vocabulary)} if config.is_encoder_decoder else {}
        return {**example, **more}
    heads = type(model).__name__.partition("For")[2]
    if heads in ("SequenceClassification", "ImageClassification", "AudioClassification"):
        return {**example, "labels": tokens(batch, below=config.num_labels)}
    if heads == "TokenClassification":
        return {**example, "labels": tokens(batch, length, below=config.num_labels)}
    return {**example, "labels": example[name] if name == "input_ids" else tokens(batch, length, below=vocabulary)}


def _shape(config: Any, name: str, batch: int, length: int) -> tuple[int, ...] | None:
    """Return the shape of a model's main input, or None if its config does not define it."""
    if name == "input_ids":
        return batch, length
    if name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        return batch, getattr(config, "num_channels", 3), config.image_size, config.image_size
    if name == "input_features" and hasattr(config, "max_source_positions"):
        return batch, config.num_mel_bins, 2 * config.max_source_positions
    return None
