"""Attention with modified scores: soft-capping, ALiBi, an additive bias, sinks. The definition and its cases.

The score of a query at position i and a key at position j is ``cap(q k^T * scale) - slope * |i - j| + bias``, with
``cap(s) = softcap * tanh(s / softcap)``. A sink is one more score in the softmax of every query of its head, without
a value. Shapes are those of ``attention``; the log-sum-exp is that of all scores, the sink's too.

It is an op of its own: calls without these terms keep the schema, the kernels and the records of ``attention``. Its
arguments are those of ``attention`` and then ``Terms``, so that one function can serve both ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from kernel_pytorch.hardware_abstraction.op import Call, Case, Draw, Op, TensorSpec
from kernel_pytorch.ops.attention.definition import (
    ATTENTION,
    check_attention,
    lse_flows,
    masked_softmax,
    result_dtype,
    shown,
)

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask

__all__ = ["SCORE_MOD_ATTENTION", "Terms", "distances", "sink_gradient", "sink_share"]

_FORMATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Terms(NamedTuple):
    """The terms that modify the scores: the arguments of ``score_mod_attention`` after those of ``attention``."""

    bias: Any = None
    """Broadcasts to (batch, q_heads, q_len, kv_len); a tensor, or its spec in a ``Call``."""
    slopes: Any = None
    """(q_heads,)."""
    sinks: Any = None
    """(q_heads,)."""
    softcap: float = 0.0
    """0 for none."""
    bias_grad: bool = False
    """Whether bias requires a gradient, which needs memory for the score gradients."""


def sink_share(sinks: torch.Tensor | None, lse: torch.Tensor) -> torch.Tensor:
    """Return the probability of every query's sink, (batch, q_heads, q_len)."""
    if sinks is None:
        return torch.zeros_like(lse)
    share = (sinks.to(lse.dtype).view(-1, 1) - lse).exp()
    return share.masked_fill(lse == -math.inf, 0.0)


def sink_gradient(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return the sinks' gradient; delta is sum(out * dout) - dlse of each query, shaped like lse."""
    return -(sink_share(sinks, lse) * delta).sum(dim=(0, 2)).to(sinks.dtype)


def distances(q_len: int, kv_len: int, like: torch.Tensor) -> torch.Tensor:
    """Return |i - j| of every query and key, (q_len, kv_len)."""
    i = torch.arange(kv_len - q_len, kv_len, device=like.device, dtype=like.dtype)
    j = torch.arange(kv_len, device=like.device, dtype=like.dtype)
    return (i.unsqueeze(-1) - j).abs()


def _capped(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _added(scores: torch.Tensor, bias: torch.Tensor | None, slopes: torch.Tensor | None) -> torch.Tensor:
    if slopes is not None:
        q_len, kv_len = scores.shape[-2:]
        scores = scores - slopes.to(scores.dtype).view(-1, 1, 1) * distances(q_len, kv_len, scores)
    return scores if bias is None else scores + bias


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, wanted: str, *terms: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, computed in q's dtype, with all scores in memory."""
    scores, keep, v = _scores(q, k, v, mask, scale, Terms(*terms))
    p, lse = masked_softmax(scores, keep)
    return p @ v, (lse if lse_flows(wanted) else lse.detach())


def _scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, terms: Terms
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scores, which of them are kept, and the values, per query head and with the sink as the last key."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = _added(_capped(q @ k.transpose(-1, -2) * scale, terms.softcap), terms.bias, terms.slopes)
    keep = mask.dense(q.shape[2], k.shape[2]).to(q.device)
    if terms.sinks is not None:
        sinks = terms.sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores, keep = torch.cat([scores, sinks], dim=-1), functional.pad(keep, (0, 1), value=True)
        v = functional.pad(v, (0, 0, 0, 1))
    left_out = scores == -math.inf  # a bias or a sink of -inf masks a pair
    return scores.masked_fill(left_out, 0.0), keep & ~left_out, v


def low_precision(storage: torch.dtype) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The definition with the roundings of a flash algorithm: see ``attention``."""

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, wanted: str, *terms: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores, keep, v = _scores(q, k, v, mask, scale, Terms(*terms))
        kept = result_dtype(storage, wanted)
        out, lse = _Streamed.apply(scores, v, keep, storage, kept)  # type: ignore[no-untyped-call]
        return out, (lse if lse_flows(wanted) else lse.detach())

    return run


class _Streamed(torch.autograd.Function):
    """Softmax whose backward uses sum(out * dout), with out as it was stored."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: torch.Tensor,
        v: torch.Tensor,
        keep: torch.Tensor,
        storage: torch.dtype,
        kept: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        p, lse = masked_softmax(scores, keep)
        narrow = p.to(storage).to(p.dtype)
        out = narrow @ v
        ctx.save_for_backward(v, p, narrow, out)
        ctx.storage, ctx.kept = storage, kept
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> Any:
        v, p, narrow, out = ctx.saved_tensors
        delta = (out.to(ctx.kept).to(out.dtype) * dout).sum(dim=-1) - dlse
        ds = p * (dout @ v.transpose(-1, -2) - delta.unsqueeze(-1))
        return ds.to(ctx.storage).to(ds.dtype), narrow.transpose(-1, -2) @ dout, None, None, None


def check(call: Call) -> None:
    check_attention(_plain(call))
    q, k, (bias, slopes, sinks, softcap, _) = call["q"], call["k"], _terms(call)
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)) or not 0 <= softcap < math.inf:
        raise ValueError(f"softcap={shown(softcap)}: use a number above 0, or None for no soft-capping")
    for name, spec in (("bias", bias), ("alibi_slopes", slopes), ("sink_logits", sinks)):
        if spec is None:
            continue
        if not isinstance(spec, TensorSpec) or spec.dtype not in _FORMATS:
            given = spec.format if isinstance(spec, TensorSpec) else shown(spec)
            raise TypeError(f"{name}={given}: expected a tensor of float64, float32, float16 or bfloat16")
        if spec.device != q.device:
            raise ValueError(f"{name} is on {spec.device} and q on {q.device}: move one with .to()")
    scores = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if bias is not None:
        fits = len(bias.shape) == 4 and all(n in (1, most) for n, most in zip(bias.shape, scores, strict=True))
        if not fits:
            raise ValueError(
                f"bias has shape {list(bias.shape)}: use one that broadcasts to (batch, q_heads, q_len, "
                f"kv_len), here {list(scores)}"
            )
    for name, spec in (("alibi_slopes", slopes), ("sink_logits", sinks)):
        if spec is not None and spec.shape != (q.shape[1],):
            raise ValueError(f"{name} has shape {list(spec.shape)}: use one for each of {q.shape[1]} q heads")


def fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return ATTENTION.fake(*arguments[: len(ATTENTION.arguments)])


def fake_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    count = len(ATTENTION.backward_names)
    terms, q = Terms(*arguments[count:]), arguments[2]
    dbias = terms.bias.new_empty(terms.bias.shape) if terms.bias is not None and terms.bias_grad else q.new_empty(0)
    dsinks = q.new_empty(0) if terms.sinks is None else terms.sinks.new_empty(terms.sinks.shape)
    return *ATTENTION.fake_backward(*arguments[:count]), dbias, dsinks


def _plain(call: Call) -> Call:
    names = ATTENTION.argument_names if call.phase == "forward" else ATTENTION.backward_names
    return Call("attention", call.phase, tuple((name, call[name]) for name in names), call.needs_grad)


def _terms(call: Call) -> Terms:
    return Terms(*(call[name] for name in Terms._fields))


def traffic(call: Call) -> int:
    bias: TensorSpec | None = call["bias"]
    bytes_of_bias = 0 if bias is None else math.prod(bias.shape) * bias.dtype.itemsize
    return ATTENTION.traffic(_plain(call)) + bytes_of_bias * (1 if call.phase == "forward" else 2)


def written_out(*arguments: Any) -> torch.Tensor:
    """Baseline in plain torch: matmuls and a softmax."""
    return reference(*arguments)[0]


def _case(
    name: str,
    mask: Callable[[], Mask],
    shape: tuple[int, int, int, int, int, int],
    *,
    softcap: float = 0.0,
    slopes: bool = False,
    bias: tuple[int, int, int, int] | None = None,
    left_out: bool = False,
    sinks: bool = False,
    value_dim: int | None = None,
    gate: str | None = None,
    wanted: str = "grad",
    formats: tuple[str, ...] = ("float32", "float16", "bfloat16"),
) -> Case:
    batch, heads, kv_heads, q_len, kv_len, dim = shape

    def make(dtype: torch.dtype, device: torch.device, draw: Draw) -> Mapping[str, Any]:
        added = None if bias is None else draw(*bias).to(dtype)
        if left_out and added is not None and device.type != "meta":
            added[..., ::3] = -math.inf
            added[:, :, 3] = -math.inf
        return {
            "q": draw(batch, heads, q_len, dim).to(dtype),
            "k": draw(batch, kv_heads, kv_len, dim).to(dtype),
            "v": draw(batch, kv_heads, kv_len, value_dim or dim).to(dtype),
            "mask": mask(),
            "scale": dim**-0.5,
            "wanted": wanted,
            "bias": added,
            "slopes": (2.0 ** -torch.arange(1.0, heads + 1, device=device)) if slopes else None,
            "sinks": draw(heads).to(dtype) if sinks else None,
            "softcap": softcap,
            "bias_grad": bias is not None,
        }

    return Case(name, make, benchmark=gate is not None, formats=formats, gate=gate)


def _masks() -> Any:
    from kernel_pytorch import masks

    return masks


CASES = (
    _case("softcap", lambda: _masks().causal(), (1, 2, 2, 70, 70, 32), softcap=5.0),
    _case("softcap-window", lambda: _masks().causal() & _masks().window(40), (2, 4, 2, 190, 200, 32), softcap=2.0),
    _case("bias", lambda: _masks().full(), (2, 2, 2, 60, 50, 32), bias=(1, 2, 60, 50)),
    _case("bias-broadcast", lambda: _masks().causal(), (2, 4, 2, 40, 140, 32), bias=(2, 1, 1, 140), wanted="lse"),
    _case("bias-left-out", lambda: _masks().full(), (1, 2, 1, 40, 40, 32), bias=(1, 2, 40, 40), left_out=True),
    _case("alibi", lambda: _masks().causal(), (1, 4, 2, 150, 150, 32), slopes=True),
    _case("alibi-both-sides", lambda: _masks().window(30, 30), (1, 2, 2, 90, 90, 32), slopes=True, wanted="parts"),
    _case(
        "everything",
        lambda: _masks().blocks(torch.ones(2, 5, 5, dtype=torch.bool).tril(), block=16) & _masks().window(50),
        (1, 2, 2, 70, 70, 32),
        softcap=3.0,
        slopes=True,
        bias=(1, 1, 70, 70),
        sinks=True,
    ),
    _case(
        "padded", lambda: _masks().padding([30, 0, 65], "left"), (3, 2, 1, 65, 65, 32), softcap=4.0, wanted="lse"
    ),
    _case("sinks", lambda: _masks().causal() & _masks().window(20), (2, 4, 2, 75, 75, 32), sinks=True),
    _case(
        "sinks-alone", lambda: _masks().padding([30, 0], "left"), (2, 2, 1, 40, 40, 32), sinks=True, wanted="lse"
    ),
    _case(
        "bias-2k-d64",
        lambda: _masks().full(),
        (8, 8, 8, 2048, 2048, 64),
        bias=(1, 8, 2048, 2048),
        gate="bias",
        formats=("bfloat16",),
    ),
    *(
        _case(
            f"{name}-8k-d128",
            lambda: _masks().causal(),
            (1, 16, 16, 8192, 8192, 128),
            gate=name,
            formats=("bfloat16",),
            **terms,
        )
        for name, terms in (("softcap", {"softcap": 50.0}), ("alibi", {"slopes": True}), ("sinks", {"sinks": True}))
    ),
)

SCORE_MOD_ATTENTION = Op(
    name="score_mod_attention",
    arguments=(
        *ATTENTION.arguments,
        "Tensor? bias",
        "Tensor? slopes",
        "Tensor? sinks",
        "float softcap",
        "bool bias_grad",
    ),
    outputs=ATTENTION.outputs,
    differentiable=(*ATTENTION.differentiable, "bias", "sinks"),
    differentiable_outputs=ATTENTION.differentiable_outputs,
    saved=(*ATTENTION.saved, *Terms._fields),
    reference=reference,
    low_precision=low_precision,
    without_gradients=ATTENTION.without_gradients,
    cancelling=(*ATTENTION.cancelling, "dbias", "dsinks"),
    codecs=ATTENTION.codecs,
    check=check,
    fake=fake,
    fake_backward=fake_backward,
    cases=CASES,
    compile_cases=("everything", "softcap-8k-d128"),
    traffic=traffic,
    flops=lambda call: ATTENTION.flops(_plain(call)),
    baselines={"softmax written out": written_out},
)
