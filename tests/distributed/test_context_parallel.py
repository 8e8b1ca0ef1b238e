"""Attention across ranks: every schedule and placement against the definition, traffic, and planted bugs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import kernel_pytorch as kp
from attention_shapes import Shape
from context_parallel_calls import CASES, Case, Run, backward, forward, local, small
from kernel_pytorch.distributed import parts, schedules
from kernel_pytorch.distributed.placement import table_unit
from kernel_pytorch.masks import causal, window
from kernel_pytorch.ops.attention.definition import ATTENTION
from mask_expressions import built, expressions
from ranks import SIZES, Ranks

pytestmark = pytest.mark.usefixtures("one_thread")


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
        # A placement for another mask works too, unless it cuts a table's blocks.
        placed_for=None if tables else draw(st.sampled_from([None, causal(), window(5)])),
    )


# No shrinking: each example runs on 15 ranks.
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


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_the_number_of_ranks_or_the_run(pool: Ranks, name: str) -> None:
    """Results on 1, 2, 4 and 8 ranks differ by less than the budget; repeated runs are bitwise equal."""
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
def test_a_pinned_kernel_serves_every_stage(pool: Ranks, ranks: int) -> None:
    """A kernel for full and causal masks only: in zigzag, causal has no other sub-masks."""
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
def test_explanations_match_the_sent_bytes(pool: Ranks, name: str) -> None:
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


# Planted bugs: ranks that merge, order or return wrongly.


class _Changed:
    """torch with a few functions replaced."""

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


@dataclass
class BrokenRun(Run):
    """One case on ranks with a planted bug."""

    how: str

    def call(self, function: Any, *arguments: Any) -> dict[str, torch.Tensor]:
        function = {forward: forward_broken, backward: backward_broken}[function]
        return super().call(function, *arguments, self.how)


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
    run = BrokenRun(pool, 4, CASES[name], how)
    assert set(run.wrong()) == caught
    assert Run(pool, 4, CASES[name]).wrong() == {}
