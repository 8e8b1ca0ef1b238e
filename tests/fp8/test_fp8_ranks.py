"""FP8 state on several ranks: synchronized, saved, and resumed bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import kernel_pytorch as kp
from ranks import Ranks
from sharded_models import Case, batch, layers_of, local, same, sharded, unsharded

RANKS = 2


def of_rank(group: Any, number: int) -> torch.Tensor:
    """Data scaled by rank, so that histories differ."""
    return batch(group, number) * (1 + 3 * dist.get_rank(group))


def trained(group: Any, model: nn.Module, numbers: range) -> list[torch.Tensor]:
    """Train with each rank's own batches; return outputs and the final parameters."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    for number in numbers:
        y = model(of_rank(group, number))
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(y.detach())
    return [*found, *map(local, model.parameters())]


def histories(group: Any, model: nn.Module) -> list[torch.Tensor]:
    """The histories of all layers, by rank."""
    mine = torch.stack([layer.fp8_state for layer in layers_of(model)])
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    return found


def resumes(group: Any, how: str, folder: str) -> None:
    """A resumed run equals the run that saved and continued."""

    def model_of(case: Case) -> tuple[Any, Any]:
        if how != "ddp":
            model = sharded(group, case, gathered=how == "gathered")
            return model, model
        model = unsharded(case)
        return model, nn.parallel.DistributedDataParallel(model, process_group=group)

    case = Case("delayed")
    inner, model = model_of(case)
    trained(group, model, range(5))
    before = histories(group, inner)
    assert not torch.equal(before[0], before[1])
    falls_back = how != "gathered"  # gathered weights synchronize the fallback themselves, a forward later
    if falls_back and dist.get_rank(group) == 1:
        layers_of(inner)[-1].fp8_fallback = "this rank's own"
    assert kp.fp8.synchronize(inner, group) is inner
    for after in histories(group, inner):
        assert torch.equal(after, torch.stack(before).amax(0))
    reason = "this rank's own" if dist.get_rank(group) == 1 else "on another rank"
    assert layers_of(inner)[-1].fp8_fallback == (reason if falls_back else None)
    state = {"model": inner.state_dict(), "fp8": kp.fp8.state_dict(inner)}
    if how == "ddp":
        if dist.get_rank(group) == 0:
            torch.save(state, f"{folder}/model.pt")
        dist.barrier(group)
    else:
        dcp.save(state, checkpoint_id=folder, process_group=group)
    wanted = trained(group, model, range(5, 9))
    twin, model = model_of(replace(case, seed=1))
    if how == "ddp":
        state = torch.load(f"{folder}/model.pt")
    else:
        state = {"model": twin.state_dict(), "fp8": kp.fp8.state_dict(twin)}
        dcp.load(state, checkpoint_id=folder, process_group=group)
    twin.load_state_dict(state["model"])
    kp.fp8.load_state_dict(twin, state["fp8"])
    same(trained(group, model, range(5, 9)), wanted)
    assert not torch.equal(*histories(group, twin))


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "gathered"])
def test_ranks_resume_bit_for_bit(pool: Ranks, how: str, tmp_path: Any) -> None:
    pool.run(resumes, 2, how, str(tmp_path))


def disagree(group: Any) -> list[str]:
    found = []
    rank = dist.get_rank(group)
    recipe = "delayed" if rank == 0 else "tensorwise"
    different, none = kp.fp8.convert(nn.Sequential(nn.Linear(8, 8)), recipe), nn.Sequential(nn.Linear(8, 8))
    some = none if rank == 0 else different
    for model in (different, some, none, nn.Sequential(nn.Linear(8, 8, device="meta"))):
        if model[0].weight.is_meta:
            kp.fp8.convert(model, "delayed")
        try:
            kp.fp8.synchronize(model, group)
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_failed_synchronization_raises_on_all_ranks(pool: Ranks) -> None:
    for errors in pool.run(disagree, 2):
        assert len(errors) == 4
        assert errors[0].startswith("group: its ranks 0 and 1 have different converted layers (1 and 1)")
        assert errors[1].startswith("group: its ranks 0 and 1 have different converted layers (0 and 1)")
        assert errors[2] == "model: it has no converted layer; use kp.fp8.convert(model) first"
        assert errors[3].startswith("model: it has no memory yet")


def test_synchronize_names_wrong_arguments() -> None:
    model = kp.fp8.convert(nn.Sequential(nn.Linear(8, 8)), "delayed")
    assert kp.fp8.synchronize(model) is model  # one process
    with pytest.raises(TypeError, match=r"group='dp': expected a process group, as mesh\['dp'\].get_group\(\)"):
        kp.fp8.synchronize(model, "dp")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model=3: expected a torch\.nn\.Module"):
        kp.fp8.synchronize(3)  # type: ignore[arg-type]
