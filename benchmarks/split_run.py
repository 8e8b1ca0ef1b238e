"""Run a benchmark of lowered programs case by case, in one run or split over several, and record it at the end.

If ``--limit`` ends a run before the last case, it exits with status 75; the same command continues.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console

import kernel_pytorch as kp
from kernel_pytorch import benchmarking
from kernel_pytorch.cli.bench import measurement_table
from kernel_pytorch.evidence import Measurement, clean_commit, evidence_directory, versions, write_record
from kernel_pytorch.hardware_abstraction.rates import measure_rates
from kernel_pytorch.hardware_abstraction.source_digest import part_digest
from kernel_pytorch.hardware_abstraction.timing import require_quiet

_OF_ONE_RUN = ("--state", "--limit", "--work", "--programs")
_PARTS = ("lowering/",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--record``, ``--state`` and ``--limit``."""
    parser.add_argument(
        "--record", action="store_true", help="keep the result in benchmarks/evidence, once every case is finished"
    )
    parser.add_argument("--state", type=Path, help="keep finished cases in this file, and go on where it ends")
    parser.add_argument("--limit", type=float, help="begin no case after so many seconds")


def command(program: Path, words: Sequence[str]) -> str:
    """Return the command that repeats a run in one piece: without the options of where and how it was split."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in _OF_ONE_RUN:
            next(rest, None)
        elif not word.startswith(tuple(f"{name}=" for name in _OF_ONE_RUN)):
            kept.append(word)
    return shlex.join(["python", f"benchmarks/{program.name}", *kept])


def measure(
    name: str,
    cases: Sequence[str],
    one: Callable[[str], list[Measurement]],
    given: argparse.Namespace,
    *,
    settings: Iterable[object] = (),
    copy_bandwidth: float | None = None,
) -> None:
    """Measure the cases that ``--state`` does not have yet; write the record of ``name`` once all are there.

    Exit with ``benchmarking.UNFINISHED`` if cases are left because of ``--limit``.

    Args:
        name: name of the record.
        cases: names of all cases of this run.
        one: function that measures a case.
        given: parsed arguments, including those of ``add_arguments``.
        settings: other values that the measurements depend on, such as seconds of sampling.
        copy_bandwidth: copy bandwidth of the machine; measured at the end if None.
    """
    device = kp.device("cpu")
    commit = clean_commit(benchmarking.checkout()) if given.record else ""
    key = (*map(part_digest, _PARTS), device.name, versions(), commit, *settings)
    state, started = benchmarking.Checkpoint(given.state, key, Measurement), time.perf_counter()
    for case in cases:
        if case in state.rows:
            continue
        if given.limit is not None and time.perf_counter() - started > given.limit:
            break
        if given.record:
            require_quiet(device)
        state.add(case, one(case))
    rows = [row for case in cases for row in state.rows.get(case, ())]
    missing = [case for case in cases if case not in state.rows]
    Console().print(measurement_table(rows))
    if missing:
        print(f"{len(cases) - len(missing)} of {len(cases)} cases; missing: {', '.join(missing)}", file=sys.stderr)
        sys.exit(benchmarking.UNFINISHED)
    folder = evidence_directory()
    if given.record and folder is not None:
        found = benchmarking.record(
            name,
            device,
            (),
            rows,
            command=command(Path(sys.argv[0]), sys.argv[1:]),
            commit=commit,
            copy_bandwidth=measure_rates(device).bandwidth if copy_bandwidth is None else copy_bandwidth,
            parts=_PARTS,
        )
        write_record(found, folder / benchmarking.record_name(name, device))
