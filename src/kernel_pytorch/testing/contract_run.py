"""Run the backend contract's numerical tests on the present devices, and record the passed cases of each kernel.

``python -m kernel_pytorch.testing.contract_run`` prints a summary; ``--record`` writes ``tests.<device>.json``, which
gives the documentation the test status of each kernel. A kernel that fails is left out of the record, and the run
ends with status 1 and the reasons. ``--state`` and ``--seconds`` split a run in several.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
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
from kernel_pytorch.hardware_abstraction.op import Kernel, registered_op
from kernel_pytorch.hardware_abstraction.registry import backend, devices
from kernel_pytorch.testing.budget import compare, exceeded
from kernel_pytorch.testing.contract import prepared
from kernel_pytorch.testing.poison import poisoned

__all__ = ["run_tests"]


def run_tests(kernel: Kernel, device: Device) -> list[PassedCases]:
    """Run every small case of the kernel's op in every dtype on a present device; refused cases are skipped."""
    op = registered_op(kernel.op)
    passed: dict[str, list[str]] = {}
    for case in op.cases:
        for number_format in () if case.benchmark else case.formats:
            with prepared(kernel, device, case, getattr(torch, number_format)) as arguments, poisoned():
                if isinstance(arguments, str):
                    continue
                compared = compare(op, function_of(op).pinned(kernel.name), arguments, gradients=kernel.backward)
            if exceeded(compared):
                raise EvidenceError(
                    f"{op.name}/{kernel.name} on {case.name}, {number_format}: {exceeded(compared)}"
                )
            passed.setdefault(number_format, []).append(case.name)
    return [
        PassedCases(f"{op.name}/{kernel.name}", number_format, cases) for number_format, cases in passed.items()
    ]


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
    parser.add_argument("--state", type=Path, help="keep finished kernels in this file, and go on where it ends")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no kernel after so many seconds")
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

    def keep(device: Device, kernels: Mapping[str, Kernel], state: Checkpoint[PassedCases]) -> list[PassedCases]:
        passed = [row for name in kernels for row in state.rows.get(name, ())]
        if wanted.record and directory is not None and passed:
            record = contract_record(device, kernels, passed, commit)
            write_record(record, directory / record_name("tests", device))
        return passed

    started, failures, left = time.monotonic(), [], 0
    for device in sorted(first.values(), key=devices().index):
        kernels = {f"{kernel.op}/{kernel.name}": kernel for kernel in backend(device.backend).kernels}
        state = Checkpoint(wanted.state, (commit, device.name, versions()), PassedCases)
        for name, kernel in kernels.items():
            if name in state.rows:
                continue
            if time.monotonic() - started > wanted.seconds:
                left += 1
                continue
            began = time.monotonic()
            try:
                state.add(name, run_tests(kernel, device))
            except Exception as error:  # an error budget, a compiler, another library: the other kernels go on
                failures.append(f"{name} on {device.name}: {type(error).__name__}: {error}")
                print(f"FAILED {failures[-1]}", flush=True)
                continue
            cases = sum(len(row.cases) for row in state.rows[name])
            print(f"{name}: {cases} cases passed in {time.monotonic() - began:.0f} s", flush=True)
            keep(device, kernels, state)  # after each kernel: the next one may end the process
        passed = keep(device, kernels, state)
        tested = {row.kernel for row in passed}
        print(
            f"{device.name}: {len(tested)} of {len(kernels)} kernels passed {sum(len(r.cases) for r in passed)} cases"
        )
    if failures:
        raise SystemExit("\n".join([f"{len(failures)} kernels failed:", *failures]))
    if left:
        print(f"left for another run: {left} kernels")
        raise SystemExit(UNFINISHED)


if __name__ == "__main__":
    main()
