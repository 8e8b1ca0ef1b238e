"""What torch can make of a function and not of one in 8 bits: an error that names it, and what to do instead.

A layer in 8 bits counts what its casts lost, and may remember their scales: it is no function of its input alone.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch.autograd import forward_ad

from kernel_pytorch._compat.compiler import constant_in_graph

__all__ = [
    "compiled_transforms_active",
    "refuse",
    "refuse_batch",
    "refuse_compiled_transforms",
    "refuse_transforms",
    "transforms_active",
]

transforms_active = torch._C._are_functorch_transforms_active
"""Whether a transform of ``torch.func`` is under way: torch's own function, for it is asked in every eager call."""
_tracing = torch._C._is_tracing
_NAMES = {
    "Grad": "torch.func.grad (or vjp, jacrev)",
    "Vmap": "torch.func.vmap",
    "Jvp": "torch.func.jvp (or jacfwd)",
    "Functionalize": "torch.func.functionalize",
}
_BATCH = "call it with the batch as one more dimension of its input"
_BACKWARD = "use loss.backward() or torch.autograd.grad"


def refuse_transforms(*tensors: torch.Tensor | None) -> None:
    """An error inside a transform of ``torch.func``, inside ``torch.jit.trace``, and where a tensor has a tangent."""
    if transforms_active():
        key = torch._C._functorch.peek_interpreter_stack().key().name
        refuse(_NAMES.get(key, f"a transform of torch.func ({key})"), _BATCH if key == "Vmap" else _BACKWARD)
    if _tracing():
        refuse("torch.jit.trace", "use torch.compile")
    if forward_ad._current_level >= 0 and any(_has_tangent(tensor) for tensor in tensors):
        refuse("a forward-mode derivative (torch.autograd.forward_ad)", _BACKWARD)


@constant_in_graph
def refuse_compiled_transforms() -> None:
    """``refuse_transforms`` where torch.compile traces the call, which would take its gradients for zero."""
    refuse_transforms()


@constant_in_graph
def compiled_transforms_active() -> bool:
    """``transforms_active``, or a forward-mode derivative under way, where torch.compile traces the call."""
    return transforms_active() or forward_ad._current_level >= 0


def refuse(tried: str, instead: str) -> NoReturn:
    """The error."""
    raise NotImplementedError(
        f"{tried} of a linear layer in 8 bits: {instead}, or take the layer in its own precision, with "
        f"kp.fp8.revert(model) or, in place of kp.fp8.linear, torch.nn.functional.linear"
    )


def refuse_batch(tensor: torch.Tensor, remembers: bool) -> None:
    """An error where a tensor stands for many, of which a cast is to be counted or remembered.

    They come in a backward that is batched: its forward was not, or ``refuse_transforms`` would have spoken up.
    """
    of_vmap = remembers and torch._C._functorch.is_batchedtensor(tensor)
    if of_vmap or torch._C._functorch.is_legacy_batchedtensor(tensor):
        refuse(
            "a batch of gradients at once (torch.vmap, is_grads_batched=True, vectorize=True)",
            "take each by itself",
        )


def _has_tangent(tensor: torch.Tensor | None) -> bool:
    if not isinstance(tensor, torch.Tensor):
        return False
    try:
        return forward_ad.unpack_dual(tensor).tangent is not None
    except RuntimeError:  # such as a weight of which only the codes are there: torch itself refuses what it must
        return False
