"""Attention with modified scores: soft-capping, ALiBi and an additive bias. The definition and its cases.

The score of a query at position i and a key at position j is ``cap(q k^T * scale) - slope * |i - j| + bias``, with
``cap(s) = softcap * tanh(s / softcap)``. Shapes and the log-sum-exp are those of ``attention``.

It is an op of its own: calls without these terms keep the schema, the kernels and the records of ``attention``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from kernel_pytorch.hardware_abstraction.op import Call, Case, Codec, Draw, Op, TensorSpec
from kernel_pytorch.ops.attention.definition import (
    ATTENTION,
    check_attention,
    lse_flows,
    masked_softmax,
    result_dtype,
)

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask

__all__ = ["SCORE_MOD_ATTENTION", "distances"]

_FORMATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def distances(q_len: int, kv_len: int, like: torch.Tensor) -> torch.Tensor:
    """|i - j| of every query and key, (q_len, kv_len)."""
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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
    mask: Mask,
    scale: float,
    softcap: float,
    wanted: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, computed in q's own precision, with every score in memory."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = _added(_capped(q @ k.transpose(-1, -2) * scale, softcap), bias, slopes)
    p, lse = _softmax(scores, mask)
    return p @ v, (lse if lse_flows(wanted) else lse.detach())


def _softmax(scores: torch.Tensor, mask: Mask) -> tuple[torch.Tensor, torch.Tensor]:
    """A bias of -inf leaves a pair out, as the mask does."""
    keep = mask.dense(*scores.shape[-2:]).to(scores.device) & (scores != -math.inf)
    return masked_softmax(scores.masked_fill(scores == -math.inf, 0.0), keep)


def low_precision(storage: torch.dtype) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The definition with the roundings of a kernel that keeps no scores: see ``attention``."""

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        slopes: torch.Tensor | None,
        mask: Mask,
        scale: float,
        softcap: float,
        wanted: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = _added(_capped(q @ k.transpose(-1, -2) * scale, softcap), bias, slopes)
        kept = result_dtype(storage, wanted)
        out, lse = _Streamed.apply(scores, v, mask, storage, kept)  # type: ignore[no-untyped-call]
        return out, (lse if lse_flows(wanted) else lse.detach())

    return run


class _Streamed(torch.autograd.Function):
    """The softmax's gradient from sum(out * dout), with out as it was stored."""

    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, v: torch.Tensor, mask: Mask, storage: torch.dtype, kept: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        p, lse = _softmax(scores, mask)
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
    plain = tuple((name, call[name]) for name in ATTENTION.argument_names)
    check_attention(Call("attention", call.phase, plain, call.needs_grad))
    q, k, bias, slopes, softcap = (call[name] for name in ("q", "k", "bias", "slopes", "softcap"))
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)) or not 0 <= softcap < math.inf:
        raise ValueError(f"softcap={softcap!r}: use a number above 0, or None for no soft-capping")
    for name, spec in (("bias", bias), ("alibi_slopes", slopes)):
        if spec is None:
            continue
        if not isinstance(spec, TensorSpec) or spec.dtype not in _FORMATS:
            shown = spec.format if isinstance(spec, TensorSpec) else repr(spec)
            raise TypeError(f"{name}={shown}: expected a tensor of float64, float32, float16 or bfloat16")
        if spec.device != q.device:
            raise ValueError(f"{name} is on {spec.device} and q on {q.device}: move one with .to()")
    scores = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if bias is not None:
        fits = len(bias.shape) == 4 and all(n in (1, most) for n, most in zip(bias.shape, scores, strict=True))
        if not fits:
            raise ValueError(
                f"bias has shape {list(bias.shape)}: use four dimensions that broadcast to (batch, q_heads, q_len, "
                f"kv_len), here {list(scores)}"
            )
    if slopes is not None and slopes.shape != (q.shape[1],):
        raise ValueError(f"alibi_slopes has shape {list(slopes.shape)}: use one for each of {q.shape[1]} q heads")


def fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
    mask: Any,
    scale: float,
    softcap: float,
    wanted: str,
) -> tuple[torch.Tensor, ...]:
    return ATTENTION.fake(q, k, v, mask, scale, wanted)


def fake_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    dbias = q.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return *ATTENTION.fake_backward(dout, dlse, q, k, v, *rest), dbias


def _plain(call: Call) -> Call:
    names = ATTENTION.argument_names if call.phase == "forward" else ATTENTION.backward_names
    return Call("attention", call.phase, tuple((name, call[name]) for name in names), call.needs_grad)


def traffic(call: Call) -> int:
    bias: TensorSpec | None = call["bias"]
    bytes_of_bias = 0 if bias is None else math.prod(bias.shape) * bias.dtype.itemsize
    return ATTENTION.traffic(_plain(call)) + bytes_of_bias * (1 if call.phase == "forward" else 2)


def written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
    mask: Mask,
    scale: float,
    softcap: float,
    wanted: str,
) -> torch.Tensor:
    """What a user would write without us: matrix products and a softmax."""
    return reference(q, k, v, bias, slopes, mask, scale, softcap, wanted)[0]


def _case(
    name: str,
    mask: Callable[[], Mask],
    shape: tuple[int, int, int, int, int, int],
    *,
    softcap: float = 0.0,
    slopes: bool = False,
    bias: tuple[int, int, int, int] | None = None,
    left_out: bool = False,
    wanted: str = "grad",
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
            "v": draw(batch, kv_heads, kv_len, dim).to(dtype),
            "bias": added,
            "slopes": (2.0 ** -torch.arange(1.0, heads + 1, device=device)) if slopes else None,
            "mask": mask(),
            "scale": dim**-0.5,
            "softcap": softcap,
            "wanted": wanted,
        }

    return Case(name, make)


def _masks() -> Any:
    from kernel_pytorch import masks

    return masks


CASES = (
    _case("softcap", lambda: _masks().causal(), (1, 2, 2, 70, 70, 32), softcap=5.0),
    _case("softcap-window", lambda: _masks().causal() & _masks().window(40), (2, 4, 2, 200, 200, 32), softcap=2.0),
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
    ),
    _case(
        "padded", lambda: _masks().padding([30, 0, 65], "left"), (3, 2, 1, 65, 65, 32), softcap=4.0, wanted="lse"
    ),
)

SCORE_MOD_ATTENTION = Op(
    name="score_mod_attention",
    arguments=(
        "Tensor q",
        "Tensor k",
        "Tensor v",
        "Tensor? bias",
        "Tensor? slopes",
        "Tensor mask",
        "float scale",
        "float softcap",
        "str wanted",
    ),
    outputs=("out", "lse"),
    differentiable=("q", "k", "v", "bias"),
    differentiable_outputs=("out", "lse"),
    saved=("q", "k", "v", "bias", "slopes", "out", "lse", "mask", "scale", "softcap", "wanted"),
    reference=reference,
    low_precision=low_precision,
    without_gradients={"wanted": "out"},
    cancelling=("dq", "dk", "dbias"),
    codecs={"mask": Codec(encode=lambda mask: mask.code, decode=lambda code: _masks().from_code(code))},
    check=check,
    fake=fake,
    fake_backward=fake_backward,
    cases=CASES,
    compile_cases=("softcap",),
    traffic=traffic,
    flops=lambda call: ATTENTION.flops(_plain(call)),
    baselines={"softmax written out": written_out},
)
