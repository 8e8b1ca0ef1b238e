"""fp8_cast as an op of the registry: fake and meta tensors, gradients, budget, devices, wrong arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernel_pytorch as kp
from fp8_models import random
from kernel_pytorch.hardware_abstraction.architectures import ARCHITECTURES
from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.ops.fp8_cast import KERNEL_TORCH, KERNEL_TRITON, fp8_cast, torch_kernel
from kernel_pytorch.ops.fp8_cast.definition import FP8_CAST
from kernel_pytorch.testing import compare
from kernel_pytorch.testing.budget import exceeded

pytestmark = pytest.mark.usefixtures("one_thread")


def outputs(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return torch_kernel.forward(kp.device("cpu"), *arguments)


def test_fake_tensors_and_meta_tensors_have_the_real_shapes() -> None:
    for case in FP8_CAST.cases:
        if case.benchmark:
            continue
        real = case.arguments(torch.float32, torch.device("cpu"))
        made = FP8_CAST.fake(*real.values())
        for fake, out in zip(made, outputs(*real.values()), strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (out.shape, out.stride(), out.dtype), case.name
    delayed = fp8_cast(torch.empty(3, 2, device="meta"), history=torch.empty(7, device="meta"))
    assert (delayed.next_history.shape, delayed.next_history.dtype) == ((7,), torch.float32)
    meta = fp8_cast(torch.empty(300, 200, device="meta"), "e4m3fn", "square", transposed=True)
    assert (meta.data_t.shape, meta.inverse_t.shape) == ((200, 300), (2, 3))


def test_no_gradient_flows_and_none_is_refused() -> None:
    x, history = random(4, 8).requires_grad_(), torch.ones(3).requires_grad_()
    for function in (fp8_cast, function_of(FP8_CAST)):
        arguments = (x,) if function is fp8_cast else (x, "e4m3fn", "tensor", True, history, False)
        result = function(*arguments)
        tensors = result if isinstance(result, tuple) else vars(result).values()
        assert not any(tensor.requires_grad for tensor in tensors)


def test_a_wrong_byte_exceeds_the_budget() -> None:
    def wrong(*arguments: Any) -> tuple[torch.Tensor, ...]:
        data, *rest = outputs(*arguments)
        data.view(torch.uint8)[2, 3] ^= 1
        return (data, *rest)

    arguments = FP8_CAST.case("odd").arguments(torch.float32, torch.device("cpu"))
    found = compare(FP8_CAST, wrong, arguments, gradients=False)
    assert exceeded(found) == "data: error 1 EXCEEDS its budget 0.5"


def test_every_device_has_a_kernel_or_a_reason() -> None:
    call = kp.explain(fp8_cast, torch.ones(4, 4)).call
    refused = {name for name, known in CATALOGUE.items() if KERNEL_TORCH.refusal(call, known)}
    assert refused == {name for name, known in CATALOGUE.items() if not known.supports("float64")}
    assert "nvidia/h200" not in refused
    without_float64 = ARCHITECTURES["xe-hpg"].device("arc", memory_bytes=0, compute_units=0)
    assert KERNEL_TORCH.refusal(call, without_float64) == "computes scales in float64, which xe-hpg does not"
    assert kp.explain(fp8_cast, torch.ones(4, 4), device="amd/mi300x").kernel is KERNEL_TRITON


X = torch.ones(4, 6)
WRONG = {
    "no tensor": (([1.0],), {}, TypeError, r"x=\[1.0\]: expected a tensor"),
    "dtype": ((X.double(),), {}, TypeError, "x has dtype float64: use float32, float16 or bfloat16"),
    "vector": ((X[0],), {}, ValueError, r"x has shape \[6\]: expected a matrix, so reshape"),
    "format": ((X, "fp8"), {}, ValueError, "number_format='fp8': use one of e4m3fn, e5m2"),
    "granularity": ((X, "e5m2", "column"), {}, ValueError, "granularity='column': use one of tensor, row, block"),
    "transposed": ((X,), {"transposed": 1}, TypeError, "transposed=1: use True or False"),
    "power_of_two": ((X,), {"power_of_two": None}, TypeError, "power_of_two=None: use True or False"),
    "history number": ((X,), {"history": 2.0}, TypeError, "history=2.0: expected a float32 tensor, or None"),
    "history dtype": ((X,), {"history": X[0].double()}, TypeError, "history has dtype float64: use float32"),
    "history shape": ((X,), {"history": X}, ValueError, r"history has shape \[4, 6\]: use a vector, such as torch"),
    "history scalar": ((X,), {"history": X[0, 0]}, ValueError, r"history has shape \[\]: use a vector"),
    "no history": ((X,), {"history": X[0, :0]}, ValueError, r"history has shape \[0\]: use a vector"),
    "history device": ((X,), {"history": X[0].to("meta")}, ValueError, "history is on meta and x on cpu: move one"),
    "history rows": ((X, "e5m2", "row"), {"history": X[0]}, ValueError, "'row': .* use granularity='tensor', or"),
    "kernel": ((X,), {"kernel": "cuda"}, ValueError, "kernel='cuda': fp8_cast has no such kernel on cpu"),
}


@pytest.mark.parametrize(("arguments", "keywords", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named_with_a_remedy(
    arguments: tuple[Any, ...], keywords: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        fp8_cast(*arguments, **keywords)
