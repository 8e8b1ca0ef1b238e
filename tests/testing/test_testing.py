"""kernel_pytorch.testing: wrong kernels are caught, correct ones pass, and helpers restore all state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction import registry
from kernel_pytorch.hardware_abstraction.op import registered_op
from kernel_pytorch.ops.rms_norm import torch_kernel
from kernel_pytorch.testing import Comparison, cannot_run, compare, poisoned, pretend, test_device

OP = registered_op("rms_norm")
CPU = torch.device("cpu")
FORMATS = ["float32", "float16", "bfloat16"]
Function = Callable[..., tuple[torch.Tensor, ...]]


def differentiable(forward: Function, backward: Function) -> Function:
    """A forward and a backward, with the kernels' signatures, as one differentiable function."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> Any:
            y, rstd = forward(None, x, weight, eps)
            ctx.save_for_backward(x, weight, rstd)
            ctx.mark_non_differentiable(rstd)
            return y, rstd

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor, _: torch.Tensor) -> Any:
            x, weight, rstd = ctx.saved_tensors
            dx, dweight = backward(None, dy, x, weight, rstd)
            return dx, None if weight is None else dweight, None

    return Norm.apply


right = differentiable(torch_kernel.forward, torch_kernel.backward)


def broken_forward(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Function:
    return differentiable(lambda *values: change(*torch_kernel.forward(*values)), torch_kernel.backward)


def broken_backward(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Function:
    return differentiable(torch_kernel.forward, lambda *values: change(*torch_kernel.backward(*values)))


def compared(run: Function, case: str = "many-short-rows", number_format: str = "float32", seed: int = 0) -> Any:
    arguments = OP.case(case).arguments(getattr(torch, number_format), CPU, seed)
    with poisoned():
        return {comparison.tensor: comparison for comparison in compare(OP, run, arguments)}


def failing(run: Function, case: str = "many-short-rows", number_format: str = "float32") -> set[str]:
    return {name for name, result in compared(run, case, number_format).items() if not result.ok}


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("seed", range(20))
def test_correct_kernels_pass_for_any_data(number_format: str, seed: int) -> None:
    for case in ("one-row", "odd-hidden", "many-short-rows", "no-weight", "scales"):
        results = compared(right, case, number_format, seed)
        assert all(result.ok for result in results.values()), [str(result) for result in results.values()]


@pytest.mark.parametrize("number_format", FORMATS)
def test_every_output_and_gradient_is_compared(number_format: str) -> None:
    assert set(compared(right, number_format=number_format)) == {"y", "rstd", "dx", "dweight"}
    assert set(compared(right, "no-weight", number_format)) == {"y", "rstd", "dx"}
    arguments = OP.case("one-row").arguments(torch.float32, CPU)
    without = compare(OP, OP.reference, arguments, gradients=False)
    assert {comparison.tensor for comparison in without} == {"y", "rstd"}


@pytest.mark.parametrize("number_format", FORMATS)
def test_one_wrong_element_is_caught(number_format: str) -> None:
    def change(y: torch.Tensor, rstd: torch.Tensor) -> Any:
        y[-1, -1, -1] += 0.1 * y[-1, -1].abs().max()
        return y, rstd

    assert failing(broken_forward(change), number_format=number_format) == {"y"}


@pytest.mark.parametrize("number_format", FORMATS)
def test_a_wrong_element_in_a_small_row_beside_large_ones_is_caught(number_format: str) -> None:
    """The case's gradients span many orders of magnitude from row to row."""

    def change(dx: torch.Tensor, dweight: torch.Tensor) -> Any:
        smallest = dx.abs().amax(dim=-1).argmin()
        dx[smallest] *= 1.1
        return dx, dweight

    assert failing(broken_backward(change), "scales", number_format) == {"dx"}


def test_a_gradient_one_percent_too_large_is_caught_in_float32() -> None:
    assert failing(broken_backward(lambda dx, dweight: (dx * 1.01, dweight))) == {"dx"}
    assert failing(broken_backward(lambda dx, dweight: (dx, dweight * 1.01))) == {"dweight"}


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("case", ["odd-hidden", "many-short-rows", "float32-weight"])
def test_a_last_row_that_dweight_misses_is_caught(case: str, number_format: str) -> None:
    """A common bug in loops over tiles: the last row is not accumulated."""

    def backward(
        device: Any, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor
    ) -> Any:
        dx, _ = torch_kernel.backward(device, dy, x, weight, rstd)
        dy = dy.clone()
        dy.view(-1, dy.shape[-1])[-1] = 0
        return dx, torch_kernel.backward(device, dy, x, weight, rstd)[1]

    assert failing(differentiable(torch_kernel.forward, backward), case, number_format) == {"dweight"}


@pytest.mark.parametrize("number_format", FORMATS)
def test_an_unwritten_element_is_caught_in_poisoned_memory(number_format: str) -> None:
    def change(y: torch.Tensor, rstd: torch.Tensor) -> Any:
        out = torch.empty_like(y)
        out.view(-1)[:-1] = y.view(-1)[:-1]
        return out, rstd

    results = compared(broken_forward(change), number_format=number_format)
    assert results["y"].error == float("inf")
    assert {name for name, result in results.items() if not result.ok} == {"y"}


def test_an_unwritten_gradient_is_caught_in_poisoned_memory() -> None:
    assert failing(broken_backward(lambda dx, dweight: (dx, torch.empty_like(dweight)))) == {"dweight"}


def test_accumulation_in_bfloat16_is_caught() -> None:
    """With bfloat16 tensors, accumulation must still be in float32."""

    def forward(device: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> Any:
        total = torch.zeros_like(x[..., 0])
        for column in x.unbind(-1):
            total += column * column
        rstd = torch.rsqrt(total / x.shape[-1] + eps)
        y = x * rstd.unsqueeze(-1)
        return (y if weight is None else y * weight), rstd.float()

    assert {"y", "rstd"} <= failing(differentiable(forward, torch_kernel.backward), "wide", "bfloat16")


def test_a_dweight_summed_in_bfloat16_is_caught() -> None:
    def backward(
        device: Any, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor
    ) -> Any:
        dx, dweight = torch_kernel.backward(device, dy, x, weight, rstd)
        total = torch.zeros_like(dweight)
        for row in (dy * (x * rstd.unsqueeze(-1)).to(x.dtype)).reshape(-1, x.shape[-1]):
            total += row
        return dx, total

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 16, generator=generator).bfloat16()
    arguments = {"x": x, "weight": torch.ones(16).bfloat16(), "eps": 1e-6}
    results = compare(OP, differentiable(torch_kernel.forward, backward), arguments)
    assert {result.tensor for result in results if not result.ok} == {"dweight"}
    assert all(result.ok for result in compare(OP, right, arguments))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_nan_in_place_of_a_finite_element_is_caught(wrong: float) -> None:
    def change(y: torch.Tensor, rstd: torch.Tensor) -> Any:
        y.view(-1)[3] = wrong
        return y, rstd

    assert compared(broken_forward(change))["y"].error == float("inf")


def test_a_finite_element_in_place_of_nan_is_caught() -> None:
    """NaN in the definition must be NaN in the kernel: hiding it hides a user's bug."""
    arguments = dict(OP.case("odd-hidden").arguments(torch.float32, CPU))
    arguments["x"][2, 5] = float("nan")
    assert all(result.ok for result in compare(OP, right, arguments))
    hidden = broken_forward(lambda y, rstd: (y.nan_to_num(0.0), rstd))
    results = {result.tensor: result for result in compare(OP, hidden, arguments)}
    assert not results["y"].ok


def test_a_row_of_zeros_must_stay_zeros() -> None:
    def change(y: torch.Tensor, rstd: torch.Tensor) -> Any:
        y[0, 0] += 1e-30
        return y, rstd

    assert failing(broken_forward(change), "zero-rows") == {"y"}


@pytest.mark.parametrize(
    "change", [lambda y, rstd: (y[..., :-1], rstd), lambda y, rstd: (y, rstd.unsqueeze(-1))], ids=["y", "rstd"]
)
def test_a_wrong_shape_is_caught(change: Callable[..., Any]) -> None:
    arguments = OP.case("odd-hidden").arguments(torch.float32, CPU)
    run = lambda *values: change(*torch_kernel.forward(None, *values))  # noqa: E731
    with pytest.raises(AssertionError, match=r"(y|rstd) has shape \[.*\], the reference \[.*\]"):
        compare(OP, run, arguments, gradients=False)


def test_a_comparison_names_the_error() -> None:
    assert str(Comparison("dx", 1.0, 2.0)) == "dx: error 1 within its budget 2"
    assert str(Comparison("dx", 3.0, 2.0)) == "dx: error 3 EXCEEDS its budget 2"
    assert not Comparison("dx", float("nan"), 2.0).ok


def poison_settings() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.fixture
def restored_settings() -> Any:
    enabled, warn_only, fill = poison_settings()
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.mark.usefixtures("restored_settings")
@pytest.mark.parametrize(
    "before", [(False, False, True), (False, False, False), (True, False, False), (True, True, True)]
)
def test_poisoned_restores_torchs_settings(before: tuple[bool, bool, bool]) -> None:
    enabled, warn_only, fill = before
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    with poisoned(), poisoned():
        assert torch.empty(7).isnan().all()
        assert torch.empty(7, dtype=torch.bfloat16).isnan().all()
        assert (torch.empty(7, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    assert poison_settings() == before

    def raise_inside() -> None:
        with poisoned():
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        raise_inside()
    assert poison_settings() == before


def chosen() -> tuple[str, str]:
    choice = kp.explain(kp.rms_norm, torch.ones(2, 8))
    return choice.device.name, choice.kernel.name


def test_pretend_nests_and_restores() -> None:
    here = chosen()
    assert here == (kp.device("cpu").name, "torch")
    with pretend("nvidia/h200") as outer:
        assert outer is kp.device("nvidia/h200")
        assert chosen() == ("nvidia/h200", "triton")
        with pretend(kp.device("amd/mi300x")):
            assert chosen() == ("amd/mi300x", "triton")
        assert chosen() == ("nvidia/h200", "triton")
        with pytest.raises(KeyError, match="inside"), pretend("intel/b580"):
            raise KeyError("inside")
        assert chosen() == ("nvidia/h200", "triton")
    assert chosen() == here
    assert registry._pretended == {}


def test_pretend_drops_earlier_choices() -> None:
    """Cached selections must not leak across pretended devices."""
    x = torch.ones(2, 8)
    kp.rms_norm(x)
    float64_only = x.double()
    with pretend("nvidia/h200"), pytest.raises(kp.UnsupportedCallError, match="float64"):
        kp.rms_norm(float64_only, kernel="triton")
    assert torch.equal(kp.rms_norm(x, kernel="torch"), kp.rms_norm(x))
    with pytest.raises(ValueError, match="has no such kernel on cpu"):
        kp.rms_norm(x, kernel="triton")


def test_pretend_does_not_affect_other_torch_types() -> None:
    with pretend("amd/mi300x", torch_type="meta"):
        assert chosen() == (kp.device("cpu").name, "torch")
        meta = kp.explain(kp.rms_norm, torch.ones(2, 8, device="meta"))
        assert meta.device.name == "amd/mi300x"


def test_a_test_device_is_one_that_is_here_or_the_catalogues_first() -> None:
    assert test_device("cpu").present
    assert test_device("intel").backend == "intel"
    with pytest.raises(ValueError, match="backend='nope'"):
        test_device("nope")


def test_cannot_run_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_pytorch.ops.rms_norm import KERNEL_TORCH, KERNEL_TRITON

    h200 = kp.device("nvidia/h200")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cannot_run(KERNEL_TORCH, h200, torch.bfloat16) is None
    assert cannot_run(KERNEL_TRITON, h200, torch.float16) is None
    assert "bfloat16 wrongly" in str(cannot_run(KERNEL_TRITON, h200, torch.bfloat16))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "needs a nvidia device" in str(cannot_run(KERNEL_TRITON, h200, torch.float32))
