"""``with kp.attention_everywhere():`` serves ``scaled_dot_product_attention`` calls by ``kp.attention``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kernel_pytorch._compat.modes import transform_active
from kernel_pytorch.hardware_abstraction.selection import UnsupportedCallError
from kernel_pytorch.masks import Mask, causal, full, intervals
from kernel_pytorch.ops.attention.multi_head import MultiHeadCall
from kernel_pytorch.ops.attention.tensor_mask import mask_and_bias

__all__ = ["ReplacedCalls", "attention_everywhere"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FORMATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class ReplacedCalls:
    """Counts of the SDPA calls in a block: those served, by mask, and those left to torch, by reason.

    Calls inside compiled functions are not counted.
    """

    masks: Counter[str] = field(default_factory=Counter)
    """Calls served by ``kp.attention``, by mask."""
    left_to_torch: Counter[str] = field(default_factory=Counter)
    """Calls left to torch, by reason."""

    @property
    def served(self) -> int:
        return sum(self.masks.values())

    def __str__(self) -> str:
        rows = [f"{count} x {mask}" for mask, count in self.masks.most_common()]
        rows += [f"{count} x left to torch: {reason}" for reason, count in self.left_to_torch.most_common()]
        return "\n".join(rows) or "no call of scaled_dot_product_attention"


@contextmanager
def attention_everywhere(*, kernel: str | None = None) -> Iterator[ReplacedCalls]:
    """Serve the calls of ``torch.nn.functional.scaled_dot_product_attention`` inside the block, on this thread.

    ``is_causal`` and mask tensors are recognised as masks of ``kp.masks`` (all true, causal, windows, padding,
    documents), so that kernels skip masked tiles. Other additive masks are added to the scores, with their gradient.
    A call that cannot be served, such as one with dropout, goes to torch and is counted with its reason.
    ``nn.MultiheadAttention`` and the layers of ``nn.Transformer`` are served too if they return no attention weights.

    Args:
        kernel: pin a kernel of ``kp.attention`` by name.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> q = k = v = torch.randn(1, 4, 64, 32)
        >>> with kp.attention_everywhere() as calls:
        ...     out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        ...     dropped = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        >>> print(calls)
        1 x causal()
        1 x left to torch: dropout_p=0.1, and kp.attention has no dropout
    """
    calls = ReplacedCalls()
    with _Mode(calls, kernel):
        yield calls


class _Mode(TorchFunctionMode):
    def __init__(self, calls: ReplacedCalls, kernel: str | None) -> None:
        super().__init__()
        self.calls, self.kernel = calls, kernel
        self.made: tuple[Any, torch.Tensor | None] = ((), None)
        """The last mask made for ``nn.MultiheadAttention``, and what it was made of: layers share their masks."""

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.multi_head_attention_forward:
            return self.attend_with_projections(func, args, kwargs or {})
        if func is torch._native_multi_head_attention:
            self._left("nn.MultiheadAttention in torch's fast path")
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self.attend(*args, **(kwargs or {}))

    def _left(self, reason: str) -> None:
        if not torch.compiler.is_compiling():
            self.calls.left_to_torch[reason] += 1

    def attend_with_projections(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``multi_head_attention_forward``, whose own attention this mode does not see."""
        call = MultiHeadCall(args, kwargs)
        if call.refusal is not None:
            self._left(call.refusal)
            return func(*args, **kwargs)
        return call.run(self.attend, self._mask_of(call))

    def _mask_of(self, call: MultiHeadCall) -> torch.Tensor | None:
        if torch.compiler.is_compiling():
            return call.mask()
        known = tuple((x, -1 if x is None or x.is_inference() else x._version) for x in call.masks)
        same = len(self.made[0]) == 2 and all(
            a is b and m == n for (a, m), (b, n) in zip(known, self.made[0], strict=True)
        )
        if not same:
            self.made = known, call.mask()
        return self.made[1]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        from kernel_pytorch.ops.attention import attention

        reason = _refusal(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        if reason is None:
            try:
                q, k, v = (x.unsqueeze(0) if x.ndim == 3 else x for x in (query, key, value))
                mask, bias = _mask(q, k, attn_mask, is_causal, three=query.ndim == 3)
                out = attention(q, k, v, mask, scale=scale, bias=bias, kernel=self.kernel)
                assert isinstance(out, torch.Tensor)
                if not torch.compiler.is_compiling():  # a compiled mask has no expression to show
                    self.calls.masks[str(mask) if bias is None else f"{mask} with a bias"] += 1
                return out.squeeze(0) if query.ndim == 3 else out
            except UnsupportedCallError as error:
                reason = str(error)
        self._left(reason)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _refusal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> str | None:
    """Return why ``kp.attention`` cannot serve a call, or None. Invalid calls are left to torch and its errors."""
    given = [query, key, value] + ([] if attn_mask is None else [attn_mask])
    if any(type(x) not in _PLAIN or x.is_nested for x in given):
        return f"a tensor of type {next((type(x).__name__ for x in given if type(x) not in _PLAIN), 'nested')}"
    if dropout_p:
        return f"dropout_p={dropout_p}, and kp.attention has no dropout"
    if not torch.compiler.is_compiling() and transform_active():
        return "inside a transform of torch.func"
    if not query.ndim == key.ndim == value.ndim or query.ndim not in (3, 4):
        return (
            f"query has {query.ndim} dimensions, key {key.ndim} and value {value.ndim}; kp.attention takes 3 or 4"
        )
    if not query.dtype == key.dtype == value.dtype or query.dtype not in _FORMATS:
        return f"query is {query.dtype}, key {key.dtype} and value {value.dtype}"
    heads = -3
    if query.shape[:heads] != key.shape[:heads] or key.shape[:-1] != value.shape[:-1]:
        return f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} are broadcast"
    if query.shape[heads] != key.shape[heads] and not (enable_gqa or key.shape[heads] == 1):
        return f"{query.shape[heads]} query and {key.shape[heads]} key heads without enable_gqa"
    if key.shape[heads] == 0 or query.shape[heads] % key.shape[heads] or query.shape[-1] != key.shape[-1]:
        return f"query {list(query.shape)} and key {list(key.shape)} do not fit each other"
    if attn_mask is not None:
        if is_causal:
            return "attn_mask and is_causal together"
        scores = (*query.shape[:-1], key.shape[-2])
        own = (1,) * (len(scores) - attn_mask.ndim) + attn_mask.shape
        fits = len(own) == len(scores) and all(a in (1, b) for a, b in zip(own, scores, strict=True))
        if not fits or (attn_mask.dtype != torch.bool and attn_mask.dtype not in _FORMATS):
            return f"attn_mask is {attn_mask.dtype} {list(attn_mask.shape)}"
    return None


def _mask(
    q: torch.Tensor, k: torch.Tensor, attn_mask: torch.Tensor | None, is_causal: bool, *, three: bool
) -> tuple[Mask, torch.Tensor | None]:
    q_len, kv_len = q.shape[2], k.shape[2]
    if attn_mask is not None:
        return mask_and_bias(attn_mask[None] if three and attn_mask.ndim == 3 else attn_mask, q_len, kv_len)
    if not is_causal:
        return full(), None
    if q_len == kv_len:
        return causal(), None
    # torch aligns is_causal to the first query and key, kp.masks to the last ones.
    last = torch.arange(1, q_len + 1).clamp_(max=kv_len)
    return intervals(torch.zeros_like(last), last), None
