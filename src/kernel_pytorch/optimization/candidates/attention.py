"""Replace the attention of Hugging Face models by ``kp.attention``, through transformers' attention interface."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import nn

from kernel_pytorch import masks
from kernel_pytorch.ops.attention import attention
from kernel_pytorch.ops.attention.hugging_face import carried_mask
from kernel_pytorch.optimization.candidate import Candidate, Context, Sites, Stage
from kernel_pytorch.optimization.edits import Edits
from kernel_pytorch.optimization.examples import leaves
from kernel_pytorch.optimization.fallbacks import fell_back

__all__ = ["HF_ATTENTION", "NAME"]

NAME = "kernel_pytorch_plan"
"""Name of the attention in a model's configuration. Unlike ``"kernel_pytorch"``, which supports every mask or raises
an error, it leaves some calls to SDPA, and compiled models with it have no graph breaks."""
_UNKNOWN = ("position_bias", "cache")  # arguments that change the scores
_PASSING = ("eager", "sdpa")


def pretrained_models(model: nn.Module) -> dict[str, Any]:
    """Return the Hugging Face models in a model by name; empty if transformers was never imported."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return {}
    kind = transformers.PreTrainedModel
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def _mask(
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **arguments: Any,
) -> torch.Tensor | None:
    """Return None if ``_attend`` can infer the mask, and a mask of ``kp.masks`` for padding and documents.

    All other masks are SDPA's tensor. Compiled models get a tensor for padding too, because reading the padding would
    break the graph. transformers builds a tensor in every compiled model, with which SDPA cannot use its fastest
    kernels.
    """
    from transformers.masking_utils import sdpa_mask

    from kernel_pytorch.ops.attention.hugging_face_masks import known_mask

    padding, queries, keys = (arguments.get(name) for name in ("attention_mask", "q_length", "kv_length"))
    at_start = arguments.get("q_offset", 0) == 0 and arguments.get("kv_offset", 0) == 0
    config = arguments.get("config")
    # Chunked attention passes its chunk size here, which is not a window.
    sliding = local_size is not None and local_size == getattr(config, "sliding_window", None)
    sliding = sliding and getattr(config, "attention_chunk_size", None) is None
    if padding is None and queries == keys and at_start:
        if allow_is_causal_skip and (local_size is None or sliding):
            return None  # causal, or a sliding window, whose width the layer passes to the attention
        if allow_is_bidirectional_skip and local_size is None:
            return None
    if queries != 1 and "mask_function" in arguments and not torch.compiler.is_compiling():
        known: torch.Tensor | None = known_mask(**arguments)
        if known is not None:
            return known
    found: torch.Tensor | None = sdpa_mask(
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **arguments,
    )
    return found


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with a recognised mask; calls with a mask tensor, dropout or modified scores go to SDPA."""
    known = attention_mask is not None and attention_mask.dtype is torch.uint64
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    queries, keys = query.shape[2], key.shape[2]
    windowed = sliding_window is not None and sliding_window < keys
    unknown = args or dropout or any(kwargs.get(name) is not None for name in _UNKNOWN)
    if attention_mask is not None:
        left = unknown or not known
    else:
        left = unknown or (causal and 1 < queries != keys) or (windowed and queries != keys)
    if left:
        why = "a mask tensor" if attention_mask is not None and not known else "dropout or a change of the scores"
        fell_back(f"hf-attention: attention with {why} goes to SDPA")
        if known and attention_mask is not None:
            mask = carried_mask(attention_mask, type(module).__name__)
            attention_mask = mask.dense(queries, keys).to(query.device)
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        sdpa: Any = sdpa_attention_forward
        found: tuple[torch.Tensor, None] = sdpa(
            module, query, key, value, attention_mask, *args, dropout=dropout, scaling=scaling, is_causal=is_causal,
            sliding_window=sliding_window, softcap=softcap, s_aux=s_aux, **kwargs,
        )  # fmt: skip
        return found
    if attention_mask is not None:
        mask = carried_mask(attention_mask, type(module).__name__)
    else:
        mask = masks.causal() if causal and queries > 1 else masks.full()
        if windowed and causal:
            mask = mask & masks.window(int(sliding_window or 1) - 1)
    out = attention(query, key, value, mask, scale=scaling, softcap=softcap or None, sink_logits=s_aux)
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2).contiguous(), None


def _register() -> None:
    transformers = importlib.import_module("transformers")
    transformers.AttentionInterface.register(NAME, _attend)
    importlib.import_module("transformers.masking_utils").AttentionMaskInterface.register(NAME, _mask)


def _window_unseen(config: Any, context: Context) -> bool:
    """Return whether no example is longer than the model's sliding window; False when a verified plan is applied."""
    window = getattr(config, "sliding_window", None)
    if window is None or not context.examples:
        return False
    sizes = [
        max(tensor.shape, default=0)
        for one in context.examples
        for _, tensor in leaves((one.args, dict(one.kwargs)))
    ]
    return bool(max(sizes, default=0) <= window)


def _match(model: nn.Module, context: Context) -> Sites | str:
    models = pretrained_models(model)
    if not models:
        return "the model is not from transformers, whose attention interface it uses"
    names, reasons = [], {}
    for name, module in models.items():
        implementation = module.config._attn_implementation
        if implementation not in _PASSING:
            reasons[name] = f"its attention is {implementation!r}, which is not {' or '.join(_PASSING)}"
        elif not getattr(module, "_supports_sdpa", False):
            reasons[name] = "it does not use the attention interface"
        elif getattr(module.config, "output_attentions", False):
            reasons[name] = "it returns attention weights"
        elif _window_unseen(module.config, context):
            reasons[name] = (
                f"no input is longer than its sliding window of {module.config.sliding_window}, so that the window "
                "could not be verified; give one that is"
            )
        elif "" in names and module.config is models[""].config:
            continue  # shares the configuration of the enclosing model
        else:
            names.append(name)
    return Sites(tuple(names), reasons) if names else next(iter(reasons.values()))


def _apply(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    _register()
    for name in sites:
        config: Any = model.get_submodule(name).config
        edits.set(config, "_attn_implementation", NAME)


HF_ATTENTION = Candidate(
    "hf-attention",
    "attention of Hugging Face models on kp.attention",
    "exact",
    Stage.MODULE,
    _match,
    _apply,
    requires=frozenset({"transformers"}),
)
