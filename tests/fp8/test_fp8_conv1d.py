"""``Conv1D`` of Hugging Face's GPT-2 in FP8: the same results as an nn.Linear with the transposed weight."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import kernel_pytorch as kp
from fp8_models import every_recipe, random, results, same, sqnr
from kernel_pytorch.fp8.module import Float8Conv1D
from kernel_pytorch.fp8.recipe import Recipe

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from transformers.pytorch_utils import Conv1D  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "own_monitors")


def gpt2(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    """A Conv1D, and the nn.Linear that computes the same."""
    torch.manual_seed(0)
    conv, linear = Conv1D(24, 40), nn.Linear(40, 24)
    with torch.no_grad():
        conv.bias.normal_()
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    return nn.Sequential(conv), nn.Sequential(linear)


@every_recipe
def test_the_same_bits_as_a_linear(recipe: Recipe) -> None:
    conv, linear = pair()
    exact = results(linear, x := random(6, 9, 40))
    for model in (conv, linear):
        kp.fp8.convert(model, recipe)
    for _ in range(2):  # the second call has a history
        found, expected = results(conv, x), results(linear, x)
        found["0.weight"] = found["0.weight"].t()
        same(found, expected)
    assert all(sqnr(found[name], exact[name]) > 20 for name in exact)


def test_gpt2_converts_whole_and_trains() -> None:
    model, ids = gpt2(), torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        kp.fp8.convert(model, "delayed")
    report = kp.fp8.report(model)
    assert report.not_covered == {}
    assert len(report.layers) == 4 * 2 + 1  # and lm_head
    assert {(layer.inputs, layer.outputs) for layer in report.layers if "c_fc" in layer.name} == {(32, 128)}
    assert isinstance(model.transformer.h[0].mlp.c_fc, Float8Conv1D)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert all(stats.elements > 0 for layer in kp.fp8.report(model).layers for stats in layer.stats.values())


def test_state_dicts_load_strictly_both_ways_and_revert_gives_the_model_back() -> None:
    plain, model = gpt2(0).eval(), gpt2(1).eval()
    types = [type(module) for module in model.modules()]
    kp.fp8.convert(model, "delayed")
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict(), strict=True)
    gpt2(2).load_state_dict(model.state_dict(), strict=True)
    kp.fp8.revert(model)
    assert [type(module) for module in model.modules()] == types
    assert vars(model.transformer.h[0].mlp.c_fc).keys() == vars(plain.transformer.h[0].mlp.c_fc).keys()
    ids = torch.arange(16).view(1, 16)
    assert torch.equal(model(ids).logits, plain(ids).logits)


def test_fallback_accumulate_and_copies() -> None:
    conv, _ = pair()
    x = random(4, 40)
    expected = conv(x)
    kp.fp8.convert(conv, "tensorwise")
    y = conv(x)
    with kp.fp8.accumulate(conv):
        assert torch.equal(conv(x), y)
        assert torch.equal(conv(x), y)
        assert conv[0].weight_cache.get(conv[0].weight, ("e4m3fn", "tensor", False), False) is not None
    assert torch.equal(copy.deepcopy(conv)(x), y)
    conv[0].fp8_fallback = "a test"
    assert torch.equal(conv(x), expected)  # as Conv1D computes it


def test_compiled_with_the_same_bits() -> None:
    conv, _ = pair()
    kp.fp8.convert(conv, "delayed")
    x = random(4, 40)
    expected = results(copy.deepcopy(conv), x)
    found = results(torch.compile(conv, backend="aot_eager"), x)
    same({name.removeprefix("_orig_mod."): value for name, value in found.items()}, expected)


def test_its_weight_is_gathered_in_its_dtype() -> None:
    conv, _ = pair()
    kp.fp8.convert(conv, "delayed", fsdp_all_gather=True)
    assert conv[0].fp8_gather == "it stores the transposed weight"
    assert "not all-gathered in FP8: it stores the transposed weight" in kp.fp8.report(conv).layers[0].notes
