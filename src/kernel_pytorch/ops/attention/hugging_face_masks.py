"""Masks of Hugging Face models as masks of ``kp.masks``, without a tensor of tokens by tokens.

transformers describes a mask by a function of indices, composed of a few known ones. What is composed of those alone
becomes an expression of ``kp.masks``; any other function is evaluated some rows at a time, and its rows become
intervals of keys. Both are exact.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernel_pytorch._compat.compiler import index_by_tensors
from kernel_pytorch.masks import Mask, causal, documents, full, padding, window
from kernel_pytorch.masks.from_tensor import from_rows
from kernel_pytorch.ops.attention.hugging_face import carried

__all__ = ["known_mask", "make_mask"]

_UNBOUNDED = 1 << 30


@dataclass(frozen=True)
class _Span:
    """The queries and keys of a call, as positions in the whole sequence."""

    batch: int
    q_offset: int
    q_len: int
    kv_offset: int
    kv_len: int

    @property
    def aligned(self) -> bool:
        """Whether the last query is at the last key, as masks of ``kp.masks`` have it."""
        return self.q_offset + self.q_len == self.kv_offset + self.kv_len


@torch.compiler.disable  # type: ignore[untyped-decorator]
def make_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor:
    """The mask that transformers' ``create_causal_mask`` and its siblings ask for, as a tensor that carries it."""
    span = _Span(batch_size, int(q_offset), q_length, kv_offset, kv_length)
    real = _real_tokens(attention_mask, span)
    known = _known(mask_function, real, span)
    if known is None:
        known = _evaluated(mask_function, real, span, use_vmap, torch.device(device))
    return carried(known)


def known_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """The same, or None for masks that are not an expression of transformers' own functions and padding."""
    span = _Span(batch_size, int(q_offset), q_length, kv_offset, kv_length)
    found = _known(mask_function, _real_tokens(attention_mask, span), span)
    return None if found is None else carried(found)


def _known(function: Callable[..., Any], real: torch.Tensor | None, span: _Span) -> Mask | None:
    known = _expression(function, span) if span.aligned else None
    padded = _padding(real)
    if known is None or padded is None:
        return None
    return known if padded.is_full else known & padded


def _real_tokens(attention_mask: torch.Tensor | None, span: _Span) -> torch.Tensor | None:
    """(batch, keys) booleans, true where a key is a token; None where all are. Keys not seen yet are none."""
    if attention_mask is None:
        return None
    missing = span.kv_offset + span.kv_len - attention_mask.shape[1]
    real = torch.nn.functional.pad(attention_mask.bool(), (0, max(missing, 0)))
    real = real[:, span.kv_offset : span.kv_offset + span.kv_len]
    return None if bool(real.all()) else real


def _padding(real: torch.Tensor | None) -> Mask | None:
    """Padding on one side as a mask; None where tokens are scattered."""
    if real is None:
        return full()
    lengths, kv_len = real.sum(dim=1), real.shape[1]
    position = torch.arange(kv_len, device=real.device)
    if bool((real == (position >= kv_len - lengths[:, None])).all()):
        return padding(lengths, side="left")
    if bool((real == (position < lengths[:, None])).all()):
        return padding(lengths, side="right")
    return None


def _expression(function: Callable[..., Any], span: _Span) -> Mask | None:
    """The mask of a function that is composed of transformers' own; None for any other."""
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return None
    name = function.__qualname__.split(".")[0]
    values = inspect.getclosurevars(function).nonlocals
    if name == "causal_mask_function":
        return causal()
    if name == "bidirectional_mask_function":
        return full()
    if name == "sliding_window_overlay":
        return window(values["sliding_window"] - 1, _UNBOUNDED)
    if name == "packed_sequence_mask_function":
        return _packed(values["packed_sequence_mask"], span)
    if name in ("and_masks", "or_masks"):
        total: Mask | None = None
        for inner in values["mask_functions"]:
            found = _expression(inner, span)
            if found is None:
                return None
            total = found if total is None else total & found if name == "and_masks" else total | found
        return total
    return None


def _packed(numbers: torch.Tensor, span: _Span) -> Mask | None:
    """Documents numbered along the sequence, (batch, tokens)."""
    if span.kv_offset or span.q_offset or numbers.shape[1] != span.kv_len or bool((numbers.diff(dim=1) < 0).any()):
        return None
    rows = [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in numbers.cpu()]
    return documents(rows if len({tuple(row) for row in rows}) > 1 else rows[0])


def _evaluated(
    function: Callable[..., Any], real: torch.Tensor | None, span: _Span, use_vmap: bool, device: torch.device
) -> Mask:
    entry = torch.arange(span.batch, device=device)
    head = torch.arange(1, device=device)
    keys = torch.arange(span.kv_offset, span.kv_offset + span.kv_len, device=device)

    def rows(begin: int, end: int) -> torch.Tensor:
        queries = torch.arange(span.q_offset + begin, span.q_offset + end, device=device)
        if use_vmap:
            found = _by_vmap(function)(entry, head, queries, keys)
        else:
            found = function(entry[:, None, None, None], head[:, None, None], queries[:, None], keys)
        keep = found.expand(span.batch, 1, end - begin, span.kv_len)[:, 0]
        return keep if real is None else keep & real[:, None].to(device)

    return from_rows(rows, span.q_len, span.kv_len)


def _by_vmap(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A function of single indices over all of them; one that indexes tensors by its indices needs the mode."""
    mapped: Any = function
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        mapped = torch.vmap(mapped, in_dims=dims, out_dims=0)

    def run(*indices: torch.Tensor) -> torch.Tensor:
        with index_by_tensors():
            found: torch.Tensor = mapped(*indices)
        return found

    return run
