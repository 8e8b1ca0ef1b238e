"""Recipes on a language model: one delegate, equal to the dequantized reference, with the accuracy the docs state."""

import copy

import pytest
import torch
import transformers

import kernel_pytorch as kp
from kernel_pytorch.lowering import CachedLanguageModel, KernelPartitioner, KernelQuantizer, PartitionerOptions
from kernel_pytorch.lowering.difference import difference
from kernel_pytorch.lowering.patterns import quantized_rows, quantized_weights
from kernel_pytorch.lowering.recipes import RECIPES, _by_quantize, find_recipe, quantized

OURS = "KernelPyTorchBackend"
QUANTIZED = "kernel_pytorch_lowering::quantized_linear"
WEIGHTS_ALONE = "kernel_pytorch_lowering::linear_int8"
# Decibels against the float model, at least, for random weights.
LEAST_SNR = {
    "int8-weight": 35,
    "int8-dynamic": 30,
    "int4-weight": 15,
    "int4-weight-64": 14,
    "int4-weight-128": 13,
}


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.mark.parametrize("recipe", LEAST_SNR)
def test_a_quantized_llama_stays_in_one_delegate(llama: torch.nn.Module, recipe: str) -> None:
    model = CachedLanguageModel(copy.deepcopy(llama), window=15, longest=8).eval()
    given = torch.arange(5)[None] * 7, torch.tensor([0])
    exact = copy.deepcopy(model)(*given)
    length = torch.export.Dim("length", min=1, max=8)
    program = kp.lower(model, given, recipe=recipe, dynamic_shapes=({1: length}, None))
    report = program.report
    assert [delegate.backend for delegate in report.delegates] == [OURS], report
    operator = WEIGHTS_ALONE if recipe == "int8-weight" else QUANTIZED
    assert report.count(OURS, operator) == 8, report  # q, k, v, o, gate, up, down and the head
    assert program.compare()[0].snr > 100  # against torchao's dequantized reference
    assert program.compare(torch.tensor([[3]]), torch.tensor([5]))[0].snr > 100  # a token after it
    (found,) = (program(*given),)
    assert difference(0, found, exact).snr > LEAST_SNR[recipe]


def test_every_recipe_without_calibration_is_tested() -> None:
    assert set(LEAST_SNR) == {name for name, recipe in RECIPES.items() if recipe.activations != "static"}


DOCUMENTED = {
    "int8-weight": 42,
    "int8-dynamic": 39,
    "int4-weight": 20.4,
    "int4-weight-64": 19.8,
    "int4-weight-128": 19.2,
}


@pytest.mark.parametrize("recipe", DOCUMENTED)
def test_the_accuracy_of_a_linear_is_the_documented_one(recipe: str) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(1024, 256, bias=False)), torch.randn(64, 1024)
    torch.nn.init.normal_(model[0].weight)
    quantized_model = _by_quantize(find_recipe(recipe), model)
    assert abs(difference(0, quantized_model(x), model(x)).snr - DOCUMENTED[recipe]) < 1


class Shared(torch.nn.Module):
    """Two linears with the same weights, on the same rows, with and without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 40), torch.nn.Linear(64, 40, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(self.first(x)) * self.second(x.transpose(0, 1)).transpose(0, 1)


def test_what_pt2e_makes_is_taken_too() -> None:
    from executorch.exir import to_edge_transform_and_lower
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    torch.manual_seed(0)
    model, x = Shared().eval(), torch.randn(1, 3, 64)
    with torch.no_grad():
        prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), KernelQuantizer("int8-dynamic"))
        prepared(x)
        converted = convert_pt2e(prepared)
        exact = converted(x)
        made = to_edge_transform_and_lower(torch.export.export(converted, (x,)), partitioner=[KernelPartitioner()])
    delegated = next(made.exported_program().graph_module.named_children())[1].original_module.graph
    names = [str(node.target) for node in delegated.nodes]
    assert sum("quantized_linear" in name for name in names) == 2, names
    found = kp.load(bytes(made.to_executorch().buffer))(x)
    assert difference(0, found, exact).snr > 30  # a range for each row, and PT2E's for all of them


def test_options_leave_quantized_linears_to_xnnpack() -> None:
    model, x = Shared().eval(), torch.randn(1, 3, 64)
    program = kp.lower(model, (x,), recipe="int8-dynamic", options=PartitionerOptions(linears=False))
    assert program.report.count("XnnpackBackend", "aten::linear") == 2, program.report
    assert program.compare()[0].snr > 40


def test_narrow_groups_are_refused_with_the_layer_and_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"recipe='int4-weight-128': first has 64 inputs, .*: use a smaller group"):
        kp.lower(Shared().eval(), (torch.randn(1, 3, 64),), recipe="int4-weight-128")


def test_patterns_name_the_rows_and_the_weights() -> None:
    programs, _ = quantized(find_recipe("int4-weight"), Shared().eval(), {"forward": (torch.randn(2, 3, 64),)}, {})
    nodes = list(programs["forward"].graph.nodes)
    linears = [node for node in nodes if node.target is torch.ops.aten.linear.default]
    assert [quantized_rows(linear.args[0]).name for linear in linears] == ["x", "transpose"]
    weights = [quantized_weights(linear.args[1]) for linear in linears]
    assert [(own.bits, own.group, own.data.meta["val"].shape) for own in weights] == [(4, 32, (40, 64))] * 2
    assert quantized_rows(linears[0].args[1]) is None
    assert quantized_weights(linears[0].args[0]) is None
    assert quantized_rows(nodes[0]) is quantized_weights(nodes[0]) is None
    # Rows that are not quantized by their own range are not taken.
    chosen = next(node for node in nodes if "choose_qparams" in str(node.target))
    chosen.args = (chosen.args[0], "SYMMETRIC", *chosen.args[2:])
    assert quantized_rows(linears[0].args[0]) is None
