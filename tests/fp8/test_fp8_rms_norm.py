"""fp8_rms_norm: y against float64, its data byte for byte against fp8_cast of y, counts and histories."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import kernel_pytorch as kp
from fp8_kernels import HERE, random
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.formats import E4M3FN, E5M2, FORMATS
from kernel_pytorch.ops.fp8_cast import fp8_cast
from kernel_pytorch.ops.fp8_rms_norm import Normal, fp8_rms_norm
from kernel_pytorch.ops.fp8_rms_norm.definition import FP8_RMS_NORM
from kernel_pytorch.testing import compare, poisoned
from kernel_pytorch.testing.budget import exceeded


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, device=HERE)


def codes(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.uint8)


def check_cast(found: Normal, number_format: str, **how: Any) -> None:
    """Compare the quantized outputs with fp8_cast of y, byte for byte."""
    wanted = fp8_cast(found.y, number_format, kernel="torch", **how)
    for name in ("data", "data_t", "inverse", "amax", "counts", "next_history"):
        mine, other = getattr(found, name), getattr(wanted, name)
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype), name
        assert mine.is_contiguous(), name
        assert torch.equal(codes(mine.flatten()), codes(other.flatten())), name


# The quantized data of y.

HISTORIES = {
    "no history": None,
    "enough": [12.0, 3.0, math.nan],
    "outgrown": [0.5, 0.0],
    "a little too small": [1.9],
    "far above": [1e6, 4.0],
    "first": [0.0] * 16,
    "not finite": [math.inf, math.nan],
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("shape", [(70, 133), (64, 256), (1, 5)], ids=str)
def test_the_data_is_the_cast_of_y(
    kernel: str, shape: tuple[int, int], transposed: bool, history: list[float] | None
) -> None:
    x, weight = random(*shape, dtype=torch.float16), random(shape[1], dtype=torch.float16, seed=1)
    how: dict[str, Any] = {"transposed": transposed, "history": None if history is None else numbers(*history)}
    for power_of_two in (False, True):
        how["power_of_two"] = power_of_two
        check_cast(fp8_rms_norm(x, weight, kernel=kernel, **how), "e4m3fn", **how)


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_formats(kernel: str, form: Any, dtype: torch.dtype) -> None:
    x, weight = random(34, 61, dtype=dtype), random(61, dtype=dtype, seed=1)
    for history in (None, numbers(6.0)):
        found = fp8_rms_norm(x, weight, 1e-5, form.name, transposed=True, history=history, kernel=kernel)
        check_cast(found, form.name, transposed=True, history=history)


def test_y_is_rounded_before_it_is_cast(kernel: str) -> None:
    """The torch kernel in bfloat16, which Triton's interpreter rounds wrongly; both in float16."""
    for dtype in (torch.float16, *((torch.bfloat16,) if kernel == "torch" or HERE == "cuda" else ())):
        x = random(90, 200, dtype=dtype)
        found = fp8_rms_norm(x, kernel=kernel)
        check_cast(found, "e4m3fn")
        wide = fp8_rms_norm(x.float(), kernel=kernel)
        assert not torch.equal(codes(found.data), codes(wide.data))  # without the rounding of y, some codes differ


@pytest.mark.parametrize("history", [None, [8.0], [0.5]], ids=str)
def test_non_finite_elements(kernel: str, history: list[float] | None) -> None:
    x, weight = random(40, 70), random(70, seed=1)
    x[0, 0], x[3, 5], x[39, 69], weight[7] = math.inf, -math.inf, math.nan, math.inf
    x[5] = 0
    how: dict[str, Any] = {"transposed": True, "history": None if history is None else numbers(*history)}
    found = fp8_rms_norm(x, weight, kernel=kernel, **how)
    check_cast(found, "e4m3fn", **how)
    # NaN: in a row with an infinity that element and the weight's; in a row with a NaN all; in others the weight's.
    assert found.counts[0, 2] == 2 + 2 + 70 + 37
    assert torch.equal(found.counts[0, 1:], found.counts[1, 1:])
    assert torch.equal(found.data.float().isnan(), ~found.y.isfinite())


@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_rows_of_zeros(kernel: str, eps: float) -> None:
    x = random(37, 50)
    x[::3] = 0
    found = fp8_rms_norm(x, random(50, seed=1), eps, transposed=True, kernel=kernel)
    check_cast(found, "e4m3fn", transposed=True)
    zero = found.y[::3]
    assert zero.isnan().all() if eps == 0 else not zero.any()
    assert found.counts[0].tolist()[2] == (13 * 50 if eps == 0 else 0)


def test_a_hundredfold_amax_is_requantized_in_the_same_call(kernel: str) -> None:
    x, weight = random(66, 90), random(90, seed=1)
    first = fp8_rms_norm(x, weight, history=torch.zeros(4, device=HERE), transposed=True, kernel=kernel)
    history = first.next_history
    found = fp8_rms_norm(x, 100 * weight, history=history, transposed=True, kernel=kernel)
    check_cast(found, "e4m3fn", history=history, transposed=True)
    assert found.counts[0, 0] > 1000
    assert found.data.float().abs().max() == 448
    assert found.next_history.tolist() == [found.amax.item(), first.amax.item(), 0.0, 0.0]
    again = fp8_rms_norm(x, 100 * weight, history=found.next_history, transposed=True, kernel=kernel)
    check_cast(again, "e4m3fn", history=found.next_history, transposed=True)
    assert again.counts[0, 0] == 0
    assert history.tolist()[0] == first.amax.item()  # the given history is not changed


def test_strides_and_leading_dimensions(kernel: str) -> None:
    weight = random(40, seed=1)
    for x in (random(40, 33).t(), random(66, 120)[::2, ::3], random(1, 40).expand(9, 40)):
        found, copied = (fp8_rms_norm(each, weight, transposed=True, kernel=kernel) for each in (x, x.contiguous()))
        check_cast(found, "e4m3fn", transposed=True)
        torch.testing.assert_close(found.y, copied.y, rtol=1e-6, atol=0)  # torch accumulates in another order
    deep = fp8_rms_norm(random(3, 5, 40), weight, kernel=kernel)
    assert deep.data.shape == deep.y.shape == (15, 40)
    assert deep.rstd.shape == (15,)


@pytest.mark.parametrize("history", [None, [2.0, 3.0]], ids=str)
def test_no_rows(kernel: str, history: list[float] | None) -> None:
    how: dict[str, Any] = {"transposed": True, "history": None if history is None else numbers(*history)}
    found = fp8_rms_norm(random(0, 40), random(40), kernel=kernel, **how)
    check_cast(found, "e4m3fn", **how)
    assert found.data_t.shape == (40, 0)
    assert fp8_rms_norm(random(0, 40), number_format=None, kernel=kernel).y.shape == (0, 40)


# y.


@pytest.mark.parametrize("shape", [(70, 133), (9, 1100), (5, 1)], ids=str)
def test_y_has_the_same_bits_with_a_cast_and_without(kernel: str, shape: tuple[int, int]) -> None:
    x, weight = random(*shape, dtype=torch.float16), random(shape[1], dtype=torch.float16, seed=1)
    alone = fp8_rms_norm(x, weight, number_format=None, kernel=kernel)
    for value in (alone.data, alone.data_t, alone.inverse, alone.amax, alone.counts, alone.next_history):
        assert value.numel() == 0
    for history in (None, numbers(9.0), numbers(0.1)):
        found = fp8_rms_norm(x, weight, transposed=True, history=history, kernel=kernel)
        assert torch.equal(found.y, alone.y)
        assert torch.equal(found.rstd, alone.rstd)
    truth = FP8_RMS_NORM.reference(x.double(), weight.double(), 1e-6, None, False, None, False)
    torch.testing.assert_close(alone.y.double(), truth[0], rtol=2**-10, atol=1e-7)
    torch.testing.assert_close(alone.rstd.double(), truth[1], rtol=1e-6, atol=0)


def test_the_torch_kernel_gives_the_y_of_rms_norm() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x, weight = random(50, 96, dtype=dtype), random(96, seed=1)
        found = fp8_rms_norm(x, weight, kernel="torch")
        assert torch.equal(found.y, kp.rms_norm(x, weight, kernel="torch"))


def test_the_comparison_finds_what_is_wrong() -> None:
    arguments = FP8_RMS_NORM.case("odd").arguments(torch.float32, torch.device("cpu"))
    found = function_of(FP8_RMS_NORM)(*arguments.values())
    assert not exceeded(compare(FP8_RMS_NORM, lambda *_: found, arguments))
    for place, name in ((0, "y"), (1, "rstd"), (4, "copy"), (5, "amax"), (6, "counts")):
        wrong = (*found[:place], found[place] * 2, *found[place + 1 :])
        assert f"{name}: error" in exceeded(compare(FP8_RMS_NORM, lambda *_, w=wrong: w, arguments))
    turned = codes(found[3]).flip(0).view(found[3].dtype)
    wrong = (*found[:3], turned, *found[4:])
    assert "copy_t: error" in exceeded(compare(FP8_RMS_NORM, lambda *_: wrong, arguments))


def test_no_gradient_flows_and_memory_is_all_written(kernel: str) -> None:
    x, weight = random(9, 70).requires_grad_(), random(70, seed=1).requires_grad_()
    for history in (None, numbers(9.0), numbers(0.1)):
        with poisoned():
            found = fp8_rms_norm(x, weight, transposed=True, history=history, kernel=kernel)
        for name, value in vars(found).items():
            assert not value.requires_grad, name
            assert not value.float().isnan().any(), name
            assert value.dtype != torch.int64 or value.max() == 630, name


def test_triton_is_chosen_where_it_runs() -> None:
    for device, name in (("nvidia/h200", "triton"), ("amd/mi300x", "triton"), ("cpu/avx2", "torch")):
        assert kp.explain(fp8_rms_norm, torch.ones(4, 4), device=device).kernel.name == name


X, H = torch.ones(4, 6), torch.ones(3)
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "x": ((None,), {}, TypeError, "x=None: expected a tensor"),
    "dtype": ((X.double(),), {}, TypeError, "x has dtype float64: use float32, float16 or bfloat16"),
    "shape": ((X[0],), {}, ValueError, r"x has shape \[6\]: expected a matrix, so reshape"),
    "columns": ((X[:, :0],), {}, ValueError, r"x has shape \[4, 0\]: the last dimension must hold at least one"),
    "weight": ((X, X[0, :5]), {}, ValueError, r"weight has shape \[5\]: x has 6 numbers in its last dimension"),
    "weight dtype": ((X, X[0].half()), {}, TypeError, "weight has dtype float16 and x float32: use x's dtype or"),
    "eps": ((X, None, -1.0), {}, ValueError, "eps=-1.0: use a finite number that is not negative"),
    "format": ((X, None, 1e-6, "fp8"), {}, ValueError, "number_format='fp8': use one of e4m3fn, e5m2"),
    "transposed": ((X,), {"transposed": 1}, TypeError, "transposed=1: use True or False"),
    "power_of_two": ((X,), {"power_of_two": 0}, TypeError, "power_of_two=0: use True or False"),
    "history": ((X,), {"history": 2.0}, TypeError, "history=2.0: expected a float32 tensor, or None"),
    "history dtype": ((X,), {"history": H.double()}, TypeError, "history has dtype float64: use float32"),
    "history shape": ((X,), {"history": H[:0]}, ValueError, r"history has shape \[0\]: use a vector, such as"),
    "history device": ((X,), {"history": H.to("meta")}, ValueError, "history is on meta and x on cpu: move one"),
    "history alone": (
        (X, None, 1e-6, None),
        {"history": H},
        ValueError,
        "history with number_format=None: nothing",
    ),
    "kernel": ((X,), {"kernel": "cuda"}, ValueError, "kernel='cuda': fp8_rms_norm has no such kernel on cpu"),
}


@pytest.mark.parametrize(("arguments", "keywords", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named_with_a_remedy(
    arguments: tuple[Any, ...], keywords: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        fp8_rms_norm(*arguments, **keywords)


@pytest.mark.parametrize("form", [E4M3FN, E5M2], ids=str)
def test_the_dequantized_data_is_close_to_float64(kernel: str, form: Any) -> None:
    x, weight = random(60, 120), random(120, seed=1)
    truth = FP8_RMS_NORM.reference(x.double(), weight.double(), 1e-6, None, False, None, False)[0]
    found = fp8_rms_norm(x, weight, 1e-6, form.name, transposed=True, kernel=kernel)
    for meant in (found.data.float() * found.inverse, (found.data_t.float() * found.inverse).t()):
        noise = float((meant.double() - truth).square().sum() / truth.square().sum())
        assert -10 * math.log10(noise) > (31 if form.mantissa_bits == 3 else 25)
