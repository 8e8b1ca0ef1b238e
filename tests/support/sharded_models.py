"""Small models under FSDP2 for tests on ranks, with or without FP8 all-gather."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import kernel_pytorch as kp
from kernel_pytorch.fp8.module import Float8Linear


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A SwiGLU and two layers; 5 rows are sharded unevenly on 2 and 4 ranks, and the last of 4 has none."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(24), MLP(24, 40)
        self.first, self.last = nn.Linear(24, 5), nn.Linear(5, 24, bias=False)
        self.checkpointed = checkpointed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mlp(self.norm(x))
        return x + self.last(torch.relu(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)


@dataclass(frozen=True)
class Case:
    """A way to shard and to train."""

    recipe: str = "tensorwise"
    fuse: bool = True
    each_layer: bool = False
    reshard: bool = True
    batches: int = 1
    """Number of micro-batches per step."""
    sync: bool = True
    """Whether gradients are reduced after each of them, or after the last."""
    mixed: bool = False
    checkpointed: bool = False
    dtype: torch.dtype = torch.float32
    frozen: bool = False
    columns: bool = False
    """Whether weights are sharded by columns if possible."""
    replicas: int = 1
    compiled: bool = False
    device: str = "cpu"
    seed: int = 0

    def __str__(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != vars(Case())[name]}
        return "-".join(f"{name}={value}" for name, value in changed.items()) or "plain"


PLAIN = Case()


def mesh_of(group: Any, replicas: int = 1, device: str = "cpu") -> DeviceMesh:
    ranks = dist.get_world_size(group)
    if replicas > 1:
        return DeviceMesh(device, torch.arange(ranks).view(replicas, -1), mesh_dim_names=("replicas", "shards"))
    return DeviceMesh.from_group(group, device, mesh=torch.arange(ranks))


def unsharded(case: Case, *, gathered: bool = False) -> nn.Sequential:
    torch.manual_seed(case.seed)
    model = nn.Sequential(*(Block(case.checkpointed) for _ in range(2))).to(case.device, case.dtype)
    model[0].first.weight.requires_grad_(not case.frozen)
    kp.fp8.convert(model, case.recipe, fuse_swiglu=case.fuse, monitor=None, fsdp_all_gather=gathered)
    return model


def by_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None


def sharded(group: Any, case: Case, *, gathered: bool = True) -> Any:
    model = unsharded(case, gathered=gathered)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.mixed else MixedPrecisionPolicy()
    parts = [module for module in model.modules() if isinstance(module, Float8Linear) and case.each_layer]
    for block in model if case.compiled else ():
        block.compile(backend="aot_eager")
    mesh = mesh_of(group, case.replicas, case.device)
    for part in (*parts, *model, model):
        fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=case.reshard,
            mp_policy=policy,
            shard_placement_fn=by_columns if case.columns else None,
        )
    return model


def batch(group: Any, number: int, case: Case = PLAIN) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank(group))
    return torch.randn(6, 24, generator=generator).to(case.device, case.dtype)


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return found.clone()


def step(group: Any, model: Any, optimizer: Any, case: Case, number: int) -> list[torch.Tensor]:
    """One step of training; outputs, the gradients of inputs and of weights, and the weights after it."""
    found = []
    for micro in range(case.batches):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(case.sync or micro == case.batches - 1)
        x = batch(group, 10 * number + micro, case).requires_grad_()
        y = model(x)
        (y.float().square().mean() * 100).backward()
        found += [y.detach(), x.grad]
    parameters = list(model.parameters())
    found += [local(parameter.grad) for parameter in parameters if parameter.requires_grad]
    optimizer.step()
    optimizer.zero_grad()
    return [*found, *map(local, parameters)]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), i
        assert bool(one.isfinite().all())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def layers_of(model: nn.Module) -> list[Float8Linear]:
    return [module for module in model.modules() if isinstance(module, Float8Linear)]
