"""A plan made on one process and applied on every rank before DDP or fully_shard: the gradients of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import kernel_pytorch as kp
from optimization_fakes import ScriptedTimer
from optimization_models import model_of, tokens
from ranks import Ranks, started

pytest.importorskip("transformers")

STEPS = ("hf-attention", "rms-norm", "rope", "chunked-cross-entropy")


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with started(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, inputs = model_of("llama")
    best = kp.optimize(model, inputs, "training", include=STEPS, timer=ScriptedTimer(), resume=False)
    assert {step.candidate for step in best.plan.steps} == set(STEPS)
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    best.plan.save(path)
    return path


def batch_of(rank: int) -> dict[str, torch.Tensor]:
    ids = tokens(2, 12, seed=rank)
    return {"input_ids": ids, "labels": ids}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    def whole(gradient: Any) -> torch.Tensor:
        found: torch.Tensor = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        return found

    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def expected(ranks: int) -> dict[str, torch.Tensor]:
    """The mean over the ranks' batches of the gradients of the original model."""
    model, _ = model_of("llama")
    model.train()
    (sum(model(**batch_of(rank)).loss for rank in range(ranks)) / ranks).backward()
    return gradients(model)


def wrapped(group: Any, plan: str, how: str) -> nn.Module:
    model = kp.apply(model_of("llama")[0], plan).train()
    if how == "ddp":
        return DistributedDataParallel(model, process_group=group)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if how == "fsdp2, head alone":
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trains_the_same(group: Any, plan: str, how: str) -> None:
    model = wrapped(group, plan, how)
    out = model(**batch_of(dist.get_rank(group)))
    assert out.logits is None  # the plan acts
    out.loss.backward()
    wanted = expected(dist.get_world_size(group))
    found = {name.removeprefix("module."): value for name, value in gradients(model).items()}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_a_plan_that_is_applied_before_wrapping_holds(pool: Ranks, plan: Path, how: str) -> None:
    pool.run(trains_the_same, 2, str(plan), how)


def says_how_to_shard_the_head(group: Any, plan: str) -> None:
    model = wrapped(group, plan, "fsdp2, head alone")
    with pytest.raises(ValueError, match="shard the head with the whole model"):
        model(**batch_of(dist.get_rank(group)))


def test_a_head_that_is_sharded_alone_is_refused(pool: Ranks, plan: Path) -> None:
    pool.run(says_how_to_shard_the_head, 2, str(plan))


def is_refused_once_wrapped(group: Any, plan: str) -> None:
    model, _ = model_of("llama")
    ddp = DistributedDataParallel(model, process_group=group)
    with pytest.raises(TypeError, match=r"kp\.apply the plan on all ranks before wrapping"):
        kp.apply(ddp, plan)
    other, _ = model_of("llama")
    fully_shard(other, mesh=DeviceMesh.from_group(group, "cpu"))
    with pytest.raises(TypeError, match="is sharded; optimise on one rank"):
        kp.apply(other, plan)


def test_a_model_that_is_wrapped_is_refused(pool: Ranks, plan: Path) -> None:
    pool.run(is_refused_once_wrapped, 2, str(plan))
