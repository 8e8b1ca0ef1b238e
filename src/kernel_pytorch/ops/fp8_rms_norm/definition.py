"""fp8_rms_norm: RMSNorm that returns y and its FP8 quantization. The definition and its cases.

Shapes: R rows, H columns (the hidden dimension) of x.

    rstd = 1 / sqrt(mean(x^2) + eps)          per row, in float32
    y    = x * rstd * weight                  as ``rms_norm`` defines it, rounded once to x's dtype

and data, data_t, inverse, amax, counts and next_history are those of tensorwise ``fp8_cast`` of the returned y: y is
rounded to x's dtype first, then quantized. So a layer that takes the quantized data computes byte for byte the same
as one that quantizes y itself, and y is not read for it. A delayed scale is known before y, so one pass over x writes
everything; if y's amax does not fit that scale, y is requantized in the same call.

With number_format=None only y and rstd are computed, with the same bits; the other outputs are empty.

The order of accumulation differs between devices, so the bytes of y and of its quantization are not defined. Kernels
must agree with float64 in the dequantized values, and byte for byte with ``fp8_cast`` of their y.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kernel_pytorch.hardware_abstraction.formats import E4M3FN, FORMATS, format_named
from kernel_pytorch.hardware_abstraction.op import Call, Case, Draw, Op, TensorSpec
from kernel_pytorch.ops.fp8_cast import definition as fp8_cast
from kernel_pytorch.ops.rms_norm import definition as rms_norm

__all__ = ["FP8_RMS_NORM", "without_cast"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def without_cast(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the empty outputs after y and rstd, for calls without a cast."""
    return (
        x.new_empty((0, 0), dtype=E4M3FN.dtype),
        x.new_empty((0, 0), dtype=E4M3FN.dtype),
        x.new_empty(0, dtype=torch.float32),
        x.new_empty(0, dtype=torch.float32),
        x.new_empty((0, 4), dtype=torch.int64),
        x.new_empty(0, dtype=torch.float32),
    )


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    number_format: str | None,
    transposed: bool,
    history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    """Return exact values in place of quantized data, with inverse scale 1."""
    y, rstd = rms_norm.reference(x, weight, eps)
    if number_format is None:
        return (y, rstd, *without_cast(x))
    finite = y.float().isfinite()
    exact = torch.where(finite, y, torch.nan)
    amax = torch.where(finite, y.abs(), 0.0).amax() if y.numel() else y.new_zeros(())
    counts = torch.zeros(2, 4, dtype=torch.int64, device=x.device)
    counts[: 1 + transposed, 2], counts[: 1 + transposed, 3] = finite.logical_not().count_nonzero(), y.numel()
    next_history = amax.new_empty(0) if history is None else torch.cat([amax.reshape(1), history[:-1]])
    turned = exact.t() if transposed else exact.new_empty((0, 0))
    return y, rstd, exact, turned, amax.new_ones(()), amax, counts, next_history


def low_precision(dtype: torch.dtype) -> Callable[..., Any]:
    """Plain float32 arithmetic, rounded to the dtype, then the definition of the cast."""

    def run(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        number_format: str | None,
        transposed: bool,
        history: torch.Tensor | None,
        power_of_two: bool,
    ) -> tuple[torch.Tensor, ...]:
        y, rstd = rms_norm.reference(x.float(), None if weight is None else weight.float(), eps)
        y = y.to(dtype)
        if number_format is None:
            return (y, rstd, *without_cast(x))
        data, data_t, inverse, _, amax, counts, next_history = fp8_cast.reference(
            y, number_format, "tensor", transposed, history, power_of_two
        )
        return y, rstd, data, data_t, inverse, amax, counts, next_history

    return run


def meaning(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return y, its dequantized data and statistics, without the underflow count, which depends on y's last bits."""
    found = {"y": outputs["y"], "rstd": outputs["rstd"]}
    if outputs["amax"].numel() == 0:
        return found
    wide = outputs["inverse"].dtype
    return {
        **found,
        "copy": outputs["data"].to(wide) * outputs["inverse"],
        "copy_t": outputs["data_t"].to(wide) * outputs["inverse"],
        "amax": outputs["amax"],
        "counts": outputs["counts"][:, 2:].to(wide),
        "next_history": outputs["next_history"],
    }


def check(call: Call) -> None:
    x, history = call["x"], call["history"]
    if not isinstance(x, TensorSpec):
        raise TypeError(f"x={x!r}: expected a tensor")
    if x.dtype not in _DTYPES:
        raise TypeError(f"x has dtype {x.format}: use float32, float16 or bfloat16")
    if len(x.shape) != 2:
        raise ValueError(f"x has shape {list(x.shape)}: expected a matrix, so reshape it to rows and columns")
    rms_norm.check(call)
    if call["number_format"] is not None:
        format_named(call["number_format"])
    for name in ("transposed", "power_of_two"):
        if not isinstance(call[name], bool):
            raise TypeError(f"{name}={call[name]!r}: use True or False")
    if history is None:
        return
    if not isinstance(history, TensorSpec):
        raise TypeError(f"history={history!r}: expected a float32 tensor, or None for a scale from y itself")
    if call["number_format"] is None:
        raise ValueError(
            "history with number_format=None: nothing is cast then; name a format or leave out history"
        )
    if history.dtype != torch.float32:
        raise TypeError(f"history has dtype {history.format}: use float32")
    if len(history.shape) != 1 or history.shape[0] == 0:
        raise ValueError(
            f"history has shape {list(history.shape)}: use a vector, such as torch.zeros({fp8_cast.HISTORY})"
        )
    if history.device != x.device:
        raise ValueError(f"history is on {history.device} and x on {x.device}: move one with .to()")


def fake(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    number_format: str | None,
    transposed: bool,
    history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    rows, columns = x.shape
    normal = (x.new_empty((rows, columns)), x.new_empty(rows, dtype=torch.float32))
    if number_format is None:
        return (*normal, *without_cast(x))
    dtype = FORMATS[number_format].dtype
    return (
        *normal,
        x.new_empty((rows, columns), dtype=dtype),
        x.new_empty((columns, rows) if transposed else (0, 0), dtype=dtype),
        x.new_empty((), dtype=torch.float32),
        x.new_empty((), dtype=torch.float32),
        x.new_empty((2, 4), dtype=torch.int64),
        x.new_empty(0 if history is None else history.shape[0], dtype=torch.float32),
    )


def traffic(call: Call) -> int:
    x: TensorSpec = call["x"]
    weight: TensorSpec | None = call["weight"]
    copies = 0 if call["number_format"] is None else 1 + call["transposed"]
    weights = 0 if weight is None else x.shape[-1] * weight.dtype.itemsize
    return math.prod(x.shape) * (2 * x.dtype.itemsize + copies) + 4 * x.shape[0] + weights


def flops(call: Call) -> int:
    x: TensorSpec = call["x"]
    cast = 0 if call["number_format"] is None else 2  # a comparison for the amax and a multiplication
    return math.prod(x.shape) * (4 + cast)


def plain(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    number_format: str | None,
    transposed: bool,
    history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    """Baseline in plain torch: y, then a cast without counts, transposed as bytes."""
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    if number_format is None:
        return (y,)
    chosen = FORMATS[number_format]
    wide = y.float()
    amax = wide.abs().amax() if history is None else history.amax()
    factor = chosen.largest / amax.clamp_min(1e-12)
    data = (wide * factor).clamp(-chosen.largest, chosen.largest).to(chosen.dtype)
    turned = (data.view(torch.uint8).t().contiguous().view(chosen.dtype),) if transposed else ()
    return y, data, factor.reciprocal(), *turned


# The cases.

_Change = Callable[[torch.Tensor], torch.Tensor]


def _tensors(
    rows: int,
    columns: int,
    *,
    weight: bool = True,
    weight_dtype: torch.dtype | None = None,
    eps: float = 1e-6,
    number_format: str | None = "e4m3fn",
    transposed: bool = True,
    history: Sequence[float] | None = None,
    power_of_two: bool = False,
    change: _Change = lambda x: x,
) -> Callable[[torch.dtype, torch.device, Draw], Mapping[str, Any]]:
    def make(dtype: torch.dtype, device: torch.device, draw: Draw) -> Mapping[str, Any]:
        x = change(draw(rows, columns).to(dtype))
        return {
            "x": x,
            "weight": draw(x.shape[-1]).to(weight_dtype or dtype) if weight else None,
            "eps": eps,
            "number_format": number_format,
            "transposed": transposed,
            "history": None if history is None else torch.tensor(history, device=device),
            "power_of_two": power_of_two,
        }

    return make


def _scales(x: torch.Tensor) -> torch.Tensor:
    """Rows from tiny magnitudes to near the largest float16 value."""
    return x * torch.logspace(-6, 4, x.shape[0], device=x.device).unsqueeze(-1).to(x.dtype)


def _benchmark(rows: int, columns: int, history: Sequence[float] | None = None) -> Case:
    name = f"{rows}x{columns}{'-delayed' if history else ''}"
    return Case(
        name,
        _tensors(rows, columns, history=history),
        benchmark=True,
        formats=("bfloat16",),
        gate="delayed" if history else "tails",
    )


_DRAWN = (24.0,) * fp8_cast.HISTORY  # about the amax in the largest case

CASES = (
    Case("odd", _tensors(5, 37)),
    Case("tails", _tensors(131, 260)),
    Case("one-number", _tensors(1, 1, eps=0.1)),
    Case("no-rows", _tensors(0, 40, history=(1.0, 2.0))),
    Case("long-rows", _tensors(3, 2100)),
    Case("no-weight", _tensors(7, 129, weight=False)),
    Case("float32-weight", _tensors(6, 96, weight_dtype=torch.float32)),
    Case("no-copy", _tensors(34, 130, number_format=None, transposed=False)),
    Case("one-layout", _tensors(34, 130, transposed=False)),
    Case("transposed-strides", _tensors(33, 140, change=lambda x: x.t())),
    Case("every-other", _tensors(20, 80, change=lambda x: x[::2, ::3])),
    Case("expanded", _tensors(1, 40, change=lambda x: x.expand(6, 40))),
    Case("zero-rows", _tensors(12, 40, change=fp8_cast.zero_rows)),
    Case("zeros", _tensors(4, 8, change=lambda x: x * 0)),
    Case("zeros-without-eps", _tensors(4, 8, eps=0.0, change=lambda x: x * 0)),
    Case("scales", _tensors(11, 100, change=_scales)),
    Case("nonfinite", _tensors(6, 50, change=fp8_cast.nonfinite)),
    *(Case(f"format-{name}", _tensors(9, 150, number_format=name)) for name in FORMATS),
    Case("power-of-two", _tensors(20, 130, power_of_two=True)),
    Case("delayed", _tensors(130, 300, history=(12.5, 3.0, 0.0))),
    Case("delayed-e5m2", _tensors(40, 129, history=(14.0,), power_of_two=True, number_format="e5m2")),
    Case("delayed-one-layout", _tensors(40, 129, history=(14.0,), transposed=False)),
    Case("delayed-outgrown", _tensors(150, 140, history=(0.25, math.nan, math.inf))),
    Case("delayed-below", _tensors(150, 140, history=(1.0, 1e6))),
    Case("delayed-first", _tensors(20, 30, history=(0.0,) * fp8_cast.HISTORY)),
    Case("delayed-nonfinite", _tensors(6, 50, history=(9.0,), change=fp8_cast.nonfinite)),
    _benchmark(8192, 4096),
    _benchmark(8192, 4096, _DRAWN),
    _benchmark(16384, 8192, _DRAWN),
)

FP8_RMS_NORM = Op(
    name="fp8_rms_norm",
    arguments=(
        "Tensor x",
        "Tensor? weight",
        "float eps",
        "str? number_format",
        "bool transposed",
        "Tensor? history",
        "bool power_of_two",
    ),
    outputs=("y", "rstd", "data", "data_t", "inverse", "amax", "counts", "next_history"),
    differentiable=("x",),  # no output is differentiable: callers use rms_norm's backward with x and rstd
    differentiable_outputs=(),
    saved=("x",),
    reference=reference,
    low_precision=low_precision,
    meaning=meaning,
    check=check,
    fake=fake,
    cases=CASES,
    compile_cases=("tails", "delayed", "no-copy", "8192x4096", "8192x4096-delayed"),
    traffic=traffic,
    flops=flops,
    baselines={"eager": plain},
)
