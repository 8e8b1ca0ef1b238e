"""Prefill and decode of language models on the CPU, against PyTorch, XNNPACK with custom_sdpa, and llama.cpp.

Run it with ``python benchmarks/text_generation.py``; add ``--record`` in a clean checkout to keep the result. Models
have random weights in real shapes, written to ``--work`` with what each arm needs (``--prepare`` does no more). Each
arm runs in a process of its own, and its logits are compared with float32 PyTorch before it is timed. llama.cpp is
``llama-cpp-python`` built from its source package, in Q8_0 for int8 and Q4_0 for int4; ``gguf`` writes its files.
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

import torch
from rich.console import Console
from text_generation_arms import ARMS, FORMATS, LONGEST, PREFILL, SHAPES, THREADS, Step, prompt, reference

import kernel_pytorch as kp
from kernel_pytorch import benchmarking
from kernel_pytorch.cli.bench import measurement_table
from kernel_pytorch.evidence import Measurement, Quantiles, clean_commit, evidence_directory, write_record
from kernel_pytorch.hardware_abstraction.timing import quantiles, require_quiet

CASES = {"prefill": 0, "decode-512": PREFILL, "decode-8192": LONGEST}
DECIBELS = {"float32": 60.0, "bfloat16": 25.0, "int8": 20.0, "int4": 3.0}
"""The least signal to noise of the logits: random weights are as hard to quantize as any."""


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
        samples = {case: sampled(step, ids, CASES[case], seconds) for case in cases}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"samples": samples, "snr": ratio, "peak": peak, "start": start}


def sampled(step: Step, ids: list[int], history: int, seconds: float) -> list[float]:
    """Times of a prefill, where there is no history, or of one token after so many."""
    for at in range(0, history, PREFILL):
        step(ids, at)
    given = ids if history == 0 else ids[:1]
    samples: list[float] = []
    step(given, history)
    stop = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < stop:
        started = time.perf_counter()
        step(given, history)
        samples.append(time.perf_counter() - started)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="keep the result in benchmarks/evidence")
    parser.add_argument("--work", type=Path, default=Path("text-generation-work"), help="folder for models")
    parser.add_argument("--prepare", action="store_true", help="write what the arms need, and time nothing")
    parser.add_argument("--seconds", type=float, default=3.0, help="time to sample each case of an arm for")
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
    cases = given.case or list(CASES)
    if given.one:
        model, arm, form = given.one.split("/")
        if given.prepare:
            torch.set_num_threads(THREADS)
            with torch.no_grad():
                ARMS[arm].prepare(work, model, form)
                reference(work, model)
        else:
            print(json.dumps(time_arm(work, model, arm, form, cases, given.seconds)))
        return
    turns = [
        (model, arm, form)
        for model in given.model or [name for name in SHAPES if name != "tiny"]
        for form in given.format or FORMATS
        for arm in given.arm or ARMS
        if form in ARMS[arm].formats
    ]
    options = ["--work", str(work), "--seconds", str(given.seconds), *(f"--case={case}" for case in cases)]
    for turn in turns:
        run(turn, [*options, "--prepare"])
    if given.prepare:
        return
    commit = clean_commit(benchmarking.checkout()) if given.record else ""
    if given.record:
        require_quiet(kp.device("cpu"))
    measurements = []
    for model, arm, form in turns:
        found = json.loads(run((model, arm, form), options).splitlines()[-1])
        name = "kernel:delegate" if arm == "ours" else f"baseline:{arm}"
        for case, taken in found["samples"].items():
            seconds = Quantiles(*quantiles(taken))
            measurements.append(
                Measurement(
                    f"{model} {case}", "forward", form, name, seconds, len(taken), 0, 0, peak_bytes=found["peak"]
                )
            )
            tokens = PREFILL if CASES[case] == 0 else 1
            print(
                f"{model} {form} {arm} {case}: {tokens / statistics.median(taken):.1f} tokens/s, {found['snr']:.0f} "
                f"dB, started in {found['start']:.2f} s, {found['peak'] / 1e6:.0f} MB at most",
                file=sys.stderr,
            )
    Console().print(measurement_table(measurements))
    folder = evidence_directory()
    if given.record and folder is not None:
        device = kp.device("cpu")
        chosen = "".join(f" --model {name}" for name in given.model or ())
        evidence = benchmarking.record(
            "text_generation",
            device,
            (),
            measurements,
            command=f"python benchmarks/text_generation.py{chosen} --record",
            commit=commit,
            parts=("lowering/",),
        )
        write_record(evidence, folder / benchmarking.record_name("text_generation", device))


def run(turn: tuple[str, str, str], options: list[str]) -> str:
    command = [sys.executable, __file__, "--one", "/".join(turn), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(turn)}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
