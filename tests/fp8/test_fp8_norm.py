"""RMSNorm before FP8 layers: which modules are fused, and that fusion changes no result."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import kernel_pytorch as kp
from fp8_models import prepared_on_cpu, random, same, sqnr
from fp8_norm_models import Block, Llama, both_recipes, caster_of, everything, is_cast, model, pair, train
from kernel_pytorch.fp8 import fusion as norm_module
from kernel_pytorch.fp8.rms_norm import CastingNorm
from kernel_pytorch.ops.rms_norm.definition import RMS_NORM
from kernel_pytorch.testing.devices import interpreting, pretend

pytestmark = pytest.mark.usefixtures("one_thread", "own_monitors")


# Matching


class OnePlus(Llama):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + functional.rms_norm(hidden_states, hidden_states.shape[-1:])


class OtherEps(Llama):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden_states, hidden_states.shape[-1:], self.weight, 1e-3)


class InTraining(Llama):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * (1.0 if self.training else 2.0)


class Subclass(nn.RMSNorm):
    pass


FOUND: dict[str, Callable[[int], nn.Module]] = {
    "nn": nn.RMSNorm,
    "nn with eps": lambda width: nn.RMSNorm(width, eps=1e-5),
    "nn without weight": lambda width: nn.RMSNorm(width, elementwise_affine=False),
    "llama": Llama,
    "subclass": lambda width: Subclass(width, eps=1e-5),
    "in eval": lambda width: Llama(width).eval(),
}
OTHERS: dict[str, Callable[[int], nn.Module]] = {
    "layer norm": nn.LayerNorm,
    "layer norm without bias": lambda width: nn.LayerNorm(width, bias=False),
    "one plus weight": OnePlus,
    "another eps": OtherEps,
    "in training": InTraining,
    "activation": lambda width: nn.PReLU(width),
    "two dimensions": lambda width: nn.RMSNorm((1, width)),
}


@pytest.mark.parametrize("make", FOUND.values(), ids=FOUND)
def test_a_norm_is_matched_by_its_results(make: Callable[[int], nn.Module]) -> None:
    net = pair(norm=make(40))
    training, keys = net[0].training, list(net.state_dict())
    rng = torch.get_rng_state()
    kp.fp8.convert(net, "tensorwise")
    assert norm_module.norms_in(net) == {"0": None}
    assert net[0].training == training
    assert list(net.state_dict()) == keys
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_a_module_that_computes_something_else_is_not_fused(make: Callable[[int], nn.Module]) -> None:
    net = kp.fp8.convert(pair(norm=make(40)), "tensorwise")
    assert norm_module.norms_in(net) == {}
    assert "forward" not in net[0].__dict__


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_other_recipes_do_not_fuse_norms(recipe: str) -> None:
    net = kp.fp8.convert(model(), recipe)
    assert norm_module.norms_in(net) == {}
    assert not any("forward" in module.__dict__ for module in net.modules() if isinstance(module, nn.RMSNorm))


def test_norms_are_fused_on_request_before_a_layer_of_their_width() -> None:
    assert norm_module.norms_in(kp.fp8.convert(model(), "delayed", fuse_norm=False)) == {}
    net = nn.Sequential(pair(), nn.RMSNorm(12))
    assert list(norm_module.norms_in(kp.fp8.convert(net, "delayed"))) == ["0.0"]


def test_hugging_faces_norm() -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama", reason="transformers is missing")
    net = kp.fp8.convert(pair(norm=modeling.LlamaRMSNorm(40, eps=1e-5)), "tensorwise")
    assert caster_of(net[0]).eps == "variance_epsilon"
    for eps in (1e-5, 0.25):
        net[0].variance_epsilon = eps  # the module's eps applies
        x = random(9, 40).requires_grad_()
        y = net[0](x)
        assert type(y.grad_fn).__name__ == "_NormBackward"
        exact = RMS_NORM.reference(x.detach().double(), None, eps)[0]
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_eps_that_torch_takes_for_none(dtype: torch.dtype) -> None:
    net = pair().to(dtype)
    for size in (1.0, 1e-3):
        x = random(5, 40, dtype=dtype) * size
        wanted = net[0](x)
        kp.fp8.convert(net, "tensorwise")
        torch.testing.assert_close(net[0](x), wanted)
        kp.fp8.revert(net)


# Fusion changes no result


@both_recipes
@pytest.mark.parametrize("norm", [nn.RMSNorm, Llama], ids=["nn", "llama"])
def test_training_has_the_same_bits_with_the_cast_and_without(
    recipe: str, norm: Callable[[int], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Including gradients, counts and histories, and a step in which everything is a hundred times larger."""
    found = []
    for cast in (True, False):
        net = kp.fp8.convert(model(norm=norm), recipe)
        if not cast:
            monkeypatch.setattr(CastingNorm, "request", lambda *_: None)
        losses = train(net, range(6), lambda n: 100.0 if n == 3 else 1.0)
        found.append((losses, everything(net)))
    assert found[0][0] == found[1][0]
    same(found[0][1], found[1][1])


@both_recipes
def test_layers_use_the_cast_of_a_norm(recipe: str, input_casts: list[tuple[int, ...]]) -> None:
    net = kp.fp8.convert(model(), recipe)
    train(net, range(1))
    assert input_casts == [(32, 24), (32, 32), (32, 16), (32, 32), (32, 32)]
    input_casts.clear()
    train(net, range(1, 3))
    assert input_casts == [(32, 24), (32, 16)] * 2


@both_recipes
def test_forward_and_gradients_equal_the_unfused_norm(recipe: str) -> None:
    found = []
    for fuse in (True, False):
        net = kp.fp8.convert(model(), recipe, fuse_norm=fuse)
        train(net, range(3))
        found.append(everything(net))
    for name, value in found[0].items():
        assert sqnr(value, found[1][name]) > 40 or torch.equal(value, found[1][name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 37, 40), (5, 40), (40,), (0, 40), (2, 0, 40)], ids=str)
@pytest.mark.parametrize("weight", [True, False])
def test_the_gradients_are_those_of_float64(dtype: torch.dtype, shape: tuple[int, ...], weight: bool) -> None:
    net = pair(norm=nn.RMSNorm(40, eps=1e-5, elementwise_affine=weight)).to(dtype)
    with torch.no_grad():
        if weight:
            net[0].weight.copy_(random(40, seed=1))
    kp.fp8.convert(net, "delayed")
    x, dy = random(*shape, dtype=dtype), random(*shape, seed=2, dtype=dtype)
    leaf = x.clone().requires_grad_()
    y = net[0](leaf)
    y.backward(dy)
    exact_x = x.double().requires_grad_()
    exact_w = net[0].weight.detach().double().requires_grad_() if weight else None
    exact = RMS_NORM.reference(exact_x, exact_w, 1e-5)[0]
    exact.backward(dy.double())
    rounding = torch.finfo(dtype).eps
    pairs = [
        (y, exact),
        (leaf.grad, exact_x.grad),
        *([(net[0].weight.grad, exact_w.grad)] if exact_w is not None else []),
    ]
    for found, truth in pairs:
        assert found.dtype == dtype
        assert found.shape == truth.shape
        if found.numel():
            assert (found.double() - truth).abs().max() <= 4 * rounding * truth.abs().max()


def test_non_finite_elements_and_rows_of_zeros() -> None:
    found = []
    for fuse in (True, False):
        net = kp.fp8.convert(pair(), "delayed", fuse_norm=fuse, monitor=None)
        for number in range(3):
            x = random(6, 40, seed=number)
            x[0, 0], x[1, 1], x[2] = math.inf, math.nan, 0
            y = net(x.requires_grad_())
        found.append((y.detach(), net[1].fp8_counts, net[1].fp8_state))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert found[0][1][0, 0, 2] == 3 * (1 + 40)
    assert found[0][0][:2].isnan().all()
    assert found[0][0][2:].isfinite().all()


def test_strided_inputs() -> None:
    net, plain = kp.fp8.convert(pair(), "tensorwise"), pair()
    for _ in range(2):
        for x in (random(40, 30).t(), random(60, 80)[::2, ::2], random(1, 40).expand(7, 40)):
            assert sqnr(net(x).detach(), plain(x).detach()) > 20


def test_a_hundredfold_is_redone_in_the_same_call() -> None:
    net, plain = kp.fp8.convert(pair(), "delayed"), pair()
    for number in range(3):
        net(random(30, 40, seed=number).requires_grad_()).sum().backward()
    for each in (net, plain):
        with torch.no_grad():
            each[0].weight.mul_(100)
    x = random(30, 40, seed=9)
    assert sqnr(net(x.clone().requires_grad_()).detach(), plain(x).detach()) > 20
    assert net[1].fp8_counts[0, 0, 0] > 500
    assert net[1].fp8_state[0, 0] == plain[0](x).abs().max()


def test_writing_y_in_place_discards_its_cast() -> None:
    net, plain = kp.fp8.convert(pair(), "delayed"), pair()
    for number in range(6):
        x = random(2, 15, 40, seed=number)
        found, exact = (each[1](each[0](x.clone().requires_grad_()).mul_(3)) for each in (net, plain))
        assert sqnr(found.detach(), exact.detach()) > 20
    assert caster_of(net[0]).layer() is None
    assert net[1].fp8_counts[0, 0, 3] == 6 * 1200


def test_an_outdated_request_is_dropped() -> None:
    net = kp.fp8.convert(pair(), "delayed")
    for _ in range(3):
        is_cast(net, random(9, 40))
    for _ in range(3):
        net[1](net[0](random(9, 40).requires_grad_()).mul_(3))
    assert caster_of(net[0]).layer() is None
    assert net[1].fp8_counts[0, 0, 3] == (3 + 1 + 3) * 360  # one was not used


# Calls left to torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    net, plain = (each.to(dtype) for each in (kp.fp8.convert(pair(), "delayed"), pair()))
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = random(30, 40, dtype=dtype)
            normal = [each[0](x.clone().requires_grad_()) for each in (net, plain)]
            assert normal[0].dtype == normal[1].dtype
            found, exact = (each[1](y).detach() for each, y in zip((net, plain), normal, strict=True))
        assert sqnr(found, exact) > 20


def test_a_weight_in_float32_before_16_bits() -> None:
    for norm, fused in ((nn.RMSNorm(40), True), (Llama(40), False)):
        net = kp.fp8.convert(pair(norm=norm), "tensorwise")
        net[1].to(torch.bfloat16)
        x = random(9, 40, dtype=torch.bfloat16).requires_grad_()
        y = net[0](x)
        assert y.dtype == (torch.bfloat16 if fused else torch.float32)
        assert (type(y.grad_fn).__name__ == "_NormBackward") == fused


def test_transformed_functions_see_torchs_own_operators() -> None:
    net = kp.fp8.convert(pair(), "tensorwise")
    x, tangent = random(9, 40), random(9, 40, seed=1)
    plain = pair()
    _, found = torch.func.jvp(net[0], (x,), (tangent,))
    _, exact = torch.func.jvp(plain[0], (x,), (tangent,))
    assert torch.equal(found, exact)
    assert torch.equal(torch.func.vmap(net[0])(x), torch.func.vmap(plain[0])(x))


def test_a_second_derivative_is_refused() -> None:
    net = kp.fp8.convert(pair(), "tensorwise")
    x = random(9, 40).requires_grad_()
    (gradient,) = torch.autograd.grad(net[0](x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="rms_norm has no second derivative"):
        gradient.sum().backward()


def test_meta_tensors() -> None:
    with torch.device("meta"):
        net = kp.fp8.convert(pair(), "delayed")
        assert net(torch.empty(3, 40)).shape == (3, 24)


# The prepared kernels of a GPU


@both_recipes
def test_triton_writes_counts_and_histories_in_place(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, without adding or copying tensors; here in the interpreter."""
    if not interpreting():
        pytest.skip("needs TRITON_INTERPRET=1")
    found = []
    with pretend("nvidia/h200"):
        for direct in (True, False):
            served = prepared_on_cpu(monkeypatch) if direct else []
            net = kp.fp8.convert(pair(), recipe)
            outputs = []
            for number in range(4):
                x = random(3, 11, 40, seed=number).requires_grad_()
                with torch.no_grad():
                    net[0].weight.mul_(50.0 if number == 2 else 1.0)
                y = net(x)
                y.sum().backward()
                outputs += [y.detach(), x.grad]
            assert (set(served) == {"fp8_cast", "fp8_rms_norm"}) == direct
            monkeypatch.undo()
            found.append((outputs, everything(net)))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(one, other)
    same(found[0][1], found[1][1])
    assert found[0][1]["1.counts"][0, 0, 3] == 4 * 33 * 40
    assert (found[0][1]["1.counts"][0, 0, 0] > 0) == (recipe == "delayed")


@both_recipes
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_on_a_device_training_has_the_same_bits_with_the_cast_and_without(
    recipe: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, with sizes that the matrix units take and rows that are not a multiple of a strip."""
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(320) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for each in self.blocks:
                x = each(x)
            return x

    found = []
    for cast in (True, False):
        torch.manual_seed(0)
        net = kp.fp8.convert(Wide().to(where, torch.bfloat16), recipe, monitor=None)
        if not cast:
            monkeypatch.setattr(CastingNorm, "request", lambda *_: None)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        outputs = []
        for number in range(5):
            x = random(3, 50, 320, seed=number, dtype=torch.bfloat16).to(where)
            with torch.no_grad():
                net.blocks[0].norm_1.weight.mul_(100.0 if number == 3 else 1.0)
            y = net(x)
            y.square().mean().backward()
            outputs += [y.detach(), *(p.grad.clone() for p in net.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        found.append((outputs, everything(net)))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(one, other)
    same(found[0][1], found[1][1])
    assert (found[0][1]["blocks.0.q.counts"][0, 0, 0] > 0) == (recipe == "delayed")
