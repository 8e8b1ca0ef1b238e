"""fp8_swiglu and fp8_swiglu_grad: SwiGLU between 8-bit matrix products. The definitions and their cases.

Shapes: M rows (tokens), F columns (the hidden width of the feed-forward block). With s = 1 / (1 + exp(-gate)), in
float32 and in forms that neither overflow nor cancel, whatever the gate:

    h     = gate * s * up                                   fp8_swiglu
    dgate = (dh * up) * (s * (1 + gate * (1 - s)))          fp8_swiglu_grad
    dup   = dh * (gate * s)

and each of h, dgate and dup becomes 8-bit as ``fp8_cast`` defines it for the granularity ``tensor``: one scale from
the largest magnitude, or from a history of them (delayed scaling), cast again with a scale of its own in the same
call where the matrix has outgrown its history; numbers that are not finite become NaN and are counted. The float32
numbers are rounded to 8 bits once and never to the 16 bits of gate and up.

The matrices a feed-forward block y = h W^T needs of them, as the module text of ``fp8_cast`` explains:

    y     sums over F        data    (M, F) of h           fp8_swiglu
    dW    sums over M        h_t     (F, M) of h           fp8_swiglu_grad, which has gate and up at hand: keeping
                                                           them is enough, and h is nowhere kept in any precision
    dx    sums over F        dgate, dup        (M, F)      fp8_swiglu_grad
    dW'   sums over M        dgate_t, dup_t    (F, M)      fp8_swiglu_grad, of the gate and up projections

``h_t`` is h cast again by the scale float32(1 / h_inverse), where h_inverse is the ``inverse`` of the forward, and
saturating. With ``power_of_two`` that is the forward's scale to the bit and h_t the transpose of data to the byte.
Otherwise it may be the float32 beside it, and then a number so close to the middle between two codes that this
decides can have the other one, which is as near. Without h_inverse h_t is not made and is (0, 0).

``counts`` holds how many numbers outgrew the history, underflowed to zero and were not finite; for
fp8_swiglu_grad in two rows, of dgate and of dup. A matrix and its transpose are the same numbers.

exp differs in its last bits between devices, so no byte is defined. What must agree is what the codes mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kernel_pytorch.hardware_abstraction.op import Call, Case, Draw, Op, TensorSpec
from kernel_pytorch.ops.fp8_cast import definition as fp8_cast
from kernel_pytorch.precision.formats import FORMATS, format_named

__all__ = ["FP8_SWIGLU", "FP8_SWIGLU_GRAD", "gradients", "hidden"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# The arithmetic, in the precision of the arguments.


def _sigmoids(gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """s and 1 - s. exp sees no positive number and 1 - s is no difference."""
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
    """dgate, dup and h."""
    sigmoid, complement = _sigmoids(gate)
    silu = gate * sigmoid
    return (dh * up) * (sigmoid * (1 + gate * complement)), dh * silu, silu * up


# The references: exact numbers in place of codes, with the inverse scale 1.


def _in_place_of_codes(
    exact: torch.Tensor, history: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the cast's data, inverse, amax, counts and next_history."""
    finite = exact.float().isfinite()
    magnitude = torch.where(finite, exact.abs(), 0.0)
    amax = magnitude.amax() if magnitude.numel() else magnitude.new_zeros(())
    counts = torch.nn.functional.pad(finite.logical_not().count_nonzero().reshape(1), (2, 0))
    next_history = amax.new_empty(0) if history is None else torch.cat([amax.reshape(1), history[:-1]])
    return torch.where(finite, exact, torch.nan), amax.new_ones(()), amax, counts, next_history


def reference(
    gate: torch.Tensor, up: torch.Tensor, number_format: str, history: torch.Tensor | None, power_of_two: bool
) -> tuple[torch.Tensor, ...]:
    return _in_place_of_codes(hidden(gate, up), history)


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
    """h, and what is known about it. Which numbers underflow is a matter of their last bits."""
    return {
        "h": outputs["data"].to(outputs["inverse"].dtype) * outputs["inverse"],
        "amax": outputs["amax"],
        "nonfinite": outputs["counts"][2].to(outputs["amax"].dtype),
        "next_history": outputs["next_history"],
    }


def reference_grad(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    number_format: str,
    h_format: str,
    h_inverse: torch.Tensor | None,
    gate_history: torch.Tensor | None,
    up_history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    dgate, dup, h = gradients(dh, gate, up)
    dgate, dgate_inverse, _, dgate_counts, gate_next = _in_place_of_codes(dgate, gate_history)
    dup, dup_inverse, _, dup_counts, up_next = _in_place_of_codes(dup, up_history)
    h_t = h.new_empty((0, 0))
    if h_inverse is not None:
        largest = FORMATS[h_format].largest
        codes = (h / h_inverse).clamp(-largest, largest)
        h_t = torch.where(h.float().isfinite(), codes, torch.nan).t()
    counts = torch.stack([dgate_counts, dup_counts])
    return dgate, dgate.t(), dgate_inverse, dup, dup.t(), dup_inverse, h_t, counts, gate_next, up_next


def low_precision_grad(dtype: torch.dtype) -> Callable[..., Any]:
    """Plain float32 arithmetic, then the definition of the cast; h by the given scale."""

    def run(
        dh: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        number_format: str,
        h_format: str,
        h_inverse: torch.Tensor | None,
        gate_history: torch.Tensor | None,
        up_history: torch.Tensor | None,
        power_of_two: bool,
    ) -> tuple[torch.Tensor, ...]:
        *both, h = gradients(dh.float(), gate.float(), up.float())
        casts = [
            fp8_cast.reference(matrix, number_format, "tensor", True, history, power_of_two)
            for matrix, history in zip(both, (gate_history, up_history), strict=True)
        ]
        h_t = h.new_empty((0, 0))
        if h_inverse is not None:
            chosen = FORMATS[h_format]
            codes = chosen.encode((h * h_inverse.reciprocal()).t().cpu().numpy())
            h_t = torch.from_numpy(chosen.decode(codes)).to(h)
        (dgate, dgate_t, dgate_inverse, _, _, dgate_counts, gate_next) = casts[0]
        (dup, dup_t, dup_inverse, _, _, dup_counts, up_next) = casts[1]
        counts = torch.stack([dgate_counts[0, :3], dup_counts[0, :3]])
        return dgate, dgate_t, dgate_inverse, dup, dup_t, dup_inverse, h_t, counts, gate_next, up_next

    return run


def meaning_grad(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """dgate, dup and h in units of its inverse scale, and what is known about them."""
    wide = outputs["dgate_inverse"].dtype
    scaled = {
        name: outputs[name].to(wide) * outputs[name.removesuffix("_t") + "_inverse"]
        for name in ("dgate", "dgate_t", "dup", "dup_t")
    }
    return {
        **scaled,
        "h_t": outputs["h_t"].to(wide),
        "nonfinite": outputs["counts"][:, 2].to(wide),
        "gate_next_history": outputs["gate_next_history"],
        "up_next_history": outputs["up_next_history"],
    }


# Checks.


def _check_matrices(call: Call, names: Sequence[str]) -> None:
    """Matrices of one shape, one dtype and one place."""
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


def _check_history(call: Call, name: str) -> None:
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


def _check_power_of_two(call: Call) -> None:
    if not isinstance(call["power_of_two"], bool):
        raise TypeError(f"power_of_two={call['power_of_two']!r}: use True or False")


def check(call: Call) -> None:
    _check_matrices(call, ("gate", "up"))
    format_named(call["number_format"])
    _check_history(call, "history")
    _check_power_of_two(call)


def check_grad(call: Call) -> None:
    _check_matrices(call, ("dh", "gate", "up"))
    format_named(call["number_format"])
    if call["h_format"] not in FORMATS:
        raise ValueError(f"h_format={call['h_format']!r}: use one of {', '.join(FORMATS)}")
    h_inverse, gate = call["h_inverse"], call["gate"]
    if h_inverse is not None:
        if not isinstance(h_inverse, TensorSpec):
            raise TypeError(f"h_inverse={h_inverse!r}: use the inverse that fp8_swiglu gave, or None for no h_t")
        if h_inverse.dtype != torch.float32:
            raise TypeError(f"h_inverse has dtype {h_inverse.format}: use the float32 inverse that fp8_swiglu gave")
        if h_inverse.shape != ():
            raise ValueError(
                f"h_inverse has shape {list(h_inverse.shape)}: use the one number that fp8_swiglu gave, of shape []"
            )
        if h_inverse.device != gate.device:
            raise ValueError(f"h_inverse is on {h_inverse.device} and gate on {gate.device}: move one with .to()")
    _check_history(call, "gate_history")
    _check_history(call, "up_history")
    of_gate, of_up = call["gate_history"], call["up_history"]
    if (of_gate is None) != (of_up is None):
        given, missing = ("up_history", "gate_history") if of_gate is None else ("gate_history", "up_history")
        raise ValueError(f"{missing}=None with {given}: the numbers are read once with both; give both or neither")
    if of_gate is not None and of_gate.shape != of_up.shape:
        raise ValueError(
            f"up_history has shape {list(of_up.shape)} and gate_history {list(of_gate.shape)}: "
            f"use histories of one length"
        )
    _check_power_of_two(call)


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


def fake_grad(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    number_format: str,
    h_format: str,
    h_inverse: torch.Tensor | None,
    gate_history: torch.Tensor | None,
    up_history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    rows, columns = gate.shape
    dtype = FORMATS[number_format].dtype
    of_one = [((rows, columns), dtype), ((columns, rows), dtype), ((), torch.float32)]
    turned = (0, 0) if h_inverse is None else (columns, rows)
    remembered = [0 if history is None else history.shape[0] for history in (gate_history, up_history)]
    return (
        *(gate.new_empty(shape, dtype=kind) for shape, kind in (*of_one, *of_one)),
        gate.new_empty(turned, dtype=FORMATS[h_format].dtype),
        gate.new_empty((2, 3), dtype=torch.int64),
        *(gate.new_empty(length, dtype=torch.float32) for length in remembered),
    )


def fake_backward(gate: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.empty_like(gate, memory_format=torch.contiguous_format),)


def traffic(call: Call) -> int:
    gate: TensorSpec = call["gate"]
    return math.prod(gate.shape) * (2 * gate.dtype.itemsize + 1)


def traffic_grad(call: Call) -> int:
    gate: TensorSpec = call["gate"]
    copies = 4 if call["h_inverse"] is None else 5
    return math.prod(gate.shape) * (3 * gate.dtype.itemsize + copies)


def flops(call: Call) -> int:
    gate: TensorSpec = call["gate"]
    return 7 * math.prod(gate.shape)  # exp, sum, quotient; silu, h; a comparison for the amax, the scale


def flops_grad(call: Call) -> int:
    gate: TensorSpec = call["gate"]
    return 16 * math.prod(gate.shape)  # the same, the eight of the gradients, and one scale more


def _plain_cast(
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
    """What a user would write without us: h in the tensors' precision, no statistics, no care for zeros."""
    return _plain_cast(torch.nn.functional.silu(gate) * up, number_format, history)


def plain_grad(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    number_format: str,
    h_format: str,
    h_inverse: torch.Tensor | None,
    gate_history: torch.Tensor | None,
    up_history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    """What a user would write without us: autograd's own gradients, each cast, and turned as bytes."""
    silu = torch.nn.functional.silu(gate)
    dgate = torch.ops.aten.silu_backward(dh * up, gate)
    dgate_8, dgate_inverse = _plain_cast(dgate, number_format, gate_history)
    dup_8, dup_inverse = _plain_cast(dh * silu, number_format, up_history)
    chosen = FORMATS[h_format]
    h_8 = ((silu * up).float() / (1.0 if h_inverse is None else h_inverse)).clamp(-chosen.largest, chosen.largest)
    turned = [
        matrix.view(torch.uint8).t().contiguous().view(matrix.dtype)
        for matrix in (dgate_8, dup_8, h_8.to(chosen.dtype))
    ]
    return dgate_8, turned[0], dgate_inverse, dup_8, turned[1], dup_inverse, turned[2]


# The cases.

_Change = Callable[[torch.Tensor], torch.Tensor]


def _matrices(
    rows: int, columns: int, dtype: torch.dtype, draw: Draw, joined: bool, change: _Change
) -> tuple[torch.Tensor, torch.Tensor]:
    if joined:  # as one projection makes both
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
    change: _Change = lambda x: x,
    change_gate: _Change = lambda x: x,
) -> Callable[[torch.dtype, torch.device, Draw], Mapping[str, Any]]:
    def make(dtype: torch.dtype, device: torch.device, draw: Draw) -> Mapping[str, Any]:
        gate, up = _matrices(rows, columns, dtype, draw, joined, change)
        return {
            "gate": change_gate(gate),
            "up": up,
            "number_format": number_format,
            "history": None if history is None else torch.tensor(history, device=device),
            "power_of_two": power_of_two,
        }

    return make


def _grad(
    rows: int,
    columns: int,
    *,
    number_format: str = "e5m2",
    h_format: str = "e4m3fn",
    h_inverse: float | None = 0.0625,
    histories: tuple[Sequence[float], Sequence[float]] | None = None,
    power_of_two: bool = False,
    joined: bool = False,
    change: _Change = lambda x: x,
    change_gate: _Change = lambda x: x,
) -> Callable[[torch.dtype, torch.device, Draw], Mapping[str, Any]]:
    def make(dtype: torch.dtype, device: torch.device, draw: Draw) -> Mapping[str, Any]:
        dh = change(draw(rows, columns).to(dtype))
        gate, up = _matrices(rows, columns, dtype, draw, joined, change)
        of_gate, of_up = histories or (None, None)
        return {
            "dh": dh,
            "gate": change_gate(gate),
            "up": up,
            "number_format": number_format,
            "h_format": h_format,
            "h_inverse": None if h_inverse is None else torch.tensor(h_inverse, device=device),
            "gate_history": None if of_gate is None else torch.tensor(of_gate, device=device),
            "up_history": None if of_up is None else torch.tensor(of_up, device=device),
            "power_of_two": power_of_two,
        }

    return make


def _zero_rows(x: torch.Tensor) -> torch.Tensor:
    x[::2] = 0
    return x


def _nonfinite(x: torch.Tensor) -> torch.Tensor:
    x[0, 0], x[1, 1], x[2, 2] = math.inf, -math.inf, math.nan
    return x


def _large(gate: torch.Tensor) -> torch.Tensor:
    """From -200 to 200, with a row of each sign alone and the places where exp leaves float32."""
    gate = gate * 60
    gate[0], gate[1] = -200, 200
    gate[2, :6] = torch.tensor([-104.0, -89.0, -87.0, 87.0, 89.0, 104.0]).to(gate)
    return gate.clamp(-200, 200)


def _both(
    name: str, rows: int, columns: int, histories: tuple[Sequence[float], Sequence[float]] | None = None
) -> tuple[Case, Case]:
    """A benchmark case of each op."""
    history = None if histories is None else histories[0]
    settings: dict[str, Any] = {"benchmark": True, "formats": ("bfloat16",)}
    gate = "columns-of-one-matrix" if histories is None else "delayed"
    return (
        Case(name, _forward(rows, columns, history=history, joined=True), gate=gate, **settings),
        Case(name, _grad(rows, columns, histories=histories, joined=True), gate=gate, **settings),
    )


_DRAWN = (14.0,) * fp8_cast.HISTORY  # about the largest of 16384 x 14336 products of normal numbers
_WHOLE, _WHOLE_GRAD = _both("16384x14336", 16384, 14336)
_DELAYED, _DELAYED_GRAD = _both("16384x14336-delayed", 16384, 14336, (_DRAWN, _DRAWN))

CASES = (
    Case("odd", _forward(5, 37)),
    Case("tails", _forward(131, 260)),
    Case("one-number", _forward(1, 1)),
    Case("no-rows", _forward(0, 40, history=(1.0, 2.0))),
    Case("no-columns", _forward(3, 0)),
    Case("columns-of-one-matrix", _forward(132, 150, joined=True)),
    Case("transposed-strides", _forward(33, 140, change=lambda x: x.t())),
    Case("every-other", _forward(20, 80, change=lambda x: x[::2, ::3])),
    Case("zero-rows", _forward(12, 40, change=_zero_rows)),
    Case("zeros", _forward(4, 8, change=lambda x: x * 0)),
    Case("large-gates", _forward(40, 50, change_gate=_large)),
    Case("nonfinite", _forward(6, 50, change_gate=_nonfinite)),
    *(Case(f"format-{name}", _forward(9, 150, number_format=name)) for name in FORMATS),
    Case("power-of-two", _forward(20, 130, power_of_two=True)),
    Case("delayed", _forward(130, 300, history=(12.5, 3.0, 0.0))),
    Case("delayed-e5m2", _forward(40, 129, history=(9.0,), power_of_two=True, number_format="e5m2")),
    Case("delayed-outgrown", _forward(150, 140, history=(0.25, math.nan, math.inf), joined=True)),
    Case("delayed-first", _forward(20, 30, history=(0.0,) * fp8_cast.HISTORY)),
    _WHOLE,
    _DELAYED,
)
GRAD_CASES = (
    Case("odd", _grad(5, 37)),
    Case("tails", _grad(131, 260)),
    Case("one-number", _grad(1, 1)),
    Case("no-rows", _grad(0, 40, histories=((1.0, 2.0), (3.0, 4.0)))),
    Case("no-columns", _grad(3, 0)),
    Case("columns-of-one-matrix", _grad(132, 150, joined=True)),
    Case("transposed-strides", _grad(33, 140, change=lambda x: x.t())),
    Case("every-other", _grad(20, 80, change=lambda x: x[::2, ::3])),
    Case("zero-rows", _grad(12, 40, change=_zero_rows)),
    Case("zeros", _grad(4, 8, change=lambda x: x * 0)),
    Case("large-gates", _grad(40, 50, change_gate=_large)),
    Case("nonfinite", _grad(6, 50, change_gate=_nonfinite)),
    *(Case(f"format-{name}", _grad(9, 150, number_format=name, h_format=name)) for name in FORMATS),
    Case("power-of-two", _grad(20, 130, power_of_two=True, number_format="e4m3fn")),
    Case("without-h", _grad(20, 130, h_inverse=None)),
    Case("h-saturates", _grad(20, 130, h_inverse=2.0**-10)),
    Case("delayed", _grad(130, 300, histories=((12.5, 3.0, 0.0), (0.0, 1.0, 15.0)))),
    Case(
        "delayed-e4m3",
        _grad(40, 129, histories=((9.0,), (12.0,)), power_of_two=True, number_format="e4m3fn", h_inverse=None),
    ),
    Case("delayed-outgrown", _grad(150, 140, histories=((0.25, math.nan), (0.5, math.inf)), joined=True)),
    Case("delayed-gate-outgrown", _grad(70, 140, histories=((0.25,), (20.0,)))),
    Case("delayed-up-outgrown", _grad(70, 140, histories=((20.0,), (0.25,)))),
    Case("delayed-first", _grad(20, 30, histories=((0.0,) * fp8_cast.HISTORY, (0.0,) * fp8_cast.HISTORY))),
    _WHOLE_GRAD,
    _DELAYED_GRAD,
)

FP8_SWIGLU = Op(
    name="fp8_swiglu",
    arguments=("Tensor gate", "Tensor up", "str number_format", "Tensor? history", "bool power_of_two"),
    outputs=("data", "inverse", "amax", "counts", "next_history"),
    differentiable=(
        "gate",
    ),  # no output is: nothing flows back, but torch wants an argument and a result in a schema
    differentiable_outputs=(),
    saved=("gate",),
    reference=reference,
    low_precision=low_precision,
    meaning=meaning,
    check=check,
    fake=fake,
    fake_backward=fake_backward,
    cases=CASES,
    compile_cases=("tails", "delayed", "16384x14336", "16384x14336-delayed"),
    traffic=traffic,
    flops=flops,
    baselines={"torch": plain},
)
FP8_SWIGLU_GRAD = Op(
    name="fp8_swiglu_grad",
    arguments=(
        "Tensor dh",
        "Tensor gate",
        "Tensor up",
        "str number_format",
        "str h_format",
        "Tensor? h_inverse",
        "Tensor? gate_history",
        "Tensor? up_history",
        "bool power_of_two",
    ),
    outputs=(
        "dgate",
        "dgate_t",
        "dgate_inverse",
        "dup",
        "dup_t",
        "dup_inverse",
        "h_t",
        "counts",
        "gate_next_history",
        "up_next_history",
    ),
    differentiable=("gate",),  # as above
    differentiable_outputs=(),
    saved=("gate",),
    reference=reference_grad,
    low_precision=low_precision_grad,
    meaning=meaning_grad,
    check=check_grad,
    fake=fake_grad,
    fake_backward=fake_backward,
    cases=GRAD_CASES,
    compile_cases=("tails", "delayed", "16384x14336", "16384x14336-delayed"),
    traffic=traffic_grad,
    flops=flops_grad,
    baselines={"torch": plain_grad},
)
