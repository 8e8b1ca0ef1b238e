"""benchmarks/split_run.py: a benchmark that is split over several runs."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from benchmarks import split_run

from kernel_pytorch.benchmarking import UNFINISHED
from kernel_pytorch.evidence import Measurement, Quantiles


def measured(case: str) -> list[Measurement]:
    return [Measurement(case, "forward", "float32", "kernel:delegate", Quantiles(1.0, 2.0, 3.0), 9, 0, 0)]


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    split_run.add_arguments(parser)
    return parser.parse_args(words)


def test_a_later_run_goes_on_where_the_first_one_ended(tmp_path: Path) -> None:
    found: list[str] = []

    def one(case: str) -> list[Measurement]:
        found.append(case)
        return measured(case)

    state = ("--state", str(tmp_path / "state"))
    split_run.measure("tried", ["first"], one, given(*state), settings=(2.0,))
    with pytest.raises(SystemExit) as ended:
        split_run.measure("tried", ["first", "second"], one, given(*state, "--limit", "-1"), settings=(2.0,))
    assert ended.value.code == UNFINISHED
    split_run.measure("tried", ["first", "second"], one, given(*state), settings=(2.0,))
    assert found == ["first", "second"]
    split_run.measure("tried", ["first"], one, given(*state), settings=(3.0,))  # other settings: measured again
    assert found == ["first", "second", "first"]


def test_a_record_names_the_command_without_how_it_was_split() -> None:
    words = ["--record", "--state", "a", "--limit=9", "--model", "x", "--work", "b"]
    assert split_run.command(Path("x/lowering.py"), words) == "python benchmarks/lowering.py --record --model x"
