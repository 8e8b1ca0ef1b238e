"""What watches or transforms a call: dispatch modes, torch.func transforms, forward-mode AD, batched tensors."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from kernel_pytorch._compat.private import private

__all__ = ["dispatch_mode_count", "forward_ad_active", "is_legacy_batched", "jit_tracing", "transform_active"]

_SLOWER = "every eager call goes through torch's dispatcher, which is slower and gives the same results"

dispatch_mode_count = private(
    "torch._C._len_torch_dispatch_stack", test=lambda f: f() >= 0, without=_SLOWER, otherwise=lambda: 1
)
"""How many ``TorchDispatchMode`` are active on this thread."""

_interpreter = private(
    "torch._C._functorch.peek_interpreter_stack",
    test=lambda f: f() is None or hasattr(f(), "level"),
    without=_SLOWER,
    otherwise=lambda: True,
)

is_legacy_batched = private(
    "torch._C._functorch.is_legacy_batchedtensor",
    test=lambda f: f(torch.empty(0)) is False,
    without=_SLOWER,
    otherwise=lambda _: True,
)
"""Whether a tensor is a batch of ``is_grads_batched=True``, which no mode announces."""

jit_tracing = private(
    "torch._C._is_tracing", test=lambda f: f() in (True, False), without="torch.jit.trace is not refused by name",
    otherwise=lambda: False,
)  # fmt: skip
"""Whether ``torch.jit.trace`` is running."""

private(
    "torch.autograd.forward_ad._current_level",
    test=lambda level: isinstance(level, int),
    without="forward-mode derivatives cannot be refused by name",
)


def transform_active() -> bool:
    """Whether a transform of ``torch.func`` (vmap, grad, ...) is active on this thread."""
    return _interpreter() is not None


def forward_ad_active() -> bool:
    """Whether a ``forward_ad.dual_level`` is open."""
    return forward_ad._current_level >= 0
