"""What a layer does three times a step, with little work for the CPU: a cast, and a product of casts.

``fp8_cast`` gives counts and the next history as results, which a layer would then add and copy: more work for the
CPU than the cast itself. Here they are brought up to date in place, by the kernel itself where Triton's serves. The
kernels are those that the dispatcher would choose, called without asking it wherever nothing watches the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernel_pytorch.fp8.in_graph import kept_unchecked, revision
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
    "NAMES",
    "Kept",
    "cast_of_norm",
    "cast_weight",
    "define_op",
    "direct_cast",
    "kept_cast",
    "linear_backward_op",
    "linear_forward_by_parts_op",
    "linear_forward_op",
    "linear_of_cast_op",
    "product",
    "sums_of_y",
    "transposed_codes",
    "weight_scale_is_power_of_two",
]

_WEIGHT = 1
"""Which row of the counts is a weight's."""
NAMES = {dtype: name for name, dtype in OUTPUTS.items()}
"""The formats that layers compute in, as ``fp8_matmul`` names them."""


class Kept(NamedTuple):
    """A matrix in an 8-bit format, as ``fp8_cast`` gives it."""

    data: torch.Tensor
    data_t: torch.Tensor
    inverse: torch.Tensor
    inverse_t: torch.Tensor
    direct: bool = False
    """Whether it was made without asking the dispatcher: nothing watched the call."""


def kept_cast(
    x_RC: torch.Tensor,
    number_format: str,
    granularity: str,
    transposed: bool,
    power_of_two: bool,
    counts: torch.Tensor | None,
    row: int,
    history: torch.Tensor | None,
) -> Kept:
    """``fp8_cast``, with what it lost added to ``counts[row]``, and by the history, where there is one.

    Args:
        counts: (rows, 2, 4), contiguous, or None.
        history: for delayed scaling, contiguous, or None.
    """
    arguments = (x_RC, number_format, granularity, transposed, power_of_two, counts, row, history)
    if torch.compiler.is_compiling():
        data, data_t, inverse, inverse_t = _cast_in_graph(revision(), *arguments)
        return Kept(data, data_t, inverse, inverse if transposed and granularity == "tensor" else inverse_t)
    return direct_cast(*arguments)


def direct_cast(
    x_RC: torch.Tensor,
    number_format: str,
    granularity: str,
    transposed: bool,
    power_of_two: bool,
    counts: torch.Tensor | None,
    row: int,
    history: torch.Tensor | None,
) -> Kept:
    """``kept_cast`` where nothing is being compiled, such as inside an operator."""
    if counts is not None:
        length = 0 if history is None else history.shape[0]
        reuse_scale = row == _WEIGHT and history is None and power_of_two and granularity == "tensor"
        kind = (number_format, granularity, transposed, length, power_of_two, reuse_scale)
        cast = dispatch.prepared(FP8_CAST, CastSpec(x_RC.shape, x_RC.stride(), *kind), x_RC)
        if cast is not None:
            data, data_t, inverse, inverse_t = cast(x_RC, counts, row, history)
            return Kept(data, data_t, inverse, inverse_t, True)
    refuse_batch(x_RC, counts is not None or history is not None)
    found = fp8_cast(
        x_RC.detach(), number_format, granularity, transposed=transposed, history=history, power_of_two=power_of_two
    )
    if counts is not None:
        counts[row].add_(found.counts)
    if history is not None:
        history.copy_(found.next_history)
    return Kept(found.data, found.data_t, found.inverse, found.inverse_t)


def cast_weight(
    weight: torch.Tensor,
    number_format: str,
    granularity: str,
    transposed: bool,
    power_of_two: bool,
    counts: torch.Tensor | None,
    cast: Callable[..., Kept] = direct_cast,
) -> Kept:
    """A weight in 8 bits, by ``direct_cast`` or ``kept_cast``."""
    power_of_two = weight_scale_is_power_of_two(granularity, power_of_two)
    return cast(weight, number_format, granularity, transposed, power_of_two, counts, _WEIGHT, None)


def weight_scale_is_power_of_two(granularity: str, power_of_two: bool) -> bool:
    """Also where a recipe has others, if a weight has one scale alone.

    From step to step the largest magnitude of a weight changes by little, and its power of two hardly ever. So the
    last one's is tried first, and the weight is read once instead of twice.
    """
    return power_of_two or granularity == "tensor"


def cast_of_norm(
    x_RH: torch.Tensor,
    rstd: torch.Tensor | None,
    weight: torch.Tensor | None,
    number_format: str,
    granularity: str,
    power_of_two: bool,
    counts: torch.Tensor | None,
    history: torch.Tensor | None,
) -> Kept:
    """``direct_cast`` with both copies of the norm of x, which need not be in memory; of x itself without rstd."""
    if rstd is not None:
        if counts is not None and history is not None:
            kind = (number_format, history.shape[0], power_of_two, weight is not None)
            cast = dispatch.prepared(FP8_RMS_NORM, NormCastSpec(x_RH.shape, x_RH.stride(), *kind), x_RH)
            if cast is not None:
                weight = None if weight is None else weight.contiguous()
                data, data_t, inverse = cast(x_RH, rstd, weight, counts, history)
                return Kept(data, data_t, inverse, inverse, True)
        normal = x_RH.float() * rstd[:, None]
        x_RH = (normal if weight is None else normal * weight).to(x_RH.dtype)
    return direct_cast(x_RH, number_format, granularity, True, power_of_two, counts, 0, history)


def transposed_codes(codes: torch.Tensor) -> torch.Tensor:
    """The transposed copy of a matrix in an 8-bit format."""
    if codes.is_contiguous():
        run = dispatch.prepared(FP8_CAST, TransposeSpec(codes.shape), codes)
        if run is not None:
            turned: torch.Tensor = run(codes)
            return turned
    # As bytes, for not every device copies 8-bit floats with strides.
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_a: torch.Tensor,
    inverse_b: torch.Tensor,
    dtype: str,
    sums: str,
    direct: bool = False,
) -> torch.Tensor:
    """``fp8_matmul`` of casts; ``direct`` where one of them was made without asking the dispatcher in this call."""
    if direct and inverse_a.ndim == 0:
        spec = MatmulSpec(a.shape, b.shape, a.dtype, b.dtype, dtype, sums)
        run = dispatch.prepared(FP8_MATMUL, spec, a, checked=True)
        if run is not None:
            y: torch.Tensor = run(a, b, inverse_a, inverse_b)
            return y
    return fp8_matmul(a, b, inverse_a, inverse_b, dtype, sums)


def sums_of_y(granularity: str) -> str:
    """How the forward's product adds up: in the matrix units alone, but for blocks, whose scales come in between."""
    return "promoted" if granularity in ("block", "square") else "fast"


def _apart(
    x_RC: torch.Tensor,
    number_format: str,
    granularity: str,
    transposed: bool,
    power_of_two: bool,
    counts: torch.Tensor | None,
    row: int,
    history: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    kind = (x_RC, number_format, granularity, transposed, power_of_two, counts)
    cast = cast_weight(*kind) if row == _WEIGHT else direct_cast(*kind, row, history)
    # Results of a custom op must not be the same memory.
    apart = cast.inverse.new_empty(0) if cast.inverse_t is cast.inverse else cast.inverse_t
    return cast.data, cast.data_t, cast.inverse, apart


def _fake(
    x_RC: torch.Tensor,
    number_format: str,
    granularity: str,
    transposed: bool,
    power_of_two: bool,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    return FP8_CAST.fake(x_RC, number_format, granularity, transposed, None, power_of_two)[:4]


# For torch.compile: a layer's forward and backward as one operator each.


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
    """y, the weight's transposed copy with its scales, and the cast of x, or of its norm."""
    kind = (number_format, input_granularity, power_of_two)
    x = cast_of_norm(x_MK, rstd, norm_weight, *kind, counts, history)
    rest = (weight, dtype, number_format, weight_granularity, power_of_two, counts)
    apart = () if x.inverse_t is x.inverse else (x.inverse_t,)
    return *_linear_of_cast(x.data, x.inverse, *rest, direct=x.direct), x.data, x.inverse, x.data_t, *apart


def _linear_of_cast(
    x_8: torch.Tensor,
    x_inverse: torch.Tensor,
    weight: torch.Tensor,
    dtype: str,
    number_format: str,
    weight_granularity: str,
    power_of_two: bool,
    counts: torch.Tensor | None,
    direct: bool = False,
) -> tuple[torch.Tensor, ...]:
    """y, and the weight's transposed copy with its scales."""
    w = cast_weight(weight, number_format, weight_granularity, True, power_of_two, counts)
    y = product(x_8, w.data, x_inverse, w.inverse, dtype, sums_of_y(weight_granularity), direct or w.direct)
    return y, w.data_t, w.inverse_t


def _linear_backward(
    dy_MN: torch.Tensor,
    x_8t: torch.Tensor,
    x_inverse_t: torch.Tensor,
    weight_8t: torch.Tensor,
    weight_inverse_t: torch.Tensor,
    number_format: str,
    granularity: str,
    dx_sums: str,
    power_of_two: bool,
    counts: torch.Tensor | None,
    history: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """dx and dweight, in dy's dtype."""
    dy = direct_cast(dy_MN, number_format, granularity, True, power_of_two, counts, 0, history)
    name = NAMES[dy_MN.dtype]
    dx = product(dy.data, weight_8t, dy.inverse, weight_inverse_t, name, dx_sums, dy.direct)
    return dx, product(dy.data_t, x_8t, dy.inverse_t, x_inverse_t, name, "promoted", dy.direct)


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
    y = x_MK.new_empty((x_MK.shape[0], weight.shape[0]), dtype=getattr(torch, dtype))
    data, data_t, inverse, inverse_t = _fake(x_MK, number_format, input_granularity, True, power_of_two)
    apart = () if input_granularity == "tensor" else (inverse_t,)
    of_weight = _weight_fake(weight, number_format, weight_granularity, power_of_two)
    return y, *of_weight, data, inverse, data_t, *apart


def _linear_of_cast_fake(
    x_8: torch.Tensor,
    x_inverse: torch.Tensor,  # noqa: ARG001
    weight: torch.Tensor,
    dtype: str,
    number_format: str,
    weight_granularity: str,
    power_of_two: bool,
    counts: torch.Tensor | None,  # noqa: ARG001
) -> tuple[torch.Tensor, ...]:
    y = x_8.new_empty((x_8.shape[0], weight.shape[0]), dtype=getattr(torch, dtype))
    return y, *_weight_fake(weight, number_format, weight_granularity, power_of_two)


def _weight_fake(
    weight: torch.Tensor, number_format: str, granularity: str, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    _, data_t, inverse, inverse_t = _fake(weight, number_format, granularity, True, power_of_two)
    return data_t, inverse if granularity == "tensor" else inverse_t


def _linear_backward_fake(dy_MN: torch.Tensor, x_8t: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    (m, n), k = dy_MN.shape, x_8t.shape[0]
    return dy_MN.new_empty((m, k)), dy_MN.new_empty((n, k))


_library = torch.library.Library("kernel_pytorch", "FRAGMENT")


def define_op(schema: str, run: Callable[..., Any], of_shapes: Callable[..., Any]) -> Any:
    """An operator that no gradient flows through, without what ``torch.library.custom_op`` puts around each call:
    that costs more than a cast."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"kernel_pytorch::{name}", of_shapes, lib=_library)
    return getattr(torch.ops.kernel_pytorch, name).default


_op = define_op(
    "fp8_kept_cast(Tensor x, str number_format, str granularity, bool transposed, bool power_of_two, "
    "Tensor(a!)? counts, int row, Tensor(b!)? history) -> (Tensor, Tensor, Tensor, Tensor)",
    _apart,
    _fake,
)
linear_forward_op, linear_forward_by_parts_op = (
    define_op(
        f"{name}(Tensor x, Tensor weight, str dtype, str number_format, str input_granularity, "
        "str weight_granularity, bool power_of_two, Tensor(a!)? counts, Tensor(b!)? history, Tensor? rstd, "
        f"Tensor? norm_weight) -> ({', '.join(['Tensor'] * results)})",
        _linear_forward,
        _linear_forward_fake,
    )
    for name, results in (("fp8_linear_forward", 6), ("fp8_linear_forward_by_parts", 7))
)
linear_of_cast_op = define_op(
    "fp8_linear_of_cast(Tensor x_8, Tensor x_inverse, Tensor weight, str dtype, str number_format, "
    "str weight_granularity, bool power_of_two, Tensor(a!)? counts) -> (Tensor, Tensor, Tensor)",
    _linear_of_cast,
    _linear_of_cast_fake,
)
linear_backward_op = define_op(
    "fp8_linear_backward(Tensor dy, Tensor x_8t, Tensor x_inverse_t, Tensor weight_8t, Tensor weight_inverse_t, "
    "str number_format, str granularity, str dx_sums, bool power_of_two, Tensor(a!)? counts, "
    "Tensor(b!)? history) -> (Tensor, Tensor)",
    _linear_backward,
    _linear_backward_fake,
)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _cast_in_graph(_: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    *_others, counts, _row, history = arguments
    kept_unchecked(counts, history)
    found: tuple[torch.Tensor, ...] = _op(*arguments)
    return found
