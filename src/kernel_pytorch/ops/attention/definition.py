"""Attention: out = softmax(q k^T * scale, over the keys that the mask keeps) v. The definition and its cases.

Shapes: B batch, H query heads, G key and value heads (H a multiple of G), Q queries, K keys, D head dimension,
E value head dimension. ``lse`` is the logarithm of the sum of exponentials of each query's scaled scores, in
float32 (float64 for float64): -inf, with zeros in ``out`` and in all gradients, where a query attends to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from kernel_pytorch.hardware_abstraction.op import Call, Case, Codec, Draw, Op, Problem, TensorSpec

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask

__all__ = ["ATTENTION", "check_attention", "lse_dtype", "lse_flows", "masked_softmax", "result_dtype", "shown"]

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


_WANTED = {
    "out": "out alone: lse may be left unset",
    "grad": "lse too, for the backward",
    "lse": "lse too, and gradients flow through it",
    "parts": "as lse, with out and the gradients unrounded in float32, to be merged with other keys' parts",
}


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def lse_flows(wanted: str) -> bool:
    """Return whether lse is differentiable."""
    return wanted in ("lse", "parts")


def result_dtype(dtype: torch.dtype, wanted: str) -> torch.dtype:
    """Return the dtype of out and of the gradients."""
    return lse_dtype(dtype) if wanted == "parts" else dtype


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, wanted: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, computed in q's dtype, with all scores in memory."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    p, lse = _probabilities(q, k, mask, scale)
    return p @ v, (lse if lse_flows(wanted) else lse.detach())


def low_precision(
    storage: torch.dtype,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The definition with the roundings of a flash algorithm on matrix units.

    Probabilities and score gradients are in the tensors' dtype. The softmax backward takes sum(out * dout) instead of
    sum(p * dp), so score gradients do not cancel exactly where a query has few keys.
    """

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, wanted: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        kept = result_dtype(storage, wanted)
        out, lse = _Streamed.apply(q, k, v, mask, scale, storage, kept)  # type: ignore[no-untyped-call]
        return out, (lse if lse_flows(wanted) else lse.detach())

    return run


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Mask,
        scale: float,
        storage: torch.dtype,
        kept: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        p, lse = _probabilities(q, k, mask, scale)
        narrow = p.to(storage).to(p.dtype)
        out = narrow @ v
        ctx.save_for_backward(q, k, v, p, narrow, out)
        ctx.scale, ctx.storage, ctx.kept = scale, storage, kept
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> Any:
        q, k, v, p, narrow, out = ctx.saved_tensors
        delta = (out.to(ctx.kept).to(out.dtype) * dout).sum(dim=-1) - dlse
        ds = p * (dout @ v.transpose(-1, -2) - delta.unsqueeze(-1))
        ds = ds.to(ctx.storage).to(ds.dtype)
        dv = narrow.transpose(-1, -2) @ dout
        return ds @ k * ctx.scale, ds.transpose(-1, -2) @ q * ctx.scale, dv, None, None, None, None


def _probabilities(q: torch.Tensor, k: torch.Tensor, mask: Mask, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    return masked_softmax(q @ k.transpose(-1, -2) * scale, mask.dense(q.shape[2], k.shape[2]).to(q.device))


def masked_softmax(scores: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities of every query and key, and the log-sum-exp of every query."""
    attends = keep.any(dim=-1, keepdim=True) & torch.ones_like(scores[..., :1], dtype=torch.bool)
    # Rows without a key would give NaN, also in the backward: compute them unmasked and zero them afterwards.
    safe = torch.where(keep | ~attends, scores, -math.inf)
    lse = torch.logsumexp(safe, dim=-1)
    p = torch.exp(safe - lse.unsqueeze(-1)) * (keep & attends)
    return p, torch.where(attends.squeeze(-1), lse, -math.inf)


def shown(value: object) -> str:
    """Return an argument of a wrong type for an error, in one line."""
    if isinstance(value, TensorSpec):
        return f"a tensor of {value}"
    text = repr(value)
    return (
        text if len(text) <= 80 and "\n" not in text else f"a {type(value).__module__}.{type(value).__qualname__}"
    )


def check_attention(call: Call) -> None:
    from kernel_pytorch.masks import Mask
    from kernel_pytorch.masks.relative import relative_intervals

    q, k, v, mask, scale = (call[name] for name in ("q", "k", "v", "mask", "scale"))
    for name, spec in (("q", q), ("k", k), ("v", v)):
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"{name}={shown(spec)}: expected a tensor")
        if len(spec.shape) != 4:
            raise ValueError(f"{name} has shape {list(spec.shape)}: use (batch, heads, length, head_dim)")
        if spec.dtype not in _DTYPES:
            raise TypeError(f"{name} has dtype {spec.format}: use float64, float32, float16 or bfloat16")
        if spec.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {spec.format} and q {q.format}: use one dtype")
        if spec.device != q.device:
            raise ValueError(f"{name} is on {spec.device} and q on {q.device}: move one with .to()")
    if not isinstance(mask, Mask):
        dense = "; kp.masks.from_dense takes a boolean tensor" if isinstance(mask, TensorSpec) else ""
        raise TypeError(f"mask={shown(mask)}: expected a mask of kp.masks, such as kp.masks.causal(){dense}")
    for name, spec in (("k", k), ("v", v)):
        if spec.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch {spec.shape[0]} and q {q.shape[0]}: they must be equal")
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        raise ValueError(
            f"k has {k.shape[1]} heads of length {k.shape[2]} and v {v.shape[1]} of {v.shape[2]}: they must be equal"
        )
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k has head_dim {k.shape[3]} and q {q.shape[3]}: they must be equal")
    for name, spec in (("q", q), ("k", k), ("v", v)):
        if 0 in (spec.shape[1], spec.shape[3]):
            raise ValueError(
                f"{name} has {spec.shape[1]} heads and head_dim {spec.shape[3]}: use at least 1 of each"
            )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads and k {k.shape[1]}: the number of q heads must be a multiple of k's"
        )
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale={shown(scale)}: use a finite number, such as head_dim ** -0.5")
    if call["wanted"] not in _WANTED:
        raise ValueError(f"wanted={call['wanted']!r}: use one of {', '.join(_WANTED)}")
    if relative_intervals(mask.node) is not None:  # valid for any lengths, batch and heads: no layout is needed
        return
    known = mask.layout(q.shape[2], k.shape[2])
    if known.batch not in (1, q.shape[0]):
        raise ValueError(f"mask is for a batch of {known.batch} and q has {q.shape[0]}: they must be equal")
    if known.heads not in (1, q.shape[1]):
        raise ValueError(
            f"mask is for {known.heads} heads and q has {q.shape[1]}: give a table for each q head or one"
        )


def fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scale: float, wanted: str
) -> tuple[torch.Tensor, ...]:
    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=result_dtype(q.dtype, wanted))
    return out, q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))


def fake_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    wide = result_dtype(q.dtype, rest[-1])
    return q.new_empty(q.shape, dtype=wide), k.new_empty(k.shape, dtype=wide), v.new_empty(v.shape, dtype=wide)


def _attended(call: Call) -> float:
    """Return the number of query-key pairs that the mask keeps, over all heads and the batch."""
    q: TensorSpec = call["q"]
    k: TensorSpec = call["k"]
    density: float = call["mask"].density(q.shape[2], k.shape[2])
    return density * math.prod(q.shape[:3]) * k.shape[2]


def traffic(call: Call) -> int:
    q: TensorSpec = call["q"]
    k: TensorSpec = call["k"]
    v: TensorSpec = call["v"]
    sizes = [math.prod(spec.shape) * spec.dtype.itemsize for spec in (q, k, v)]
    out = math.prod(q.shape[:3]) * v.shape[3] * q.dtype.itemsize
    lse = math.prod(q.shape[:3]) * lse_dtype(q.dtype).itemsize
    return sum(sizes) + out + lse if call.phase == "forward" else 2 * sum(sizes) + 2 * out + lse


def flops(call: Call) -> int:
    """Return the FLOPs: two multiply-adds per kept pair and head dimension forward, five backward."""
    q, v = call["q"], call["v"]
    pair = 2 * (q.shape[3] + v.shape[3]) if call.phase == "forward" else 2 * (3 * q.shape[3] + 2 * v.shape[3])
    return int(_attended(call) * pair)


def problem(call: Call) -> Problem:
    """Return the mask's constructors, the dtype's width, lengths, heads, and the keys that a query attends to."""
    q: TensorSpec = call["q"]
    k: TensorSpec = call["k"]
    mask: Mask = call["mask"].simplified(q.shape[2], k.shape[2])
    sizes = {
        "queries": q.shape[2],
        "keys": k.shape[2],
        "attended": round(mask.density(q.shape[2], k.shape[2]) * k.shape[2]),
        "heads": q.shape[0] * q.shape[1],
        "group": q.shape[1] // k.shape[1],
        "head_dim": q.shape[3],
        "value_dim": call["v"].shape[3],
    }
    kind = f"{8 * q.dtype.itemsize}-bit {' '.join(mask.node.constructors)}"
    return Problem(kind, {name: max(size, 1) for name, size in sizes.items()})


@lru_cache(maxsize=2)
def _dense_mask(mask: Mask, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
    """Return the mask as a dense tensor, cached, so that a benchmark times the attention only."""
    return mask.dense(q_len, kv_len).to(device)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, wanted: str) -> torch.Tensor:
    """Baseline: SDPA, with causal and full masks as flags and every other mask as a dense boolean."""
    flag = mask.is_causal and q.shape[2] == k.shape[2]
    dense = None if flag or mask.is_full else _dense_mask(mask, q.shape[2], k.shape[2], q.device)
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=dense, is_causal=flag, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _case(
    name: str,
    mask: Callable[[], Mask],
    shape: tuple[int, int, int, int, int, int],
    *,
    value_dim: int | None = None,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    wanted: str = "grad",
    scale: float | None = None,
    gate: str | None = None,
    formats: tuple[str, ...] = ("float32", "float16", "bfloat16"),
) -> Case:
    batch, heads, kv_heads, q_len, kv_len, dim = shape

    def make(dtype: torch.dtype, device: torch.device, draw: Draw) -> Mapping[str, Any]:
        return {
            "q": change(draw(batch, heads, q_len, dim).to(dtype)),
            "k": change(draw(batch, kv_heads, kv_len, dim).to(dtype)),
            "v": change(draw(batch, kv_heads, kv_len, value_dim or dim).to(dtype)),
            "mask": mask(),
            "scale": dim**-0.5 if scale is None else scale,
            "wanted": wanted,
        }

    return Case(name, make, benchmark=gate is not None, formats=formats, gate=gate)


def _masks() -> Any:
    from kernel_pytorch import masks

    return masks


def _table(*shape: int, share: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator) < share


def _transposed_heads(x: torch.Tensor) -> torch.Tensor:
    """Return x in the layout of a projection's output: (batch, length, heads, dim) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _far_from_zero(x: torch.Tensor) -> torch.Tensor:
    """Add one large element to all rows alike: scores exceed float16's range, but their differences are ordinary."""
    x[..., 0] = 320
    return x


CASES = (
    _case("full", lambda: _masks().full(), (1, 2, 2, 64, 64, 32)),
    _case("causal", lambda: _masks().causal(), (2, 2, 2, 129, 129, 64)),
    _case("one-query", lambda: _masks().causal(), (1, 2, 1, 1, 77, 64)),
    _case("more-keys", lambda: _masks().causal(), (1, 2, 2, 17, 127, 32)),
    _case("more-queries", lambda: _masks().causal(), (1, 1, 1, 127, 17, 32)),
    _case("grouped", lambda: _masks().causal() & _masks().window(30), (1, 4, 2, 100, 100, 64)),
    _case("multi-query", lambda: _masks().window(20, 10), (2, 3, 1, 65, 65, 80)),
    _case("value-dim", lambda: _masks().causal(), (1, 2, 2, 50, 50, 96), value_dim=32),
    _case(
        "window-and-sinks",
        lambda: _masks().causal() & (_masks().window(40) | _masks().sinks(5)),
        (1, 2, 2, 200, 200, 32),
    ),
    _case("prefix", lambda: _masks().causal() | _masks().prefix(70), (1, 1, 1, 130, 130, 32)),
    _case(
        "documents",
        lambda: _masks().documents([[50, 1, 79], [130]], _masks().causal()),
        (2, 2, 2, 130, 130, 64),
        wanted="lse",
    ),
    _case("table", lambda: _masks().blocks(_table(5, 5, share=0.5), block=32), (1, 2, 2, 150, 150, 64)),
    _case(
        "table-per-head",
        lambda: _masks().causal() & _masks().blocks(_table(4, 9, 9, share=0.4), block=16),
        (1, 4, 2, 140, 140, 32),
    ),
    _case(
        "nothing", lambda: _masks().blocks(_table(3, 3, share=0.0), block=32), (1, 2, 2, 70, 70, 32), wanted="lse"
    ),
    _case("parts", lambda: _masks().causal() & _masks().window(40), (1, 4, 2, 70, 70, 64), wanted="parts"),
    _case("large-scores", lambda: _masks().causal(), (1, 1, 1, 70, 70, 64), change=_far_from_zero),
    _case("projected", lambda: _masks().causal(), (2, 2, 2, 90, 90, 64), change=_transposed_heads),
    _case("wide", lambda: _masks().causal(), (1, 1, 1, 66, 66, 256)),
    _case(
        "few-queries",
        lambda: _masks().causal() & (_masks().window(90) | _masks().sinks(3)),
        (2, 8, 2, 3, 301, 64),
        wanted="lse",
    ),
    _case(
        "few-queries-padded",
        lambda: _masks().causal() & _masks().padding([290, 0], side="left"),
        (2, 6, 2, 1, 333, 48),
        change=_transposed_heads,
    ),
    _case(
        "few-queries-table-per-head",
        lambda: _masks().causal() & _masks().blocks(_table(4, 1, 10, share=0.4), block=32),
        (1, 4, 2, 5, 310, 32),
        value_dim=80,
        wanted="parts",
    ),
    _case(
        "window-4k-d64",
        lambda: _masks().causal() & _masks().window(205),
        (1, 8, 8, 4096, 4096, 64),
        gate="grouped",
        formats=("float32", "bfloat16"),
    ),
    _case(
        "decode-causal-64k-d128",
        lambda: _masks().causal(),
        (1, 32, 8, 1, 65536, 128),
        gate="few-queries",
        formats=("bfloat16",),
    ),
    _case(
        "decode-window-and-sinks-64k-d128",
        lambda: _masks().causal() & (_masks().window(4096) | _masks().sinks(4)),
        (1, 32, 8, 1, 65536, 128),
        gate="few-queries",
        formats=("bfloat16",),
    ),
    _case(
        "decode-causal-8k-d128",
        lambda: _masks().causal(),
        (16, 32, 8, 1, 8192, 128),
        gate="few-queries",
        formats=("bfloat16",),
    ),
    *(
        _case(
            f"{name}-16k-d{dim}",
            mask,
            (1, 2048 // dim, 2048 // dim, 16384, 16384, dim),
            gate=gate,
            formats=("bfloat16",),
        )
        for dim in (64, 128)
        for name, mask, gate in (
            ("full", lambda: _masks().full(), "full"),
            ("causal", lambda: _masks().causal(), "causal"),
            (
                "window-and-sinks",
                lambda: _masks().causal() & (_masks().window(1024) | _masks().sinks(64)),
                "window-and-sinks",
            ),
            ("table-10", lambda: _masks().blocks(_table(128, 128, share=0.1)), "table"),
        )
    ),
)

ATTENTION = Op(
    name="attention",
    arguments=("Tensor q", "Tensor k", "Tensor v", "Tensor mask", "float scale", "str wanted"),
    outputs=("out", "lse"),
    differentiable=("q", "k", "v"),
    differentiable_outputs=("out", "lse"),
    saved=("q", "k", "v", "out", "lse", "mask", "scale", "wanted"),
    reference=reference,
    low_precision=low_precision,
    without_gradients={"wanted": "out"},
    cancelling=("dq", "dk"),
    codecs={"mask": Codec(encode=lambda mask: mask.code, decode=lambda code: _masks().from_code(code))},
    check=check_attention,
    fake=fake,
    fake_backward=fake_backward,
    cases=CASES,
    compile_cases=("value-dim", "window-and-sinks-16k-d128", "decode-window-and-sinks-64k-d128"),
    traffic=traffic,
    flops=flops,
    baselines={"scaled_dot_product_attention": sdpa},
    problem=problem,
    compile_baselines=False,
)
