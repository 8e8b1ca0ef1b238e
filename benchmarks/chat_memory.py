"""Benchmark the start-up time and memory of a chat, compared with its weights, its caches and a working set.

Run it with ``python benchmarks/chat_memory.py``; add ``--record`` in a clean checkout to keep the result. The working
set is the memory of the same process with a model of almost no weights: Python, torch, ExecuTorch and transformers.
Each case runs in a separate process, after its model was lowered. Times are those of ``kp.TextGenerator``: loading
the cached program, after ExecuTorch was imported. Peak memory is that of the whole process.

``--prepare`` writes and lowers the models; ``--state FILE --limit SECONDS`` splits a run over several.
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
from functools import partial
from pathlib import Path

import split_run
from text_generation_arms import PREFILL, THREADS, checkpoint, prompt

from kernel_pytorch.evidence import Measurement, Quantiles
from kernel_pytorch.hardware_abstraction.timing import quantiles


@dataclass(frozen=True)
class Case:
    """A chat of a given length in tokens."""

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
    """Lower a model in this process, and return the peak memory."""
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


def verified(work: Path, case: Case) -> dict[str, float]:
    """Load a program once, so that later processes need not read all of it to verify it."""
    from kernel_pytorch.lowering.checkpoint import load_cached

    load_cached(program(work, case))
    return {"peak": peak()}


TASKS = {"write": written, "lower": lowered, "verify": verified, "chat": chat}


def in_process(work: Path, name: str, task: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--work", str(work), "--one", name, "--task", task]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {(done.stderr or done.stdout)[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def prepare(work: Path, name: str) -> None:
    """Write, lower and verify the model of a case, each in a separate process."""
    in_process(work, name, "write")
    taken = in_process(work, name, "lower")
    print(f"{name}: the process that lowers it takes {taken['peak'] / 1e9:.2f} GB at most", file=sys.stderr)
    in_process(work, name, "verify")


def measure(work: Path, name: str) -> list[Measurement]:
    for needed in ("working set", name):
        prepare(work, needed)
    working_set = in_process(work, "working set", "chat")["peak"]
    case = CASES[name]
    runs = [in_process(work, name, "chat") for _ in range(1 if case.tokens > 10_000 else 3)]
    found, starts = runs[-1], [run["start"] for run in runs]
    most = int(max(run["peak"] for run in runs))
    expected = int(found["weights"] + found["caches"] + working_set)
    print(
        f"{name}: starts in {min(starts):.3f} s, {most / 1e6:.0f} MB at most: weights {found['weights'] / 1e6:.0f} "
        f"MB, caches {found['caches'] / 1e6:.0f} MB, working set {working_set / 1e6:.0f} MB",
        file=sys.stderr,
    )
    number_format = "bfloat16" if case.bfloat16 else "float32"
    seconds = Quantiles(*quantiles(starts))
    return [
        Measurement(
            name, "forward", number_format, "kernel:delegate", seconds, len(starts), 0, 0,
            peak_bytes=most, predicted_peak_bytes=expected,
        )
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    split_run.add_arguments(parser)
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
    if given.prepare:
        for name in ("working set", *names):
            prepare(work, name)
        return
    split_run.measure("chat_memory", names, partial(measure, work), given)


if __name__ == "__main__":
    main()
