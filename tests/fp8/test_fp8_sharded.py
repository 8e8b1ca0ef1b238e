"""Converted layers under FSDP2: as without it, and with weights that are gathered in 8 bits, bit for bit."""

from __future__ import annotations

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
from kernel_pytorch.fp8.gathered_weight import GatheredWeight
from ranks import Ranks
from sharded_models import MLP, Case, batch, layers_of, local, mesh_of, optimizer_of, same, sharded, step, unsharded

RANKS = 4


# Training


def train_the_same(group: Any, case: Case) -> tuple[Any, Any]:
    """A model whose weights are gathered in 8 bits, and one with plain FSDP2: no bit differs in any step."""
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
def test_training_is_the_same_to_the_bit(pool: Ranks, case: Case, sizes: tuple[int, ...]) -> None:
    for ranks in sizes:
        pool.run(in_8_bits, ranks, case)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", [Case("delayed", mixed=True, batches=2), Case(dtype=torch.bfloat16)], ids=str)
def test_training_on_a_gpu(pool: Ranks, case: Case) -> None:
    """One rank: nothing is sent, but parts are cast on streams of their own."""
    pool.run(in_8_bits, 1, replace(case, device="cuda"))


def nothing_kept(group: Any) -> None:
    """After a forward, FSDP2 has freed whatever layers keep of their weights for the backward."""
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


def test_no_copy_of_a_weight_waits_for_the_backward(pool: Ranks) -> None:
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
    """The bytes that this rank gives to each collective."""

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
    """Bytes of the all-gathers and of the all-reduces of one step after the first, and how many numbers there are."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(MLP(24, 40) for _ in range(3)))
    kp.fp8.convert(model, case.recipe, monitor=None)
    policy = MixedPrecisionPolicy(torch.bfloat16 if case.mixed else None)
    for part in (*model, model):
        fully_shard(part, mesh=mesh_of(group), mp_policy=policy, reshard_after_forward=case.reshard)
    if gathered:
        kp.fp8.gather(model)
    optimizer = optimizer_of(model)
    step(group, model, optimizer, case, 0)
    with Traffic() as sent:
        step(group, model, optimizer, case, 1)
    return sent.gathered, sent.reduced, sum(local(parameter).numel() for parameter in model.parameters())


@pytest.mark.parametrize(("ranks", "mixed", "reshard"), [(2, True, True), (2, False, False), (4, True, False)])
def test_a_gathered_number_is_a_byte(pool: Ranks, ranks: int, mixed: bool, reshard: bool) -> None:
    case = Case(mixed=mixed, reshard=reshard)
    for found, plain in zip(
        pool.run(traffic, ranks, case, True), pool.run(traffic, ranks, case, False), strict=True
    ):
        gathered, reduced, numbers = found
        passes = 2 if reshard else 1  # the forward's, and the backward's
        assert sum(gathered) == passes * numbers
        assert sum(plain[0]) == passes * numbers * (2 if mixed else 4)
        assert reduced == [4 * 2 * 9]  # once: for each of the layers, a magnitude and whether it fell back
        assert plain[1] == []


# Weights that change in any way

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
    """The optimizer does not follow what replaces parameters: after that, forwards and backwards alone."""
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
    """Blocks are called without the model around them, and their weights are written past the version."""
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


def test_parts_that_are_called_alone(pool: Ranks) -> None:
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
    """FSDP2 gathers for the backward what weights are by then, also where the step leaves no trace in versions."""
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


# What others see


def checkpoints(group: Any, folder: str) -> None:
    model, plain = train_the_same(group, Case("delayed"))
    assert [type(value) for value in model.state_dict().values()] == [
        type(value) for value in plain.state_dict().values()
    ]
    for layer in layers_of(model):
        assert type(layer.weight) is nn.Parameter or type(layer.weight) is DTensor
        assert type(layer.weight._local_tensor) is torch.Tensor
        assert not layer.weight._local_tensor.__dict__
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
        assert "kp.fp8.gather(model, layers=...)" in message


def reverting(group: Any) -> None:
    model, plain = train_the_same(group, Case())
    model[1].unshard(async_op=True)
    for each in (model, plain):
        kp.fp8.revert(each)
    assert not layers_of(model)
    found, wanted = (step(group, each, optimizer_of(each), Case(), 5) for each in (model, plain))
    same(found, wanted)


def test_reverting_gathers_as_before(pool: Ranks) -> None:
    pool.run(reverting, 2)


# Layers that stay as they are


def notes(model: nn.Module) -> dict[str, str]:
    return {
        layer.name: "; ".join(note for note in layer.notes if note.startswith("all-gathered"))
        for layer in kp.fp8.report(model).layers
    }


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding(x)))


def refusals(group: Any) -> list[str]:
    """Notes on a layer, for each way in which it cannot be."""
    found = []
    mine = replace(kp.fp8.RECIPES["tensorwise"], name="mine", high_precision=("dx",))
    for recipe in ("auto", "rowwise", "blockwise", mine):
        model: Any = fully_shard(kp.fp8.convert(nn.Sequential(nn.Linear(16, 16)), recipe), mesh=mesh_of(group))
        found.append(notes(kp.fp8.gather(model))["0"])
        model(torch.randn(4, 16)).sum().backward()
    for arguments in ({"reshard_after_forward": 2}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        model = kp.fp8.convert(nn.Sequential(nn.Linear(16, 16)), "tensorwise")
        fully_shard(model, mesh=mesh_of(group), **arguments)
        found.append(notes(kp.fp8.gather(model))["0"])
        model(torch.randn(4, 16)).sum().backward()
    return found


def refused(group: Any) -> list[dict[str, str]]:
    model: Any = kp.fp8.convert(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), "delayed")
    fully_shard(model[0], mesh=mesh_of(group))
    fully_shard(model[1], mesh=mesh_of(group))
    kp.fp8.gather(model, layers=lambda name, _: name != "1")
    model(torch.randn(4, 16)).sum().backward()
    tied = fully_shard(kp.fp8.convert(Tied(), "tensorwise"), mesh=mesh_of(group))
    kp.fp8.gather(tied)(torch.tensor([[1, 2]])).sum().backward()
    return [notes(model), notes(tied)]


def test_what_cannot_be_gathered_in_8_bits_says_why(pool: Ranks) -> None:
    own = "all-gathered in fp32: "
    for found in pool.run(refusals, 4):
        assert found == [
            own + "auto decides with each input what is in 8 bits",
            own + "its weight has a scale for each row",
            own + "its weight has a scale for each square",
            own + "dx in high precision",
            own + "reshard_after_forward is a number",
            own + "its weight is offloaded to the CPU",
        ]
    for found, tied in pool.run(refused, 2):
        assert found == {"0": "all-gathered in FP8", "1": own + "left out", "2": own + "FSDP2 has not sharded it"}
        assert tied == {"inner": "all-gathered in FP8", "head": own + "other modules share its weight"}


def test_wrong_models_are_named_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"model: .* kp\.fp8\.convert\(model\) first"):
        kp.fp8.gather(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"model: .* fully_shard\(model\) first"):
        kp.fp8.gather(kp.fp8.convert(nn.Sequential(nn.Linear(4, 4)), "tensorwise"))


def falling_back(group: Any) -> dict[str, str]:
    """A layer falls back on one rank alone: one forward later than it would, with the same numbers on all."""
    model, plain = (sharded(group, Case(), gathered=gathered) for gathered in (True, False))
    optimizers = [optimizer_of(each) for each in (model, plain)]
    for number in range(4):
        for fell, each in ((1, model), (2, plain)):
            if number == fell and dist.get_rank(group) == 1:
                each[0].last.fp8_fallback = "the test says so"
        found, wanted = (
            step(group, each, optimizer, Case(), number)
            for each, optimizer in zip((model, plain), optimizers, strict=True)
        )
        same(found, wanted)
    return notes(model)


def another_recipe(group: Any) -> None:
    model = sharded(group, Case())
    model(batch(group, 0))
    for layer in layers_of(model):
        layer.fp8_recipe = kp.fp8.RECIPES["rowwise"]
    model(batch(group, 0))


def test_another_recipe_is_an_error_with_a_remedy(pool: Ranks) -> None:
    for kind, message in pool.outcomes(another_recipe, 1):
        assert kind == "error"
        assert "recipe rowwise now and had tensorwise" in message
        assert "call kp.fp8.gather(model) again" in message


def test_a_fallback_on_one_rank(pool: Ranks) -> None:
    for found in pool.run(falling_back, 2):
        assert found.pop("0.last") == "all-gathered in fp32: it fell back"
        assert set(found.values()) == {"all-gathered in FP8"}
