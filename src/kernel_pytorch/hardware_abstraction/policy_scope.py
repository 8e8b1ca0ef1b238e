"""The policy in force: ``kp.policy`` blocks, torch's switch for determinism, and what compiled functions follow."""

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
    """A policy with the choices made under it: what the hot path needs, found without hashing the policy."""

    __slots__ = ("__weakref__", "choices", "policy")

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.choices: dict[tuple[Any, ...], Callable[..., Any]] = {}
        _states.add(self)


_states: weakref.WeakSet[PolicyState] = weakref.WeakSet()


def forget_all_choices() -> None:
    """Drop the choices made under every policy."""
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
# torch.compile can guard a module's global and no context variable: the policies in force by thread, and their union.
_in_force: dict[int, Policy] = {}
_in_force_lock = threading.Lock()
_traced = Policy()


def _torch_demands_determinism() -> bool:
    return (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def effective_encoded(op: str, kernel: str | None) -> str:
    """The effective policy's text, in steps that torch.compile can trace and guard."""
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
    """Choose under a policy inside the ``with`` block; what is left out keeps the outer policy's value.

    The policy holds for this thread, or asyncio task, and for the backward of what it computes. Compiled functions
    cannot ask which thread they run in: they follow the policies of all threads at once, and are refused where two
    threads pin different kernels. ``torch.use_deterministic_algorithms(True)`` demands determinism here too.

    Args:
        kernel: pin one implementation by name, for every op, or for some: ``{"attention": "tiled"}``.
        deterministic: only kernels that give the same bits each time.
        measure: time the kernels that fit, once for each shape, and take the fastest. On a machine that does other
            work nothing is decided: a warning says so, and the choice is that without measuring.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> with kp.policy(deterministic=True, kernel={"rms_norm": "torch"}):
        ...     y = kp.rms_norm(torch.randn(4, 64))
    """
    for argument, value in (("deterministic", deterministic), ("measure", measure)):
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"{argument}={value!r}: use True or False, or leave it out to keep the outer policy's")
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
    """The kernels pinned for single ops; a name for every op replaces those of the outer policy."""
    if kernel is None:
        return base.kernels
    if isinstance(kernel, str):
        return ()
    if not isinstance(kernel, Mapping):
        raise TypeError(
            f"kernel={kernel!r}: name a kernel, as 'triton', or one for each op, as {{'attention': 'tiled'}}"
        )
    for op, name in kernel.items():
        registered_op(op)  # an error that lists the ops
        if not isinstance(name, str):
            raise TypeError(f"kernel={{{op!r}: {name!r}}}: name a kernel, as 'triton'")
    return tuple(sorted({**dict(base.kernels), **kernel}.items()))


def _put_in_force(policy: Policy) -> None:
    """Note this thread's policy, and work out the union that compiled functions follow."""
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
    """The policy of this thread, or asyncio task."""
    return _ambient.get().policy


def effective_policy(op: str, kernel: str | None) -> str:
    """The policy in force for an op as text, with a kernel pinned on top; torch.compile can trace and guard it."""
    if torch.compiler.is_compiling():
        return effective_encoded(op, kernel)
    return effective_state(op, kernel).policy.encoded
