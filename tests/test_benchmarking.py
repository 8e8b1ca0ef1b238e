"""kernel_pytorch.benchmarking.RunState: a benchmark that is split over several runs."""

from __future__ import annotations

from pathlib import Path

from kernel_pytorch.benchmarking import RunState
from kernel_pytorch.evidence import Measurement, Quantiles

ROW = Measurement("first", "forward", "float32", "kernel:delegate", Quantiles(1.0, 2.0, 3.0), 9, 0, 0)


def test_a_later_run_goes_on_where_the_first_one_ended(tmp_path: Path) -> None:
    path, key = tmp_path / "state", ("digest", 2.0)
    RunState(path, key).keep("first", [ROW])
    later = RunState(path, key)
    assert later.rows(["second", "first"]) == [ROW]
    assert list(later.pending(["first", "second"])) == ["second"]
    other = RunState(path, ("another digest", 2.0))
    assert other.missing(["first"]) == ["first"]
    assert other.rows(["first"]) == []


def test_no_case_begins_after_the_limit() -> None:
    assert list(RunState(None, (), limit=-1.0).pending(["first"])) == []
