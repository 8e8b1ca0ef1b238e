"""Refuse the transforms that an FP8 layer does not support, with errors that name the remedy.

An FP8 layer updates counters and amax histories, so it is not a pure function of its input.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch.autograd import forward_ad

from kernel_pytorch._compat.compiler import constant_in_graph
from kernel_pytorch._compat.modes import (
    forward_ad_active,
    is_batched,
    is_legacy_batched,
    jit_tracing,
    transform_name,
    transforms_active,
)

__all__ = [
    "compiled_transforms_active",
    "refuse",
    "refuse_batch",
    "refuse_compiled_transforms",
    "refuse_transforms",
    "transforms_active",
]

_NAMES = {
    "Grad": "torch.func.grad (or vjp, jacrev)",
    "Vmap": "torch.func.vmap",
    "Jvp": "torch.func.jvp (or jacfwd)",
    "Functionalize": "torch.func.functionalize",
}
_BATCH = "call it with the batch as one more dimension of its input"
_BACKWARD = "use loss.backward() or torch.autograd.grad"


def refuse_transforms(*tensors: torch.Tensor | None) -> None:
    """Raise inside a ``torch.func`` transform or ``torch.jit.trace``, or if a tensor has a forward-mode tangent."""
    if transforms_active():
        key = transform_name()
        refuse(_NAMES.get(key, f"a transform of torch.func ({key})"), _BATCH if key == "Vmap" else _BACKWARD)
    if jit_tracing():
        refuse("torch.jit.trace", "use torch.compile")
    if forward_ad_active() and any(_has_tangent(tensor) for tensor in tensors):
        refuse("a forward-mode derivative (torch.autograd.forward_ad)", _BACKWARD)


@constant_in_graph
def refuse_compiled_transforms() -> None:
    """``refuse_transforms`` for calls that torch.compile traces; their gradients would be zero."""
    refuse_transforms()


@constant_in_graph
def compiled_transforms_active() -> bool:
    """Return whether a transform or forward-mode derivative is active, for calls that torch.compile traces."""
    return transforms_active() or forward_ad_active()


def refuse(tried: str, instead: str) -> NoReturn:
    """Raise the error that names what was tried and the remedy."""
    raise NotImplementedError(
        f"{tried} of an FP8 linear layer: {instead}, or do without FP8, with "
        f"kp.fp8.revert(model) or, in place of kp.fp8.linear, torch.nn.functional.linear"
    )


def refuse_batch(tensor: torch.Tensor, remembers: bool) -> None:
    """Raise if a gradient is a batched tensor (``torch.vmap``), whose cast would update counters or a history.

    Only backwards see batched gradients: ``refuse_transforms`` has refused batched forwards.
    """
    of_vmap = remembers and is_batched(tensor)
    if of_vmap or is_legacy_batched(tensor):
        refuse(
            "a batch of gradients at once (torch.vmap, is_grads_batched=True, vectorize=True)",
            "take each by itself",
        )


def _has_tangent(tensor: torch.Tensor | None) -> bool:
    if not isinstance(tensor, torch.Tensor):
        return False
    try:
        return forward_ad.unpack_dual(tensor).tangent is not None
    except RuntimeError:  # a weight gathered in FP8, which has no tangent
        return False
