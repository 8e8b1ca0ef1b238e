"""Language models of Hugging Face's transformers with caches of constant size, ready to be lowered."""

from __future__ import annotations

from typing import Any

import torch

from kernel_pytorch.kv_cache import KVCache

__all__ = ["CachedLanguageModel"]

_NAME = "kernel_pytorch_cache"
_NOT_TAKEN = ("softcap", "s_aux", "head_mask")


class CachedLanguageModel(torch.nn.Module):
    """A causal language model of transformers whose layers attend through a ``KVCache``.

    ``model(tokens, position)`` takes token ids of shape (batch, n), the first of which stands at ``position``, and
    returns the logits of the last one. Keys are kept rotated, at absolute positions. The model given is used, not
    copied: its attention is switched to the caches.

    Args:
        model: such as ``LlamaForCausalLM``; one that asks transformers for its attention.
        window: how far back a token attends; layers with a sliding window of their own keep theirs if it is shorter.
        sinks: how many of the first tokens every token attends to.
        longest: the most tokens of one call.
        dtype: of the caches: float32, float16 or int8.
        batch: sequences; all are at the same position.

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
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.model = model
        self.model.set_attn_implementation(_NAME)
        own_windows = _sliding_windows(config)
        self.caches = torch.nn.ModuleList(
            KVCache(
                kv_heads,
                head_dim,
                window=window if own is None else min(window, own),
                sinks=sinks if own is None or own >= window else 0,
                longest=longest,
                dtype=dtype,
                batch=batch,
            )
            for own in own_windows
        )

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        positions = position + torch.arange(tokens.shape[1], device=tokens.device)
        found = self.model(
            input_ids=tokens,
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=1,
            kernel_pytorch_caches=self.caches,
            kernel_pytorch_position=position,
        )
        return found.logits  # type: ignore[no-any-return]


def _sliding_windows(config: Any) -> list[int | None]:
    """For each layer how far back it attends by itself; None for everything.

    transformers counts the token itself into ``sliding_window``, and ``KVCache`` does not.
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
    *,
    kernel_pytorch_caches: Any = None,
    kernel_pytorch_position: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if kernel_pytorch_caches is None:
        raise ValueError("this model attends through caches: call the CachedLanguageModel around it")
    asked = [name for name in _NOT_TAKEN if options.get(name) is not None]
    if asked:
        raise ValueError(f"the model asks for {asked[0]}={options[asked[0]]}, which a cache does not do")
    cache = kernel_pytorch_caches[module.layer_idx]
    if options.get("sliding_window") is not None and cache.window >= options["sliding_window"]:
        raise ValueError(
            f"layer {module.layer_idx} asks for sliding_window={options['sliding_window']}, which its configuration "
            f"does not say: pass window={options['sliding_window'] - 1} or less"
        )
    return cache(q, k, v, kernel_pytorch_position, scale=scaling).transpose(1, 2), None
