"""Benchmark an op's kernels and baselines. A kernel is timed only after its results were checked against float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch

from kernel_pytorch.evidence import Benchmark, EvidenceError, Measurement, Quantiles, facts, now, versions
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.op import Call, Case, Kernel, Op, Phase
from kernel_pytorch.hardware_abstraction.rates import measure_rates
from kernel_pytorch.hardware_abstraction.registry import backend
from kernel_pytorch.hardware_abstraction.source_digest import part_digest
from kernel_pytorch.hardware_abstraction.timing import quantiles, sample_seconds
from kernel_pytorch.testing.budget import Comparison, compare, exceeded

__all__ = [
    "UNFINISHED",
    "Checkpoint",
    "GateError",
    "Plan",
    "Step",
    "checkout",
    "measurement",
    "plan",
    "record",
    "record_name",
    "run",
    "source_name",
]

UNFINISHED = 75
"""Exit status of a run that kept what it measured in a ``Checkpoint`` and has more to measure (EX_TEMPFAIL)."""
_Row = TypeVar("_Row")

_MOST_CPU_FLOPS = 10**11  # about a second a run
_MOST_CPU_BYTES = 350 * 10**6  # of a case that is checked in float64 at its own size
_REFERENCE_COPIES = 12  # float64 tensors alive at once while a gate runs, counted in copies of the inputs


class GateError(RuntimeError):
    """A kernel's results exceed their error budget; it is not timed and nothing is recorded."""


@dataclass(frozen=True)
class Step:
    """One case in one number format."""

    case: Case
    number_format: str

    def __str__(self) -> str:
        return f"{self.case.name} {self.number_format}"


class Checkpoint(Generic[_Row]):
    """The rows of finished cases, kept in a file of JSON lines so that another run can go on.

    Args:
        path: the file; None keeps nothing.
        key: what the rows depend on, such as the device, versions and commit; rows of another key are not read.
        row: the type of a row, a ``msgspec.Struct``.
    """

    def __init__(self, path: Path | None, key: object, row: type[_Row]) -> None:
        self.path, self.key = path, repr(key)
        self.rows: dict[str, list[_Row]] = {}
        """By case, in the order in which they were finished."""
        if path is not None and path.exists():
            for text in path.read_text(encoding="utf-8").splitlines():
                line = json.loads(text)
                if line["key"] == self.key:
                    self.rows[line["case"]] = msgspec.convert(line["rows"], list[row])  # type: ignore[valid-type]

    def add(self, case: str, rows: list[_Row]) -> None:
        """Keep the rows of a finished case."""
        self.rows[case] = rows
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            line = {"key": self.key, "case": case, "rows": msgspec.to_builtins(rows)}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Plan:
    """The steps of a benchmark: an op's cases, each with every kernel that supports it and every baseline."""

    op: Op
    device: Device
    steps: tuple[Step, ...]
    kernels: tuple[Kernel, ...]
    left_out: tuple[str, ...]
    """Cases that do not fit in this device's memory or time, with the reason."""


def plan(op: Op, device: Device, cases: tuple[str, ...] = (), formats: tuple[str, ...] = ()) -> Plan:
    """Return the benchmark of an op on a device: the cases that fit it, or exactly the named ones."""
    if device.torch_device is None:
        raise ValueError(f"device={device.name!r} is not here; benchmarks run on devices that are")
    chosen = [op.case(name) for name in cases] or [case for case in op.cases if case.benchmark]
    unknown = set(formats) - {number_format for case in chosen for number_format in case.formats}
    if unknown:
        raise ValueError(f"format={sorted(unknown)[0]!r}: no chosen case has it; they have {chosen[0].formats}")
    steps, left_out = [], []
    for case in chosen:
        for number_format in case.formats:
            if formats and number_format not in formats:
                continue
            checked = op.case(case.gate) if case.gate else case
            arguments = checked.arguments(getattr(torch, number_format), torch.device("meta")).values()
            numbers = sum(value.numel() for value in arguments if isinstance(value, torch.Tensor))
            if numbers * 8 * _REFERENCE_COPIES > device.memory_bytes:
                left_out.append(
                    f"{case.name} {number_format}: its float64 reference needs more memory than is here"
                )
            elif not cases and device.backend == "cpu" and _for_gpus(op, case, number_format):
                left_out.append(f"{case.name} {number_format}: sized for a GPU; name it with --case to run it here")
            elif not device.supports(number_format):
                left_out.append(f"{case.name} {number_format}: {device.arch} does not compute in it")
            else:
                steps.append(Step(case, number_format))
    kernels = tuple(kernel for kernel in backend(device.backend).kernels if kernel.op == op.name)
    return Plan(op, device, tuple(steps), kernels, tuple(left_out))


def _for_gpus(op: Op, case: Case, number_format: str) -> bool:
    arguments = case.arguments(getattr(torch, number_format), torch.device("meta"))
    call = function_of(op).call("forward", tuple(arguments.values()))
    return op.flops(call) > _MOST_CPU_FLOPS or (case.gate is None and op.traffic(call) > _MOST_CPU_BYTES)


def gate(op: Op, kernel: Kernel, arguments: dict[str, Any]) -> tuple[Comparison, ...]:
    """Compare the kernel with float64; raise GateError if a result exceeds its error budget."""
    compared = compare(op, function_of(op).pinned(kernel.name), arguments, gradients=kernel.backward)
    if exceeded(compared):
        raise GateError(f"{op.name} kernel {kernel.name!r}: {exceeded(compared)}")
    return compared


def measurement(
    op: Op,
    call: Call,
    *,
    case: str,
    number_format: str,
    subject: str,
    samples: list[float],
    checked: Comparison | None,
) -> Measurement:
    """Return the record of one subject on one call.

    Args:
        subject: ``"kernel:NAME"`` or ``"baseline:NAME"``.
        samples: seconds of each run.
        checked: the result closest to its error budget; None for a baseline.
    """
    return Measurement(
        case=case,
        phase=call.phase,
        format=number_format,
        subject=subject,
        seconds=Quantiles(*quantiles(samples)),
        samples=len(samples),
        traffic_bytes=op.traffic(call),
        flops=op.flops(call),
        error=checked.error if checked else None,
        budget=checked.budget if checked else None,
        problem=call.problem,
    )


def run(work: Plan, step: Step, seconds: float = 0.3) -> Iterator[Measurement]:
    """Check every kernel on the step, then time kernels and baselines, one measurement at a time."""
    op, device = work.op, work.device
    function = function_of(op)
    where = torch.device(device.torch_device or "cpu")
    dtype = getattr(torch, step.number_format)
    arguments = dict(step.case.arguments(dtype, where))
    checked = dict(op.case(step.case.gate).arguments(dtype, where)) if step.case.gate else arguments
    call = function.call("forward", tuple(arguments.values()), True)
    subjects: list[tuple[str, Callable[..., Any], bool, Comparison | None]] = []
    results = _results(op, arguments)
    for kernel in work.kernels:
        if kernel.refusal(call, device) is None:
            closest = max(gate(op, kernel, checked), key=lambda comparison: comparison.error / comparison.budget)
            pinned = function.pinned(kernel.name)
            returned = lambda *values, pinned=pinned: pinned(*values)[:results]  # noqa: E731
            subjects.append((f"kernel:{kernel.name}", returned, kernel.backward, closest))
    for name, baseline in op.baselines.items():
        subjects.append((f"baseline:{name}", baseline, True, None))
        if op.compile_baselines:
            subjects.append((f"baseline:torch.compile({name})", torch.compile(baseline, dynamic=False), True, None))
    phases: tuple[Phase, ...] = ("forward", "backward") if op.differentiable_outputs else ("forward",)
    for phase in phases:
        for subject, call_it, trains, worst in subjects:
            if phase == "backward" and not trains:
                continue
            timed = _timed(op, call_it, arguments, phase)
            samples = sample_seconds(timed, device, seconds)
            yield measurement(
                op,
                replace(call, phase=phase),
                case=step.case.name,
                number_format=step.number_format,
                subject=subject,
                samples=samples,
                checked=worst,
            )
    torch.compiler.reset()  # compiled baselines of this step count towards the recompile limit of the next


def _results(op: Op, arguments: dict[str, Any]) -> int:
    """Return how many of an op's outputs to request: as many as a baseline returns."""
    for baseline in op.baselines.values():
        with torch.no_grad():
            found = baseline(*arguments.values())
        return len(found) if isinstance(found, tuple) else 1
    return 1


def _timed(op: Op, call_it: Callable[..., Any], arguments: dict[str, Any], phase: Phase) -> Callable[[], object]:
    """Return one phase of a kernel or baseline as a function without arguments."""
    if phase == "forward":
        asked = {**arguments, **op.without_gradients}

        def forward() -> object:
            with torch.no_grad():
                return call_it(*asked.values())

        return forward
    values = {
        name: value.detach().requires_grad_() if name in op.differentiable and value is not None else value
        for name, value in arguments.items()
    }
    leaves = [values[name] for name in op.differentiable if values[name] is not None]
    out = call_it(*values.values())
    heads = out if isinstance(out, tuple) else (out,)
    upstream = [torch.randn_like(head) for head in heads]
    return lambda: torch.autograd.grad(heads, leaves, upstream, retain_graph=True)


def checkout() -> Path:
    """Return the project's checkout that this package runs from."""
    return Path(__file__).parents[2]


def record_name(op: Op | str, device: Device) -> str:
    name = op if isinstance(op, str) else op.name
    slug = "-".join("".join(c if c.isalnum() else " " for c in device.name.lower()).split())
    return f"{name}.{slug}.json"


def source_name(op: str, kernel: Kernel) -> str:
    """Return the name of a kernel in a record about an op, prefixed with the kernel's op if that is another."""
    return kernel.name if kernel.op == op else f"{kernel.op}/{kernel.name}"


def record(
    op: str,
    device: Device,
    kernels: Iterable[Kernel],
    measurements: list[Measurement],
    *,
    command: str,
    commit: str,
    copy_bandwidth: float | None = None,
    parts: Iterable[str] = (),
) -> Benchmark:
    """Return the record of a benchmark.

    Args:
        op: the op, or the name of another benchmark.
        device: the device it ran on.
        kernels: the kernels that were measured.
        measurements: the rows.
        command: the command that repeats it.
        commit: of the checkout that was measured.
        copy_bandwidth: bytes per second of a large copy, read plus written; None to measure it now.
        parts: folders (with a trailing slash) and Python files of the package that were measured besides the
            kernels, such as ``"lowering/"``.
    """
    sources = {source_name(op, kernel): kernel.source_digest for kernel in kernels}
    sources |= {part: part_digest(part) for part in parts}
    if not sources:
        raise EvidenceError(f"op={op!r}: a record names the code that it measured; give kernels= or parts=")
    return Benchmark(
        op=op,
        device=facts(device),
        versions=versions(),
        commit=commit,
        command=command,
        recorded=now(),
        copy_bandwidth=measure_rates(device).bandwidth if copy_bandwidth is None else copy_bandwidth,
        sources=sources,
        measurements=measurements,
    )
