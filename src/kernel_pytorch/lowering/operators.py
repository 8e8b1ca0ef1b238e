"""Custom operators that the partitioner inserts before decomposition, so that patterns such as attention stay whole.

All except the one with a cache also run in eager mode, so that the program can be executed and compared at every
stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["ATTENTION", "CACHED_ATTENTION", "LINEAR_INT8", "QUANTIZED_LINEAR", "RMS_NORM"]

_LIBRARY = torch.library.Library("kernel_pytorch_lowering", "DEF")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, int[] mask, float scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "linear_int8(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "quantized_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int bits) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor position, str cache, ScalarType dtype, int[] shape, "
    "float scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define("rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    mask: Sequence[int],
    scale: float,
) -> torch.Tensor:
    from kernel_pytorch.masks import from_code

    wanted = from_code(torch.tensor(list(mask), dtype=torch.int64))
    keep = wanted.dense(q.shape[2], k.shape[2])
    if bias is not None:
        keep = keep & bias if bias.dtype == torch.bool else torch.where(keep, bias, float("-inf"))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=keep, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _attention_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    mask: Sequence[int],
    scale: float,
) -> torch.Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _cached_attention(*_: object) -> torch.Tensor:
    raise NotImplementedError("a cache inside the delegate exists at run time alone: run the lowered program")


def _cached_attention_fake(q: torch.Tensor, _: torch.Tensor, v: torch.Tensor, *__: object) -> torch.Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def _rms_norm_fake(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _linear_int8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight.float() * scale.reshape(-1, 1), bias)


def _linear_int8_fake(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _quantized_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, bits: int
) -> torch.Tensor:
    """Quantize each row of x asymmetrically to 8 bits by its own range, and multiply; scales: (outputs, groups)."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).eps)
    zero_point = (-128 - (low / scale).round()).clamp(-128, 127)
    rows = ((x * (1 / scale)).round() + zero_point).clamp(-128, 127) - zero_point
    scales = scales.reshape(weight.shape[0], -1)
    wide = weight.float() * scales.repeat_interleave(weight.shape[1] // scales.shape[1], dim=1)
    return torch.nn.functional.linear(rows * scale, wide, bias)


def _quantized_linear_fake(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")
_LIBRARY.impl("cached_attention", _cached_attention, "CompositeExplicitAutograd")
torch.library.register_fake("kernel_pytorch_lowering::cached_attention", _cached_attention_fake, lib=_LIBRARY)
_LIBRARY.impl("rms_norm", _rms_norm, "CompositeExplicitAutograd")
torch.library.register_fake("kernel_pytorch_lowering::attention", _attention_fake, lib=_LIBRARY)
_LIBRARY.impl("linear_int8", _linear_int8, "CompositeExplicitAutograd")
torch.library.register_fake("kernel_pytorch_lowering::linear_int8", _linear_int8_fake, lib=_LIBRARY)
_LIBRARY.impl("quantized_linear", _quantized_linear, "CompositeExplicitAutograd")
torch.library.register_fake("kernel_pytorch_lowering::quantized_linear", _quantized_linear_fake, lib=_LIBRARY)
torch.library.register_fake("kernel_pytorch_lowering::rms_norm", _rms_norm_fake, lib=_LIBRARY)

ATTENTION = torch.ops.kernel_pytorch_lowering.attention.default
CACHED_ATTENTION = torch.ops.kernel_pytorch_lowering.cached_attention.default
LINEAR_INT8 = torch.ops.kernel_pytorch_lowering.linear_int8.default
QUANTIZED_LINEAR = torch.ops.kernel_pytorch_lowering.quantized_linear.default
RMS_NORM = torch.ops.kernel_pytorch_lowering.rms_norm.default
