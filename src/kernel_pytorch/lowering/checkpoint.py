"""Lower a Hugging Face checkpoint folder (config, safetensors, tokenizer) to a ``.pte`` that generates text.

The program has one method, ``forward(tokens, position)``, with a KV cache inside, and constant methods with the
metadata that ExecuTorch's ``TextLLMRunner`` reads. Programs are cached by the content of the folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
import torch

import kernel_pytorch
from kernel_pytorch.lowering.checksum import write_whole
from kernel_pytorch.lowering.constants import narrowed

if TYPE_CHECKING:
    from kernel_pytorch.lowering.program import LoweredProgram
    from kernel_pytorch.lowering.runtime import LoadedProgram

__all__ = ["TextProgram", "cached_program", "content_digest", "load_cached", "lower_checkpoint"]

_VERSIONS = ("torch", "executorch", "torchao", "transformers")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}
_LONGEST_CONTEXT = 4096
_SECONDS = 10  # of audio, for models that take samples; shorter audio is padded with silence


@dataclass(frozen=True)
class TextProgram:
    """Options for lowering a checkpoint.

    Example:
        >>> TextProgram(recipe="int8-weight", window=1024, sinks=4).cache_dtype
        'float32'
    """

    recipe: str | None = None
    """Quantization, such as ``"int4-weight"``; None for float32."""
    window: int | None = None
    """Number of previous tokens to attend to, in constant memory; None attends to the whole context."""
    sinks: int = 0
    """Number of initial tokens that every token attends to, in addition to the window."""
    chunk: int = 128
    """Maximum number of tokens per call; longer prompts are passed in chunks."""
    cache_dtype: str = "float32"
    """``"float32"``, ``"float16"`` or ``"int8"``."""
    context: int | None = None
    """Maximum number of tokens of a sequence without a window; by default, the smaller of 4,096 and the model's
    ``max_position_embeddings``. Memory for them is allocated in advance."""

    def __post_init__(self) -> None:
        if self.cache_dtype not in _DTYPES:
            raise ValueError(f"cache_dtype={self.cache_dtype!r}: use one of {', '.join(_DTYPES)}")
        if self.chunk < 2:
            raise ValueError(f"chunk={self.chunk}: at least 2 tokens are needed")
        if self.context is not None and (self.context < 2 or self.window is not None):
            raise ValueError(
                f"context={self.context}, window={self.window}: give one of them; a context has at least 2 tokens"
            )
        if self.sinks and self.window is None:
            raise ValueError(
                f"sinks={self.sinks} without a window: the whole context is attended to; give a window too"
            )


def config_of(folder: Path) -> dict[str, Any]:
    """Return the folder's ``config.json``; raise an error that describes a checkpoint folder if it is missing."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"folder={str(folder)!r} has no config.json: pass a Hugging Face checkpoint folder, with config.json, "
            "*.safetensors and the tokenizer's files"
        )
    try:
        return dict(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no JSON object ({error}): download the checkpoint again") from error


def tokenizer_of(folder: Path) -> Any:
    """Return the folder's tokenizer; raise an error if its files are missing, because transformers may return an
    empty tokenizer then.
    """
    from transformers import AutoTokenizer

    config_of(folder)
    fault: Exception | None = None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if len(tokenizer.get_vocab()) > len(tokenizer.all_special_tokens):
            return tokenizer
    except (OSError, ValueError) as error:
        fault = error
    why = "" if fault is None else f"; transformers says: {' '.join(str(fault).split())}"
    raise ValueError(
        f"folder={str(folder)!r} has no tokenizer that can be read: copy its files there, such as tokenizer.json and "
        f"tokenizer_config.json{why}"
    ) from fault


def _metadata(config: Any, generation: Any, how: TextProgram, context: int) -> dict[str, Any]:
    """Return the metadata that ExecuTorch's TextLLMRunner reads from constant methods, by method name."""
    first, last = (
        next(
            (value for value in (getattr(own, name, None) for own in (generation, config)) if value is not None),
            None,
        )
        for name in ("bos_token_id", "eos_token_id")
    )
    ends = [] if last is None else list(last) if isinstance(last, (list, tuple)) else [last]
    return {
        "get_max_seq_len": how.chunk,
        "get_max_context_len": context,
        "get_vocab_size": config.vocab_size,
        "get_n_layers": config.num_hidden_layers,
        "get_bos_id": -1 if first is None else first,
        "get_eos_ids": ends,
        "use_kv_cache": True,
        "use_sdpa_with_kv_cache": False,
        "enable_dynamic_shape": True,
    }


class _NarrowEmbedding(torch.nn.Module):
    """An embedding whose weights are stored in a narrower dtype than that of the returned rows."""

    def __init__(self, weight: torch.Tensor, padding: int | None) -> None:
        super().__init__()
        self.weight, self.padding = torch.nn.Parameter(weight, requires_grad=False), padding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, self.weight, self.padding).float()


def _narrow_embedding(model: Any) -> None:
    """Keep the input embedding of a bfloat16 or float16 checkpoint in that dtype, as its linears are."""
    found = model.get_input_embeddings()
    if type(found) is torch.nn.Embedding and found.max_norm is None:
        weight = narrowed(found.weight)
        if weight.dtype != found.weight.dtype:
            model.set_input_embeddings(_NarrowEmbedding(weight, found.padding_idx))


def _context_of(most: int, how: TextProgram) -> int:
    """Return the maximum number of tokens of a sequence for a model with ``most`` positions."""
    if how.window is not None:
        return 1 << 30
    if how.context is not None and how.context > most:
        raise ValueError(f"context={how.context}: the model has {most} positions; give a window instead")
    return how.context or min(most, _LONGEST_CONTEXT)


def _prompt_prefix(folder: Path) -> list[int]:
    """Return the ids that the folder's tokenizer prepends to every text, for runners without transformers."""
    if not (folder / "tokenizer.json").is_file():
        return []
    tokenizer = tokenizer_of(folder)
    whole, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    return list(whole[: -len(plain)]) if whole[-len(plain) :] == plain else []


def lower_checkpoint(
    folder: str | Path, how: TextProgram, tell: Callable[[str], None] | None = None
) -> LoweredProgram:
    """Lower the language model in a folder, and return a ``LoweredProgram``.

    A causal model becomes one method, ``forward(tokens, position)``. An encoder-decoder for text or speech becomes
    the methods ``encode`` and ``decode`` of ``lower_encoder_decoder``.

    Args:
        folder: with ``config.json`` and ``*.safetensors``.
        how: quantization, window and chunk size.
        tell: called with a line for each step.

    Example:
        >>> import pathlib, tempfile
        >>> from kernel_pytorch.testing.checkpoints import tiny_checkpoint
        >>> program = lower_checkpoint(tiny_checkpoint(pathlib.Path(tempfile.mkdtemp())), TextProgram(chunk=16))
        >>> program.load().run("get_max_seq_len", ())
        16
    """
    from transformers import AutoModelForCausalLM

    if config_of(Path(folder)).get("is_encoder_decoder"):
        return _lower_encoder_decoder(Path(folder), how, tell)
    from kernel_pytorch.lowering.language_model import CachedLanguageModel, require_history
    from kernel_pytorch.lowering.program import lower

    folder = Path(folder)
    tell = tell or (lambda text: None)
    config_of(folder)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    tell(f"reading the checkpoint ({size / 1e9:.1f} GB)")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.requires_grad_(False).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the default has no device kernel
    _narrow_embedding(model)
    require_history(model)
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None) or _LONGEST_CONTEXT
    context = _context_of(most, how)
    window = context - 1 if how.window is None else how.window
    chunk = min(how.chunk, most)
    cached = CachedLanguageModel(
        model, window=window, sinks=how.sinks, longest=chunk, dtype=_DTYPES[how.cache_dtype]
    ).eval()
    length = torch.export.Dim("length", min=1, max=chunk)
    example = torch.zeros(1, min(chunk, 5), dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    metadata = _metadata(config, model.generation_config, how, context)
    return lower(
        cached,
        example,
        recipe=how.recipe,
        dynamic_shapes=({1: length}, None),
        metadata={
            **metadata,
            "get_max_seq_len": chunk,
            "get_prompt_prefix": _prompt_prefix(folder),
            "get_cache_bytes": sum(cache.nbytes for cache in cached.caches),
        },
        tell=tell,
    )


def _lower_encoder_decoder(folder: Path, how: TextProgram, tell: Callable[[str], None] | None) -> LoweredProgram:
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
    from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES

    from kernel_pytorch.lowering.encoder_decoder import lower_encoder_decoder

    if how.window is not None or how.cache_dtype != "float32":
        raise ValueError(
            f"window={how.window}, cache_dtype={how.cache_dtype!r}: encoder-decoders keep the whole output in float32"
        )
    if tell is not None:
        tell("reading the checkpoint")
    sound = config_of(folder).get("model_type") in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    auto = AutoModelForSpeechSeq2Seq if sound else AutoModelForSeq2SeqLM
    model = auto.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    if model.main_input_name == "input_features":  # Whisper: always 30 seconds
        example = torch.zeros(1, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        return lower_encoder_decoder(model, example, recipe=how.recipe, tell=tell)
    if model.main_input_name == "input_values":  # Moonshine: samples
        example = torch.zeros(1, _SECONDS * _sampling_rate(folder))
        return lower_encoder_decoder(model, example, recipe=how.recipe, tell=tell)
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"the encoder takes {model.main_input_name}: pass the model and an example of it to "
            "kernel_pytorch.lowering.lower_encoder_decoder"
        )
    most = min(getattr(model.config, "max_position_embeddings", None) or 512, _LONGEST_CONTEXT)
    length = torch.export.Dim("source", min=2, max=most)
    example = torch.zeros(1, min(most, 9), dtype=torch.int64)
    return lower_encoder_decoder(model, example, length=length, recipe=how.recipe, tell=tell)


def _sampling_rate(folder: Path) -> int:
    path = folder / "preprocessor_config.json"
    return int(json.loads(path.read_text()).get("sampling_rate", 16000)) if path.is_file() else 16000


def _programs_folder() -> Path:
    own = os.environ.get("KERNEL_PYTORCH_PROGRAMS")
    return Path(own) if own else platformdirs.user_cache_path("kernel_pytorch") / "programs"


def _file_digest(path: Path, known: Mapping[str, Any]) -> tuple[str, str]:
    """Return (key, SHA-256) of a file; a file of unchanged path, size and modification time is not read again."""
    facts = path.stat()
    key = f"{path.resolve()}:{facts.st_size}:{facts.st_mtime_ns}"
    if key in known:
        return key, str(known[key])
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return key, digest.hexdigest()


def _known_digests(index: Path) -> dict[str, str]:
    """Return the known digests by path, size and modification time; a damaged index counts as empty."""
    try:
        return dict(json.loads(index.read_text()))
    except (OSError, ValueError):
        return {}


def content_digest(folder: Path, how: TextProgram, programs: Path) -> str:
    """Return a digest of everything that a program depends on: config, weights, options and versions."""
    index = programs / "digests.json"
    known = _known_digests(index)
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    files = [*(folder / name for name in names), *sorted(folder.glob("*.safetensors"))]
    files += sorted(folder.glob("pytorch_model*.bin"))
    found = {path.name: _file_digest(path, known) for path in files if path.is_file()}
    fresh = dict(found.values())
    if not fresh.items() <= known.items():
        write_whole(index, json.dumps({**known, **fresh}, indent=0).encode())
    versions = {name: importlib.metadata.version(name) for name in _VERSIONS}
    versions["kernel-pytorch"] = kernel_pytorch.__version__
    whole = {"files": {name: digest for name, (_, digest) in found.items()}, "how": asdict(how), **versions}
    sources = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(source.read_bytes())
    whole["lowering"] = sources.hexdigest()
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:24]


def cached_program(folder: Path, how: TextProgram, tell: Callable[[str], None] | None = None) -> Path:
    """Return the cached ``.pte`` of a checkpoint folder; lower it if the cache has none of the same content."""
    config_of(folder)
    tell = tell or (lambda text: None)
    programs = _programs_folder()
    programs.mkdir(parents=True, exist_ok=True)
    tell("looking for a lowered program")
    path = programs / f"{content_digest(folder, how, programs)}.pte"
    if not path.is_file():
        lower_checkpoint(folder, how, tell).save(path)
    return path


def load_cached(path: Path, tell: Callable[[str], None] | None = None) -> LoadedProgram:
    """Load a program from the cache; skip the checksum if the file is unchanged since it was last verified.

    The load time then does not depend on the size of the weights, which are memory-mapped.
    """
    from kernel_pytorch.lowering.runtime import LoadedProgram

    facts = path.stat()
    key, index = f"{path.resolve()}:{facts.st_size}:{facts.st_mtime_ns}", path.with_name("digests.json")
    known = _known_digests(index)
    if tell is not None:
        tell("loading the program" if key in known else "verifying the program")
    loaded = LoadedProgram(path, path.name, verified=key in known)
    if key not in known:
        write_whole(index, json.dumps({**known, key: loaded.digest}, indent=0).encode())
    return loaded
