"""Benchmark FP8 training against bf16 and torchao on one GPU.

The workloads are forward and backward of linear layers, of a SwiGLU MLP and of Llama blocks, eager and compiled;
their peak memory; and recipe ``auto`` on a grid of shapes.

Run it with ``python benchmarks/fp8.py``; add ``--record`` in a clean checkout to record the result. Every arm has the
same weights, inputs and upstream gradient, normally distributed in bf16. The output and gradients of our arms are
first compared with those of the bf16 layer: the error in a record is the largest difference, relative to the norm of
the bf16 tensor, and an arm outside its budget is not timed. All arms of a workload are built first and then timed in
alternating rounds of several steps; host time counts where the GPU waits for it. Between two runs the weights are
written to and the input is another tensor, as in training with one batch per optimizer step, so no quantized data is
reused. The workload ``batches`` accumulates gradients over several batches, followed by a step of SGD.

Compiled peers need torchao (measured with 0.17); without it they are skipped. ``--small --device cpu`` runs a tiny
eager version to check the program itself. ``--workloads`` splits a long run: linears, blocks, small-block, batches,
memory and grid have a record each.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import math
import os
import random
import shlex
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from fp8_workloads import EACH, PEERS, WATCHED, WORKLOADS, Workload, grid, module, small
from torch import nn

import kernel_pytorch as kp
from kernel_pytorch import benchmarking
from kernel_pytorch.evidence import Measurement, Quantiles, clean_commit, write_record
from kernel_pytorch.fp8.monitor import monitor_of
from kernel_pytorch.hardware_abstraction.op import registered_op
from kernel_pytorch.hardware_abstraction.rates import measure_rates
from kernel_pytorch.hardware_abstraction.registry import backend
from kernel_pytorch.hardware_abstraction.timing import quantiles

os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")  # its binaries are for one version of torch
choices = tempfile.TemporaryDirectory()
os.environ["KERNEL_PYTORCH_CACHE"] = choices.name  # auto measures in every run

say = partial(print, flush=True)  # a killed run must show its progress


TWIN = "the same bf16"
"""The bf16 layer timed a second time, to measure the difference between two equal arms."""
INTERVAL = 5
"""Steps between evaluations of a WATCHED monitor: a tenth of the default, so that every round contains one."""


# Arms.


@dataclass(frozen=True)
class Arm:
    """One way to run a workload: ``bf16``, ``TWIN``, one of ``PEERS`` or a recipe of ours, also WATCHED or EACH, in a
    mode.

    Modes are ``eager``, ``compiled`` and ``graphs``, which is compiled with ``mode="reduce-overhead"``. Autograd runs
    the backward in its own thread for the device, which is PyTorch's default; with ``in one thread`` it does not.
    """

    recipe: str
    mode: str

    @property
    def ours(self) -> bool:
        return self.recipe not in ("bf16", TWIN, *PEERS)

    @property
    def eager(self) -> bool:
        return self.mode.startswith("eager")

    @property
    def subject(self) -> str:
        kind = "kernel" if self.ours else "twin" if self.recipe == TWIN else "baseline"
        return f"{kind}:{self}"

    def __str__(self) -> str:
        return f"{self.recipe} {self.mode}"

    def converted(self, model: nn.Module) -> nn.Module:
        if self.ours:
            recipe = self.recipe.removesuffix(WATCHED).removesuffix(EACH)
            return kp.fp8.convert(model, recipe, monitor=INTERVAL)
        if self.recipe in PEERS:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig.from_recipe_name(self.recipe.removeprefix("torchao "))
            found: nn.Module = convert_to_float8_training(model, config=config)
            return found
        return model


def arms(work: Workload, torchao: bool) -> Iterator[Arm]:
    peers = work.peers if torchao else ()
    for mode in (*work.modes, *work.others):
        some = 1 if mode in work.others else None
        every = ["bf16", *peers[:some], *work.recipes[:some], *([TWIN] if work.twin else [])]
        found = [Arm(recipe, mode) for recipe in every]
        yield from (
            arm for arm in found if not (arm.eager and arm.recipe in PEERS)
        )  # torchao's layers are made for torch.compile


class Runner:
    """An arm with its own model and input."""

    def __init__(self, arm: Arm, work: Workload, device: torch.device) -> None:
        self.arm = arm
        self.model = arm.converted(module(work, device))
        self.monitor = monitor_of(self.model) if arm.recipe.endswith(WATCHED) else None
        self.call: Callable[..., torch.Tensor] = self.model
        self.threads = not arm.mode.endswith("in one thread")
        if not arm.eager:
            mode = "reduce-overhead" if arm.mode.startswith("graphs") else "default"
            self.call = torch.compile(self.model, dynamic=False, mode=mode)
        outputs = work.hidden if work.kind == "linear" else work.width
        generator = torch.Generator(device).manual_seed(1)
        self.x, self.upstream = (
            torch.randn(*work.rows, size, device=device, dtype=torch.bfloat16, generator=generator)
            for size in (work.width, outputs)
        )
        self.parameters = list(self.model.parameters())
        with torch.no_grad():
            self.corners = [weight[:1, :1] for weight in self.parameters if weight.dim() == 2]
        self.batches = work.batches
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.0, fused=True) if work.batches > 1 else None

    def run(self, changed: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        if changed:
            with torch.no_grad():
                torch._foreach_mul_(self.corners, 1.0)  # bump the versions, so that cached quantized data is stale
        x = self.x.detach().requires_grad_()  # a new tensor, for the same reason
        with torch.autograd.set_multithreading_enabled(self.threads):
            y = self.call(x)  # auto measures in its first call
            y.backward(self.upstream)
        return x, y

    def step(self) -> None:
        share = self.batches > 1 and self.arm.ours and not self.arm.recipe.endswith(EACH)
        with kp.fp8.accumulate(self.model) if share else contextlib.nullcontext():
            for batch in range(self.batches):
                self.run(batch == 0 or self.arm.recipe.endswith(EACH))
        if self.optimizer is not None:
            self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        if self.monitor is not None:
            self.monitor.step()

    def results(self) -> dict[str, torch.Tensor]:
        """Return the output and every gradient."""
        x, y = self.run()
        found = {"y": y.detach(), "dx": x.grad}
        names = [name for name, _ in self.model.named_parameters()]
        for name, parameter in zip(names, self.parameters, strict=True):
            found[f"d{name.removesuffix('.weight')}"], parameter.grad = parameter.grad, None
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Ready:
    """A runner with its largest error (of our arms) and its peak memory."""

    runner: Runner
    error: float | None
    peak: int | None


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference relative to the expected norm; infinite if an element is not finite."""
    norm = partial(torch.linalg.vector_norm, dtype=torch.float32)
    ratio = float(norm(found.float() - expected.float()) / norm(expected))
    return ratio if math.isfinite(ratio) else math.inf


def decibels(error: float) -> float:
    return -20 * math.log10(error) if error else math.inf


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def seconds_of(runner: Runner, repeats: int, device: torch.device) -> float:
    """Return the time of a step among many, so that the GPU works on one while the CPU issues the next."""
    runner.step()
    if device.type != "cuda":
        wait(device)
        started = time.perf_counter()
        for _ in range(repeats):
            runner.step()
        wait(device)
        return (time.perf_counter() - started) / repeats
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    before.record(stream)  # after the first step, whose launch latency is not hidden
    for _ in range(repeats):
        runner.step()
    after.record(stream)
    wait(device)
    return before.elapsed_time(after) / 1e3 / repeats


@dataclass
class Bench:
    """The results of a run of this program."""

    device: torch.device
    torchao: bool
    wanted: tuple[str, ...]
    """Substrings of the names of arms to run; empty for all."""
    rounds: int
    measurements: dict[str, list[Measurement]]
    problems: list[str]

    def chosen(self, work: Workload) -> list[Arm]:
        every = list(arms(work, self.torchao))
        return [arm for arm in every if not self.wanted or any(name in str(arm) for name in self.wanted)]

    def ready(self, work: Workload) -> Iterator[Ready]:
        """Yield the arms of a workload, built, warmed up and checked."""
        expected: dict[str, torch.Tensor] = {}
        reference, chosen = Arm("bf16", "eager"), self.chosen(work)
        for arm in [reference, *(arm for arm in chosen if arm != reference)]:
            built = self.built(arm, work, expected)
            if built is not None and arm in chosen:
                yield built
            del built  # free it before the memory of the next arm is measured

    def built(self, arm: Arm, work: Workload, expected: dict[str, torch.Tensor]) -> Ready | None:
        """Return an arm that is ready to be timed, or None; the results of the first arm are the expected ones."""
        started = time.perf_counter()
        breaks = torch._dynamo.utils.counters["graph_break"]
        breaks.clear()
        before = self.allocated()
        try:
            runner = Runner(arm, work, self.device)
            for _ in range(3):
                runner.step()
            peak = self.peak(runner, before)
            found = runner.results()
        except Exception as error:
            if not expected:
                raise
            traceback.print_exc()
            self.problem(f"{work.case}, {arm}: {type(error).__name__}: {error}")
            return None
        took = f"ready in {time.perf_counter() - started:.1f} s"
        if not expected:
            expected.update(found)
            say(f"  {arm!s:30} {took}")
            return Ready(runner, None, peak)
        errors = {name: difference(value, expected[name]) for name, value in found.items()}
        worst = max(errors, key=lambda name: errors[name])
        noise = ", ".join(f"{name} {decibels(errors[name]):.1f}" for name in dict.fromkeys(("y", "dx", worst)))
        say(f"  {arm!s:30} {took}; dB: {noise}")
        if breaks:
            say(f"  {arm!s:30} {sum(breaks.values())} graph breaks: {next(iter(breaks)).splitlines()[0]}")
        if not arm.ours:
            return Ready(runner, None, peak)
        if decibels(errors[worst]) < work.floor:
            self.problem(
                f"{work.case}, {arm}: {worst} is {decibels(errors[worst]):.1f} dB from bf16 and must be at least "
                f"{work.floor:.0f}: not timed"
            )
            return None
        if arm.recipe == "auto" and arm.eager and self.device.type != "cpu":
            say("    " + str(kp.fp8.report(runner.model)).replace("\n", "\n    "))
        return Ready(runner, errors[worst], peak)

    def problem(self, text: str) -> None:
        say(f"  PROBLEM: {text}")
        self.problems.append(text)

    def allocated(self) -> int:
        gc.collect()
        wait(self.device)
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def peak(self, runner: Runner, before: int) -> int | None:
        """Return the peak memory of a step, including the arm's model and inputs."""
        if self.device.type != "cuda":
            return None
        self.allocated()
        torch.cuda.reset_peak_memory_stats(self.device)
        runner.step()
        wait(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def measure(self, work: Workload, seconds: float, timed: bool = True) -> None:
        """Measure one workload, and free its memory."""
        say(f"{work.case}:")
        ready = list(self.ready(work))
        if work.memory:
            self.keep_memory(work, ready)
        if timed:
            self.time(work, ready, seconds)
        del ready
        torch._dynamo.reset()  # compiled modules of this workload count towards the recompile limit of the next
        self.allocated()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def time(self, work: Workload, ready: list[Ready], seconds: float) -> None:
        # Many short rounds where arms run the same kernels (most of the grid), or where the GPU waits for the CPU
        # (small layers), so that every arm has the same share of times when the CPU is busy.
        rounds = self.rounds * {"grid": 27, "linears": 3, "small-block": 3}.get(work.part, 1)
        repeats = [
            max(5, min(2000, round(seconds / rounds / seconds_of(one.runner, 2, self.device)))) for one in ready
        ]
        times: list[list[float]] = [[] for _ in ready]
        shuffled = random.Random(0)
        for _ in range(rounds):
            # Random order, because the state of the CPU's caches depends on the previous arm.
            for index in shuffled.sample(range(len(ready)), len(ready)):
                times[index].append(seconds_of(ready[index].runner, repeats[index], self.device))
        rows = [
            Measurement(
                case=work.case,
                phase=f"forward and backward, {one.runner.arm.mode}",
                format="bfloat16",
                subject=one.runner.arm.subject,
                seconds=Quantiles(*quantiles(taken)),
                samples=len(taken),
                traffic_bytes=0,
                flops=work.flops,
                error=one.error,
                budget=None if one.error is None else 10 ** (-work.floor / 20),
            )
            for one, taken in zip(ready, times, strict=True)
        ]
        self.measurements.setdefault(work.part, []).extend(rows)
        for row in rows:
            low, middle, high = (1e3 * x for x in (row.seconds.p20, row.seconds.median, row.seconds.p80))
            rate = row.flops / row.seconds.median / 1e12
            say(
                f"  {arm_of(row):30} {middle:9.4f} ms ({low:.4f} to {high:.4f}) {rate:6.0f} TFLOP/s {gain(row, rows)}"
            )

    def keep_memory(self, work: Workload, ready: list[Ready]) -> None:
        for one in ready:
            if one.peak is not None:
                say(f"  {one.runner.arm!s:30} peak memory {one.peak / 2**30:.3f} GiB")
                once = seconds_of(one.runner, 1, self.device)
                row = Measurement(
                    case=f"memory of {work.case}",
                    phase=f"forward and backward, {one.runner.arm.mode}",
                    format="bfloat16",
                    subject=one.runner.arm.subject,
                    seconds=Quantiles(once, once, once),
                    samples=1,
                    traffic_bytes=0,
                    flops=0,
                    peak_bytes=one.peak,
                )
                self.measurements.setdefault("memory", []).append(row)


def arm_of(row: Measurement) -> str:
    return row.subject.partition(":")[2]


def speedup(row: Measurement, rows: list[Measurement]) -> float | None:
    """Return the speed-up over bf16 in the same mode, or None if that was not timed."""
    for other in rows:
        if (other.case, other.phase) == (row.case, row.phase) and arm_of(other).startswith("bf16 "):
            return other.seconds.median / row.seconds.median
    return None


def gain(row: Measurement, rows: list[Measurement]) -> str:
    found = speedup(row, rows)
    return "" if found is None else f"{found:.3f}x"


def summary(measurements: dict[str, list[Measurement]]) -> Iterator[str]:
    for part, rows in measurements.items():
        if part in ("linears", "blocks", "small-block", "batches"):
            for case, phase in dict.fromkeys((row.case, row.phase) for row in rows):
                members = [row for row in rows if (row.case, row.phase) == (case, phase)]
                others = [row for row in members if not arm_of(row).startswith("bf16 ")]
                mode = phase.partition(", ")[2]
                gains = ", ".join(f"{arm_of(row).removesuffix(mode)}{gain(row, rows)}" for row in others)
                yield f"{case}, {mode}: {gains}"
        elif part == "memory":
            yield "peak memory (GiB): " + ", ".join(
                f"{arm_of(row)} {(row.peak_bytes or 0) / 2**30:.2f}" for row in rows
            )
        else:
            for kind in ("kernel", "twin"):
                members = [row for row in rows if row.subject.startswith(f"{kind}:")]
                found = sorted(((speedup(row, rows) or math.inf, row) for row in members), key=lambda pair: pair[0])
                if found:
                    lowest = ", ".join(f"{times:.3f}x {row.case} ({arm_of(row)})" for times, row in found[:4])
                    under = sum(times < 1 for times, _ in found)
                    yield f"{kind} on {len(found)} shapes: {under} under 1.0x; the lowest: {lowest}"


# The program.


def parsed() -> argparse.Namespace:
    names = [work.name for work in WORKLOADS] + ["grid"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="keep the result as evidence")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "evidence", help="folder for the records"
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--grid-only", action="store_true", help="as --workloads grid")
    parser.add_argument("--memory-only", action="store_true", help="peak memory of the larger block, no times")
    parser.add_argument("--arms", nargs="+", default=[], help="only arms with one of these in their names")
    parser.add_argument(
        "--seconds", type=float, default=0.42, help="for how long an arm is timed; less in the grid"
    )
    parser.add_argument(
        "--stop-after", type=float, default=math.inf, help="start no workload after so many seconds"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, eager only, to check this program")
    arguments = parser.parse_args()
    if arguments.record and arguments.small:
        parser.error("--small is no measurement: leave out --record")
    if arguments.grid_only and arguments.memory_only:
        parser.error("--grid-only and --memory-only leave nothing: use one of them")
    return arguments


def device_for(arguments: argparse.Namespace) -> kp.Device:
    """Return the device; without FP8 matrix units only the small version can run."""
    hint = f"python {sys.argv[0]} --small --device cpu checks the program without one"
    needs = "this benchmark needs a GPU with 8-bit matrix units, such as an NVIDIA H100 or H200"
    try:
        device = kp.device(arguments.device)
    except Exception as error:
        raise SystemExit(f"{needs}, and device {arguments.device!r} is not here ({error}); {hint}") from error
    if not device.present:
        raise SystemExit(f"{needs}, and device {arguments.device!r} is not here; {hint}")
    if not arguments.small and not any(name.startswith("float8") for name in device.matrix_formats):
        raise SystemExit(f"{needs}, and {device.name} has none; {hint}")
    return device


def torchao_version() -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchao.float8
    except Exception as error:  # our own arms run without it
        say(f"torchao is left out: {type(error).__name__}: {error}")
        return None
    found = getattr(torchao, "__version__", None) or importlib.metadata.version("torchao")
    return str(found)


def main() -> None:
    arguments = parsed()
    device = device_for(arguments)
    commit = clean_commit(benchmarking.checkout()) if arguments.record else ""
    where = torch.device(device.torch_device or "cpu")
    torchao = torchao_version()
    say(f"{device.name}, torch {torch.__version__}, torchao {torchao or 'not here'}")
    torch._dynamo.config.recompile_limit = 64  # the arms share code objects; past the limit they would run eager
    bandwidth = measure_rates(device).bandwidth if arguments.record else 0.0
    nothing = nn.Linear(
        64, 64, device=where, dtype=torch.bfloat16
    )  # libraries take their memory before it is counted
    nothing(torch.ones(64, 64, device=where, dtype=torch.bfloat16, requires_grad=True)).sum().backward()

    works = [work for work in WORKLOADS if work.name in arguments.workloads and not arguments.grid_only]
    if arguments.memory_only:
        works = [work for work in WORKLOADS if work.memory]
    elif arguments.grid_only or "grid" in arguments.workloads:
        works += grid()
    wanted, rounds = tuple(arguments.arms), 7
    if arguments.small:
        works = [small(work) for work in works]
        wanted, rounds = wanted or ("eager",), 2
    bench = Bench(where, torchao is not None, wanted, rounds, {}, [])

    command = ["python", "benchmarks/fp8.py", "--record", *(["--memory-only"] if arguments.memory_only else [])]
    if not arguments.memory_only and not {work.name for work in (*WORKLOADS, *grid())} <= {w.name for w in works}:
        command += ["--workloads", *dict.fromkeys(work.name for work in works)]
    command += ["--arms", *wanted] if wanted else []

    def keep(part: str) -> None:
        if arguments.record and part in bench.measurements:
            record = benchmarking.record(
                "fp8",
                device,
                [kernel for kernel in backend(device.backend).kernels if kernel.op.startswith("fp8_")],
                bench.measurements[part],
                command=shlex.join(command),
                commit=commit,
                copy_bandwidth=bandwidth,
            )
            if torchao:
                record = msgspec.structs.replace(record, versions={**record.versions, "torchao": torchao})
            op = registered_op("fp8_matmul")
            name = benchmarking.record_name(op, device).replace(f"{op.name}.", f"fp8-{part}.")
            write_record(record, arguments.out / name)

    started = time.perf_counter()
    for work in works:
        if time.perf_counter() - started > arguments.stop_after:
            bench.problem(f"left out for lack of time: {work.case}")
            continue
        began = time.perf_counter()
        seconds = arguments.seconds * {"grid": 0.5, "linears": 2}.get(work.part, 1)
        bench.measure(work, min(seconds, 0.01) if arguments.small else seconds, timed=not arguments.memory_only)
        for part in (work.part, "memory"):  # record after each workload, in case a later one fails
            keep(part)
        say(f"  {time.perf_counter() - began:.0f} s, {time.perf_counter() - started:.0f} s in all")
    say("speed-ups over bf16 in the same mode:")
    for line in summary(bench.measurements):
        say(line)
    if bench.problems:
        raise SystemExit("\n".join(["problems:", *bench.problems]))


if __name__ == "__main__":
    main()
