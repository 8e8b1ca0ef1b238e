"""fp8_cast: every byte, scale and count against an independent implementation in numpy."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernel_pytorch as kp
from kernel_pytorch.fp8.quantize import QuantizeSpec, quantize
from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE
from kernel_pytorch.hardware_abstraction.formats import E4M3FN, FORMATS, Format
from kernel_pytorch.ops.fp8_cast import Cast, fp8_cast, refusal, torch_kernel
from kernel_pytorch.ops.fp8_cast.definition import GRANULARITIES, inverse_shape
from kernel_pytorch.testing import interpreting, poisoned, pretend, test_device

# Each kernel, and the formats of x: Triton's interpreter computes bfloat16 wrongly. It is slow and gets a sample.
KERNELS = {"torch": (torch.float32, torch.float16, torch.bfloat16)}
HERE = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
"""The device of the Triton kernel."""
if HERE == "cuda" or interpreting():
    KERNELS["triton"] = (torch.float16, torch.float32) if interpreting() else KERNELS["torch"]
RUNS = [(kernel, dtype) for kernel, dtypes in KERNELS.items() for dtype in dtypes]
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_form = pytest.mark.parametrize(
    ("kernel", "form"),
    [
        (k, form)
        for k in KERNELS
        for form in FORMATS.values()
        if k == "torch" or not interpreting() or form is E4M3FN
    ],
    ids=str,
)
every_format = pytest.mark.parametrize("form", FORMATS.values(), ids=str)
every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)


pytestmark = pytest.mark.usefixtures("one_thread")


@contextlib.contextmanager
def on(kernel: str) -> Iterator[None]:
    with pretended(kernel), poisoned():
        yield


def pretended(kernel: str) -> contextlib.AbstractContextManager[object]:
    return pretend("nvidia/h200") if kernel == "triton" and interpreting() else contextlib.nullcontext()


def share(kernel: str, calls: Sequence[Any], most: int = 2) -> Sequence[Any]:
    return calls[:most] if kernel == "triton" and interpreting() else calls


def placed(x: torch.Tensor, kernel: str) -> torch.Tensor:
    """Return x on the kernel's device, with the same strides."""
    if kernel == "torch":
        return x
    storage = x.untyped_storage().to(device=torch.device(HERE))
    return torch.empty(0, dtype=x.dtype, device=HERE).set_(storage, x.storage_offset(), x.shape, x.stride())


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


def remembered(history: torch.Tensor, form: Format, power_of_two: bool) -> np.float32 | None:
    """The delayed scale of a history, or None."""
    largest = max((entry for entry in history.tolist() if math.isfinite(entry)), default=0.0)
    return exact_scale(largest, form, power_of_two) / np.float32(2) if largest > 0 else None


def expected_cast(
    x: np.ndarray, form: Format, granularity: str, before: np.float32 | None, power_of_two: bool
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Codes, inverse scales and counts, one group after another."""
    data = np.zeros(x.shape, dtype=np.uint8)
    inverse = np.zeros(inverse_shape(granularity, *x.shape), dtype=np.float32)
    counts = [0, 0, 0, x.size]
    height = {"tensor": x.shape[0], "square": 128}.get(granularity, 1)
    width = 128 if granularity in ("block", "square") else x.shape[1]
    for place in np.ndindex(inverse.shape):
        i, j = place or (0, 0)
        where = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
        numbers = x[where]
        finite = np.isfinite(numbers)
        amax = float(np.abs(numbers[finite]).max(initial=0))
        s = exact_scale(amax, form, power_of_two)
        if before is not None:
            with np.errstate(over="ignore"):
                scaled = np.abs(numbers[finite] * before)
            saturated, below = int((scaled > form.largest).sum()), (scaled < 512 * form.smallest_normal).all()
            counts[0] += saturated
            s = s if saturated or (below and amax > 0) else before
        product = np.where(finite, numbers, 0) * s
        assert product.dtype == np.float32
        assert (np.abs(product) <= form.largest).all()  # nothing ever saturates
        data[where] = form.encode(np.where(finite, product, np.nan))
        inverse[place] = np.float32(1) / s
        counts[1] += int((finite & (numbers != 0) & (form.decode(data[where]) == 0)).sum())
        counts[2] += int((~finite).sum())
    return data, inverse, counts


def check_cast(
    x: torch.Tensor,
    form: Format,
    granularity: str = "tensor",
    kernel: str = "torch",
    *,
    transposed: bool = True,
    history: torch.Tensor | Sequence[float] | None = None,
    power_of_two: bool = False,
) -> Cast:
    """fp8_cast's every output against the plain program."""
    history = torch.tensor(history) if isinstance(history, Sequence) else history
    kept = None if history is None else history.clone()
    history = None if history is None else placed(history, kernel)
    options: dict[str, Any] = {"transposed": transposed, "history": history, "power_of_two": power_of_two}
    with on(kernel):
        there = fp8_cast(placed(x, kernel), form.name, granularity, kernel=kernel, **options)
    cast = Cast(*(tensor.cpu() for tensor in outcome(there)))
    matrix = x.float().numpy()
    before = None if kept is None else remembered(kept, form, power_of_two)
    copies = [(matrix, cast.data, cast.inverse), (matrix.T, cast.data_t, cast.inverse_t)]
    for number, (numbers, got, got_inverse) in enumerate(copies[: 1 + transposed]):
        data, inverse, counts = expected_cast(numbers, form, granularity, before, power_of_two)
        np.testing.assert_array_equal(codes(got), data)
        np.testing.assert_array_equal(got_inverse.numpy(), inverse)
        assert cast.counts[number].tolist() == counts
        assert (got.dtype, got.is_contiguous()) == (form.dtype, True)
        assert (got_inverse.t() if granularity == "block" else got_inverse).is_contiguous()
    if not transposed:
        assert (cast.data_t.shape, cast.inverse_t.numel(), cast.counts[1].tolist()) == ((0, 0), 0, [0] * 4)
    elif granularity in ("tensor", "square"):  # the scales agree, so data_t is the transpose of data
        np.testing.assert_array_equal(codes(cast.data_t), codes(cast.data).T)
    amax = np.abs(matrix[np.isfinite(matrix)]).max(initial=0)
    assert cast.amax.item() == amax
    if history is None:
        assert cast.next_history.shape == (0,)
    else:  # bitwise, including NaN entries; the given history is not changed
        following = torch.cat([torch.tensor([amax]), kept[:-1]])
        assert torch.equal(cast.next_history.view(torch.int32), following.view(torch.int32))
        assert torch.equal(history.cpu().clone().view(torch.int32), kept.view(torch.int32))
    return cast


# The encoding with scale 1: an amax of the format's largest value, or half of it in the history


@every_format
@pytest.mark.parametrize(("kernel", "dtype"), [run for run in RUNS if run[1].itemsize == 2], ids=str)
def test_every_16_bit_value_is_cast_as_the_format_defines(kernel: str, form: Format, dtype: torch.dtype) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype).reshape(256, 256)
    finite = every.isfinite()
    beyond = finite & (every.abs() > form.largest)
    x = torch.where(beyond, form.largest, every)
    expected = form.encode(x.double().numpy())
    reached = set(np.flatnonzero(np.isfinite(form.values))) | {form.nan_code}
    assert set(expected.flat) == reached  # all codes but infinities and other NaN
    underflowed = int(((x != 0) & torch.from_numpy(form.decode(expected) == 0)).sum())
    for history in share(kernel, ([form.largest / 2], None), 1):
        cast = check_cast(x, form, kernel=kernel, history=history)
        np.testing.assert_array_equal(codes(cast.data), expected)
        np.testing.assert_array_equal(codes(cast.data_t), expected.T)
        assert cast.inverse.item() == 1
        assert cast.counts.tolist() == [[0, underflowed, int((~finite).sum()), x.numel()]] * 2
    cast = check_cast(every, form, kernel=kernel, history=[form.largest / 2])
    assert cast.saturated.tolist() == [int(beyond.sum())] * 2


def around_every_value_and_tie(form: Format) -> np.ndarray:
    values = form.values[:0x80][np.isfinite(form.values[:0x80])]
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    bits = points.astype(np.float32).view(np.int32)[:, None] + np.arange(-40, 41, dtype=np.int32)
    x = np.concatenate([numbers := np.abs(bits).astype(np.int32).view(np.float32), -numbers])
    x = np.clip(x, -form.largest, form.largest)
    assert len(np.unique(x)) > 15000
    return x


@every_kernel
@every_format
def test_float32_around_every_value_and_every_tie(kernel: str, form: Format) -> None:
    x = around_every_value_and_tie(form)
    for scale in share(kernel, (1.0, 2.0**-60), 1):  # larger values are exact as well
        cast = check_cast(torch.from_numpy(x / np.float32(scale)), form, kernel=kernel)
        np.testing.assert_array_equal(codes(cast.data), form.encode(x))
        assert cast.inverse.item() == 1 / scale


@every_format
@settings(max_examples=20, deadline=None)
@given(
    kernel=st.sampled_from(["torch"] * 5 + list(KERNELS)),
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=24, max_size=24),
    entries=st.lists(st.integers(0, 2**32 - 1), max_size=5),
    near=st.none() | st.floats(0.25, 4, width=32),
    power_of_two=st.booleans(),
)
def test_any_float32_bits_with_any_history(
    form: Format, kernel: str, bits: list[int], entries: list[int], near: float | None, power_of_two: bool
) -> None:
    x = np.array(bits, dtype=np.uint32).view(np.float32).reshape(4, 6)
    history = np.array(entries, dtype=np.uint32).view(np.float32)
    if near is not None or not entries:  # an amax at the edge of the delayed scale
        amax = np.abs(x[np.isfinite(x)]).max(initial=0)
        history = np.append(np.minimum(history, amax / 8), np.minimum(amax / 4, 1e37) * np.float32(near or 2))
    remember = torch.from_numpy(history.astype(np.float32))
    check_cast(torch.from_numpy(x), form, kernel=kernel, history=remember, power_of_two=power_of_two)


# Granularities, shapes and strides


@every_form
@every_granularity
def test_odd_shapes(kernel: str, form: Format, granularity: str) -> None:
    dtypes = itertools.cycle(KERNELS[kernel])
    shapes = [(129, 130), (1, 300), (1, 1), (300, 1), (3, 5), (128, 256)]
    for number, shape in enumerate(share(kernel, shapes)):
        if kernel == "triton" and refusal(CATALOGUE["nvidia/h200"], shape, granularity):
            continue
        x = (random(*shape, seed=number).exp() * 2.0 ** (10 - 6 * number)).to(next(dtypes))
        check_cast(x, form, granularity, kernel)
        check_cast(x[:9], form, granularity, kernel, transposed=False, power_of_two=True)


@every_granularity
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_single_element(granularity: str, dtype: torch.dtype) -> None:
    """On a GPU by Triton's kernel, except with 128x128 scaling, which ptxas 12.8 miscompiles."""
    x = torch.tensor([[0.7]], dtype=dtype)
    check_cast(x, E4M3FN, granularity)
    choice = kp.explain(fp8_cast, x, "e4m3fn", granularity, transposed=True, device="nvidia/h200")
    assert choice.kernel.name == ("torch" if granularity == "square" else "triton")
    if HERE != "cpu":
        for chosen in (x, -3e4 * x):
            counts = torch.zeros(2, 2, 4, dtype=torch.int64, device=HERE)
            found = quantize(placed(chosen, "triton"), QuantizeSpec("e4m3fn", granularity, True, True), counts, 1)
            wanted = fp8_cast(chosen, granularity=granularity, transposed=True, power_of_two=True)
            assert torch.equal(found.data_t.cpu().view(torch.uint8), wanted.data_t.view(torch.uint8))


@every_kernel
@every_granularity
def test_empty_tensors(kernel: str, granularity: str) -> None:
    for shape in [(0, 0), (0, 5), (5, 0), (0, 128), (200, 0)]:
        cast = check_cast(torch.zeros(shape), E4M3FN, granularity, kernel)
        assert cast.inverse.eq(1).all()
        if granularity == "tensor":  # the scale of an empty tensor is defined
            cast = check_cast(torch.zeros(shape), E4M3FN, kernel=kernel, history=[7.0, 3.0])
            assert cast.inverse.item() == 2 / 64


@every_granularity
@pytest.mark.parametrize(("kernel", "dtype"), [run for run in RUNS if run != ("triton", torch.float32)], ids=str)
def test_strides_do_not_matter(kernel: str, granularity: str, dtype: torch.dtype) -> None:
    base = random(140, 270, dtype=dtype)
    views = [base.t(), base[::2, ::3], base[:1].expand(9, 270), base[1:, 5:], base[:, :1].expand(140, 7)]
    for x in share(kernel, views):
        check_cast(x, E4M3FN, granularity, kernel)
    history = torch.tensor([2.5, math.nan, 1.0, math.inf, 3.0, 9e9])
    some = base if kernel == "torch" else base[:40, :40]
    for remember in (history[::2], history[2:3], history[:1].expand(5)) if granularity == "tensor" else ():
        check_cast(some.t()[::2], E4M3FN, kernel=kernel, history=remember)
        check_cast(some[3:, 5:] * 8, E4M3FN, kernel=kernel, history=remember, transposed=False)


@every_granularity
def test_leading_dimensions_are_rows(granularity: str) -> None:
    x = random(2, 3, 4, 150)
    cast, flat = fp8_cast(x, "e5m2", granularity), fp8_cast(x.reshape(24, 150), "e5m2", granularity)
    assert cast.data.shape == (24, 150)
    assert torch.equal(cast.data.view(torch.uint8), flat.data.view(torch.uint8))
    assert torch.equal(cast.inverse, flat.inverse)


@every_form
def test_the_amax_becomes_the_largest_value(kernel: str, form: Format) -> None:
    x = random(300, 7) * 10.0 ** (torch.arange(300) % 60 - 30)[:, None]
    x[5, 3] = -torch.finfo(torch.float32).max
    cast = check_cast(x, form, "row", kernel)
    assert (cast.data.float().abs().amax(dim=1) == form.largest).all()


@every_form
@every_granularity
def test_zeros_have_scale_one_and_keep_their_sign(kernel: str, form: Format, granularity: str) -> None:
    x = torch.zeros(130, 140)
    x[::2] = -0.0
    cast = check_cast(x, form, granularity, kernel)
    assert cast.inverse.eq(1).all()
    assert cast.counts.tolist() == [[0, 0, 0, x.numel()]] * 2
    x[3, 4] = 5  # the rest of its group stays zero, and other groups keep their scales
    cast = check_cast(x, form, granularity, kernel)
    assert cast.data.float().count_nonzero() == 1
    assert cast.inverse.ne(1).sum() == 1


@every_form
@every_granularity
def test_subnormal_amax_gives_a_finite_scale(kernel: str, form: Format, granularity: str) -> None:
    for amax in share(kernel, (1e-40, 3e-36, 1e-45, 1e-37, 1.2e-33)):
        cast = check_cast(torch.tensor([[amax, -amax / 2], [0.0, amax / 3]]), form, granularity, kernel)
        assert cast.inverse.isfinite().all()
        assert (cast.inverse >= torch.finfo(torch.float32).smallest_normal).all()
    lost = check_cast(torch.tensor([[1e-45, 0.0]]), form, granularity, kernel)  # 2^-149 * 2^126 is too small still
    assert lost.counts[0].tolist() == [0, 1, 0, 2]


@every_kernel
@every_granularity
def test_a_single_outlier(kernel: str, granularity: str) -> None:
    x = random(256, 256)
    x[5, 7] = 1e8
    cast = check_cast(x, E4M3FN, granularity, kernel)
    hurt = {"tensor": x.numel(), "row": 256, "block": 128, "square": 128 * 128}[granularity]
    assert cast.underflowed[0].item() == hurt - 1  # only those that share its scale


# Scales from a history


def outcome(cast: Cast) -> tuple[torch.Tensor, ...]:
    return tuple(vars(cast).values())


@every_form
def test_one_element_exceeds_the_delayed_scale_and_nothing_is_clipped(kernel: str, form: Format) -> None:
    x = random(130, 140).clamp(-2, 2)  # amax 2 is the largest that fits a history of 1
    cast = check_cast(x, form, kernel=kernel, history=[1.0])
    assert cast.saturated.tolist() == [0, 0]
    assert cast.inverse.item() == np.float32(2 / form.largest)
    assert cast.data.float().abs().max().item() == form.largest
    for larger in (2 + 2.0**-22, 2.0**99):
        x[77, 101] = -larger
        cast = check_cast(x, form, kernel=kernel, history=[1.0])
        assert cast.saturated.tolist() == [1, 1]
        assert cast.next_history.tolist() == [larger]
        assert cast.data[77, 101].item() == -form.largest
        same_bytes(outcome(cast)[:5], outcome(fp8_cast(x, form.name, transposed=True))[:5])
    x[5:7, :50], x[0, 0], x[1, 1] = 30.0, math.inf, math.nan
    cast = check_cast(x, form, kernel=kernel, history=[1.0, 0.5, 0.25])
    assert cast.counts[:, [0, 2]].tolist() == [[101, 2]] * 2


@pytest.mark.skipif("triton" not in KERNELS, reason="Triton is not here")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [0.0, 1.0, 1e-30])
def test_a_guessed_scale_makes_no_difference(size: float, transposed: bool) -> None:
    from kernel_pytorch.ops.fp8_cast.triton_kernel import PreparedCast
    from kernel_pytorch.ops.triton_launch import Place

    x = random(40, 132) * size
    x[3, 4], x[33, 2], x[39, 131] = math.inf, math.nan, size * 9
    wanted = fp8_cast(x, transposed=transposed, power_of_two=True)
    cast = PreparedCast(
        test_device("nvidia"), x.shape, x.stride(), "e4m3fn", "tensor", transposed, 1, True, guessed=True
    )
    for guess in (0.0, size * 9, size * 8.1, size, 1e30, 1e-40, math.inf, math.nan):
        kept, counts = torch.tensor([guess], device=HERE), torch.zeros(2, 4, dtype=torch.int64, device=HERE)
        with poisoned():
            found = cast(placed(x, "triton"), Place(counts, torch.int64), Place(kept, torch.float32))
        same_bytes(tuple(tensor.cpu() for tensor in found[:3]), (wanted.data, wanted.data_t, wanted.inverse))
        assert torch.equal(counts.cpu(), wanted.counts)
        assert kept.item() == wanted.amax.item()


@every_form
def test_the_edge_is_where_the_rounded_product_exceeds_the_largest(kernel: str, form: Format) -> None:
    """float32(s * amax) decides: an exact product slightly above the largest value still fits."""
    rounded_down = 0
    for h in share(kernel, random(8).abs().numpy(), 4):
        s = exact_scale(float(h), form, False) / np.float32(2)
        edge = np.float32(form.largest) / s
        while edge * s <= form.largest:
            edge = np.nextafter(edge, np.float32(np.inf))
        while edge * s > form.largest:
            edge, beyond = np.nextafter(edge, np.float32(0)), edge
        rounded_down += Fraction(float(edge)) * Fraction(float(s)) > Fraction(form.largest)
        for amax, outgrown in ((edge, 0), (beyond, 1)):
            x = torch.tensor([[0.0, 0.25], [-float(amax), 1e-3]])
            cast = check_cast(x, form, kernel=kernel, history=[0.0, float(h)])
            assert cast.saturated.tolist() == [outgrown, outgrown]
            assert cast.data.float()[1, 0].item() == -form.largest
    assert rounded_down > 0


@every_form
@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_history_without_positive_finite_entries_is_ignored(
    kernel: str, form: Format, power_of_two: bool
) -> None:
    """Zeros (first use), non-finite and negative entries, which are also ignored among others."""
    x = random(9, 120).clamp(-2, 2)
    x[3, 4] = 2
    plain = fp8_cast(x, form.name, transposed=True, power_of_two=power_of_two)
    for nothing in share(kernel, ([0.0] * 21, [-3.0, -0.0, -math.nan, math.inf, -math.inf], [0.0], [math.nan])):
        cast = check_cast(x, form, kernel=kernel, power_of_two=power_of_two, history=nothing)
        same_bytes(outcome(cast)[:-1], outcome(plain)[:-1])
        cast = check_cast(x, form, kernel=kernel, power_of_two=power_of_two, history=[*nothing, 1.0, -1e9, 0.5])
        assert not cast.saturated.any()
        assert cast.inverse.item() == 2 / exact_scale(1.0, form, power_of_two)


@every_form
def test_histories_at_the_ends_of_float32_and_zeros_with_any(kernel: str, form: Format) -> None:
    x, top = random(4, 8), torch.finfo(torch.float32).max
    for power_of_two in (False, True):
        run: dict[str, Any] = {"kernel": kernel, "power_of_two": power_of_two}
        assert check_cast(x, form, history=[top], **run).counts.tolist() == [[0, 0, 0, 32]] * 2
        assert check_cast(x, form, history=[1e-45], **run).counts.tolist() == [[32, 0, 0, 32]] * 2
        assert check_cast(x * 1e38, form, history=[1e-45, 1e-30], **run).saturated.tolist() == [32, 32]  # overflows
        assert check_cast(x * 1e-39, form, history=[1e-45], **run).inverse.item() in (2.0**-125, 2.0**-126)
    for zero, amax in share(kernel, [*itertools.product((-0.0, math.inf), (3.0, 2.0**-149, 0.0, 2.0**127))]):
        cast = check_cast(torch.full((3, 130), zero), form, kernel=kernel, history=[amax, 0.0])
        assert cast.next_history.tolist() == [0.0, amax]
        assert not cast.counts[:, :2].any()


@every_form
@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_step_in_amplitude_is_requantized_in_its_own_call_and_recorded(
    kernel: str, form: Format, power_of_two: bool
) -> None:
    x = random(12, 120)
    history, outgrown, inverses = torch.zeros(2), [], []
    for step in (1, 1, 100, 1, 1, 1):
        cast = check_cast(x * step, form, kernel=kernel, history=history, power_of_two=power_of_two)
        history = cast.next_history
        outgrown.append(cast.saturated[0].item())
        inverses.append(cast.inverse.item())
        got = cast.data.double() * cast.inverse.double()
        beside = cast.inverse.double() * form.smallest_subnormal  # the others have the format's precision
        assert ((got - x * step).abs() <= (x * step).abs() * 2.0**-form.mantissa_bits / 2 + beside).all()
    small, large = (exact_scale((x * step).abs().max().item(), form, power_of_two) for step in (1, 100))
    hundred = int(((x * 100).abs().numpy() * (small / np.float32(2)) > form.largest).sum())
    assert outgrown == [0, 0, max(hundred, 1000), 0, 0, 0]  # nearly all
    own, remembering, after = (np.float32(n) / s for n, s in ((1, small), (2, small), (2, large)))
    after = own if form.mantissa_bits == 3 else after  # a hundredth of the history is far below it in e4m3
    assert inverses == [
        own,
        remembering,
        np.float32(1) / large,
        after,
        after,
        remembering,
    ]  # the history has two entries


@every_form
def test_the_lower_edge_is_nine_binades_above_the_smallest_normal_number(kernel: str, form: Format) -> None:
    for power_of_two in (False, True):
        s = exact_scale(3e5, form, power_of_two) / np.float32(2)
        least = np.float32(512 * form.smallest_normal)
        edge = least / s
        while edge * s >= least:
            edge = np.nextafter(edge, np.float32(0))
        while edge * s < least:
            beyond, edge = edge, np.nextafter(edge, np.float32(np.inf))
        for amax, scale in ((edge, s), (beyond, exact_scale(float(beyond), form, power_of_two))):
            x = torch.tensor([[0.0, 0.1 * float(amax)], [-float(amax), 1e-9 * float(amax)]])
            run: dict[str, Any] = {"kernel": kernel, "power_of_two": power_of_two}
            cast = check_cast(x, form, history=[0.0, 3e5], **run)
            assert cast.inverse.item() == np.float32(1) / scale
            assert not cast.saturated.any()


@every_form
def test_a_history_far_above_loses_less_than_a_decibel(kernel: str, form: Format) -> None:
    """Far below the history, data and counts are those of the tensor's own scale."""
    x = random(150, 140)
    x[0] *= 1e-5
    own, amax = fp8_cast(x, form.name, transposed=True), x.abs().max().item()

    def decibels(cast: Cast) -> float:
        error = cast.data.double() * cast.inverse.double() - x.double()
        return 10 * math.log10(x.double().square().sum() / error.square().sum())

    for exponent in share(kernel, (18, 4, *range(5, 18), 20, 25, 40, 120)):
        cast = check_cast(x, form, kernel=kernel, history=[1.0, amax * 2.0**exponent])
        assert decibels(cast) > decibels(own) - 0.5
        if 2.0**exponent > form.largest / (1024 * form.smallest_normal):
            same_bytes(outcome(cast)[:-1], outcome(own)[:-1])


@every_form
@every_granularity
def test_non_finite_elements_become_nan_are_counted_and_affect_no_scale(
    kernel: str, form: Format, granularity: str
) -> None:
    places = ([0, 1, 2, 5], [0, 199, 3, 4])
    for dtype in share(kernel, KERNELS[kernel], 1):
        x = random(6, 200, dtype=dtype)
        x[places] = 0
        without = fp8_cast(x, form.name, granularity)
        x[places] = torch.tensor([math.inf, -math.inf, math.nan, -math.nan], dtype=dtype)
        cast = check_cast(x, form, granularity, kernel)
        assert cast.nonfinite.tolist() == [4, 4]
        assert (codes(cast.data)[places] == form.nan_code).all()
        assert torch.equal(cast.inverse, without.inverse)
        nothing = check_cast(torch.full((3, 4), math.inf, dtype=dtype), form, granularity, kernel)
        assert nothing.inverse.eq(1).all()


def outputs(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return torch_kernel.forward(kp.device("cpu"), *arguments)


def same_bytes(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(left, right, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        if a.numel():
            assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.fixture(scope="module")
def hard() -> torch.Tensor:
    """Ordinary, tiny, huge, zero and non-finite elements."""
    x = random(130, 140) * torch.logspace(-38, 30, 130)[:, None]
    x[7], x[9, 1], x[11, 2], x[13, 3] = 0, math.inf, -math.inf, -math.nan
    return x


HISTORIES = ([1.0, math.nan], [1e31, 0.5], [0.0, 0.0])  # exceeded by `hard`, with room for it, and empty


@every_kernel
@every_granularity
def test_compiled_calls_give_the_same_bytes(kernel: str, granularity: str, hard: torch.Tensor) -> None:
    """The public function: the op is one node in the graph that Inductor compiles."""
    if granularity not in share(kernel, GRANULARITIES, 1):
        pytest.skip("compiling is slow, and around the op it is the same")

    def run(x: torch.Tensor, history: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        cast = fp8_cast(x * 2, "e4m3fn", granularity, transposed=True, history=history, kernel=kernel)
        scales = (cast.inverse, cast.inverse_t.clone())  # the same tensor twice with one scale
        return (cast.data, cast.data_t, *scales, cast.amax, cast.counts, cast.next_history)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True)
    x = placed(hard, kernel)
    with pretended(kernel):
        for entries in share(kernel, HISTORIES) if granularity == "tensor" else (None,):
            history = None if entries is None else torch.tensor(entries, device=x.device)
            same_bytes(compiled(x, history), run(x, history))


@every_format
def test_the_kernel_itself_compiled_gives_the_same_bytes(form: Format, hard: torch.Tensor) -> None:
    """The torch kernel itself, fused and vectorised by Inductor."""
    granularity = "tensor" if form.encoding == "fnuz" else "row"
    torch._dynamo.reset()
    compiled = torch.compile(torch_kernel.forward, fullgraph=True)
    for history in map(torch.tensor, HISTORIES) if granularity == "tensor" else (None,):
        arguments = (hard, form.name, granularity, True, history, False)
        wanted = outputs(*arguments)  # first, because Dynamo cannot trace the cached properties of a format
        same_bytes(compiled(kp.device("cpu"), *arguments), wanted)
    x = around_every_value_and_tie(form)
    codes_of, codes_t, *_ = compiled(kp.device("cpu"), torch.from_numpy(x), form.name, "tensor", True, None, False)
    np.testing.assert_array_equal(codes(codes_of), form.encode(x))
    np.testing.assert_array_equal(codes(codes_t), form.encode(x).T)
