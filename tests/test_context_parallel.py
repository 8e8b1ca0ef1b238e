"""Attention over ranks: every schedule and placement against the definition, traffic, faults, and the tests, tested.

Ranks are processes on this machine that talk through Gloo. A call travels to them as a few numbers; what they
return is put together here, apart from the code under test, and goes through the op's own budget.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import multiprocessing
import os
import pickle
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import kernel_pytorch as kp
from kernel_pytorch.context_parallel import Context, Placement, RankError
from kernel_pytorch.distributed import parts, schedules
from kernel_pytorch.distributed.context import _contexts as contexts
from kernel_pytorch.distributed.placement import table_unit
from kernel_pytorch.distributed.schedules import heads_refusal
from kernel_pytorch.distributed.transport import Transport
from kernel_pytorch.hardware_abstraction.dispatch import Function
from kernel_pytorch.masks import Mask, blocks, causal, documents, full, prefix, sinks, window
from kernel_pytorch.ops.attention.definition import ATTENTION, reference
from kernel_pytorch.testing import Comparison, compare, poisoned
from ranks import SIZES, Ranks, started
from test_attention_properties import FORMATS, Shape, one_key_mostly
from test_masks import Expression, built, expressions

# What runs on the ranks.


@dataclass(frozen=True)
class Case:
    """A call over ranks."""

    shape: Shape
    schedule: str = "auto"
    style: str = "auto"
    placed_for: Mask | None = None
    """The mask that tokens are placed for, where it is not the call's own."""
    kernel: str | None = None

    def on(self, ranks: int) -> Case:
        """The case with a schedule that so many ranks can run."""
        heads = self.shape.kv_heads * self.shape.group
        refused = self.schedule == "heads" and heads_refusal(ranks, heads, self.shape.kv_heads)
        return replace(self, schedule="ring") if refused else self

    def context(self, group: Any, **options: Any) -> Context:
        mask = self.placed_for or built(self.shape.expression)
        made = {"placement": self.style, "schedule": self.schedule, "timeout": 60.0, **options}
        return Context(group, self.shape.q_len, mask, **made)


def local(case: Case, cp: Context) -> list[torch.Tensor]:
    """This rank's q, k and v, as the case lays them out."""
    arguments = case.shape.arguments()
    own = [cp.shard(arguments[name], 2) for name in ("q", "k", "v")]
    if case.shape.layout == "projected":
        own = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in own]
    return [x.requires_grad_() for x in own]


def numbers(x: torch.Tensor) -> Any:
    return x.detach().float().numpy()


held: dict[str, Any] = {}


def forward(group: Any, case: Case) -> dict[str, Any]:
    cp = case.context(group)
    own = local(case, cp)
    with poisoned():
        out = kp.attention(
            *own, built(case.shape.expression), group=cp, return_lse=case.shape.lse_grad, kernel=case.kernel
        )
    outputs = dict(zip(("out", "lse"), out if case.shape.lse_grad else (out,), strict=False))
    held.update(cp=cp, own=own, outputs=outputs, case=case)
    sent = cp.traffic.sent_bytes
    return {"at": cp.positions().numpy(), "sent": sent, **{name: numbers(x) for name, x in outputs.items()}}


def backward(group: Any, upstream: dict[str, Any]) -> dict[str, Any]:
    cp, outputs = held["cp"], held["outputs"]
    before = cp.traffic.sent_bytes
    given = [cp.shard(torch.from_numpy(upstream[name]), 2).to(x.dtype) for name, x in outputs.items()]
    with poisoned():
        found = torch.autograd.grad(list(outputs.values()), held["own"], given)
    named = {name: numbers(x) for name, x in zip(("dq", "dk", "dv"), found, strict=True)}
    return {"at": cp.positions().numpy(), "sent": cp.traffic.sent_bytes - before, **named}


# What runs here.


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Ranks for all tests of this module; they read no measured choices of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNEL_PYTORCH_CACHE", str(tmp_path_factory.mktemp("ranks") / "cache"))
        with started(max(SIZES)) as ranks:
            yield ranks
    assert not multiprocessing.active_children()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Spread(torch.autograd.Function):
    """A call over ranks as one differentiable function of the whole tensors."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run) -> Any:
        ctx.run, ctx.dtype = run, q.dtype
        found = run.call(forward, run.case)
        if "lse" not in found:  # not asked for: the reference's, so that only what was asked for is compared
            wide = (x.double() for x in (q, k, v))
            found["lse"] = reference(*wide, run.mask, q.shape[3] ** -0.5, "grad")[1].float()
            ctx.mark_non_differentiable(found["lse"])
        return found["out"].to(q.dtype), found["lse"]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> Any:
        found = ctx.run.call(backward, {"out": numbers(dout), "lse": numbers(dlse)})
        return *(found[name].to(ctx.dtype) for name in ("dq", "dk", "dv")), None


@dataclass
class Run:
    """One case on some ranks."""

    pool: Ranks
    ranks: int
    case: Case
    broken: str | None = None

    def __post_init__(self) -> None:
        self.mask = built(self.case.shape.expression)
        self.sent: list[list[int]] = []
        """Bytes by rank, of the forward and of the backward."""
        self.tokens: list[Any] = []
        self.found: dict[str, torch.Tensor] = {}

    def call(self, function: Any, *arguments: Any) -> dict[str, torch.Tensor]:
        if self.broken:
            function = {forward: forward_broken, backward: backward_broken}[function]
            arguments = (*arguments, self.broken)
        by_rank = self.pool.run(function, self.ranks, *arguments)
        self.tokens = [one.pop("at") for one in by_rank]
        self.sent.append([one.pop("sent") for one in by_rank])
        order = np.argsort(np.concatenate(self.tokens))
        assert len(order) == self.case.shape.q_len
        whole = {name: np.concatenate([one[name] for one in by_rank], axis=2)[:, :, order] for name in by_rank[0]}
        made = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in whole.items()}
        self.found |= {name: x.clone() for name, x in made.items()}  # what autograd returns it marks
        return made

    def compared(self) -> dict[str, Comparison]:
        """Outputs and gradients against the float64 reference, with the op's budget."""
        found = compare(ATTENTION, lambda q, k, v, *_: Spread.apply(q, k, v, self), self.case.shape.arguments())
        return {comparison.tensor: comparison for comparison in found}

    def wrong(self) -> dict[str, str]:
        """What is out of its budget, with its error."""
        slack = math.inf if one_key_mostly(self.case.shape) else 4.0  # as for the kernels of one process
        return {
            name: str(comparison)
            for name, comparison in self.compared().items()
            if comparison.error > comparison.budget * (slack if name in ATTENTION.cancelling else 1)
        }

    def least(self, tile: int = 1) -> list[list[int]]:
        """What each rank must send, forward and backward: the keys that others' queries attend to, once.

        From the dense matrix, by tiles of queries and keys where the mask has tables.
        """
        shape, n = self.case.shape, self.case.shape.q_len
        pairs = self.mask.dense(n, n).flatten(0, 1).any(dim=0)
        if tile > 1:
            padded = torch.nn.functional.pad(pairs, (0, -n % tile, 0, -n % tile))
            tiles = padded.unflatten(0, (-1, tile)).unflatten(2, (-1, tile)).any(dim=3).any(dim=1)
            pairs = tiles.repeat_interleave(tile, 0).repeat_interleave(tile, 1)[:n, :n]
        needs = [pairs[torch.from_numpy(own)].any(dim=0) for own in self.tokens]
        keys = [[0 if r == s else int(needs[r][own].sum()) for s, own in enumerate(self.tokens)] for r in self.all]
        a_key = shape.batch * shape.kv_heads * (shape.dim + shape.value_dim)
        forward = [sum(keys[r][s] for r in self.all) * a_key * FORMATS[shape.dtype].itemsize for s in self.all]
        return [forward, [forward[s] + sum(keys[s]) * a_key * 4 for s in self.all]]

    @property
    def all(self) -> range:
        return range(self.ranks)


def small(expression: Expression, **changes: Any) -> Shape:
    """A call of ordinary size."""
    known = Shape(1, 2, 2, 120, 120, 32, 32, "float32", expression, True, "plain")
    length = changes.pop("length", 120)
    return replace(known, q_len=length, kv_len=length, **changes)


# Generated calls.


@st.composite
def calls(draw: st.DrawFn) -> Case:
    batch = draw(st.sampled_from([1, 1, 2]))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (1, 4), (1, 8), (2, 4), (8, 1)]))
    length = draw(st.integers(1, 130) | st.sampled_from([1, 2, 3, 7, 8, 9, 17, 64, 127, 128]))
    expression = draw(expressions(length, length, batch, kv_heads * group))
    dim = draw(st.sampled_from([16, 32, 40]))
    tables = built(expression).layout(length, length).tables
    return Case(
        Shape(
            batch=batch,
            kv_heads=kv_heads,
            group=group,
            q_len=length,
            kv_len=length,
            dim=dim,
            value_dim=draw(st.sampled_from([dim, dim, 24])),
            dtype=draw(st.sampled_from(["float32", "bfloat16"])),
            expression=expression,
            lse_grad=draw(st.booleans()),
            layout=draw(st.sampled_from(["plain", "projected"])),
        ),
        schedule=draw(st.sampled_from(["ring", "ring", "gather", "heads", "auto"])),
        style=draw(st.sampled_from(["auto", "contiguous", "zigzag", "balanced"])),
        # A placement for other masks serves as well, as far as it does not cut a table's blocks.
        placed_for=None if tables else draw(st.sampled_from([None, causal(), window(5)])),
    )


# No search for a smaller example: each goes to 15 ranks.
@settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.generate])
@given(calls())
def test_any_call_on_any_ranks(pool: Ranks, case: Case) -> None:
    """Within the op's budget on 1, 2, 4 and 8 ranks; nothing is sent that the mask does not need."""
    for ranks in SIZES:
        run = Run(pool, ranks, case.on(ranks))
        assert run.wrong() == {}, (ranks, run.case)
        if run.case.schedule not in ("ring", "gather"):
            continue
        known = run.mask.layout(case.shape.q_len, case.shape.kv_len)
        if not known.tables:
            assert run.sent == run.least(), (ranks, run.case)
        else:
            for sent, least, most in zip(run.sent, run.least(), run.least(table_unit(known)), strict=True):
                assert all(a <= b <= c for a, b, c in zip(least, sent, most, strict=True)), (ranks, run.case)


TABLE = np.random.default_rng(0).random((4, 8, 8)) < 0.4
CASES = {
    "causal": Case(small(("causal",)), "ring"),
    "gather": Case(small(("|", ("causal",), ("prefix", 40))), "gather"),
    "window-heads": Case(small(("|", ("window", 20, 3), ("sinks", 4)), group=4), "heads"),
    "documents": Case(small(("documents", [[50, 70], [119, 1]], ("causal",)), batch=2), "ring", "balanced"),
    "table": Case(small(("&", ("causal",), ("blocks", TABLE.tolist(), 16))), "ring", "zigzag"),
    "bfloat16": Case(small(("causal",), dtype="bfloat16", value_dim=24), "ring"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_number_of_ranks_and_the_run_do_not_matter(pool: Ranks, name: str) -> None:
    """Between 1, 2, 4 and 8 ranks results differ by less than the budget of one; run again, by no bit."""
    results = {}
    for ranks in SIZES:
        case = CASES[name].on(ranks)
        run, again = Run(pool, ranks, case), Run(pool, ranks, case)
        found = run.compared()
        again.compared()
        assert all(torch.equal(x, again.found[which]) for which, x in run.found.items())
        results[ranks] = run.found
    assert set(found) == set(results[1]) == {"out", "lse", "dq", "dk", "dv"}
    for ranks, which in ((r, w) for r in SIZES for w in found):
        one, other = (results[r][which].double() for r in (1, ranks))
        assert torch.equal(one.isfinite(), other.isfinite())
        one, other = (torch.where(x.isfinite(), x, 0.0) for x in (one, other))
        rows = one.abs().amax(dim=-1)
        if which in ATTENTION.cancelling:
            rows = rows.clamp_min(float(rows.median()))
        differences = (one - other).abs().amax(dim=-1)
        assert bool((differences <= found[which].budget * rows).all()), (ranks, which)


@pytest.mark.parametrize("ranks", SIZES)
def test_a_pinned_kernel_serves_every_part(pool: Ranks, ranks: int) -> None:
    """One that knows full and causal alone: in zigzag, causal has no other parts."""
    case = Case(small(("causal",), lse_grad=False, length=119), "ring", "zigzag", kernel="cpu-flash")
    assert Run(pool, ranks, case).wrong() == {}


@pytest.mark.parametrize("length", [0, 1, 3])
def test_fewer_tokens_than_ranks(pool: Ranks, length: int) -> None:
    for schedule in ("ring", "gather", "heads"):
        run = Run(pool, 8, Case(small(("causal",), length=length, kv_heads=8, group=1), schedule))
        if length:
            assert run.wrong() == {}
        else:
            assert run.call(forward, run.case)["out"].shape == (1, 8, 0, 32)
            gradients = run.call(backward, {"out": np.zeros((1, 8, 0, 32), "f"), "lse": np.zeros((1, 8, 0), "f")})
            assert [x.shape[2] for x in gradients.values()] == [0, 0, 0]


# Traffic.


@pytest.mark.parametrize("schedule", ["ring", "gather"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_causal_sends_hardly_more_than_it_must(pool: Ranks, schedule: str, dtype: str) -> None:
    shape = small(("causal",), length=1000, dim=16, value_dim=8, dtype=dtype)
    for ranks in SIZES[1:]:
        run = Run(pool, ranks, Case(shape, schedule))
        run.call(forward, run.case)
        run.call(backward, {"out": np.ones((1, 4, 1000, 8), "f"), "lse": np.ones((1, 4, 1000), "f")})
        for sent, least in zip(run.sent, run.least(), strict=True):
            assert sum(least) > 0
            assert sum(sent) <= 1.1 * sum(least)


def test_a_window_sends_a_fraction_of_the_full_ring(pool: Ranks) -> None:
    """64k tokens on 8 ranks; what the full ring would send follows from what it does at 1k."""
    ranks, n, window_size = 8, 1 << 16, 1024
    shape = Shape(1, 1, 1, 1024, 1024, 8, 8, "float32", ("full",), False, "plain")
    a_key = (shape.dim + shape.value_dim) * 4
    whole = Run(pool, ranks, Case(shape, "ring"))
    whole.call(forward, whole.case)
    whole.call(backward, {"out": np.ones((1, 1, 1024, 8), "f")})
    assert whole.sent[0] == [7 * 1024 // 8 * a_key] * 8
    full_ring = [sum(one) * n // 1024 for one in whole.sent]
    run = Run(pool, ranks, Case(replace(shape, q_len=n, kv_len=n, expression=("window", window_size)), "ring"))
    out = run.call(forward, run.case)["out"]
    run.call(backward, {"out": np.ones((1, 1, n, 8), "f")})
    assert run.sent[0] == [window_size * a_key] * 7 + [0]
    assert all(20 * sum(sent) <= full for sent, full in zip(run.sent, full_ring, strict=True))
    alone = kp.attention(*(run.case.shape.arguments()[name] for name in ("q", "k", "v")), run.mask)
    torch.testing.assert_close(out, alone)


def cost(group: Any, case: Case) -> tuple[str, dict[str, int], int]:
    """(the explanation, predicted bytes by schedule, what forward and backward sent)."""
    cp = case.context(group)
    own = local(case, cp)
    mask = built(case.shape.expression)
    explained = kp.explain(kp.attention, *own, mask, group=cp)
    assert cp.traffic.sent_bytes == 0
    torch.autograd.grad(kp.attention(*own, mask, group=cp).sum(), own)
    return str(explained), {one.schedule: one.sent_bytes for one in explained.predictions}, cp.traffic.sent_bytes


@pytest.mark.parametrize("name", ["causal", "window-heads", "gather", "bfloat16"])
def test_explanations_say_what_is_sent(pool: Ranks, name: str) -> None:
    case = replace(CASES[name], shape=replace(CASES[name].shape, lse_grad=False))
    for ranks in (2, 4):
        found = pool.run(cost, ranks, case)
        text, predicted, _ = found[0]
        assert predicted[case.schedule] == pytest.approx(max(sent for *_, sent in found), rel=0.05)
        assert f"on rank 0 of {ranks}" in text
        assert f"{ranks} ranks of {120 // ranks} tokens" in text
        assert "gloo at 1 GB/s" in text
        marked = [line for line in text.splitlines() if line.startswith("->")]
        assert len(marked) == 1
        assert marked[0].startswith(f"-> {case.schedule}")
        assert "pinned" in marked[0]
        if case.schedule == "ring":
            assert f"ring step 0 of {ranks - 1}: " in text
            assert text.rstrip().endswith(("native", "tiled", "cpu-flash"))


# The same through other doors.


def doors(group: Any, case: Case) -> None:
    """A bare group, a mesh dimension and a Context give the same, to the bit."""
    mask, whole = built(case.shape.expression), case.shape.arguments()
    public = kp.context_parallel

    def found(of: Any, cp: Any) -> list[torch.Tensor]:
        own = [public.shard(whole[name], mask, of, dim=2).requires_grad_() for name in ("q", "k", "v")]
        out = kp.attention(*own, mask, group=cp)
        gathered = public.unshard(out, mask, of, dim=2)
        gradients = torch.autograd.grad(gathered.square().sum(), own)
        return [gathered, *(public.unshard(x, mask, of, dim=2) for x in gradients)]

    expected = found(group, Context(group, case.shape.q_len, mask))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    for of, cp in ((group, group), (mesh, mesh), (mesh["cp"], Context(mesh["cp"], case.shape.q_len, mask))):
        for one, other in zip(expected, found(of, cp), strict=True):
            assert torch.equal(one, other)


def mesh_dimension(group: Any) -> None:
    """Two groups of four ranks at once: each has its own sequence."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "cp"))
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    whole = [torch.randn(1, 2, 60, 16, generator=generator) for _ in range(3)]
    cp = Context(mesh["cp"], 60, causal())
    out = cp.unshard(kp.attention(*(cp.shard(x, 2) for x in whole), causal(), group=cp), 2)
    torch.testing.assert_close(out, kp.attention(*whole, causal()))
    with pytest.raises(ValueError, match=r"a mesh of 2 dimensions; pass one of them, as mesh\['cp'\]"):
        Context(mesh, 60, causal())
    with pytest.raises(TypeError, match="expected a process group"):
        kp.attention(*whole, group="cp")


def round_trip(group: Any, mask: Mask, length: int, style: str) -> None:
    cp = Context(group, length, mask, placement=style)
    whole = torch.arange(2 * length * 3, dtype=torch.float32).reshape(2, length, 3)
    weights = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(0))
    own = cp.shard(whole).requires_grad_()
    assert own.shape == (2, cp.tokens, 3)
    assert torch.equal(whole[:, cp.positions()], own)
    again = cp.unshard(own)
    assert torch.equal(again, whole)
    (gradient,) = torch.autograd.grad((again * weights).sum(), own)
    assert torch.equal(gradient, weights[:, cp.positions()])
    assert torch.equal(cp.unshard(own.detach().transpose(0, 1).contiguous(), dim=0), whole.transpose(0, 1))
    for wrong, function in ((whole[:, 1:], cp.shard), (own[:, :0], cp.unshard)):
        if wrong.shape[1] not in (length, cp.tokens):
            with pytest.raises(ValueError, match="tokens in dimension 1"):
                function(wrong)
    if style == "auto":
        assert torch.equal(kp.context_parallel.shard(whole, mask, group), own)
        assert torch.equal(kp.context_parallel.unshard(own, mask, group), whole)
        assert torch.equal(kp.context_parallel.positions(length, mask, group), cp.positions())


def graphs(group: Any, case: Case) -> None:
    """Compiled whole and checkpointed: to the bit what eager mode gives."""
    torch._dynamo.reset()
    cp, mask = case.context(group), built(case.shape.expression)
    own = local(case, cp)

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = kp.attention(q * 2, k, v, mask, group=cp, return_lse=True)
        return out.square().sum() + lse.sum()

    def gradients(function: Any) -> list[torch.Tensor]:
        value = function(*own)
        return [value, *torch.autograd.grad(value, own)]

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = gradients(loss)
    for function in (compiled, compiled, lambda *x: checkpoint(loss, *x, use_reentrant=False)):
        for one, other in zip(expected, gradients(function), strict=True):
            assert torch.equal(one, other)
    with pytest.raises(Exception, match=r"a compiled function takes a kp.context_parallel.Context"):
        torch.compile(lambda q: kp.attention(q, q, q, group=group), fullgraph=True, backend="aot_eager")(own[0])


def short_lived(group: Any, case: Case) -> None:
    """A Context that only its call's graph remembers: it lives until the backward, and no longer."""
    held.clear()
    gc.collect()
    before = len(contexts)

    def loss() -> tuple[torch.Tensor, list[torch.Tensor]]:
        cp = case.context(group)
        own = local(case, cp)
        return kp.attention(*own, built(case.shape.expression), group=cp).sum(), own

    value, own = loss()
    gc.collect()
    assert len(contexts) > before
    torch.autograd.grad(value, own)
    del value
    gc.collect()
    assert len(contexts) == before


def layers(group: Any, length: int) -> list[float]:
    """Errors of a small model whose layers alternate between masks, in one process and on the ranks.

    It carries small differences far: in one process, the larger error of two kernels is the yardstick.
    """
    masks = [causal(), causal() & window(9), causal(), documents([length - 11, 11], causal()), full(), prefix(20)]
    cp = Context(group, length, causal())

    def model(x: torch.Tensor, spread: bool, kernel: str | None) -> torch.Tensor:
        for mask in masks:
            x = x + kp.attention(x, x.roll(1, dims=1), x, mask, group=cp if spread else None, kernel=kernel)
        return x

    whole = torch.randn(1, 4, length, 16, generator=torch.Generator().manual_seed(0))
    results = []
    for dtype, spread, kernel in (
        (torch.float64, False, None),
        (torch.float32, False, None),
        (torch.float32, False, "tiled"),
        (torch.float32, True, None),
    ):
        x = (cp.shard(whole, 2) if spread else whole).to(dtype).requires_grad_()
        y = model(x, spread, kernel)
        found = [y, *torch.autograd.grad(y.square().sum(), [x])]
        results.append([cp.unshard(one.detach(), 2) if spread else one.detach() for one in found])
    exact, *others = results
    one, other, spread_out = (
        max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True))
        for found in others
    )
    return [max(one, other), spread_out]


def test_a_bare_group_and_a_mesh_dimension(pool: Ranks) -> None:
    for ranks in (2, 8):
        for name in ("causal", "table", "documents"):
            pool.run(doors, ranks, CASES[name])
    pool.run(mesh_dimension, 8)


@pytest.mark.parametrize("ranks", SIZES)
def test_shards_come_back_together(pool: Ranks, ranks: int) -> None:
    for mask in (causal(), window(10), documents([30, 45, 2], causal())):
        for style in ("auto", "contiguous", "zigzag", "balanced"):
            pool.run(round_trip, ranks, mask, 77, style)
    pool.run(round_trip, ranks, causal(), 3, "auto")


@pytest.mark.parametrize("name", ["causal", "gather", "window-heads"])
def test_compiled_and_checkpointed(pool: Ranks, name: str) -> None:
    pool.run(graphs, 4, CASES[name])


def test_a_context_is_let_go(pool: Ranks) -> None:
    pool.run(short_lived, 2, CASES["causal"])


@pytest.mark.parametrize("ranks", [2, 8])
def test_layers_with_other_masks_than_the_placement(pool: Ranks, ranks: int) -> None:
    for alone, spread in pool.run(layers, ranks, 99):
        assert spread <= 2 * alone


# Ranks that disagree, refuse, hang or die.


def differing(group: Any, what: str) -> None:
    """One rank calls with something else."""
    odd = dist.get_rank(group) == 1
    shape = small(("causal",), length=64)
    mask, placed, options, keywords = causal(), "zigzag", {"schedule": "ring"}, {}
    if odd:
        if what in ("batch", "kv_heads", "dim", "value_dim", "dtype"):
            others = {"batch": 2, "kv_heads": 4, "dim": 16, "value_dim": 16, "dtype": "bfloat16"}
            shape = replace(shape, **{what: others[what]})
        elif what == "mask":
            mask = causal() & window(70)  # as causal, at this length
        elif what == "placement":
            placed = "contiguous"
        elif what == "schedule":
            options = {"schedule": "gather"}
        else:
            keywords = {"scale": {"scale": 0.5}, "kernel": {"kernel": "tiled"}}[what]
    cp = Context(group, 64, causal(), placement=placed, timeout=20.0, **options)
    kp.attention(*local(Case(shape), cp), mask, group=cp, **keywords)


def works(pool: Ranks, ranks: int) -> None:
    assert Run(pool, ranks, CASES["causal"]).wrong() == {}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("batch", r"ranks disagree on batch \(ranks \[0, 2, 3\]: 1; ranks \[1\]: 2\)"),
        ("kv_heads", r"ranks disagree on q_heads \(ranks \[0, 2, 3\]: 4; ranks \[1\]: 8\)"),
        ("dim", "ranks disagree on head_dim"),
        ("value_dim", "ranks disagree on value_dim"),
        ("dtype", "ranks disagree on dtype"),
        ("mask", "ranks disagree on mask"),
        ("scale", "ranks disagree on scale"),
        ("schedule", "ranks disagree on schedule"),
        ("placement", "ranks disagree on placement"),
        ("kernel", "ranks disagree on kernel"),
    ],
)
def test_ranks_that_disagree_all_raise(pool: Ranks, what: str, message: str) -> None:
    start = time.monotonic()
    for kind, text in pool.outcomes(differing, 4, what):
        assert kind == "error"
        assert re.match(rf"RankError: {message}", text), text
        assert "make every rank call with the same" in text
    assert time.monotonic() - start < 10, "they did not wait for each other"
    works(pool, 4)


def refused(group: Any, what: str) -> None:
    """A call that some rank cannot serve."""
    mask, kernel, shape = causal(), None, small(("causal",), length=64, kv_heads=3, group=1)
    keywords: dict[str, Any] = {}
    options: dict[str, Any] = {"schedule": "ring", "placement": "contiguous"}
    if what == "part":
        mask = documents([32, 22, 10], causal())  # on rank 0 causal, on rank 1 not
        kernel = "cpu-flash"
    elif what == "backward":
        kernel, keywords = "cpu-flash", {"return_lse": True}  # it has no gradient through the lse
    elif what == "unknown":
        kernel = "no-such"
    elif what == "heads":
        options = {"schedule": "heads"}
    elif what == "blocks":
        mask = blocks(torch.eye(4, dtype=torch.bool), 16)  # ranks 2 and 3 have whole blocks, and need no others
        cut = ((0, 20),), ((20, 32),), ((32, 48),), ((48, 64),)
        options = {"placement": Placement(64, cut, "own", 1.0), "schedule": "ring"}
    elif what == "documents":
        mask = documents([60], causal())
    cp = Context(group, 64, causal(), timeout=20.0, **options)
    own = local(Case(shape), cp)
    if what == "tokens" and cp.rank == 1:
        own = [x[:, :, 1:] for x in own]
    kp.attention(*own, mask, group=cp, kernel=kernel, **keywords)


@pytest.mark.parametrize(
    ("what", "ranks", "message"),
    [
        ("tokens", [1], r"ValueError: q has 31 tokens: rank 1 holds 32 of 64; use Context\.shard"),
        ("part", [1], r"UnsupportedCallError: no attention kernel"),
        ("backward", [0, 1], r"(?s)UnsupportedCallError: .*cpu-flash: has no gradient through the log-sum-exp"),
        ("unknown", [0, 1], r"ValueError: kernel='no-such'"),
        ("heads", [0, 1], r"ValueError: schedule='heads': 3 query heads do not divide among 2 ranks"),
        ("blocks", [0, 1], r"ValueError: .* cuts a block of 16"),
        ("documents", [0, 1], r"ValueError: .*60"),
    ],
)
def test_what_one_rank_refuses_all_raise(pool: Ranks, what: str, ranks: list[int], message: str) -> None:
    start = time.monotonic()
    for rank, (kind, text) in enumerate(pool.outcomes(refused, 4 if what == "blocks" else 2, what)):
        assert kind == "error"
        wanted = message if rank in ranks else r"RankError: rank \d refused the call: its own error says why"
        assert re.match(wanted, text), text
    assert time.monotonic() - start < 10
    works(pool, 2)


def with_fault(group: Any, case: Case, fault: str, rank: int, step: str, timeout: float) -> tuple[float, str]:
    """(seconds, error) of a rank, where one dies or sleeps as it comes to a step."""
    exchange = Transport.exchange

    def faulty(self: Transport, name: str, *rest: Any, **named: Any) -> Any:
        if self.rank == rank and name.startswith(step):
            if fault == "dies":
                os._exit(17)
            time.sleep(timeout + 4)
        return exchange(self, name, *rest, **named)

    cp, mask = case.context(group, timeout=timeout), built(case.shape.expression)
    own = local(case, cp)
    dist.barrier(group)
    start = time.monotonic()
    Transport.exchange = faulty  # type: ignore[method-assign]
    try:
        with pytest.raises(RankError) as error:
            torch.autograd.grad(kp.attention(*own, mask, group=cp).sum(), own)
    finally:
        Transport.exchange = exchange  # type: ignore[method-assign]
    return time.monotonic() - start, str(error.value)


def test_a_rank_that_hangs_or_dies_is_named() -> None:
    """By everyone, within the timeout: a rank that hangs in the forward of two, then one that dies among four."""
    timeout = 3.0
    with started(4) as ranks:
        hung = ranks.outcomes(with_fault, 2, CASES["causal"], "hangs", 1, "ring step 1", timeout)
        seconds, text = hung[0][1]
        assert text.startswith("rank 1 did not answer in ring step 1 of 1 within 3 s")
        assert seconds < timeout + 1
        found = ranks.outcomes(with_fault, 4, CASES["causal"], "dies", 2, "ring step 2 of 3, gradients", timeout)
        assert found[2] == ("died", 17)
        for rank in (0, 1, 3):
            kind, (seconds, text) = found[rank]
            assert kind == "ok"
            assert re.match(r"rank \d did not answer in ring step \d of 3", text), text
            assert "rank 2 " in text, text
            assert "restart the ranks" in text
            assert seconds < timeout + 1
        processes = ranks.processes
    assert not any(process.is_alive() for process in processes)


# The tests, tested: ranks that merge, order or send back wrongly.


class _Changed:
    """torch, but for a few functions."""

    def __init__(self, **functions: Any) -> None:
        self.functions = functions

    def __getattr__(self, name: str) -> Any:
        return self.functions.get(name) or getattr(torch, name)


@contextlib.contextmanager
def broken(how: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if how == "averages":
            patch.setattr(parts, "torch", _Changed(sigmoid=lambda x: torch.full_like(x, 0.5)))
        elif how == "largest-lse":
            patch.setattr(parts, "torch", _Changed(logaddexp=torch.maximum))
        elif how == "lost-gradients":
            finish = schedules._Gradients.finish

            def lossy(self: Any) -> None:
                if "step 1 of" in self.stage.name:
                    self.pending.wait()
                else:
                    finish(self)

            patch.setattr(schedules._Gradients, "finish", lossy)
        elif how == "own-order":
            in_order = schedules._Keys._in_order

            def shuffled(self: Any, arrived: Any, which: int) -> torch.Tensor:
                return in_order(self, arrived, which).flip(2)

            patch.setattr(schedules._Keys, "_in_order", shuffled)
        else:
            assert how == "no-dlse"
            backward = schedules.attend_backward
            patch.setattr(schedules, "attend_backward", lambda dout, _, *rest: backward(dout, None, *rest))
        yield


def forward_broken(group: Any, case: Case, how: str) -> dict[str, Any]:
    with broken(how):
        return forward(group, case)


def backward_broken(group: Any, upstream: dict[str, Any], how: str) -> dict[str, Any]:
    with broken(how):
        return backward(group, upstream)


@pytest.mark.parametrize(
    ("how", "name", "caught"),
    [
        ("averages", "causal", {"out", "dq", "dk"}),
        ("averages", "bfloat16", {"out", "dq", "dk"}),
        ("largest-lse", "causal", {"out", "lse", "dq", "dk", "dv"}),
        ("lost-gradients", "causal", {"dk", "dv"}),
        ("lost-gradients", "bfloat16", {"dk", "dv"}),
        ("own-order", "gather", {"out", "lse", "dq", "dk", "dv"}),
        ("no-dlse", "causal", {"dq", "dk"}),
    ],
)
def test_broken_ranks_are_caught(pool: Ranks, how: str, name: str, caught: set[str]) -> None:
    run = Run(pool, 4, CASES[name], broken=how)
    assert set(run.wrong()) == caught
    assert Run(pool, 4, CASES[name]).wrong() == {}


# What NCCL, gradients of gradients, and a policy need.


def without_tags(group: Any, length: int) -> list[float]:
    """NCCL tells messages apart by their order alone: without tags, ranks must post them in the same one."""
    mask = window(60, 60) | sinks(4)
    before = schedules._KEYS, schedules._GRADIENTS
    schedules._KEYS = schedules._GRADIENTS = 0
    try:
        q, k, v = (torch.randn(1, 2, length, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
        cp = Context(group, length, mask, schedule="ring", placement="contiguous", timeout=20)
        own = [cp.shard(x, 2).requires_grad_() for x in (q, k, v)]
        out = kp.attention(*own, mask, group=cp)
        found = [out, *torch.autograd.grad(out.square().sum(), own)]
        alone = [x.requires_grad_() for x in (q, k, v)]
        whole = kp.attention(*alone, mask)
        expected = [whole, *torch.autograd.grad(whole.square().sum(), alone)]
        return [float((a - cp.shard(b, 2)).abs().max()) for a, b in zip(found, expected, strict=True)]
    finally:
        schedules._KEYS, schedules._GRADIENTS = before


def test_messages_need_no_tags(pool: Ranks) -> None:
    for errors in pool.run(without_tags, 4, 1024):
        assert max(errors) < 1e-5


def other_uses(group: Any, what: str) -> str:
    mask = causal()
    cp = Context(group, 40, mask)
    own = [torch.randn(1, 2, cp.tokens, 16).requires_grad_() for _ in range(3)]
    if what == "second derivative":
        out = kp.attention(*own, mask, group=cp, kernel="tiled")
        first = torch.autograd.grad(out.square().sum(), own, create_graph=True)
        torch.autograd.grad(first[0].sum(), own)
    elif what == "forward mode":
        torch.func.jvp(lambda q: kp.attention(q, q, q, mask, group=cp), (own[0].detach(),), (own[1].detach(),))
    elif what == "export":

        class Module(torch.nn.Module):
            def forward(self, q: torch.Tensor) -> Any:
                return kp.attention(q, q, q, mask, group=cp)

        torch.export.export(Module(), (own[0].detach(),))
    elif what == "mask":
        kp.attention(*own, torch.ones(40, 40), group=cp)  # type: ignore[arg-type]
    elif what == "copy":
        assert copy.deepcopy(cp) is cp
        pickle.dumps(cp)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("second derivative", "NotImplementedError: attention has no second derivative"),
        ("forward mode", "NotImplementedError: .*forward-mode"),
        ("export", "an exported graph cannot name ranks"),
        ("mask", "TypeError: mask=.*expected a mask of kp.masks"),
        ("copy", "TypeError: a Context belongs to the ranks of this process"),
    ],
)
def test_uses_that_cannot_be_right_are_refused(pool: Ranks, what: str, message: str) -> None:
    for kind, text in pool.outcomes(other_uses, 2, what):
        assert kind == "error", text
        assert re.search(message, text, re.DOTALL), text
    works(pool, 2)


def under_policy(group: Any) -> list[bool]:
    """Whether each kernel was chosen under a deterministic policy, the backward's too."""
    seen = []
    original = Function._runner

    def spy(self: Function, phase: Any, arguments: Any, state: Any, needs_grad: bool) -> Any:
        seen.append(state.policy.deterministic)
        return original(self, phase, arguments, state, needs_grad)

    Function._runner = spy  # type: ignore[method-assign]
    try:
        for where in (Context(group, 40, causal()), kp.context_parallel.Chunks(16)):
            tokens = where.tokens if isinstance(where, Context) else 40
            own = [torch.randn(1, 2, tokens, 16).requires_grad_() for _ in range(3)]
            with kp.policy(deterministic=True):
                out = kp.attention(*own, causal(), group=where)
            out.sum().backward()
    finally:
        Function._runner = original  # type: ignore[method-assign]
    return seen


def test_the_backward_keeps_the_policy_of_its_forward(pool: Ranks) -> None:
    for seen in pool.run(under_policy, 2):
        assert len(seen) > 4
        assert all(seen)
