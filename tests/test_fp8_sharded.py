"""Converted layers under FSDP2: as without it, and with weights that are gathered in 8 bits, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, started
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import kernel_pytorch as kp
from kernel_pytorch.precision.gathered_weight import GatheredWeight
from kernel_pytorch.precision.layer import Float8Linear


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNEL_PYTORCH_CACHE", str(tmp_path_factory.mktemp("ranks") / "cache"))
        with started(4) as ranks:
            yield ranks


# What runs on the ranks.


class Block(nn.Module):
    """A SwiGLU between layers; 5 rows lie unevenly on 2 and on 4 ranks, one of which has none of them."""

    def __init__(self, width: int, hidden: int, checkpointed: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 5), nn.Linear(5, width, bias=False)
        self.mlp = MLP(width, hidden)
        self.norm = nn.LayerNorm(width)
        self.checkpointed = checkpointed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mlp(self.norm(x))
        return x + self.last(torch.relu(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class Case:
    """A way to shard and to train."""

    recipe: str = "tensorwise"
    fuse: bool = True
    each_layer: bool = False
    reshard: bool = True
    accumulate: int = 1
    sync: bool = True
    """Whether gradients are reduced after each of the batches that are accumulated, or after the last."""
    mixed: bool = False
    checkpointed: bool = False
    dtype: torch.dtype = torch.float32


def mesh_of(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh=torch.arange(dist.get_world_size(group)))


def sharded(group: Any, case: Case, *, gathered: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(24, 40, case.checkpointed) for _ in range(2))).to(case.dtype)
    kp.fp8.convert(model, case.recipe, fuse_swiglu=case.fuse, monitor=None)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.mixed else MixedPrecisionPolicy()
    parts = [module for module in model.modules() if isinstance(module, Float8Linear) and case.each_layer]
    for part in (*parts, *model, model):
        fully_shard(part, mesh=mesh_of(group), reshard_after_forward=case.reshard, mp_policy=policy)
    return kp.fp8.gather(model) if gathered else model


def batch(group: Any, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank(group))
    return torch.randn(6, 24, generator=generator).to(dtype)


def step(group: Any, model: Any, optimizer: Any, case: Case, number: int) -> list[torch.Tensor]:
    """One step of training; outputs, the gradients of inputs and of weights, and the weights after it."""
    found = []
    for micro in range(case.accumulate):
        model.set_requires_gradient_sync(case.sync or micro == case.accumulate - 1)
        x = batch(group, 10 * number + micro, case.dtype).requires_grad_()
        y = model(x)
        (y.float().square().mean() * 100).backward()
        found += [y.detach(), x.grad]
    found += [parameter.grad.to_local().clone() for parameter in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return [*found, *(parameter.to_local().detach().clone() for parameter in model.parameters())]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), i
        assert bool(one.isfinite().all())


def trains_the_same(group: Any, case: Case) -> None:
    model, plain = (sharded(group, case, gathered=gathered) for gathered in (True, False))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    for number in range(3):
        found, wanted = (
            step(group, each, optimizer, case, number)
            for each, optimizer in zip((model, plain), optimizers, strict=True)
        )
        same(found, wanted)


CASES = (
    Case(),
    Case("delayed", accumulate=2, mixed=True),
)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_the_same_to_the_bit(pool: Ranks, ranks: int, case: Case) -> None:
    pool.run(trains_the_same, ranks, case)
