"""Benchmark call overhead: kernel selection alone, and attention of 16 tokens against SDPA.

Run it with ``python benchmarks/selection.py``; add ``--record`` in a clean checkout to keep the result. To measure
selection alone, the kernel is a stub that returns immediately, and a direct call of the stub is the baseline.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

import kernel_pytorch as kp
from kernel_pytorch import benchmarking
from kernel_pytorch.cli.bench import measurement_table
from kernel_pytorch.evidence import (
    Measurement,
    Quantiles,
    clean_commit,
    write_record,
)
from kernel_pytorch.hardware_abstraction.dispatch import forget_choices
from kernel_pytorch.hardware_abstraction.registry import backend
from kernel_pytorch.hardware_abstraction.timing import quantiles, require_quiet

MEASURED = (
    "hardware_abstraction/dispatch.py",
    "hardware_abstraction/op.py",
    "hardware_abstraction/policy_scope.py",
    "hardware_abstraction/selection.py",
)


def sample(function: Callable[[], object], rounds: int = 200, calls: int = 500) -> list[float]:
    """Return seconds per call; each round is long enough that the clock's overhead is negligible."""
    for _ in range(calls):
        function()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - started) / calls)
    return times


def small_attention() -> Iterator[Measurement]:
    """Time attention of 16 tokens in 4 heads, and SDPA on the same tensors: with flags, or with a dense mask."""
    q, k, v, upstream = torch.randn(4, 1, 4, 16, 64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    window = kp.masks.causal() & kp.masks.window(4)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for mask, flags in (
        (kp.masks.full(), {}),
        (kp.masks.causal(), {"is_causal": True}),
        (window, {"attn_mask": window.dense(16, 16)}),
    ):
        subjects = {
            "kernel:kp.attention": partial(kp.attention, mask=mask),
            "baseline:scaled_dot_product_attention": partial(sdpa, **flags),
        }
        for subject, attend in subjects.items():

            def both(attend: Callable[..., torch.Tensor] = attend) -> object:
                return torch.autograd.grad(attend(*leaves), leaves, upstream)

            for phase, function in (("forward", partial(attend, q, k, v)), ("forward and backward", both)):
                with torch.set_grad_enabled(phase != "forward"):
                    times = sample(function, calls=100)
                yield Measurement(
                    case=f"attention of 16 tokens: {mask}",
                    phase=phase,
                    format="float32",
                    subject=subject,
                    seconds=Quantiles(*quantiles(times)),
                    samples=len(times),
                    traffic_bytes=0,
                    flops=0,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="keep the result in benchmarks/evidence")
    arguments = parser.parse_args()
    commit = clean_commit(benchmarking.checkout()) if arguments.record else ""
    device = kp.device("cpu")
    if arguments.record:
        require_quiet(device)
    kernel = next(kernel for kernel in backend("cpu").kernels if kernel.op == "rms_norm")
    x, weight = torch.randn(8, 64), torch.randn(64)
    outputs = (torch.empty_like(x), torch.empty(8))

    def stand_in(*_arguments: object) -> object:
        return outputs

    kernel.implementation.forward = stand_in
    forget_choices()
    overload = torch.ops.kernel_pytorch.rms_norm.default
    subjects = {
        "baseline:the kernel's function": lambda: stand_in(device, x, weight, 1e-6),
        "kernel:kp.rms_norm": lambda: kp.rms_norm(x, weight, 1e-6),
        "kernel:torch.ops.kernel_pytorch.rms_norm": lambda: overload(x, weight, 1e-6, ""),
    }
    measurements = [
        Measurement(
            case="hot call",
            phase="forward",
            format="float32",
            subject=name,
            seconds=Quantiles(*quantiles(sample(function))),
            samples=200,
            traffic_bytes=0,
            flops=0,
        )
        for name, function in subjects.items()
    ]
    measurements += small_attention()
    console = Console()
    console.print(measurement_table(measurements))
    direct, ours = measurements[0].seconds.median, measurements[1].seconds.median
    console.print(f"selection costs {(ours - direct) * 1e6:.2f} us a call")
    if arguments.record:
        command = "python benchmarks/selection.py --record"
        record = benchmarking.record(
            "selection", device, (), measurements, command=command, commit=commit, parts=MEASURED
        )
        write_record(record, Path(__file__).parent / "evidence" / "selection.cpu.json")


if __name__ == "__main__":
    main()
