"""Calls of kp.attention over ranks for the tests, and their results against the definition.

Ranks are processes on this machine that talk through Gloo. A call travels to them as a few numbers; what they
return is put together here, apart from the code under test, and goes through the op's own budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import kernel_pytorch as kp
from attention_shapes import FORMATS, Shape, one_key_mostly
from kernel_pytorch.context_parallel import Context
from kernel_pytorch.distributed.schedules import heads_refusal
from kernel_pytorch.masks import Mask
from kernel_pytorch.ops.attention.definition import ATTENTION, reference
from kernel_pytorch.testing import Comparison, compare, poisoned
from mask_expressions import Expression, built
from ranks import Ranks

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
        mask = built(self.shape.expression) if self.placed_for is None else self.placed_for
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

    def __post_init__(self) -> None:
        self.mask = built(self.case.shape.expression)
        self.sent: list[list[int]] = []
        """Bytes by rank, of the forward and of the backward."""
        self.tokens: list[Any] = []
        self.found: dict[str, torch.Tensor] = {}

    def call(self, function: Any, *arguments: Any) -> dict[str, torch.Tensor]:
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
        """Return the results that exceed their budget, with their errors."""
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


TABLE = np.random.default_rng(0).random((4, 8, 8)) < 0.4
CASES = {
    "causal": Case(small(("causal",)), "ring"),
    "gather": Case(small(("|", ("causal",), ("prefix", 40))), "gather"),
    "window-heads": Case(small(("|", ("window", 20, 3), ("sinks", 4)), group=4), "heads"),
    "documents": Case(small(("documents", [[50, 70], [119, 1]], ("causal",)), batch=2), "ring", "balanced"),
    "table": Case(small(("&", ("causal",), ("blocks", TABLE.tolist(), 16))), "ring", "zigzag"),
    "bfloat16": Case(small(("causal",), dtype="bfloat16", value_dim=24), "ring"),
}
