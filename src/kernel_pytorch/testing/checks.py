"""Record which architectures an op's Triton kernels compile for, and which cases pass in the interpreter.

``python -m kernel_pytorch.testing.checks rms_norm --write`` compiles the Triton kernels for every architecture of the
catalogue, runs them in the interpreter, and writes ``<op>.checks.json``; without an op, for every op with a Triton
kernel. CI checks that the record has the digests of the present sources, and repeats it for one architecture of each
vendor.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Collection

import msgspec
import torch

from kernel_pytorch.evidence import (
    Checks,
    Compilation,
    EvidenceError,
    Interpretation,
    evidence_directory,
    versions,
    write_record,
)
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.op import Case, Kernel, Op, registered_op, registered_ops
from kernel_pytorch.hardware_abstraction.registry import backends
from kernel_pytorch.testing.budget import compare, exceeded
from kernel_pytorch.testing.contract import prepared
from kernel_pytorch.testing.cross_compile import cross_compile
from kernel_pytorch.testing.devices import cannot_run
from kernel_pytorch.testing.poison import poisoned

__all__ = ["make_checks", "refuses", "triton_ops"]


def triton_ops() -> list[Op]:
    """Return the ops with a Triton kernel, each of which needs a record."""
    return [op for op in registered_ops() if triton_kernels(op)]


def triton_kernels(op: Op) -> list[Kernel]:
    """Return the op's Triton kernels, without duplicates from several backends."""
    found = {kernel.name: kernel for record in backends() for kernel in record.kernels if kernel.op == op.name}
    return [kernel for kernel in found.values() if kernel.language == "triton"]


def compile_targets(kernel: Kernel) -> list[Device]:
    """Return one catalogue device per architecture that Triton supports, of the backends that list the kernel."""
    targets: dict[str, Device] = {}
    for record in backends():
        if kernel in record.kernels:
            for device in record.catalogue:
                if device.arch.startswith(("sm_", "gfx")):
                    targets.setdefault(device.arch, device)
    return list(targets.values())


def compile_all(op: Op, architectures: Collection[str] = ()) -> list[Compilation]:
    """Compile every Triton kernel of an op for all architectures, or for these, on its ``compile_cases``."""
    cases = [op.case(name) for name in op.compile_cases]
    return [
        compilation
        for kernel in triton_kernels(op)
        for device in compile_targets(kernel)
        if not architectures or device.arch in architectures
        for case in cases
        if not refuses(kernel, device, case)
        for compilation in cross_compile(kernel, device, case, case.formats[0])
    ]


def refuses(kernel: Kernel, device: Device, case: Case) -> bool:
    """Return whether the kernel refuses the case in its first dtype."""
    arguments = case.arguments(getattr(torch, case.formats[0]), torch.device("meta"))
    call = function_of(registered_op(kernel.op)).call("forward", tuple(arguments.values()))
    return kernel.refusal(call, device) is not None


def interpret_all(op: Op) -> list[Interpretation]:
    """Run every Triton kernel of an op on every small case, in the dtypes that the interpreter computes correctly."""
    results = []
    for kernel in triton_kernels(op):
        device = compile_targets(kernel)[0]
        for number_format in ("float32", "float16"):
            passed = []
            for case in op.cases:
                if case.benchmark:
                    continue
                dtype = getattr(torch, number_format)
                reason = cannot_run(kernel, device, dtype)
                if reason is not None:
                    raise EvidenceError(f"{kernel.name} on {case.name}: {reason}")
                with prepared(kernel, device, case, dtype) as arguments, poisoned():
                    if isinstance(arguments, str):  # the kernel refuses the case
                        continue
                    compared = compare(op, function_of(op).pinned(kernel.name), arguments)
                if exceeded(compared):
                    raise EvidenceError(f"{kernel.name} on {case.name} in {number_format}: {exceeded(compared)}")
                passed.append(case.name)
            results.append(Interpretation(kernel.name, number_format, passed))
    return results


def make_checks(op: Op, *, interpret: bool = True, architectures: Collection[str] = ()) -> Checks:
    """Make the op's record in two new processes, because a kernel module is either interpreted or compiled.

    Args:
        architectures: the architectures to compile for; empty for all.
    """
    wanted = ["--architectures", *architectures] if architectures else []
    compiled = _in_process(op, "compile", {"TRITON_INTERPRET": "0"}, list[Compilation], wanted)
    interpreted: list[Interpretation] = []
    if interpret:
        interpreted = _in_process(op, "interpret", {"TRITON_INTERPRET": "1"}, list[Interpretation])
    sources = {kernel.name: kernel.source_digest for kernel in triton_kernels(op)}
    return Checks(op.name, versions(), sources, compiled, interpreted)


def _in_process(op: Op, part: str, environment: dict[str, str], result: type, more: Collection[str] = ()) -> list:  # type: ignore[type-arg]
    command = [sys.executable, "-m", "kernel_pytorch.testing.checks", op.name, "--part", part, *more]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, check=False)
    if done.returncode:
        raise EvidenceError(f"{' '.join(command)} failed:\n{done.stderr.decode()[-4000:]}")
    found: list = msgspec.json.decode(done.stdout, type=result)  # type: ignore[type-arg]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="op", help="all that have a Triton kernel when left out")
    parser.add_argument("--part", choices=["compile", "interpret"], help="print one part as JSON")
    parser.add_argument(
        "--architectures", nargs="+", default=[], help="compile for these alone, with --part compile"
    )
    parser.add_argument("--write", action="store_true", help="write the record instead of printing it")
    arguments = parser.parse_args()
    ops = [registered_op(name) for name in arguments.ops] or triton_ops()
    if arguments.part:
        (op,) = ops
        part = compile_all(op, arguments.architectures) if arguments.part == "compile" else interpret_all(op)
        sys.stdout.buffer.write(msgspec.json.encode(part))
        return
    directory = evidence_directory()
    if arguments.write and directory is None:
        raise EvidenceError("no evidence folder: run this in a checkout of the project")
    for op in ops:
        checks = make_checks(op)
        if arguments.write and directory is not None:
            write_record(checks, directory / f"{op.name}.checks.json")
        else:
            sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(checks), indent=1) + b"\n")


if __name__ == "__main__":
    main()
