"""Benchmark prefill and decode of language models on the CPU: ours, PyTorch, XNNPACK with custom_sdpa, llama.cpp.

Run it with ``python benchmarks/text_generation.py``; add ``--record`` in a clean checkout to keep the result. Models
have random weights in real shapes, written to ``--work`` with each arm's files (``--prepare`` only does this). Each
arm runs in a separate process, and its logits are compared with float32 PyTorch before it is timed. llama.cpp is
``llama-cpp-python`` built from its source package, in Q8_0 for int8 and Q4_0 for int4; ``gguf`` writes its files. If
they were installed with ``pip install --target``, put that folder on ``PYTHONPATH``.

The model of 1B parameters runs in its usual formats, int8 and int4, and without the history of 8,192 tokens;
``--format`` and ``--case`` select others. ``--state FILE --limit SECONDS`` splits a run over several.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import split_run
import torch
from text_generation_arms import ARMS, FORMATS, LONGEST, PREFILL, SHAPES, THREADS, Arm, Step, prompt, reference

from kernel_pytorch import benchmarking
from kernel_pytorch.evidence import Measurement, Quantiles
from kernel_pytorch.hardware_abstraction.timing import quantiles

CASES = {"prefill": 0, "decode-512": PREFILL, "decode-8192": LONGEST}
"""Number of tokens before the timed ones, in ascending order."""
DEFAULTS = {
    "smollm-135m": (FORMATS, tuple(CASES)),
    "llama-1b": (("int8", "int4"), ("prefill", "decode-512")),
}
"""Models that run by default, with their formats and cases."""
DECIBELS = {"float32": 60.0, "bfloat16": 25.0, "int8": 20.0, "int4": 3.0}
"""Minimum signal-to-noise ratio of the logits in dB; random weights are as hard to quantize as any."""


def snr(found: torch.Tensor, wanted: torch.Tensor) -> float:
    noise = (found.double() - wanted.double()).square().sum()
    return float(10 * torch.log10(wanted.double().square().sum() / noise))


def time_arm(work: Path, model: str, arm: str, form: str, cases: list[str], seconds: float) -> dict[str, object]:
    torch.set_num_threads(THREADS)
    with torch.no_grad():
        started = time.perf_counter()
        step = ARMS[arm].start(work, model, form)
        start = time.perf_counter() - started
        ids = prompt(model, PREFILL)
        ratio = snr(step(ids, 0), reference(work, model))
        if not ratio > DECIBELS[form]:
            raise benchmarking.GateError(
                f"{model} {arm} {form}: logits have {ratio:.1f} dB, {DECIBELS[form]} expected"
            )
        samples = sampled(ARMS[arm], step, ids, cases, seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"samples": samples, "snr": ratio, "peak": peak, "start": start}


def sampled(arm: Arm, step: Step, ids: list[int], cases: list[str], seconds: float) -> dict[str, list[float]]:
    """Return times of a prefill for the case without history, else of one decoded token; a prefill must have run."""
    held = PREFILL
    found: dict[str, list[float]] = {}
    for case in (case for case in CASES if case in cases):
        history = CASES[case]
        if history and arm.needs_history:
            for at in range(held, history, PREFILL):
                step(ids, at)
        held = max(history, PREFILL)
        given = ids[:1] if history else ids
        step(given, history)
        samples: list[float] = []
        stop = time.perf_counter() + seconds
        while len(samples) < 3 or time.perf_counter() < stop:
            started = time.perf_counter()
            step(given, history)
            samples.append(time.perf_counter() - started)
        found[case] = samples
    return found


def measure(turn: str, work: Path, cases: tuple[str, ...], seconds: float) -> list[Measurement]:
    """Prepare and time one arm of a model in one format, each in a separate process."""
    model, arm, form = turn.split("/")
    options = ["--work", str(work), "--seconds", str(seconds), *(f"--case={case}" for case in cases)]
    run(turn, [*options, "--prepare"])
    found = json.loads(run(turn, options).splitlines()[-1])
    rows = []
    for case, taken in found["samples"].items():
        name = "kernel:delegate" if arm == "ours" else f"baseline:{arm}"
        times = Quantiles(*quantiles(taken))
        rows.append(
            Measurement(f"{model} {case}", "forward", form, name, times, len(taken), 0, 0, peak_bytes=found["peak"])
        )
        tokens = 1 if CASES[case] else PREFILL
        print(
            f"{model} {form} {arm} {case}: {tokens / statistics.median(taken):.1f} tokens/s, {found['snr']:.0f} "
            f"dB, started in {found['start']:.2f} s, {found['peak'] / 1e6:.0f} MB at most",
            file=sys.stderr,
        )
    return rows


def run(turn: str, options: list[str]) -> str:
    command = [sys.executable, __file__, "--one", turn, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{turn}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def one(given: argparse.Namespace, work: Path) -> None:
    """Prepare or time one arm in this process."""
    model, arm, form = given.one.split("/")
    if not given.prepare:
        print(json.dumps(time_arm(work, model, arm, form, given.case, given.seconds)))
        return
    torch.set_num_threads(THREADS)
    with torch.no_grad():
        ARMS[arm].prepare(work, model, form)
        reference(work, model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    split_run.add_arguments(parser)
    parser.add_argument("--work", type=Path, default=Path("text-generation-work"), help="folder for models")
    parser.add_argument("--prepare", action="store_true", help="write what the arms need, and time nothing")
    parser.add_argument("--seconds", type=float, default=2.0, help="time to sample each case of an arm for")
    parser.add_argument("--model", choices=list(SHAPES), action="append", help="this model alone; may be repeated")
    parser.add_argument("--case", choices=list(CASES), action="append", help="this case alone; may be repeated")
    parser.add_argument("--arm", choices=list(ARMS), action="append", help="this arm alone; may be repeated")
    parser.add_argument(
        "--format", choices=list(FORMATS), action="append", help="this format alone; may be repeated"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if given.one:
        one(given, work)
        return
    turns = {}
    for model in given.model or DEFAULTS:
        forms, cases = DEFAULTS.get(model, (FORMATS, tuple(CASES)))
        for form in given.format or forms:
            for arm in given.arm or ARMS:
                if form in ARMS[arm].formats:
                    turns[f"{model}/{arm}/{form}"] = tuple(given.case or cases)
    if given.prepare:
        for turn in turns:
            run(turn, ["--work", str(work), "--prepare"])
            print(f"{turn}: prepared", file=sys.stderr)
        return
    split_run.measure(
        "text_generation",
        list(turns),
        lambda turn: measure(turn, work, turns[turn], given.seconds),
        given,
        settings=(given.seconds, given.case),
    )


if __name__ == "__main__":
    main()
