"""Exact attention for any mask, dense and block-sparse, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernel_pytorch._compat.modes import any_autocast, jit_tracing, transform_active
from kernel_pytorch.hardware_abstraction.dispatch import Function
from kernel_pytorch.masks import Mask, full
from kernel_pytorch.ops.attention.definition import ATTENTION, result_dtype
from kernel_pytorch.ops.attention.kernels import (
    KERNEL_CPU_FLASH,
    KERNEL_CUDNN,
    KERNEL_CUDNN_FLEX,
    KERNEL_CUDNN_FLEX_DETERMINISTIC,
    KERNEL_FLASH,
    KERNEL_FLASH_4,
    KERNEL_FLASH_4_DETERMINISTIC,
    KERNEL_NATIVE,
    KERNEL_PAGED_GATHER,
    KERNEL_PAGED_TRITON,
    KERNEL_SCORE_MOD_TILED,
    KERNEL_SCORE_MOD_TRITON,
    KERNEL_TILED,
    KERNEL_TRITON,
    KERNEL_TRITON_SPLIT_KV,
)
from kernel_pytorch.ops.attention.paged import PAGED_ATTENTION, PageTable
from kernel_pytorch.ops.attention.score_mod import SCORE_MOD_ATTENTION, Terms
from kernel_pytorch.ops.attention.sink_logits import with_sink_logits

__all__ = [
    "KERNEL_CPU_FLASH",
    "KERNEL_CUDNN",
    "KERNEL_CUDNN_FLEX",
    "KERNEL_CUDNN_FLEX_DETERMINISTIC",
    "KERNEL_FLASH",
    "KERNEL_FLASH_4",
    "KERNEL_FLASH_4_DETERMINISTIC",
    "KERNEL_NATIVE",
    "KERNEL_PAGED_GATHER",
    "KERNEL_PAGED_TRITON",
    "KERNEL_SCORE_MOD_TILED",
    "KERNEL_SCORE_MOD_TRITON",
    "KERNEL_TILED",
    "KERNEL_TRITON",
    "KERNEL_TRITON_SPLIT_KV",
    "PageTable",
    "attention",
]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_function = Function(ATTENTION)
_score_mod = Function(SCORE_MOD_ATTENTION)
_paged = Function(PAGED_ATTENTION)

spreading: list[Callable[..., Any]] = []
"""Stack of handlers for calls without ``group``; a model that is sharded across ranks pushes one in its forward."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    kernel: str | None = None,
    group: Any = None,
    pages: PageTable | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention: ``softmax(q k^T * scale) v`` over the keys that the mask keeps.

    Under autocast, q, k and v are converted to autocast's dtype, as for ``scaled_dot_product_attention``.

    Args:
        q: (batch, q_heads, q_len, head_dim).
        k, v: (batch, kv_heads, kv_len, head_dim), with q_heads a multiple of kv_heads; v may have another
            head_dim. Any strides, any lengths.
        mask: a mask of ``kp.masks``; None to attend to all keys.
        scale: ``head_dim ** -0.5`` if None.
        softcap: soft-capping: scores become ``softcap * tanh(scores / softcap)``, as in Gemma 2.
        bias: added to the scores, after soft-capping; it broadcasts to (batch, q_heads, q_len, kv_len) and has a
            gradient, as T5 needs. -inf leaves a pair out.
        alibi_slopes: (q_heads,); ``slope * |i - j|`` is subtracted from the score of positions i and j. No gradient.
        sink_logits: (q_heads,); a learned score in the softmax of every query, without a value, as in gpt-oss.
            Not the same as ``kp.masks.sinks``, which are keys.
        dropout_p: must be 0: attention here is exact.
        return_lse: also return the log-sum-exp of the scores, (batch, q_heads, q_len) in float32, through which
            gradients flow as well.
        kernel: pin an implementation by name (``kp.explain`` lists them).
        group: the ranks that a sequence is sharded across, as a ``kp.context_parallel.Context``, a process group or a
            mesh dimension: q, k and v are then this rank's tokens. ``kp.context_parallel.Chunks`` processes the keys
            of one device in chunks instead.
        pages: a ``kp.PageTable``; k and v are then pages, (pages, kv_heads, page_size, head_dim). For inference:
            there is no gradient. The mask counts positions from each row's own length; documents, blocks, intervals
            and padding are not supported.

    Returns:
        (batch, q_heads, q_len, v's head_dim), contiguous. A query that attends to nothing gets zeros, an lse of
        -inf and no gradient.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> q, k, v = (torch.randn(1, 4, 128, 64) for _ in range(3))
        >>> kp.attention(q, k, v, kp.masks.causal() & kp.masks.window(32)).shape
        torch.Size([1, 4, 128, 64])
        >>> kp.attention(q, k, v, kp.masks.causal(), softcap=50.0, sink_logits=torch.zeros(4)).shape
        torch.Size([1, 4, 128, 64])
    """
    if dropout_p:
        raise ValueError(
            f"dropout_p={dropout_p}: kp.attention is exact and has no dropout; leave it out (Hugging Face models: "
            "attention_dropout=0.0 in the config), or use torch.nn.functional.scaled_dot_product_attention"
        )
    if pages is not None:
        others = {
            "group": group,
            "softcap": softcap,
            "bias": bias,
            "alibi_slopes": alibi_slopes,
            "sink_logits": sink_logits,
        }
        return _over_pages(q, k, v, mask, pages, scale, return_lse, kernel, others)
    if spreading and group is None:
        found: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = spreading[-1](
            q,
            k,
            v,
            mask,
            scale=scale,
            softcap=softcap,
            bias=bias,
            alibi_slopes=alibi_slopes,
            sink_logits=sink_logits,
            return_lse=return_lse,
            kernel=kernel,
        )
        return found
    if mask is None:
        mask = full()
    tensors = isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
    compiling = torch.compiler.is_compiling()  # torch.compile cannot trace the private functions below
    if tensors and not compiling:
        _refuse_layouts(q, k, v)
        if jit_tracing():
            raise NotImplementedError(
                "torch.jit.trace cannot trace kp.attention: use torch.export.export or torch.compile"
            )
    kind = q.device.type if tensors and (compiling or any_autocast()) else "meta"
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    if tensors and not compiling and group is None and isinstance(mask, Mask):
        mask = _simplified(mask, q, k)
    if scale is None:
        # If q has no head_dim, the op's check raises the error.
        known = tensors and q.ndim > 0 and q.shape[-1] > 0
        scale = float(q.shape[-1]) ** -0.5 if known else 1.0
    plain = softcap is None and bias is None and alibi_slopes is None
    trains = _may_train(q, k, v, bias, sink_logits)
    wanted = "lse" if return_lse else "grad" if trains else "out"
    # A sink scales the result before it is rounded: outside the kernel for float32, inside it for other dtypes.
    rounded = tensors and result_dtype(q.dtype, "parts") != q.dtype
    rescaled = sink_logits is not None and (group is not None or (plain and not rounded))
    plain = plain and (sink_logits is None or rescaled)
    if rescaled:
        wanted = "parts" if rounded else "lse"
    if group is not None:
        out, lse = _across_ranks(q, k, v, mask, scale, wanted, trains, plain, kernel, group)
    elif plain:
        out, lse = _function(q, k, v, mask, scale, wanted, kernel=kernel)
    else:
        if alibi_slopes is not None and getattr(alibi_slopes, "requires_grad", False):
            raise ValueError("alibi_slopes requires a gradient, and has none: pass it with .detach(), or use bias")
        if isinstance(bias, torch.Tensor) and bias.ndim < 4:
            bias = bias[(None,) * (4 - bias.ndim)]
        if softcap == 0:
            raise ValueError("softcap=0: use a number above 0, or None for no soft-capping")
        terms = Terms(bias, alibi_slopes, sink_logits, softcap or 0.0, _may_train(bias))
        out, lse = _score_mod(q, k, v, mask, scale, wanted, *terms, kernel=kernel)
    if sink_logits is not None and rescaled:
        out, lse = with_sink_logits(out, lse, sink_logits, q.dtype)
    return (out, lse) if return_lse else out


def _over_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask | None,
    pages: PageTable,
    scale: float | None,
    return_lse: bool,
    kernel: str | None,
    others: dict[str, Any],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(pages, PageTable):
        raise TypeError(f"pages={pages!r}: expected a kp.PageTable(table, lengths)")
    given = [name for name, value in others.items() if value is not None] + ["context_parallel"] * bool(spreading)
    if given:
        raise NotImplementedError(
            f"pages: attention over pages has no {', '.join(given)}; leave it out, or gather the keys into k and v"
        )
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (q, k, v)):
        raise NotImplementedError(
            "pages: attention over pages has no gradient, and q, k or v requires one: call it under torch.no_grad(), "
            "or pass them with .detach()"
        )
    if scale is None:
        scale = float(q.shape[-1]) ** -0.5 if isinstance(q, torch.Tensor) and q.ndim and q.shape[-1] else 1.0
    chosen = full() if mask is None else mask
    out, lse = _paged(q, k, v, pages.table, pages.lengths, chosen, scale, kernel=kernel)
    return (out, lse) if return_lse else out


def _refuse_layouts(*tensors: torch.Tensor) -> None:
    for x in tensors:
        if x.layout is not torch.strided or x.is_nested:
            name = "qkv"[[x is y for y in tensors].index(True)]
            if x.is_nested:
                raise TypeError(f"{name} is a nested tensor: concatenate its sequences and use kp.masks.documents")
            raise TypeError(f"{name} has layout {x.layout}: use a strided tensor, as of .to_dense()")


def _simplified(mask: Mask, q: torch.Tensor, k: torch.Tensor) -> Mask:
    """Return ``full()`` or ``causal()`` if the mask equals it. A mask that does not fit is left to the op's check."""
    if q.ndim != 4 or k.ndim != 4 or type(q) not in _PLAIN:
        return mask
    try:
        return mask.simplified(q.shape[2], k.shape[2])
    except ValueError:
        return mask


def _across_ranks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    scale: float,
    wanted: str,
    trains: bool,
    plain: bool,
    kernel: str | None,
    group: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    from kernel_pytorch.distributed.attention import spread_attention

    if not plain:
        raise NotImplementedError(
            "group: attention across ranks has no softcap, bias or alibi_slopes; leave out group, or these"
        )
    return spread_attention(q, k, v, mask, scale, wanted in ("lse", "parts") and trains, group, kernel, trains)


def _may_train(*tensors: torch.Tensor | None) -> bool:
    """Return whether a backward may follow; always true under torch.compile and torch.func, where it is unknown."""
    if torch.compiler.is_compiling() or transform_active():
        return True
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and getattr(x, "requires_grad", True):
                return True
    return False
