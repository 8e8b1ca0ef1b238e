"""Coverage and report of converted models: modules that are not covered, grouping, width, the HTML page."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional

import kernel_pytorch as kp
from kernel_pytorch.fp8.conversion import group_names
from kernel_pytorch.fp8.module import Float8Linear

pytestmark = pytest.mark.usefixtures("one_thread", "own_monitors")


class Conv1D(nn.Module):
    """Like Hugging Face's, for GPT-2."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 32, 16))
        self.down_proj = nn.Parameter(torch.randn(4, 16, 32))


class TopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight)


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return y


UNCOVERED = {
    "Conv1D": (lambda: Conv1D(16, 16), "Conv1D stores the transposed weight: use nn.Linear with conv.weight.T"),
    "experts": (Experts, "Experts holds the weights of all experts as 3-D parameters: no FP8 grouped GEMM yet"),
    "router": (TopKRouter, "TopKRouter routes tokens to experts: a small GEMM"),
    "recurrent": (lambda: nn.LSTM(16, 16), "LSTM runs a recurrent kernel of its own"),
}


@pytest.mark.parametrize(("make", "reason"), UNCOVERED.values(), ids=UNCOVERED)
def test_modules_with_their_own_matmuls_are_listed(make: Callable[[], nn.Module], reason: str) -> None:
    model = nn.ModuleDict({"linear": nn.Linear(64, 64), "other": make()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kp.fp8.convert(model, "delayed")
    report = kp.fp8.report(model)
    assert list(report.not_covered) == ["other"]
    assert report.not_covered["other"].startswith(reason)
    assert re.match(r"1 of 2 linear layers in FP8, \d\d % of matmul parameters, 0 fell back$", report.summary)


def test_embeddings_norms_and_convolutions_are_not_linear_layers() -> None:
    parts = [nn.Embedding(64, 16), nn.LayerNorm(16), nn.Conv1d(16, 16, 3), nn.Linear(16, 16)]
    model = kp.fp8.convert(nn.ModuleList(parts), "delayed")
    assert kp.fp8.report(model).not_covered == {}


def test_less_than_half_of_the_parameters_is_warned_about() -> None:
    model = nn.ModuleDict({"head": nn.Linear(16, 32), **{f"c_{n}": Conv1D(16, 16) for n in range(3)}})
    with pytest.warns(
        UserWarning, match=r"model: only 40 % of its matmul parameters .*; c_0, c_1, c_2 \(Conv1D sto"
    ):
        kp.fp8.convert(model, "delayed")
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(64, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kp.fp8.convert(model, "delayed", layers=lambda name, _: name == "0")  # the user's own choice


@pytest.mark.parametrize("name", ["GPT2", "Mixtral", "Qwen3Moe"])
def test_hugging_face_models_are_reported_in_full(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    more = {
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0},
        "Mixtral": {**sizes, "num_local_experts": 4},
        "Qwen3Moe": {**sizes, "num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16},
    }
    config = getattr(transformers, f"{name}Config")(**more[name])
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
    with (
        contextlib.nullcontext() if name == "GPT2" else pytest.warns(UserWarning, match=r"only \d+ % of its matmul")
    ):
        kp.fp8.convert(model, "delayed")
    report = kp.fp8.report(model)
    covered = {layer.name for layer in report.layers} | set(report.not_covered)
    matmuls = {
        module
        for module, found in model.named_modules()
        if any(p.dim() > 1 for p in found.parameters(recurse=False)) and not isinstance(found, nn.Embedding)
    }
    assert covered == matmuls


def test_quantized_weights_are_refused() -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    quantization.quantize_(model[0], quantization.Int8WeightOnlyConfig())
    kept = type(model[0].weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kp.fp8.convert(model, "delayed")
    assert type(model[1]) is Float8Linear
    assert type(model[0]) is nn.Linear
    assert type(model[0].weight) is kept
    assert "quantized or computed already: FP8 training needs a plain" in kp.fp8.report(model).not_covered["0"]
    model(torch.randn(4, 64)).sum().backward()


def test_a_weight_quantized_after_the_conversion_is_refused_by_name() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = kp.fp8.convert(nn.Sequential(nn.Linear(32, 32)), "delayed")
    x = torch.randn(4, 32)
    model(x)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    with pytest.raises(TypeError, match=r"kp\.fp8\.convert has converted: its weight is a \w+, which is quantized"):
        model(x)


@pytest.mark.parametrize("swiglu", [False, True])
def test_tensor_parallel_weights_are_refused_by_name(swiglu: bool) -> None:
    model: nn.Module = SwiGLU() if swiglu else nn.Sequential(nn.Linear(16, 16))
    kp.fp8.convert(model, "delayed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        plan = {name: ColwiseParallel() for name, layer in model.named_children() if isinstance(layer, nn.Linear)}
        parallelize_module(model, mesh, plan)
        with pytest.raises(TypeError, match=r"its weight is a DTensor: .* \(parallelize_module\) is not supported"):
            model(torch.randn(4, 16))
    finally:
        dist.destroy_process_group()


def test_frozen_weights_have_no_weight_gradient() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    model[0].requires_grad_(False)
    kp.fp8.convert(model, "delayed")
    frozen, trained = kp.fp8.report(model).layers
    assert frozen.products == {"y": "fp8", "dx": "fp8", "dW": "-"}
    assert frozen.notes == ("the weight is frozen: no weight gradient",)
    assert trained.products == {"y": "fp8", "dx": "fp8", "dW": "fp8"}


def test_low_rank_adapters_are_noted() -> None:
    model = nn.ModuleDict({"base": nn.Linear(256, 256), "lora_A": nn.Linear(256, 8), "lora_B": nn.Linear(8, 256)})
    kp.fp8.convert(model, "delayed")
    notes = {layer.name: layer.notes for layer in kp.fp8.report(model).layers}
    advice = ("rank 8 is too small to gain from FP8: leave it out with layers=",)
    assert notes == {"base": (), "lora_A": advice, "lora_B": advice}


# Layout


@pytest.mark.parametrize(
    ("names", "grouped"),
    [
        (["a", "b"], ["a", "b"]),
        (["h.0.up", "h.0.down", "h.1.up", "h.1.down"], ["h.0-1.up", "h.0-1.down"]),
        (["h.0", "h.1", "h.3", "h.7"], ["h.{0-1,3,7}"]),
        ([f"h.{i}.e.{j}.w1" for i in range(3) for j in range(4)], ["h.0-2.e.0-3.w1"]),
        (["h.0.e.0", "h.0.e.1", "h.1.e.0"], ["h.0.e.0-1", "h.1.e.0"]),
        (["c_1", "conv2.0"], ["c_1", "conv2.0"]),
        (["0", "1", "2"], ["0-2"]),
        (["the model itself"], ["the model itself"]),
    ],
)
def test_names_are_grouped_by_index(names: list[str], grouped: list[str]) -> None:
    assert group_names(names) == grouped


def deep_model() -> nn.Module:
    def layer() -> nn.Module:
        long_name = "a_projection_with_a_very_long_name_that_fills_more_than_half_of_a_whole_line_of_text"
        return nn.ModuleDict({"up_proj": nn.Linear(16, 32), long_name: nn.Linear(32, 16)})

    return nn.ModuleDict({"layers": nn.ModuleList(layer() for _ in range(12)), "head": nn.Linear(16, 16)})


def test_repeated_layers_are_one_row_and_lines_fit() -> None:
    model = kp.fp8.convert(deep_model(), "delayed", layers=lambda name, _: name != "head")
    model["layers"][3]["up_proj"](torch.full((4, 16), torch.nan))
    report = kp.fp8.report(model)
    assert [(group.name.split(".")[-1][:7], group.count) for group in report.groups] == [
        ("up_proj", 12),
        ("a_proje", 12),
    ]
    assert report.groups[0].name == "layers.0-11.up_proj"
    assert report.groups[0].nonfinite == 64
    lines = str(report).splitlines()
    assert lines[0] == "24 of 25 linear layers in FP8, 97 % of matmul parameters, 0 fell back"
    assert lines[1] == "not covered: head (not selected by layers=, or added later)"
    assert len(lines) == 7
    assert max(map(len, lines)) <= 100


def test_layers_that_differ_are_rows_of_their_own() -> None:
    model = kp.fp8.convert(deep_model(), "delayed")
    model["layers"][5]["up_proj"].fp8_fallback = "a test"
    report = kp.fp8.report(model)
    names = [group.name for group in report.groups if group.name.endswith("up_proj")]
    assert names == ["layers.{0-4,6-11}.up_proj", "layers.5.up_proj"]
    assert report.summary.startswith("24 of 25 linear layers in FP8")
    assert report.summary.endswith("1 fell back")


def test_auto_on_a_device_without_matrix_units_is_not_fp8() -> None:
    model = kp.fp8.convert(nn.Sequential(nn.Linear(16, 16)), "auto")
    assert kp.fp8.report(model).summary == "0 of 1 linear layers in FP8, 0 % of matmul parameters, 0 fell back"


def test_a_page_is_written(tmp_path: Path) -> None:
    model = nn.ModuleDict({"<b>": nn.Linear(16, 16), "odd": Experts()})
    with pytest.warns(UserWarning, match="matmul parameters"):
        report = kp.fp8.report(kp.fp8.convert(model, "delayed"))
    text = report.save(tmp_path / "r.html").read_text(encoding="utf-8")
    assert report.summary in text
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert "3-D parameters" in text
    assert "width=device-width" in text
    assert not re.search(r"(src|href)=|@import|url\(", text)  # self-contained
    with pytest.raises(ValueError, match=r"path='r.txt': use a name that ends in .html"):
        report.save("r.txt")
