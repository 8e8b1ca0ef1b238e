"""Run the backend contract's numerical tests on the present devices, and record the passed cases of each kernel.

``python -m kernel_pytorch.testing.contract_run`` prints a summary; ``--record`` writes ``tests.<device>.json``, which
gives the documentation the test status of each kernel. A kernel that fails is left out of the record, and the run
ends with status 1 and the reasons. ``--state`` and ``--seconds`` split a run in several.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from kernel_pytorch.benchmarking import UNFINISHED, Checkpoint, checkout, record_name
from kernel_pytorch.evidence import (
    ContractRun,
    EvidenceError,
    PassedCases,
    clean_commit,
    evidence_directory,
    facts,
    now,
    versions,
    write_record,
)
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.op import Case, Kernel, registered_op
from kernel_pytorch.hardware_abstraction.registry import backend, devices
from kernel_pytorch.testing.budget import compare, exceeded
from kernel_pytorch.testing.contract import prepared
from kernel_pytorch.testing.poison import poisoned

__all__ = ["run_tests"]


def small_cases(kernel: Kernel) -> list[tuple[Case, str]]:
    """Return the small cases of the kernel's op, each with each of its dtypes."""
    cases = registered_op(kernel.op).cases
    return [(case, dtype) for case in cases if not case.benchmark for dtype in case.formats]


def run_case(kernel: Kernel, device: Device, case: Case, dtype: str) -> list[PassedCases]:
    """Run one case on a present device and return it if it passed; nothing if the kernel refuses it.

    Raises EvidenceError if the kernel exceeds an error budget.
    """
    op = registered_op(kernel.op)
    with prepared(kernel, device, case, getattr(torch, dtype)) as arguments, poisoned():
        if isinstance(arguments, str):
            return []
        compared = compare(op, function_of(op).pinned(kernel.name), arguments, gradients=kernel.backward)
    if exceeded(compared):
        raise EvidenceError(f"{op.name}/{kernel.name} on {case.name}, {dtype}: {exceeded(compared)}")
    return [PassedCases(f"{op.name}/{kernel.name}", dtype, [case.name])]


def joined(rows: Iterable[PassedCases]) -> list[PassedCases]:
    """Return one row for each kernel and dtype."""
    cases: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        cases.setdefault((row.kernel, row.format), []).extend(row.cases)
    return [PassedCases(kernel, dtype, names) for (kernel, dtype), names in cases.items()]


def run_tests(kernel: Kernel, device: Device) -> list[PassedCases]:
    """Run every small case of the kernel's op in every dtype on a present device; refused cases are skipped."""
    return joined(row for case, dtype in small_cases(kernel) for row in run_case(kernel, device, case, dtype))


def contract_record(
    device: Device, kernels: Mapping[str, Kernel], passed: list[PassedCases], commit: str
) -> ContractRun:
    """Return the record of the cases that kernels, by name, passed on a device."""
    tested = {row.kernel for row in passed}
    return ContractRun(
        facts(device),
        versions(),
        commit,
        "python -m kernel_pytorch.testing.contract_run --record",
        now(),
        {name: kernel.source_digest for name, kernel in kernels.items() if name in tested},
        passed,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the record; needs a clean checkout")
    parser.add_argument("--accelerators", action="store_true", help="leave the CPU out")
    parser.add_argument("--state", type=Path, help="keep finished cases in this file, and go on where it ends")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after so many seconds")
    wanted = parser.parse_args(arguments)
    commit = clean_commit(checkout()) if wanted.record else ""
    directory = evidence_directory()
    if wanted.record and directory is None:
        raise EvidenceError("no evidence folder: run this in a checkout of the project")
    first = {known.backend: known for known in reversed(devices())}  # of each kind
    if wanted.accelerators:
        first.pop("cpu", None)
    if not first:
        parser.error("--accelerators: none is here; leave it out to test the CPU's kernels")

    def tested(kernel: Kernel, state: Checkpoint[PassedCases]) -> list[PassedCases] | None:
        """The rows of a kernel, or None while cases are missing."""
        names = [f"{kernel.op}/{kernel.name} {case.name} {dtype}" for case, dtype in small_cases(kernel)]
        if any(name not in state.rows for name in names):
            return None
        return joined(row for name in names for row in state.rows[name])

    def keep(device: Device, kernels: Mapping[str, Kernel], state: Checkpoint[PassedCases]) -> list[PassedCases]:
        """Write the record of the kernels without missing cases, and return its rows."""
        passed = [row for kernel in kernels.values() for row in tested(kernel, state) or ()]
        if wanted.record and directory is not None and passed:
            record = contract_record(device, kernels, passed, commit)
            write_record(record, directory / record_name("tests", device))
        return passed

    started, failures, left = time.monotonic(), [], 0

    def late() -> bool:
        return bool(time.monotonic() - started > wanted.seconds)

    for device in sorted(first.values(), key=devices().index):
        kernels = {f"{kernel.op}/{kernel.name}": kernel for kernel in backend(device.backend).kernels}
        state = Checkpoint(wanted.state, (commit, device.name, versions()), PassedCases)
        for name, kernel in kernels.items():
            if tested(kernel, state) is not None:
                continue
            began = time.monotonic()
            try:
                for case, dtype in small_cases(kernel):
                    if f"{name} {case.name} {dtype}" not in state.rows and not late():
                        state.add(f"{name} {case.name} {dtype}", run_case(kernel, device, case, dtype))
            except Exception as error:  # an error budget, a compiler, another library: the other kernels go on
                failures.append(f"{name} on {device.name}: {type(error).__name__}: {error}")
                print(f"FAILED {failures[-1]}", flush=True)
                continue
            rows = tested(kernel, state)
            if rows is None:
                left += 1
                continue
            cases = sum(len(row.cases) for row in rows)
            print(f"{name}: {cases} cases passed in {time.monotonic() - began:.0f} s", flush=True)
            keep(device, kernels, state)  # after each kernel: the next one may end the process
        passed = keep(device, kernels, state)
        count = len({row.kernel for row in passed})
        print(f"{device.name}: {count} of {len(kernels)} kernels passed {sum(len(r.cases) for r in passed)} cases")
    if failures:
        raise SystemExit("\n".join([f"{len(failures)} kernels failed:", *failures]))
    if left:
        print(f"left for another run: {left} kernels")
        raise SystemExit(UNFINISHED)


if __name__ == "__main__":
    main()
