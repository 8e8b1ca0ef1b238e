"""Converted layers under FSDP2, with and without FP8 all-gather, bit for bit."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import kernel_pytorch as kp
from kernel_pytorch.fp8.fsdp import GatheredWeight, ShardedWeight
from ranks import Ranks
from sharded_models import MLP, Case, batch, layers_of, local, mesh_of, optimizer_of, same, sharded, step, unsharded

RANKS = 4


# Training


def train_the_same(group: Any, case: Case) -> tuple[Any, Any]:
    """Compare FP8 all-gather with plain FSDP2, bit for bit in every step."""
    model, plain = (sharded(group, case, gathered=gathered) for gathered in (True, False))
    optimizers = [optimizer_of(each) for each in (model, plain)]
    for number in range(3):
        found, wanted = (
            step(group, each, optimizer, case, number)
            for each, optimizer in zip((model, plain), optimizers, strict=True)
        )
        same(found, wanted)
    return model, plain


def as_without_fsdp2(group: Any, case: Case) -> None:
    model, alone = sharded(group, case, gathered=False), unsharded(case)
    optimizers = [optimizer_of(each) for each in (model, alone)]
    for number in range(4):
        found = step(group, model, optimizers[0], case, number)
        same(found, step(group, alone, optimizers[1], case, number))
    for name, value in alone.state_dict().items():
        assert torch.equal(local(model.state_dict()[name]), value), name
    for name, value in kp.fp8.state_dict(alone).items():
        # Which of two layers with the same input records its amax is unspecified.
        if not name.endswith("up_proj"):
            assert torch.equal(kp.fp8.state_dict(model)[name], value), name


@pytest.mark.parametrize(
    ("recipe", "each_layer"), [("tensorwise", True), ("delayed", True), ("delayed", False), ("rowwise", False)]
)
def test_fsdp2_trains_the_same(pool: Ranks, recipe: str, each_layer: bool) -> None:
    pool.run(as_without_fsdp2, 1, Case(recipe, fuse=not each_layer, each_layer=each_layer))


def in_8_bits(group: Any, case: Case) -> None:
    model, _ = train_the_same(group, case)
    kinds = []
    for layer in layers_of(model):
        layer.register_forward_pre_hook(lambda layer, _: kinds.append(type(layer.weight)))
    model(batch(group, 0, case))
    assert kinds == [GatheredWeight] * len(layers_of(model))


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (Case(), (1, 2, 4)),
        (Case("delayed", mixed=True, batches=2), (1, 2)),
        (Case("delayed", reshard=False, batches=3, sync=False), (2, 4)),
        (Case("tensorwise-high-wgrad", reshard=False, mixed=True, checkpointed=True, batches=2), (2,)),
        (Case("delayed", checkpointed=True, each_layer=True, fuse=False), (2,)),
        (Case(dtype=torch.bfloat16, frozen=True, columns=True), (2,)),
        (Case("delayed", replicas=2), (4,)),
    ],
    ids=str,
)
def test_training_is_bitwise_the_same(pool: Ranks, case: Case, sizes: tuple[int, ...]) -> None:
    for ranks in sizes:
        pool.run(in_8_bits, ranks, case)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", [Case("delayed", mixed=True, batches=2), Case(dtype=torch.bfloat16)], ids=str)
def test_training_on_a_gpu(pool: Ranks, case: Case) -> None:
    """One rank: nothing is sent, but shards are quantized on other streams."""
    pool.run(in_8_bits, 1, replace(case, device="cuda"))


def nothing_kept(group: Any) -> None:
    """After a forward, FSDP2 has freed everything that layers save of their weights."""
    model, kept = sharded(group, Case(fuse=False)), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model[0](batch(group, 0))
    weights = {tuple(layer.weight.shape) for layer in layers_of(model[0])}
    codes = [tensor for tensor in kept if tensor.itemsize == 1 and tuple(tensor.shape) in weights]
    assert len(codes) == 5
    assert [tensor.untyped_storage().nbytes() for tensor in codes] == [0] * 5
    y.square().mean().backward()


def test_no_copy_of_a_weight_is_saved_for_the_backward(pool: Ranks) -> None:
    pool.run(nothing_kept, 2)


@pytest.mark.parametrize("fuse", [True, False])
def test_compiled_blocks(pool: Ranks, fuse: bool) -> None:
    pool.run(compiled, 2 if fuse else 1, Case("delayed", fuse=fuse, compiled=True))


def compiled(group: Any, case: Case) -> None:
    counted = torch._dynamo.utils.counters
    counted.clear()
    train_the_same(group, case)
    assert not counted["graph_break"]
    assert counted["stats"]["unique_graphs"] <= 4  # each model's blocks once, or once with either input's history


# Traffic


class Traffic(TorchDispatchMode):
    """The bytes that this rank passes to each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[int] = []
        self.reduced: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.gathered.append(args[1].nbytes)
        if func is torch.ops.c10d.allreduce_.default:
            self.reduced.append(sum(tensor.nbytes for tensor in args[0]))
        return func(*args, **(kwargs or {}))


def traffic(group: Any, case: Case, gathered: bool) -> tuple[list[int], list[int], int]:
    """Bytes of the all-gathers and of the all-reduces of one step after the first, and the number of elements."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(MLP(24, 40) for _ in range(3)))
    kp.fp8.convert(model, case.recipe, monitor=None, fsdp_all_gather=gathered)
    policy = MixedPrecisionPolicy(torch.bfloat16 if case.mixed else None)
    for part in (*model, model):
        fully_shard(part, mesh=mesh_of(group), mp_policy=policy, reshard_after_forward=case.reshard)
    optimizer = optimizer_of(model)
    step(group, model, optimizer, case, 0)
    with Traffic() as sent:
        step(group, model, optimizer, case, 1)
    return sent.gathered, sent.reduced, sum(local(parameter).numel() for parameter in model.parameters())


@pytest.mark.parametrize(("ranks", "mixed", "reshard"), [(2, True, True), (2, False, False), (4, True, False)])
def test_a_gathered_element_is_a_byte(pool: Ranks, ranks: int, mixed: bool, reshard: bool) -> None:
    case = Case(mixed=mixed, reshard=reshard)
    for found, plain in zip(
        pool.run(traffic, ranks, case, True), pool.run(traffic, ranks, case, False), strict=True
    ):
        gathered, reduced, elements = found
        passes = 2 if reshard else 1  # the forward's, and the backward's
        assert sum(gathered) == passes * elements
        assert sum(plain[0]) == passes * elements * (2 if mixed else 4)
        assert reduced == [4] * 9 * passes  # the amax of each of nine weights
        assert plain[1] == []


# Changes of weights

FACTORS = (1.3, 0.6, 1.7)


def changed_in_place(model: Any, number: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(FACTORS[number])


def changed_past_the_version(model: Any, number: int) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(FACTORS[number])


def loaded(model: Any, number: int) -> None:
    model.load_state_dict({name: value * FACTORS[number] for name, value in model.state_dict().items()})


def assigned(model: Any, number: int) -> None:
    state = {name: value * FACTORS[number] for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def moved(model: Any, number: int) -> None:
    model._apply(lambda tensor: tensor * FACTORS[number])


def gathered_early(model: Any, number: int) -> None:
    model[1].unshard(async_op=True)


def changed_within_a_forward(model: Any, number: int) -> None:
    def change(block: Any, _: Any) -> None:
        handle.remove()
        with torch.no_grad():
            block.last.weight.mul_(FACTORS[number])

    handle = model[1].register_forward_pre_hook(change, prepend=True)


def changed_and_gathered_early(model: Any, number: int) -> None:
    changed_past_the_version(model, number)
    model[1].unshard()


WAYS = (
    changed_in_place,
    changed_past_the_version,
    loaded,
    assigned,
    moved,
    gathered_early,
    changed_within_a_forward,
    changed_and_gathered_early,
)


def changes(group: Any, way: int) -> None:
    """Replaced parameters are not the optimizer's, so only forwards and backwards follow."""
    model, plain = (sharded(group, Case(), gathered=gathered) for gathered in (True, False))
    for number in range(3):
        found = []
        for each in (model, plain):
            optimizer = torch.optim.SGD(each.parameters(), lr=1e-3, foreach=number > 0)
            found.append(step(group, each, optimizer, Case(), number))
            WAYS[way](each, number)
            with torch.no_grad():
                found[-1].append(each(batch(group, 50)))
            WAYS[way](each, number)
        same(*found)


@pytest.mark.parametrize("way", range(len(WAYS)), ids=[way.__name__ for way in WAYS])
def test_every_change_of_a_weight_is_seen(pool: Ranks, way: int) -> None:
    pool.run(changes, 2, way)


def parts_alone(group: Any) -> None:
    """Blocks are called directly, and their weights written without a version bump."""
    found: list[list[torch.Tensor]] = []
    for gathered in (True, False):
        model = sharded(group, Case(), gathered=gathered)
        found.append([])
        for number in range(3):
            y = model[1](model[0](batch(group, number)))
            y.square().mean().backward()
            found[-1].append(y.detach())
            changed_past_the_version(model, number)
    same(*found)


def test_single_chunks(pool: Ranks) -> None:
    pool.run(parts_alone, 2)


def several_graphs(group: Any) -> None:
    """Two forwards, one without gradients between them, and the backwards in the order of the forwards."""
    found = []
    for gathered in (True, False):
        model = sharded(group, Case(reshard=gathered), gathered=gathered)
        ys = [model(batch(group, 0)), model(batch(group, 1))]
        with torch.no_grad():
            ys.append(model(batch(group, 2)))
        for y in ys[:2]:
            y.square().mean().backward()
        found.append([*(y.detach() for y in ys), *(local(parameter.grad) for parameter in model.parameters())])
    same(*found)


def test_several_graphs_at_once(pool: Ranks) -> None:
    pool.run(several_graphs, 2)


def step_before_the_backward(group: Any) -> None:
    """FSDP2 gathers the current weights for the backward, even if a step did not bump their version."""
    found = []
    for trace in (True, False):
        model = sharded(group, Case(each_layer=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=not trace)
        model(batch(group, 0)).square().mean().backward()
        x = batch(group, 1).requires_grad_()
        y = model(x)
        optimizer.step()
        y.square().mean().backward()
        found.append([y.detach(), x.grad, *(local(parameter.grad) for parameter in model.parameters())])
    same(*found)


def test_a_step_between_forward_and_backward(pool: Ranks) -> None:
    pool.run(step_before_the_backward, 2)


# The view of other code


def optimizer_state(model: nn.Module) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return [value for state in optimizer.state.values() for value in state.values()]


def checkpoints(group: Any, folder: str) -> None:
    model, plain = train_the_same(group, Case("delayed"))
    assert [type(value) for value in model.state_dict().values()] == [
        type(value) for value in plain.state_dict().values()
    ]
    for layer in layers_of(model):
        assert type(layer.weight) is nn.Parameter or type(layer.weight) is DTensor
        assert type(layer.weight._local_tensor) is ShardedWeight
    for value in (*model.state_dict().values(), *optimizer_state(model)):
        assert type(value._local_tensor if isinstance(value, DTensor) else value) is torch.Tensor
    same(list(map(local, model.state_dict().values())), list(map(local, plain.state_dict().values())))
    buffer = io.BytesIO()
    torch.save({name: local(value) for name, value in model.state_dict().items()}, buffer)
    same(list(kp.fp8.state_dict(model).values()), list(kp.fp8.state_dict(plain).values()))
    dcp.save(
        {"model": model.state_dict(), "fp8": kp.fp8.state_dict(model)}, checkpoint_id=folder, process_group=group
    )
    found = []
    for gathered in (True, False):
        twin = sharded(group, Case("delayed"), gathered=gathered)
        state = {"model": twin.state_dict(), "fp8": kp.fp8.state_dict(twin)}
        dcp.load(state, checkpoint_id=folder, process_group=group)
        twin.load_state_dict(state["model"])
        kp.fp8.load_state_dict(twin, state["fp8"])
        same(list(map(local, twin.parameters())), list(map(local, model.parameters())))
        found.append(step(group, twin, optimizer_of(twin), Case(), 9))
    same(*found)


def test_parameters_and_checkpoints_are_fsdp2s_own(pool: Ranks, tmp_path: Any) -> None:
    pool.run(checkpoints, 2, str(tmp_path))


def reading(group: Any) -> str:
    model = sharded(group, Case())
    model.unshard()
    weight = layers_of(model[0])[0].weight
    assert not isinstance(weight, GatheredWeight)  # the root gathers no block's
    model[0].unshard()
    weight = layers_of(model[0])[0].weight
    assert (type(weight), weight.dtype, [*weight.shape]) == (GatheredWeight, torch.float32, [40, 24])
    assert "GatheredWeight" in repr(weight)
    assert torch.equal(torch.zeros_like(weight), torch.zeros(40, 24))
    assert type(torch.empty_like(weight)) is torch.Tensor
    try:
        weight.norm()
    except NotImplementedError as error:
        model[0].reshard()
        assert bool(layers_of(model[0])[0].weight.full_tensor().norm() > 0)
        return str(error)
    raise AssertionError("a gathered weight was read")


def test_reading_a_gathered_weight_is_an_error_with_a_remedy(pool: Ranks) -> None:
    for message in pool.run(reading, 2):
        assert "shape [40, 24]" in message
        assert "full_tensor()" in message
        assert "convert without fsdp_all_gather" in message


def test_reverting_before_sharding_restores_the_weights() -> None:
    model = unsharded(Case())
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    kp.fp8.revert(model)
    kp.fp8.convert(model, "tensorwise", fsdp_all_gather=True)
    assert all(type(layer.weight.data) is ShardedWeight for layer in layers_of(model))
    assert all(type(value) is torch.Tensor for value in model.state_dict().values())
    x = torch.randn(6, 24)
    found = model(x)  # also where it is not sharded
    found.sum().backward()
    assert torch.equal(copy.deepcopy(model)(x), found)
    kp.fp8.revert(model)
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert type(parameter.data) is torch.Tensor
        assert torch.equal(parameter, weights[name])
    assert torch.equal(kp.fp8.convert(model, "tensorwise")(x), found)


def reverting(group: Any) -> None:
    kp.fp8.revert(sharded(group, Case()))


def test_reverting_after_sharding_is_an_error_with_a_remedy(pool: Ranks) -> None:
    for kind, message in pool.outcomes(reverting, 1):
        assert kind == "error"
        assert "use kp.fp8.revert(model) before fully_shard" in message


# Layers that are gathered in their dtype


def notes(model: nn.Module) -> dict[str, str]:
    return {
        layer.name: "; ".join(note for note in layer.notes if note.startswith(("all-gathered", "not all-gathered")))
        for layer in kp.fp8.report(model).layers
    }


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding(x)))


def test_weights_that_cannot_be_gathered_in_fp8_have_a_reason() -> None:
    mine = replace(kp.fp8.RECIPES["tensorwise"], name="mine", high_precision=("dx",))
    found = {}
    for recipe in ("auto", "rowwise", "blockwise", mine, "delayed"):
        model = kp.fp8.convert(nn.Sequential(nn.Linear(16, 16)), recipe, fsdp_all_gather=True)
        found[str(recipe)] = notes(model)["0"]
    assert found == {
        "auto": "not all-gathered in FP8: auto decides with each input which GEMMs are in FP8",
        "rowwise": "not all-gathered in FP8: its weight has rowwise scaling",
        "blockwise": "not all-gathered in FP8: its weight has 128x128 block scaling",
        "mine": "not all-gathered in FP8: dx in high precision",
        "delayed": "all-gathered in FP8",
    }
    tied = kp.fp8.convert(Tied(), "tensorwise", fsdp_all_gather=True)
    assert notes(tied) == {
        "inner": "all-gathered in FP8", "head": "not all-gathered in FP8: other modules share its weight"
    }  # fmt: skip


def offloaded(group: Any) -> None:
    found = []
    for gathered in (True, False):
        model: Any = kp.fp8.convert(nn.Sequential(nn.Linear(16, 16)), "tensorwise", fsdp_all_gather=gathered)
        with torch.no_grad():
            model[0].weight.copy_(torch.linspace(-1, 1, 256).view(16, 16))
            model[0].bias.zero_()
        fully_shard(model, mesh=mesh_of(group), offload_policy=CPUOffloadPolicy(pin_memory=False))
        y = model(torch.linspace(-2, 2, 64).view(4, 16))
        y.sum().backward()
        found.append([y.detach(), local(model[0].weight.grad)])
    same(*found)


def test_offloaded_weights(pool: Ranks) -> None:
    pool.run(offloaded, 2)


def falling_back(group: Any) -> None:
    """A layer that falls back on one rank computes with the dequantized weight there; other ranks go on in FP8."""
    model = sharded(group, Case(fuse=False))
    optimizer = optimizer_of(model)
    step(group, model, optimizer, Case(), 0)
    if dist.get_rank(group) == 1:
        model[0].last.fp8_fallback = "the test says so"
    before = [layer.fp8_gradient_counts.clone() for layer in layers_of(model)]
    found = step(group, model, optimizer, Case(), 1)
    assert all(bool(value.isfinite().all()) for value in found)
    quantized = [
        not torch.equal(layer.fp8_gradient_counts, counts)
        for layer, counts in zip(layers_of(model), before, strict=True)
    ]
    assert quantized.count(False) == (dist.get_rank(group) == 1)


def test_a_fallback_on_one_rank(pool: Ranks) -> None:
    pool.run(falling_back, 2)


def another_recipe(group: Any) -> None:
    model = sharded(group, Case())
    model(batch(group, 0))
    for layer in layers_of(model):
        layer.fp8_recipe = kp.fp8.RECIPES["rowwise"]
    model(batch(group, 0))


def test_another_recipe_is_an_error_with_a_remedy(pool: Ranks) -> None:
    for kind, message in pool.outcomes(another_recipe, 1):
        assert kind == "error"
        assert "has the recipe rowwise now: its weight has rowwise scaling; use a recipe with" in message
