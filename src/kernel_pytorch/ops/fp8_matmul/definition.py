"""fp8_matmul: scaled matmul of two FP8 matrices. The definition and its cases.

Shapes: a (M, K), b (N, K), out (M, N). Both operands have the reduction dimension last, as FP8 matrix units require,
and the inverse scales of ``fp8_cast``:

    out[m, n] = sum over k of (a[m, k] * inverse_a of its group) * (b[n, k] * inverse_b of its group)

in exact arithmetic; a kernel accumulates as ``sums`` says and rounds once to the dtype of the output:

    float32    every partial sum is rounded to float32
    promoted   partial sums of 128 products in the matrix units' accumulators, and their sum in float32. Hopper's
               accumulators have 14 bits: 32 products and the partial sum are truncated to 13 bits below the largest
    fast       the whole sum in the matrix units' accumulators, if K is at most 16384; ``promoted`` if it is larger

FP8 hardware is fast in the last two; hardware with wider accumulators may be more exact. Each scale must be constant
along K, or along 128 elements of it. These pairs of granularities are:

    a         b          shape of inverse_a      shape of inverse_b
    tensor    tensor     ()                      ()
    row       row        (M, 1)                  (N, 1)
    block     square     (M, ceil(K / 128))      (ceil(N / 128), ceil(K / 128))
    block     block      (M, ceil(K / 128))      (N, ceil(K / 128))

The pair follows from the shapes. Where two pairs have the same shapes (K of at most 128: a row is one block), the
scales are the same too, and the first of the table is taken. A NaN in an operand makes every output that depends on
it NaN. e5m2 by e5m2 is refused, because no matrix unit multiplies it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernel_pytorch.hardware_abstraction.formats import E4M3FN, E5M2, FORMATS, Format
from kernel_pytorch.hardware_abstraction.op import Call, Case, Draw, Op, TensorSpec
from kernel_pytorch.ops.fp8_cast.definition import BLOCK, inverse_shape

__all__ = ["BLOCK_PAIRS", "FP8_MATMUL", "OUTPUTS", "PAIRS", "SUMS", "adds_up_fast", "granularities"]

SUMS = ("float32", "promoted", "fast")
_LONGEST_FAST = 16384
BLOCK_PAIRS = (("block", "square"), ("block", "block"))
PAIRS = (("tensor", "tensor"), ("row", "row"), *BLOCK_PAIRS)
OUTPUTS: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_BY_DTYPE: Mapping[torch.dtype, Format] = {known.dtype: known for known in FORMATS.values()}


def adds_up_fast(sums: str, k: int) -> bool:
    """Return whether the matrix units may accumulate all of K: beyond a limit the loss of accuracy is too large."""
    return sums == "fast" and k <= _LONGEST_FAST


def granularities(
    a: tuple[int, ...], b: tuple[int, ...], inverse_a: tuple[int, ...], inverse_b: tuple[int, ...]
) -> tuple[str, str] | None:
    """Return the pair of granularities of these shapes, or None.

    Example:
        >>> granularities((5, 300), (200, 300), (5, 3), (2, 3))
        ('block', 'square')
    """
    for pair in PAIRS:
        if (inverse_shape(pair[0], *a), inverse_shape(pair[1], *b)) == (tuple(inverse_a), tuple(inverse_b)):
            return pair
    return None


def _spread(inverse: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Expand inverse scales to a shape that broadcasts with the matrix."""
    if inverse.ndim == 0 or (inverse.shape == (rows, 1)):
        return inverse
    if inverse.shape[0] != rows:
        inverse = inverse.repeat_interleave(BLOCK, dim=0)[:rows]
    return inverse.repeat_interleave(BLOCK, dim=1)[:, :columns]


def reference(
    a: torch.Tensor, b: torch.Tensor, inverse_a: torch.Tensor, inverse_b: torch.Tensor, dtype: str, sums: str
) -> tuple[torch.Tensor]:
    """The definition, computed in the dtype that the arguments were converted to, and not rounded to ``dtype``."""
    return ((a * _spread(inverse_a, *a.shape)) @ (b * _spread(inverse_b, *b.shape)).t(),)


_ACCUMULATOR_BITS = 13
_UNIT_PRODUCTS = 32


def one_after_another(dtype: torch.dtype) -> Callable[..., tuple[torch.Tensor]]:
    """Sequential accumulation, in float32 or as in Hopper's matrix units; the error budget is derived from it."""

    def run(
        a: torch.Tensor, b: torch.Tensor, inverse_a: torch.Tensor, inverse_b: torch.Tensor, dtype: str, sums: str
    ) -> tuple[torch.Tensor]:
        spread_a, spread_b = _spread(inverse_a, *a.shape), _spread(inverse_b, *b.shape)
        if sums == "float32":
            return ((a * spread_a) @ (b * spread_b).t(),)  # the budget accumulates products one by one
        if granularities(a.shape, b.shape, inverse_a.shape, inverse_b.shape) in BLOCK_PAIRS:
            return (sum_of(a * spread_a, b * spread_b, BLOCK),)
        # The accumulators hold unscaled products; the scales multiply the result.
        k = a.shape[1]
        total_MN = sum_of(a, b, max(1, k) if adds_up_fast(sums, k) else BLOCK)
        return (total_MN * inverse_a * (inverse_b if inverse_b.ndim == 0 else inverse_b.t()),)

    def sum_of(a_MK: torch.Tensor, b_NK: torch.Tensor, step: int) -> torch.Tensor:
        total_MN = a_MK.new_zeros((a_MK.shape[0], b_NK.shape[0]))
        for first in range(0, a_MK.shape[1], step):
            along = slice(first, first + step)
            total_MN += _on_matrix_units(a_MK[:, along], b_NK[:, along].t())
        return total_MN

    return run


def _on_matrix_units(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """A matmul in accumulators with ``_ACCUMULATOR_BITS`` below the largest term."""
    total_MN = a_MK.new_zeros((a_MK.shape[0], b_KN.shape[1]))
    for first in range(0, a_MK.shape[1], _UNIT_PRODUCTS):
        products_MKN = a_MK[:, first : first + _UNIT_PRODUCTS, None] * b_KN[None, first : first + _UNIT_PRODUCTS]
        terms = torch.cat([products_MKN, total_MN.unsqueeze(1)], dim=1)
        _, exponent = torch.frexp(terms.abs().amax(dim=1, keepdim=True))
        quantum = torch.ldexp(torch.ones_like(exponent, dtype=terms.dtype), exponent - 1 - _ACCUMULATOR_BITS)
        total_MN = (torch.trunc(terms / quantum) * quantum).sum(dim=1)
    return total_MN


def check(call: Call) -> None:
    a, b, inverse_a, inverse_b = (call[name] for name in ("a", "b", "inverse_a", "inverse_b"))
    for name, value in (("a", a), ("b", b), ("inverse_a", inverse_a), ("inverse_b", inverse_b)):
        if not isinstance(value, TensorSpec):
            raise TypeError(f"{name}={value!r}: expected a tensor")
        if value.device != a.device:
            raise ValueError(f"{name} is on {value.device} and a on {a.device}: move one with .to()")
    for name, value in (("a", a), ("b", b)):
        if value.dtype not in _BY_DTYPE:
            raise TypeError(f"{name} has dtype {value.format}: use an 8-bit format, as fp8_cast gives")
        if len(value.shape) != 2:
            raise ValueError(f"{name} has shape {list(value.shape)}: expected a matrix")
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"b has shape {list(b.shape)} and a {list(a.shape)}: both must have the same number of columns, which "
            f"is summed over; fp8_cast makes a transposed copy for that"
        )
    if _BY_DTYPE[a.dtype].mantissa_bits == 2 and _BY_DTYPE[b.dtype].mantissa_bits == 2:
        raise TypeError(f"a and b have dtypes {a.format} and {b.format}: one of them must be e4m3")
    for name, value in (("inverse_a", inverse_a), ("inverse_b", inverse_b)):
        if value.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {value.format}: use float32")
    if granularities(a.shape, b.shape, inverse_a.shape, inverse_b.shape) is None:
        shapes = [(pair, inverse_shape(pair[0], *a.shape), inverse_shape(pair[1], *b.shape)) for pair in PAIRS]
        allowed = "; ".join(f"{one} and {two}: {list(of_a)} and {list(of_b)}" for (one, two), of_a, of_b in shapes)
        raise ValueError(
            f"inverse_a has shape {list(inverse_a.shape)} and inverse_b {list(inverse_b.shape)}: for a of shape "
            f"{list(a.shape)} and b of shape {list(b.shape)} use one of {allowed}"
        )
    if not isinstance(call["dtype"], str) or call["dtype"] not in OUTPUTS:
        raise ValueError(f"dtype={call['dtype']!r}: use one of {', '.join(OUTPUTS)}")
    if call["sums"] not in SUMS:
        raise ValueError(f"sums={call['sums']!r}: use one of {', '.join(SUMS)}")


def fake(
    a: torch.Tensor, b: torch.Tensor, inverse_a: torch.Tensor, inverse_b: torch.Tensor, dtype: str, sums: str
) -> tuple[torch.Tensor, ...]:
    return (a.new_empty((a.shape[0], b.shape[0]), dtype=OUTPUTS[dtype]),)


def traffic(call: Call) -> int:
    tensors: tuple[TensorSpec, ...] = tuple(call[name] for name in ("a", "b", "inverse_a", "inverse_b"))
    read = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)
    return read + tensors[0].shape[0] * tensors[1].shape[0] * OUTPUTS[call["dtype"]].itemsize


def flops(call: Call) -> int:
    a: TensorSpec = call["a"]
    b: TensorSpec = call["b"]
    return 2 * math.prod(a.shape) * b.shape[0]


def high_precision(
    a: torch.Tensor, b: torch.Tensor, inverse_a: torch.Tensor, inverse_b: torch.Tensor, dtype: str, sums: str
) -> torch.Tensor:
    """Baseline: a matmul of the same shapes in bfloat16 (or the output's dtype), without scales."""
    wide = OUTPUTS[dtype]
    return a.to(wide) @ b.to(wide).t()


def _tensors(
    m: int,
    k: int,
    n: int,
    pair: tuple[str, str] = ("tensor", "tensor"),
    formats: tuple[Format, Format] = (E4M3FN, E4M3FN),
    change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    sums: str = "float32",
) -> Callable[[torch.dtype, torch.device, Draw], Mapping[str, Any]]:
    """Return a builder of arguments. The case's dtype is the output's; operands and scales are drawn at random."""

    def operand(rows: int, chosen: Format, draw: Draw) -> torch.Tensor:
        return change((draw(rows, k) * 32).clamp(-chosen.largest, chosen.largest)).to(chosen.dtype)

    def scales(rows: int, granularity: str, draw: Draw) -> torch.Tensor:
        shape = inverse_shape(granularity, rows, k)
        drawn = draw(math.prod(shape)).exp().reshape(shape) / 64
        return drawn.t().contiguous().t() if granularity == "block" else drawn

    def make(dtype: torch.dtype, device: torch.device, draw: Draw) -> Mapping[str, Any]:
        return {
            "a": operand(m, formats[0], draw),
            "b": operand(n, formats[1], draw),
            "inverse_a": scales(m, pair[0], draw),
            "inverse_b": scales(n, pair[1], draw),
            "dtype": str(dtype).removeprefix("torch."),
            "sums": sums,
        }

    return make


def _holes(x: torch.Tensor) -> torch.Tensor:
    x[1, 2] = math.nan
    x[3] = 0
    return x


def _benchmark(m: int, k: int, n: int, pair: tuple[str, str]) -> Case:
    make = _tensors(m, k, n, pair, sums="promoted")
    return Case(f"{m}x{k}x{n}-{'-'.join(pair)}", make, benchmark=True, formats=("bfloat16",))


CASES = (
    *(Case(f"multiples-{'-'.join(pair)}", _tensors(48, 256, 128, pair)) for pair in PAIRS),
    *(Case(f"odd-{'-'.join(pair)}", _tensors(7, 300, 131, pair)) for pair in PAIRS),
    *(Case(f"promoted-{'-'.join(pair)}", _tensors(48, 512, 128, pair, sums="promoted")) for pair in PAIRS),
    *(Case(f"fast-{pair[0]}", _tensors(32, 1024, 64, pair, sums="fast")) for pair in PAIRS[:2]),
    Case("many-squares", _tensors(32, 768, 512, ("block", "square"), sums="promoted")),
    Case("fast-long", _tensors(16, 16384, 16, sums="fast")),
    Case("promoted-odd", _tensors(9, 300, 131, ("row", "row"), (E5M2, E4M3FN), sums="promoted")),
    Case("odd", _tensors(5, 37, 11)),
    Case("e5m2-first", _tensors(32, 64, 48, ("row", "row"), (E5M2, E4M3FN))),
    Case("e5m2-second", _tensors(16, 128, 32, formats=(E4M3FN, E5M2))),
    Case("fnuz", _tensors(16, 32, 16, formats=(FORMATS["e5m2fnuz"], FORMATS["e4m3fnuz"]))),
    Case("one-number", _tensors(1, 1, 1)),
    Case("one-row", _tensors(1, 200, 9, ("block", "block"))),
    Case("one-column", _tensors(9, 130, 1, ("block", "square"))),
    Case("no-rows", _tensors(0, 16, 16, ("row", "row"))),
    Case("no-columns", _tensors(4, 20, 0, ("block", "square"))),
    Case("nothing-to-add", _tensors(3, 0, 16, ("block", "block"))),
    Case("holes", _tensors(16, 160, 32, ("row", "row"), change=_holes)),
    Case("long-sum", _tensors(16, 32768, 16)),
    Case("long-sum-blocks", _tensors(3, 32768, 5, ("block", "square"))),
    *(_benchmark(8192, 4096, 4096, pair) for pair in PAIRS),
    *(_benchmark(8192, 4096, 14336, pair) for pair in PAIRS[:2]),
)

FP8_MATMUL = Op(
    name="fp8_matmul",
    arguments=("Tensor a", "Tensor b", "Tensor inverse_a", "Tensor inverse_b", "str dtype", "str sums"),
    outputs=("out",),
    differentiable=("a",),  # no output is differentiable, but torch needs an argument in the schema
    differentiable_outputs=(),
    saved=("a",),
    reference=reference,
    check=check,
    fake=fake,
    cases=CASES,
    compile_cases=(),
    traffic=traffic,
    flops=flops,
    low_precision=one_after_another,
    baselines={"torch.mm": high_precision},
    compile_baselines=False,
)
