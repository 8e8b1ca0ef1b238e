"""Benchmark linears with int8 and int4 weights of a 1B-parameter Llama: ours against XNNPACK's, on the CPU.

A chain of linears is larger than every cache. One row is a decoding step, bound by reading the weights: the record
has their bytes, and thus the fraction of the machine's copy bandwidth. More rows are a prompt, bound by compute.

    python benchmarks/quantized_linears.py --lower --programs FOLDER   # lower and check; timing is apart
    python benchmarks/quantized_linears.py --programs FOLDER           # --record keeps the result

``--state FILE --limit SECONDS`` splits a run over several.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import split_run
import torch

import kernel_pytorch as kp
from kernel_pytorch import benchmarking
from kernel_pytorch.evidence import Measurement, Quantiles, clean_commit
from kernel_pytorch.hardware_abstraction.rates import measure_rates
from kernel_pytorch.hardware_abstraction.timing import quantiles
from kernel_pytorch.lowering.difference import difference
from kernel_pytorch.lowering.quiet import quiet_libraries

THREADS = 2
WIDTH, WIDE, LAYERS = 2048, 8192, 3
ROWS = (1, 4, 128, 512)
RECIPES = ("int8-dynamic", "int4-weight", "int4-weight-128")
FEWEST_DECIBELS = 35.0  # XNNPACK and ours may round an activation in different directions
TURN_SECONDS = 0.2


def chain() -> torch.nn.Module:
    pairs = (
        (torch.nn.Linear(WIDTH, WIDE, bias=False), torch.nn.Linear(WIDE, WIDTH, bias=False)) for _ in range(LAYERS)
    )
    return torch.nn.Sequential(*(layer for pair in pairs for layer in pair)).eval().requires_grad_(False)


def weight_bytes(recipe: str) -> int:
    """Return the bytes of weights and scales that one run reads."""
    found = kp.lowering.RECIPES[recipe]
    elements = 2 * LAYERS * WIDTH * WIDE
    scales = elements // found.weight_group if found.weight_group else LAYERS * (WIDTH + WIDE)
    return elements * found.weight_bits // 8 + 4 * scales


def programs(recipe: str, folder: Path) -> dict[str, kp.lowering.LoadedProgram]:
    """Return both programs of a recipe, from the folder if it has them."""
    torch.manual_seed(0)
    model, length = chain(), torch.export.Dim("rows", min=1, max=max(ROWS))
    ways = {
        "kernel:delegate": None,
        "baseline:XNNPACK": kp.lowering.PartitionerOptions(linears=False),
    }
    made = {}
    for way, options in ways.items():
        path = folder / f"{recipe}.{way.partition(':')[2]}.pte"
        if path.exists():
            made[way] = kp.load(path)
            continue
        shapes = ({0: length},)
        program = kp.lower(model, (torch.randn(3, WIDTH),), recipe=recipe, dynamic_shapes=shapes, options=options)
        for found in program.compare():
            if found.snr < FEWEST_DECIBELS:
                raise benchmarking.GateError(f"{recipe}, {way}: {found}")
        program.save(path)
        made[way] = kp.load(path)
        print(f"{recipe}: lowered, {way}", file=sys.stderr)
    return made


def time_turns(
    made: dict[str, kp.lowering.LoadedProgram], x: torch.Tensor, seconds: float
) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {way: [] for way in made}
    ours, other = (program(x) for program in made.values())
    apart = difference(0, ours, other)
    if apart.snr < FEWEST_DECIBELS:
        raise benchmarking.GateError(f"the two ways differ: {apart}")
    stop = time.perf_counter() + seconds * len(made)
    while time.perf_counter() < stop:
        for way, program in made.items():
            program(x)
            turn = time.perf_counter() + TURN_SECONDS
            while time.perf_counter() < turn:
                before = time.perf_counter()
                program(x)
                taken[way].append(time.perf_counter() - before)
    return taken


def measure(recipe: str, folder: Path, bandwidth: float, seconds: float) -> list[Measurement]:
    with quiet_libraries():
        made = programs(recipe, folder)
    rows = []
    for count in ROWS:
        case, read = f"{recipe} rows {count}", weight_bytes(recipe)
        flops = 2 * 2 * LAYERS * count * WIDTH * WIDE
        for way, samples in time_turns(made, torch.randn(count, WIDTH), seconds).items():
            median = statistics.median(samples)
            shown = f"{read / median / bandwidth:.0%} of copy, {flops / median / 1e9:.0f} GFLOP/s"
            print(f"{case} {way}: {median * 1e3:.2f} ms, {shown}", file=sys.stderr)
            found = Quantiles(*quantiles(samples))
            rows.append(Measurement(case, "forward", "int8", way, found, len(samples), read, flops))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    split_run.add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=2.0, help="time to sample each way for")
    parser.add_argument("--recipe", choices=RECIPES, action="append", help="this recipe alone; may be repeated")
    parser.add_argument("--lower", action="store_true", help="lower and check the programs that are not there yet")
    parser.add_argument("--programs", type=Path, help="a folder for programs; with --record they are by commit")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    commit = clean_commit(benchmarking.checkout()) if arguments.record else ""
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.programs or Path(temporary)) / commit
        folder.mkdir(parents=True, exist_ok=True)
        recipes = arguments.recipe or RECIPES
        if arguments.lower:
            for recipe in recipes:
                programs(recipe, folder)
            return
        bandwidth = measure_rates(kp.device("cpu")).bandwidth
        print(f"copy: {bandwidth / 1e9:.1f} GB/s", file=sys.stderr)
        split_run.measure(
            "quantized_linears",
            recipes,
            lambda recipe: measure(recipe, folder, bandwidth, arguments.seconds),
            arguments,
            settings=(arguments.seconds,),
            copy_bandwidth=bandwidth,
        )


if __name__ == "__main__":
    main()
