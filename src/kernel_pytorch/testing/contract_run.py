"""Run the backend contract's numerical tests on the present devices, and record the passed cases of each kernel.

``python -m kernel_pytorch.testing.contract_run`` prints a summary; ``--record`` writes ``tests.<device>.json``, which
gives the documentation the test status of each kernel. A kernel that exceeds a budget ends the run with an error.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.progress import track

from kernel_pytorch.benchmarking import checkout, record_name
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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the record; needs a clean checkout")
    wanted = parser.parse_args(arguments)
    commit = clean_commit(checkout()) if wanted.record else ""
    directory = evidence_directory()
    if wanted.record and directory is None:
        raise EvidenceError("no evidence folder: run this in a checkout of the project")
    console = Console(stderr=True)
    for device in {known.backend: known for known in reversed(devices())}.values():  # the first of each kind
        kernels = backend(device.backend).kernels
        steps = track(kernels, f"testing {device.name}", console=console, disable=not console.is_terminal)
        passed = [row for kernel in steps for row in run_tests(kernel, device)]
        tested = {row.kernel for row in passed}
        print(
            f"{device.name}: {len(tested)} of {len(kernels)} kernels passed {sum(len(r.cases) for r in passed)} cases"
        )
        if wanted.record and directory is not None:
            digests = {f"{kernel.op}/{kernel.name}": kernel.source_digest for kernel in kernels}
            run = ContractRun(
                facts(device),
                versions(),
                commit,
                "python -m kernel_pytorch.testing.contract_run --record",
                now(),
                {name: digest for name, digest in digests.items() if name in tested},
                passed,
            )
            write_record(run, directory / record_name("tests", device))


if __name__ == "__main__":
    main()
