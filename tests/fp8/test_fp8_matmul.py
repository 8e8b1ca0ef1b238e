"""fp8_matmul: against float64 of the dequantized operands, with the error bound of float32 accumulation."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.formats import FORMATS
from kernel_pytorch.ops.fp8_cast import fp8_cast
from kernel_pytorch.ops.fp8_cast.definition import inverse_shape
from kernel_pytorch.ops.fp8_matmul import KERNEL_DEQUANTISED, KERNEL_SCALED_MM, fp8_matmul
from kernel_pytorch.ops.fp8_matmul.definition import FP8_MATMUL, OUTPUTS, PAIRS, SUMS, granularities
from kernel_pytorch.testing import compare
from kernel_pytorch.testing.budget import exceeded

UNIT = 2.0**-24  # float32 rounds to nearest
every_pair = pytest.mark.parametrize("pair", PAIRS, ids="-".join)
scaled_mm_of_cpu = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the CPU's _scaled_mm was checked with 2.13"
)
NAMES = [(a, b) for a in FORMATS for b in FORMATS if not (a.startswith("e5m2") and b.startswith("e5m2"))]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spread(inverse: torch.Tensor, granularity: str, rows: int, columns: int) -> torch.Tensor:
    """The inverse scale of every element, in a loop."""
    exact = torch.empty(rows, columns, dtype=torch.float64)
    height, width = {"tensor": (0, 0), "row": (1, 0), "block": (1, 128), "square": (128, 128)}[granularity]
    for i in range(rows):
        for j in range(0, columns, 128):
            at = (i // height if height else 0, j // width if width else 0)
            exact[i, j : j + 128] = inverse[at] if inverse.ndim else inverse
    return exact


def operands(
    m: int, k: int, n: int, pair: tuple[str, str], formats: tuple[str, str] = ("e4m3fn", "e4m3fn"), seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Quantize matrices whose rows and columns differ in size, so that wrong scales are found."""
    drawn = []
    for number, (rows, granularity, name) in enumerate(zip((m, n), pair, formats, strict=True)):
        x = random(rows, k, seed=seed + number) * torch.logspace(-2, 1, k) * torch.logspace(-3, 0, rows)[:, None]
        drawn.append(fp8_cast(x, name, granularity))
    a, b = drawn
    return a.data, b.data, a.inverse, b.inverse


def check_product(
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_a: torch.Tensor,
    inverse_b: torch.Tensor,
    pair: tuple[str, str],
    **options: Any,
) -> None:
    """Check every element against its bound: rounding of K additions, of the scales and of the result."""
    exact_a = a.double() * spread(inverse_a, pair[0], *a.shape)
    exact_b = b.double() * spread(inverse_b, pair[1], *b.shape)
    exact, sizes = exact_a @ exact_b.t(), exact_a.abs() @ exact_b.abs().t()
    for name, dtype in OUTPUTS.items():
        out = fp8_matmul(a, b, inverse_a, inverse_b, name, **options)
        assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, exact.shape, True)
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        bound = (a.shape[1] + 4) * UNIT * sizes + torch.finfo(dtype).eps / 2 * exact.abs() + smallest
        assert ((out.double() - exact).abs() <= bound).all()


@every_pair
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 128, 1), (3, 129, 2), (5, 7, 300), (130, 257, 129), (64, 1, 3), (2, 640, 256)], ids=str
)
def test_every_pair_of_granularities_at_odd_shapes(pair: tuple[str, str], shape: tuple[int, int, int]) -> None:
    check_product(*operands(*shape, pair), pair)


@every_pair
@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0), (200, 0, 130)], ids=str)
def test_empty_tensors(pair: tuple[str, str], shape: tuple[int, int, int]) -> None:
    out = fp8_matmul(*operands(*shape, pair), "float32")
    assert out.shape == (shape[0], shape[2])
    assert out.eq(0).all()


@pytest.mark.parametrize("formats", NAMES, ids="-".join)
def test_every_pair_of_formats(formats: tuple[str, str]) -> None:
    for pair in PAIRS:
        check_product(*operands(9, 200, 17, pair, formats), pair)


@every_pair
@pytest.mark.parametrize("k", [4096, 32768])
def test_long_reductions(pair: tuple[str, str], k: int) -> None:
    """Worst-case bounds grow with K; the budget from float32 runs is the tight one."""
    check_product(*operands(3, k, 5, pair), pair)
    a, b, inverse_a, inverse_b = operands(3, k, 5, pair, seed=7)
    arguments = {"a": a, "b": b, "inverse_a": inverse_a, "inverse_b": inverse_b}
    found = compare(
        FP8_MATMUL, function_of(FP8_MATMUL), {**arguments, "dtype": "float32", "sums": "float32"}, gradients=False
    )
    assert not exceeded(found), exceeded(found)
    assert found[0].budget < 1e-4


@every_pair
def test_a_cpu_accumulates_in_float32_whatever_is_allowed(pair: tuple[str, str]) -> None:
    values = operands(9, 400, 33, pair)
    wanted = fp8_matmul(*values, "float32", "float32", kernel="dequantised")
    for sums in SUMS:
        assert torch.equal(fp8_matmul(*values, "float32", sums, kernel="dequantised"), wanted)
        check_product(*values, pair, sums=sums)


@every_pair
def test_the_budget_grows_with_the_loss_of_accumulation(pair: tuple[str, str]) -> None:
    """Fewer accumulator bits, or for more of the reduction: a larger, but bounded budget."""
    a, b, inverse_a, inverse_b = operands(3, 2048, 5, pair, seed=3)
    arguments = {"a": a, "b": b, "inverse_a": inverse_a, "inverse_b": inverse_b, "dtype": "float32"}
    budgets = {}
    for sums in SUMS:
        found = compare(FP8_MATMUL, function_of(FP8_MATMUL), {**arguments, "sums": sums}, gradients=False)
        assert not exceeded(found), exceeded(found)
        budgets[sums] = found[0].budget
    assert 10 * budgets["float32"] < budgets["promoted"] <= budgets["fast"] < 0.05
    if pair[0] in ("tensor", "row"):  # block scaling is always promoted
        assert budgets["promoted"] < budgets["fast"]


@scaled_mm_of_cpu
def test_very_long_reductions_are_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    multiply = torch._scaled_mm
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda *a, **kw: held.append(kw["use_fast_accum"]) or multiply(*a, **kw)
    )
    for k in (16384, 16400):
        for sums in ("promoted", "fast"):
            fp8_matmul(*operands(16, k, 16, ("tensor", "tensor")), "bfloat16", sums, kernel="scaled-mm")
    assert held == [False, True, False, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("k", [16384, 32768])
@pytest.mark.parametrize("pair", PAIRS[:3], ids="-".join)
@pytest.mark.parametrize("sums", ["promoted", "fast"])
def test_long_reductions_on_matrix_units(k: int, pair: tuple[str, str], sums: str) -> None:
    if pair[0] == "block" and sums == "fast":
        pytest.skip("blocks are added up in float32")
    values = [value.cuda() for value in operands(64, k, 128, pair, seed=5)]
    names = ("a", "b", "inverse_a", "inverse_b")
    arguments = dict(zip(names, values, strict=True), dtype="bfloat16", sums=sums)
    found = compare(FP8_MATMUL, partial(function_of(FP8_MATMUL), kernel="scaled-mm"), arguments, gradients=False)
    assert not exceeded(found), exceeded(found)


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 9) | st.integers(126, 131),
    k=st.integers(1, 9) | st.integers(126, 260),
    n=st.integers(1, 9) | st.integers(126, 131),
    pair=st.sampled_from(PAIRS),
    formats=st.sampled_from(NAMES),
    seed=st.integers(0, 2**31),
)
def test_generated_matmuls(
    m: int, k: int, n: int, pair: tuple[str, str], formats: tuple[str, str], seed: int
) -> None:
    check_product(*operands(m, k, n, pair, formats, seed), pair)


def test_sums_of_integers_are_exact() -> None:
    a = torch.randint(-8, 9, (20, 300), generator=torch.Generator().manual_seed(1)).float()
    b = torch.randint(-8, 9, (30, 300), generator=torch.Generator().manual_seed(2)).float()
    for one, two in PAIRS:
        inverses = [
            torch.full(inverse_shape(granularity, *x.shape), 0.25) for granularity, x in ((one, a), (two, b))
        ]
        out = fp8_matmul(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), *inverses, "float32")
        assert torch.equal(out, a @ b.t() / 16)


@every_pair
def test_strides_do_not_matter(pair: tuple[str, str]) -> None:
    a, b, inverse_a, inverse_b = operands(40, 260, 36, pair)
    turned = [x.view(torch.uint8).t().contiguous().t().view(x.dtype) for x in (a, b)]
    scales = [x.t().contiguous().t() if x.ndim else x for x in (inverse_a, inverse_b)]
    plain = fp8_matmul(a, b, inverse_a, inverse_b, "float32")
    torch.testing.assert_close(
        fp8_matmul(*turned, *scales, "float32"), plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max())
    )
    every_other = fp8_matmul(a, b.view(torch.uint8).repeat_interleave(2, 0).view(b.dtype)[::2], *scales, "float32")
    assert torch.equal(every_other, fp8_matmul(a, b, *scales, "float32"))


@every_pair
def test_runs_are_bitwise_repeatable_and_do_not_change_the_operands(pair: tuple[str, str]) -> None:
    values = operands(130, 300, 140, pair)
    before = [value.clone() for value in values]
    assert torch.equal(fp8_matmul(*values, "float32"), fp8_matmul(*values, "float32"))
    for one, other in zip(values, before, strict=True):
        assert torch.equal(one.float(), other.float())


@every_pair
def test_nan_affects_its_row_or_column_only(pair: tuple[str, str]) -> None:
    x, w = random(6, 300), random(140, 300, seed=1)
    x[2, 7], w[130, 299] = math.inf, math.nan
    a, b = fp8_cast(x, "e4m3fn", pair[0]), fp8_cast(w, "e5m2", pair[1])
    for name in OUTPUTS:
        missing = fp8_matmul(a.data, b.data, a.inverse, b.inverse, name).isnan()
        expected = torch.zeros(6, 140, dtype=torch.bool)
        expected[2], expected[:, 130] = True, True
        assert torch.equal(missing, expected)


@every_pair
@pytest.mark.parametrize(
    "exponents", [(100, -100), (-100, 120), (-100, -3), (-3, -100), (125, -100), (-60, -66)], ids=str
)
def test_extreme_scales_lose_no_accuracy(pair: tuple[str, str], exponents: tuple[int, int]) -> None:
    """If the result fits float32, intermediate products of scales that do not fit must not spoil it."""
    near = operands(5, 200, 9, pair)
    wanted = fp8_matmul(*near, "float32").double() * 2.0 ** sum(exponents)
    far = [inverse * 2.0**exponent for inverse, exponent in zip(near[2:], exponents, strict=True)]
    inside = (wanted.abs() < 1e38) & (wanted.abs() > 1e-37)
    assert inside.any()
    assert all(scale.isfinite().all() and (scale > 1e-37).all() for scale in far)
    out = fp8_matmul(*near[:2], *far, "float32").double()
    # Small blocks may underflow: they are below the rounding of the result.
    torch.testing.assert_close(out[inside], wanted[inside], rtol=1e-6, atol=0)


def test_zero_times_a_huge_scale_is_zero() -> None:
    a, b = torch.zeros(2, 16).to(torch.float8_e4m3fn), torch.ones(3, 16).to(torch.float8_e4m3fn)
    huge = torch.tensor(1e38)
    assert fp8_matmul(a, b, huge, huge, "float32", kernel="dequantised").eq(0).all()
    assert fp8_matmul(b, b, huge, huge, "float32", kernel="dequantised").isinf().all()


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_the_precision_that_torch_may_round_float32_to_does_not_matter(precision: str) -> None:
    values = [operands(48, 300, 40, pair) for pair in PAIRS]
    plain = [fp8_matmul(*each, "float32", kernel="dequantised") for each in values]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        for each, wanted in zip(values, plain, strict=True):
            found = fp8_matmul(*each, "float32", kernel="dequantised")
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))
    finally:
        torch.set_float32_matmul_precision(before)


@every_pair
def test_autocast_does_not_round_the_accumulation(pair: tuple[str, str]) -> None:
    values = operands(48, 300, 40, pair)
    plain = fp8_matmul(*values, "float32")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fp8_matmul(*values, "float32"), plain)


# Selection, torch.compile and wrong arguments


def test_a_pair_of_granularities_follows_from_the_shapes() -> None:
    assert granularities((5, 300), (200, 300), (), ()) == ("tensor", "tensor")
    assert granularities((5, 300), (200, 300), (5, 1), (200, 1)) == ("row", "row")
    assert granularities((5, 300), (200, 300), (5, 3), (2, 3)) == ("block", "square")
    assert granularities((5, 300), (200, 300), (5, 3), (200, 3)) == ("block", "block")
    assert granularities((5, 100), (200, 100), (5, 1), (200, 1)) == ("row", "row")  # one block is a row
    assert granularities((5, 100), (200, 100), (5, 1), (2, 1)) == ("block", "square")
    for wrong in (((5, 1), ()), ((1,), (1,)), ((5, 1), (2, 3)), ((1, 3), (2, 3))):
        assert granularities((5, 300), (200, 300), *wrong) is None


def test_scaled_mm_gives_the_reason_for_a_refusal() -> None:
    def refusal(
        m: int,
        k: int,
        n: int,
        pair: tuple[str, str],
        device: str,
        dtype: str = "bfloat16",
        sums: str = "promoted",
    ) -> str | None:
        call = function_of(FP8_MATMUL).call("forward", (*operands(m, k, n, pair), dtype, sums))
        return KERNEL_SCALED_MM.refusal(call, CATALOGUE[device])

    tensor, row, block = PAIRS[0], PAIRS[1], PAIRS[2]
    assert refusal(3, 32, 48, tensor, "nvidia/h200") is None
    assert refusal(3, 32, 48, row, "nvidia/h200") is None
    assert refusal(4, 128, 128, block, "nvidia/h200") is None
    assert refusal(4, 1024, 256, block, "nvidia/h200") is None
    assert refusal(4, 768, 256, block, "nvidia/h200") == (
        "needs K in multiples of 512 for 128x128 block scaling; K is 768"
    )
    assert refusal(0, 32, 48, tensor, "nvidia/h200") == "does not take empty matrices"
    assert refusal(3, 7, 5, tensor, "nvidia/h200") is None  # padded
    assert refusal(3, 7, 5, row, "nvidia/h200", sums="fast") is None
    assert refusal(3, 32, 48, tensor, "nvidia/h200", sums="float32") == (
        "accumulates in the matrix units of sm_90, not in float32; use sums='promoted'"
    )
    assert refusal(4, 128, 128, block, "nvidia/h200", sums="fast") == (
        "accumulates blocks in float32, so it has no fast accumulation; use sums='promoted'"
    )
    assert refusal(3, 32, 48, row, "nvidia/h200", "float32") == (
        "supports rowwise scaling with bfloat16 output only, not float32"
    )
    assert refusal(3, 32, 48, tensor, "nvidia/a100") == "the matrix units of sm_80 do not multiply float8_e4m3fn"
    assert refusal(3, 32, 48, tensor, "amd/mi300x") == "the matrix units of gfx942 do not multiply float8_e4m3fn"
    assert refusal(4, 256, 128, block, "amd/mi355x") == "does not support block scaling on gfx950"
    assert refusal(4, 144, 128, block, "nvidia/h200") == (
        "needs K and N in multiples of 128 and M of 4 for block scaling; M, K, N are 4, 144, 128"
    )
    if torch.__version__.startswith("2.13"):
        for sums in SUMS:
            assert refusal(3, 31, 47, row, "cpu/avx512", sums=sums) is None
        assert refusal(4, 256, 128, block, "cpu/avx512") == "does not support block scaling on a CPU"


@scaled_mm_of_cpu
@pytest.mark.parametrize("pair", PAIRS[:2], ids="-".join)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 17, 5), (5, 16, 31), (2, 47, 32), (4, 32, 48)], ids=str)
def test_scaled_mm_pads_to_multiples_of_16(pair: tuple[str, str], shape: tuple[int, int, int]) -> None:
    values = operands(*shape, pair)
    for sums in SUMS:
        check_product(*values, pair, sums=sums, kernel="scaled-mm")
    turned = [x.view(torch.uint8).t().contiguous().t().view(x.dtype) for x in values[:2]]
    for name in OUTPUTS:
        plain = fp8_matmul(*values, name, "fast", kernel="scaled-mm")
        assert torch.equal(fp8_matmul(*turned, *values[2:], name, "fast", kernel="scaled-mm"), plain)


def test_every_device_multiplies_through_the_portable_kernel() -> None:
    for device in CATALOGUE:
        assert kp.explain(fp8_matmul, *operands(3, 7, 2, PAIRS[1]), device=device).kernel is KERNEL_DEQUANTISED


def test_compiled_calls_give_the_same_bits() -> None:
    def run(*values: Any) -> torch.Tensor:
        return fp8_matmul(*values[:4], "bfloat16", values[4]) + 1

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True)
    for pair, sums in zip(PAIRS, ("fast", "promoted", "promoted", "float32"), strict=True):
        values = (*operands(33, 300, 140, pair), sums)
        assert torch.equal(compiled(*values), run(*values))


def test_meta_tensors_and_no_gradient() -> None:
    meta = [value.to("meta") for value in operands(5, 300, 140, PAIRS[2])]
    assert fp8_matmul(*meta, "float16").shape == (5, 140)
    a, b, inverse_a, inverse_b = operands(5, 30, 14, PAIRS[1])
    assert not fp8_matmul(a, b, inverse_a.requires_grad_(), inverse_b).requires_grad


A = torch.ones(4, 6).to(torch.float8_e4m3fn)
B = torch.ones(5, 6).to(torch.float8_e4m3fn)
ONE = torch.ones(())
WRONG = {
    "no tensor": (([1.0], B, ONE, ONE), TypeError, r"a=\[1.0\]: expected a tensor"),
    "no scale": ((A, B, 1.0, ONE), TypeError, "inverse_a=1.0: expected a tensor"),
    "dtype": ((A, B.float(), ONE, ONE), TypeError, "b has dtype float32: use an 8-bit format"),
    "vector": ((A[0], B, ONE, ONE), ValueError, r"a has shape \[6\]: expected a matrix"),
    "columns": (
        (A, B[:, :5], ONE, ONE),
        ValueError,
        r"b has shape \[5, 5\] and a \[4, 6\]: .* same number of columns",
    ),
    "e5m2": (
        (A.to(torch.float8_e5m2), B.to(torch.float8_e5m2fnuz), ONE, ONE),
        TypeError,
        "float8_e5m2 and float8_e5m2fnuz: one of them must be e4m3",
    ),
    "scale dtype": ((A, B, ONE, ONE.double()), TypeError, "inverse_b has dtype float64: use float32"),
    "scale shapes": (
        (A, B, ONE, torch.ones(5, 1)),
        ValueError,
        r"inverse_a has shape \[\] and inverse_b \[5, 1\]: .* row and row: \[4, 1\] and \[5, 1\]",
    ),
    "output": ((A, B, ONE, ONE, "float64"), ValueError, "dtype='float64': use one of float32, float16, bfloat16"),
    "output type": ((A, B, ONE, ONE, torch.float32), ValueError, "dtype=torch.float32: use one of float32"),
    "sums": ((A, B, ONE, ONE, "float32", "exact"), ValueError, "sums='exact': use one of float32, promoted, fast"),
    "device": ((A, B, ONE, ONE.to("meta")), ValueError, "inverse_b is on meta and a on cpu: move one"),
}


@pytest.mark.parametrize(("arguments", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named_with_a_remedy(
    arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        fp8_matmul(*arguments)
