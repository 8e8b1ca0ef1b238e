"""Unknown models cannot be made worse: generated modules stay within budget, and nothing crashes.

``benchmarks/optimize_fuzz.py`` runs as many as you like, with torch.compile if asked for.
"""

from __future__ import annotations

import pytest

from optimization_fakes import ScriptedTimer
from optimization_fuzz import check


@pytest.mark.parametrize("seed", range(40))
def test_a_generated_model_stays_right(seed: int) -> None:
    assert check(seed, exclude=("compile",), timer=ScriptedTimer())
