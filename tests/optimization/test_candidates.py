"""The candidates one by one: what they compute, what they match, and what they refuse with which reason."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import kernel_pytorch as kp
from kernel_pytorch.optimization import Candidate, Context, Edits, Sites, Stage, candidate, registered_candidates
from kernel_pytorch.optimization.candidates import attention, fp8, memory, norms, others, precision
from kernel_pytorch.optimization.candidates import linear_cross_entropy as fused
from kernel_pytorch.optimization.combinations import build
from kernel_pytorch.optimization.compiler import compile_in_place
from kernel_pytorch.optimization.examples import examples_of
from optimization_fakes import ScriptedTimer, rewrite, unchanged
from optimization_models import model_of

CPU = Context("latency", torch.device("cpu"), ())


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("elements", "widths"), [(1 << 25, 2), (40, 2), (40, 0), (1, 0)], ids=["whole", "chunks", "blocks", "rows"]
)
def test_chunked_cross_entropy_has_the_loss_and_gradients_of_whole_logits(
    dtype: torch.dtype, elements: int, widths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_CHUNK_ELEMENTS", elements)
    monkeypatch.setattr(fused, "_ROWS_PER_WIDTH", widths)
    target = torch.tensor([1, -100, 3, 12, 0, -100, 7])

    def run(kind: torch.dtype, loss: Any) -> list[torch.Tensor]:
        x = drawn(7, 16).to(dtype).to(kind).requires_grad_()
        weight = drawn(13, 16, seed=1).to(dtype).to(kind).requires_grad_()
        total = loss(x, weight)
        (total * 0.25).backward()
        return [total.detach(), x.grad, weight.grad]

    def whole(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(x, weight)
        return functional.cross_entropy(
            logits if logits.dtype is torch.float64 else logits.float(), target, reduction="sum"
        )

    truth = run(torch.float64, whole)
    plain = run(dtype, whole)
    found = run(dtype, lambda x, weight: fused.linear_cross_entropy(x, weight, target))
    for exact, one, mine in zip(truth, plain, found, strict=True):
        assert mine.dtype == one.dtype
        error, allowed = ((value.double() - exact).abs().max() for value in (mine, one))
        assert error <= 2 * (allowed + torch.finfo(dtype).eps * exact.abs().max())


def test_the_gradients_are_those_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_CHUNK_ELEMENTS", 12)
    monkeypatch.setattr(fused, "_ROWS_PER_WIDTH", 1)
    x, weight = (drawn(*shape, dtype=torch.float64).requires_grad_() for shape in ((5, 4), (6, 4)))
    target = torch.tensor([0, 5, -100, 2, 2])
    assert torch.autograd.gradcheck(lambda *given: fused.linear_cross_entropy(*given, target), (x, weight))


def test_only_wanted_gradients_are_computed() -> None:
    x, weight = drawn(3, 8).requires_grad_(), drawn(5, 8, seed=1)
    fused.linear_cross_entropy(x, weight, torch.tensor([0, 1, 2])).backward()
    assert x.grad is not None
    with torch.no_grad():
        assert fused.linear_cross_entropy(x, weight, torch.tensor([0, 1, 2])).ndim == 0


class Gemma(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(8)), 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class Almost(Gemma):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1e-2


def test_norms_are_recognised_by_what_they_compute() -> None:
    assert norms.recognised(Gemma()) == norms.Norm(1e-5, 1.0)
    assert norms.recognised(nn.RMSNorm(8, eps=1e-6)) == norms.Norm(1e-6, 0.0)
    for other in (Almost(), nn.RMSNorm(8), nn.RMSNorm((2, 8), eps=1e-6), nn.LayerNorm(8), nn.Linear(8, 8)):
        assert norms.recognised(other) is None
    training = Gemma().train()
    norms.recognised(training)
    assert training.training


def test_int8_has_the_error_of_eight_bits_and_follows_the_weight() -> None:
    layer, edits = nn.Linear(128, 64), Edits()
    precision.INT8_LINEAR.apply(layer, ("",), edits)
    x = drawn(9, 128)
    with torch.no_grad():
        found = layer(x)
        edits.undo()
        expected = layer(x)
        edits.redo()
        assert 0 < (found - expected).norm() / expected.norm() < 0.02
        layer.weight.mul_(2)
        assert torch.allclose(layer(x) - layer.bias, 2 * (found - layer.bias), rtol=1e-3, atol=1e-3)
        assert layer(drawn(0, 128)).shape == (0, 64)


def test_checkpointing_is_for_lists_of_equal_blocks() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    found = memory.ACTIVATION_CHECKPOINTING.match(nn.ModuleList([block(), block()]), CPU)
    assert isinstance(found, Sites)
    assert found.names == ("0", "1")
    reason = memory.ACTIVATION_CHECKPOINTING.match(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), CPU)
    assert reason == "the model has no list of equal blocks"


def test_every_candidate_gives_a_reason_on_a_model_that_it_does_not_fit() -> None:
    model = nn.Tanh()
    for one in registered_candidates():
        found = one.match(model, CPU)
        assert isinstance(found, Sites) or (found and "\n" not in found), one.name
        if not isinstance(found, Sites):
            continue
        assert found.names == ("",), one.name  # compilers take any model


def test_libraries_that_are_not_installed_are_named() -> None:
    reasons = {one.name: one.match(nn.Linear(8, 8), CPU) for one in registered_candidates()}
    assert "pip install" in str(reasons["liger-rms-norm"])
    assert "GPUs only" in str(reasons["torchao-float8"]) or "pip install torchao" in str(reasons["torchao-float8"])


def test_a_third_party_adds_candidates_through_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = rewrite("mine", unchanged)
    entries = {"good": [mine], "taken": rewrite("rms-norm", unchanged), "broken": ["words"]}

    class Entry:
        def __init__(self, name: str) -> None:
            self.name = name

        def load(self) -> Any:
            return entries[self.name]

    installed = importlib.metadata.entry_points

    def entry_points(**selection: Any) -> Any:
        ours = selection.get("group") == candidate.ENTRY_POINTS
        return [Entry(name) for name in entries] if ours else installed(**selection)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    candidate._installed.cache_clear()
    try:
        assert mine in registered_candidates()
        report = kp.optimize(nn.Linear(8, 8), (drawn(2, 8),), exclude=("compile",), timer=ScriptedTimer()).report
    finally:
        monkeypatch.undo()
        candidate._installed.cache_clear()
    assert [step.candidate for step in report.steps] == ["mine"] or "mine" in str(report)
    reasons = {refusal.candidate: refusal.reason for refusal in report.refusals}
    assert reasons["taken"] == "entry point failed: ValueError: there is a candidate 'rms-norm' already"
    assert reasons["broken"] == "entry point failed: TypeError: 'words' is not a Candidate"


def test_a_candidate_checks_its_fields() -> None:
    with pytest.raises(ValueError, match="name='Not Good'"):
        rewrite("Not Good", unchanged)
    with pytest.raises(ValueError, match="kind='sloppy' of candidate mine"):
        Candidate("mine", "", "sloppy", Stage.MODULE, lambda *_: "", lambda *_: None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"goals=\['fame'\] of candidate mine"):
        rewrite("mine", unchanged, goals=frozenset({"fame"}))


def test_fresh_values_keep_what_has_a_meaning() -> None:
    ids = torch.tensor([[5, 3, 9, 3]])
    given = {
        "input_ids": ids,
        "attention_mask": torch.tensor([[1, 1, 1, 0]]),
        "position_ids": torch.arange(4)[None],
        "x": drawn(2, 50).abs(),
        "bias": torch.tensor([[0.0, float("-inf")]]),
        "flag": True,
    }
    (example,) = examples_of(given)
    fresh = example.redrawn(1).kwargs
    assert not torch.equal(fresh["input_ids"], ids)
    assert fresh["input_ids"].sort().values.tolist() == ids.sort().values.tolist()
    for name in ("attention_mask", "position_ids", "bias"):
        assert torch.equal(fresh[name], given[name])
    assert float(fresh["x"].min()) >= 0
    assert not torch.equal(fresh["x"], given["x"])


@pytest.mark.parametrize("one", [fp8.FP8_TRAINING, fp8.FP8_TRAINING_DELAYED], ids=lambda one: one.name)
def test_fp8_training_is_applied_and_taken_back(one: Candidate) -> None:
    model, edits, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), Edits(), drawn(16, 64)
    reason = one.match(model, Context("training", torch.device("cpu"), ()))
    assert "8-bit matrix units" in str(reason)
    before, attributes, state = model(x), dict(vars(model)), set(model.state_dict())
    one.apply(model, ("0",), edits)
    assert type(model[0]) is not nn.Linear
    assert type(model[2]) is nn.Linear
    added = {name.rpartition(".")[2] for name in set(model.state_dict()) - state}
    assert added <= one.adds_state
    model(x).sum().backward()
    edits.undo()
    assert type(model[0]) is nn.Linear
    assert set(model.state_dict()) == state
    assert vars(model).keys() == attributes.keys()
    assert torch.equal(model(x), before)


def test_torchao_swaps_layers_and_gives_them_back() -> None:
    pytest.importorskip("torchao")
    model, edits = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), Edits()
    first, weight = model[0], model[0].weight
    others.TORCHAO_FLOAT8.apply(model, ("0",), edits)
    assert model[0] is not first
    assert model[0].weight is weight
    assert type(model[1]) is nn.Linear
    edits.undo()
    assert model[0] is first
    edits.redo()
    assert model[0] is not first
    edits.undo()
    assert model[0] is first


def test_only_a_sliding_window_needs_no_mask_tensor() -> None:
    pytest.importorskip("transformers")
    from types import SimpleNamespace

    given = {"batch_size": 1, "q_length": 6, "kv_length": 6, "q_offset": 0, "kv_offset": 0}
    window = SimpleNamespace(sliding_window=3)
    assert attention._mask(local_size=3, config=window, **given) is None
    assert attention._mask(local_size=3, config=window, allow_is_causal_skip=False, **given) is not None
    chunked = SimpleNamespace(sliding_window=None, attention_chunk_size=3)
    assert attention._mask(local_size=3, config=chunked, **given) is not None
    padded = {**given, "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]], dtype=torch.bool)}
    assert attention._mask(local_size=3, config=window, **padded) is not None
    later = {**given, "kv_length": 8, "q_offset": 2}
    assert attention._mask(local_size=3, config=window, **later) is not None


@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_compiled_models_need_no_mask_tensor(name: str) -> None:
    pytest.importorskip("transformers")
    model, inputs = model_of(name)
    given = {"input_ids": inputs["input_ids"]}
    with torch.no_grad():
        expected = model.eval()(**given)[0]
        attention.HF_ATTENTION.apply(model, ("",), Edits())
        graphs: list[Any] = []

        def keep(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph

        found = torch.compile(model, backend=keep, fullgraph=True)(**given)[0]
    assert torch.allclose(found, expected, atol=1e-4)
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("kernel_pytorch.attention" in one for one in names) == 2
    assert not any("scaled_dot_product_attention" in one for one in names)


def test_a_compiled_training_step_is_one_graph() -> None:
    pytest.importorskip("transformers")
    model, inputs = model_of("llama")
    expected = model.train()(**inputs).loss
    context = Context("training", torch.device("cpu"), ())
    known = {one.name: one for one in registered_candidates()}
    steps = []
    for name in ("hf-attention", "rms-norm", "rope", "chunked-cross-entropy"):
        found = known[name].match(model, context)
        assert isinstance(found, Sites)
        steps.append((known[name], found.names))
    edits = build(model, steps)
    compile_in_place(model, edits, backend="aot_eager", fullgraph=True)
    loss = model(**inputs).loss
    loss.backward()
    assert torch.allclose(loss, expected, rtol=1e-5)


def test_float16_is_for_gpus_and_gives_float32_outputs() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    assert "CPUs gain nothing" in str(precision.FLOAT16_AUTOCAST.match(model, CPU))
    x = drawn(4, 64)
    with torch.no_grad():
        expected = model(x)
        build(model, [(precision.FLOAT16_AUTOCAST, ("",))])
        found = model(x)
    assert found.dtype is torch.float32
    assert 0 < float((found - expected).abs().max()) < 2e-3


@pytest.mark.parametrize("one", [precision.BF16_LINEAR, precision.INT8_LINEAR])
def test_the_transposed_layers_of_gpt2_are_served(one: Candidate) -> None:
    pytest.importorskip("transformers")
    model, inputs = model_of("gpt2")
    found = one.match(model.eval(), CPU)
    assert isinstance(found, Sites)
    assert "transformer.h.0.attn.c_attn" in found.names
    with torch.no_grad():
        expected = model(inputs["input_ids"]).logits
        build(model, [(one, found.names)])
        now = model(inputs["input_ids"]).logits
    assert 0 < float((now - expected).norm() / expected.norm()) < 0.05
