"""Records of the op registry: an Op with its definition and cases, a Call to it, and the Kernels that serve it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, Literal

import msgspec
import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.source_digest import source_digest

__all__ = ["Call", "Case", "Codec", "Kernel", "Op", "Problem", "TensorSpec", "registered_op", "registered_ops"]

Phase = Literal["forward", "backward"]
Draw = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, strides, dtype and device of a tensor, without its elements: the input of ``Kernel.supports``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, str(tensor.device))

    @property
    def format(self) -> str:
        """The dtype's name without ``torch.``, as in ``Device.formats``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def __str__(self) -> str:
        layout = "" if self.contiguous else f" strides {self.stride}"
        return f"{self.format}{list(self.shape)}{layout}"


@dataclass(frozen=True, slots=True)
class Call:
    """One call to an op: the op, forward or backward, and its arguments with tensors as ``TensorSpec``.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> call = kp.explain(kp.rms_norm, torch.ones(2, 8)).call
        >>> call["x"].shape, call["eps"], call.needs_grad
        ((2, 8), 1e-06, False)
    """

    op: str
    phase: Phase
    arguments: tuple[tuple[str, Any], ...]
    needs_grad: bool = False

    def __getitem__(self, name: str) -> Any:
        for key, value in self.arguments:
            if key == name:
                return value
        raise KeyError(name)

    @property
    def problem(self) -> Problem | None:
        """The ``Problem`` to compare with recorded runs; None if the op does not define one."""
        op = _REGISTERED.get(self.op)
        return op.problem(self) if op is not None and op.problem is not None else None

    def __str__(self) -> str:
        body = ", ".join(f"{name}={value}" for name, value in self.arguments)
        grad = " with gradients" if self.needs_grad else ""
        return f"{self.op}.{self.phase}({body}){grad}"


@dataclass(frozen=True, slots=True)
class Case:
    """Named arguments for an op, shared by its tests, benchmarks and documentation."""

    name: str
    make: Callable[[torch.dtype, torch.device, Draw], Mapping[str, Any]]
    """Builds the arguments, by the op's argument names, from a dtype, a device and ``draw(*shape)``."""
    benchmark: bool = False
    """True for large cases that fill a device; False for the small, unusual cases that the tests run."""
    formats: tuple[str, ...] = ("float32", "float16", "bfloat16")
    gate: str | None = None
    """The smaller case to check instead of this one if this one does not fit in memory in float64."""

    def arguments(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Mapping[str, Any]:
        """Return the arguments with normally distributed random elements; on the meta device, shapes only.

        Small cases are drawn on the CPU, so that every device gets the same elements for a seed. Benchmark cases are
        drawn on the device, because drawing a gigabyte on one core would take longer than the benchmark.
        """
        place = device if self.benchmark else torch.device("cpu")
        generator = None if device.type == "meta" else torch.Generator(device=place).manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            if generator is None:
                return torch.empty(*shape, device=device)
            return torch.randn(*shape, generator=generator, device=place).to(device)

        return self.make(dtype, device, draw)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One implementation of an Op.

    ``module`` is imported when the kernel is first selected; it defines ``forward(device, *arguments)`` and, if the
    kernel trains, ``backward(device, *arguments)``, with the arguments that the Op declares. ``supports`` must be
    cheap and pure: it takes specs, never tensors.
    """

    op: str
    name: str
    module: str
    supports: Callable[[Call, Device], str | None]
    """Returns None if the kernel can serve the call on the device exactly, else the reason why it cannot."""
    language: Literal["torch", "triton", "native"]
    cpp: tuple[str, ...] = ()
    """The kernel's C++ files, relative to ``kernel_pytorch``; they are part of its digest."""
    prepare: str | None = None
    """A module with ``prepare(device, spec) -> callable | None``, for callers that skip the dispatcher to save host
    time. The callable serves all calls of one kind and may update state in place, as the spec's class documents;
    None if the kernel cannot serve them. See ``dispatch.prepared``."""
    backward: bool = True
    deterministic: bool = True
    """Whether two runs on the same inputs give the same bits, forward and backward."""

    @cached_property
    def implementation(self) -> ModuleType:
        return importlib.import_module(self.module)

    @cached_property
    def source_digest(self) -> str:
        """Return the digest of the kernel's code. A record with another digest does not apply to this kernel."""
        return source_digest(self.module, self.cpp)

    def function(self, phase: Phase) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self.implementation, phase)
        return function

    def refusal(self, call: Call, device: Device) -> str | None:
        """Return why this kernel cannot serve the call, or None."""
        op = _REGISTERED.get(self.op)
        trains = op is None or bool(op.differentiable_outputs)
        if not self.backward and trains and (call.needs_grad or call.phase == "backward"):
            return "has no backward, and the call needs gradients"
        return self.supports(call, device)


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes that decide which kernel is fastest: stored with a measurement and compared with later calls."""

    kind: str
    """Only calls of the same kind are compared: a causal mask and a block mask, for example, are not."""
    sizes: dict[str, int]
    """Lengths and counts by name, each at least 1. Similar sizes are expected to rank kernels alike."""


@dataclass(frozen=True, slots=True)
class Codec:
    """Encodes an argument that is not a tensor as one, for compiled and exported graphs."""

    encode: Callable[[Any], torch.Tensor]
    decode: Callable[[torch.Tensor], Any]


def empty_like_each(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return an empty contiguous tensor like each of the given ones."""
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors)


@dataclass(frozen=True, kw_only=True)
class Op:
    """A mathematical operation: its definition, its shape rules, its cases.

    ``reference`` is the definition: plain PyTorch, differentiable, exact in float64 on a CPU. For an ``exact`` op it
    may be any program that returns the right bytes. ``differentiable`` names the arguments that receive gradients.
    ``saved`` names, in order, the inputs and outputs that the backward takes after the output gradients. If no output
    is differentiable, the op has no backward.
    """

    name: str
    arguments: tuple[str, ...]
    """Each argument in torch's schema language, such as ``"Tensor? weight"``."""
    outputs: tuple[str, ...]
    differentiable: tuple[str, ...]
    differentiable_outputs: tuple[str, ...]
    saved: tuple[str, ...]
    reference: Callable[..., Any]
    check: Callable[[Call], None]
    """Raises ValueError or TypeError with the argument's name, its value and the remedy."""
    fake: Callable[..., tuple[torch.Tensor, ...]]
    """The forward's outputs as empty tensors; takes the op's arguments."""
    fake_backward: Callable[..., tuple[torch.Tensor, ...]] = empty_like_each
    """The backward's outputs as empty tensors; takes output gradients, then ``saved``. The default is for ops without
    a differentiable output: torch's schema needs a backward with an argument and a result."""
    cases: tuple[Case, ...]
    compile_cases: tuple[str, ...]
    """Names of the cases that are compiled for every architecture, each in its first format."""
    traffic: Callable[[Call], int]
    """Returns the minimum memory traffic in bytes: each input read once, each output written once."""
    flops: Callable[[Call], int]
    low_precision: Callable[[torch.dtype], Callable[..., Any]] | None = None
    """Returns, for a dtype, a plain program with the roundings and the order of operations that every kernel must
    have; the error budget is derived from its error. None: it is derived from the reference in float32."""
    without_gradients: Mapping[str, Any] = field(default_factory=dict)
    """Changes the arguments as the public function does when no gradient is needed; benchmarks time that call."""
    exact: bool = False
    """Whether kernels must return the reference's bytes, computed in the arguments' dtype: no error budget."""
    meaning: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None
    """Returns the values to compare, by name, such as ``data * inverse``. Needs ``low_precision``."""
    cancelling: tuple[str, ...] = ()
    """Results, such as ``"dq"``, whose rows can be small differences of large terms."""
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    """By argument name: how objects such as masks are encoded as tensors in a graph."""
    baselines: Mapping[str, Callable[..., Any]]
    """Alternatives in PyTorch and other libraries, by name; each takes the op's arguments and is differentiable."""
    problem: Callable[[Call], Problem] | None = None
    """Returns the ``Problem`` of a call, to compare it with recorded runs. None: the backend's order applies."""
    compile_baselines: bool = True
    """Whether to time the baselines under torch.compile too; False if each is a single fused operator."""

    def __post_init__(self) -> None:
        if self.name in _REGISTERED:
            raise ValueError(f"op {self.name!r} is already registered")
        _REGISTERED[self.name] = self

    @cached_property
    def argument_names(self) -> tuple[str, ...]:
        return tuple(argument.split()[-1] for argument in self.arguments)

    @cached_property
    def backward_names(self) -> tuple[str, ...]:
        return tuple(f"d{name}" for name in self.differentiable_outputs) + self.saved

    def case(self, name: str) -> Case:
        for case in self.cases:
            if case.name == name:
                return case
        names = ", ".join(case.name for case in self.cases)
        raise ValueError(f"case={name!r}: {self.name} has no such case; it has {names}")


_REGISTERED: dict[str, Op] = {}


def registered_ops() -> tuple[Op, ...]:
    """Return every op in the registry, sorted by name.

    Example:
        >>> [op.name for op in registered_ops() if op.name == "rms_norm"]
        ['rms_norm']
    """
    importlib.import_module("kernel_pytorch.ops")
    return tuple(_REGISTERED[name] for name in sorted(_REGISTERED))


def registered_op(name: str) -> Op:
    """Return the op of this name; raise an error that lists the names if there is none."""
    for op in registered_ops():
        if op.name == name:
            return op
    raise ValueError(f"op={name!r}: no such op; the registry has {', '.join(op.name for op in registered_ops())}")
