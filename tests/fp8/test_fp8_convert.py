"""kp.fp8.convert: whole models in FP8 against the originals; copies, ranks, the report."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import kernel_pytorch as kp
from fp8_models import block, every_recipe, is_fused, linear, lossy, random, results, same, sqnr, train
from kernel_pytorch.fp8 import monitor as monitor_module
from kernel_pytorch.fp8.module import BUFFERS, Float8Linear
from kernel_pytorch.fp8.recipe import PRODUCTS, RECIPES, Recipe
from kernel_pytorch.testing import pretend

pytestmark = pytest.mark.usefixtures("one_thread", "own_monitors")


# Converting and reverting


@pytest.mark.parametrize("recipe", ["auto", *RECIPES])
def test_parameters_and_their_names_stay(recipe: str) -> None:
    model = block()
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    assert kp.fp8.convert(model, recipe) is model
    assert {name: id(p) for name, p in model.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    assert list(model.state_dict()) == keys
    linears = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    results(model, random(7, 24))
    delayed = recipe != "auto" and RECIPES[recipe].delayed  # auto leaves layers on a CPU in float32
    assert list(kp.fp8.state_dict(model)) == (linears if delayed else [])
    assert all(isinstance(layer, nn.Linear) for layer in (model.first, model.last))
    assert f"fp8={'delayed' if recipe == 'auto' else recipe}" in repr(model)


@pytest.mark.parametrize("recipe", ["auto", "tensorwise", "delayed", "blockwise"])
def test_reverting_restores_the_model(recipe: str) -> None:
    model, x = block(), random(7, 24)

    def everything() -> dict[str, Any]:
        found = {}
        for name, module in model.named_modules():
            own = {key for key in module.__dict__ if key != "_ddp_params_and_buffers_to_ignore"}
            found[name] = (type(module), own, list(module._buffers), set(module._non_persistent_buffers_set))
        return found

    before, plain, keys = everything(), results(model, x), list(model.state_dict())
    for _ in range(2):
        kp.fp8.convert(model, recipe)
        assert everything() != before
        in_8_bits = results(model, x)
        assert torch.equal(in_8_bits["y"], plain["y"]) == (recipe == "auto")  # a CPU has no FP8 matrix units
        assert kp.fp8.revert(model) is model
        assert everything() == before
        assert list(model.state_dict()) == keys
        same(results(model, x), plain)
    assert monitor_module.monitor_of(model) is None


def test_reverting_leaves_no_attribute_behind() -> None:
    model = linear()
    before = set(model.__dict__)
    kp.fp8.revert(kp.fp8.convert(model, "tensorwise"))
    assert set(model.__dict__) == before


def test_reverting_keeps_the_names_that_ddp_ignores() -> None:
    model = linear()
    model._ddp_params_and_buffers_to_ignore = ["0.bias"]
    kp.fp8.convert(model, "delayed")
    assert model._ddp_params_and_buffers_to_ignore == ["0.bias", *(f"0.{name}" for name in BUFFERS)]
    kp.fp8.revert(model)
    assert model._ddp_params_and_buffers_to_ignore == ["0.bias"]


@pytest.mark.parametrize("enabled", [True, False])
def test_conversion_does_not_change_autograd_threading(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with torch.autograd.set_multithreading_enabled(enabled):
        model = kp.fp8.convert(linear(), "delayed")
        assert torch._C._is_multithreading_enabled() is enabled
        kp.fp8.revert(model)
        assert torch._C._is_multithreading_enabled() is enabled


WRONG = {
    "model": (lambda: kp.fp8.convert([1]), TypeError, r"model=\[1\]: expected a torch.nn.Module"),
    "recipe": (
        lambda: kp.fp8.convert(linear(), "fp4"),
        ValueError,
        "recipe='fp4': use a Recipe, auto, or one of tensorwise, ",
    ),
    "recipe type": (lambda: kp.fp8.convert(linear(), 8), ValueError, "recipe=8: use a Recipe"),
    "monitor": (
        lambda: kp.fp8.convert(linear(), monitor=0),
        ValueError,
        "monitor=0: use a number of steps, or None",
    ),
    "monitor type": (lambda: kp.fp8.convert(linear(), monitor=2.5), ValueError, "monitor=2.5: use a number"),
    "float64": (
        lambda: kp.fp8.convert(linear().double(), "rowwise"),
        TypeError,
        "layer '0' has a weight of torch.float64: use float32, .* or leave it out with layers=",
    ),
    "twice": (
        lambda: kp.fp8.convert(kp.fp8.convert(linear(), "rowwise")),
        ValueError,
        r"layer '0' is converted already; use kp.fp8.revert\(model\) first",
    ),
    "report": (
        lambda: kp.fp8.report(linear()),
        ValueError,
        r"no converted layer; use kp.fp8.convert\(model\) first",
    ),
}


@pytest.mark.parametrize(("call", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named_with_a_remedy(
    call: Callable[[], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call()


def test_a_refused_model_is_not_partly_converted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    with pytest.raises(TypeError, match="layer '1'"):
        kp.fp8.convert(model, "tensorwise")
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    kp.fp8.convert(model, "tensorwise", layers=lambda name, _: name == "0")
    assert [type(layer) for layer in model] == [Float8Linear, nn.Linear]


def test_only_the_selected_layers_are_converted() -> None:
    model, seen = block(), []

    def wanted(name: str, layer: nn.Linear) -> bool:
        seen.append((name, type(layer)))
        return name != "last"

    kp.fp8.convert(model, "tensorwise", layers=wanted)
    names = ["first", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "last"]
    assert seen == [(name, nn.Linear) for name in names]
    assert [type(model.get_submodule(name)) is Float8Linear for name in names] == [True] * 4 + [False]
    assert kp.fp8.report(model).not_covered == {"last": "not selected by layers=, or added later"}
    assert "not covered: last (not selected by layers=, or added later)" in str(kp.fp8.report(model))


def test_a_subclass_is_not_converted() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(Own(8, 8), nn.Linear(8, 8))
    kp.fp8.convert(model, "tensorwise")
    assert [type(layer) for layer in model] == [Own, Float8Linear]
    kp.fp8.revert(model)
    assert [type(layer) for layer in model] == [Own, nn.Linear]


class LoRALinear(nn.Linear):
    """An nn.Linear subclass with LoRA matrices."""


LEFT_ALONE = {
    "subclass": (
        lambda: LoRALinear(8, 8),
        "LoRALinear is a subclass of nn.Linear, whose forward may do more: use an nn.Linear in its place",
    ),
    "subclass of torch": (
        lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8),
        "NonDynamicallyQuantizableLinear is a subclass of nn.Linear",
    ),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2),
        "MultiheadAttention multiplies by its weights itself and calls no layer: use nn.Linear around",
    ),
    "attention of other keys": (lambda: nn.MultiheadAttention(8, 2, kdim=4, bias=False), "MultiheadAttention mult"),
    "lazy": (lambda: nn.LazyLinear(8), "LazyLinear has no shape before its first input: call the model before"),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        "the weight is computed by torch.nn.utils.parametrize in every forward: use remove_parametrizations",
    ),
}


@pytest.mark.parametrize(("make", "reason"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_the_report_has_the_reason_for_an_unconverted_class(make: Callable[[], nn.Module], reason: str) -> None:
    model = nn.ModuleDict({"odd": make(), "plain": nn.Linear(8, 8), "last": nn.Linear(8, 8)})
    kind = type(model["odd"])
    kp.fp8.convert(model, "tensorwise", layers=lambda name, _: name != "last")
    assert type(model["odd"]) is kind
    report = kp.fp8.report(model)
    assert [layer.name for layer in report.layers] == ["plain"]
    assert list(report.not_covered) == ["odd", "last"]  # and nothing inside it
    assert report.not_covered["odd"].startswith(reason)
    assert report.remarks == (
        f"not covered: odd ({report.not_covered['odd']})",
        "not covered: last (not selected by layers=, or added later)",
    )


def test_a_reason_is_given_once_for_all_layers_that_have_it() -> None:
    model = LoRALinear(8, 8)
    model.rest = nn.Sequential(*(LoRALinear(8, 8) for _ in range(4)), nn.Linear(8, 8), nn.MultiheadAttention(8, 2))
    with pytest.warns(UserWarning, match=r"only \d+ % of its .*; the model itself, rest\.0-3 \(LoRAL"):
        kp.fp8.convert(model, "tensorwise")
    subclasses, attention = kp.fp8.report(model).remarks
    assert subclasses.startswith("not covered: the model itself, rest.0-3 (LoRALinear is a ")
    assert attention.startswith("not covered: rest.5 (MultiheadAttention ")


def test_selected_layers_that_cannot_be_converted() -> None:
    """The function is called for each nn.Linear only, so the warning has the reasons for all other modules."""
    model = nn.Sequential(*(LoRALinear(8, 8) for _ in range(5)), nn.Linear(8, 8))
    text = (
        "nothing was converted: it has no nn.Linear that can be converted and that layers= selects; 0-4 "
        "\\(LoRALinear is a subclass of nn.Linear, whose"
    )
    with pytest.warns(UserWarning, match=text):
        kp.fp8.convert(model, "tensorwise", layers=lambda name, _: name == "0")
    with pytest.raises(ValueError, match=r"no converted layer; .*; 0-4 \(LoRALinear is a subclass"):
        kp.fp8.report(model)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_tied_weights(recipe: str) -> None:
    def tied() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        model[2].weight = model[0].weight
        return model

    model, plain = kp.fp8.convert(tied(), recipe), tied()
    assert model[2].weight is model[0].weight
    found, exact = results(model, random(64, 64)), results(plain, random(64, 64))
    assert found.keys() == exact.keys()
    assert len(found) == 5  # one weight
    assert sqnr(found["0.weight"], exact["0.weight"]) > 15
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model(random(64, 64)).detach()
    optimizer.step()
    assert not torch.equal(model(random(64, 64)), before)


# Against the original model


@every_recipe
@pytest.mark.parametrize("shape", [(256, 192, 128), (17, 37, 11), (33, 130, 257)], ids=str)
def test_a_layer_is_within_20_decibels_of_the_original(recipe: Recipe, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    model, plain = kp.fp8.convert(linear(k, n), recipe), linear(k, n)
    found, exact = results(model, random(m, k)), results(plain, random(m, k))
    assert found.keys() == exact.keys()
    for name, value in found.items():
        assert sqnr(value, exact[name]) >= 20, (name, sqnr(value, exact[name]))
    for name in ("y", "x", "0.weight"):
        high = "dW" in recipe.high_precision and name == "0.weight"
        assert (sqnr(found[name], exact[name]) > 60) == high  # otherwise it was in FP8


@every_recipe
def test_one_element(recipe: Recipe) -> None:
    found = results(kp.fp8.convert(linear(1, 1), recipe), random(1, 1))
    for name, exact in results(linear(1, 1), random(1, 1)).items():
        torch.testing.assert_close(found[name], exact, rtol=0.15, atol=0)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_32768_inputs(recipe: str) -> None:
    model, plain = kp.fp8.convert(linear(32768, 8), recipe), linear(32768, 8)
    found, exact = results(model, random(8, 32768)), results(plain, random(8, 32768))
    for name, value in found.items():
        assert sqnr(value, exact[name]) >= 20, name


@every_recipe
def test_a_model_is_close_to_the_original(recipe: Recipe) -> None:
    found = results(kp.fp8.convert(block(), recipe), random(128, 24))
    exact = results(block(), random(128, 24))
    assert found.keys() == exact.keys()
    for name, value in found.items():
        assert sqnr(value, exact[name]) > 12, (name, sqnr(value, exact[name]))  # noise accumulates over the layers


@every_recipe
def test_nothing_is_recorded_without_gradients(recipe: Recipe, products: list[tuple[int, ...]]) -> None:
    model = kp.fp8.convert(linear(), recipe)
    with torch.no_grad():
        y = model(random(9, 40).requires_grad_())
    assert not y.requires_grad
    assert products == [(9, 40, 24)]
    assert model[0].fp8_counts[2].eq(0).all()


@every_recipe
@pytest.mark.parametrize("frozen", ["weight", "input", "all"])
def test_frozen_parameters_cost_no_gemm(recipe: Recipe, frozen: str, products: list[tuple[int, ...]]) -> None:
    model, plain = kp.fp8.convert(linear(), recipe), linear()
    x = random(9, 40)
    outputs = []
    for each in (model, plain):
        each[0].weight.requires_grad_(frozen == "input")
        given = x.clone().requires_grad_(frozen == "weight")
        y = each(given)
        y.backward(random(9, 24, seed=3))
        outputs.append((y.detach(), given.grad, each[0].weight.grad, each[0].bias.grad))
    wanted = {"weight": [(9, 24, 40)], "input": [(24, 9, 40)] * ("dW" not in recipe.high_precision), "all": []}
    assert products == [(9, 40, 24), *wanted[frozen]]
    for found, exact in zip(*outputs, strict=True):
        assert (found is None) == (exact is None)
        assert found is None or sqnr(found, exact) >= 20


@every_recipe
def test_autocast_with_float32_weights(recipe: Recipe) -> None:
    model, plain = kp.fp8.convert(linear(64, 48), recipe), linear(64, 48)
    found = []
    for each in (model, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(results(each, random(64, 64)))
    assert {name: value.dtype for name, value in found[0].items()} == {
        "y": torch.bfloat16, "x": torch.float32, "0.weight": torch.float32, "0.bias": torch.float32,
    }  # fmt: skip
    for name, value in found[0].items():
        assert sqnr(value, found[1][name]) >= 20, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_models_in_16_bits(dtype: torch.dtype) -> None:
    for recipe in ("tensorwise", "delayed", "rowwise", "blockwise"):
        found = results(kp.fp8.convert(block().to(dtype), recipe), random(64, 24, dtype=dtype))
        exact = results(block(), random(64, 24, dtype=dtype).float())
        for name, value in found.items():
            assert value.dtype == dtype
            assert sqnr(value, exact[name]) > 12, (recipe, name)


@pytest.mark.parametrize("fuse", [True, False])
def test_a_converted_delayed_model_may_change_its_dtype(fuse: bool) -> None:
    model = kp.fp8.convert(block(), "delayed", fuse_swiglu=fuse).to(torch.bfloat16)
    assert model(random(8, 24, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert model.first.fp8_state.dtype == torch.float32


def test_a_model_made_on_meta_starts_with_no_counts_and_no_history() -> None:
    with torch.device("meta"):
        model = kp.fp8.convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "delayed")
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN and the largest integers
    try:
        model.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    for layer in model:
        nn.init.ones_(layer.weight)
    assert not any(layer.fp8_counts.any() or layer.fp8_state.any() for layer in model)


@pytest.mark.parametrize(
    "made_in",
    [
        "model",
        "input",
        "call",
    ],
)
def test_inference_mode(made_in: str) -> None:
    with torch.inference_mode(made_in == "model"):
        model = kp.fp8.convert(linear(), "tensorwise").eval()
    with torch.inference_mode(made_in == "input"):
        x = random(3, 40)
    with torch.inference_mode(made_in == "call"), torch.no_grad():
        for _ in range(3):
            assert sqnr(model(x), functional.linear(x, model[0].weight, model[0].bias)) > 20


# Copies


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "pickle unfused"])
def test_copies_train_as_the_model_does(recipe: str, way: str) -> None:
    model = kp.fp8.convert(block(), recipe, fuse_swiglu=way != "pickle unfused")
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(3))
    model(random(4, 24)).sum().backward()
    if way == "deepcopy":
        copied = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert is_fused(copied) == is_fused(model)
    losses = [train(each, torch.optim.SGD(each.parameters(), lr=0.1), range(3, 6)) for each in (model, copied)]
    assert losses[0] == losses[1]
    same(dict(model.state_dict()), dict(copied.state_dict()))
    with torch.no_grad():
        copied.mlp.down_proj.weight.zero_()
    assert model.mlp.down_proj.weight.any()
    x = random(4, 24)
    assert torch.equal(copied(x), copied.last(torch.relu(copied.first(x))))  # its own layers, not the model's


# Ranks


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("fuse", [True, False])
def test_ddp_trains_the_same(recipe: str, fuse: bool) -> None:
    model, alone = (kp.fp8.convert(block(), recipe, fuse_swiglu=fuse) for _ in range(2))
    wrapped = nn.parallel.DistributedDataParallel(model)
    ignored = {name for name, _ in model.named_buffers()}
    assert ignored == wrapped.parameters_to_ignore
    assert len(ignored) == 5 * len(BUFFERS)
    losses = [train(each, torch.optim.AdamW(each.parameters(), lr=1e-2), range(4)) for each in (wrapped, alone)]
    assert losses[0] == losses[1]
    same(dict(model.state_dict()), dict(alone.state_dict()))


@pytest.mark.usefixtures("one_rank")
def test_layers_that_fully_shard_gave_a_class_of_its_own() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    model = kp.fp8.convert(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), LoRALinear(8, 8)),
        "tensorwise",
        layers=lambda name, _: name == "0",
    )
    for layer in model:
        fully_shard(layer, mesh=mesh)
        assert type(layer) not in (nn.Linear, LoRALinear, Float8Linear)
    report = kp.fp8.report(model)
    assert [layer.name for layer in report.layers] == ["0"]
    assert report.not_covered["1"] == "not selected by layers=, or added later"
    assert list(report.not_covered) == ["1", "2"]
    assert report.not_covered["2"].startswith("LoRALinear is a subclass of nn.Linear")


@pytest.mark.usefixtures("one_rank")
def test_a_model_that_is_sharded_already_is_warned_about() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    fully_shard(model[0], mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    with pytest.warns(UserWarning, match=r"; 0 \(sharded already: kp.fp8.convert comes before fully_shard\)"):
        kp.fp8.convert(model, "tensorwise")


# The report


@every_recipe
def test_a_report_has_a_line_for_each_layer(recipe: Recipe) -> None:
    model = kp.fp8.convert(block(), recipe)
    results(model, random(8, 24))
    report = kp.fp8.report(model)
    summary, chosen, head, *lines = str(report).splitlines()
    assert summary == "5 of 5 linear layers in FP8, 100 % of matmul parameters, 0 fell back"
    assert chosen == f"recipe: {recipe}"
    assert head.split()[:2] == ["layer", "K"]
    lines = [line for line in lines if not line.startswith(" ")]
    names = ["first", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "last"]
    assert [line.split()[0] for line in lines] == names == [row.name for row in report.layers]
    assert all(line[head.index(" dW") :].startswith((" fp8", " fp32")) for line in lines)  # columns
    for row in report.layers:
        assert row.products == {p: "fp32" if p in recipe.high_precision else "fp8" for p in PRODUCTS}
        assert row.measured == ()
        assert row.stats["weight"].elements == model.get_submodule(row.name).weight.numel()
        assert row.stats["gradient"].elements == 8 * row.outputs
    assert (report.layers[0].inputs, report.layers[0].outputs) == (24, 32)


@pytest.mark.parametrize(
    ("recipe", "dtype", "sizes", "products", "why"),
    [
        ("delayed", torch.float32, (3, 17, 5), "", ""),
        ("rowwise", torch.bfloat16, (3, 17, 5), "", ""),
        ("rowwise", torch.float32, (8, 64, 48), "y, dx, dW", "supports rowwise scaling with bfloat16 output only"),
        (
            "rowwise-high-wgrad",
            torch.float32,
            (8, 64, 48),
            "y, dx",
            "supports rowwise scaling with bfloat16 output only",
        ),
        ("blockwise", torch.bfloat16, (128, 512, 512), "", ""),
        ("blockwise", torch.bfloat16, (3, 512, 512), "y, dx", "needs K and N in multiples of 128"),
        ("blockwise", torch.bfloat16, (300, 512, 512), "dW", "needs K and N in multiples of 128"),
    ],
)
def test_a_report_names_gemms_without_matrix_units(
    recipe: str, dtype: torch.dtype, sizes: tuple[int, int, int], products: str, why: str
) -> None:
    rows, inputs, outputs = sizes
    model = kp.fp8.convert(nn.Sequential(nn.Linear(inputs, outputs, dtype=dtype)), recipe)
    model(torch.randn(rows, inputs, dtype=dtype).requires_grad_())
    assert kp.fp8.report(model).layers[0].notes == ()
    with pretend("nvidia/h200"):
        notes = [note for note in kp.fp8.report(model).layers[0].notes if "padded" not in note]
    assert len(notes) == bool(products)
    assert all(note.startswith(f"{products} (computed from float32 copies: scaled-mm {why}") for note in notes)


@pytest.mark.parametrize(
    ("recipe", "sizes", "needs_dx", "filled"),
    [
        ("delayed", (3, 17, 5), True, "M = 3, K = 17, N = 5"),
        ("delayed-high-wgrad", (3, 32, 5), True, "N = 5"),
        ("delayed", (1000, 32, 48), True, "M = 1000"),
        ("delayed", (32, 32, 48), False, ""),
        ("blockwise", (3, 17, 5), True, ""),  # computed in float32
    ],
)
def test_a_report_names_padded_sizes(recipe: str, sizes: tuple[int, int, int], needs_dx: bool, filled: str) -> None:
    rows, inputs, outputs = sizes
    model = kp.fp8.convert(nn.Sequential(nn.Linear(inputs, outputs)), recipe)
    model(torch.randn(rows, inputs, requires_grad=needs_dx))
    with pretend("nvidia/h200"):
        notes = [note for note in kp.fp8.report(model).layers[0].notes if "padded" in note]
        assert notes == ([f"{filled} padded to a multiple of 16 in FP8 GEMMs"] if filled else [])
        model[0].fp8_fallback = "a test"
        assert not any("padded" in note for note in kp.fp8.report(model).layers[0].notes)


def test_a_report_has_the_counts() -> None:
    model = kp.fp8.convert(linear(24, 16), "tensorwise", monitor=None)
    model(lossy())
    (row,) = kp.fp8.report(model).layers
    assert row.stats["input"].underflowed == pytest.approx(191 / 192)
    assert row.stats["gradient"].elements == 0
    assert "99.48%" in str(kp.fp8.report(model))


def test_a_custom_recipe() -> None:
    own = dataclasses.replace(RECIPES["rowwise"], name="mine", high_precision=("dx",))
    model = kp.fp8.convert(linear(64, 48), own)
    found, exact = results(model, random(64, 64)), results(linear(64, 48), random(64, 64))
    assert sqnr(found["x"], exact["x"]) > 100
    assert 20 < sqnr(found["0.weight"], exact["0.weight"]) < 60
    assert kp.fp8.report(model).layers[0].recipe == "mine"


def test_a_model_without_linear_layers_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="nothing was converted: it has no nn.Linear that can be converted$"):
        model = kp.fp8.convert(nn.Sequential(nn.ReLU()), "delayed")
    with pytest.raises(ValueError, match="no converted layer"):
        kp.fp8.report(model)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"layers=\['0'\]: expected a function"):
        kp.fp8.convert(linear(), "delayed", layers=["0"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="recipe=None: use a Recipe, auto, or one of"):
        kp.fp8.convert(linear(), None)  # type: ignore[arg-type]
    for function in (
        kp.fp8.report,
        kp.fp8.revert,
        kp.fp8.state_dict,
        kp.fp8.synchronize,
        lambda model: kp.fp8.load_state_dict(model, {}),
        lambda model: kp.fp8.accumulate(model).__enter__(),
    ):
        with pytest.raises(TypeError, match=r"model='x': expected a torch\.nn\.Module"):
            function("x")


def test_the_report_of_an_unconverted_model_names_the_remedy_alone() -> None:
    with pytest.raises(
        ValueError, match=r"^model: it has no converted layer; use kp\.fp8\.convert\(model\) first$"
    ):
        kp.fp8.report(linear())


@pytest.mark.parametrize("recipe", ["delayed", "auto"])
def test_a_meta_model_has_a_report(recipe: str) -> None:
    with torch.device("meta"):
        model = kp.fp8.convert(nn.Sequential(nn.Linear(32, 32)), recipe)
    assert "32 -> 32" in str(kp.fp8.report(model))


def test_a_layer_that_fell_back_says_so() -> None:
    model = kp.fp8.convert(linear(), "delayed")
    model[0].fp8_fallback = "a test"
    assert "fell back to float32" in repr(model)
