"""Benchmark attention across ranks: predictions of the cost model for clusters, and real runs to compare with.

``python benchmarks/ring.py`` prints predictions for 8 to 1024 GPUs; no GPU is needed. ``python benchmarks/ring.py
--check`` starts local Gloo ranks, measures their link and their compute, and prints predicted beside measured bytes
and seconds of every schedule. Bytes must be equal; the ranks share a machine's cores, so seconds are a sanity check.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import kernel_pytorch as kp
from kernel_pytorch import masks
from kernel_pytorch.distributed.cost import (
    _EFFICIENCY,
    LINKS,
    Link,
    Prediction,
    Shape,
    choose,
    measure_link,
    predict,
    sent_bytes,
)
from kernel_pytorch.distributed.placement import place
from kernel_pytorch.distributed.schedules import SCHEDULES, Schedule
from kernel_pytorch.hardware_abstraction.device import Rates
from kernel_pytorch.hardware_abstraction.rates import measure_rates

CLUSTERS = {
    "nvidia/h100": LINKS["infiniband-ndr"].between_nodes(8, LINKS["nvlink4"]),
    "amd/mi300x": LINKS["infiniband-ndr"].between_nodes(8, LINKS["xgmi-mi300x"]),
}
MASKS = (masks.causal(), masks.causal() & (masks.window(4096) | masks.sinks(64)))
LENGTHS = tuple(1 << n for n in (17, 19, 20, 21, 23))
RANKS = tuple(1 << n for n in range(3, 11))
SHAPE = Shape(1, 32, 8, 128, 128, torch.bfloat16)


def predicted(console: Console, lengths: tuple[int, ...], counts: tuple[int, ...]) -> Iterator[Table]:
    """Yield a table per cluster and mask. Clusters are the inner loop, because they share the counts of a mask."""
    found: dict[tuple[str, masks.Mask], list[tuple[int, int, tuple[Prediction, ...]]]] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("predicting", total=len(MASKS) * len(lengths) * len(counts))
        for mask in MASKS:
            for length in lengths:
                for ranks in counts:
                    placement = place(mask, length, ranks)
                    for name, link in CLUSTERS.items():
                        one = predict(mask, placement, SHAPE, kp.device(name), link)
                        found.setdefault((name, mask), []).append((length, ranks, one))
                    progress.advance(task)
    for (name, mask), rows in found.items():
        yield _prediction_table(f"{name}, {CLUSTERS[name].name}: {mask}", rows)


def _prediction_table(title: str, rows: list[tuple[int, int, tuple[Prediction, ...]]]) -> Table:
    table = Table(title=title, header_style="bold", title_justify="left")
    for column in ("tokens", "GPUs", *(f"{name} ms" for name in SCHEDULES), "chosen", "efficiency", "MB sent"):
        table.add_column(column, justify="left" if column == "chosen" else "right", no_wrap=True)
    table.caption = (
        "forward and backward of one call, 32 query and 8 key heads of 128, bfloat16; efficiency: even compute over "
        "the time; MB of the rank that sends most; - cannot deal out its heads, ! does not fit in memory"
    )
    before = None
    for length, ranks, predictions in rows:
        if before not in (None, length):
            table.add_section()
        before = length
        schedule, _ = choose(predictions, None)
        by_name = {one.schedule: one for one in predictions}
        chosen = by_name[schedule]
        cells = []
        for name in SCHEDULES:
            one = by_name[name]
            cell = "-" if one.refusal else f"{one.seconds * 1e3:,.2f}{'' if one.fits else ' !'}"
            cells.append(f"[bold]{cell}[/bold]" if name == schedule else cell)
        table.add_row(
            f"{length >> 10}k" if length < 1 << 20 else f"{length >> 20}M",
            str(ranks),
            *cells,
            schedule,
            f"{by_name['heads'].compute_seconds / chosen.seconds:.0%}",  # its compute is even, whether refused or not
            f"{chosen.sent_bytes / 1e6:,.1f}",
        )
    return table


@dataclass(frozen=True)
class Row:
    """One call on a number of ranks, predicted and measured."""

    case: str
    rate: float
    """FLOP/s of a rank with this mask without communication, measured directly before."""
    schedule: Schedule
    predicted_bytes: tuple[int, ...]
    counted_bytes: tuple[int, ...]
    predicted_seconds: float
    seconds: float
    """Median time of the runs; the time of a run is that of its slowest rank."""


CHECKED = (
    (masks.full(), 1536),
    (masks.causal(), 3072),
    (masks.causal() & (masks.window(256) | masks.sinks(16)), 3072),
)
CHECKED_SHAPE = Shape(1, 8, 4, 64, 64, torch.float32)


def _call(cp: Any, mask: masks.Mask, shape: Shape) -> tuple[float, int]:
    """Return (seconds, bytes sent) of one call and its backward on this rank."""
    torch.manual_seed(cp.rank)
    q, k, v = (
        torch.randn(shape.batch, heads, cp.tokens, dim, dtype=shape.dtype, requires_grad=True)
        for heads, dim in (
            (shape.heads, shape.head_dim),
            (shape.kv_heads, shape.head_dim),
            (shape.kv_heads, shape.value_dim),
        )
    )
    dist.barrier()
    before, started = cp.traffic.sent_bytes, time.perf_counter()
    kp.attention(q, k, v, mask, group=cp).backward(torch.ones_like(q))
    return time.perf_counter() - started, cp.traffic.sent_bytes - before


def _agreed(values: list[float], op: Any) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, op)
    return found.tolist()


def _local_rates(mask: masks.Mask, shape: Shape, tokens: int, seconds: float = 0.5) -> Rates:
    """Measure FLOP/s of attention with this mask and copy bandwidth on the slowest rank, with all ranks busy."""
    q, k, v = (
        torch.randn(shape.batch, heads, tokens, shape.head_dim, dtype=shape.dtype, requires_grad=True)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    pairs = mask.layout(tokens, tokens).density * tokens**2
    flops = 7 * shape.batch * shape.heads * pairs * (shape.head_dim + shape.value_dim)
    times: list[float] = []
    dist.barrier()
    deadline = time.perf_counter() + seconds
    while len(times) < 4 or time.perf_counter() < deadline:
        started = time.perf_counter()
        kp.attention(q, k, v, mask).backward(torch.ones_like(q))
        times.append(time.perf_counter() - started)
    bandwidth = measure_rates(kp.device("cpu")).bandwidth
    rate, bandwidth = _agreed([flops / statistics.median(times[1:]), bandwidth], dist.ReduceOp.MIN)
    # The cost model uses a fraction of data sheet rates, not measured ones, on which ranks could disagree.
    name = str(shape.dtype).removeprefix("torch.")
    return Rates(bandwidth=bandwidth, matmul={name: rate / _EFFICIENCY}, source="datasheet")


def _check_on(rank: int, ranks: int, store: str, repeats: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    link = measure_link(dist.group.WORLD)
    rows = []
    for mask, length in CHECKED:
        rates = _local_rates(mask, CHECKED_SHAPE, length // ranks)
        device = replace(kp.device("cpu"), rates=rates)
        placement = place(mask, length, ranks)
        predictions = {one.schedule: one for one in predict(mask, placement, CHECKED_SHAPE, device, link)}
        for schedule in SCHEDULES:
            if predictions[schedule].refusal:
                continue
            cp = kp.context_parallel.Context(dist.group.WORLD, length, mask, schedule=schedule, link=link)
            _call(cp, mask, CHECKED_SHAPE)  # builds the sub-masks and connects the ranks
            runs = [_call(cp, mask, CHECKED_SHAPE) for _ in range(repeats)]
            times = _agreed([seconds for seconds, _ in runs], dist.ReduceOp.MAX)
            sent = [0.0] * ranks
            sent[rank] = runs[0][1]
            rows.append(
                Row(
                    f"{mask} {length}",
                    rates.matmul["float32"] * _EFFICIENCY,
                    schedule,
                    sent_bytes(mask, placement, CHECKED_SHAPE, schedule),
                    tuple(int(one) for one in _agreed(sent, dist.ReduceOp.SUM)),
                    predictions[schedule].seconds,
                    statistics.median(times),
                )
            )
    if rank == 0:
        results.put((link, rows))
    dist.barrier()
    dist.destroy_process_group()


def checked(ranks: int, repeats: int) -> tuple[Link, list[Row]]:
    """Return the link, and a row for every call on ``ranks`` local ranks."""
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        mp.spawn(_check_on, args=(ranks, store, repeats, results), nprocs=ranks)
    found: tuple[Link, list[Row]] = results.get()
    return found


def _check_table(rows: list[Row]) -> Table:
    table = Table(header_style="bold")
    for column in (
        "call",
        "GFLOP/s",
        "schedule",
        "predicted MB",
        "counted MB",
        "",
        "predicted ms",
        "measured ms",
        "ratio",
    ):
        table.add_column(column, justify="left" if column in ("call", "schedule", "") else "right", no_wrap=True)
    before = None
    for row in rows:
        if before not in (None, row.case):
            table.add_section()
        table.add_row(
            *((row.case, f"{row.rate / 1e9:.1f}") if before != row.case else ("", "")),
            row.schedule,
            *(f"{max(one) / 1e6:.3f}" for one in (row.predicted_bytes, row.counted_bytes)),
            "equal" if row.predicted_bytes == row.counted_bytes else "[red]DIFFERENT[/red]",
            *(f"{one * 1e3:.1f}" for one in (row.predicted_seconds, row.seconds)),
            f"{row.predicted_seconds / row.seconds:.2f}",
        )
        before = row.case
    table.caption = "MB of the rank that sends most; equal: on every rank; ratio: predicted over measured"
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="run on local ranks and compare")
    parser.add_argument("--ranks", type=int, nargs="+", help="how many ranks; 8 to 1024, or 2 and 4 with --check")
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS, help="lengths to predict for")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each call with --check")
    arguments = parser.parse_args()
    console = Console()
    if not arguments.check:
        for table in predicted(console, tuple(arguments.tokens), tuple(arguments.ranks or RANKS)):
            console.print(table)
        return
    wrong = False
    for ranks in arguments.ranks or (2, 4):
        link, rows = checked(ranks, arguments.repeats)
        console.print(f"{ranks} local ranks: {link.bandwidth / 1e9:.2f} GB/s and {link.latency * 1e6:.0f} us")
        console.print(_check_table(rows))
        wrong |= any(row.predicted_bytes != row.counted_bytes for row in rows)
    if wrong:
        sys.exit("bytes differ: the cost model no longer describes what schedules send")


if __name__ == "__main__":
    main()
