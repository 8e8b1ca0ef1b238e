"""Benchmarks that go on where another run ended."""

from pathlib import Path

from kernel_pytorch.benchmarking import Checkpoint
from kernel_pytorch.evidence import PassedCases


def test_a_checkpoint_goes_on_with_the_rows_of_its_key_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "state.jsonl"
    rows = [PassedCases("attention/triton", "bfloat16", ["causal"])]
    first = Checkpoint(path, ("commit", 1), PassedCases)
    first.add("attention", rows)
    first.add("nothing", [])
    assert Checkpoint(path, ("commit", 1), PassedCases).rows == {"attention": rows, "nothing": []}
    assert Checkpoint(path, ("commit", 2), PassedCases).rows == {}


def test_a_checkpoint_without_a_file_keeps_rows_in_memory() -> None:
    state = Checkpoint(None, "", PassedCases)
    state.add("a", [])
    assert state.rows == {"a": []}
