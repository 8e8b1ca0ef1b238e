"""Candidates that call functions of libraries, with stand-ins for those that need a GPU."""

from __future__ import annotations

import copy
import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import kernel_pytorch as kp
from kernel_pytorch.ops.rope.definition import ROPE as DEFINITION
from kernel_pytorch.optimization import Context, Edits, Sites
from kernel_pytorch.optimization.candidates import fp8, liger, norms, others, rotary
from kernel_pytorch.optimization.candidates.linear_cross_entropy import linear_cross_entropy
from optimization_fakes import ScriptedTimer
from optimization_models import model_of

GPU = Context("training", torch.device("cuda"), ())


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The functions of Liger that candidates call, in plain torch; records which were called."""
    calls: list[str] = []

    def named(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return call

    def rms_norm(x: Any, weight: Any, eps: float, offset: float, mode: str, in_place: bool) -> Any:
        assert mode == ("gemma" if offset else "llama")
        assert not in_place
        return functional.rms_norm(x, (x.shape[-1],), weight + offset, eps)

    def loss(x: Any, weight: Any, target: Any, *, ignore_index: int, reduction: str) -> Any:
        assert reduction == "sum"
        return linear_cross_entropy(x, weight, target, ignore_index=ignore_index)

    functions = {
        "liger_rms_norm": rms_norm,
        "liger_swiglu": lambda gate, up: functional.silu(gate) * up,
        "liger_geglu": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
        "liger_rope": lambda q, k, cos, sin: DEFINITION.reference(q, k, cos, sin, False),
        "liger_fused_linear_cross_entropy": loss,
    }
    module = ModuleType("functional")
    for name, function in functions.items():
        setattr(module, name, named(name, function))
    monkeypatch.setattr(liger, "_liger", lambda: module)
    monkeypatch.setattr(liger, "unusable", lambda *_: None)
    return SimpleNamespace(calls=calls)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_all_of_liger_is_verified_in_one_plan(name: str, library: SimpleNamespace) -> None:
    pytest.importorskip("transformers")
    model, inputs = model_of(name)
    include = ("liger-rms-norm", "liger-swiglu", "liger-rope", "liger-cross-entropy")
    best = kp.optimize(model, inputs, "training", include=include, timer=ScriptedTimer(), resume=False)
    assert {step.candidate for step in best.plan.steps} == set(include), str(best.report)
    assert all(step.error is not None and step.error <= 1 for step in best.plan.steps)
    library.calls.clear()
    best.train()(**inputs)
    layers = 2
    mlp = "liger_swiglu" if name == "llama" else "liger_geglu"
    assert library.calls.count("liger_rms_norm") == 2 * layers + 1
    assert library.calls.count("liger_rope") == library.calls.count(mlp) == layers
    assert library.calls.count("liger_fused_linear_cross_entropy") == 1
    library.calls.clear()
    best.revert()(**inputs)
    assert not library.calls


def test_candidates_of_liger_ask_for_a_gpu_and_the_library() -> None:
    for one in (liger.LIGER_RMS_NORM, liger.LIGER_GATED_MLP, liger.LIGER_ROPE, liger.LIGER_CROSS_ENTROPY):
        reason = str(one.match(nn.Linear(8, 8), Context("training", torch.device("cpu"), ())))
        assert "pip install liger-kernel" in reason or "GPUs only" in reason


class Gated(nn.Module):
    def __init__(self, activation: Any = functional.silu, bias: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 12, bias), nn.Linear(8, 12, bias), nn.Linear(12, 8, bias)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.activation(self.two(x)) * self.one(x))


def test_gated_mlps_are_recognised_by_what_they_compute() -> None:
    assert liger.gated_roles(Gated()) == ("liger_swiglu", "two", "one", "three")
    tanh = Gated(lambda x: functional.gelu(x, approximate="tanh"))
    assert liger.gated_roles(tanh) == ("liger_geglu", "two", "one", "three")
    hooked = Gated()
    hooked.one.register_forward_hook(lambda *_: None)
    for other in (Gated(functional.relu), Gated(bias=True), hooked, nn.Sequential(nn.Linear(8, 8))):
        assert liger.gated_roles(other) is None


def test_norms_of_other_libraries_get_the_weight_and_the_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def rmsnorm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        seen.append((tuple(x.shape), weight.dtype, eps))
        return functional.rms_norm(x, (8,), weight, eps)

    quack = ModuleType("quack")
    quack.rmsnorm = rmsnorm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quack", quack)
    model, edits, x = nn.RMSNorm(8, eps=1e-5), Edits(), drawn(2, 3, 8)
    expected = model(x)
    others.QUACK_RMS_NORM.apply(model, ("",), edits)
    assert torch.allclose(model(x), expected, atol=1e-6)
    assert seen == [((6, 8), torch.float32, 1e-5)]
    edits.undo()
    assert torch.equal(model(x), expected)
    assert norms.recognised(model) == norms.Norm(1e-5, 0.0)


def watched(q: Any, k: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    SEEN.append(interleaved)
    return kp.rope(q, k, cos, sin, interleaved=interleaved)


SEEN: list[bool] = []


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "mistral", "modernbert"])
def test_rotary_embedding_is_replaced_in_one_model_alone(name: str) -> None:
    pytest.importorskip("transformers")
    model, inputs = model_of(name)
    other, _ = model_of(name)
    found = rotary.ROPE.match(model, GPU)
    assert isinstance(found, Sites), found
    file = sys.modules[type(model.get_submodule(found.names[0])).__module__]
    before, edits = vars(file)["apply_rotary_pos_emb"], Edits()
    expected = model.eval()(**inputs)[0]
    rotary.apply_rotation(watched, model, found.names, edits)
    SEEN.clear()
    out = model(**inputs)[0]
    assert [False] * len(found.names) == SEEN
    assert torch.allclose(out, expected, atol=1e-4)
    assert torch.equal(copy.deepcopy(model)(**inputs)[0], out)
    assert torch.equal(pickle.loads(pickle.dumps(model))(**inputs)[0], out)
    SEEN.clear()
    other.eval()(**inputs)
    assert not SEEN
    assert vars(file)["apply_rotary_pos_emb"] is before
    edits.undo()
    assert torch.equal(model(**inputs)[0], expected)
    assert not SEEN


def test_rotary_embedding_is_replaced_under_compile_too() -> None:
    pytest.importorskip("transformers")
    model, inputs = model_of("llama")
    del inputs["labels"]
    model.eval()
    expected = model(**inputs)[0]
    rotary.ROPE.apply(model, rotary.ROPE.match(model, GPU).names, Edits())  # type: ignore[union-attr]
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    found = torch.compile(model, backend=keep, fullgraph=True)(**inputs)[0]
    assert torch.allclose(found, expected, atol=1e-4)
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("kernel_pytorch.rope" in name for name in names) == 2


def test_only_rotations_that_kp_rope_computes_are_replaced() -> None:
    def turned(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return DEFINITION.reference(q, k, cos, sin, True)

    def other(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return q * cos.unsqueeze(1), k * cos.unsqueeze(1)

    assert rotary._interleaved(turned) is True
    assert rotary._interleaved(other) is None
    assert rotary._interleaved(lambda q: q) is None
    assert rotary.ROPE.match(nn.Linear(8, 8), GPU) == "the model has no module that calls apply_rotary_pos_emb"


def test_fp8_linear_has_the_error_of_eight_bits_and_follows_the_weight() -> None:
    layer, edits = nn.Linear(128, 64).to(torch.bfloat16), Edits()
    x = drawn(3, 7, 128).to(torch.bfloat16)
    expected = layer(x)
    fp8.FP8_LINEAR.apply(layer, ("",), edits)
    with pytest.warns(UserWarning, match="records gradients"):
        assert torch.equal(layer(x), expected)  # records gradients: in full precision
    with torch.no_grad():
        found = layer(x)
        assert found.shape == expected.shape
        assert 0 < (found - expected).float().norm() / expected.float().norm() < 0.05
        layer.weight.mul_(2)
        assert torch.allclose(layer(x) - layer.bias, 2 * (found - layer.bias), rtol=0.02, atol=0.02)
        assert layer(x[:0]).shape == (0, 7, 64)
    reason = fp8.FP8_LINEAR.match(layer, Context("latency", torch.device("cpu"), ()))
    assert "8-bit matrix units" in str(reason)


def test_attention_of_a_plan_leaves_the_public_name_alone() -> None:
    transformers = pytest.importorskip("transformers")
    public = transformers.AttentionInterface()["kernel_pytorch"]
    model, inputs = model_of("llama")
    kp.optimize(model, inputs, include=("hf-attention",), timer=ScriptedTimer(), resume=False)
    assert model.config._attn_implementation == "kernel_pytorch_plan"
    assert transformers.AttentionInterface()["kernel_pytorch"] is public


def test_rotary_embedding_under_autocast_is_left_to_the_model() -> None:
    pytest.importorskip("transformers")
    model, inputs = model_of("llama")
    expected, edits = {}, Edits()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**inputs).past_key_values.layers[0].keys
        rotary.ROPE.apply(model, rotary.ROPE.match(model, GPU).names, edits)  # type: ignore[union-attr]
        assert torch.equal(model(**inputs).past_key_values.layers[0].keys, expected)  # promoted to float32
    assert expected.dtype is torch.float32


@pytest.mark.parametrize("one", others.FLASH_ATTENTION, ids=lambda one: one.name)
def test_flash_attention_is_a_name_in_the_configuration(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    model, edits = model_of("llama")[0], Edits()
    assert "pip install" in str(one.match(model, GPU))
    monkeypatch.setattr(others, "unusable", lambda *_: None)
    assert "other parameters" in str(one.match(model, GPU)) or "another version" in str(one.match(model, GPU))
    monkeypatch.setattr(others, "_installed", lambda _: True)
    found = one.match(model.to(torch.bfloat16), GPU)
    assert isinstance(found, Sites)
    one.apply(model, found.names, edits)
    assert model.config._attn_implementation == one.name.replace("-", "_")
    edits.undo()
    assert model.config._attn_implementation == "sdpa"


def test_the_functions_of_liger_take_what_the_candidates_pass() -> None:
    pytest.importorskip("liger_kernel")
    import inspect

    functions = liger._liger()
    for name, args, kwargs in (
        ("liger_rms_norm", 6, ()),
        ("liger_layer_norm", 4, ()),
        ("liger_swiglu", 2, ()),
        ("liger_geglu", 2, ()),
        ("liger_rope", 4, ()),
        ("liger_fused_linear_cross_entropy", 3, ("ignore_index", "reduction")),
    ):
        inspect.signature(getattr(functions, name)).bind(*[None] * args, **dict.fromkeys(kwargs))
