"""The op table's nouns: an Op with its definition and cases, a Call to it, and the Kernels that serve it."""

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
    """What a kernel may ask about a tensor before it runs: everything but the numbers in it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, str(tensor.device))

    @property
    def format(self) -> str:
        """The dtype's plain name, as ``Device.formats`` spells it."""
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
    """One request to an op: which op, forward or backward, and its arguments with tensors as specs.

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
        """What records are compared by; None for an op without a rule for it."""
        op = _REGISTERED.get(self.op)
        return op.problem(self) if op is not None and op.problem is not None else None

    def __str__(self) -> str:
        body = ", ".join(f"{name}={value}" for name, value in self.arguments)
        grad = " with gradients" if self.needs_grad else ""
        return f"{self.op}.{self.phase}({body}){grad}"


@dataclass(frozen=True, slots=True)
class Case:
    """Named arguments for an op, shared by its tests, its benchmarks and its documentation."""

    name: str
    make: Callable[[torch.dtype, torch.device, Draw], Mapping[str, Any]]
    """Builds the arguments, by the op's argument names, from a dtype, a device and ``draw(*shape)``."""
    benchmark: bool = False
    """Benchmark cases fill a device; the others are small and odd, and are what the tests run."""
    formats: tuple[str, ...] = ("float32", "float16", "bfloat16")
    gate: str | None = None
    """The case whose numbers are checked in this one's place, where its own are too many for float64."""

    def arguments(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Mapping[str, Any]:
        """The arguments with normal random numbers; on the meta device, shapes alone.

        Small cases are drawn on the CPU, so that every device sees the same numbers for a seed; benchmark
        cases where they are used, for drawing a gigabyte on one core would take longer than the benchmark.
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

    ``module`` is imported when the kernel is first chosen, never before; it defines
    ``forward(device, *arguments)`` and, where the kernel trains, ``backward(device, *arguments)``, with the
    arguments the Op declares. ``supports`` must be cheap and pure: it sees specs, never tensors.
    """

    op: str
    name: str
    module: str
    supports: Callable[[Call, Device], str | None]
    """None when the kernel can serve the call on the device exactly, otherwise the reason it cannot."""
    language: Literal["torch", "triton", "native"]
    cpp: tuple[str, ...] = ()
    """The C++ files of the kernel, by their path below ``kernel_pytorch``: they count in its digest."""
    prepare: str | None = None
    """A module with ``prepare(device, spec) -> callable | None``, for callers that cannot afford the dispatcher in
    every call. The callable serves all calls of one kind and may update state in place, as the spec's class says;
    None where the kernel cannot serve them. See ``dispatch.prepared``."""
    backward: bool = True
    deterministic: bool = True
    """Whether two runs on the same inputs give the same bits, forward and backward."""

    @cached_property
    def implementation(self) -> ModuleType:
        return importlib.import_module(self.module)

    @cached_property
    def source_digest(self) -> str:
        """The digest of the kernel's code; a record of another digest says nothing about this kernel."""
        return source_digest(self.module, self.cpp)

    def function(self, phase: Phase) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self.implementation, phase)
        return function

    def refusal(self, call: Call, device: Device) -> str | None:
        """Why this kernel cannot serve the call, or None."""
        op = _REGISTERED.get(self.op)
        trains = op is None or bool(op.differentiable_outputs)  # else no gradient can be asked for
        if not self.backward and trains and (call.needs_grad or call.phase == "backward"):
            return "has no backward, and the call needs gradients"
        return self.supports(call, device)


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides which kernel is fastest for a call: recorded with a measurement, and compared with later calls."""

    kind: str
    """Calls of different kinds say nothing about each other, as a causal mask and a table of blocks."""
    sizes: dict[str, int]
    """Lengths and counts, 1 or more, by name; similar sizes give similar orders of kernels."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How an argument that is not a tensor travels through a compiled or exported graph as one."""

    encode: Callable[[Any], torch.Tensor]
    decode: Callable[[torch.Tensor], Any]


@dataclass(frozen=True, kw_only=True)
class Op:
    """A mathematical operation: its definition, its shape rules, its cases.

    ``reference`` is the definition: plain PyTorch, differentiable, exact in float64 on a CPU; that of an ``exact``
    op may be any program that gives its bytes. Arguments that gradients flow to are named in ``differentiable``;
    ``saved`` names, in order, what the backward takes besides the output gradients: inputs, and outputs by the
    names in ``outputs``. Where no output is differentiable, the op has no backward and its kernels need none.
    """

    name: str
    arguments: tuple[str, ...]
    """Each argument in torch's schema language, as ``"Tensor? weight"``."""
    outputs: tuple[str, ...]
    differentiable: tuple[str, ...]
    differentiable_outputs: tuple[str, ...]
    saved: tuple[str, ...]
    reference: Callable[..., Any]
    check: Callable[[Call], None]
    """Raises ValueError or TypeError naming the argument, its value and the remedy."""
    fake: Callable[..., tuple[torch.Tensor, ...]]
    """The forward's outputs as empty tensors; takes the op's arguments."""
    fake_backward: Callable[..., tuple[torch.Tensor, ...]]
    """The backward's outputs as empty tensors; takes output gradients, then ``saved``."""
    cases: tuple[Case, ...]
    compile_cases: tuple[str, ...]
    """The cases that are compiled for every architecture, each in its first format."""
    traffic: Callable[[Call], int]
    """The fewest bytes the call must move: each input read once, each output written once."""
    flops: Callable[[Call], int]
    low_precision: Callable[[torch.dtype], Callable[..., Any]] | None = None
    """For tensors of a dtype, the plainest program that computes as every kernel must, with its roundings and in its
    order: the yardstick of the error budget. Where it is None, the reference in float32 is."""
    without_gradients: Mapping[str, Any] = field(default_factory=dict)
    """What the public function changes in the arguments where no gradient is asked for, as a forward is timed."""
    exact: bool = False
    """Whether the reference defines every byte of the outputs, in the arguments' own precision: no error budget."""
    meaning: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None
    """What the outputs mean, by name, for comparison, as ``data * inverse``; ``low_precision`` then is there."""
    cancelling: tuple[str, ...] = ()
    """Results, as ``"dq"``, whose rows can be the small difference of larger terms."""
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    """Arguments that are objects of ours: how they travel through a graph as tensors."""
    baselines: Mapping[str, Callable[..., Any]]
    """What a user would call without us, by name; each takes the op's arguments and is differentiable."""
    problem: Callable[[Call], Problem] | None = None
    """What records of this op are compared by; where it is None, the backend's order of kernels stands."""
    compile_baselines: bool = True
    """Whether torch.compile can make the baselines faster; it cannot where they are one fused operator already."""

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
    """Every op in the table, by name.

    Example:
        >>> [op.name for op in registered_ops() if op.name == "rms_norm"]
        ['rms_norm']
    """
    importlib.import_module("kernel_pytorch.ops")
    return tuple(_REGISTERED[name] for name in sorted(_REGISTERED))


def registered_op(name: str) -> Op:
    """One op by its name; an unknown name is an error that lists the known ones."""
    for op in registered_ops():
        if op.name == name:
            return op
    raise ValueError(f"op={name!r}: no such op; the table has {', '.join(op.name for op in registered_ops())}")
