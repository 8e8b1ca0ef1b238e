"""The arms of ``text_generation.py``: language models with random weights in ours, PyTorch, XNNPACK and llama.cpp.

An arm is prepared once (``prepare``, which writes its files into a folder) and started in a separate process
(``start``), which returns a function from token ids and the position of the first one to the logits of the last one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

THREADS, PREFILL, LONGEST = 2, 512, 8192
RECIPES = {"int8": "int8-dynamic", "int4": "int4-weight"}
FORMATS = ("float32", "bfloat16", "int8", "int4")
Step = Callable[[list[int], int], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama; its input and output embeddings are one matrix."""

    vocabulary: int
    width: int
    wide: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 64


SHAPES = {
    "smollm-135m": Shape(49152, 576, 1536, 30, 9, 3),
    "llama-1b": Shape(128256, 2048, 8192, 16, 32, 8),
    "tiny": Shape(256, 64, 128, 2, 4, 2, 16),  # for trying the script
}


def checkpoint(work: Path, model: str, bfloat16: bool) -> Path:
    """Return the folder of a checkpoint with random weights in float32 or bfloat16; write it if it does not exist."""
    import transformers

    folder = work / f"{model}-{'bfloat16' if bfloat16 else 'float32'}"
    if (folder / "model.safetensors").is_file():
        return folder
    shape = SHAPES[model]
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.wide,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=2 * LONGEST,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(config)
    made.to(torch.bfloat16 if bfloat16 else torch.float32).save_pretrained(folder, max_shard_size="100GB")
    return folder


def prompt(model: str, count: int) -> list[int]:
    """Return token ids, the same for every arm."""
    return torch.randint(2, SHAPES[model].vocabulary, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def reference(work: Path, model: str) -> torch.Tensor:
    """Return the logits after the prompt from eager PyTorch in float32."""
    path = work / f"{model}-logits.pt"
    if not path.is_file():
        torch.save(_eager(work, model, "float32", compiled=False)(prompt(model, PREFILL), 0), path)
    return torch.load(path)  # type: ignore[no-any-return]


# Ours


def _program(work: Path, model: str, form: str) -> Path:
    from kernel_pytorch.lowering.checkpoint import TextProgram, cached_program

    how = TextProgram(recipe=RECIPES.get(form), chunk=PREFILL, context=LONGEST + PREFILL)
    os.environ["KERNEL_PYTORCH_PROGRAMS"] = str(work / "programs")
    return cached_program(checkpoint(work, model, form == "bfloat16"), how, print)


def _ours(work: Path, model: str, form: str) -> Step:
    from kernel_pytorch.lowering.checkpoint import load_cached

    program = load_cached(_program(work, model, form))
    return lambda ids, at: program(torch.tensor([ids]), torch.tensor([at]))[0, -1]


# PyTorch


def _eager(work: Path, model: str, form: str, *, compiled: bool) -> Step:
    import transformers

    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint(work, model, form == "bfloat16"), dtype=dtype, attn_implementation="sdpa"
    ).eval()
    cache = transformers.StaticCache(config=loaded.config, max_cache_len=LONGEST + PREFILL)
    call = torch.compile(loaded.forward, dynamic=False) if compiled else loaded.forward

    def step(ids: list[int], at: int) -> torch.Tensor:
        # Attention over transformers' static cache reads the whole cache with a mask, so that shapes are static.
        for layer in cache.layers:
            if getattr(layer, "cumulative_length", None) is not None:
                layer.cumulative_length.fill_(at)
        places = torch.arange(at, at + len(ids))
        found = call(
            input_ids=torch.tensor([ids]),
            position_ids=places[None],
            cache_position=places,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return found.logits[0, -1].float()

    return step


# XNNPACK and ExecuTorch's custom attention


class _CustomAttention(torch.nn.Module):
    """A Llama whose layers attend with ``llama::custom_sdpa`` over caches that ``llama::update_cache`` writes."""

    def __init__(self, model: Any, shape: Shape) -> None:
        super().__init__()
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register("custom_sdpa", self.attend)  # type: ignore[arg-type]
        AttentionMaskInterface.register("custom_sdpa", lambda *_, **__: None)
        self.model = model
        model.set_attn_implementation("custom_sdpa")
        for layer in range(shape.layers):
            for name in ("keys", "values"):
                zeros = torch.zeros(1, LONGEST + PREFILL, shape.kv_heads, shape.head_dim)
                self.register_buffer(f"{name}_{layer}", zeros, persistent=False)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.start = position.item()
        torch._check(self.start >= 0)
        torch._check(self.start < LONGEST)
        places = position + torch.arange(tokens.shape[1])
        found = self.model(input_ids=tokens, position_ids=places[None], use_cache=False, logits_to_keep=1)
        return found.logits  # type: ignore[no-any-return]

    def attend(
        self, module: Any, q: Any, k: Any, v: Any, *_: Any, scaling: float | None = None, **__: Any
    ) -> tuple[torch.Tensor, None]:
        held = [getattr(self, f"{name}_{module.layer_idx}") for name in ("keys", "values")]
        for new, cache in zip((k, v), held, strict=True):
            torch.ops.llama.update_cache(new.transpose(1, 2), cache, self.start)
        return torch.ops.llama.custom_sdpa(q.transpose(1, 2), *held, self.start, None, 0.0, True, scaling), None


def _xnnpack_program(work: Path, model: str, form: str) -> Path:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import (
        XnnpackDynamicallyQuantizedPartitioner,
        XnnpackPartitioner,
    )
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401 - registers the operators
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup
    from transformers import AutoModelForCausalLM

    path = work / f"{model}-{form}-xnnpack.pte"
    if path.is_file():
        return path
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint(work, model, False), dtype=torch.float32).eval()
    loaded.requires_grad_(False)
    if form in RECIPES:
        loaded.lm_head.weight = torch.nn.Parameter(loaded.lm_head.weight.clone(), requires_grad=False)
        weights, granularity = {"int8": (torch.int8, PerAxis(0)), "int4": (torch.int4, PerGroup(32))}[form]
        quantize_(loaded, Int8DynamicActivationIntxWeightConfig(weights, granularity))
    own = _CustomAttention(loaded, SHAPES[model]).eval()
    inputs = torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        exported = torch.export.export(
            own, inputs, dynamic_shapes=({1: torch.export.Dim("length", min=1, max=PREFILL)}, None)
        )
    first = [XnnpackDynamicallyQuantizedPartitioner()] if form in RECIPES else []
    edge = to_edge_transform_and_lower(
        exported,
        partitioner=[*first, XnnpackPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )
    with path.open("wb") as file:
        edge.to_executorch().write_to_file(file)
    return path


def _xnnpack(work: Path, model: str, form: str) -> Step:
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401 - registers the operators

    import kernel_pytorch as kp

    program = kp.load(_xnnpack_program(work, model, form))
    return lambda ids, at: program(torch.tensor([ids]), torch.tensor([at]))[0, -1]


# llama.cpp


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of a query or key projection to llama.cpp's order of rotary pairs."""
    return weight.view(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def _gguf(work: Path, model: str, form: str) -> Path:
    import gguf
    from safetensors import safe_open

    path = work / f"{model}-{form}.gguf"
    if path.is_file():
        return path
    shape = SHAPES[model]
    kinds = gguf.GGMLQuantizationType
    kind = {"float32": kinds.F32, "bfloat16": kinds.BF16, "int8": kinds.Q8_0, "int4": kinds.Q4_0}[form]
    beside = path.with_suffix(".part")
    writer = gguf.GGUFWriter(beside, "llama", use_temp_file=True)
    writer.add_context_length(2 * LONGEST)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.wide)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.layers)
    folder = checkpoint(work, model, form == "bfloat16")
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - no dictionary
            tensor = file.get_tensor(name).float()
            if "q_proj" in name or "k_proj" in name:
                tensor = _interleaved(tensor, shape.heads if "q_proj" in name else shape.kv_heads)
            own = kind if tensor.ndim == 2 else kinds.F32
            data: np.ndarray[Any, Any] = tensor.numpy()
            if own != kinds.F32:
                data = gguf.quants.quantize(data, own)
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)) or name, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    beside.rename(path)
    return path


def _llama_cpp(work: Path, model: str, form: str) -> Step:
    import llama_cpp

    own = llama_cpp.Llama(
        str(_gguf(work, model, form)),
        n_ctx=LONGEST + PREFILL,
        n_batch=PREFILL,
        n_ubatch=PREFILL,
        n_threads=THREADS,
        n_threads_batch=THREADS,
        n_gpu_layers=0,
        verbose=False,
    )

    def step(ids: list[int], at: int) -> torch.Tensor:
        own.n_tokens = at  # eval removes later tokens
        own.eval(ids)
        found = llama_cpp.llama_get_logits_ith(own.ctx, -1)
        return torch.from_numpy(np.ctypeslib.as_array(found, (SHAPES[model].vocabulary,)).copy())

    return step


@dataclass(frozen=True)
class Arm:
    """One way to run a model, with its supported formats."""

    formats: tuple[str, ...]
    start: Callable[[Path, str, str], Step]
    prepare: Callable[[Path, str, str], Path]
    needs_history: bool
    """Whether a position can only be passed after all earlier ones. Caches that are plain tensors accept any
    position, and attention reads the same number of elements whatever they contain."""


def _checkpoint_of(work: Path, model: str, form: str) -> Path:
    return checkpoint(work, model, form == "bfloat16")


ARMS = {
    "ours": Arm(FORMATS, _ours, _program, needs_history=True),
    "eager": Arm(FORMATS[:2], lambda *given: _eager(*given, compiled=False), _checkpoint_of, needs_history=False),
    "torch.compile": Arm(
        FORMATS[:2], lambda *given: _eager(*given, compiled=True), _checkpoint_of, needs_history=False
    ),
    "XNNPACK + custom_sdpa": Arm(("float32", "int8", "int4"), _xnnpack, _xnnpack_program, needs_history=False),
    "llama.cpp": Arm(FORMATS, _llama_cpp, _gguf, needs_history=True),
}
