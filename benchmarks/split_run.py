"""Run a benchmark of lowered programs case by case, in one run or split over several, and record it at the end."""

from __future__ import annotations

import argparse
import shlex
import sys
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
    benchmarking.add_split_arguments(parser)


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

    Args:
        name: of the record.
        cases: names of all cases of this run.
        one: measures a case.
        given: with the arguments of ``add_arguments``.
        settings: what else the measurements depend on, such as seconds of sampling.
        copy_bandwidth: of the machine; measured at the end if None.
    """
    device = kp.device("cpu")
    commit = clean_commit(benchmarking.checkout()) if given.record else ""
    key = (*map(part_digest, _PARTS), device.name, versions(), commit, *settings)
    state = benchmarking.RunState(given.state, key, given.limit)
    for case in state.pending(cases):
        if given.record:
            require_quiet(device)
        state.keep(case, one(case))
    rows, missing = state.rows(cases), state.missing(cases)
    Console().print(measurement_table(rows))
    if missing:
        print(f"{len(cases) - len(missing)} of {len(cases)} cases; missing: {', '.join(missing)}", file=sys.stderr)
        return
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
