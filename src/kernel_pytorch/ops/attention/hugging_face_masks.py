"""Convert masks of Hugging Face models to ``kp.masks``, without a (tokens, tokens) tensor.

transformers describes a mask by a function of indices, composed of a few known functions. Compositions of those
become expressions of ``kp.masks``. Any other function is evaluated in row chunks, and each row becomes intervals of
keys. Both are exact.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernel_pytorch._compat.compiler import index_by_tensors
from kernel_pytorch._compat.modes import fake_mode_active
from kernel_pytorch.masks import Mask, causal, documents, full, padding, window
from kernel_pytorch.masks.from_tensor import from_rows
from kernel_pytorch.ops.attention.hugging_face import NAME, carried

__all__ = ["known_mask", "make_mask"]

_UNBOUNDED = 1 << 30


@dataclass(frozen=True)
class _Span:
    """The positions of a call's queries and keys in the whole sequence."""

    batch: int
    q_offset: int
    q_len: int
    kv_offset: int
    kv_len: int

    @property
    def aligned(self) -> bool:
        """Whether the last query is at the last key, as ``kp.masks`` requires."""
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
    config: Any = None,
    **_: Any,
) -> torch.Tensor:
    """Return the mask of transformers' ``create_causal_mask`` and similar functions, as a tensor that carries it."""
    _refuse_own_attention(config)
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


def _refuse_own_attention(config: Any) -> None:
    """Raise an error for a model whose code computes attention without transformers' registry, such as Bloom.

    It would take the carried code for a mask of numbers.
    """
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    module = sys.modules.get(name)
    if module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return
    if any(
        "Attention" in known and getattr(kind, "__module__", "") == name for known, kind in vars(module).items()
    ):
        raise NotImplementedError(
            f'attn_implementation="{NAME}": {type(config).__name__.removesuffix("Config")} computes attention in its '
            'own code, without transformers\' AttentionInterface; use attn_implementation="eager"'
        )


def _refuse_fakes() -> None:
    """Raise an error where tensors have no values, as in ``torch.export``: padding and packing cannot be read."""
    if fake_mode_active():
        raise NotImplementedError(
            f'attn_implementation="{NAME}" reads padding and packed sequences from tensors, which have no values '
            'under torch.export: call set_attn_implementation("sdpa") on the model before'
        )


def _real_tokens(attention_mask: torch.Tensor | None, span: _Span) -> torch.Tensor | None:
    """Return (batch, keys) booleans, true for tokens and false for padding and keys not seen yet; None if all are
    tokens."""
    if attention_mask is None:
        return None
    _refuse_fakes()
    missing = span.kv_offset + span.kv_len - attention_mask.shape[1]
    real = torch.nn.functional.pad(attention_mask.bool(), (0, max(missing, 0)))
    real = real[:, span.kv_offset : span.kv_offset + span.kv_len]
    return None if bool(real.all()) else real


def _padding(real: torch.Tensor | None) -> Mask | None:
    """Return padding on one side as a mask; None if padding is between tokens."""
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
    """Return the mask of a composition of transformers' own mask functions; None for any other function."""
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return None
    name = function.__qualname__.split(".")[0]
    values = inspect.getclosurevars(function).nonlocals
    if name == "causal_mask_function":
        return causal()
    if name == "bidirectional_mask_function":
        return full()
    if name == "sliding_window_overlay":
        size = values["sliding_window"]  # 0 in Qwen2-MoE without windows, whose layers do not use the mask
        return window(size - 1, _UNBOUNDED) if size > 0 else None
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
    """Return the document mask of (batch, tokens) document numbers."""
    _refuse_fakes()
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
    """Vectorize a function of scalar indices; functions that index tensors by them need ``index_by_tensors``."""
    mapped: Any = function
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        mapped = torch.vmap(mapped, in_dims=dims, out_dims=0)

    def run(*indices: torch.Tensor) -> torch.Tensor:
        with index_by_tensors():
            found: torch.Tensor = mapped(*indices)
        return found

    return run
