"""FP8 tensors with their scales: low-overhead quantize and scaled matmul, with in-place counter and history updates.

``fp8_cast`` returns counts and the next history, which a layer would have to add and copy: more host time than the
cast itself. A prepared kernel updates both in place. Everything goes through the op registry: ``dispatch.prepared``
where a kernel has prepared such calls, the op's function elsewhere.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch

from kernel_pytorch.fp8.transforms import refuse_batch
from kernel_pytorch.hardware_abstraction import dispatch
from kernel_pytorch.ops.fp8_cast import fp8_cast
from kernel_pytorch.ops.fp8_cast.definition import FP8_CAST
from kernel_pytorch.ops.fp8_cast.prepared import CastSpec, TransposeSpec
from kernel_pytorch.ops.fp8_matmul import fp8_matmul
from kernel_pytorch.ops.fp8_matmul.definition import FP8_MATMUL, OUTPUTS
from kernel_pytorch.ops.fp8_matmul.prepared import MatmulSpec
from kernel_pytorch.ops.fp8_rms_norm.definition import FP8_RMS_NORM
from kernel_pytorch.ops.fp8_rms_norm.prepared import NormCastSpec

__all__ = [
    "INPUT",
    "NAMES",
    "WEIGHT",
    "QuantizeSpec",
    "ScaledTensor",
    "cache_cast",
    "cached_cast",
    "drop_cached_cast",
    "output_accumulation",
    "quantize",
    "quantize_norm",
    "scaled_matmul",
    "transpose_data",
    "weight_power_of_two",
    "weight_spec",
]

INPUT, WEIGHT = 0, 1
"""Rows of a layer's forward counts. The gradient's counts have one row, 0."""
NAMES = {dtype: name for name, dtype in OUTPUTS.items()}
"""The dtypes that layers compute in, as ``fp8_matmul`` names them."""


class ScaledTensor(NamedTuple):
    """``data * inverse`` approximates a matrix, ``data_t * inverse_t`` its transpose: results of ``fp8_cast``."""

    data: torch.Tensor
    """(rows, columns), contiguous."""
    data_t: torch.Tensor
    """(columns, rows), contiguous; (0, 0) if not requested; ``data`` itself if the backward transposes it."""
    inverse: torch.Tensor
    """float32, one over the scales of ``data``, shaped for ``torch._scaled_mm``."""
    inverse_t: torch.Tensor
    """The same for ``data_t``; ``inverse`` itself with tensorwise scaling."""
    direct: bool = False
    """Whether a prepared kernel quantized it: no mode or transform is active, so its GEMMs may use one too."""


_CACHED = "_fp8_cast"


def cached_cast(x: torch.Tensor, key: Hashable) -> ScaledTensor | None:
    """Return the quantized data that was cached on a tensor with this key, or None."""
    cached: tuple[Hashable, ScaledTensor] | None = getattr(x, _CACHED, None)
    if cached is None:
        return None
    cached_key, cast = cached
    return cast if cached_key == key else None


def cache_cast(x: torch.Tensor, key: Hashable, cast: ScaledTensor) -> None:
    """Cache quantized data on a tensor, for other layers with the same input; it lives as long as the tensor."""
    setattr(x, _CACHED, (key, cast))


def drop_cached_cast(x: torch.Tensor) -> None:
    """Drop the quantized data that is cached on a tensor."""
    x.__dict__.pop(_CACHED, None)


class QuantizeSpec(NamedTuple):
    """How a matrix is quantized: the options of ``fp8_cast``."""

    number_format: str
    granularity: str
    transposed: bool
    power_of_two: bool


def quantize(
    x_RC: torch.Tensor,
    spec: QuantizeSpec,
    counts: torch.Tensor | None,
    row: int,
    history: torch.Tensor | None = None,
) -> ScaledTensor:
    """Quantize a matrix, add its counts to ``counts[row]`` and update its amax history.

    Args:
        x_RC: (rows, columns), any strides.
        counts: int64 (rows, 2, 4), contiguous, or None: saturated, underflowed, non-finite and all elements.
        history: amax history for delayed scaling, contiguous, or None.
    """
    if counts is not None:
        number_format, granularity, transposed, power_of_two = spec
        length = 0 if history is None else history.shape[0]
        reuse_scale = row == WEIGHT and history is None and power_of_two and granularity == "tensor"
        kind = CastSpec(
            x_RC.shape, x_RC.stride(), number_format, granularity, transposed, length, power_of_two, reuse_scale
        )
        cast = dispatch.prepared(FP8_CAST, kind, x_RC)
        if cast is not None:
            data, data_t, inverse, inverse_t = cast(x_RC, counts, row, history)
            return ScaledTensor(data, data_t, inverse, inverse_t, True)
    refuse_batch(x_RC, counts is not None or history is not None)
    found = fp8_cast(
        x_RC.detach(),
        spec.number_format,
        spec.granularity,
        transposed=spec.transposed,
        history=history,
        power_of_two=spec.power_of_two,
    )
    if counts is not None:
        counts[row].add_(found.counts)
    if history is not None:
        history.copy_(found.next_history)
    return ScaledTensor(found.data, found.data_t, found.inverse, found.inverse_t)


def quantize_norm(
    x_RH: torch.Tensor,
    rstd: torch.Tensor | None,
    weight: torch.Tensor | None,
    spec: QuantizeSpec,
    counts: torch.Tensor | None,
    history: torch.Tensor | None,
) -> ScaledTensor:
    """Quantize the RMSNorm of x, in both layouts, without writing it in high precision; x itself if rstd is None."""
    if rstd is not None:
        if counts is not None and history is not None:
            kind = (spec.number_format, history.shape[0], spec.power_of_two, weight is not None)
            cast = dispatch.prepared(FP8_RMS_NORM, NormCastSpec(x_RH.shape, x_RH.stride(), *kind), x_RH)
            if cast is not None:
                weight = None if weight is None else weight.contiguous()
                data, data_t, inverse = cast(x_RH, rstd, weight, counts, history)
                return ScaledTensor(data, data_t, inverse, inverse, True)
        normal = x_RH.float() * rstd[:, None]
        x_RH = (normal if weight is None else normal * weight).to(x_RH.dtype)
    return quantize(x_RH, spec, counts, INPUT, history)


def weight_spec(number_format: str, granularity: str, transposed: bool, power_of_two: bool) -> QuantizeSpec:
    """Return how a weight is quantized: as the recipe says, except for ``weight_power_of_two``."""
    return QuantizeSpec(number_format, granularity, transposed, weight_power_of_two(granularity, power_of_two))


def weight_power_of_two(granularity: str, power_of_two: bool) -> bool:
    """Return whether a weight's scales are powers of two: always with tensorwise scaling.

    The amax of a weight changes little from step to step, and its power of two rarely. The kernel tries the last
    scale first, and then reads the weight once instead of twice.
    """
    return power_of_two or granularity == "tensor"


def transpose_data(data: torch.Tensor) -> torch.Tensor:
    """Return the contiguous transpose of quantized data."""
    if data.is_contiguous():
        run = dispatch.prepared(FP8_CAST, TransposeSpec(data.shape), data)
        if run is not None:
            data_t: torch.Tensor = run(data)
            return data_t
    # As bytes: not every device copies 8-bit floats with strides.
    return data.view(torch.uint8).t().contiguous().view(data.dtype)


def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_a: torch.Tensor,
    inverse_b: torch.Tensor,
    dtype: str,
    accumulation: str,
    direct: bool = False,
) -> torch.Tensor:
    """``(a * inverse_a) @ (b * inverse_b).t()`` by ``torch._scaled_mm`` where it serves, see ``fp8_matmul``.

    Args:
        direct: whether an operand was quantized by a prepared kernel in this call.
    """
    if direct and inverse_a.ndim == 0:
        spec = MatmulSpec(a.shape, b.shape, a.dtype, b.dtype, dtype, accumulation)
        run = dispatch.prepared(FP8_MATMUL, spec, a, checked=True)
        if run is not None:
            y: torch.Tensor = run(a, b, inverse_a, inverse_b)
            return y
    return fp8_matmul(a, b, inverse_a, inverse_b, dtype, accumulation)


def output_accumulation(granularity: str) -> str:
    """Return how the output GEMM accumulates: fast, but promoted with block scaling."""
    return "promoted" if granularity in ("block", "square") else "fast"
