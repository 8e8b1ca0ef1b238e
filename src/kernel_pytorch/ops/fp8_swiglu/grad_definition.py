"""fp8_swiglu_grad: the definition and its cases. The module docstring of ``definition`` has the equations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kernel_pytorch.hardware_abstraction.formats import FORMATS, format_named
from kernel_pytorch.hardware_abstraction.op import Call, Case, Draw, Op, TensorSpec
from kernel_pytorch.ops.fp8_cast import definition as fp8_cast
from kernel_pytorch.ops.fp8_swiglu.definition import (
    DRAWN,
    Change,
    check_history,
    check_matrices,
    check_power_of_two,
    gradients,
    in_place_of_codes,
    large,
    matrices,
    plain_cast,
)

__all__ = ["FP8_SWIGLU_GRAD"]


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
    dgate, dgate_inverse, _, dgate_counts, gate_next = in_place_of_codes(dgate, gate_history)
    dup, dup_inverse, _, dup_counts, up_next = in_place_of_codes(dup, up_history)
    h_t = h.new_empty((0, 0))
    if h_inverse is not None:
        largest = FORMATS[h_format].largest
        codes = (h / h_inverse).clamp(-largest, largest)
        h_t = torch.where(h.float().isfinite(), codes, torch.nan).t()
    counts = torch.stack([dgate_counts, dup_counts])
    return dgate, dgate.t(), dgate_inverse, dup, dup.t(), dup_inverse, h_t, counts, gate_next, up_next


def low_precision_grad(dtype: torch.dtype) -> Callable[..., Any]:
    """Plain float32 arithmetic, then the definition of the cast; h with the given scale."""

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
    """Return the dequantized dgate and dup, h in units of its inverse scale, and the statistics."""
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


def check_grad(call: Call) -> None:
    check_matrices(call, ("dh", "gate", "up"))
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
    check_history(call, "gate_history")
    check_history(call, "up_history")
    of_gate, of_up = call["gate_history"], call["up_history"]
    if (of_gate is None) != (of_up is None):
        given, missing = ("up_history", "gate_history") if of_gate is None else ("gate_history", "up_history")
        raise ValueError(f"{missing}=None with {given}: the numbers are read once with both; give both or neither")
    if of_gate is not None and of_gate.shape != of_up.shape:
        raise ValueError(
            f"up_history has shape {list(of_up.shape)} and gate_history {list(of_gate.shape)}: "
            f"use histories of one length"
        )
    check_power_of_two(call)


# Shapes and costs.


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


def traffic_grad(call: Call) -> int:
    gate: TensorSpec = call["gate"]
    copies = 4 if call["h_inverse"] is None else 5
    return math.prod(gate.shape) * (3 * gate.dtype.itemsize + copies)


def flops_grad(call: Call) -> int:
    gate: TensorSpec = call["gate"]
    return 16 * math.prod(gate.shape)  # fp8_swiglu's seven, eight for the gradients, and one more scale


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
    """Baseline in plain torch: autograd's gradients, each cast, and transposed as bytes."""
    silu = torch.nn.functional.silu(gate)
    dgate = torch.ops.aten.silu_backward(dh * up, gate)
    dgate_8, dgate_inverse = plain_cast(dgate, number_format, gate_history)
    dup_8, dup_inverse = plain_cast(dh * silu, number_format, up_history)
    chosen = FORMATS[h_format]
    h_8 = ((silu * up).float() / (1.0 if h_inverse is None else h_inverse)).clamp(-chosen.largest, chosen.largest)
    turned = [
        matrix.view(torch.uint8).t().contiguous().view(matrix.dtype)
        for matrix in (dgate_8, dup_8, h_8.to(chosen.dtype))
    ]
    return dgate_8, turned[0], dgate_inverse, dup_8, turned[1], dup_inverse, turned[2]


# The cases.


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
    change: Change = lambda x: x,
    change_gate: Change = lambda x: x,
) -> Callable[[torch.dtype, torch.device, Draw], Mapping[str, Any]]:
    def make(dtype: torch.dtype, device: torch.device, draw: Draw) -> Mapping[str, Any]:
        dh = change(draw(rows, columns).to(dtype))
        gate, up = matrices(rows, columns, dtype, draw, joined, change)
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


def _benchmark(
    name: str, rows: int, columns: int, histories: tuple[Sequence[float], Sequence[float]] | None = None
) -> Case:
    return Case(
        name,
        _grad(rows, columns, histories=histories, joined=True),
        benchmark=True,
        formats=("bfloat16",),
        gate="columns-of-one-matrix" if histories is None else "delayed",
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
    Case("zero-rows", _grad(12, 40, change=fp8_cast.zero_rows)),
    Case("zeros", _grad(4, 8, change=lambda x: x * 0)),
    Case("large-gates", _grad(40, 50, change_gate=large)),
    Case("nonfinite", _grad(6, 50, change_gate=fp8_cast.nonfinite)),
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
    Case("delayed-below", _grad(70, 140, histories=((1e12, 1.0), (1e13,) * 2), joined=True)),
    Case(
        "delayed-gate-below",
        _grad(70, 140, histories=((1e6,), (20.0,)), number_format="e4m3fn"),
    ),
    Case("delayed-first", _grad(20, 30, histories=((0.0,) * fp8_cast.HISTORY, (0.0,) * fp8_cast.HISTORY))),
    _benchmark("16384x14336", 16384, 14336),
    _benchmark("16384x14336-delayed", 16384, 14336, (DRAWN, DRAWN)),
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
    differentiable=("gate",),  # as for fp8_swiglu
    differentiable_outputs=(),
    saved=("gate",),
    reference=reference_grad,
    low_precision=low_precision_grad,
    meaning=meaning_grad,
    check=check_grad,
    fake=fake_grad,
    cases=GRAD_CASES,
    compile_cases=("tails", "delayed", "16384x14336", "16384x14336-delayed"),
    traffic=traffic_grad,
    flops=flops_grad,
    baselines={"eager": plain_grad},
)
