"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight over the last dimension. The definition and its cases.

Shapes: R rows (all leading dimensions), H hidden (the last dimension). ``rstd`` is 1 / sqrt(mean(x^2) + eps)
in float32 (float64 for float64), one element per row, which the backward needs besides x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernel_pytorch.hardware_abstraction.op import Call, Case, Draw, Op, TensorSpec

__all__ = ["RMS_NORM", "rstd_dtype"]

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def rstd_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, computed in x's dtype."""
    rstd = torch.rsqrt(x.square().mean(dim=-1) + eps)
    y = x * rstd.unsqueeze(-1)
    return (y if weight is None else y * weight), rstd


def check(call: Call) -> None:
    x, weight, eps = call["x"], call["weight"], call["eps"]
    if not isinstance(x, TensorSpec):
        raise TypeError(f"x={x!r}: expected a tensor")
    if x.dtype not in _DTYPES:
        raise TypeError(f"x has dtype {x.format}: use float64, float32, float16 or bfloat16")
    if not x.shape or x.shape[-1] == 0:
        raise ValueError(f"x has shape {list(x.shape)}: the last dimension must hold at least one number")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
        raise ValueError(f"eps={eps!r}: use a finite number that is not negative, such as 1e-6")
    if weight is None:
        return
    if not isinstance(weight, TensorSpec):
        raise TypeError(f"weight={weight!r}: expected a tensor or None")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight has shape {list(weight.shape)}: x has {x.shape[-1]} numbers in its last dimension, "
            f"so weight must have shape [{x.shape[-1]}]"
        )
    if weight.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"weight has dtype {weight.format} and x {x.format}: use x's dtype or float32")
    if weight.device != x.device:
        raise ValueError(f"weight is on {weight.device} and x on {x.device}: move one with .to()")


def fake(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, ...]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.shape[:-1], dtype=rstd_dtype(x.dtype))


def fake_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    dweight = x.new_empty(0) if weight is None else torch.empty_like(weight, memory_format=torch.contiguous_format)
    return torch.empty_like(x, memory_format=torch.contiguous_format), dweight


def traffic(call: Call) -> int:
    x: TensorSpec = call["x"]
    weight: TensorSpec | None = call["weight"]
    elements = math.prod(x.shape)
    tensors = 2 if call.phase == "forward" else 3  # x, y; or dy, x, dx
    weights = 0 if weight is None else x.shape[-1] * weight.dtype.itemsize
    rstd = elements // x.shape[-1] * rstd_dtype(x.dtype).itemsize
    return tensors * elements * x.dtype.itemsize + weights * (1 if call.phase == "forward" else 2) + rstd


def flops(call: Call) -> int:
    x: TensorSpec = call["x"]
    return math.prod(x.shape) * (4 if call.phase == "forward" else 9)


def functional(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def _tensors(
    *shape: int,
    weight: bool = True,
    weight_dtype: torch.dtype | None = None,
    eps: float = 1e-6,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> Callable[[torch.dtype, torch.device, Draw], Mapping[str, Any]]:
    def make(dtype: torch.dtype, device: torch.device, draw: Draw) -> Mapping[str, Any]:
        w = draw(shape[-1]) if weight else None
        return {
            "x": change(draw(*shape).to(dtype)),
            "weight": None if w is None else w.to(device, weight_dtype or dtype),
            "eps": eps,
        }

    return make


def _zero_rows(x: torch.Tensor) -> torch.Tensor:
    x[::2] = 0
    return x


def _scales(x: torch.Tensor) -> torch.Tensor:
    """Rows from tiny magnitudes to near the largest float16 value."""
    return x * torch.logspace(-6, 4, x.shape[0], device=x.device).unsqueeze(-1).to(x.dtype)


def _large_benchmark(rows: int, hidden: int) -> Case:
    return Case(f"{rows}x{hidden}", _tensors(rows, hidden), benchmark=True, formats=("bfloat16", "float32"))


CASES = (
    Case("one-row", _tensors(1, 64)),
    Case("odd-hidden", _tensors(5, 127)),
    Case("one-number", _tensors(3, 1, eps=0.1)),
    Case("many-short-rows", _tensors(3, 37, 24)),
    Case("row-vector", _tensors(200)),
    Case("no-rows", _tensors(0, 32)),
    Case("no-weight", _tensors(7, 129, weight=False)),
    Case("float32-weight", _tensors(6, 96, weight_dtype=torch.float32)),
    Case("transposed", _tensors(48, 33, change=lambda x: x.t().contiguous().t())),
    Case("every-other-row", _tensors(10, 130, change=lambda x: x[::2])),
    Case("expanded", _tensors(1, 40, change=lambda x: x.expand(6, 40))),
    Case("zero-rows", _tensors(6, 80, change=_zero_rows)),
    Case("scales", _tensors(11, 100, change=_scales)),
    Case("wide", _tensors(3, 4099)),
    _large_benchmark(4096, 4096),
    *(_large_benchmark(rows, hidden) for rows in (16384, 65536) for hidden in (4096, 8192)),
    _large_benchmark(16384, 5120),
    _large_benchmark(1048576, 128),
)

RMS_NORM = Op(
    name="rms_norm",
    arguments=("Tensor x", "Tensor? weight", "float eps"),
    outputs=("y", "rstd"),
    differentiable=("x", "weight"),
    differentiable_outputs=("y",),
    saved=("x", "weight", "rstd"),
    reference=reference,
    check=check,
    fake=fake,
    fake_backward=fake_backward,
    cases=CASES,
    compile_cases=("no-weight", "16384x4096", "16384x8192", "16384x5120", "1048576x128"),
    traffic=traffic,
    flops=flops,
    baselines={"torch.nn.functional": functional},
)
