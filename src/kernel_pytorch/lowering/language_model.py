"""Wrap Hugging Face causal language models with KV caches of constant size, for lowering."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from kernel_pytorch.kv_cache import KVCache

__all__ = ["CachedLanguageModel", "require_history"]

_NAME = "kernel_pytorch_cache"
_NOT_TAKEN = {
    "softcap": "soft-capped scores",
    "s_aux": "learnt attention sinks",
    "head_mask": "a mask of heads",
    "position_bias": "a bias of positions",
}
_INSTEAD = "lower the model without a cache, with kp.lower"
_MOST_APART = 1e-3
"""Maximum relative error of float32 logits: rounding causes 1e-6 to 1e-4, a lost state far more."""


@dataclass
class _Call:
    """State of one model call: the layers' caches, and the sizes of their keys and values.

    Without caches, the sizes are recorded and attention returns zeros.
    """

    caches: torch.nn.ModuleList | None = None
    position: torch.Tensor | int = 0
    sizes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """(key heads, key head dimension, value head dimension) by layer."""


# Not an argument of the model's forward: many models do not pass unknown arguments on to their attention.
_CALL: ContextVar[_Call | None] = ContextVar("kernel_pytorch_cached_call", default=None)


class CachedLanguageModel(torch.nn.Module):
    """A causal language model of transformers whose layers attend through a ``KVCache``.

    ``model(tokens, position)`` takes token ids of shape (batch, n), with the first at ``position``, and returns the
    logits of the last one. Keys are cached after rotary embedding, at absolute positions. The model is not copied:
    its attention is switched to the caches. A model with layers that bypass transformers' attention interface, such
    as convolutions over time, raises an error. The model runs once on one token, to record the sizes of its keys and
    values.

    Args:
        model: a model that uses transformers' attention interface, such as ``LlamaForCausalLM``.
        window: number of previous tokens to attend to; layers with a shorter sliding window keep their own.
        sinks: number of initial tokens that every token attends to.
        longest: maximum number of tokens per call.
        dtype: dtype of the caches: float32, float16 or int8.
        batch: number of sequences; all are at the same position.

    Example:
        >>> import torch, transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = CachedLanguageModel(transformers.LlamaForCausalLM(config), window=8, sinks=1).eval()
        >>> model(torch.tensor([[1, 2, 3]]), torch.tensor([0])).shape
        torch.Size([1, 1, 64])
    """

    def __init__(
        self,
        model: Any,
        *,
        window: int,
        sinks: int = 0,
        longest: int = 128,
        dtype: torch.dtype = torch.float32,
        batch: int = 1,
    ) -> None:
        super().__init__()
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(_NAME, _attend)
        AttentionMaskInterface.register(_NAME, lambda *_, **__: None)
        config = model.config.get_text_config()
        self.model = model
        self.model.set_attn_implementation(_NAME)
        call = _Call()
        with torch.no_grad():
            self._run(torch.zeros(1, 1, dtype=torch.int64), call)
        sizes = call.sizes
        own_windows = _sliding_windows(config)
        without = [str(layer) for layer in range(len(own_windows)) if layer not in sizes]
        if without:
            raise ValueError(
                f"model={type(model).__name__}: layers {', '.join(without)} do not attend through transformers' "
                f"attention interface, so a cache cannot hold what they need of earlier tokens; {_INSTEAD}"
            )
        self.caches = torch.nn.ModuleList(
            KVCache(
                sizes[layer][0],
                sizes[layer][1],
                window=window if own is None else min(window, own),
                sinks=sinks if own is None or own >= window else 0,
                longest=longest,
                dtype=dtype,
                batch=batch,
                value_dim=sizes[layer][2],
            )
            for layer, own in enumerate(own_windows)
        )

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return self._run(tokens, _Call(self.caches, position))

    def _run(self, tokens: torch.Tensor, call: _Call) -> torch.Tensor:
        positions = call.position + torch.arange(tokens.shape[1], device=tokens.device)
        before = _CALL.set(call)
        try:
            found = self.model(input_ids=tokens, position_ids=positions[None], use_cache=False, logits_to_keep=1)
        finally:
            _CALL.reset(before)
        return found.logits  # type: ignore[no-any-return]


def require_history(model: Any) -> None:
    """Raise ValueError unless a model with caches, called in several chunks, gives the logits of a single call.

    Layers with other state, such as a recurrence beside attention, fail this check. Afterwards the model attends
    through caches.
    """
    tokens = torch.arange(1, 8)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        wanted = model(input_ids=tokens, use_cache=False).logits[:, -1:]
        cached = CachedLanguageModel(model, window=8, longest=4).eval()
        for start, stop in ((0, 4), (4, 6), (6, 7)):
            found = cached(tokens[:, start:stop], torch.tensor([start]))
    apart = float((found - wanted).norm() / wanted.norm())
    if not apart <= _MOST_APART:
        raise ValueError(
            f"model={type(model).__name__}: with a KV cache its logits have a relative error of {apart:.1e}, because "
            f"it depends on earlier tokens by more than keys and values; {_INSTEAD}"
        )


def _sliding_windows(config: Any) -> list[int | None]:
    """Return the model's own sliding window for each layer; None for full attention.

    ``sliding_window`` of transformers includes the token itself, and the window of ``KVCache`` does not.
    """
    width = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [width - 1 if width and kind == "sliding_attention" else None for kind in kinds]


def _attend(
    module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    call = _CALL.get()
    if call is None:
        raise ValueError("this model attends through caches: call the CachedLanguageModel around it")
    for name, meaning in _NOT_TAKEN.items():
        if options.get(name) is not None:
            raise ValueError(f"the model asks for {name} ({meaning}), which a KV cache does not do; {_INSTEAD}")
    layer = module.layer_idx
    if layer in call.sizes:
        raise ValueError(f"layer {layer} attends twice in one call, and has one cache; {_INSTEAD}")
    call.sizes[layer] = (k.shape[1], k.shape[3], v.shape[3])
    if call.caches is None:
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3]), None
    cache: Any = call.caches[layer]
    if options.get("sliding_window") is not None and cache.window >= options["sliding_window"]:
        raise ValueError(
            f"layer {module.layer_idx} asks for sliding_window={options['sliding_window']}, which its configuration "
            f"does not say: pass window={options['sliding_window'] - 1} or less"
        )
    return cache(q, k, v, call.position, scale=scaling).transpose(1, 2), None
