"""Custom operators for torch.compile: quantize, and a linear layer's forward and backward as one operator each.

A compiled step waits on the host between operators, so there are as few as possible. Each declares what it mutates
(counts and amax histories) in its schema. Imported while compiling only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernel_pytorch._compat.compiler import constant_in_graph, proxies_of
from kernel_pytorch.fp8.quantize import (
    INPUT,
    NAMES,
    WEIGHT,
    QuantizeSpec,
    output_accumulation,
    quantize_eager,
    quantize_norm,
    scaled_matmul,
    weight_spec,
)
from kernel_pytorch.ops.fp8_cast.definition import FP8_CAST

__all__ = [
    "define_op",
    "linear_backward_op",
    "linear_forward_op",
    "linear_of_quantized_op",
    "quantize_op",
    "revision",
    "skip_version_check",
]


@constant_in_graph
def revision() -> str:
    """Return the digest of this package's source, an argument of every function that Dynamo puts into its graph.

    torch's cache of compiled graphs identifies such a function by its name and arguments, not by its body: inside
    activation checkpointing, a graph of an earlier version would be called.
    """
    return _revision()


@cache
def _revision() -> str:
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()[:16]


def skip_version_check(*mutated: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Let torch.compile save tensors that an operator mutates: the backward reads them as they are then.

    AOTAutograd does so for tensors that a traced ``autograd.Function`` keeps on its context, and otherwise takes
    saved tensors to be unchanged.
    """
    for tensor in mutated:
        for proxy in () if tensor is None else proxies_of(tensor):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True
    return mutated


_library = torch.library.Library("kernel_pytorch", "FRAGMENT")


def define_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator without autograd. ``torch.library.custom_op`` adds more host time than a cast takes."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"kernel_pytorch::{name}", fake, lib=_library)
    return getattr(torch.ops.kernel_pytorch, name).default


# The schemas of operators are flat, so these functions take their values one by one.


def _quantize(
    x_RC: torch.Tensor,
    number_format: str,
    granularity: str,
    transposed: bool,
    power_of_two: bool,
    counts: torch.Tensor | None,
    row: int,
    history: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    found = quantize_eager(
        x_RC, QuantizeSpec(number_format, granularity, transposed, power_of_two), counts, row, history
    )
    # Results of an operator must not share memory.
    inverse_t = found.inverse.new_empty(0) if found.inverse_t is found.inverse else found.inverse_t
    return found.data, found.data_t, found.inverse, inverse_t


def _quantize_fake(
    x_RC: torch.Tensor, number_format: str, granularity: str, transposed: bool, power_of_two: bool, *_: Any
) -> tuple[torch.Tensor, ...]:
    return FP8_CAST.fake(x_RC, number_format, granularity, transposed, None, power_of_two)[:4]


quantize_op = define_op(
    "fp8_quantize(Tensor x, str number_format, str granularity, bool transposed, bool power_of_two, "
    "Tensor(a!)? counts, int row, Tensor(b!)? history) -> (Tensor, Tensor, Tensor, Tensor)",
    _quantize,
    _quantize_fake,
)


def _linear_forward(
    x_MK: torch.Tensor,
    weight: torch.Tensor,
    dtype: str,
    number_format: str,
    input_granularity: str,
    weight_granularity: str,
    power_of_two: bool,
    counts: torch.Tensor | None,
    history: torch.Tensor | None,
    rstd: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Return y, the transposed quantized weight with its scales, and the quantized x, or norm of x."""
    spec = QuantizeSpec(number_format, input_granularity, True, power_of_two)
    x = quantize_norm(x_MK, rstd, norm_weight, spec, counts, history)
    rest = (weight, dtype, number_format, weight_granularity, power_of_two, counts)
    inverse_t = () if x.inverse_t is x.inverse else (x.inverse_t,)
    return *_linear_of_quantized(x.data, x.inverse, *rest, direct=x.direct), x.data, x.inverse, x.data_t, *inverse_t


def _linear_forward_fake(
    x_MK: torch.Tensor,
    weight: torch.Tensor,
    dtype: str,
    number_format: str,
    input_granularity: str,
    weight_granularity: str,
    power_of_two: bool,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    data, data_t, inverse, inverse_t = _quantize_fake(x_MK, number_format, input_granularity, True, power_of_two)
    kind = (dtype, number_format, weight_granularity, power_of_two)
    y, weight_data_t, weight_inverse_t = _linear_of_quantized_fake(x_MK, inverse, weight, *kind)
    of_weight = (weight_data_t, weight_inverse_t)
    return y, *of_weight, data, inverse, data_t, *(() if input_granularity == "tensor" else (inverse_t,))


_FORWARD = (
    "(Tensor x, Tensor weight, str dtype, str number_format, str input_granularity, str weight_granularity, "
    "bool power_of_two, Tensor(a!)? counts, Tensor(b!)? history, Tensor? rstd, Tensor? norm_weight) -> "
)
_forward_tensorwise, _forward_by_group = (
    define_op(f"{name}{_FORWARD}({', '.join(['Tensor'] * results)})", _linear_forward, _linear_forward_fake)
    for name, results in (("fp8_linear_forward", 6), ("fp8_linear_forward_by_group", 7))
)


def linear_forward_op(input_granularity: str) -> Any:
    """Return the operator for a granularity: tensorwise scaling has one inverse scale for both layouts."""
    return _forward_tensorwise if input_granularity == "tensor" else _forward_by_group


def _linear_of_quantized(
    x_data: torch.Tensor,
    x_inverse: torch.Tensor,
    weight: torch.Tensor,
    dtype: str,
    number_format: str,
    weight_granularity: str,
    power_of_two: bool,
    counts: torch.Tensor | None,
    direct: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return y, and the transposed quantized weight with its scales."""
    w = quantize_eager(weight, weight_spec(number_format, weight_granularity, True, power_of_two), counts, WEIGHT)
    accumulation = output_accumulation(weight_granularity)
    y = scaled_matmul(x_data, w.data, x_inverse, w.inverse, dtype, accumulation, direct or w.direct)
    return y, w.data_t, w.inverse_t


def _linear_of_quantized_fake(
    x_data: torch.Tensor,
    x_inverse: torch.Tensor,  # noqa: ARG001
    weight: torch.Tensor,
    dtype: str,
    number_format: str,
    weight_granularity: str,
    power_of_two: bool,
    *_rest: Any,
) -> tuple[torch.Tensor, ...]:
    y = x_data.new_empty((x_data.shape[0], weight.shape[0]), dtype=getattr(torch, dtype))
    _, data_t, inverse, inverse_t = _quantize_fake(weight, number_format, weight_granularity, True, power_of_two)
    return y, data_t, inverse if weight_granularity == "tensor" else inverse_t


linear_of_quantized_op = define_op(
    "fp8_linear_of_quantized(Tensor x_data, Tensor x_inverse, Tensor weight, str dtype, str number_format, "
    "str weight_granularity, bool power_of_two, Tensor(a!)? counts) -> (Tensor, Tensor, Tensor)",
    _linear_of_quantized,
    _linear_of_quantized_fake,
)


def _linear_backward(
    dy_MN: torch.Tensor,
    x_data_t: torch.Tensor,
    x_inverse_t: torch.Tensor,
    weight_data_t: torch.Tensor,
    weight_inverse_t: torch.Tensor,
    number_format: str,
    granularity: str,
    dx_sums: str,
    power_of_two: bool,
    counts: torch.Tensor | None,
    history: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Return dx and dweight, in dy's dtype."""
    spec = QuantizeSpec(number_format, granularity, True, power_of_two)
    dy = quantize_eager(dy_MN, spec, counts, INPUT, history)
    name = NAMES[dy_MN.dtype]
    dx = scaled_matmul(dy.data, weight_data_t, dy.inverse, weight_inverse_t, name, dx_sums, dy.direct)
    return dx, scaled_matmul(dy.data_t, x_data_t, dy.inverse_t, x_inverse_t, name, "promoted", dy.direct)


def _linear_backward_fake(dy_MN: torch.Tensor, x_data_t: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    (m, n), k = dy_MN.shape, x_data_t.shape[0]
    return dy_MN.new_empty((m, k)), dy_MN.new_empty((n, k))


linear_backward_op = define_op(
    "fp8_linear_backward(Tensor dy, Tensor x_data_t, Tensor x_inverse_t, Tensor weight_data_t, "
    "Tensor weight_inverse_t, str number_format, str granularity, str dx_sums, bool power_of_two, "
    "Tensor(a!)? counts, Tensor(b!)? history) -> (Tensor, Tensor)",
    _linear_backward,
    _linear_backward_fake,
)
