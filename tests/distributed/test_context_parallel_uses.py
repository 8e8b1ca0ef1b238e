"""Attention across ranks: meshes, shards, compiled graphs, refusals, and ranks that disagree, hang or die."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import kernel_pytorch as kp
from context_parallel_calls import CASES, Case, Run, held, local, small
from kernel_pytorch.context_parallel import Context, Placement, RankError
from kernel_pytorch.distributed import schedules
from kernel_pytorch.distributed.context import _contexts as contexts
from kernel_pytorch.distributed.transport import Transport
from kernel_pytorch.hardware_abstraction.dispatch import Function
from kernel_pytorch.masks import Mask, blocks, causal, documents, full, prefix, sinks, window
from mask_expressions import built
from ranks import SIZES, Ranks, started

pytestmark = pytest.mark.usefixtures("one_thread")


# Groups, meshes and compiled graphs.


def doors(group: Any, case: Case) -> None:
    """A process group, a mesh dimension and a Context are bitwise equal."""
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
    """Compiled with fullgraph and checkpointed, bitwise equal to eager mode."""
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
    """A Context referenced by its call's graph only lives until the backward."""
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

    It amplifies small differences, so the bound is the larger error of two kernels in one process.
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


def test_a_context_is_released(pool: Ranks) -> None:
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
            keywords = {"scale": {"scale": 0.5}, "kernel": {"kernel": "tiled"}, "gradients": {}}[what]
    cp = Context(group, 64, causal(), placement=placed, timeout=20.0, **options)
    own = local(Case(shape), cp)
    kp.attention(*([x.detach() for x in own] if odd and what == "gradients" else own), mask, group=cp, **keywords)


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
        ("scale", r"ranks disagree on scale \(ranks \[0, 2, 3\]: 0\.\d+; ranks \[1\]: 0\.5\); here it is 0\.\d+"),
        ("gradients", r"ranks disagree on gradients \(ranks \[0, 2, 3\]: needed; ranks \[1\]: not needed\)"),
        ("schedule", "ranks disagree on schedule"),
        ("placement", "ranks disagree on placement"),
        ("kernel", "ranks disagree on kernel"),
    ],
)
def test_ranks_that_disagree_all_raise(pool: Ranks, what: str, message: str) -> None:
    for kind, text in pool.outcomes(differing, 4, what):
        assert kind == "error"
        assert re.match(rf"RankError: {message}", text), text
        assert "make every rank call with the same" in text
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
def test_a_refusal_of_one_rank_raises_on_all(pool: Ranks, what: str, ranks: list[int], message: str) -> None:
    for rank, (kind, text) in enumerate(pool.outcomes(refused, 4 if what == "blocks" else 2, what)):
        assert kind == "error"
        wanted = message if rank in ranks else r"RankError: rank \d refused the call: its own error says why"
        assert re.match(wanted, text), text
    works(pool, 2)


def with_fault(group: Any, case: Case, fault: str, rank: int, step: str, timeout: float) -> str:
    """Return the error of a rank if another one dies or sleeps at a step."""
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
    Transport.exchange = faulty  # type: ignore[method-assign]
    try:
        with pytest.raises(RankError) as error:
            torch.autograd.grad(kp.attention(*own, mask, group=cp).sum(), own)
    finally:
        Transport.exchange = exchange  # type: ignore[method-assign]
    return str(error.value)


def dies_before_the_call(group: Any, rank: int, bare: bool) -> str:
    case = CASES["causal"]
    cp, mask = case.context(group, timeout=3.0), built(case.shape.expression)
    own = local(case, cp)
    if cp.rank == rank:
        os._exit(17)
    try:
        kp.attention(*own, mask, group=group if bare else cp)
    except RankError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize("bare", [False, True])
def test_a_rank_that_died_before_the_call_is_named(bare: bool) -> None:
    with started(4) as ranks:
        found = ranks.outcomes(dies_before_the_call, 4, 1, bare)
        assert found[1] == ("died", 17)
        step = "the count of tokens" if bare else "the agreement before a call"
        for rank in (0, 2, 3):
            kind, text = found[rank]
            assert kind == "ok", text
            assert re.match(rf"rank \d did not answer in {step}", text), text
            assert "rank 1 " in text, text


def with_an_empty_share(group: Any, grad: bool) -> list[torch.Tensor]:
    """Three tokens on four ranks."""
    torch.manual_seed(0)
    whole = [torch.randn(1, 2, 3, 8, dtype=torch.float64, requires_grad=grad) for _ in range(3)]
    cp = Context(group, 3, causal(), timeout=20.0)
    out = cp.unshard(kp.attention(*(cp.shard(x, dim=2) for x in whole), causal(), group=cp), dim=2)
    return [out.detach(), kp.attention(*whole, causal()).detach(), torch.tensor(cp.tokens)]


@pytest.mark.parametrize("grad", [False, True])
def test_a_rank_without_tokens_takes_part(pool: Ranks, grad: bool) -> None:
    found = pool.run(with_an_empty_share, 4, grad)
    assert 0 in [int(tokens) for _, _, tokens in found]
    for out, expected, _ in found:
        torch.testing.assert_close(out, expected)


def test_a_rank_that_hangs_or_dies_is_named() -> None:
    """All ranks name it within the timeout: one of two hangs in the forward, then one of four dies."""
    timeout = 3.0
    with started(4) as ranks:
        hung = ranks.outcomes(with_fault, 2, CASES["causal"], "hangs", 1, "ring step 1", timeout)
        assert hung[0][1].startswith("rank 1 did not answer in ring step 1 of 1 within 3 s")
        found = ranks.outcomes(with_fault, 4, CASES["causal"], "dies", 2, "ring step 2 of 3, gradients", timeout)
        assert found[2] == ("died", 17)
        for rank in (0, 1, 3):
            kind, text = found[rank]
            assert kind == "ok"
            assert re.match(r"rank \d did not answer in ring step \d of 3", text), text
            assert "rank 2 " in text, text
            assert "restart the ranks" in text
        processes = ranks.processes
    assert not any(process.is_alive() for process in processes)


# NCCL's order of messages, second derivatives, and policies.


def without_tags(group: Any, length: int) -> list[float]:
    """NCCL matches messages by order only, so all ranks must post them in the same order."""
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
