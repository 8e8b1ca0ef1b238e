"""fp8_swiglu and fp8_swiglu_grad: SwiGLU and its gradients in FP8. Both definitions, and fp8_swiglu's cases.

Shapes: M rows (tokens), F columns (the hidden width of the feed-forward block). With s = 1 / (1 + exp(-gate)), in
float32 and in forms that neither overflow nor cancel, whatever the gate (s may be 0 where it would be subnormal):

    h     = gate * s * up                                   fp8_swiglu
    dgate = (dh * up) * (s * (1 + gate * (1 - s)))          fp8_swiglu_grad
    dup   = dh * (gate * s)

and each of h, dgate and dup is quantized as ``fp8_cast`` defines it for the granularity ``tensor``: with one scale
from the amax, or from an amax history (delayed scaling) and requantized in the same call if the amax does not fit the
delayed scale; non-finite elements become NaN and are counted. The float32 values are rounded to FP8 once, never to
the 16-bit dtype of gate and up.

The operands that a feed-forward block y = h W^T needs, as the module docstring of ``fp8_cast`` explains:

    y     reduces over F     data    (M, F) of h           fp8_swiglu
    dW    reduces over M     h_t     (F, M) of h           fp8_swiglu_grad recomputes it from gate and up, so h is
                                                           never saved in any precision
    dx    reduces over F     dgate, dup        (M, F)      fp8_swiglu_grad
    dW'   reduces over M     dgate_t, dup_t    (F, M)      fp8_swiglu_grad, of the gate and up projections

``h_t`` is h quantized with the scale float32(1 / h_inverse), where h_inverse is the ``inverse`` of the forward,
saturating. With ``power_of_two`` that is exactly the forward's scale, and h_t is the transpose of data to the byte.
Otherwise it may be the neighbouring float32, and an element that is nearly halfway between two codes may get the
other one. Without h_inverse, h_t is (0, 0).

``counts`` has the saturated, underflowed and non-finite counts; for fp8_swiglu_grad in two rows, of dgate and of dup.
They are the same for a matrix and its transpose.

exp differs in its last bits between devices, so bytes are not defined. Kernels must agree in the dequantized values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kernel_pytorch.hardware_abstraction.formats import FORMATS, format_named
from kernel_pytorch.hardware_abstraction.op import Call, Case, Draw, Op, TensorSpec
from kernel_pytorch.ops.fp8_cast import definition as fp8_cast

__all__ = [
    "DRAWN",
    "FP8_SWIGLU",
    "Change",
    "check_history",
    "check_matrices",
    "check_power_of_two",
    "gradients",
    "hidden",
    "in_place_of_codes",
    "large",
    "matrices",
    "plain_cast",
]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# The arithmetic, in the dtype of the arguments.


def _sigmoids(gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return s and 1 - s. The argument of exp is never positive, and 1 - s does not cancel."""
    small = gate.abs().neg().exp()
    larger = (1 + small).reciprocal()
    smaller = small * larger
    positive = gate >= 0
    return torch.where(positive, larger, smaller), torch.where(positive, smaller, larger)


def hidden(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return gate * _sigmoids(gate)[0] * up


def gradients(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dgate, dup and h."""
    sigmoid, complement = _sigmoids(gate)
    silu = gate * sigmoid
    return (dh * up) * (sigmoid * (1 + gate * complement)), dh * silu, silu * up


# The references: exact values in place of quantized data, with inverse scale 1.


def in_place_of_codes(
    exact: torch.Tensor, history: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return exact values as the outputs of a cast: data, inverse, amax, counts and next_history."""
    finite = exact.float().isfinite()
    magnitude = torch.where(finite, exact.abs(), 0.0)
    amax = magnitude.amax() if magnitude.numel() else magnitude.new_zeros(())
    counts = torch.nn.functional.pad(finite.logical_not().count_nonzero().reshape(1), (2, 0))
    next_history = amax.new_empty(0) if history is None else torch.cat([amax.reshape(1), history[:-1]])
    return torch.where(finite, exact, torch.nan), amax.new_ones(()), amax, counts, next_history


def reference(
    gate: torch.Tensor, up: torch.Tensor, number_format: str, history: torch.Tensor | None, power_of_two: bool
) -> tuple[torch.Tensor, ...]:
    return in_place_of_codes(hidden(gate, up), history)


def low_precision(dtype: torch.dtype) -> Callable[..., Any]:
    """Plain float32 arithmetic, then the definition of the cast."""

    def run(
        gate: torch.Tensor, up: torch.Tensor, number_format: str, history: torch.Tensor | None, power_of_two: bool
    ) -> tuple[torch.Tensor, ...]:
        h = hidden(gate.float(), up.float())
        data, _, inverse, _, amax, counts, next_history = fp8_cast.reference(
            h, number_format, "tensor", False, history, power_of_two
        )
        return data, inverse, amax, counts[0, :3], next_history

    return run


def meaning(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the dequantized h and its statistics, without the underflow count, which depends on h's last bits."""
    return {
        "h": outputs["data"].to(outputs["inverse"].dtype) * outputs["inverse"],
        "amax": outputs["amax"],
        "nonfinite": outputs["counts"][2].to(outputs["amax"].dtype),
        "next_history": outputs["next_history"],
    }


# Checks.


def check_matrices(call: Call, names: Sequence[str]) -> None:
    """Check that the matrices have one shape, dtype and device."""
    for name in names:
        value = call[name]
        if not isinstance(value, TensorSpec):
            raise TypeError(f"{name}={value!r}: expected a tensor")
        if value.dtype not in _DTYPES:
            raise TypeError(f"{name} has dtype {value.format}: use float32, float16 or bfloat16")
        if len(value.shape) != 2:
            raise ValueError(
                f"{name} has shape {list(value.shape)}: expected a matrix, so reshape it to rows and columns"
            )
    gate: TensorSpec = call["gate"]
    for name in names:
        value = call[name]
        if value.shape != gate.shape:
            raise ValueError(
                f"{name} has shape {list(value.shape)} and gate {list(gate.shape)}: use matrices of one shape"
            )
        if value.dtype != gate.dtype:
            raise TypeError(f"{name} has dtype {value.format} and gate {gate.format}: convert one with .to()")
        if value.device != gate.device:
            raise ValueError(f"{name} is on {value.device} and gate on {gate.device}: move one with .to()")


def check_history(call: Call, name: str) -> None:
    history, gate = call[name], call["gate"]
    if history is None:
        return
    if not isinstance(history, TensorSpec):
        raise TypeError(f"{name}={history!r}: expected a float32 tensor, or None for a scale from the numbers")
    if history.dtype != torch.float32:
        raise TypeError(f"{name} has dtype {history.format}: use float32")
    if len(history.shape) != 1 or history.shape[0] == 0:
        raise ValueError(
            f"{name} has shape {list(history.shape)}: use a vector, such as torch.zeros({fp8_cast.HISTORY})"
        )
    if not history.contiguous:
        raise ValueError(f"{name} has strides {history.stride}: use a contiguous vector, as .contiguous() makes")
    if history.device != gate.device:
        raise ValueError(f"{name} is on {history.device} and gate on {gate.device}: move one with .to()")


def check_power_of_two(call: Call) -> None:
    if not isinstance(call["power_of_two"], bool):
        raise TypeError(f"power_of_two={call['power_of_two']!r}: use True or False")


def check(call: Call) -> None:
    check_matrices(call, ("gate", "up"))
    format_named(call["number_format"])
    check_history(call, "history")
    check_power_of_two(call)


# Shapes and costs.


def fake(
    gate: torch.Tensor, up: torch.Tensor, number_format: str, history: torch.Tensor | None, power_of_two: bool
) -> tuple[torch.Tensor, ...]:
    return (
        gate.new_empty(gate.shape, dtype=FORMATS[number_format].dtype),
        gate.new_empty((), dtype=torch.float32),
        gate.new_empty((), dtype=torch.float32),
        gate.new_empty(3, dtype=torch.int64),
        gate.new_empty(0 if history is None else history.shape[0], dtype=torch.float32),
    )


def traffic(call: Call) -> int:
    gate: TensorSpec = call["gate"]
    return math.prod(gate.shape) * (2 * gate.dtype.itemsize + 1)


def flops(call: Call) -> int:
    gate: TensorSpec = call["gate"]
    return 7 * math.prod(gate.shape)  # exp, sum, quotient; silu, h; a comparison for the amax, the scale


def plain_cast(
    matrix: torch.Tensor, number_format: str, history: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = FORMATS[number_format]
    wide = matrix.float()
    amax = wide.abs().amax() if history is None else history.amax()
    factor = chosen.largest / amax.clamp_min(1e-12)
    return (wide * factor).clamp(-chosen.largest, chosen.largest).to(chosen.dtype), factor.reciprocal()


def plain(
    gate: torch.Tensor, up: torch.Tensor, number_format: str, history: torch.Tensor | None, power_of_two: bool
) -> tuple[torch.Tensor, ...]:
    """Baseline in plain torch: h in the tensors' dtype, without counts, without zero handling."""
    return plain_cast(torch.nn.functional.silu(gate) * up, number_format, history)


# The cases.

Change = Callable[[torch.Tensor], torch.Tensor]


def matrices(
    rows: int, columns: int, dtype: torch.dtype, draw: Draw, joined: bool, change: Change
) -> tuple[torch.Tensor, torch.Tensor]:
    if joined:  # the halves of one projection's output
        both = draw(rows, 2 * columns).to(dtype)
        return change(both[:, :columns]), change(both[:, columns:])
    return change(draw(rows, columns).to(dtype)), change(draw(rows, columns).to(dtype))


def _forward(
    rows: int,
    columns: int,
    *,
    number_format: str = "e4m3fn",
    history: Sequence[float] | None = None,
    power_of_two: bool = False,
    joined: bool = False,
    change: Change = lambda x: x,
    change_gate: Change = lambda x: x,
) -> Callable[[torch.dtype, torch.device, Draw], Mapping[str, Any]]:
    def make(dtype: torch.dtype, device: torch.device, draw: Draw) -> Mapping[str, Any]:
        gate, up = matrices(rows, columns, dtype, draw, joined, change)
        return {
            "gate": change_gate(gate),
            "up": up,
            "number_format": number_format,
            "history": None if history is None else torch.tensor(history, device=device),
            "power_of_two": power_of_two,
        }

    return make


def large(gate: torch.Tensor) -> torch.Tensor:
    """Gates from -200 to 200, with a row of each sign only, and values at which exp overflows float32."""
    gate = gate * 60
    gate[0], gate[1] = -200, 200
    gate[2, :6] = torch.tensor([-104.0, -89.0, -87.0, 87.0, 89.0, 104.0]).to(gate)
    return gate.clamp(-200, 200)


def _benchmark(name: str, rows: int, columns: int, history: Sequence[float] | None = None) -> Case:
    return Case(
        name,
        _forward(rows, columns, history=history, joined=True),
        benchmark=True,
        formats=("bfloat16",),
        gate="columns-of-one-matrix" if history is None else "delayed",
    )


DRAWN = (14.0,) * fp8_cast.HISTORY  # about the amax of 16384 x 14336 products of normally distributed elements

CASES = (
    Case("odd", _forward(5, 37)),
    Case("tails", _forward(131, 260)),
    Case("one-number", _forward(1, 1)),
    Case("no-rows", _forward(0, 40, history=(1.0, 2.0))),
    Case("no-columns", _forward(3, 0)),
    Case("columns-of-one-matrix", _forward(132, 150, joined=True)),
    Case("transposed-strides", _forward(33, 140, change=lambda x: x.t())),
    Case("every-other", _forward(20, 80, change=lambda x: x[::2, ::3])),
    Case("zero-rows", _forward(12, 40, change=fp8_cast.zero_rows)),
    Case("zeros", _forward(4, 8, change=lambda x: x * 0)),
    Case("large-gates", _forward(40, 50, change_gate=large)),
    Case("nonfinite", _forward(6, 50, change_gate=fp8_cast.nonfinite)),
    *(Case(f"format-{name}", _forward(9, 150, number_format=name)) for name in FORMATS),
    Case("power-of-two", _forward(20, 130, power_of_two=True)),
    Case("delayed", _forward(130, 300, history=(12.5, 3.0, 0.0))),
    Case("delayed-e5m2", _forward(40, 129, history=(9.0,), power_of_two=True, number_format="e5m2")),
    Case("delayed-outgrown", _forward(150, 140, history=(0.25, math.nan, math.inf), joined=True)),
    Case("delayed-below", _forward(150, 140, history=(1.0, 1e6), joined=True)),
    Case("delayed-first", _forward(20, 30, history=(0.0,) * fp8_cast.HISTORY)),
    _benchmark("16384x14336", 16384, 14336),
    _benchmark("16384x14336-delayed", 16384, 14336, DRAWN),
)

FP8_SWIGLU = Op(
    name="fp8_swiglu",
    arguments=("Tensor gate", "Tensor up", "str number_format", "Tensor? history", "bool power_of_two"),
    outputs=("data", "inverse", "amax", "counts", "next_history"),
    differentiable=(
        "gate",
    ),  # no output is differentiable; torch's schema of the backward needs an argument and a result
    differentiable_outputs=(),
    saved=("gate",),
    reference=reference,
    low_precision=low_precision,
    meaning=meaning,
    check=check,
    fake=fake,
    cases=CASES,
    compile_cases=("tails", "delayed", "16384x14336", "16384x14336-delayed"),
    traffic=traffic,
    flops=flops,
    baselines={"eager": plain},
)
