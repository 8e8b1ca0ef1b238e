"""Rotary position embedding (RoPE) of queries and keys: the definition and its cases.

Shapes: B batch, Hq and Hk heads, S sequence length, D head dimension, R rotary dimensions (even, at most D). ``cos``
and ``sin`` are (B or 1, S, R), as Hugging Face models compute them. The first R of the D elements of a head are
rotated, the others are copied:

    half-split    rotate(x)[i] = -x[i + R/2],  rotate(x)[i + R/2] = x[i]        for i < R/2
    interleaved   rotate(x)[2i] = -x[2i + 1],  rotate(x)[2i + 1] = x[2i]        for i < R/2
    y = x * cos + rotate(x) * sin

The two elements of a pair may have different entries in cos and sin, so the backward is not a rotation by the
opposite angle in general: dx = dy * cos - rotate(dy * sin).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernel_pytorch.hardware_abstraction.op import Call, Case, Draw, Op, TensorSpec

__all__ = ["ROPE", "rotate"]

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def rotate(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(x1, x2) -> (-x2, x1) for each pair of the last dimension."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def reference(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, computed in the dtype of its arguments."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        return torch.cat([turned * cos + rotate(turned, interleaved) * sin, rest], dim=-1)

    return rotated(q), q.new_empty(0) if k is None else rotated(k)


def check(call: Call) -> None:
    q, k, cos, sin = (call[name] for name in ("q", "k", "cos", "sin"))
    for name, spec in (("q", q), ("k", k)):
        if name == "k" and spec is None:
            continue
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"{name}={spec!r}: expected a tensor" + (" or None" if name == "k" else ""))
        if len(spec.shape) != 4 or 0 in (spec.shape[1], spec.shape[3]):
            raise ValueError(
                f"{name} has shape {list(spec.shape)}: use (batch, heads, length, head_dim), with at least one head "
                f"and one element a head"
            )
        if spec.dtype not in _DTYPES:
            raise TypeError(f"{name} has dtype {spec.format}: use float64, float32, float16 or bfloat16")
    if k is not None:
        for what, at in (("batch", 0), ("length", 2), ("head_dim", 3)):
            if k.shape[at] != q.shape[at]:
                raise ValueError(f"k has {what} {k.shape[at]} and q {q.shape[at]}: they must be equal")
        if k.dtype != q.dtype:
            raise TypeError(f"k has dtype {k.format} and q {q.format}: use one dtype")
    for name, spec in (("cos", cos), ("sin", sin)):
        _check_table(name, spec, q)
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(f"cos is {cos} and sin is {sin}: they must have one shape and dtype")
    for name, spec in (("k", k), ("cos", cos), ("sin", sin)):
        if spec is not None and spec.device != q.device:
            raise ValueError(f"{name} is on {spec.device} and q on {q.device}: move one with .to()")
    if not isinstance(call["interleaved"], bool):
        raise TypeError(f"interleaved={call['interleaved']!r}: use True or False")


def _check_table(name: str, spec: Any, q: TensorSpec) -> None:
    batch, _, length, dim = q.shape
    if not isinstance(spec, TensorSpec):
        raise TypeError(f"{name}={spec!r}: expected a tensor")
    if len(spec.shape) != 3 or spec.shape[0] not in (1, batch) or spec.shape[1] != length:
        raise ValueError(
            f"{name} has shape {list(spec.shape)}: q has batch {batch} and length {length}, so {name} must be "
            f"({' or '.join(str(size) for size in sorted({1, batch}))}, {length}, rotary dimensions)"
        )
    rotary = spec.shape[2]
    if rotary % 2 or not 0 < rotary <= dim:
        raise ValueError(f"{name} has {rotary} rotary dimensions: use an even number from 2 to q's head_dim {dim}")
    if spec.dtype not in (q.dtype, torch.float32):
        raise TypeError(f"{name} has dtype {spec.format} and q {q.format}: use q's dtype or float32")


def fake(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, ...]:
    return q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape)


def fake_backward(
    dq_out: torch.Tensor, dk_out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, ...]:
    return dq_out.new_empty(dq_out.shape), dk_out.new_empty(dk_out.shape)


def traffic(call: Call) -> int:
    """q and k, or their gradients, read and written once; cos and sin read once."""
    cos: TensorSpec = call["cos"]
    tables = 2 * math.prod(cos.shape) * cos.dtype.itemsize
    return tables + 2 * sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in _rotated(call))


def flops(call: Call) -> int:
    rotary: int = call["cos"].shape[-1]
    return sum(3 * math.prod(spec.shape[:-1]) * rotary for spec in _rotated(call))


def _rotated(call: Call) -> list[TensorSpec]:
    return [call["q"], *([] if call["k"] is None else [call["k"]])]


def eager(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, ...]:
    """Baseline: the rotation as Hugging Face models write it, in the tensors' dtype."""
    cos, sin = cos.unsqueeze(1).to(q.dtype), sin.unsqueeze(1).to(q.dtype)
    rotary, out = cos.shape[-1], []
    for x in (q, k):
        if x is not None:
            turned = x[..., :rotary] * cos + rotate(x[..., :rotary], interleaved) * sin
            out.append(turned if rotary == x.shape[-1] else torch.cat([turned, x[..., rotary:]], dim=-1))
    return tuple(out)


def tables(
    length: int, rotary: int, interleaved: bool, device: torch.device, base: float = 10000.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of positions 0 to length - 1, (1, length, rotary), in float32."""
    frequency = base ** (-torch.arange(0, rotary, 2, device=device, dtype=torch.float32) / rotary)
    angle = torch.arange(length, device=device, dtype=torch.float32).unsqueeze(-1) * frequency
    angle = angle.repeat_interleave(2, dim=-1) if interleaved else torch.cat([angle, angle], dim=-1)
    return angle.cos().unsqueeze(0), angle.sin().unsqueeze(0)


def _case(
    name: str,
    shape: tuple[int, int, int, int, int],
    *,
    rotary: int | None = None,
    interleaved: bool = False,
    table_dtype: torch.dtype | None = None,
    any_table: bool = False,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    benchmark: bool = False,
) -> Case:
    """shape: (batch, q heads, k heads or 0 for no k, length, head_dim)."""
    batch, q_heads, k_heads, length, dim = shape
    width = rotary or dim

    def make(dtype: torch.dtype, device: torch.device, draw: Draw) -> Mapping[str, Any]:
        q = change(draw(batch, q_heads, length, dim).to(dtype))
        k = change(draw(batch, k_heads, length, dim).to(dtype)) if k_heads else None
        if any_table:  # for each batch entry, and the two elements of a pair differ
            cos, sin = draw(batch, length, width), draw(batch, length, width)
        else:
            cos, sin = tables(length, width, interleaved, device)
        wanted = table_dtype or dtype
        return {"q": q, "k": k, "cos": cos.to(wanted), "sin": sin.to(wanted), "interleaved": interleaved}

    formats = ("bfloat16", "float32") if benchmark else ("float32", "float16", "bfloat16")
    return Case(name, make, benchmark=benchmark, formats=formats)


def _projected(x: torch.Tensor) -> torch.Tensor:
    """Return x in the layout of a projection's output: a view of (batch, length, heads, head_dim)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


CASES = (
    _case("grouped", (2, 4, 2, 5, 32)),
    _case("one-token", (3, 2, 1, 1, 16)),
    _case("no-tokens", (2, 2, 1, 0, 16)),
    _case("no-k", (1, 3, 0, 9, 24)),
    _case("one-pair", (1, 1, 1, 3, 2)),
    _case("odd-sizes", (1, 3, 1, 37, 80), table_dtype=torch.float32),
    _case("interleaved", (2, 2, 2, 7, 32), interleaved=True),
    _case("partial", (2, 2, 1, 6, 27), rotary=10),
    _case("partial-interleaved", (1, 2, 2, 6, 48), rotary=12, interleaved=True, table_dtype=torch.float32),
    _case("any-table", (2, 2, 1, 6, 16), any_table=True),
    _case("any-table-interleaved", (2, 1, 1, 6, 16), any_table=True, interleaved=True),
    _case("projected", (2, 3, 2, 11, 16), change=_projected),
    _case("strided", (2, 2, 1, 5, 12), change=lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)),
    _case("prefill", (4, 32, 8, 4096, 128), change=_projected, table_dtype=torch.float32, benchmark=True),
    _case("long", (1, 32, 8, 32768, 128), change=_projected, table_dtype=torch.float32, benchmark=True),
    _case("prefill-interleaved", (4, 32, 8, 4096, 128), change=_projected, interleaved=True, benchmark=True),
    _case("prefill-partial", (4, 32, 8, 4096, 128), change=_projected, rotary=64, benchmark=True),
    _case("decode", (128, 32, 8, 1, 128), change=_projected, table_dtype=torch.float32, benchmark=True),
)

ROPE = Op(
    name="rope",
    arguments=("Tensor q", "Tensor? k", "Tensor cos", "Tensor sin", "bool interleaved"),
    outputs=("q_out", "k_out"),
    differentiable=("q", "k"),
    differentiable_outputs=("q_out", "k_out"),
    saved=("cos", "sin", "interleaved"),
    reference=reference,
    check=check,
    fake=fake,
    fake_backward=fake_backward,
    cases=CASES,
    compile_cases=("partial", "interleaved", "prefill", "prefill-interleaved", "decode"),
    traffic=traffic,
    flops=flops,
    baselines={"eager": eager},
)
