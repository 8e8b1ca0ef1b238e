"""Detection of dispatch modes, torch.func transforms, forward-mode AD and batched tensors."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from kernel_pytorch._compat.private import private

__all__ = [
    "backward_running",
    "any_autocast",
    "dispatch_mode_count",
    "fake_mode_active",
    "forward_ad_active",
    "is_batched",
    "is_legacy_batched",
    "graph_tracing",
    "jit_tracing",
    "transform_active",
    "transform_name",
    "transforms_active",
]

_SLOWER = "every eager call goes through torch's dispatcher, which is slower and gives the same results"

dispatch_mode_count = private(
    "torch._C._len_torch_dispatch_stack", test=lambda f: f() >= 0, without=_SLOWER, otherwise=lambda: 1
)
"""The number of ``TorchDispatchMode`` that are active on this thread."""

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
"""Whether a tensor is a batch of ``is_grads_batched=True``, for which no mode is active."""

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


transforms_active = private(
    "torch._C._are_functorch_transforms_active",
    test=lambda f: f() in (True, False),
    without="every call is checked for transforms in Python",
    otherwise=lambda: _interpreter() is not None,
)
"""Whether a transform of ``torch.func`` is active, including those that a graph is compiled for."""

is_batched = private(
    "torch._C._functorch.is_batchedtensor",
    test=lambda f: f(torch.empty(0)) is False,
    without="tensors inside vmap are not refused by name",
    otherwise=lambda _: False,
)
"""Whether a tensor is a batch of ``torch.func.vmap``."""

_graph_task = private(
    "torch._C._current_graph_task_id",
    test=lambda f: isinstance(f(), int),
    without="a forward that activation checkpointing repeats is counted twice",
    otherwise=lambda: -1,
)

_dispatch_mode = private(
    "torch._C._get_dispatch_mode",
    test=lambda f: f(torch._C._TorchDispatchModeKey.FAKE) is None or dispatch_mode_count() > 0,
    without="shapes are taken for tensors without memory, and nothing is measured",
    otherwise=lambda _: True,
)


any_autocast = private(
    "torch._C._is_any_autocast_enabled",
    test=lambda f: f() in (True, False),
    without="every call asks whether autocast is on for its device",
    otherwise=lambda: True,
)
"""Whether autocast is on for any kind of device."""


def backward_running() -> bool:
    """Return whether autograd is running a backward on this thread."""
    return bool(_graph_task() != -1)


def fake_mode_active() -> bool:
    """Return whether a ``FakeTensorMode`` is active on this thread."""
    return _dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def graph_tracing() -> bool:
    """Return whether torch.compile traces this call, also under AOTAutograd, where ``is_compiling`` may be False."""
    return torch.compiler.is_compiling() or _dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def transform_name() -> str:
    """Return the innermost active transform of ``torch.func``, such as ``"Vmap"`` or ``"Grad"``."""
    return str(_interpreter().key().name)


def transform_active() -> bool:
    """Return whether a transform of ``torch.func`` (vmap, grad, ...) is active on this thread."""
    return _interpreter() is not None


def forward_ad_active() -> bool:
    """Return whether a ``forward_ad.dual_level`` is active."""
    return forward_ad._current_level >= 0
