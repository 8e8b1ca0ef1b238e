"""fp8_cast: every byte, scale and count against a plain program written here from the format's encode."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction.architectures import ARCHITECTURES
from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.ops.fp8_cast import KERNEL_TORCH, Cast, fp8_cast, torch_kernel
from kernel_pytorch.ops.fp8_cast.definition import FP8_CAST, GRANULARITIES, inverse_shape
from kernel_pytorch.precision import E4M3FN, E5M2, FORMATS, Format
from kernel_pytorch.testing import compare, poisoned
from kernel_pytorch.testing.budget import exceeded

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
every_format = pytest.mark.parametrize("form", FORMATS.values(), ids=str)
every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def codes(data: torch.Tensor) -> np.ndarray:
    return data.view(torch.uint8).numpy()


def exact_scale(amax: float, form: Format, power_of_two: bool) -> np.float32:
    """By exact comparison: the largest float32, at most 2^126, that keeps amax inside the format."""
    if amax == 0:
        return np.float32(1)
    scale = np.float32(min(form.largest / amax, 2.0**126))
    while Fraction(float(scale)) * Fraction(amax) > Fraction(form.largest):
        scale = np.nextafter(scale, np.float32(0))
    while scale < 2.0**126 and (
        Fraction(float(up := np.nextafter(scale, np.float32(np.inf)))) * Fraction(amax) <= Fraction(form.largest)
    ):
        scale = up
    return np.float32(2.0 ** math.floor(math.log2(scale))) if power_of_two else scale


def groups(granularity: str, rows: int, columns: int) -> dict[tuple[int, ...], tuple[slice, slice]]:
    """The numbers of each scale."""
    every = slice(None)
    shape = inverse_shape(granularity, rows, columns)
    if granularity == "tensor":
        return {(): (every, every)}
    if granularity == "row":
        return {(i, 0): (slice(i, i + 1), every) for i in range(rows)}
    height = 1 if granularity == "block" else 128
    return {
        (i, j): (slice(i * height, (i + 1) * height), slice(j * 128, (j + 1) * 128))
        for i, j in itertools.product(range(shape[0]), range(shape[1]))
    }


def expected_cast(
    x: np.ndarray, form: Format, granularity: str, scale: np.ndarray | None, power_of_two: bool
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Codes, inverse scales and counts, one group after another."""
    data = np.zeros(x.shape, dtype=np.uint8)
    inverse = np.zeros(inverse_shape(granularity, *x.shape), dtype=np.float32)
    counts = [0, 0, 0]
    for place, where in groups(granularity, *x.shape).items():
        numbers = x[where]
        finite = np.isfinite(numbers)
        amax = float(np.abs(numbers[finite]).max(initial=0))
        s = exact_scale(amax, form, power_of_two) if scale is None else scale[place]
        with np.errstate(all="ignore"):
            product = (numbers * s).astype(np.float32)
        # encode() itself makes NaN of an infinity, and a finite number that overflows float32 must saturate.
        product = np.where(finite, np.nan_to_num(product, nan=np.nan), np.nan)
        data[where] = form.encode(product)
        inverse[place] = np.float32(1) / s
        counts[0] += int((finite & (np.abs(product) > form.largest)).sum())
        counts[1] += int((finite & (numbers != 0) & (form.decode(data[where]) == 0)).sum())
        counts[2] += int((~finite).sum())
    return data, inverse, counts


def check_cast(
    x: torch.Tensor,
    form: Format,
    granularity: str,
    *,
    transposed: bool = True,
    scale: torch.Tensor | None = None,
    power_of_two: bool = False,
) -> Cast:
    """fp8_cast's every output against the plain program."""
    cast = fp8_cast(
        x, form.name, granularity, transposed=transposed, scale=scale, power_of_two=power_of_two, kernel="torch"
    )
    matrix = x.float().numpy()
    given = None if scale is None else scale.numpy()
    data, inverse, counts = expected_cast(matrix, form, granularity, given, power_of_two)
    assert cast.data.dtype == cast.data_t.dtype == form.dtype
    np.testing.assert_array_equal(codes(cast.data), data)
    np.testing.assert_array_equal(cast.inverse.numpy(), inverse)
    assert cast.data.is_contiguous()
    assert cast.counts[0].tolist() == counts
    finite = matrix[np.isfinite(matrix)]
    assert cast.amax.item() == np.abs(finite).max(initial=0)
    by_columns = granularity == "block"
    laid_out = torch.empty(inverse.shape[::-1]).t() if by_columns else torch.empty(inverse.shape)
    assert cast.inverse.stride() == laid_out.stride()
    if not transposed:
        assert cast.data_t.shape == (0, 0)
        assert cast.inverse_t.numel() == 0
        assert cast.counts[1].tolist() == [0, 0, 0]
        return cast
    turned = None if given is None else given.T
    data_t, inverse_t, counts_t = expected_cast(matrix.T, form, granularity, turned, power_of_two)
    np.testing.assert_array_equal(codes(cast.data_t), data_t)
    np.testing.assert_array_equal(cast.inverse_t.numpy(), inverse_t)
    assert cast.data_t.is_contiguous()
    assert cast.counts[1].tolist() == counts_t
    if granularity in ("tensor", "square"):  # the scales agree, so the copies are each other's transpose
        np.testing.assert_array_equal(codes(cast.data_t), codes(cast.data).T)
    return cast


# The cast itself, with scale 1


ONE = torch.tensor(1.0)


@every_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_number_is_cast_as_the_format_defines(form: Format, dtype: torch.dtype) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype).reshape(256, 256)
    cast = fp8_cast(x, form.name, scale=ONE, transposed=True)
    expected = form.encode(x.double().numpy())
    np.testing.assert_array_equal(codes(cast.data), expected)
    np.testing.assert_array_equal(codes(cast.data_t), expected.T)
    finite = x.isfinite()
    saturated = finite & (x.double().abs() > form.largest)
    underflowed = (x != 0) & torch.from_numpy(form.decode(expected) == 0)
    assert cast.counts.tolist() == [[int(lost.sum()) for lost in (saturated, underflowed, ~finite)]] * 2


@every_format
def test_float32_around_every_value_and_every_tie(form: Format) -> None:
    values = form.values[:0x80][np.isfinite(form.values[:0x80])]
    points = np.concatenate(
        [values, (values[1:] + values[:-1]) / 2, [form.largest * 1.02, form.largest * 1.1, 1e38]]
    )
    bits = points.astype(np.float32).view(np.int32)[:, None] + np.arange(-40, 41, dtype=np.int32)
    x = np.concatenate([numbers := np.abs(bits).astype(np.int32).view(np.float32), -numbers])
    assert len(np.unique(x)) > 15000
    cast = fp8_cast(torch.from_numpy(x), form.name, scale=ONE)
    np.testing.assert_array_equal(codes(cast.data), form.encode(x))


@every_format
@settings(max_examples=100, deadline=None)
@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=24, max_size=24),
    scale=st.floats(2.0**-120, 2.0**120, width=32),
)
def test_any_float32_bits_with_any_scale(form: Format, bits: list[int], scale: float) -> None:
    x = torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32).reshape(4, 6))
    check_cast(x, form, "tensor", scale=torch.tensor(scale))


# Granularities, shapes and strides


@every_format
@every_granularity
def test_odd_shapes(form: Format, granularity: str) -> None:
    for number, shape in enumerate([(1, 1), (3, 5), (1, 300), (300, 1), (129, 130), (128, 256)]):
        x = random(*shape, dtype=DTYPES[number % 3], seed=number)
        check_cast(x, form, granularity)
        check_cast(x, form, granularity, transposed=False, power_of_two=True)


@every_granularity
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (0, 128), (200, 0)], ids=str)
def test_no_numbers(granularity: str, shape: tuple[int, int]) -> None:
    cast = check_cast(torch.zeros(shape), E4M3FN, granularity)
    assert cast.inverse.eq(1).all()


@every_granularity
@every_dtype
def test_strides_do_not_matter(granularity: str, dtype: torch.dtype) -> None:
    base = random(140, 270, dtype=dtype)
    for x in (base.t(), base[::2, ::3], base[1:, 5:], base[:1].expand(9, 270), base[:, :1].expand(140, 7)):
        cast = check_cast(x, E4M3FN, granularity)
        again = fp8_cast(x.clone(memory_format=torch.contiguous_format), "e4m3fn", granularity)
        assert torch.equal(cast.data.view(torch.uint8), again.data.view(torch.uint8))


@every_granularity
def test_leading_dimensions_are_rows(granularity: str) -> None:
    x = random(2, 3, 4, 150)
    cast, flat = fp8_cast(x, "e5m2", granularity), fp8_cast(x.reshape(24, 150), "e5m2", granularity)
    assert cast.data.shape == (24, 150)
    assert torch.equal(cast.data.view(torch.uint8), flat.data.view(torch.uint8))
    assert torch.equal(cast.inverse, flat.inverse)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 20) | st.integers(126, 131),
    columns=st.integers(1, 20) | st.integers(126, 131),
    granularity=st.sampled_from(GRANULARITIES),
    form=st.sampled_from(list(FORMATS.values())),
    dtype=st.sampled_from(DTYPES),
    power_of_two=st.booleans(),
    exponent=st.integers(-30, 10),
    seed=st.integers(0, 2**31),
)
def test_generated_matrices(
    rows: int,
    columns: int,
    granularity: str,
    form: Format,
    dtype: torch.dtype,
    power_of_two: bool,
    exponent: int,
    seed: int,
) -> None:
    x = (random(rows, columns, seed=seed).exp() * 2.0**exponent).to(dtype)
    cast = check_cast(x, form, granularity, power_of_two=power_of_two)
    assert not cast.saturated.any()


def test_the_transposed_copy_of_rows_and_blocks_has_scales_of_its_own() -> None:
    """What the gradient GEMMs take: the cast of the transpose."""
    x = random(140, 200)
    for granularity in ("row", "block"):
        both, turned = fp8_cast(x, "e4m3fn", granularity, transposed=True), fp8_cast(x.t(), "e4m3fn", granularity)
        assert torch.equal(both.data_t.view(torch.uint8), turned.data.view(torch.uint8))
        assert torch.equal(both.inverse_t, turned.inverse)
        assert not torch.equal(both.data_t.float(), both.data.float().t())


def test_the_scales_are_those_that_scaled_mm_takes() -> None:
    x, w = random(32, 64), random(48, 64, seed=1)
    for granularity in ("tensor", "row"):
        a, b = fp8_cast(x, "e4m3fn", granularity), fp8_cast(w, "e4m3fn", granularity)
        second = b.inverse.t() if granularity == "row" else b.inverse
        try:
            y = torch._scaled_mm(a.data, b.data.t(), a.inverse, second, out_dtype=torch.float32)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            pytest.skip(f"torch multiplies no 8-bit matrices here: {error}")
        exact = (a.data.double() * a.inverse) @ (b.data.double() * b.inverse).t()
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(y, x @ w.t(), rtol=0.1, atol=1.5)


# Scales


@every_format
def test_the_largest_number_becomes_the_largest_value(form: Format) -> None:
    for seed in range(300):
        x = random(1, 7, seed=seed) * 10.0 ** (seed % 60 - 30)
        cast = fp8_cast(x, form.name)
        assert cast.data.float().abs().max().item() == form.largest
        assert cast.saturated[0].item() == 0


def test_power_of_two_scales_are_powers_of_two_and_within_half_of_the_best() -> None:
    x = random(50, 9).exp()
    plain, rounded = (fp8_cast(x, "e4m3fn", "row", power_of_two=on).inverse for on in (False, True))
    assert (rounded.frexp().mantissa == 0.5).all()
    assert ((rounded >= plain) & (rounded < 2 * plain)).all()


@every_format
@every_granularity
def test_zeros_have_scale_one_and_keep_their_sign(form: Format, granularity: str) -> None:
    x = torch.zeros(130, 140)
    x[::2] = -0.0
    cast = check_cast(x, form, granularity)
    assert cast.inverse.eq(1).all()
    assert not cast.counts.any()
    x[3, 4] = 5  # the others of its group must still be zeros, and the other groups keep their scales
    cast = check_cast(x, form, granularity)
    assert cast.data.float().count_nonzero() == 1
    assert cast.inverse.ne(1).sum() == 1


@every_format
@every_granularity
def test_subnormal_amax_gives_a_finite_scale(form: Format, granularity: str) -> None:
    for amax in (1e-45, 1e-40, 1e-37, 3e-36, 1.2e-33):
        cast = check_cast(torch.tensor([[amax, -amax / 2], [0.0, amax / 3]]), form, granularity)
        assert cast.inverse.isfinite().all()
        assert (cast.inverse >= torch.finfo(torch.float32).smallest_normal).all()
    lost = fp8_cast(torch.tensor([[1e-45, 0.0]]), form.name)  # 2^-149 * 2^126 is still too small, and counted
    assert lost.counts[0].tolist() == [0, 1, 0]


@every_granularity
def test_a_single_outlier(granularity: str) -> None:
    x = random(256, 256)
    x[5, 7] = 1e8
    cast = check_cast(x, E4M3FN, granularity)
    assert cast.amax.item() == 1e8
    assert not cast.saturated.any()
    hurt = {"tensor": x.numel(), "row": 256, "block": 128, "square": 128 * 128}[granularity]
    assert cast.underflowed[0].item() == hurt - 1  # only those that share its scale


def test_the_largest_float32_numbers() -> None:
    top = torch.finfo(torch.float32).max
    for form in FORMATS.values():
        cast = check_cast(torch.tensor([[top, -top, 1.0]]), form, "row")
        assert cast.data.float()[0, :2].tolist() == [form.largest, -form.largest]
        assert cast.inverse.isfinite().all()


# Given scales, and what is not finite


@every_format
@pytest.mark.parametrize("granularity", ["tensor", "square"])
def test_a_given_scale_that_is_too_large_saturates_and_counts(form: Format, granularity: str) -> None:
    x = random(150, 140)
    scale = torch.full(inverse_shape(granularity, *x.shape), form.largest)
    cast = check_cast(x, form, granularity, scale=scale)
    beyond = int((x.abs() > 1).sum())
    assert cast.saturated.tolist() == [beyond, beyond]
    assert 0 < beyond < x.numel()
    assert cast.data.float().abs().max().item() == form.largest
    assert cast.amax.item() == x.abs().max().item()  # what the next scale is made from


@every_granularity
def test_given_scales_of_every_granularity(granularity: str) -> None:
    x = random(150, 140)
    shape = inverse_shape(granularity, 150, 140)
    scale = random(math.prod(shape)).reshape(shape).abs() * 100 + 1
    check_cast(x, E5M2, granularity, scale=scale, transposed=False)


def test_a_product_beyond_float32_saturates() -> None:
    cast = check_cast(torch.tensor([[1e38, -1e38, 1.0]]), E4M3FN, "tensor", scale=torch.tensor(1e4))
    assert cast.data.float().tolist() == [[448.0, -448.0, 448.0]]
    assert cast.counts[0].tolist() == [3, 0, 0]


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, -2.0])
def test_a_scale_that_is_no_scale_hides_nothing(scale: float) -> None:
    x = torch.tensor([[1.0, 0.0, math.inf, math.nan]])
    cast = fp8_cast(x, scale=torch.tensor(scale))
    wanted = {0.0: "0x0 0x0", math.inf: "0x7e 0x7f", -2.0: "0xc0 0x80"}.get(scale, "0x7f 0x7f")
    assert " ".join(hex(code) for code in codes(cast.data)[0]) == f"{wanted} 0x7f 0x7f"
    assert cast.counts[0].tolist() == [scale == math.inf, scale == 0, 2]


@every_format
@every_granularity
@every_dtype
def test_what_is_not_finite_becomes_nan_is_counted_and_spoils_no_scale(
    form: Format, granularity: str, dtype: torch.dtype
) -> None:
    x = random(6, 200, dtype=dtype)
    places = ([0, 1, 2, 5], [0, 199, 3, 4])
    clean = x.clone()
    clean[places] = 0
    x[places] = torch.tensor([math.inf, -math.inf, math.nan, -math.nan], dtype=dtype)
    cast, without = check_cast(x, form, granularity), fp8_cast(clean, form.name, granularity)
    assert cast.nonfinite.tolist() == [4, 4]
    assert (codes(cast.data)[places] == form.nan_code).all()
    assert torch.equal(cast.inverse, without.inverse)
    assert int(cast.data.float().isnan().sum()) == 4
    nothing = fp8_cast(torch.full((3, 4), math.inf, dtype=dtype), form.name, granularity)
    assert nothing.inverse.eq(1).all()
    assert nothing.data.float().isnan().all()


# Modes of torch


def outputs(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return torch_kernel.forward(kp.device("cpu"), *arguments)


def same_bytes(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(left, right, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        if a.numel():
            assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.fixture(scope="module")
def hard() -> torch.Tensor:
    """Ordinary numbers, tiny ones, huge ones, zeros and what is not finite."""
    x = random(130, 140) * torch.logspace(-38, 30, 130)[:, None]
    x[7], x[9, 1], x[11, 2], x[13, 3] = 0, math.inf, -math.inf, -math.nan
    return x


@every_granularity
def test_compiled_calls_give_the_same_bytes(granularity: str, hard: torch.Tensor) -> None:
    """As users call it: the op stays whole in the graph that inductor compiles."""

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cast = fp8_cast(x * 2, "e4m3fn", granularity, transposed=True)
        return cast.data, cast.data_t, cast.inverse.clone(), cast.inverse_t.clone(), cast.amax, cast.counts

    torch._dynamo.reset()
    same_bytes(torch.compile(run, fullgraph=True)(hard), run(hard))


@every_format
def test_the_kernel_itself_compiled_gives_the_same_bytes(form: Format, hard: torch.Tensor) -> None:
    """The arithmetic, fused and vectorised by inductor."""
    arguments = (hard, form.name, "row", True, None, False)
    torch._dynamo.reset()
    same_bytes(
        torch.compile(torch_kernel.forward, fullgraph=True)(kp.device("cpu"), *arguments), outputs(*arguments)
    )


def test_fake_tensors_and_meta_tensors_have_the_real_shapes() -> None:
    for case in FP8_CAST.cases:
        if case.benchmark:
            continue
        real = case.arguments(torch.float32, torch.device("cpu"))
        made = FP8_CAST.fake(*real.values())
        for fake, out in zip(made, outputs(*real.values()), strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (out.shape, out.stride(), out.dtype), case.name
    meta = fp8_cast(torch.empty(300, 200, device="meta"), "e4m3fn", "square", transposed=True)
    assert (meta.data_t.shape, meta.inverse_t.shape) == ((200, 300), (2, 3))


def test_no_gradient_flows_and_none_is_refused() -> None:
    x = random(4, 8).requires_grad_()
    for function in (fp8_cast, function_of(FP8_CAST)):
        arguments = (x,) if function is fp8_cast else (x, "e4m3fn", "row", True, None, False)
        result = function(*arguments)
        tensors = result if isinstance(result, tuple) else vars(result).values()
        assert not any(tensor.requires_grad for tensor in tensors)


def test_unwritten_memory_would_show() -> None:
    for case in FP8_CAST.cases:
        if not case.benchmark:
            arguments = case.arguments(torch.bfloat16, torch.device("cpu"))
            with poisoned():
                comparisons = compare(FP8_CAST, outputs, arguments, gradients=False)
            assert not exceeded(comparisons), f"{case.name}: {exceeded(comparisons)}"


def test_a_wrong_byte_exceeds_the_budget() -> None:
    def wrong(*arguments: Any) -> tuple[torch.Tensor, ...]:
        data, *rest = outputs(*arguments)
        data.view(torch.uint8)[2, 3] ^= 1
        return (data, *rest)

    arguments = FP8_CAST.case("odd").arguments(torch.float32, torch.device("cpu"))
    found = compare(FP8_CAST, wrong, arguments, gradients=False)
    assert exceeded(found) == "data: error 1 EXCEEDS its budget 0.5"


# Choice and wrong arguments


def test_every_device_has_a_kernel_or_a_reason() -> None:
    call = kp.explain(fp8_cast, torch.ones(4, 4)).call
    assert not [name for name, known in CATALOGUE.items() if KERNEL_TORCH.refusal(call, known)]
    without_float64 = ARCHITECTURES["xe-hpg"].device("arc", memory_bytes=0, compute_units=0)
    assert KERNEL_TORCH.refusal(call, without_float64) == "computes scales in float64, which xe-hpg does not"
    assert kp.explain(fp8_cast, torch.ones(4, 4), device="amd/mi300x").kernel is KERNEL_TORCH


X = torch.ones(4, 6)
WRONG = {
    "no tensor": (([1.0],), {}, TypeError, r"x=\[1.0\]: expected a tensor"),
    "dtype": ((X.double(),), {}, TypeError, "x has dtype float64: use float32, float16 or bfloat16"),
    "vector": ((X[0],), {}, ValueError, r"x has shape \[6\]: expected a matrix, so reshape"),
    "format": ((X, "fp8"), {}, ValueError, "number_format='fp8': use one of e4m3fn, e5m2"),
    "granularity": ((X, "e5m2", "column"), {}, ValueError, "granularity='column': use one of tensor, row, block"),
    "transposed": ((X,), {"transposed": 1}, TypeError, "transposed=1: use True or False"),
    "power_of_two": ((X,), {"power_of_two": None}, TypeError, "power_of_two=None: use True or False"),
    "scale number": ((X,), {"scale": 2.0}, TypeError, "scale=2.0: expected a float32 tensor, or None"),
    "scale dtype": ((X,), {"scale": ONE.double()}, TypeError, "scale has dtype float64: use float32"),
    "scale shape": (
        (X,),
        {"scale": ONE[None]},
        ValueError,
        r"scale has shape \[1\]: granularity='tensor' takes \[\]",
    ),
    "scale rows": (
        (X, "e5m2", "row"),
        {"scale": torch.ones(4)},
        ValueError,
        r"scale has shape \[4\]: granularity='row' takes \[4, 1\] for x of shape \[4, 6\]",
    ),
    "scale device": (
        (X,),
        {"scale": torch.ones((), device="meta")},
        ValueError,
        "scale is on meta and x on cpu: move one",
    ),
    "scale and power": (
        (X,),
        {"scale": ONE, "power_of_two": True},
        ValueError,
        "power_of_two=True: .* leave it out",
    ),
    "scale and copy": (
        (X, "e5m2", "row"),
        {"scale": torch.ones(4, 1), "transposed": True},
        ValueError,
        r"transposed=True with a scale: .* cast x and x.t\(\) with a scale each",
    ),
    "kernel": ((X,), {"kernel": "cuda"}, ValueError, "kernel='cuda': fp8_cast has no such kernel on cpu"),
}


@pytest.mark.parametrize(("arguments", "keywords", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named_with_a_remedy(
    arguments: tuple[Any, ...], keywords: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        fp8_cast(*arguments, **keywords)
