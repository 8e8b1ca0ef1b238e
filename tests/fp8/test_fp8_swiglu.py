"""fp8_swiglu and fp8_swiglu_grad: dequantized results against float64, data_t, counts and histories."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import kernel_pytorch as kp
from fp8_kernels import HERE, random
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.formats import E4M3FN, E5M2, FORMATS
from kernel_pytorch.ops import fp8_swiglu as ops
from kernel_pytorch.ops.fp8_cast import Cast, fp8_cast
from kernel_pytorch.ops.fp8_swiglu import Hidden, HiddenGradients, fp8_swiglu, fp8_swiglu_grad
from kernel_pytorch.ops.fp8_swiglu.definition import FP8_SWIGLU
from kernel_pytorch.ops.fp8_swiglu.grad_definition import FP8_SWIGLU_GRAD
from kernel_pytorch.testing import compare, poisoned
from kernel_pytorch.testing.budget import exceeded


def three(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """dh, gate and up."""
    return tuple(random(rows, columns, dtype=dtype, seed=seed) for seed in range(3))


def exact(dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> dict[str, torch.Tensor]:
    """By autograd, in float64."""
    gate, up = (x.detach().double().requires_grad_() for x in (gate, up))
    h = torch.nn.functional.silu(gate) * up
    dgate, dup = torch.autograd.grad(h, (gate, up), dh.double())
    return {"h": h.detach(), "dgate": dgate, "dup": dup}


def sqnr(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The power of the signal over that of the error, in dB."""
    return float(10 * torch.log10(wanted.square().sum() / (found.double() - wanted).square().sum()))


def codes(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.uint8)


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, device=HERE)


# Dequantized results.


@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, torch.float32) for form in FORMATS.values()), (E4M3FN, torch.float16), (E5M2, torch.float16)],
    ids=str,
)
def test_the_dequantized_data_is_close_to_float64(kernel: str, form: Any, dtype: torch.dtype) -> None:
    """The error is that of one rounding to the format, as of a cast of the float64 result."""
    dh, gate, up = three(60, 120, dtype)
    wanted = exact(dh, gate, up)
    h = fp8_swiglu(gate, up, form.name, kernel=kernel)
    found = fp8_swiglu_grad(dh, gate, up, form.name, form.name, h_inverse=h.inverse, kernel=kernel)
    meant = {
        "h": h.data.float() * h.inverse,
        "dgate": found.dgate.float() * found.dgate_inverse,
        "dup": found.dup.float() * found.dup_inverse,
    }
    for name, truth in wanted.items():
        cast = fp8_cast(truth.float(), form.name)
        once = sqnr(cast.data.float() * cast.inverse, truth)
        assert sqnr(meant[name], truth) == pytest.approx(once, abs=0.05), name
        assert once > (31 if form.mantissa_bits == 3 else 25)
    assert sqnr(found.h_t.float().t() * h.inverse, wanted["h"]) == pytest.approx(
        sqnr(meant["h"], wanted["h"]), abs=0.05
    )


def test_float32_results_are_rounded_once(kernel: str) -> None:
    """h is not rounded to the 16-bit dtype of gate and up."""
    _, gate, up = three(64, 64, torch.float16)
    h = fp8_swiglu(gate, up, kernel=kernel)
    wide = fp8_swiglu(gate.float(), up.float(), kernel=kernel)
    assert torch.equal(codes(h.data), codes(wide.data))
    assert torch.equal(h.inverse, wide.inverse)


@pytest.mark.parametrize("value", [200.0, 89.0, 87.0, 17.0])
def test_large_gates_neither_overflow_nor_cancel(kernel: str, value: float) -> None:
    gate = numbers(value, -value).view(1, 2)
    one = torch.ones_like(gate)
    h = fp8_swiglu(gate, one, kernel=kernel)
    found = fp8_swiglu_grad(one, gate, one, h_inverse=h.inverse, kernel=kernel)
    assert h.amax.item() == pytest.approx(value, rel=1e-6)
    assert h.counts[2] == 0
    assert torch.equal(found.counts[:, 2], torch.zeros_like(found.counts[:, 2]))
    left = (found.dgate.float() * found.dgate_inverse)[0].tolist()
    assert left == pytest.approx([1.0, 0.0], abs=1e-4)
    # With only small gates the scale fits them: silu is nonzero where float32 can represent it.
    alone = fp8_swiglu(-gate[:, :1], one[:, :1], kernel=kernel)
    true = -value / (1 + math.exp(value))
    if value < 87.5:  # above, exp(-value) is subnormal, which some devices flush
        assert (alone.data.float() * alone.inverse).item() == pytest.approx(true, rel=1e-4)


# The transposed data.


def test_copies_are_transposes_to_the_byte(kernel: str) -> None:
    dh, gate, up = three(70, 133)
    found = fp8_swiglu_grad(dh, gate, up, kernel=kernel)
    assert torch.equal(codes(found.dgate).t(), codes(found.dgate_t))
    assert torch.equal(codes(found.dup).t(), codes(found.dup_t))
    for copy in (found.dgate, found.dgate_t, found.dup, found.dup_t):
        assert copy.is_contiguous()
    assert found.h_t.shape == (0, 0)


@pytest.mark.parametrize("history", [None, [12.0, 3.0], [0.5]], ids=str)
@pytest.mark.parametrize("form", [E4M3FN, E5M2], ids=str)
def test_h_is_quantized_to_the_same_bytes_again(kernel: str, form: Any, history: list[float] | None) -> None:
    dh, gate, up = three(62, 125, torch.float16)
    remembered = None if history is None else numbers(*history)
    h = fp8_swiglu(gate, up, form.name, history=remembered, power_of_two=True, kernel=kernel)
    found = fp8_swiglu_grad(dh, gate, up, h_format=form.name, h_inverse=h.inverse, kernel=kernel)
    assert torch.equal(codes(found.h_t), codes(h.data).t())
    # Other scales may differ by one ulp, so codes differ only for elements between two of them.
    h = fp8_swiglu(gate, up, form.name, history=remembered, kernel=kernel)
    found = fp8_swiglu_grad(dh, gate, up, h_format=form.name, h_inverse=h.inverse, kernel=kernel)
    steps = (codes(found.h_t).int() - codes(h.data).t().int()).abs()
    assert steps.max() <= 1
    assert steps.count_nonzero() <= 3


def test_h_saturates_where_the_given_scale_is_too_large(kernel: str) -> None:
    gate, up = numbers(30.0, -1.0).view(1, 2), numbers(20.0, 1.0).view(1, 2)
    found = fp8_swiglu_grad(gate, gate, up, h_inverse=numbers(1.0)[0], kernel=kernel)
    assert found.h_t.float().flatten().tolist() == [448.0, pytest.approx(-0.269, rel=0.05)]


def test_columns_of_one_matrix_give_the_same_bytes_as_copies(kernel: str) -> None:
    both = random(40, 130, dtype=torch.float16)
    gate, up = both[:, :65], both[:, 65:]
    dh = random(65, 40, dtype=torch.float16, seed=1).t()
    for found, again in (
        (fp8_swiglu(gate, up, kernel=kernel), fp8_swiglu(gate.contiguous(), up.contiguous(), kernel=kernel)),
        (
            fp8_swiglu_grad(dh, gate, up, h_inverse=numbers(0.1)[0], kernel=kernel),
            fp8_swiglu_grad(
                dh.contiguous(), gate.contiguous(), up.contiguous(), h_inverse=numbers(0.1)[0], kernel=kernel
            ),
        ),
    ):
        for name, value in vars(found).items():
            assert torch.equal(
                value.flatten().view(torch.uint8), getattr(again, name).flatten().view(torch.uint8)
            ), name


def test_leading_dimensions_count_as_rows() -> None:
    dh, gate, up = (x.view(2, 3, 8) for x in three(6, 8))
    assert fp8_swiglu(gate, up).data.shape == (6, 8)
    assert fp8_swiglu_grad(dh, gate, up).dup_t.shape == (8, 6)


# Counts. silu(40) is 40 and its derivative 1, in float32 and in float64.


def test_counts_are_exact(kernel: str) -> None:
    gate, up = torch.full((70, 140), 40.0, device=HERE), torch.ones(70, 140, device=HERE)
    up[3, 5], up[69, 139], up[0, :7] = math.nan, math.inf, 0.0
    up[10:12, :11] = 1e-6  # 448 * 1e-6 is less than half of 2^-9, the smallest number
    h = fp8_swiglu(gate, up, kernel=kernel)
    assert h.counts.tolist() == [0, 22, 2]
    assert h.amax.item() == 40
    assert int(h.data.float().isnan().sum()) == 2
    found = fp8_swiglu_grad(torch.ones_like(gate), gate, up, "e4m3fn", h_inverse=h.inverse, kernel=kernel)
    assert found.counts.tolist() == [[0, 22, 2], [0, 0, 0]]  # dgate is up, dup is silu(gate)
    assert torch.equal(codes(found.h_t), codes(h.data).t())
    assert (codes(found.h_t) == 0x7F).sum() == 2


def test_numbers_that_are_not_finite_are_left_out(kernel: str) -> None:
    dh, gate, up = three(5, 9)
    dh[0, 0], gate[1, 1], up[2, 2] = math.inf, math.nan, -math.inf
    found = fp8_swiglu_grad(dh, gate, up, h_inverse=numbers(0.25)[0], kernel=kernel)
    assert found.counts[:, 2].tolist() == [3, 2]  # dup does not depend on up
    assert int(found.h_t.float().isnan().sum()) == 2
    wanted = exact(dh, gate, up)
    for name, data, inverse in (
        ("dgate", found.dgate, found.dgate_inverse),
        ("dup", found.dup, found.dup_inverse),
    ):
        known = wanted[name].isfinite()
        assert torch.equal(data.float().isnan(), ~known)
        meant = torch.where(known, data.float() * inverse, 0.0)
        assert sqnr(meant, torch.where(known, wanted[name], 0.0)) > 20


# Histories. e4m3fn has 448 as its largest number; a history's scale leaves a factor of 2.


def remembering(history: list[float], kernel: str, largest: float = 40.0) -> Hidden:
    gate, up = torch.full((66, 70), 40.0, device=HERE), torch.full((66, 70), 0.25, device=HERE)
    up[0, :3] = largest / 40
    return fp8_swiglu(gate, up, history=numbers(*history), kernel=kernel)


def test_a_history_gives_the_scale(kernel: str) -> None:
    h = remembering([56.0, 3.0, math.nan, math.inf], kernel)
    assert h.inverse.item() == 0.25  # 448 / 56 / 2 = 4
    assert h.amax.item() == 40
    assert h.counts.tolist() == [0, 0, 0]
    assert h.next_history[:3].tolist() == [40.0, 56.0, 3.0]
    assert h.next_history[3].isnan()


def test_a_history_that_is_too_small_is_not_used(kernel: str) -> None:
    h = remembering([14.0], kernel, largest=56.0)  # 448 / 14 / 2 = 16: 28 fits, 56 does not
    assert h.counts.tolist() == [3, 0, 0]
    assert h.inverse.item() == 0.125
    assert h.data[0, 0].item() == 448
    assert h.next_history.tolist() == [56.0]
    assert remembering([14.0], kernel, largest=28.0).counts[0] == 0
    assert remembering([14.0], kernel, largest=28.0).data[0, 0].item() == 448


def test_a_history_of_nothing_is_not_used(kernel: str) -> None:
    h = remembering([0.0, 0.0], kernel, largest=56.0)
    assert h.counts.tolist() == [0, 0, 0]
    assert h.inverse.item() == 0.125
    assert h.next_history.tolist() == [56.0, 0.0]


@pytest.mark.parametrize(
    ("of_gate", "of_up"), [(0.0, 0.0), (0.0, 7.0), (7.0, 7.0), (7.0, 112.0), (112.0, 0.0), (112.0, 112.0)]
)
def test_each_gradient_has_its_own_history(kernel: str, of_gate: float, of_up: float) -> None:
    """dgate is up and dup is gate here: the histories are independent."""
    gate, up = torch.full((34, 60), 28.0, device=HERE), torch.full((34, 60), 14.0, device=HERE)
    up[33, 3:5], gate[1, 1] = 56.0, 112.0
    up[7, 7] = 1e-9
    found = fp8_swiglu_grad(
        torch.ones_like(gate),
        gate,
        up,
        "e4m3fn",
        gate_history=numbers(of_gate),
        up_history=numbers(of_up),
        kernel=kernel,
    )
    # Under the scale 448 / 7 / 2 = 32, numbers up to 14 fit.
    assert found.counts.tolist() == [[2 if of_gate == 7 else 0, 1, 0], [gate.numel() if of_up == 7 else 0, 0, 0]]
    assert found.dgate_inverse.item() == (0.5 if of_gate == 112 else 0.125)
    assert found.dup_inverse.item() == (0.5 if of_up == 112 else 0.25)
    assert found.gate_next_history.tolist() == [56.0]
    assert found.up_next_history.tolist() == [112.0]
    assert torch.equal(found.dgate.float() * found.dgate_inverse, torch.where(up == up[7, 7], 0.0, up))
    assert torch.equal(found.dup.float() * found.dup_inverse, gate)
    assert torch.equal(codes(found.dgate_t), codes(found.dgate).t())
    assert torch.equal(codes(found.dup_t), codes(found.dup).t())


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
def test_a_history_far_above_is_not_used(kernel: str, form: Any) -> None:
    """With one outlier in the history, h and the gradients are as with their own scales."""
    dh, gate, up = three(40, 50)
    outlier = numbers(1e13, 1.0)
    h, own = (fp8_swiglu(gate, up, form.name, history=each, kernel=kernel) for each in (outlier, None))
    assert torch.equal(codes(h.data), codes(own.data))
    assert torch.equal(h.inverse, own.inverse)
    assert torch.equal(h.counts, own.counts)
    assert h.next_history.tolist() == [h.amax.item(), outlier[0].item()]
    found, plain, gate_alone = (
        fp8_swiglu_grad(dh, gate, up, form.name, gate_history=of_gate, up_history=of_up, kernel=kernel)
        for of_gate, of_up in ((outlier, outlier), (None, None), (outlier, numbers(12.0, 1.0)))
    )
    for each in (found, gate_alone):
        assert torch.equal(codes(each.dgate), codes(plain.dgate))
        assert torch.equal(codes(each.dgate_t), codes(plain.dgate_t))
        assert torch.equal(each.dgate_inverse, plain.dgate_inverse)
        assert torch.equal(each.counts[0], plain.counts[0])
    assert torch.equal(codes(found.dup), codes(plain.dup))
    assert torch.equal(found.counts, plain.counts)
    wanted = 24 / form.largest
    assert gate_alone.dup_inverse.item() == pytest.approx(wanted, rel=1e-6)  # the other gradient's history fits


def test_it_is_the_cast_of_fp8_cast() -> None:
    """The torch kernel computes h by the same operations as this test, so every byte is known."""
    _, gate, up = three(30, 50)
    sigmoid = 1 / (1 + (-gate.abs()).exp())
    sigmoid = torch.where(gate >= 0, sigmoid, (-gate.abs()).exp() * sigmoid)
    wanted: Cast = fp8_cast(gate * sigmoid * up, "e5m2", power_of_two=True)
    h = fp8_swiglu(gate, up, "e5m2", power_of_two=True, kernel="torch")
    assert torch.equal(codes(h.data), codes(wanted.data))
    assert torch.equal(h.inverse, wanted.inverse)
    assert torch.equal(h.counts, wanted.counts[0, :3])


# The op registry.


def test_the_comparison_finds_what_is_wrong() -> None:
    """Wrong results are found: a wrong inverse, data_t not transposed, a wrong count."""
    arguments = FP8_SWIGLU.case("odd").arguments(torch.float32, torch.device("cpu"))
    found = function_of(FP8_SWIGLU)(*arguments.values())
    assert not exceeded(compare(FP8_SWIGLU, lambda *_: found, arguments))
    wrong = (found[0], found[1] * 1.25, *found[2:])
    assert "h: error" in exceeded(compare(FP8_SWIGLU, lambda *_: wrong, arguments))
    wrong = (*found[:3], found[3] + 1, found[4])
    assert "nonfinite: error" in exceeded(compare(FP8_SWIGLU, lambda *_: wrong, arguments))
    arguments = FP8_SWIGLU_GRAD.case("odd").arguments(torch.float32, torch.device("cpu"))
    found = function_of(FP8_SWIGLU_GRAD)(*arguments.values())
    assert not exceeded(compare(FP8_SWIGLU_GRAD, lambda *_: found, arguments))
    for place, name in ((1, "dgate_t"), (4, "dup_t"), (6, "h_t")):
        turned = codes(found[place]).flip(0).view(found[place].dtype)
        wrong = (*found[:place], turned, *found[place + 1 :])
        assert f"{name}: error" in exceeded(compare(FP8_SWIGLU_GRAD, lambda *_, w=wrong: w, arguments))


def test_no_gradient_flows_and_memory_is_all_written(kernel: str) -> None:
    dh, gate, up = (x.requires_grad_() for x in three(9, 70))
    with poisoned():
        h = fp8_swiglu(gate, up, kernel=kernel)
        found = fp8_swiglu_grad(dh, gate, up, h_inverse=h.inverse, kernel=kernel)
    assert isinstance(h, Hidden)
    assert isinstance(found, HiddenGradients)
    for value in (*vars(h).values(), *vars(found).values()):
        assert not value.requires_grad
        assert not value.float().isnan().any()


def test_triton_is_chosen_where_it_runs() -> None:
    x = torch.ones(4, 4)
    for device, name in (("nvidia/h200", "triton"), ("amd/mi300x", "triton"), ("cpu/avx2", "torch")):
        assert kp.explain(fp8_swiglu, x, x, device=device).kernel.name == name
        assert kp.explain(fp8_swiglu_grad, x, x, x, device=device).kernel.name == name
    assert {kernel.op for kernel in (ops.KERNEL_TORCH, ops.KERNEL_TRITON)} == {"fp8_swiglu"}


X, H = torch.ones(4, 6), torch.zeros(3)
ONE = torch.ones(())
FORWARD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "no tensor": (([1.0], X), {}, TypeError, r"gate=\[1.0\]: expected a tensor"),
    "dtype": ((X.double(), X.double()), {}, TypeError, "gate has dtype float64: use float32, float16 or bfloat16"),
    "dtypes": ((X, X.half()), {}, TypeError, r"up has dtype float16 and gate float32: convert one with .to\(\)"),
    "vector": ((X[0], X[0]), {}, ValueError, r"gate has shape \[6\]: expected a matrix, so reshape"),
    "shapes": ((X, X.t()), {}, ValueError, r"up has shape \[6, 4\] and gate \[4, 6\]: use matrices of one shape"),
    "devices": ((X, X.to("meta")), {}, ValueError, "up is on meta and gate on cpu: move one"),
    "format": ((X, X, "fp8"), {}, ValueError, "number_format='fp8': use one of e4m3fn, e5m2"),
    "power_of_two": ((X, X), {"power_of_two": 1}, TypeError, "power_of_two=1: use True or False"),
    "history": ((X, X), {"history": 2.0}, TypeError, "history=2.0: expected a float32 tensor, or None"),
    "history dtype": ((X, X), {"history": H.double()}, TypeError, "history has dtype float64: use float32"),
    "history shape": ((X, X), {"history": H[:0]}, ValueError, r"history has shape \[0\]: use a vector, such as"),
    "history strides": ((X, X), {"history": X[:, 0]}, ValueError, r"history has strides \(6,\): use a contiguous"),
    "history device": ((X, X), {"history": H.to("meta")}, ValueError, "history is on meta and gate on cpu: move"),
    "kernel": ((X, X), {"kernel": "cuda"}, ValueError, "kernel='cuda': fp8_swiglu has no such kernel on cpu"),
}
GRAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "dh": ((None, X, X), {}, TypeError, "dh=None: expected a tensor"),
    "dh shape": ((X[:2], X, X), {}, ValueError, r"dh has shape \[2, 6\] and gate \[4, 6\]: use matrices of one"),
    "dh dtype": ((X.half(), X, X), {}, TypeError, "dh has dtype float16 and gate float32: convert one"),
    "format": ((X, X, X, "fp8"), {}, ValueError, "number_format='fp8': use one of e4m3fn, e5m2"),
    "h_format": ((X, X, X, "e5m2", 8), {}, ValueError, "h_format=8: use one of e4m3fn, e5m2"),
    "h number": ((X, X, X), {"h_inverse": 1.0}, TypeError, "h_inverse=1.0: use the inverse that fp8_swiglu gave"),
    "h dtype": ((X, X, X), {"h_inverse": ONE.half()}, TypeError, "h_inverse has dtype float16: use the float32"),
    "h shape": ((X, X, X), {"h_inverse": H}, ValueError, r"h_inverse has shape \[3\]: use the one number"),
    "h device": ((X, X, X), {"h_inverse": ONE.to("meta")}, ValueError, "h_inverse is on meta and gate on cpu"),
    "one history": ((X, X, X), {"gate_history": H}, ValueError, "up_history=None with gate_history: .* both or"),
    "other history": ((X, X, X), {"up_history": H}, ValueError, "gate_history=None with up_history: .* both or"),
    "lengths": (
        (X, X, X),
        {"gate_history": H, "up_history": H[:2]},
        ValueError,
        r"up_history has shape \[2\] and gate_history \[3\]: use histories of one length",
    ),
    "history dtype": (
        (X, X, X),
        {"gate_history": H, "up_history": H.half()},
        TypeError,
        "up_history has dtype float16: use float32",
    ),
}


@pytest.mark.parametrize(("arguments", "keywords", "error", "text"), FORWARD.values(), ids=FORWARD)
def test_wrong_arguments_are_named_with_a_remedy(
    arguments: tuple[Any, ...], keywords: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        fp8_swiglu(*arguments, **keywords)


@pytest.mark.parametrize(("arguments", "keywords", "error", "text"), GRAD.values(), ids=GRAD)
def test_wrong_arguments_of_the_gradient_are_named_with_a_remedy(
    arguments: tuple[Any, ...], keywords: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        fp8_swiglu_grad(*arguments, **keywords)
