"""``torch.nn.functional.multi_head_attention_forward`` around another attention than torch's.

``nn.MultiheadAttention`` and the layers of ``nn.Transformer`` call it, and it calls ``scaled_dot_product_attention``
where no mode sees it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

__all__ = ["MultiHeadCall"]

_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)


class MultiHeadCall:
    """One call of ``multi_head_attention_forward``: its projections, and the mask as SDPA takes it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = _SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        self.given: dict[str, Any] = bound.arguments

    @property
    def refusal(self) -> str | None:
        """Why torch has to serve the call, or None."""
        given = self.given
        if given["need_weights"]:
            return "nn.MultiheadAttention with need_weights=True, and kp.attention keeps no weights"
        if given["training"] and given["dropout_p"]:
            return f"dropout_p={given['dropout_p']}, and kp.attention has no dropout"
        for name in ("bias_k", "bias_v", "static_k", "static_v"):
            if given[name] is not None:
                return f"nn.MultiheadAttention with {name}"
        return "nn.MultiheadAttention with add_zero_attn=True" if given["add_zero_attn"] else None

    def run(self, attend: Callable[..., torch.Tensor], mask: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        """The result of the call, with ``attend(q, k, v, attn_mask=, is_causal=)`` as its attention."""
        given = self.given
        heads, batched = given["num_heads"], given["query"].ndim == 3
        q, k, v = (
            x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
            for x in (x if batched else x.unsqueeze(1) for x in self._projected())
        )
        out = attend(q, k, v, attn_mask=mask, is_causal=self.causal)
        out = out.permute(2, 0, 1, 3).flatten(2)
        out = functional.linear(out, given["out_proj_weight"], given["out_proj_bias"])
        return (out if batched else out.squeeze(1)), None

    @property
    def causal(self) -> bool:
        """Whether the flag replaces ``attn_mask``, as it does without padding."""
        return bool(self.given["is_causal"]) and self.given["key_padding_mask"] is None

    @property
    def masks(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The tensors that the mask is made of."""
        return (None if self.causal else self.given["attn_mask"]), self.given["key_padding_mask"]

    def mask(self) -> torch.Tensor | None:
        """The mask as SDPA takes it; the booleans of torch's layers say which pairs to leave out."""
        attn_mask, padding = self.masks
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.given["num_heads"]))
        if padding is not None:
            padding = padding.view(-1, 1, 1, padding.shape[-1])
        given = [x for x in (attn_mask, padding) if x is not None]
        if not given:
            return None
        if all(x.dtype == torch.bool for x in given):
            return ~given[0] if len(given) == 1 else ~(given[0] | given[1])
        dtype = self.given["query"].dtype
        addends = [
            torch.zeros(x.shape, dtype=dtype, device=x.device).masked_fill_(x, -torch.inf)
            if x.dtype == torch.bool
            else x
            for x in given
        ]
        return addends[0] if len(addends) == 1 else addends[0] + addends[1]

    def _projected(self) -> tuple[torch.Tensor, ...]:
        given = self.given
        inputs = given["query"], given["key"], given["value"]
        bias = given["in_proj_bias"]
        if not given["use_separate_proj_weight"] and inputs[0] is inputs[1] is inputs[2]:
            return functional.linear(inputs[0], given["in_proj_weight"], bias).chunk(3, dim=-1)
        weights = (
            [given[f"{name}_proj_weight"] for name in "qkv"]
            if given["use_separate_proj_weight"]
            else given["in_proj_weight"].chunk(3)
        )
        biases = [None] * 3 if bias is None else bias.chunk(3)
        return tuple(functional.linear(*each) for each in zip(inputs, weights, biases, strict=True))
