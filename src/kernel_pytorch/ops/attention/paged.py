"""Paged attention, for the paged KV caches of serving engines: the page table, the definition and its cases.

Row b of the batch has ``lengths[b]`` keys. Its key n is row ``n % page_size`` of page ``table[b, n // page_size]``.
Each row is computed like ``attention``: the last query is at the position of the row's last key, and the mask counts
from there. Both tensors stay on the device and are not synchronized.

Shapes: B batch, H query heads, G key and value heads, Q queries, D head dimension, E value head dimension, P pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kernel_pytorch.hardware_abstraction.op import Call, Case, Codec, Draw, Op, TensorSpec
from kernel_pytorch.masks.code import WHOLE_SEQUENCE
from kernel_pytorch.ops.attention.definition import ATTENTION, check_attention, lse_dtype

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask

__all__ = ["PAGED_ATTENTION", "PageTable", "row_keys"]


@dataclass(frozen=True, eq=False)
class PageTable:
    """The pages with the keys and values of each row of a batch, for ``kp.attention(..., pages=)``.

    Args:
        table: page indices, int32 of shape (batch, maximum pages of a row). Entries past a row's length are not read.
            The other indices must be valid; they are not checked, because the table stays on the device.
        lengths: number of keys of each row, int32 of shape (batch,), at most ``table.shape[1] * page_size``.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> k_pages, v_pages = torch.randn(2, 10, 8, 16, 64)  # 10 pages of 16 keys, for 8 heads
        >>> pages = kp.PageTable(torch.tensor([[7, 2, 9], [4, 0, 0]]).int(), torch.tensor([40, 5]).int())
        >>> kp.attention(torch.randn(2, 32, 1, 64), k_pages, v_pages, kp.masks.causal(), pages=pages).shape
        torch.Size([2, 32, 1, 64])
    """

    table: torch.Tensor
    lengths: torch.Tensor


def row_keys(pages_PGND: torch.Tensor, table_P: torch.Tensor, length: int) -> torch.Tensor:
    """Gather the keys or values of one row as (1, heads, length, dim)."""
    used = table_P[: -(-length // pages_PGND.shape[2])].long()
    return pages_PGND[used].transpose(0, 1).flatten(1, 2)[None, :, :length]


def _by_row(
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Convert an implementation of ``attention`` to one over pages, which gathers the keys of each row."""

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        mask: Mask,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for b, length in enumerate(lengths.tolist()):
            own = q[b : b + 1]
            if length == 0:
                nothing = own.new_full(own.shape[:3], -math.inf, dtype=lse_dtype(q.dtype))
                found.append((own.new_zeros((*own.shape[:3], v.shape[3])), nothing))
                continue
            keys, values = (row_keys(x, table[b], length) for x in (k, v))
            found.append(attend(own, keys, values, mask, scale, "out"))
        if not found:
            return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

    return run


reference = _by_row(ATTENTION.reference)
"""The definition: gather the keys of each row, then the definition of ``attention``."""


def low_precision(storage: torch.dtype) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The definition with the roundings of a flash algorithm: see ``attention``."""
    assert ATTENTION.low_precision is not None
    return _by_row(ATTENTION.low_precision(storage))


def check(call: Call) -> None:
    q, k, v, table, lengths, mask = (call[name] for name in ("q", "k", "v", "table", "lengths", "mask"))
    for name, spec, dimensions, shape in (
        ("pages.table", table, 2, "(batch, most pages of a row)"),
        ("pages.lengths", lengths, 1, "(batch,)"),
    ):
        if not isinstance(spec, TensorSpec) or spec.dtype != torch.int32:
            shown = spec.format if isinstance(spec, TensorSpec) else repr(spec)
            raise TypeError(f"{name}={shown}: expected a tensor of int32")
        if len(spec.shape) != dimensions:
            raise ValueError(f"{name} has shape {list(spec.shape)}: use {shape}")
        if isinstance(q, TensorSpec) and spec.device != q.device:
            raise ValueError(f"{name} is on {spec.device} and q on {q.device}: move one with .to()")
        if isinstance(q, TensorSpec) and q.shape[:1] != spec.shape[:1]:
            raise ValueError(f"{name} has {spec.shape[0]} rows and q a batch of {q.shape[0]}: they must be equal")
    for name, spec in (("k", k), ("v", v)):
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"{name}={spec!r}: expected a tensor")
        if len(spec.shape) != 4 or spec.shape[2] == 0:
            raise ValueError(f"{name} has shape {list(spec.shape)}: use (pages, heads, page_size, head_dim)")
    if k.shape[0] != v.shape[0] or k.shape[2] != v.shape[2]:
        raise ValueError(
            f"k has {k.shape[0]} pages of {k.shape[2]} keys and v {v.shape[0]} of {v.shape[2]}: they must be equal"
        )
    if hasattr(mask, "node") and mask.node.uses(*WHOLE_SEQUENCE):
        raise ValueError(
            f"mask={mask}: each row of pages has its own length; compose causal, window, sinks, prefix and dilated"
        )
    check_attention(_gathered(call))


def _gathered(call: Call) -> Call:
    """Return the call without pages over the longest row that the table has room for."""
    q, pages = call["q"], call["table"].shape[1]
    arguments = {name: call[name] for name in ("q", "k", "v", "mask", "scale")}
    for name in ("k", "v"):
        own = arguments[name]
        shape = (q.shape[0], own.shape[1], pages * own.shape[2], own.shape[3])
        arguments[name] = TensorSpec(shape, (0, *own.stride[1:]), own.dtype, own.device)
    return Call("attention", "forward", (*arguments.items(), ("wanted", "out")))


def fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    mask: Any,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    return ATTENTION.fake(q, k, v, mask, scale, "out")


def fake_backward(q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (q.new_empty(0),)


def traffic(call: Call) -> int:
    table: TensorSpec = call["table"]
    return ATTENTION.traffic(_gathered(call)) + 4 * (math.prod(table.shape) + table.shape[0])


def gathered(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    mask: Mask,
    scale: float,
) -> torch.Tensor:
    """Baseline in plain torch: a copy of the keys, a mask from the lengths, and SDPA."""
    keys, values = (x[table.long()].transpose(1, 2).flatten(2, 3) for x in (k, v))
    q_len, kv_len = q.shape[2], keys.shape[2]
    keep = torch.stack([torch.zeros(q_len, kv_len, dtype=torch.bool) for _ in range(len(q))])
    for b, length in enumerate(lengths.tolist()):
        keep[b, :, :length] = mask.dense(q_len, length)[0, 0]
    return torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=keep.to(q.device)[:, None], scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _masks() -> Any:
    from kernel_pytorch import masks

    return masks


def _case(
    name: str,
    mask: Callable[[], Mask],
    lengths: tuple[int, ...],
    shape: tuple[int, int, int, int, int],
    *,
    gate: str | None = None,
    formats: tuple[str, ...] = ("float32", "float16", "bfloat16"),
) -> Case:
    heads, kv_heads, q_len, page_size, dim = shape

    def make(dtype: torch.dtype, device: torch.device, draw: Draw) -> Mapping[str, Any]:
        width = max(1, -(-max(lengths) // page_size))
        count = len(lengths) * width + 3  # some pages are unused
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))[: len(lengths) * width]
        return {
            "q": draw(len(lengths), heads, q_len, dim).to(dtype),
            "k": draw(count, kv_heads, page_size, dim).to(dtype),
            "v": draw(count, kv_heads, page_size, dim).to(dtype),
            "table": order.view(len(lengths), width).to(device, torch.int32),
            "lengths": torch.tensor(lengths, dtype=torch.int32).to(device),
            "mask": mask(),
            "scale": dim**-0.5,
        }

    return Case(name, make, benchmark=gate is not None, formats=formats, gate=gate)


CASES = (
    _case("causal", lambda: _masks().causal(), (70, 1, 33), (4, 2, 1, 16, 64)),
    _case("full", lambda: _masks().full(), (19, 64), (2, 2, 3, 16, 32)),
    _case(
        "window-and-sinks",
        lambda: _masks().causal() & (_masks().window(20) | _masks().sinks(5)),
        (100, 0, 31),
        (4, 1, 5, 8, 32),
    ),
    _case("odd-pages", lambda: _masks().causal(), (50, 7), (3, 1, 2, 5, 80)),
    _case("prefix", lambda: _masks().causal() | _masks().prefix(9), (12, 40), (2, 1, 10, 16, 32)),
    _case(
        "decode-8k-pages-64",
        lambda: _masks().causal(),
        (8192,) * 16,
        (32, 8, 1, 64, 128),
        gate="causal",
        formats=("bfloat16",),
    ),
)

PAGED_ATTENTION = Op(
    name="paged_attention",
    arguments=("Tensor q", "Tensor k", "Tensor v", "Tensor table", "Tensor lengths", "Tensor mask", "float scale"),
    outputs=("out", "lse"),
    differentiable=("q",),  # no output is differentiable, but torch needs an argument in the schema
    differentiable_outputs=(),
    saved=("q",),
    reference=reference,
    low_precision=low_precision,
    codecs={"mask": Codec(encode=lambda mask: mask.code, decode=lambda code: _masks().from_code(code))},
    check=check,
    fake=fake,
    fake_backward=fake_backward,
    cases=CASES,
    compile_cases=("window-and-sinks", "decode-8k-pages-64"),
    traffic=traffic,
    flops=lambda call: ATTENTION.flops(_gathered(call)),
    baselines={"gather, then scaled_dot_product_attention": gathered},
    compile_baselines=False,
)
