"""Train on long sequences: token-local computation in chunks of tokens, with layers recomputed in the backward.

``kp.attention`` needs memory that is linear in the tokens. All other parts of a transformer are local to each token
and run chunk by chunk, so that intermediate results exist for one chunk at a time, forward and backward.

Shapes: N tokens, C in a chunk, H query heads, G key heads, D head dimension.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from kernel_pytorch.masks import Mask
from kernel_pytorch.ops.attention import attention

__all__ = ["chunked_layer", "tokenwise"]

_THREAD = threading.local()  # ``recomputing`` is set while a layer is recomputed in its backward


def tokenwise(
    function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    *inputs: torch.Tensor,
    chunk: int,
    parameters: Sequence[torch.nn.Parameter] = (),
) -> Any:
    """Compute ``function(first, *inputs)`` ``chunk`` tokens at a time, forward and backward.

    Only the inputs are saved for the backward, which recomputes each chunk. Gradients of parameters are accumulated
    into their ``.grad`` chunk by chunk, in the parameters' dtype, so ``torch.autograd.grad`` and DDP do not see them.

    Args:
        function: takes the position of the chunk's first token and the chunks of the inputs, and returns a tensor or
            several, each with its tokens in the dimension before the last. It must compute each token independently
            and draw no random numbers.
        inputs: (..., N, channels) each; the tokens are the dimension before the last.
        chunk: number of tokens in a chunk.
        parameters: the parameters of ``function`` that need gradients.

    Returns: The results of ``function`` for all tokens.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> up, down, x = torch.nn.Linear(8, 64), torch.nn.Linear(64, 8), torch.randn(100, 8)
        >>> def feed_forward(first, x_CE):
        ...     return down(up(x_CE).relu())
        >>> parameters = [*up.parameters(), *down.parameters()]
        >>> out = kp.context_parallel.tokenwise(feed_forward, x, chunk=32, parameters=parameters)
        >>> torch.testing.assert_close(out, feed_forward(0, x))
        >>> out.sum().backward()
        >>> up.weight.grad.shape
        torch.Size([64, 8])
    """
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk={chunk!r}: pass the number of tokens in a chunk, an int of 1 or more")
    if not inputs or any(x.ndim < 2 for x in inputs):
        raise ValueError(
            f"inputs have shapes {[tuple(x.shape) for x in inputs]}: tokens are the dimension before the last"
        )
    if len({x.shape[-2] for x in inputs}) > 1:
        raise ValueError(f"inputs have {[x.shape[-2] for x in inputs]} tokens: pass the same number in each")
    outputs = _Tokenwise.apply(function, chunk, False, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
    return outputs


def chunked_layer(
    x: torch.Tensor,
    mask: Mask,
    project: Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    finish: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    chunk: int,
    parameters: Sequence[torch.nn.Parameter] = (),
) -> torch.Tensor:
    """Run a transformer layer over a long sequence, saving only ``x`` for its backward.

    ``project`` and ``finish`` run ``tokenwise``. Between them, ``kp.attention`` computes one key head with its query
    heads at a time, so that a kernel's temporary tensors exist for one group of heads only. The backward recomputes
    the layer, except its last step.

    Args:
        x: (N, channels).
        mask: the attention mask of the layer.
        project: takes the position of the first token and a chunk of x; returns q (1, H, C, D), k and v (1, G, C, D).
        finish: takes the position, the chunk of x and its attended heads (1, H, C, D); returns the layer's output
            for the chunk, including the residual.
        chunk: number of tokens in a chunk.
        parameters: the layer's parameters.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> qkv, out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)
        >>> def project(first, x):
        ...     return tuple(y.view(-1, 4, 16).transpose(0, 1)[None] for y in qkv(x).chunk(3, dim=-1))
        >>> def finish(first, x, heads):
        ...     return x + out(heads[0].transpose(0, 1).flatten(1))
        >>> x, mask = torch.randn(100, 64), kp.masks.causal() & kp.masks.window(16)
        >>> parameters = [*qkv.parameters(), *out.parameters()]
        >>> y = kp.context_parallel.chunked_layer(x, mask, project, finish, chunk=32, parameters=parameters)
        >>> torch.testing.assert_close(y, finish(0, x, kp.attention(*project(0, x), mask)))
    """
    run = partial(_layer, mask=mask, project=project, finish=finish, chunk=chunk, parameters=tuple(parameters))
    out: torch.Tensor = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts)
    return out


def _layer(
    x_NE: torch.Tensor,
    *,
    mask: Mask,
    project: Callable[..., tuple[torch.Tensor, ...]],
    finish: Callable[..., torch.Tensor],
    chunk: int,
    parameters: tuple[torch.nn.Parameter, ...],
) -> torch.Tensor:
    def groups(first: int, x_CE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q_1HCD, k_1GCD, v_1GCD = project(first, x_CE)
        q_per_k = q_1HCD.shape[1] // k_1GCD.shape[1]
        parts = zip(q_1HCD.split(q_per_k, 1), k_1GCD.split(1, 1), v_1GCD.split(1, 1), strict=True)
        return tuple(tensor for part in parts for tensor in part)

    def end(first: int, x_CE: torch.Tensor, *heads: torch.Tensor) -> torch.Tensor:
        return finish(first, x_CE, torch.cat(heads, dim=1))

    qkv = tokenwise(groups, x_NE, chunk=chunk, parameters=parameters)
    heads = []
    for q, k, v in zip(qkv[::3], qkv[1::3], qkv[2::3], strict=True):
        attended = attention(q, k, v, mask)
        assert isinstance(attended, torch.Tensor)
        heads.append(attended)
    del qkv, q, k, v  # free them; the backward recomputes them
    out: torch.Tensor = _Tokenwise.apply(end, chunk, True, 1 + len(heads), x_NE, *heads, *parameters)  # type: ignore[no-untyped-call]
    return out


@contextlib.contextmanager
def _recomputing() -> Iterator[None]:
    _THREAD.recomputing = True
    try:
        yield
    finally:
        _THREAD.recomputing = False


def _contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Return the context of a layer's forward and that of its recomputation."""
    return contextlib.nullcontext(), _recomputing()


class _Tokenwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Any], chunk: int, ends_layer: bool, count: int, *tensors: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        inputs = tensors[:count]
        device = inputs[0].device.type
        ctx.function, ctx.chunk, ctx.unused = function, chunk, len(tensors) - count
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.save_for_backward(*inputs)
        if ends_layer and getattr(_THREAD, "recomputing", False):
            # The output of a recomputed layer is not used, only the tensors that it saves.
            return torch.empty_like(inputs[0])
        wholes: tuple[torch.Tensor, ...] = ()
        single = False
        tokens = inputs[0].shape[-2]
        for first in range(0, max(tokens, 1), chunk):
            size = min(chunk, tokens - first)
            before = _random_state(inputs[0].device) if first == 0 else None
            parts = function(first, *(x.narrow(-2, first, size) for x in inputs))
            if before is not None and not torch.equal(before, _random_state(inputs[0].device)):
                raise ValueError("function draws random numbers, as dropout does: the backward would draw others")
            single = isinstance(parts, torch.Tensor)
            parts = (parts,) if single else tuple(parts)
            if not wholes:
                if any(y.ndim < 2 or y.shape[-2] != size for y in parts):
                    shapes = [tuple(y.shape) for y in parts]
                    raise ValueError(
                        f"function returns shapes {shapes} for {size} tokens: it treats each token alone"
                    )
                # Written in place, because concatenating the chunks would need twice the memory.
                wholes = tuple(y.new_empty(*y.shape[:-2], tokens, y.shape[-1]) for y in parts)
            for whole, part in zip(wholes, parts, strict=True):
                whole.narrow(-2, first, size).copy_(part)
        return wholes[0] if single else wholes

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        inputs = ctx.saved_tensors
        found = [torch.empty_like(x) if x.is_floating_point() else None for x in inputs]
        tokens = inputs[0].shape[-2]
        device, dtype, enabled = ctx.autocast
        for first in range(0, tokens, ctx.chunk):
            size = min(ctx.chunk, tokens - first)
            with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
                parts = [x.narrow(-2, first, size).detach().requires_grad_(x.is_floating_point()) for x in inputs]
                made = ctx.function(first, *parts)
            outputs = (made,) if isinstance(made, torch.Tensor) else tuple(made)
            pairs = [
                (y, dy.narrow(-2, first, size)) for y, dy in zip(outputs, gradients, strict=True) if y.requires_grad
            ]
            # Also accumulates into the .grad of the parameters, so that there is no other copy of their gradients.
            if pairs:
                torch.autograd.backward([y for y, _ in pairs], [dy for _, dy in pairs])
            for whole, part in zip(found, parts, strict=True):
                if whole is not None:
                    gradient = whole.narrow(-2, first, size)
                    gradient.zero_() if part.grad is None else gradient.copy_(part.grad)
        return (None, None, None, None, *found, *(None,) * ctx.unused)


def _random_state(device: torch.device) -> torch.Tensor:
    if device.type in ("cpu", "meta"):
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state
