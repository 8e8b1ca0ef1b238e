"""How soon a chat starts and how much memory it takes, against its weights, its caches and a stated working set.

Run it with ``python benchmarks/chat_memory.py``; add ``--record`` in a clean checkout to keep the result. The working
set is what the same process takes with a model of almost no weights: Python, torch, ExecuTorch and transformers. Each
case runs in a process of its own, after its model was lowered. Times are those of ``kp.TextGenerator``: loading the
program of the cache, after ExecuTorch was imported. Peak memory is that of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from text_generation_arms import PREFILL, THREADS, checkpoint, prompt

import kernel_pytorch as kp
from kernel_pytorch import benchmarking
from kernel_pytorch.cli.bench import measurement_table
from kernel_pytorch.evidence import Measurement, Quantiles, clean_commit, evidence_directory, write_record
from kernel_pytorch.hardware_abstraction.timing import quantiles


@dataclass(frozen=True)
class Case:
    """A chat of so many tokens."""

    model: str
    bfloat16: bool
    recipe: str | None
    tokens: int
    window: int | None = None


WORKING_SET = Case("tiny", False, None, PREFILL)
CASES = {
    "llama-1b bfloat16 640 tokens": Case("llama-1b", True, None, PREFILL + 128),
    "llama-1b int4 640 tokens": Case("llama-1b", False, "int4-weight", PREFILL + 128),
    "smollm-135m float32 window 1024 2000 tokens": Case("smollm-135m", False, None, 2000, 1024),
    "smollm-135m float32 window 1024 100000 tokens": Case("smollm-135m", False, None, 100_000, 1024),
}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def program(work: Path, case: Case) -> Path:
    from kernel_pytorch.lowering.checkpoint import TextProgram, cached_program

    os.environ["KERNEL_PYTORCH_PROGRAMS"] = str(work / "programs")
    how = TextProgram(recipe=case.recipe, window=case.window, sinks=4 if case.window else 0, chunk=PREFILL)
    return cached_program(checkpoint(work, case.model, case.bfloat16), how)


def lowered(work: Path, case: Case) -> dict[str, float]:
    """Lower a model in this process; how much memory that took at most."""
    program(work, case)
    return {"peak": peak()}


def written(work: Path, case: Case) -> dict[str, float]:
    checkpoint(work, case.model, case.bfloat16)
    return {"peak": peak()}


def chat(work: Path, case: Case) -> dict[str, float]:
    """Hold a chat of the case's length: prompts in chunks, then 128 tokens one at a time."""
    import torch

    from kernel_pytorch.lowering import TextGenerator, registered
    from kernel_pytorch.lowering.checkpoint import load_cached

    torch.set_num_threads(THREADS)
    registered()  # imports ExecuTorch, which takes seconds
    path = program(work, case)
    started = time.perf_counter()
    generator = TextGenerator(load_cached(path), None)
    start = time.perf_counter() - started
    many, decoded = case.tokens - 128, 128
    for at in range(0, many, PREFILL):
        generator._run(prompt(case.model, min(PREFILL, many - at)), at)
    for token in prompt(case.model, decoded):
        generator._run([token], len(generator._held))
    facts = {"start": start, "peak": peak(), "weights": generator.weight_bytes, "caches": generator.cache_bytes}
    assert len(generator._held) == case.tokens, len(generator._held)
    return facts


TASKS = {"write": written, "lower": lowered, "chat": chat}


def in_process(work: Path, name: str, task: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--work", str(work), "--one", name, "--task", task]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {(done.stderr or done.stdout)[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="keep the result in benchmarks/evidence")
    parser.add_argument("--work", type=Path, default=Path("text-generation-work"), help="folder for models")
    parser.add_argument("--prepare", action="store_true", help="lower the models, and measure nothing")
    parser.add_argument("--case", choices=list(CASES), action="append", help="this case alone; may be repeated")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    given = parser.parse_args()
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if given.one:
        case = WORKING_SET if given.one == "working set" else CASES[given.one]
        print(json.dumps(TASKS[given.task](work, case)))
        return
    names = given.case or list(CASES)
    for name in ("working set", *names):
        in_process(work, name, "write")
        taken = in_process(work, name, "lower")
        print(f"{name}: the process that lowers it takes {taken['peak'] / 1e9:.2f} GB at most", file=sys.stderr)
        in_process(work, name, "chat")  # which verifies the program, once
    if given.prepare:
        return
    commit = clean_commit(benchmarking.checkout()) if given.record else ""
    working_set = in_process(work, "working set", "chat")["peak"]
    measurements = []
    for name in names:
        runs = [in_process(work, name, "chat") for _ in range(1 if CASES[name].tokens > 10_000 else 3)]
        found, starts = runs[-1], [run["start"] for run in runs]
        expected = found["weights"] + found["caches"] + working_set
        measurements.append(
            Measurement(
                name,
                "forward",
                "bfloat16" if CASES[name].bfloat16 else "float32",
                "kernel:delegate",
                Quantiles(*quantiles(starts)),
                len(starts),
                0,
                0,
                peak_bytes=int(max(run["peak"] for run in runs)),
                predicted_peak_bytes=int(expected),
            )
        )
        print(
            f"{name}: starts in {min(starts):.3f} s, {found['peak'] / 1e6:.0f} MB at most: weights "
            f"{found['weights'] / 1e6:.0f} MB, caches {found['caches'] / 1e6:.0f} MB, working set "
            f"{working_set / 1e6:.0f} MB",
            file=sys.stderr,
        )
    Console().print(measurement_table(measurements))
    folder = evidence_directory()
    if given.record and folder is not None:
        device = kp.device("cpu")
        evidence = benchmarking.record(
            "chat_memory",
            device,
            (),
            measurements,
            command="python benchmarks/chat_memory.py --record",
            commit=commit,
            parts=("lowering/",),
        )
        write_record(evidence, folder / benchmarking.record_name("chat_memory", device))


if __name__ == "__main__":
    main()
