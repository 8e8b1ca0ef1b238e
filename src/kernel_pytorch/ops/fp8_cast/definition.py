"""fp8_cast: quantize a matrix to FP8 with scales. The definition and its cases.

Shapes: R rows, C columns of x. Every element of x belongs to one group, and each group g has one scale s_g:

    amax_g    = the largest |x| among the finite elements of the group
    s_g       = 1                                                    where amax_g = 0
                min(2^126, the largest float32 with s_g * amax_g <= L)    otherwise; L the format's largest value
                rounded down to a power of two where ``power_of_two``
    data      = encode(float32(x * s_g))                             nearest, ties to even, saturating
    inverse_g = float32(1 / s_g)                                     so that x is about data * inverse_g

``float32()`` is one rounding to nearest, and ``encode`` is ``Format.encode``: every byte of the result is defined,
and must not depend on the order of operations or the compiler. s_g is rounded down, so with scales from the amax
nothing saturates. The bound 2^126 keeps s_g finite for a subnormal amax (and 1 / s_g a normal number); elements below
2^-126 * L then do not use the format's whole range.

A non-finite element becomes NaN, whatever its scale. It is counted and left out of the amax.

Delayed scaling reads x once instead of twice: the scale comes from the amax of earlier casts, ``history``, newest
first. With h the largest finite entry:

    s = s(h) / 2      where h > 0 and amax fits: amax = 0, or 2^9 n <= float32(s(h) / 2 * amax) <= L
        s(amax)       otherwise: with no history yet, or where amax exceeds the delayed scale or is far below it

where s() is as above and n is the smallest normal number of the format. A tensor that does not fit is requantized
with its own amax in the same call, so that nothing saturates, and one outlier in the history does not flush later
tensors to zero. Both are rare:

    above   the factor 2 is headroom. It costs one of the 15 and more binades of normal numbers of a format.
    below   9 binades of normal numbers are left between n and amax. A normally distributed tensor then has its full
            precision, and tensors with long tails (Laplace, Student's t with 3 degrees of freedom, a log-normal of
            deviation 1.5, an outlier at 100 deviations) lose at most 0.6 dB compared with their own scale. With 8
            binades it is 1.5 dB, with 6 it is 8 dB. Requantized are tensors with an amax below about 1/28 of the
            largest entry in e4m3, and below a millionth in e5m2.

``next_history`` is history with amax put in front and the oldest entry dropped.

    granularity   one scale per                  shape of inverse           shape of inverse_t
    tensor        matrix                         ()                         the same element
    row           row                            (R, 1)                     (C, 1)
    block         1x128 block                    (R, ceil(C / 128))         (C, ceil(R / 128))
    square        128x128 block                  (ceil(R / 128), ceil(C / 128))   its transpose

Why there are two layouts: an FP8 GEMM takes both operands with the reduction dimension last, and a scale must be
constant along it, or along 128 elements of it. For a linear layer y = x W^T, with x (M, K), W (N, K) and dy (M, N),
``data`` and ``data_t`` of each tensor serve the three GEMMs:

    y  = x  W^T     reduces over K     data of x,     data of W
    dx = dy W       reduces over N     data of dy,    data_t of W
    dW = dy^T x     reduces over M     data_t of dy,  data_t of x

So with the granularities row and block, ``data_t`` is scaled by ITS OWN rows, the columns of x. It is another
quantization of x, not the transpose of ``data``. With tensor and square the scales agree, and data_t is data's
transpose to the byte. In ``torch._scaled_mm(a.data, b.data.t(), a.inverse, b.inverse.t())`` the scales have the
layout that torch requires: column-major (strides 1, R) for block, row-major for the others.

``counts`` has a row for data and one for data_t (zeros if it was not requested):

    saturated     finite elements with |float32(x * s)| > L under the delayed scale, for which the call was
                  requantized; 0 without a history
    underflowed   nonzero elements that became zero under the final scale
    nonfinite     infinities and NaN in x
    numbers       all elements
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.formats import FORMATS, Format, format_named
from kernel_pytorch.hardware_abstraction.op import Call, Case, Draw, Op, TensorSpec

__all__ = [
    "BLOCK",
    "FP8_CAST",
    "GRANULARITIES",
    "HISTORY",
    "LARGEST_SCALE",
    "NORMAL_BINADES",
    "empty_inverse",
    "inverse_shape",
    "nonfinite",
    "zero_rows",
]

BLOCK = 128
GRANULARITIES = ("tensor", "row", "block", "square")
LARGEST_SCALE = 2.0**126
NORMAL_BINADES = 9
"""Number of binades of normal numbers that a delayed scale must leave below the amax; see the module's docstring."""
HISTORY = 16
"""Default length of an amax history; any length works."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def inverse_shape(granularity: str, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix."""
    across, down = -(-columns // BLOCK), -(-rows // BLOCK)
    return {"tensor": (), "row": (rows, 1), "block": (rows, across), "square": (down, across)}[granularity]


def empty_inverse(x: torch.Tensor, granularity: str, rows: int, columns: int) -> torch.Tensor:
    """Allocate the scales of a matrix, in the layout of the module's table."""
    shape = inverse_shape(granularity, rows, columns)
    if granularity == "block":
        return x.new_empty(shape[::-1], dtype=torch.float32).t()
    return x.new_empty(shape, dtype=torch.float32)


# The reference: numpy in float64, where products of two float32 values are exact, and the format's table of values.


def _largest(magnitude: npt.NDArray[np.float64], granularity: str) -> npt.NDArray[np.float64]:
    """Return the amax of each group, in the shape of the scales."""
    rows, columns = magnitude.shape
    shape = inverse_shape(granularity, rows, columns)
    found = np.zeros(shape)
    if magnitude.size == 0:
        return found
    if granularity == "tensor":
        return np.asarray(magnitude.max())
    if granularity == "row":
        return np.asarray(magnitude.max(axis=1, keepdims=True))
    height = 1 if granularity == "block" else BLOCK
    for i, j in np.ndindex(*shape):
        found[i, j] = magnitude[i * height : (i + 1) * height, j * BLOCK : (j + 1) * BLOCK].max()
    return found


def _scales(amax: npt.NDArray[np.float64], chosen: Format, power_of_two: bool) -> npt.NDArray[np.float32]:
    quotient = np.minimum(chosen.largest / np.where(amax == 0, np.inf, amax), LARGEST_SCALE)
    scale = quotient.astype(np.float32)
    scale = np.where(scale.astype(np.float64) * amax > chosen.largest, np.nextafter(scale, np.float32(0)), scale)
    if power_of_two:
        _, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(0.5), exponent)
    return np.where(amax == 0, np.float32(1), scale).astype(np.float32)


def _spread(scale: npt.NDArray[np.float32], granularity: str, rows: int, columns: int) -> npt.NDArray[np.float32]:
    """Expand scales to one per element."""
    if granularity in ("block", "square"):
        scale = scale.repeat(BLOCK, axis=1)[:, :columns]
    if granularity == "square":
        scale = scale.repeat(BLOCK, axis=0)[:rows]
    return np.broadcast_to(scale, (rows, columns))


def _quantise(
    x: npt.NDArray[np.float32], scale: npt.NDArray[np.float32], granularity: str, chosen: Format
) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """Return the quantized data of a matrix, and its underflowed and non-finite counts."""
    spread = _spread(scale, granularity, *x.shape)
    finite = np.isfinite(x)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        product = x * spread
    # A finite element whose product overflows float32 saturates too.
    clipped = np.clip(product, -chosen.largest, chosen.largest)
    data = chosen.encode(np.where(finite, clipped, np.nan))
    underflowed = finite & (x != 0) & (chosen.decode(data) == 0)
    return data, [int(underflowed.sum()), int((~finite).sum())]


def reference(
    x: torch.Tensor,
    number_format: str,
    granularity: str,
    transposed: bool,
    history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    """The definition, in numpy: slow, and byte for byte exact."""
    chosen = format_named(number_format)
    x_RC = x.detach().to("cpu", torch.float32).numpy()
    magnitude = np.where(np.isfinite(x_RC), np.abs(x_RC), 0).astype(np.float64)
    counts = np.zeros((2, 4), dtype=np.int64)
    delayed_scale = None if history is None else _delayed_scale(history, chosen, power_of_two)

    def quantise(
        matrix: npt.NDArray[np.float32], sizes: npt.NDArray[np.float64], copy: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scales, saturated = _scales(_largest(sizes, granularity), chosen, power_of_two), 0
        if delayed_scale is not None:
            with np.errstate(over="ignore"):
                scaled = np.abs(np.where(np.isfinite(matrix), matrix, 0)) * delayed_scale
            saturated = int((scaled > chosen.largest).sum())
            largest = scaled.max(initial=0)
            below = largest < 2.0**NORMAL_BINADES * chosen.smallest_normal and bool(sizes.any())
            scales = scales if saturated or below else delayed_scale
        data, underflowed_nonfinite = _quantise(matrix, scales, granularity, chosen)
        counts[copy] = [saturated, *underflowed_nonfinite, matrix.size]
        with np.errstate(divide="ignore", over="ignore"):
            inverse = (1.0 / scales.astype(np.float64)).astype(np.float32)
        laid_out = empty_inverse(x, granularity, *matrix.shape)
        laid_out.copy_(torch.from_numpy(np.array(inverse)))
        return torch.from_numpy(data).to(x.device).view(chosen.dtype), laid_out

    data, inverse = quantise(x_RC, magnitude, 0)
    data_t, inverse_t = x.new_empty((0, 0), dtype=chosen.dtype), x.new_empty(0, dtype=torch.float32)
    if transposed:
        data_t, inverse_t = quantise(np.ascontiguousarray(x_RC.T), magnitude.T, 1)
        if granularity == "tensor":
            inverse_t = x.new_empty(0, dtype=torch.float32)
    amax = torch.tensor(magnitude.max(initial=0.0), dtype=torch.float32, device=x.device)
    entries = x.new_empty(0, dtype=torch.float32) if history is None else history
    next_history = torch.cat([amax.reshape(1), entries[:-1]]) if history is not None else entries
    return data, data_t, inverse, inverse_t, amax, torch.from_numpy(counts).to(x.device), next_history


def _delayed_scale(history: torch.Tensor, chosen: Format, power_of_two: bool) -> npt.NDArray[np.float32] | None:
    """Return the delayed scale of a history; None if it has no positive finite entry."""
    entries = history.detach().to("cpu").numpy().astype(np.float64)
    largest = np.asarray(entries[np.isfinite(entries)].max(initial=0.0))
    return _scales(largest, chosen, power_of_two) / np.float32(2) if largest > 0 else None


def check(call: Call) -> None:
    x, granularity, history = call["x"], call["granularity"], call["history"]
    if not isinstance(x, TensorSpec):
        raise TypeError(f"x={x!r}: expected a tensor")
    if x.dtype not in _DTYPES:
        raise TypeError(f"x has dtype {x.format}: use float32, float16 or bfloat16")
    if len(x.shape) != 2:
        raise ValueError(f"x has shape {list(x.shape)}: expected a matrix, so reshape it to rows and columns")
    format_named(call["number_format"])
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity={granularity!r}: use one of {', '.join(GRANULARITIES)}")
    for name in ("transposed", "power_of_two"):
        if not isinstance(call[name], bool):
            raise TypeError(f"{name}={call[name]!r}: use True or False")
    if history is None:
        return
    if not isinstance(history, TensorSpec):
        raise TypeError(f"history={history!r}: expected a float32 tensor, or None for scales from x itself")
    if granularity != "tensor":
        raise ValueError(
            f"history with granularity={granularity!r}: a history remembers one number for a whole "
            f"tensor; use granularity='tensor', or leave out history"
        )
    if history.dtype != torch.float32:
        raise TypeError(f"history has dtype {history.format}: use float32")
    if len(history.shape) != 1 or history.shape[0] == 0:
        raise ValueError(f"history has shape {list(history.shape)}: use a vector, such as torch.zeros({HISTORY})")
    if history.device != x.device:
        raise ValueError(f"history is on {history.device} and x on {x.device}: move one with .to()")


def fake(
    x: torch.Tensor,
    number_format: str,
    granularity: str,
    transposed: bool,
    history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    rows, columns = x.shape
    dtype = FORMATS[number_format].dtype
    second = transposed and granularity != "tensor"
    return (
        x.new_empty((rows, columns), dtype=dtype),
        x.new_empty((columns, rows) if transposed else (0, 0), dtype=dtype),
        empty_inverse(x, granularity, rows, columns),
        empty_inverse(x, granularity, columns, rows) if second else x.new_empty(0, dtype=torch.float32),
        x.new_empty((), dtype=torch.float32),
        x.new_empty((2, 4), dtype=torch.int64),
        x.new_empty(0 if history is None else history.shape[0], dtype=torch.float32),
    )


def as_matrix(x: Any) -> Any:
    """Detach a tensor and flatten its leading dimensions. Anything else is returned for the check to refuse."""
    if isinstance(x, torch.Tensor):
        return x.detach() if x.ndim <= 2 else x.detach().flatten(0, -2)
    return x


def without_float64(device: Device) -> str | None:
    """Return why a device cannot compute scales, for ``Kernel.supports``; None if it has float64."""
    if device.supports("float64"):
        return None
    return f"computes scales in float64, which {device.arch} does not"


def traffic(call: Call) -> int:
    x: TensorSpec = call["x"]
    rows, columns = x.shape
    copies = 2 if call["transposed"] else 1
    scales = math.prod(inverse_shape(call["granularity"], rows, columns))
    return math.prod(x.shape) * (x.dtype.itemsize + copies) + 4 * scales


def flops(call: Call) -> int:
    x: TensorSpec = call["x"]
    return 2 * math.prod(x.shape)  # a comparison for the amax and a multiplication; conversions are not counted


def plain(
    x: torch.Tensor,
    number_format: str,
    granularity: str,
    transposed: bool,
    history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    """Baseline in plain torch: without counts, without zero handling, for whole blocks only."""
    chosen = FORMATS[number_format]

    def cast(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = matrix.shape
        parts = {
            "tensor": (1, rows, 1, columns),
            "row": (rows, 1, 1, columns),
            "block": (rows, 1, columns // BLOCK, BLOCK),
            "square": (rows // BLOCK, BLOCK, columns // BLOCK, BLOCK),
        }[granularity]
        wide = matrix.reshape(parts).float()
        amax = wide.abs().amax(dim=(1, 3), keepdim=True) if history is None else history.amax()
        factor = chosen.largest / amax.clamp_min(1e-12)
        data = (wide * factor).clamp(-chosen.largest, chosen.largest).to(chosen.dtype)
        return data.reshape(rows, columns), factor.reciprocal()

    return (*cast(x), *(cast(x.t().contiguous()) if transposed else ()))


def _tensors(
    rows: int,
    columns: int,
    granularity: str = "tensor",
    *,
    number_format: str = "e4m3fn",
    transposed: bool = False,
    history: Sequence[float] | None = None,
    power_of_two: bool = False,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> Callable[[torch.dtype, torch.device, Draw], Mapping[str, Any]]:
    def make(dtype: torch.dtype, device: torch.device, draw: Draw) -> Mapping[str, Any]:
        x = change(draw(rows, columns).to(dtype))
        return {
            "x": x,
            "number_format": number_format,
            "granularity": granularity,
            "transposed": transposed,
            "history": None if history is None else torch.tensor(history, device=device),
            "power_of_two": power_of_two,
        }

    return make


def zero_rows(x: torch.Tensor) -> torch.Tensor:
    x[::2] = 0
    return x


def _outlier(x: torch.Tensor) -> torch.Tensor:
    x[1, 2] = 30000
    return x


def nonfinite(x: torch.Tensor) -> torch.Tensor:
    x[0, 0], x[1, 1], x[2, 2] = math.inf, -math.inf, math.nan
    return x


def _benchmark(rows: int, columns: int, granularity: str, history: Sequence[float] | None = None) -> Case:
    return Case(
        f"{rows}x{columns}-{granularity}{'-delayed' if history else ''}",
        _tensors(rows, columns, granularity, transposed=True, history=history),
        benchmark=True,
        formats=("bfloat16",),
        gate=f"both-{granularity}",
    )


CASES = (
    Case("odd", _tensors(5, 37)),
    *(Case(f"both-{kind}", _tensors(131, 260, kind, transposed=True)) for kind in GRANULARITIES),
    *(Case(f"format-{name}", _tensors(9, 150, "block", number_format=name, transposed=True)) for name in FORMATS),
    Case("one-number", _tensors(1, 1, "row", transposed=True)),
    Case("no-rows", _tensors(0, 40, "row", transposed=True)),
    Case("no-columns", _tensors(3, 0, "block", transposed=True)),
    Case("power-of-two", _tensors(20, 130, "row", power_of_two=True)),
    Case("delayed", _tensors(130, 300, history=(2.5, 3.0, 0.0), transposed=True)),
    Case("delayed-e5m2", _tensors(40, 129, history=(5.0,), power_of_two=True, number_format="e5m2")),
    Case("delayed-outgrown", _tensors(150, 140, history=(0.25, math.nan, math.inf), transposed=True)),
    Case("delayed-below", _tensors(150, 140, history=(1.0, 1e6), transposed=True)),
    Case("delayed-below-e5m2", _tensors(40, 129, history=(1e12,), power_of_two=True, number_format="e5m2")),
    Case("delayed-first", _tensors(20, 30, history=(0.0,) * 16, transposed=True)),
    Case("delayed-zeros", _tensors(20, 30, history=(0.0, 3.0), change=lambda x: x * 0)),
    Case("transposed-strides", _tensors(33, 140, "block", transposed=True, change=lambda x: x.t())),
    Case("every-other", _tensors(20, 80, "row", transposed=True, change=lambda x: x[::2, ::3])),
    Case("zero-rows", _tensors(12, 40, "row", transposed=True, change=zero_rows)),
    Case("zeros", _tensors(4, 8, change=lambda x: x * 0)),
    Case("subnormal-amax", _tensors(4, 8, "row", change=lambda x: x * 2.0**-100 * 2.0**-40)),
    Case("outlier", _tensors(6, 50, transposed=True, change=_outlier)),
    Case("nonfinite", _tensors(6, 50, "row", transposed=True, change=nonfinite)),
    *(_benchmark(8192, 4096, kind) for kind in GRANULARITIES),
    _benchmark(8192, 4096, "tensor", (6.0,) * HISTORY),
    _benchmark(16384, 14336, "tensor"),
    _benchmark(16384, 14336, "tensor", (6.0,) * HISTORY),
)

FP8_CAST = Op(
    name="fp8_cast",
    arguments=(
        "Tensor x",
        "str number_format",
        "str granularity",
        "bool transposed",
        "Tensor? history",
        "bool power_of_two",
    ),
    outputs=("data", "data_t", "inverse", "inverse_t", "amax", "counts", "next_history"),
    differentiable=("x",),  # no output is differentiable, but torch needs an argument in the schema
    differentiable_outputs=(),
    saved=("x",),
    exact=True,
    reference=reference,
    check=check,
    fake=fake,
    cases=CASES,
    compile_cases=(*(f"8192x4096-{kind}" for kind in GRANULARITIES), "8192x4096-tensor-delayed", "both-row"),
    traffic=traffic,
    flops=flops,
    baselines={"eager": plain},
)
