"""From a call to a kernel: one Function per Op, as a torch custom op and as a short path in plain eager mode.

The custom op (fake and autograd registered) is what ``torch.compile``, ``torch.export``, dispatch modes and
tensor subclasses see. Plain eager calls skip torch's Python dispatcher, which costs several microseconds a
call, and reach the same kernels through the same choice; ``benchmarks/selection.py`` measures both.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, NoReturn

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
from kernel_pytorch.hardware_abstraction.func_transforms import (
    Transformed,
    no_forward_mode,
    no_second_derivative,
    restore,
    save,
)
from kernel_pytorch.hardware_abstraction.op import Call, Op, Phase, TensorSpec, registered_op
from kernel_pytorch.hardware_abstraction.records import recorded_runs
from kernel_pytorch.hardware_abstraction.registry import backend, device_of
from kernel_pytorch.hardware_abstraction.selection import Choice, Policy, encode_policy, fitting, select
from kernel_pytorch.hardware_abstraction.timing import BusyMachineError, median_seconds, require_quiet

__all__ = [
    "Function",
    "TORCH_VERSION",
    "asked_device",
    "effective_policy",
    "explain",
    "explained",
    "explaining",
    "forget_choices",
    "function_of",
    "placed",
    "plain_call",
    "policy",
    "prepared",
]

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
_LIBRARY = torch.library.Library("kernel_pytorch", "FRAGMENT")
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_MOST_CHOICES = 16384  # per policy; a program with endless new shapes starts over instead of growing


class _Explained(BaseException):
    """Carries the choice out of a call that is only being explained; BaseException so that no caller eats it."""

    def __init__(self, choice: Any) -> None:
        self.choice = choice


_states: weakref.WeakSet[_State] = weakref.WeakSet()


class _State:
    """A policy with the choices made under it: what the hot path needs, found without hashing the policy."""

    __slots__ = ("__weakref__", "choices", "policy")

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.choices: dict[tuple[Any, ...], Callable[..., Any]] = {}
        _states.add(self)


@lru_cache(maxsize=256)
def _state_for(policy: Policy) -> _State:
    return _State(policy)


@lru_cache(maxsize=256)
def _state_encoded(text: str) -> _State:
    return _state_for(Policy.decode(text))


_NO_POLICY = _state_for(Policy())
_ambient: ContextVar[_State] = ContextVar("kernel_pytorch_policy", default=_NO_POLICY)
# torch.compile can guard a module's global and no context variable: the policies in force by thread, and their union.
_in_force: dict[int, Policy] = {}
_in_force_lock = threading.Lock()
_traced = Policy()
_asking: dict[int, Device | None] = {}  # thread inside explain() -> the device it asks about, None for the tensors'


def _torch_demands_determinism() -> bool:
    return (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def _effective_encoded(op: str, kernel: str | None) -> str:
    """The effective policy's text, in steps that torch.compile can trace and guard."""
    outer = _traced
    return encode_policy(
        outer.kernel_for(op) if kernel is None else kernel,
        outer.deterministic or _torch_demands_determinism(),
        outer.measure,
    )


def _effective(op: str, kernel: str | None) -> _State:
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
    for op in kernel:
        registered_op(op)  # an error that lists the ops
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


def forget_choices() -> None:
    """Drop every choice of this process, so that the next call chooses anew (kept measurements stay kept)."""
    for cached in (select, recorded_runs, _prepare):
        cached.cache_clear()
    for state in list(_states):
        state.choices.clear()


def explaining() -> bool:
    """Whether this thread is inside ``explain``."""
    return bool(_asking) and threading.get_ident() in _asking


def asked_device() -> Device | None:
    """The device that ``explain`` was asked about on this thread; None for the tensors' own."""
    return _asking.get(threading.get_ident())


def effective_policy(op: str, kernel: str | None) -> str:
    """The policy in force for an op as text, with a kernel pinned on top; torch.compile can trace and guard it."""
    if torch.compiler.is_compiling():
        return _effective_encoded(op, kernel)
    return _effective(op, kernel).policy.encoded


def explained(choice: Any) -> NoReturn:
    """End the call that ``explain`` made, with what it is to return."""
    raise _Explained(choice)


def explain(
    function: Callable[..., Any],
    *arguments: Any,
    device: str | torch.device | Device | None = None,
    **keywords: Any,
) -> Choice:
    """Which kernel a call would use, and why not each other one. Runs no kernel.

    Args:
        function: a function of ours, such as ``kp.rms_norm``.
        device: ask for another device, by catalogue name, as torch names it or as facts, instead of the tensors' own.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> print(kp.explain(kp.rms_norm, torch.ones(2, 64), device="nvidia/h200"))
        rms_norm.forward(x=float32[2, 64], weight=None, eps=1e-06)
        on nvidia/h200 (sm_90)
        -> triton  the first in the backend's order that fits
           torch   fits; ranked after triton
    """
    from kernel_pytorch.hardware_abstraction.registry import device as find_device

    # Of this thread alone: what other threads call meanwhile must run.
    thread = threading.get_ident()
    _asking[thread] = find_device(device) if isinstance(device, (str, torch.device)) else device
    try:
        function(*arguments, **keywords)
    except _Explained as ended:
        choice: Choice = ended.choice
        return choice
    finally:
        del _asking[thread]
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
            return self._through_torch(self.encoded(arguments), _effective_encoded(self.op.name, kernel))
        state = _effective(self.op.name, kernel)
        plain = _no_modes()
        needs_grad = False
        outputs: tuple[torch.Tensor, ...]
        for value in arguments:
            if isinstance(value, torch.Tensor):
                plain = plain and _is_plain(value)
                needs_grad = needs_grad or value.requires_grad
        needs_grad = needs_grad and torch.is_grad_enabled()
        if explaining():
            raise _Explained(self._explained(arguments, state.policy, needs_grad))
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
        """The custom op's outputs; torch returns a single one bare."""
        outputs = self._custom_op(*values, encoded)
        return (outputs,) if len(self.op.outputs) == 1 else outputs

    def pinned(self, kernel: str) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The function with one kernel pinned."""
        return partial(self, kernel=kernel)

    def _runner(
        self, phase: Phase, arguments: tuple[Any, ...], state: _State, needs_grad: bool
    ) -> Callable[..., Any]:
        key: list[Any] = [self, phase, needs_grad]
        for value in arguments:
            if isinstance(value, torch.Tensor):
                key += (value.shape, value.stride(), value.dtype, value.device)
            else:
                key += (type(value), value)  # True is 1 to a dict, and not to a check
        try:
            found = state.choices.get(tuple(key))
        except TypeError:  # a list or an array where no list can be: the check says so, with the argument's name
            self.call(phase, arguments, needs_grad)
            raise
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
        where = _place(arguments)
        if where.type == "meta":  # shapes without numbers
            return self.op.fake if phase == "forward" else self.op.fake_backward
        device = device_of(where)
        timings = self._timings(call, device, state.policy, arguments)
        choice = select(call, device, state.policy, timings)
        return placed(where, partial(choice.kernel.function(phase), device))

    def _explained(self, arguments: tuple[Any, ...], policy: Policy, needs_grad: bool) -> Choice:
        call = self.call("forward", arguments, needs_grad)
        device = _asking[threading.get_ident()] or device_of(_place(arguments))
        return select(call, device, policy, self._timings(call, device, policy, None))

    def _timings(
        self, call: Call, device: Device, policy: Policy, arguments: tuple[Any, ...] | None
    ) -> tuple[tuple[str, float], ...] | None:
        """(kernel, seconds) as kept from before, or measured now on the arguments where they are given."""
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
                return None  # nothing can be timed inside a graph capture
            try:
                require_quiet(device)
            except BusyMachineError as error:
                warnings.warn(f"{error}: {self.op.name} is chosen as without measuring", stacklevel=2)
                return None
            timings = {}
            timed = placed(_place(arguments), median_seconds)
            with torch.no_grad():  # as the kernels run later; recording a graph would be timed too
                for kernel in fits:
                    run = kernel.function(call.phase)
                    timings[kernel.name] = timed(partial(run, device, *arguments), device)
            kept = choice_cache.MeasuredChoice(key, timings)
            choice_cache.store(kept)
        return tuple(sorted(kept.timings.items()))

    def run(self, phase: Phase, arguments: tuple[Any, ...], policy: str) -> tuple[torch.Tensor, ...]:
        """One phase through the kernel chosen under a policy, outside autograd: for an op made of smaller calls."""
        outputs: tuple[torch.Tensor, ...] = self._runner(phase, arguments, _state_encoded(policy), False)(
            *arguments
        )
        return outputs

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

        def bare(outputs: tuple[torch.Tensor, ...]) -> Any:
            return outputs[0] if len(op.outputs) == 1 else outputs

        def forward_kernel(*values: Any) -> Any:
            *rest, encoded = values
            self.refuse_tangents(rest)
            rest = self._decoded(rest, op.argument_names)
            return bare(self._runner("forward", tuple(rest), _state_encoded(encoded), False)(*rest))

        def backward_kernel(*values: Any) -> Any:
            *rest, encoded = values
            return self.backward(_state_encoded(encoded), tuple(self._decoded(rest, op.backward_names)))

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
        """The arguments as a graph carries them: objects of ours as tensors."""
        if not self.op.codecs:
            return arguments
        names = self.op.backward_names if backward else self.op.argument_names
        values = tuple(
            self.op.codecs[name].encode(value) if name in self.op.codecs else value
            for name, value in zip(names, arguments, strict=True)
        )
        if torch.compiler.is_compiling():
            return values
        # Fake tensors take no others: what a codec made becomes a constant among them, as torch.tensor(...) does.
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
        """torch would drop the tangents of forward-mode derivatives at a custom op, without a word."""
        if not forward_ad_active():
            return
        for value in values:
            if not isinstance(value, torch.Tensor):
                continue
            try:
                tangent = forward_ad.unpack_dual(value, level=0).tangent
            except RuntimeError:  # batched or fake: torch cannot tell, so there may be one
                tangent = value
            if tangent is not None:
                raise NotImplementedError(no_forward_mode(self.op.name))


def _no_modes() -> bool:
    """Whether nothing watches or transforms what torch runs: no dispatch mode, no torch.func, no forward mode."""
    return dispatch_mode_count() == 0 and not transform_active() and not forward_ad_active()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a kernel may read the tensor's memory: not behind a subclass, nor in a view that negates."""
    return type(tensor) in _PLAIN_TENSORS and not tensor.is_neg()


def plain_call(tensor: torch.Tensor) -> bool:
    """Whether a function may call a kernel that it knows: nothing watches, and no kernel is pinned."""
    policy = _ambient.get().policy
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
        checked: whether another ``prepared`` of the same call was served, so that nothing watches it.
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
    # It launches kernels and computes nothing in torch, so autocast need not be switched off.
    return placed(where, run) if run is not None and _one_of_several(where) else run


def placed(where: torch.device, run: Callable[..., Any]) -> Callable[..., Any]:
    """The function as kernels must run: without autocast, which would round what they add up, and with torch's
    current device set to this one, where Triton launches, wherever the tensors are."""
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
    """The eager path's autograd: the same backward as the custom op's, without its dispatcher."""

    @staticmethod
    def forward(ctx: Any, function: Function, run: Callable[..., Any], state: _State, *arguments: Any) -> Any:
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
        # With create_graph=True the custom op goes into the graph, and refuses a second derivative there.
        plain = not torch.is_grad_enabled() and _no_modes()
        for gradient in taken:  # is_grads_batched=True brings batches that no mode announces
            plain = plain and _is_plain(gradient) and not is_legacy_batched(gradient)
        if plain:
            result = function.backward(ctx.state, values)
        else:
            result = function._backward_op(*function.encoded(values, backward=True), ctx.state.policy.encoded)
        return (None, None, None, *function.spread(result, ctx.count, ctx.absent))
