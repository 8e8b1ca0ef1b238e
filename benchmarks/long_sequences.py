"""Benchmark a million tokens on one GPU: causal attention in chunks from 128k to 1M tokens, and a training step.

Run it with ``python benchmarks/long_sequences.py``; add ``--record`` in a clean checkout to keep the result. Chunks
are first compared with float64 at a small length. At each length, forward and backward with 8 heads of 128 in
bfloat16 are timed: in chunks with all tensors on the device, in chunks with keys, values and their gradients in host
memory, and with PyTorch's SDPA on the whole sequence as the baseline. The step is ``million_tokens.py``, which checks
its own gradients.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import kernel_pytorch as kp
from kernel_pytorch import benchmarking, masks
from kernel_pytorch.evidence import Measurement, Quantiles, clean_commit, write_record
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.op import registered_op
from kernel_pytorch.hardware_abstraction.registry import backend
from kernel_pytorch.hardware_abstraction.timing import quantiles
from kernel_pytorch.testing.budget import Comparison, compare, exceeded

OP = registered_op("attention")
CHUNK = 131072
STEP = Path(__file__).parent / "million_tokens.py"


def gate() -> Comparison:
    """Compare chunks with float64 on a small case, and return the result closest to its budget."""

    def chunked(q: Any, k: Any, v: Any, mask: Any, scale: float, _wanted: str) -> Any:
        group = kp.context_parallel.Chunks(32)
        return kp.attention(q, k, v, mask, scale=scale, group=group, return_lse=True)

    arguments = {**OP.case("causal").arguments(torch.bfloat16, torch.device("cuda")), "wanted": "lse"}
    found = compare(OP, chunked, arguments)
    if exceeded(found):
        raise SystemExit(f"chunks: {exceeded(found)}")
    return max(found, key=lambda one: one.error / one.budget)


def measure(length: int, console: Console, checked: Comparison) -> Iterator[Measurement]:
    mask, shape = masks.causal(), (1, 8, length, 128)
    generator = torch.Generator(device="cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(4))
    call = function_of(OP).call("forward", (q, k, v, mask, 128**-0.5, "grad"), True)
    flops = OP.flops(call) + OP.flops(replace(call, phase="backward"))
    chunks = kp.context_parallel.Chunks(CHUNK)

    def sdpa(q: Any, k: Any, v: Any) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def in_chunks(q: Any, k: Any, v: Any) -> Any:
        return kp.attention(q, k, v, mask, group=chunks)

    leaves = [x.requires_grad_() for x in (q, k, v)]
    del q, k, v
    for subject, function in (
        ("kernel:triton in chunks", in_chunks),
        ("baseline:SDPA", sdpa),
        ("kernel:triton in chunks, keys in host memory", in_chunks),
    ):
        if "host" in subject:  # the last arm: it frees the device's copies
            leaves[1:] = [x.detach().cpu().pin_memory().requires_grad_() for x in leaves[1:]]
        predicted = chunks.peak_bytes(*leaves) if "chunks" in subject else None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if "host" in subject:  # pinning memory for the gradients takes seconds, but only in the first step
            pinned = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in leaves[1:]]
            del pinned
        times: list[float] = []
        # Several short runs, until the clocks have settled under load; one long run is enough.
        while sum(times) < 3.0 and len(times) < 12:
            started = time.perf_counter()
            out = function(*leaves)
            gradients = torch.autograd.grad(out, leaves, dout)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
            del out, gradients
        kept = times[len(times) // 2 :]
        yield Measurement(
            case=f"causal {length} 8 heads d128, forward and backward",
            phase="forward and backward",
            format="bfloat16",
            subject=subject,
            seconds=Quantiles(*quantiles(kept)),
            samples=len(kept),
            traffic_bytes=0,
            flops=flops,
            error=checked.error if predicted else None,
            budget=checked.budget if predicted else None,
            peak_bytes=torch.cuda.max_memory_allocated(),
            predicted_peak_bytes=predicted,
        )
        rate = flops / quantiles(kept)[1] / 1e12
        console.print(f"{length:>8} {subject:45} {quantiles(kept)[1]:8.3f} s {rate:5.0f} TFLOP/s", highlight=False)


def training_step() -> Measurement:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        subprocess.run([sys.executable, str(STEP), "--json", str(path)], check=True)
        found = json.loads(path.read_text())
    seconds = found["seconds"]["total"]
    size = f"{found['parameters'] / 1e9:.2f}B parameters"
    worst = max(found["gradient_errors"].values())
    return Measurement(
        case=f"a training step of {size} on {found['tokens']} tokens, {len(found['masks'])} layers",
        phase="forward, backward and optimizer",
        format=found["dtype"],
        subject="kernel:benchmarks/million_tokens.py",
        seconds=Quantiles(seconds, seconds, seconds),
        samples=1,
        traffic_bytes=0,
        flops=found["model_flops"],
        error=worst,
        budget=found["gradient_tolerance"],
        peak_bytes=found["peak_bytes"],
        predicted_peak_bytes=found["predicted_peak_bytes"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="keep the result as evidence")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "evidence", help="folder for the record"
    )
    parser.add_argument("--lengths", type=int, nargs="*", default=[131072, 262144, 524288, 1048576])
    parser.add_argument("--no-step", action="store_true", help="leave the training step out")
    arguments = parser.parse_args()
    commit = clean_commit(benchmarking.checkout()) if arguments.record else ""
    console, device = Console(), kp.device("cuda")
    checked = gate()
    measurements: list[Measurement] = []

    def keep(name: str, rows: list[Measurement]) -> None:
        if arguments.record:  # after every length, in case a later one fails
            kernels = [kernel for kernel in backend(device.backend).kernels if kernel.op == OP.name]
            used = [kernel for kernel in kernels if kernel.name in ("triton", "cudnn")]
            command = "python benchmarks/long_sequences.py --record"
            record = benchmarking.record(OP.name, device, used, rows, command=command, commit=commit)
            path = arguments.out / benchmarking.record_name(OP, device).replace("attention.", f"attention-{name}.")
            write_record(record, path)

    list(measure(2 * CHUNK, Console(quiet=True), checked))  # compiles every kernel that the lengths below use
    for length in arguments.lengths:
        measurements += measure(length, console, checked)
        torch.cuda.empty_cache()
        keep("long", measurements)
    if not arguments.no_step:
        step = training_step()
        keep("step", [step])
        measurements.append(step)
    for row in measurements:
        if row.predicted_peak_bytes:
            share = (row.peak_bytes or 0) / row.predicted_peak_bytes
            console.print(f"{row.case}, {row.subject}: peak {share:.3f} of the formula", highlight=False)


if __name__ == "__main__":
    main()
