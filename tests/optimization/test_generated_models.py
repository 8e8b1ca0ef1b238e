"""Unknown models cannot be made worse: generated modules stay within budget, and nothing crashes.

``benchmarks/optimize_fuzz.py`` runs as many as you like, with torch.compile if asked for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from optimization_fakes import ScriptedTimer
from optimization_fuzz import check


@pytest.mark.parametrize("seed", range(40))
def test_a_generated_model_stays_right(seed: int) -> None:
    assert check(seed, exclude=("compile",), timer=ScriptedTimer())


def test_the_recorded_run_is_of_300_models() -> None:
    record = Path(__file__).parents[2] / "benchmarks" / "evidence" / "optimize_fuzz.txt"
    text = record.read_text()
    assert "300 of 300 models" in text, "make it with python benchmarks/optimize_fuzz.py --record"
    assert ", 0 wrong\n" in text
