"""Optimise generated models, and check each: outputs within budget, state dict unchanged, exact revert.

Run it with ``python benchmarks/optimize_fuzz.py``; ``--models 300`` is what a release is checked with, ``--compile``
includes torch.compile, which takes seconds for each model. Ends with status 1 at the first model that is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from optimization_fakes import ScriptedTimer
from optimization_fuzz import check


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--compile", action="store_true", help="include torch.compile")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    started = time.perf_counter()
    exclude = () if arguments.compile else ("compile",)
    for seed in range(arguments.first, arguments.first + arguments.models):
        try:
            # The scripted timer says that every step gains, so that every step has to be right.
            outcomes[check(seed, exclude=exclude, timer=ScriptedTimer())] += 1
        except Exception as error:
            print(f"seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
    for outcome, count in outcomes.most_common():
        print(f"{count:5}  {outcome}")
    print(f"{arguments.models} models in {time.perf_counter() - started:.0f} s, all right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
