"""``kp.attention(..., group=...)``: attention over a sequence that is sharded across ranks.

One torch custom op, forward and backward, which torch.compile does not trace into; it refers to its Context by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from kernel_pytorch.distributed.chunks import Chunks, chunked_attention
from kernel_pytorch.distributed.context import Context, bits_of, context_named, fingerprint, group_of, total_length
from kernel_pytorch.distributed.cost import Link, ScheduleChoice, Shape, choose, predict
from kernel_pytorch.distributed.parts import NO_SECOND_DERIVATIVE, Terms
from kernel_pytorch.distributed.placement import Placement
from kernel_pytorch.distributed.schedules import (
    BackwardCall,
    ForwardCall,
    Schedule,
    head_mask,
    run_backward,
    run_forward,
    stages,
)
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import TORCH_VERSION, function_of
from kernel_pytorch.hardware_abstraction.explanation import asked_device, explained, explaining
from kernel_pytorch.hardware_abstraction.op import Call, TensorSpec
from kernel_pytorch.hardware_abstraction.policy_scope import effective_policy
from kernel_pytorch.hardware_abstraction.registry import device_of
from kernel_pytorch.hardware_abstraction.selection import Policy, select
from kernel_pytorch.masks import Mask, from_code
from kernel_pytorch.ops.attention.definition import ATTENTION, lse_dtype

__all__ = ["spread_attention"]

_LIBRARY = torch.library.Library("kernel_pytorch", "FRAGMENT")
_LIBRARY.define(
    "spread_attention(Tensor q, Tensor k, Tensor v, Tensor mask, float scale, bool lse_flows, str context, "
    "str policy, bool trains) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "spread_attention_backward(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor mask, float scale, bool lse_flows, str context, str policy) -> (Tensor, Tensor, Tensor)"
)


def spread_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    scale: float,
    lse_flows: bool,
    group: Any,
    kernel: str | None,
    trains: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of this rank's queries over the keys of all ranks."""
    policy = effective_policy("attention", kernel)
    # Before torch 2.13 is_exporting() is also true under torch.compile.
    if torch.compiler.is_exporting() and (TORCH_VERSION >= (2, 13) or not torch.compiler.is_dynamo_compiling()):
        raise NotImplementedError(
            "group: an exported graph cannot name ranks of this process; export without a group"
        )
    if not isinstance(mask, Mask):
        raise TypeError(f"mask={mask!r}: expected a mask of kp.masks, such as kp.masks.causal()")
    if not torch.compiler.is_compiling():
        function_of(ATTENTION).refuse_tangents((q, k, v))
    if isinstance(group, Chunks):
        return chunked_attention(q, k, v, mask, scale, lse_flows, group, policy)
    if not torch.compiler.is_compiling():
        context = group if isinstance(group, Context) else _context_of(group, q, mask)
        if explaining():
            explained(_explanation(context, q, k, v, mask, scale, policy))
    elif isinstance(group, Context):
        context = group
    else:
        raise TypeError(
            "group: a compiled function takes a kp.context_parallel.Context; make it outside, where ranks can talk"
        )
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.kernel_pytorch.spread_attention.default(
        q, k, v, mask.code, scale, lse_flows, context.name, policy, trains
    )
    return found


@lru_cache(maxsize=64)
def _implied(group: torch.distributed.ProcessGroup, length: int, mask: Mask) -> Context:
    return Context(group, length, mask)


def _context_of(group: Any, q: torch.Tensor, mask: Mask) -> Context:
    """Return the context of a process group: tokens placed for the call's mask, as by ``shard`` with that mask."""
    if not isinstance(q, torch.Tensor) or q.ndim != 4:
        raise ValueError("q: use a tensor of shape (batch, heads, this rank's tokens, head_dim)")
    process_group = group_of(group)
    return _implied(process_group, total_length(q.shape[2], process_group), mask)


def _whole(call: Call, context: Context) -> Call:
    """Return the call with all tokens, as a single process would make it, for the op's checks."""
    arguments = []
    for name, value in call.arguments:
        if isinstance(value, TensorSpec) and len(value.shape) == 4:
            if value.shape[2] != context.tokens:
                raise ValueError(
                    f"{name} has {value.shape[2]} tokens: rank {context.rank} holds {context.tokens} of "
                    f"{context.length}; use Context.shard"
                )
            shape = (*value.shape[:2], context.length, value.shape[3])
            value = TensorSpec.of(torch.empty(shape, dtype=value.dtype, device="meta"))
        arguments.append((name, value))
    return Call(call.op, call.phase, tuple(arguments), call.needs_grad)


@lru_cache(maxsize=1024)
def _planned(
    placement: Placement, link: Link, mask: Mask, shape: Shape, device: Device, pinned: Schedule | None
) -> Schedule:
    return choose(predict(mask, placement, shape, device, link), pinned)[0]


def _shape(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, training: bool) -> Shape:
    return Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype, training)


def _schedule(context: Context, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> Schedule:
    # Always predict for training: forward and backward must agree, and the forward cannot know of a backward.
    shape = _shape(q, k, v, True)
    return _planned(context.placement, context.link, mask, shape, device_of(q.device), context.schedule)


def _checked(
    context: Context, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, terms: Terms, trains: bool
) -> Schedule:
    """Return the schedule, after checking that all ranks make the same call; raise errors before anything is sent."""
    refusal: Exception | None = None
    schedule: Schedule | None = None
    try:
        wanted = terms.wanted(q.dtype, merged=True)
        specs = [TensorSpec.of(x) if isinstance(x, torch.Tensor) else x for x in (q, k, v)]
        call = Call(
            "attention",
            "forward",
            tuple(zip(ATTENTION.argument_names, (*specs, mask, terms.scale, wanted), strict=True)),
            False,
        )
        ATTENTION.check(_whole(call, context))
        schedule = _schedule(context, q, k, v, mask)
        if schedule != "heads":
            stages(mask, context.placement, context.rank, schedule)  # raises if tiles of tables are cut
        if terms.kernel is not None:
            _kernels(context, schedule, q, k, v, mask, terms)
    except Exception as error:  # the other ranks must not wait for this one
        refusal = error
    if context.check and context.ranks > 1:
        shown = {
            "mask": mask,
            "dtype": q.dtype,
            "scale": terms.scale,
            "gradients": "needed" if trains else "not needed",
            "schedule": schedule,
            "placement": context.placement.style,
        }
        facts = {
            "tokens": context.tokens,
            "dtype": fingerprint(q.dtype, k.dtype, v.dtype),
            "batch": _size(q, 0),
            "q_heads": _size(q, 1),
            "kv_heads": _size(k, 1),
            "head_dim": _size(q, 3),
            "value_dim": _size(v, 3),
            "mask": fingerprint(mask.code.numpy().tobytes()),
            "scale": bits_of(terms.scale),
            "gradients": int(trains),
            "placement": fingerprint(context.placement.ranges),
            "kernel": fingerprint(terms.kernel),
            "refused": int(refusal is not None),
            "schedule": fingerprint(schedule),
        }
        if refusal is not None:
            shown["schedule"] = f"refused: {refusal}"
        try:
            context.agree(facts, shown)
        except RuntimeError:
            if refusal is None:
                raise
    if refusal is not None:
        raise refusal
    assert schedule is not None
    return schedule


def _size(x: torch.Tensor, dim: int) -> int:
    return x.shape[dim] if x.ndim > dim else 0


def _kernels(
    context: Context,
    schedule: Schedule,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    terms: Terms,
) -> tuple[str, ...]:
    """Return (name, kernel) of each stage of this rank; raise an error if no kernel serves one."""
    device = asked_device() or device_of(q.device)
    policy = Policy.decode(terms.policy)
    trains = any(x.requires_grad for x in (q, k, v))
    found = []
    for name, part, rows, keys, merged in _calls(context, schedule, mask, q.shape[1]):
        if part is None:
            found.append(f"{name}: sends only")
            continue
        heads = [x.shape[1] if schedule != "heads" else -(-x.shape[1] // context.ranks) for x in (q, k, v)]
        shapes = [
            (x.shape[0], h, n, x.shape[3]) for x, h, n in zip((q, k, v), heads, (rows, keys, keys), strict=True)
        ]
        specs = [TensorSpec.of(torch.empty(shape, dtype=q.dtype, device="meta")) for shape in shapes]
        values = (*specs, part, terms.scale, terms.wanted(q.dtype, merged=merged))
        call = Call("attention", "forward", tuple(zip(ATTENTION.argument_names, values, strict=True)), trains)
        chosen = select(call, device, policy, None).kernel.name
        found.append(f"{name}: {heads[0]} heads, {rows} queries, {keys} keys, {part}: {chosen}")
    return tuple(found)


def _calls(
    context: Context, schedule: Schedule, mask: Mask, heads: int
) -> Iterator[tuple[str, Mask | None, int, int, bool]]:
    """Return (name, mask, queries, keys, whether results are merged) of each stage; mask None: no compute."""
    if schedule == "heads":
        whole = head_mask(mask, context.transport, context.length, heads)
        yield "head exchange", whole, context.length, context.length, False
        return
    plan = stages(mask, context.placement, context.rank, schedule)
    merged = sum(stage.mask is not None for stage in plan) > 1
    for stage in plan:
        if stage.mask is None and not stage.sends:
            continue
        keys = sum(last - first for _, first, last in stage.pieces)
        yield stage.name, stage.mask, stage.queries.stop - stage.queries.start, keys, merged


def _explanation(
    context: Context,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    scale: float,
    policy: str,
) -> ScheduleChoice:
    terms = Terms(scale, policy)
    device = asked_device() or device_of(q.device)
    predictions = predict(mask, context.placement, _shape(q, k, v, True), device, context.link)
    schedule, reason = choose(predictions, context.schedule)
    call = f"attention(q={list(q.shape)}, k={list(k.shape)}, mask={mask}) on rank {context.rank} of {context.ranks}"
    kernels = _kernels(context, schedule, q, k, v, mask, terms)
    return ScheduleChoice(call, context.placement, context.link, schedule, predictions, reason, kernels)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    lse_flows: bool,
    context: str,
    policy: str,
    trains: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    where, terms, decoded = context_named(context), Terms(scale, policy, lse_flows), from_code(mask)
    schedule = _checked(where, q, k, v, decoded, terms, trains)
    return run_forward(schedule, ForwardCall(where.transport, where.placement, q, k, v, decoded, terms))


def _backward(
    dout: torch.Tensor,
    dlse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    lse_flows: bool,
    context: str,
    policy: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    where, terms, decoded = context_named(context), Terms(scale, policy, lse_flows), from_code(mask)
    schedule = _schedule(where, q, k, v, decoded)
    forward = ForwardCall(where.transport, where.placement, q, k, v, decoded, terms)
    return run_backward(schedule, BackwardCall(forward, dout, dlse if lse_flows else None, out, lse))


_LIBRARY.impl("spread_attention", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("spread_attention_backward", _backward, "CompositeExplicitAutograd")


def _fake(q: torch.Tensor, _k: torch.Tensor, v: torch.Tensor, *_rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))


def _fake_backward(_dout: Any, _dlse: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_rest: Any) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


torch.library.register_fake("kernel_pytorch::spread_attention", _fake, lib=_LIBRARY)
torch.library.register_fake("kernel_pytorch::spread_attention_backward", _fake_backward, lib=_LIBRARY)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, mask, *ctx.rest, _ = inputs
    ctx.context = context_named(inputs[6])  # keep it alive until the backward, which looks it up by name
    ctx.save_for_backward(q, k, v, *output, mask)


def _autograd(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[Any, ...]:
    gradients = torch.ops.kernel_pytorch.spread_attention_backward.default(
        dout, dlse, *ctx.saved_tensors, *ctx.rest
    )
    return (*gradients, *([None] * 6))


def _second_derivative(_ctx: Any, *_gradients: Any) -> Any:
    raise NotImplementedError(NO_SECOND_DERIVATIVE)


torch.library.register_autograd("kernel_pytorch::spread_attention", _autograd, setup_context=_setup, lib=_LIBRARY)
torch.library.register_autograd("kernel_pytorch::spread_attention_backward", _second_derivative, lib=_LIBRARY)
