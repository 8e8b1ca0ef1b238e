"""``kp.policy``: the current policy of a thread or asyncio task, and the one that compiled functions follow."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch

from kernel_pytorch.hardware_abstraction.op import registered_op
from kernel_pytorch.hardware_abstraction.selection import Policy, encode_policy

__all__ = [
    "PolicyState",
    "effective_encoded",
    "effective_policy",
    "effective_state",
    "forget_all_choices",
    "policy",
    "policy_in_force",
    "state_encoded",
]


class PolicyState:
    """A policy with the cache of the choices made under it. Eager calls look it up without hashing the policy."""

    __slots__ = ("__weakref__", "choices", "policy")

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.choices: dict[tuple[Any, ...], Callable[..., Any]] = {}
        _states.add(self)


_states: weakref.WeakSet[PolicyState] = weakref.WeakSet()


def forget_all_choices() -> None:
    """Clear the caches of choices of all policies."""
    for state in list(_states):
        state.choices.clear()


@lru_cache(maxsize=256)
def _state_for(policy: Policy) -> PolicyState:
    return PolicyState(policy)


@lru_cache(maxsize=256)
def state_encoded(text: str) -> PolicyState:
    return _state_for(Policy.decode(text))


_NO_POLICY = _state_for(Policy())
_ambient: ContextVar[PolicyState] = ContextVar("kernel_pytorch_policy", default=_NO_POLICY)
# torch.compile guards on module globals, not on context variables: the current policies by thread, and their union.
_in_force: dict[int, Policy] = {}
_in_force_lock = threading.Lock()
_traced = Policy()


def _torch_demands_determinism() -> bool:
    return (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def effective_encoded(op: str, kernel: str | None) -> str:
    """Return the encoded policy for an op, by operations that torch.compile can trace and guard on."""
    outer = _traced
    return encode_policy(
        outer.kernel_for(op) if kernel is None else kernel,
        outer.deterministic or _torch_demands_determinism(),
        outer.measure,
    )


def effective_state(op: str, kernel: str | None) -> PolicyState:
    state, strict = _ambient.get(), _torch_demands_determinism()
    if state is _NO_POLICY and kernel is None and not strict:
        return state
    outer = state.policy
    return _state_for(
        Policy(
            kernel=outer.kernel_for(op) if kernel is None else kernel,
            deterministic=outer.deterministic or strict,
            measure=outer.measure,
        )
    )


@contextlib.contextmanager
def policy(
    *,
    kernel: str | Mapping[str, str] | None = None,
    deterministic: bool | None = None,
    measure: bool | None = None,
) -> Iterator[Policy]:
    """Restrict the choice of kernels inside the ``with`` block. Arguments left out keep the outer policy's value.

    The policy applies to this thread, or asyncio task, and to the backward of its calls. Compiled functions follow
    the policies of all threads at once, since they cannot guard on the thread; if two threads pin different kernels,
    their calls raise an error. ``torch.use_deterministic_algorithms(True)`` sets ``deterministic`` too.

    Args:
        kernel: the name of the kernel to use, for every op, or by op: ``{"attention": "tiled"}``.
        deterministic: use only kernels that give the same bits each time.
        measure: time the kernels that fit, once for each shape, and use the fastest. On a busy machine nothing is
            measured: a warning says so, and the choice is that without measuring.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> with kp.policy(deterministic=True, kernel={"rms_norm": "torch"}):
        ...     y = kp.rms_norm(torch.randn(4, 64))
    """
    if kernel is not None and not isinstance(kernel, (str, Mapping)):
        raise TypeError(f"kernel={kernel!r}: use a kernel's name, a mapping from ops to names, or None")
    for name, flag in (("deterministic", deterministic), ("measure", measure)):
        if flag is not None and not isinstance(flag, bool):
            raise TypeError(f"{name}={flag!r}: use True, False or None")
    outer = _ambient.get()
    base = outer.policy
    inner = Policy(
        kernel=base.kernel if kernel is None or isinstance(kernel, Mapping) else kernel,
        kernels=_merged(base, kernel),
        deterministic=base.deterministic if deterministic is None else deterministic,
        measure=base.measure if measure is None else measure,
    )
    token = _ambient.set(_state_for(inner))
    _put_in_force(inner)
    try:
        yield inner
    finally:
        _ambient.reset(token)
        _put_in_force(base)


def _merged(base: Policy, kernel: str | Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Return the kernels pinned by op. A name for every op replaces the pins of the outer policy."""
    if kernel is None:
        return base.kernels
    if isinstance(kernel, str):
        return ()
    for op, name in kernel.items():
        registered_op(op)  # raises an error that lists the ops
        if not isinstance(name, str):
            raise TypeError(f"kernel={{{op!r}: {name!r}}}: use the name of a kernel")
    return tuple(sorted({**dict(base.kernels), **kernel}.items()))


def _put_in_force(policy: Policy) -> None:
    """Set this thread's policy, and update the union that compiled functions follow."""
    global _traced
    with _in_force_lock:
        if policy == Policy():
            _in_force.pop(threading.get_ident(), None)
        else:
            _in_force[threading.get_ident()] = policy
        policies = list(_in_force.values())
        pins = sorted({policy.kernel for policy in policies if policy.kernel is not None})
        kernels = sorted({pin for policy in policies for pin in policy.kernels})
        several = len(pins) > 1 or len(dict(kernels)) < len(kernels)
        clash = f"{pins or kernels}, of several threads: pass kernel= to the call" if several else None
        _traced = Policy(
            kernel=clash or (pins[0] if pins else None),
            kernels=() if clash else tuple(kernels),
            deterministic=any(policy.deterministic for policy in policies),
            measure=any(policy.measure for policy in policies),
        )


def policy_in_force() -> Policy:
    """Return the policy of this thread, or asyncio task."""
    return _ambient.get().policy


def effective_policy(op: str, kernel: str | None) -> str:
    """Return the encoded policy for an op; ``kernel`` overrides its pin. torch.compile can trace and guard on it."""
    if torch.compiler.is_compiling():
        return effective_encoded(op, kernel)
    return effective_state(op, kernel).policy.encoded
