"""From a call to a kernel: one Function per Op, as a torch custom op and as a short path in plain eager mode.

The custom op (fake and autograd registered) is what ``torch.compile``, ``torch.export``, dispatch modes and
tensor subclasses see. Plain eager calls skip torch's Python dispatcher, which costs several microseconds a
call, and reach the same kernels through the same choice; ``benchmarks/selection.py`` measures both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from kernel_pytorch.hardware_abstraction import choice_cache
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.op import Call, Op, Phase, TensorSpec
from kernel_pytorch.hardware_abstraction.registry import device_of
from kernel_pytorch.hardware_abstraction.selection import Choice, Policy, encode_policy, fitting, select
from kernel_pytorch.hardware_abstraction.timing import median_seconds

__all__ = ["Function", "explain", "forget_choices", "function_of", "policy"]

_LIBRARY = torch.library.Library("kernel_pytorch", "FRAGMENT")
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_MOST_CHOICES = 16384  # per policy; a program with endless new shapes starts over instead of growing


class _Explained(BaseException):
    """Carries the choice out of a call that is only being explained; BaseException so that no caller eats it."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice


class _State:
    """A policy with the choices made under it: what the hot path needs, found without hashing the policy."""

    __slots__ = ("choices", "explaining", "policy")

    def __init__(self, policy: Policy, explaining: Device | bool = False) -> None:
        self.policy = policy
        self.choices: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self.explaining = explaining


@lru_cache(maxsize=256)
def _state_for(policy: Policy) -> _State:
    return _State(policy)


@lru_cache(maxsize=256)
def _state_encoded(text: str) -> _State:
    return _state_for(Policy.decode(text))


_current = _state_for(Policy())


def _torch_demands_determinism() -> bool:
    return (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def _effective_encoded(kernel: str | None) -> str:
    """The effective policy's text, in steps that torch.compile can trace and guard."""
    outer = _current.policy
    return encode_policy(
        outer.kernel if kernel is None else kernel,
        outer.deterministic or _torch_demands_determinism(),
        outer.measure,
    )


def _effective(kernel: str | None) -> _State:
    state, strict = _current, _torch_demands_determinism()
    if kernel is None and not strict:
        return state
    wanted = replace(
        state.policy,
        kernel=state.policy.kernel if kernel is None else kernel,
        deterministic=state.policy.deterministic or strict,
    )
    return _State(wanted, state.explaining) if state.explaining else _state_for(wanted)


@contextlib.contextmanager
def policy(
    *, kernel: str | None = None, deterministic: bool | None = None, measure: bool | None = None
) -> Iterator[Policy]:
    """Choose under a policy inside the ``with`` block; what is left out keeps the outer policy's value.

    Like torch's own flags it holds for the whole process, the backward threads included.
    ``torch.use_deterministic_algorithms(True)`` demands determinism here too.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> with kp.policy(deterministic=True, measure=True):
        ...     y = kp.rms_norm(torch.randn(4, 64))
    """
    global _current
    outer, base = _current, _current.policy
    inner = Policy(
        kernel=base.kernel if kernel is None else kernel,
        deterministic=base.deterministic if deterministic is None else deterministic,
        measure=base.measure if measure is None else measure,
    )
    _current = _state_for(inner)
    try:
        yield inner
    finally:
        _current = outer


def forget_choices() -> None:
    """Drop every choice of this process, so that the next call chooses anew (kept measurements stay kept)."""
    for cached in (_state_for, _state_encoded, select):
        cached.cache_clear()
    global _current
    _current = _state_for(_current.policy)


def explain(
    function: Callable[..., Any], *arguments: Any, device: str | Device | None = None, **keywords: Any
) -> Choice:
    """Which kernel a call would use, and why not each other one. Runs no kernel.

    Args:
        function: a function of ours, such as ``kp.rms_norm``.
        device: ask for another device, by catalogue name or as facts, instead of where the tensors are.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> print(kp.explain(kp.rms_norm, torch.ones(2, 64), device="nvidia/h200"))
        rms_norm.forward(x=float32[2, 64], weight=None, eps=1e-06)
        on nvidia/h200 (sm_90)
        -> triton  the first in the backend's order that fits
           torch   fits; ranked after triton
    """
    from kernel_pytorch.hardware_abstraction.registry import device as find_device

    global _current
    target: Device | bool = find_device(device) if isinstance(device, str) else (device or True)
    outer = _current
    _current = _State(outer.policy, explaining=target)
    try:
        function(*arguments, **keywords)
    except _Explained as explained:
        return explained.choice
    finally:
        _current = outer
    name = getattr(function, "__name__", repr(function))
    raise TypeError(f"function={name}: it called no op of the table; explain takes functions such as kp.rms_norm")


_functions: dict[str, Function] = {}


def function_of(op: Op) -> Function:
    """The callable of an op in the table."""
    return _functions[op.name]


class Function:
    """An Op made callable. ``function(*arguments, kernel=None)`` returns the op's outputs as a tuple."""

    def __init__(self, op: Op) -> None:
        self.op = op
        _functions[op.name] = self
        names = op.argument_names
        # Where each saved value comes from: an argument's position, or an output's.
        self._saved = [
            (True, names.index(name)) if name in names else (False, op.outputs.index(name)) for name in op.saved
        ]
        self._differentiable = [names.index(name) for name in op.differentiable]
        self._grad_outputs = [op.outputs.index(name) for name in op.differentiable_outputs]
        self._hidden_outputs = [i for i in range(len(op.outputs)) if i not in self._grad_outputs]
        self._define()

    def __call__(self, *arguments: Any, kernel: str | None = None) -> tuple[torch.Tensor, ...]:
        if torch.compiler.is_compiling():
            outputs: tuple[torch.Tensor, ...] = self._custom_op(*arguments, _effective_encoded(kernel))
            return outputs
        state = _effective(kernel)
        plain = (
            torch._C._len_torch_dispatch_stack() == 0
            and torch._C._functorch.peek_interpreter_stack() is None
            and forward_ad._current_level < 0
        )
        needs_grad = False
        for value in arguments:
            if isinstance(value, torch.Tensor):
                plain = plain and type(value) in _PLAIN_TENSORS
                needs_grad = needs_grad or value.requires_grad
        if not plain and not state.explaining:
            outputs = self._custom_op(*arguments, state.policy.encoded)
            return outputs
        needs_grad = needs_grad and torch.is_grad_enabled()
        run = self._runner("forward", arguments, state, needs_grad)
        if needs_grad:
            outputs = _Differentiable.apply(self, run, state, *arguments)  # type: ignore[no-untyped-call]
            return outputs
        outputs = run(*arguments)
        return outputs

    def _runner(
        self, phase: Phase, arguments: tuple[Any, ...], state: _State, needs_grad: bool
    ) -> Callable[..., Any]:
        key: list[Any] = [self, phase, needs_grad]
        for value in arguments:
            if isinstance(value, torch.Tensor):
                key += (value.shape, value.stride(), value.dtype, value.device)
            else:
                key.append(value)
        found = state.choices.get(tuple(key))
        if found is None:
            found = self._choose(phase, arguments, state, needs_grad)
            if len(state.choices) >= _MOST_CHOICES:
                state.choices.clear()
            state.choices[tuple(key)] = found
        return found

    def call(self, phase: Phase, arguments: tuple[Any, ...], needs_grad: bool = False) -> Call:
        """The frozen Call for these arguments, checked."""
        names = self.op.argument_names if phase == "forward" else self.op.backward_names
        specs = [TensorSpec.of(value) if isinstance(value, torch.Tensor) else value for value in arguments]
        call = Call(self.op.name, phase, tuple(zip(names, specs, strict=True)), needs_grad)
        if phase == "forward":
            self.op.check(call)
        return call

    def _choose(
        self, phase: Phase, arguments: tuple[Any, ...], state: _State, needs_grad: bool
    ) -> Callable[..., Any]:
        call = self.call(phase, arguments, needs_grad)
        first = next(value for value in arguments if isinstance(value, torch.Tensor))
        device = state.explaining if isinstance(state.explaining, Device) else device_of(first.device)
        timings = None
        if state.policy.measure and device.present:
            timings = self._measured(call, device, arguments, state)
        choice = select(call, device, state.policy, timings)
        if state.explaining:
            raise _Explained(choice)
        return partial(choice.kernel.function(phase), device)

    def _measured(
        self, call: Call, device: Device, arguments: tuple[Any, ...], state: _State
    ) -> tuple[tuple[str, float], ...] | None:
        fits, _ = fitting(call, device, state.policy)
        if len(fits) < 2:
            return None
        key = choice_cache.choice_key(call, device, tuple(kernel.name for kernel in fits))
        kept = choice_cache.load(key)
        if kept is None:
            if first_cuda(arguments) and torch.cuda.is_current_stream_capturing():
                return None  # nothing can be timed inside a graph capture; the backend's order stands
            timings = {}
            for kernel in fits:
                run = kernel.function(call.phase)
                timings[kernel.name] = median_seconds(partial(run, device, *arguments), device)
            kept = choice_cache.MeasuredChoice(key, timings)
            choice_cache.store(kept)
        return tuple(sorted(kept.timings.items()))

    def backward(self, state: _State, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """The op's gradients from (output gradients, saved values), through the chosen kernel's backward."""
        gradients: tuple[torch.Tensor, ...] = self._runner("backward", arguments, state, False)(*arguments)
        return gradients

    def gather_saved(self, arguments: tuple[Any, ...], outputs: tuple[Any, ...]) -> list[Any]:
        return [arguments[i] if is_argument else outputs[i] for is_argument, i in self._saved]

    def spread(self, gradients: tuple[torch.Tensor, ...], arguments_count: int, absent: list[bool]) -> list[Any]:
        """Gradients in the order of the arguments, None where an argument takes none or was None."""
        spread: list[Any] = [None] * arguments_count
        for position, gradient, missing in zip(self._differentiable, gradients, absent, strict=True):
            spread[position] = None if missing else gradient
        return spread

    def _define(self) -> None:
        op, name = self.op, self.op.name
        by_name = dict(zip(op.argument_names, op.arguments, strict=True))
        returns = ", ".join(["Tensor"] * len(op.outputs))
        _LIBRARY.define(f"{name}({', '.join(op.arguments)}, str policy) -> ({returns})")
        taken = [f"Tensor d{output}" for output in op.differentiable_outputs]
        taken += [by_name.get(saved, f"Tensor {saved}") for saved in op.saved]
        returns = ", ".join(["Tensor"] * len(op.differentiable))
        _LIBRARY.define(f"{name}_backward({', '.join(taken)}, str policy) -> ({returns})")

        def forward_kernel(*values: Any) -> Any:
            *rest, encoded = values
            return self._runner("forward", tuple(rest), _state_encoded(encoded), False)(*rest)

        def backward_kernel(*values: Any) -> Any:
            *rest, encoded = values
            return self.backward(_state_encoded(encoded), tuple(rest))

        _LIBRARY.impl(name, forward_kernel, "CompositeExplicitAutograd")
        _LIBRARY.impl(f"{name}_backward", backward_kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"kernel_pytorch::{name}", lambda *v: op.fake(*v[:-1]), lib=_LIBRARY)
        torch.library.register_fake(
            f"kernel_pytorch::{name}_backward", lambda *v: op.fake_backward(*v[:-1]), lib=_LIBRARY
        )
        self._custom_op = getattr(torch.ops.kernel_pytorch, name).default
        backward_op = getattr(torch.ops.kernel_pytorch, f"{name}_backward").default

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            _save(ctx, self.gather_saved(inputs[:-1], output))
            ctx.policy = inputs[-1]
            ctx.absent = [inputs[i] is None for i in self._differentiable]
            ctx.mark_non_differentiable(*(output[i] for i in self._hidden_outputs))

        def autograd_backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            taken = [gradients[i] for i in self._grad_outputs]
            result = backward_op(*taken, *_restore(ctx), ctx.policy)
            return (*self.spread(result, len(op.argument_names), ctx.absent), None)

        torch.library.register_autograd(
            f"kernel_pytorch::{name}", autograd_backward, setup_context=setup_context, lib=_LIBRARY
        )


def first_cuda(arguments: tuple[Any, ...]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in arguments)


def _save(ctx: Any, saved: list[Any]) -> None:
    ctx.save_for_backward(*(value for value in saved if isinstance(value, torch.Tensor)))
    ctx.others = [None if isinstance(value, torch.Tensor) else (value,) for value in saved]


def _restore(ctx: Any) -> list[Any]:
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if other is None else other[0] for other in ctx.others]


class _Differentiable(torch.autograd.Function):
    """The eager path's autograd: the same backward as the custom op's, without its dispatcher."""

    @staticmethod
    def forward(ctx: Any, function: Function, run: Callable[..., Any], state: _State, *arguments: Any) -> Any:
        outputs = run(*arguments)
        ctx.function, ctx.state = function, state
        ctx.absent = [arguments[i] is None for i in function._differentiable]
        ctx.count = len(arguments)
        _save(ctx, function.gather_saved(arguments, outputs))
        ctx.mark_non_differentiable(*(outputs[i] for i in function._hidden_outputs))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        function = ctx.function
        taken = tuple(gradients[i] for i in function._grad_outputs)
        result = function.backward(ctx.state, (*taken, *_restore(ctx)))
        return (None, None, None, *function.spread(result, ctx.count, ctx.absent))
