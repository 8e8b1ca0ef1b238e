"""Fuzz kp.optimize with generated models; check outputs against the budget, the state dict, and the exact revert.

Run it with ``python benchmarks/optimize_fuzz.py``; releases are checked with ``--models 300``. ``--compile`` includes
torch.compile, which takes seconds for each model. ``--state FILE`` keeps finished models, so that a run can be split:
``--seconds 600`` ends after the model that is being checked at that time, and the next run continues there. Models
that were checked with other code are checked again. ``--record`` writes the result when all models are right. The
exit status is 1 if a model is wrong, after all others are checked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from kernel_pytorch import benchmarking
from kernel_pytorch.evidence import clean_commit, now, versions
from kernel_pytorch.hardware_abstraction.source_digest import part_digest
from optimization_fakes import ScriptedTimer
from optimization_fuzz import check

EVIDENCE = Path(__file__).parent / "evidence"


def read(state: Path | None, code: str) -> dict[int, dict[str, Any]]:
    """Return the results of earlier runs with this code, by seed."""
    if state is None or not state.exists():
        return {}
    lines = [json.loads(line) for line in state.read_text().splitlines()]
    return {line["seed"]: line for line in lines if line["code"] == code}


def one(seed: int, code: str, compiled: bool) -> dict[str, Any]:
    """Check one model."""
    started = time.perf_counter()
    found: dict[str, Any] = {"seed": seed, "code": code}
    try:
        # The scripted timer reports a gain for every step, so that every step is used and must be right.
        exclude = () if compiled else ("compile",)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found["outcome"] = check(seed, exclude=exclude, timer=ScriptedTimer(), budget=3600.0)
    except Exception as error:
        traceback.print_exc()
        found["error"] = f"{type(error).__name__}: {error}"
    torch.compiler.reset()
    return {**found, "seconds": round(time.perf_counter() - started, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--compile", action="store_true", help="include torch.compile")
    parser.add_argument("--state", type=Path, help="keep what is done in this file, and go on where it ends")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no model after so many seconds")
    parser.add_argument("--record", action="store_true", help="keep the result as evidence")
    arguments = parser.parse_args()
    commit = clean_commit(benchmarking.checkout()) if arguments.record else ""
    torch.set_num_threads(1)
    code = part_digest("optimization/") + (" compiled" if arguments.compile else "")
    seeds = range(arguments.first, arguments.first + arguments.models)
    done = read(arguments.state, code)
    started = time.perf_counter()
    for seed in seeds:
        if seed in done and "error" not in done[seed]:
            continue
        if time.perf_counter() - started > arguments.seconds:
            break
        done[seed] = one(seed, code, arguments.compile)
        if arguments.state is not None:
            with arguments.state.open("a") as file:
                file.write(json.dumps(done[seed]) + "\n")
    chosen = [done[seed] for seed in seeds if seed in done]
    wrong = [line for line in chosen if "error" in line]
    outcomes = Counter(line["outcome"] for line in chosen if "outcome" in line)
    lines = [f"{count:5}  {outcome}" for outcome, count in outcomes.most_common()]
    lines += [f"seed {line['seed']} is wrong: {line['error']}" for line in wrong]
    spent = sum(line["seconds"] for line in chosen)
    lines.append(f"{len(chosen)} of {len(seeds)} models in {spent:.0f} s, {len(wrong)} wrong")
    print("\n".join(lines))
    if arguments.record and len(chosen) == len(seeds) and not wrong:
        known = ", ".join(f"{name} {version}" for name, version in versions().items())
        command = f"python benchmarks/optimize_fuzz.py --first {arguments.first} --models {arguments.models}"
        command += " --compile" if arguments.compile else ""
        about = [f"optimization/ {code}", f"commit {commit}", known, f"recorded {now()} by {command}"]
        path = EVIDENCE / f"optimize_fuzz{'_compiled' * arguments.compile}.txt"
        path.write_text("\n".join([*lines, *about]) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
