"""Learned sink logits: one more score in the softmax of every query, without a value."""

from __future__ import annotations

import torch

from kernel_pytorch.ops.attention.definition import shown

__all__ = ["with_sink_logits"]


def with_sink_logits(
    out: torch.Tensor, lse: torch.Tensor, sink_logits: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add sinks to the result of any attention kernel; exact.

    The softmax over the keys and the sink is the softmax over the keys times ``sigmoid(lse - sink)``.

    Args:
        out: the attention without sinks, unrounded.
        lse: its log-sum-exp, (batch, q_heads, q_len), through which gradients flow.
        sink_logits: (q_heads,).
        dtype: of the result.
    """
    if not isinstance(sink_logits, torch.Tensor) or not sink_logits.is_floating_point():
        given = sink_logits.dtype if isinstance(sink_logits, torch.Tensor) else shown(sink_logits)
        raise TypeError(f"sink_logits={given}: expected a tensor of floating-point numbers, one for each q head")
    if sink_logits.shape != (out.shape[1],):
        raise ValueError(
            f"sink_logits has shape {list(sink_logits.shape)}: use one for each of {out.shape[1]} q heads"
        )
    if sink_logits.device != out.device:
        raise ValueError(f"sink_logits is on {sink_logits.device} and q on {out.device}: move one with .to()")
    sinks = sink_logits.to(lse.dtype).view(-1, 1)
    # A query without a key has lse = -inf; with a sink of -inf the difference would be NaN.
    share = torch.sigmoid(lse.clamp_min(torch.finfo(lse.dtype).min) - sinks)
    return (out * share.unsqueeze(-1)).to(dtype), torch.logaddexp(lse, sinks)
