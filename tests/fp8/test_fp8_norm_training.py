"""RMSNorm before FP8 layers: activation checkpointing, copies, state dicts, ranks."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import kernel_pytorch as kp
from fp8_models import random, same, sqnr
from fp8_norm_models import Llama, both_recipes, caster_of, everything, model, train
from kernel_pytorch.fp8 import fusion as norm_module
from kernel_pytorch.fp8.rms_norm import CastingNorm

pytestmark = pytest.mark.usefixtures("one_thread", "own_monitors")


# Activation checkpointing


@both_recipes
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(recipe: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer after the last norm is outside of the recomputed region."""
    found = []
    for cast in (True, False):
        net = kp.fp8.convert(model(checkpointing=reentrant), recipe)
        if not cast:
            monkeypatch.setattr(CastingNorm, "request", lambda *_: None)
        found.append((train(net, range(5), lambda n: 30.0 if n == 3 else 1.0), everything(net)))
    assert found[0][0] == found[1][0]
    same(found[0][1], found[1][1])


def test_selective_activation_checkpointing() -> None:
    """Under a dispatch mode the op goes through torch's dispatcher, both times."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        saved = op is torch.ops.aten.tanh.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    class Selective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
            return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)

    net, alone = kp.fp8.convert(Selective(), "tensorwise"), kp.fp8.convert(model(), "tensorwise")
    assert train(net, range(4)) == train(alone, range(4))
    assert all(norm_module.norms_in(net).values())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_quantizes_for_recomputed_layers(reentrant: bool) -> None:
    net = kp.fp8.convert(model(checkpointing=reentrant), "tensorwise")
    train(net, range(3))
    assert caster_of(net.block.norm_1)._requests.keys() == ({True} if reentrant else {True, False})
    assert caster_of(net.norm)._requests.keys() <= {False}


# Copies, state dicts, ranks


@both_recipes
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_train_as_the_model_does(recipe: str, way: str) -> None:
    net = kp.fp8.convert(model(), recipe)
    train(net, range(3))
    if way == "deepcopy":
        copied = copy.deepcopy(net)
    else:
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert norm_module.norms_in(copied) == dict.fromkeys(["block.norm_1", "block.norm_2", "norm"])
    losses = [train(each, range(3, 6)) for each in (net, copied)]
    assert losses[0] == losses[1]
    same(everything(net), everything(copied))
    assert norm_module.norms_in(copied)["norm"] is copied.head
    assert norm_module.norms_in(net)["norm"] is net.head
    alone = copy.deepcopy(net.block.norm_1)
    assert caster_of(alone).layer() is None


def test_a_resumed_run_continues_bit_for_bit() -> None:
    net = kp.fp8.convert(model(), "delayed")
    train(net, range(3))
    kept, state = copy.deepcopy(net.state_dict()), kp.fp8.state_dict(net)
    losses = train(net, range(3, 6))
    other = kp.fp8.convert(model(seed=1), "delayed")
    other.load_state_dict(kept)
    kp.fp8.load_state_dict(other, state)
    assert train(other, range(3, 6)) == losses


@pytest.mark.parametrize("recipe", ["auto", "tensorwise", "delayed"])
def test_reverting_restores_the_model(recipe: str) -> None:
    net = model(norm=Llama)
    net.more = nn.RMSNorm(32)

    def traces() -> dict[str, Any]:
        return {name: (type(module), set(module.__dict__)) for name, module in net.named_modules()}

    before, keys = traces(), list(net.state_dict())
    kp.fp8.convert(net, recipe)
    train(net, range(2))
    assert norm_module.norms_in(net).keys() == {"block.norm_1", "block.norm_2", "norm", "more"}
    kp.fp8.revert(net)
    assert traces() == before
    assert list(net.state_dict()) == keys
    assert norm_module.norms_in(net) == {}


def test_a_deleted_model_is_not_monitored() -> None:
    net = kp.fp8.convert(model(), "delayed")
    train(net, range(3))
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def test_moving_the_model() -> None:
    net = kp.fp8.convert(model(), "delayed")
    train(net, range(2))
    net.to(torch.bfloat16)
    for number in range(2):
        net(random(8, 24, seed=number, dtype=torch.bfloat16)).float().sum().backward()
    assert (net.head.fp8_state[0] > 0).sum() == 4


@both_recipes
def test_ddp_trains_the_same(recipe: str, tmp_path: Path) -> None:
    net, alone = (kp.fp8.convert(model(), recipe) for _ in range(2))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        losses = [train(each, range(4)) for each in (nn.parallel.DistributedDataParallel(net), alone)]
    finally:
        dist.destroy_process_group()
    assert losses[0] == losses[1]
    same(everything(net), everything(alone))


@both_recipes
@pytest.mark.parametrize("part", ["block", "norms"])
def test_fsdp2_trains_the_same(recipe: str, part: str, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net, alone = (kp.fp8.convert(model(), recipe) for _ in range(2))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for each in (net.block,) if part == "block" else (net.block.norm_1, net.block.norm_2, net.norm):
            fully_shard(each, mesh=mesh)
        fully_shard(net, mesh=mesh)
        losses = [train(each, range(4)) for each in (net, alone)]
        found = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in everything(net).items()}
    finally:
        dist.destroy_process_group()
    assert losses[0] == losses[1]
    same(found, everything(alone))
    assert all(norm_module.norms_in(net).values())


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_language_model_of_hugging_face(checkpointing: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is missing")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).train()
    net = kp.fp8.convert(copy.deepcopy(plain), "delayed", layers=lambda name, _: name != "lm_head")
    if checkpointing:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        net.zero_grad()
        loss = net(input_ids=tokens, labels=tokens).loss
        loss.backward()
    exact = plain(input_ids=tokens, labels=tokens).loss
    exact.backward()
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=0.02)
    gradients = dict(plain.named_parameters())
    for name, p in net.named_parameters():
        assert sqnr(p.grad, gradients[name].grad) > 8, (name, sqnr(p.grad, gradients[name].grad))
    wanted = {"model.norm": None}
    for i in range(2):
        wanted[f"model.layers.{i}.input_layernorm"] = f"model.layers.{i}.self_attn.q_proj"
        wanted[f"model.layers.{i}.post_attention_layernorm"] = f"model.layers.{i}.mlp.gate_proj"
    assert kp.fp8.report(net).norms == wanted
