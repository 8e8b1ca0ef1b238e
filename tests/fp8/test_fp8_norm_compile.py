"""RMSNorm before FP8 layers under torch.compile: layers quantize from the norm's inputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import kernel_pytorch as kp
from fp8_models import random, sqnr
from fp8_norm_models import Llama, everything, model, train
from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE
from kernel_pytorch.ops.fp8_cast import fp8_cast
from kernel_pytorch.testing import interpreting, poisoned

HERE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter computes bfloat16 wrongly.
DTYPES = (torch.bfloat16, torch.float32) if HERE == "cuda" else (torch.float16, torch.float32)
SHAPES = list(zip([(40, 132), (33, 5)], DTYPES, strict=True))

pytestmark = pytest.mark.usefixtures("one_thread", "own_monitors")


def compiled(net: Any) -> tuple[Any, list[Any]]:
    """Return a compiled function, and the rstd arguments of its FP8 operators."""
    torch._dynamo.reset()
    given: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        given.extend(node.kwargs["rstd"] for node in graph.graph.nodes if "rstd" in node.kwargs)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=lambda graph, _: make_boxed_func(graph.forward))
    return torch.compile(net, fullgraph=True, backend=backend), given


def test_the_first_layer_after_a_norm_quantizes_its_output() -> None:
    run, given = compiled(kp.fp8.convert(model(), "delayed"))
    train(run, range(1))
    # q, o, the SwiGLU, the head; k and v share the cast of q.
    assert [rstd is not None for rstd in given] == [True, False, True, True]


@pytest.mark.parametrize("how", [{"fuse_norm": False}, {"recipe": "tensorwise"}, {"recipe": "rowwise"}], ids=str)
def test_without_fusion_or_a_history_norms_are_unchanged(how: dict[str, Any]) -> None:
    run, given = compiled(kp.fp8.convert(model(), **{"recipe": "delayed", **how}))
    train(run, range(1))
    assert len(given) >= 4
    assert given == [None] * len(given)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "nn": nn.RMSNorm,
    "nn with eps": lambda width: nn.RMSNorm(width, eps=1e-3),
    "llama": Llama,
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_training_is_as_without_fusing(norm: Callable[[int], nn.Module]) -> None:
    """Except for the last bits of a norm's gradients; also if the norm's output exceeds the delayed scale."""
    found = []
    for fuse in (True, False):
        net = kp.fp8.convert(model(norm=norm), "delayed", fuse_norm=fuse)
        losses = train(compiled(net)[0], range(4), lambda number: 100.0 if number == 2 else 1.0)
        found.append((losses, everything(net)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    for name, other in found[1][1].items():
        if name.endswith("counts"):
            assert torch.equal(found[0][1][name][..., [0, 2, 3]], other[..., [0, 2, 3]])
        else:
            assert sqnr(found[0][1][name], other) > 50, name


def test_compiling_a_model_that_has_run() -> None:
    torch._dynamo.reset()
    net = kp.fp8.convert(model(), "tensorwise")
    train(net, range(2))
    other = copy.deepcopy(net)
    found = train(torch.compile(other, fullgraph=True, backend="aot_eager"), range(2, 4))
    assert found == pytest.approx(train(net, range(2, 4)), rel=1e-4)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_evaluation_equals_training(norm: Callable[[int], nn.Module]) -> None:
    torch._dynamo.reset()
    net = kp.fp8.convert(nn.Sequential(norm(32), nn.Linear(32, 16)).to(torch.bfloat16), "delayed")
    run = torch.compile(net[0], fullgraph=True, backend="aot_eager")
    x = random(40, 32, dtype=torch.bfloat16)
    y = run(x)
    assert y.requires_grad
    for without in (torch.no_grad(), torch.inference_mode()):
        with without:
            assert torch.equal(run(x), y)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap], ids=["grad", "vmap"])
def test_a_norm_before_unconverted_layers_supports_transforms(transform: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 16))
    net = kp.fp8.convert(copy.deepcopy(plain), "delayed")
    net[1].fp8_fallback = "a test"
    x = random(6, 32)

    def transformed(of: nn.Module) -> Any:
        return transform(lambda each: of(each).square().sum())(x)

    found = torch.compile(lambda: transformed(net), fullgraph=True, backend="aot_eager")()
    torch.testing.assert_close(found, transformed(plain))


def test_a_norm_before_fp8_layers_refuses_transforms() -> None:
    torch._dynamo.reset()
    net = kp.fp8.convert(nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 16)), "delayed")
    run = torch.compile(torch.func.grad(lambda x: net(x).sum()), backend="aot_eager")
    with pytest.raises(Exception, match=r"torch\.func\.grad \(or vjp, jacrev\) of an FP8 linear layer"):
        run(random(6, 32))


class Meddling(nn.Module):
    """A norm, an operation on its output, and a layer."""

    def __init__(self, between: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.layer, self.between = nn.RMSNorm(32), nn.Linear(32, 16), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        y = self.norm(x)
        other = self.between(x, y)
        return self.layer(y) + (0 if other is None else other)


BETWEEN: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "nothing": lambda *_: None,
    "y is used": lambda _, y: y.mean(),
    "y is changed": lambda _, y: y.mul_(3).sum() * 0,
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_a_layer_quantizes_its_actual_input(between: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    net, plain = kp.fp8.convert(Meddling(between), "delayed"), Meddling(between)
    run, _ = compiled(net)
    for number in range(2):
        x = random(48, 32, seed=number)
        found, exact = run(x.clone().requires_grad_()), plain(x.clone().requires_grad_())
        assert sqnr(found.detach(), exact.detach()) > 20


@pytest.mark.skipif(not interpreting() and HERE == "cpu", reason="neither a GPU nor Triton's interpreter")
@pytest.mark.parametrize("history", [[9.0, 1.0], [0.1, 0.0], [0.0, 0.0], [1e4, math.nan]], ids=str)
@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
def test_the_cast_equals_that_of_the_norms_output(
    shape: tuple[int, int], dtype: torch.dtype, history: list[float]
) -> None:
    from kernel_pytorch.ops.fp8_rms_norm.triton_cast import PreparedNormCast
    from kernel_pytorch.ops.triton_launch import Place

    x = random(*shape, dtype=dtype).to(HERE)
    x[3, 4], x[7, 1], x[9] = math.inf, 0.0, 0.0
    rstd = torch.rsqrt(x.float().square().mean(dim=-1) + 1e-5)
    for weight in (None, random(shape[1], seed=1, dtype=dtype).to(HERE)):
        normal = x.float() * rstd[:, None]
        y = (normal if weight is None else normal * weight).to(dtype)
        wanted = fp8_cast(y, transposed=True, history=torch.tensor(history, device=HERE))
        counts, kept = torch.zeros(2, 4, dtype=torch.int64, device=HERE), torch.tensor(history, device=HERE)
        cast = PreparedNormCast(
            CATALOGUE["nvidia/h200"], x.shape, x.stride(), "e4m3fn", len(history), False, weight is not None
        )
        with poisoned():
            found = cast(x, rstd, weight, Place(counts, torch.int64), Place(kept, torch.float32))
        for one, other in zip(found, (wanted.data, wanted.data_t), strict=False):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        assert torch.equal(found[2], wanted.inverse)
        assert torch.equal(counts, wanted.counts)
        assert torch.equal(kept.nan_to_num(-1), wanted.next_history.nan_to_num(-1))


@pytest.mark.skipif(HERE == "cpu", reason="needs a GPU")
def test_on_a_gpu_training_is_that_of_eager_mode() -> None:
    nets = [kp.fp8.convert(model().to(HERE, torch.bfloat16), "delayed", monitor=None) for _ in range(2)]
    torch._dynamo.reset()
    runs = (nets[0], torch.compile(nets[1], fullgraph=True))
    for number in range(6):
        x = random(4, 40, 24, seed=number, dtype=torch.bfloat16).to(HERE) * (50 if number == 3 else 1)
        found = [run(x) for run in runs]
        for y in found:
            y.square().mean().backward()
        assert sqnr(found[1].detach(), found[0].detach()) > 25
        for one, other in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
            assert sqnr(one.grad, other.grad) > 12
            one.grad = other.grad = None
