"""Dispatch a call of an op to a kernel: a torch custom op, and a short path for plain eager calls.

The custom op, with fake and autograd implementations, serves ``torch.compile``, ``torch.export``, dispatch modes and
tensor subclasses. Plain eager calls select a kernel in the same way, but skip torch's Python dispatcher, which costs
several microseconds a call; ``benchmarks/selection.py`` measures both.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from typing import Any

import torch
from torch.autograd import forward_ad

from kernel_pytorch._compat.modes import (
    any_autocast,
    dispatch_mode_count,
    forward_ad_active,
    is_legacy_batched,
    transform_active,
)
from kernel_pytorch._compat.structures import FakeTensor, active_fake_mode
from kernel_pytorch.hardware_abstraction import choice_cache
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.explanation import asked_device, explained, explaining
from kernel_pytorch.hardware_abstraction.func_transforms import (
    Transformed,
    no_forward_mode,
    no_second_derivative,
    restore,
    save,
)
from kernel_pytorch.hardware_abstraction.op import Call, Op, Phase, TensorSpec
from kernel_pytorch.hardware_abstraction.policy_scope import (
    PolicyState,
    effective_encoded,
    effective_state,
    forget_all_choices,
    policy_in_force,
    state_encoded,
)
from kernel_pytorch.hardware_abstraction.records import recorded_runs
from kernel_pytorch.hardware_abstraction.registry import backend, device_of
from kernel_pytorch.hardware_abstraction.selection import Choice, Policy, fitting, select
from kernel_pytorch.hardware_abstraction.timing import BusyMachineError, median_seconds, require_quiet

__all__ = [
    "Function",
    "TORCH_VERSION",
    "forget_choices",
    "function_of",
    "placed",
    "plain_call",
    "prepared",
]

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
_LIBRARY = torch.library.Library("kernel_pytorch", "FRAGMENT")
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_MOST_CHOICES = 16384
"""Maximum number of cached choices per policy; the cache is cleared when it is full."""


def forget_choices() -> None:
    """Clear all cached choices of this process. Measurements stay in the user's cache directory."""
    for cached in (select, recorded_runs, _prepare):
        cached.cache_clear()
    forget_all_choices()


_functions: dict[str, Function] = {}


def function_of(op: Op) -> Function:
    """Return the callable of an op in the registry."""
    return _functions[op.name]


class Function:
    """The callable of an op: ``function(*arguments, kernel=None)`` returns the op's outputs as a tuple."""

    def __init__(self, op: Op) -> None:
        self.op = op
        _functions[op.name] = self
        names = op.argument_names
        # For each saved value: (True, index of the argument) or (False, index of the output).
        self._saved = [
            (True, names.index(name)) if name in names else (False, op.outputs.index(name)) for name in op.saved
        ]
        self._differentiable = [names.index(name) for name in op.differentiable]
        self._grad_outputs = [op.outputs.index(name) for name in op.differentiable_outputs]
        self._hidden_outputs = [i for i in range(len(op.outputs)) if i not in self._grad_outputs]
        self._define()

    def __call__(self, *arguments: Any, kernel: str | None = None) -> tuple[torch.Tensor, ...]:
        if torch.compiler.is_compiling():
            return self._through_torch(self.encoded(arguments), effective_encoded(self.op.name, kernel))
        state = effective_state(self.op.name, kernel)
        plain = _no_modes()
        needs_grad = False
        outputs: tuple[torch.Tensor, ...]
        for value in arguments:
            if isinstance(value, torch.Tensor):
                plain = plain and _is_plain(value)
                needs_grad = needs_grad or value.requires_grad
        needs_grad = needs_grad and torch.is_grad_enabled()
        if explaining():
            explained(self._explained(arguments, state.policy, needs_grad))
        if not plain:
            self.refuse_tangents(arguments)
            if transform_active() and self.op.differentiable_outputs:
                outputs = Transformed.apply(self, state.policy.encoded, *self.encoded(arguments))  # type: ignore[no-untyped-call]
                return outputs
            return self._through_torch(self.encoded(arguments), state.policy.encoded)
        run = self._runner("forward", arguments, state, needs_grad)
        if needs_grad:
            outputs = _Differentiable.apply(self, run, state, *arguments)  # type: ignore[no-untyped-call]
            return outputs
        outputs = run(*arguments)
        return outputs

    def _through_torch(self, values: tuple[Any, ...], encoded: str) -> tuple[torch.Tensor, ...]:
        """Call the custom op. torch returns a single output without a tuple."""
        outputs = self._custom_op(*values, encoded)
        return (outputs,) if len(self.op.outputs) == 1 else outputs

    def pinned(self, kernel: str) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Return the function with one kernel pinned."""
        return partial(self, kernel=kernel)

    def _runner(
        self, phase: Phase, arguments: tuple[Any, ...], state: PolicyState, needs_grad: bool
    ) -> Callable[..., Any]:
        key: list[Any] = [self, phase, needs_grad]
        for value in arguments:
            if isinstance(value, torch.Tensor):
                key += (value.shape, value.stride(), value.dtype, value.device)
            else:
                key += (type(value), value)  # True == 1, but the op's check accepts only one of them
        try:
            found = state.choices.get(tuple(key))
        except TypeError:  # unhashable, such as a list: the op's check raises an error that names the argument
            self.call(phase, arguments, needs_grad)
            raise
        if found is None:
            found = self._choose(phase, arguments, state, needs_grad)
            if len(state.choices) >= _MOST_CHOICES:
                state.choices.clear()
            state.choices[tuple(key)] = found
        return found

    def call(self, phase: Phase, arguments: tuple[Any, ...], needs_grad: bool = False) -> Call:
        """Return the ``Call`` for these arguments, after the op's check."""
        names = self.op.argument_names if phase == "forward" else self.op.backward_names
        specs = [TensorSpec.of(value) if isinstance(value, torch.Tensor) else value for value in arguments]
        call = Call(self.op.name, phase, tuple(zip(names, specs, strict=True)), needs_grad)
        if phase == "forward":
            self.op.check(call)
        return call

    def _choose(
        self, phase: Phase, arguments: tuple[Any, ...], state: PolicyState, needs_grad: bool
    ) -> Callable[..., Any]:
        call = self.call(phase, arguments, needs_grad)
        where = _place(arguments)
        if where.type == "meta":
            return self.op.fake if phase == "forward" else self.op.fake_backward
        device = device_of(where)
        timings = self._timings(call, device, state.policy, arguments)
        choice = select(call, device, state.policy, timings)
        return placed(where, partial(choice.kernel.function(phase), device))

    def _explained(self, arguments: tuple[Any, ...], policy: Policy, needs_grad: bool) -> Choice:
        call = self.call("forward", arguments, needs_grad)
        device = asked_device() or device_of(_place(arguments))
        return select(call, device, policy, self._timings(call, device, policy, None))

    def _timings(
        self, call: Call, device: Device, policy: Policy, arguments: tuple[Any, ...] | None
    ) -> tuple[tuple[str, float], ...] | None:
        """Return (kernel, seconds) from the cache, or measured on the arguments if they are given; None without."""
        if not policy.measure or not device.present:
            return None
        fits, _ = fitting(call, device, policy)
        if len(fits) < 2:
            return None
        key = choice_cache.choice_key(call, device, tuple(kernel.name for kernel in fits))
        kept = choice_cache.load(key)
        if kept is None:
            if arguments is None:
                return None
            if _place(arguments).type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None  # a graph capture cannot be timed
            try:
                require_quiet(device)
            except BusyMachineError as error:
                warnings.warn(f"{error}: {self.op.name} is chosen as without measuring", stacklevel=2)
                return None
            timings = {}
            timed = placed(_place(arguments), median_seconds)
            with torch.no_grad():  # kernels run without recording a graph
                for kernel in fits:
                    run = kernel.function(call.phase)
                    timings[kernel.name] = timed(partial(run, device, *arguments), device)
            kept = choice_cache.MeasuredChoice(key, timings)
            choice_cache.store(kept)
        return tuple(sorted(kept.timings.items()))

    def run(self, phase: Phase, arguments: tuple[Any, ...], policy: str) -> tuple[torch.Tensor, ...]:
        """Run one phase by the kernel chosen under an encoded policy, without autograd."""
        outputs: tuple[torch.Tensor, ...] = self._runner(phase, arguments, state_encoded(policy), False)(*arguments)
        return outputs

    def backward(self, state: PolicyState, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Return the op's gradients. ``arguments`` are the output gradients, then the saved values."""
        gradients: tuple[torch.Tensor, ...] = self._runner("backward", arguments, state, False)(*arguments)
        return gradients

    def gather_saved(self, arguments: tuple[Any, ...], outputs: tuple[Any, ...]) -> list[Any]:
        return [arguments[i] if is_argument else outputs[i] for is_argument, i in self._saved]

    def spread(self, gradients: tuple[torch.Tensor, ...], arguments_count: int, absent: list[bool]) -> list[Any]:
        """Return the gradients in the order of the arguments; None for an argument that has none or was None."""
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

        def bare(outputs: tuple[torch.Tensor, ...]) -> Any:
            return outputs[0] if len(op.outputs) == 1 else outputs

        def forward_kernel(*values: Any) -> Any:
            *rest, encoded = values
            self.refuse_tangents(rest)
            rest = self._decoded(rest, op.argument_names)
            return bare(self._runner("forward", tuple(rest), state_encoded(encoded), False)(*rest))

        def backward_kernel(*values: Any) -> Any:
            *rest, encoded = values
            return self.backward(state_encoded(encoded), tuple(self._decoded(rest, op.backward_names)))

        _LIBRARY.impl(name, forward_kernel, "CompositeExplicitAutograd")
        _LIBRARY.impl(f"{name}_backward", backward_kernel, "CompositeExplicitAutograd")

        def forward_fake(*values: Any) -> Any:
            self.refuse_tangents(values)
            return bare(op.fake(*values[:-1]))

        torch.library.register_fake(f"kernel_pytorch::{name}", forward_fake, lib=_LIBRARY)
        torch.library.register_fake(
            f"kernel_pytorch::{name}_backward", lambda *v: op.fake_backward(*v[:-1]), lib=_LIBRARY
        )
        self._custom_op = getattr(torch.ops.kernel_pytorch, name).default
        self._backward_op = getattr(torch.ops.kernel_pytorch, f"{name}_backward").default

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            output = output if isinstance(output, tuple) else (output,)
            save(ctx, self.gather_saved(inputs[:-1], output))
            ctx.policy = inputs[-1]
            ctx.absent = [inputs[i] is None for i in self._differentiable]
            ctx.mark_non_differentiable(*(output[i] for i in self._hidden_outputs))

        def autograd_backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            taken = [gradients[i] for i in self._grad_outputs]
            result = self._backward_op(*taken, *restore(ctx), ctx.policy)
            return (*self.spread(result, len(op.argument_names), ctx.absent), None)

        def second_derivative(ctx: Any, *gradients: Any) -> Any:
            raise NotImplementedError(no_second_derivative(name))

        torch.library.register_autograd(
            f"kernel_pytorch::{name}", autograd_backward, setup_context=setup_context, lib=_LIBRARY
        )
        torch.library.register_autograd(f"kernel_pytorch::{name}_backward", second_derivative, lib=_LIBRARY)

    def encoded(self, arguments: tuple[Any, ...], backward: bool = False) -> tuple[Any, ...]:
        """Encode the arguments that have a codec, such as masks, as tensors, for a graph."""
        if not self.op.codecs:
            return arguments
        names = self.op.backward_names if backward else self.op.argument_names
        values = tuple(
            self.op.codecs[name].encode(value) if name in self.op.codecs else value
            for name, value in zip(names, arguments, strict=True)
        )
        if torch.compiler.is_compiling():
            return values
        # An operator cannot mix fake and real tensors: lift what a codec made to a fake constant.
        mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
        if mode is None:
            return values
        with contextlib.nullcontext() if active_fake_mode() is mode else mode:
            return tuple(
                torch.ops.aten.lift_fresh_copy.default(value) if name in self.op.codecs else value
                for name, value in zip(names, values, strict=True)
            )

    def _decoded(self, values: list[Any], names: tuple[str, ...]) -> list[Any]:
        if not self.op.codecs:
            return values
        return [
            self.op.codecs[name].decode(value) if name in self.op.codecs else value
            for name, value in zip(names, values, strict=True)
        ]

    def refuse_tangents(self, values: Any) -> None:
        """Raise if a value has a forward-mode tangent: at a custom op torch would drop it silently."""
        if not forward_ad_active():
            return
        for value in values:
            if not isinstance(value, torch.Tensor):
                continue
            try:
                tangent = forward_ad.unpack_dual(value, level=0).tangent
            except RuntimeError:  # batched or fake tensors: assume that there is one
                tangent = value
            if tangent is not None:
                raise NotImplementedError(no_forward_mode(self.op.name))


def _no_modes() -> bool:
    """Return whether no dispatch mode, ``torch.func`` transform or forward-mode derivative is active."""
    return dispatch_mode_count() == 0 and not transform_active() and not forward_ad_active()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a kernel may read the tensor's memory: it is no subclass and has no lazy negation."""
    return type(tensor) in _PLAIN_TENSORS and not tensor.is_neg()


def plain_call(tensor: torch.Tensor) -> bool:
    """Return whether a prepared kernel may serve a call: no mode, transform or policy applies to it."""
    policy = policy_in_force()
    return (
        policy.kernel is None
        and not policy.kernels
        and not policy.measure
        and not explaining()
        and _no_modes()
        and _is_plain(tensor)
        and not is_legacy_batched(tensor)
    )


def _place(arguments: tuple[Any, ...]) -> torch.device:
    return next(value.device for value in arguments if isinstance(value, torch.Tensor))


def _one_of_several(where: torch.device) -> bool:
    return where.type != "cpu" and torch.get_device_module(where.type).device_count() > 1


def prepared(op: Op, spec: Hashable, tensor: torch.Tensor, *, checked: bool = False) -> Callable[..., Any] | None:
    """Return the function that the preferred kernel of an op prepared for calls of one kind, made once per device.

    For calls whose host time matters: no checks of arguments, no choice and no autograd. None on a CPU, where the
    kernel has no ``prepare`` or refuses the spec, and where a policy, a dispatch mode or a transform must see the
    call: then call the op's function.

    Args:
        op: the op in the registry.
        spec: the kind of call, of a class that the kernel's ``prepare`` takes.
        tensor: one of the arguments.
        checked: whether another ``prepared`` of the same call was served, so that ``plain_call`` holds.
    """
    if not (tensor.is_cuda or tensor.is_xpu) or torch.compiler.is_compiling():
        return None
    if not checked and (tensor.numel() == 0 or not plain_call(tensor)):
        return None
    return _prepare(op.name, tensor.device, spec)


@lru_cache(maxsize=16384)
def _prepare(op: str, where: torch.device, spec: Hashable) -> Callable[..., Any] | None:
    device = device_of(where)
    kernel = next(known for known in backend(device.backend).kernels if known.op == op)
    if kernel.prepare is None:
        return None
    run: Callable[..., Any] | None = importlib.import_module(kernel.prepare).prepare(device, spec)
    # It calls no torch operator, so autocast need not be disabled.
    return placed(where, run) if run is not None and _one_of_several(where) else run


def placed(where: torch.device, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` wrapped to disable autocast, which would round intermediate results, and to set torch's current
    device, on which Triton launches kernels."""
    several = _one_of_several(where)

    def guarded(*arguments: Any) -> Any:
        autocast = any_autocast() and torch.is_autocast_enabled(where.type)
        if not autocast and not several:
            return run(*arguments)
        with (
            torch.autocast(where.type, enabled=False) if autocast else contextlib.nullcontext(),
            torch.get_device_module(where.type).device(where) if several else contextlib.nullcontext(),
        ):
            return run(*arguments)

    return guarded


class _Differentiable(torch.autograd.Function):
    """Autograd of the short eager path: the custom op's backward without torch's Python dispatcher."""

    @staticmethod
    def forward(ctx: Any, function: Function, run: Callable[..., Any], state: PolicyState, *arguments: Any) -> Any:
        outputs = run(*arguments)
        ctx.function, ctx.state = function, state
        ctx.absent = [arguments[i] is None for i in function._differentiable]
        ctx.count = len(arguments)
        save(ctx, function.gather_saved(arguments, outputs))
        ctx.mark_non_differentiable(*(outputs[i] for i in function._hidden_outputs))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        function = ctx.function
        taken = [gradients[i] for i in function._grad_outputs]
        values = (*taken, *restore(ctx))
        # With create_graph=True, call the custom op, which raises an error for a second derivative.
        plain = not torch.is_grad_enabled() and _no_modes()
        for gradient in taken:  # is_grads_batched=True passes batched gradients without an active mode
            plain = plain and _is_plain(gradient) and not is_legacy_batched(gradient)
        if plain:
            result = function.backward(ctx.state, values)
        else:
            result = function._backward_op(*function.encoded(values, backward=True), ctx.state.policy.encoded)
        return (None, None, None, *function.spread(result, ctx.count, ctx.absent))
