"""Attention beside its peers, in one run on one GPU: dense calls against every backend of PyTorch's SDPA, other masks
against compiled FlexAttention.

Run it with ``python benchmarks/attention.py``; add ``--record`` in a clean checkout to keep the result. Every mask's
numbers are checked against float64 at a small length first. FlexAttention gets the mask as its users write it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernel_pytorch as kp
from kernel_pytorch import benchmarking, masks
from kernel_pytorch.cli.bench import measurement_table
from kernel_pytorch.evidence import (
    Measurement,
    Quantiles,
    clean_commit,
    write_record,
)
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.op import registered_op
from kernel_pytorch.hardware_abstraction.rates import measure_rates
from kernel_pytorch.hardware_abstraction.registry import backend
from kernel_pytorch.hardware_abstraction.timing import quantiles, sample_seconds

OP = registered_op("attention")
SDPA = {
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
}


TIMED = ("cudnn", "triton")  # the kernels that the workloads below reach


@dataclass(frozen=True)
class Workload:
    """One mask at one length and head dimension; 2048 numbers in all heads of a token."""

    name: str
    length: int
    dim: int
    mask: masks.Mask
    gate: str
    flex: Callable[..., torch.Tensor] | None = None
    """The mask as FlexAttention takes it."""


def workloads(dense: tuple[int, ...], sparse: tuple[int, ...]) -> Iterator[Workload]:
    for dim in (64, 128):
        for length in dense:
            yield Workload(f"full {length} d{dim}", length, dim, masks.full(), "full")
            yield Workload(f"causal {length} d{dim}", length, dim, masks.causal(), "causal")
        for length in sparse:
            size = length // 128
            for share in (10, 50):
                generator = torch.Generator().manual_seed(share)
                table = torch.rand(size, size, generator=generator) < share / 100
                there = table.cuda()
                yield Workload(
                    f"random {share} % of blocks {length} d{dim}",
                    length,
                    dim,
                    masks.blocks(table),
                    "table",
                    lambda _b, _h, i, j, there=there: there[i // 128, j // 128],
                )
            yield Workload(
                f"causal, sparse kernel {length} d{dim}",
                length,
                dim,
                masks.causal(),
                "causal",
                lambda _b, _h, i, j: j <= i,
            )
            yield Workload(
                f"causal & (window(1024) | sinks(64)) {length} d{dim}",
                length,
                dim,
                masks.causal() & (masks.window(1024) | masks.sinks(64)),
                "window-and-sinks",
                lambda _b, _h, i, j: (j <= i) & ((i - j <= 1024) | (j < 64)),
            )


def subjects(
    work: Workload, q: torch.Tensor, compiled_flex: Any
) -> Iterator[tuple[str, Callable[..., torch.Tensor]]]:
    scale = work.dim**-0.5
    if work.flex is None:
        chosen = kp.explain(kp.attention, q, q, q, work.mask).kernel.name
        yield f"kernel:{chosen}", lambda q, k, v: kp.attention(q, k, v, work.mask)
        for name, choice in SDPA.items():

            def sdpa(q: Any, k: Any, v: Any, choice: Any = choice) -> torch.Tensor:
                with sdpa_kernel(choice):
                    return torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=work.mask.is_causal, scale=scale
                    )

            yield f"baseline:{name}", sdpa
        return
    from torch.nn.attention.flex_attention import create_block_mask

    yield "kernel:triton", lambda q, k, v: kp.attention(q, k, v, work.mask, kernel="triton")
    block_mask = create_block_mask(work.flex, None, None, work.length, work.length, device=q.device)
    yield "baseline:compiled FlexAttention", lambda q, k, v: compiled_flex(q, k, v, block_mask=block_mask)


def measure(
    work: Workload, device: kp.Device, compiled_flex: Any, gates: dict[tuple[str, str], Any]
) -> Iterator[Measurement]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    heads = 2048 // work.dim
    batch = max(1, 16384 // work.length) if work.flex is None else 1
    shape = (batch, heads, work.length, work.dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(4))
    call = function_of(OP).call("forward", (q, k, v, work.mask, work.dim**-0.5, "grad"), True)
    for phase in ("forward", "backward"):
        for subject, function in subjects(work, q, compiled_flex):
            if phase == "forward":
                run: Callable[[], object] = lambda function=function: function(q, k, v)  # noqa: E731
            else:
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                out = function(*leaves)
                run = lambda out=out, leaves=leaves: torch.autograd.grad(out, leaves, dout, retain_graph=True)  # noqa: E731
            samples = sample_seconds(run, device, 0.08)
            counted = replace(call, phase=phase)
            gate = gates.get((work.gate, subject))
            yield Measurement(
                case=work.name,
                phase=phase,
                format="bfloat16",
                subject=subject,
                seconds=Quantiles(*quantiles(samples)),
                samples=len(samples),
                traffic_bytes=OP.traffic(counted),
                flops=OP.flops(counted),
                error=gate.error if gate else None,
                budget=gate.budget if gate else None,
            )


def gated() -> dict[tuple[str, str], Any]:
    """Every kernel of the table against float64 on the small case of each mask; the result closest to its budget."""
    found = {}
    device = kp.device("cuda")
    for name in ("full", "causal", "table", "window-and-sinks"):
        arguments = dict(OP.case(name).arguments(torch.bfloat16, torch.device("cuda")))
        call = function_of(OP).call("forward", tuple(arguments.values()), True)
        for kernel in backend(device.backend).kernels:
            if kernel.op == OP.name and kernel.refusal(call, device) is None:
                compared = benchmarking.gate(OP, kernel, arguments)
                found[name, f"kernel:{kernel.name}"] = max(compared, key=lambda one: one.error / one.budget)
    return found


def mask_costs() -> Iterator[Measurement]:
    """What building each mask costs, from nothing to the tiles on the device."""
    from torch.nn.attention.flex_attention import create_block_mask

    from kernel_pytorch.masks.layout import layout

    for work in workloads((), (32768,)):
        if work.dim == 64 and work.flex is not None:

            def ours(work: Workload = work) -> None:
                layout.cache_clear()
                known = work.mask.layout(work.length, work.length)
                (
                    known.walk(64, 64, device="cuda"),
                    known.walk(64, 64, by_key=True, device="cuda"),
                    known.intervals("cuda"),
                )

            def flex(work: Workload = work) -> None:
                create_block_mask(work.flex, None, None, work.length, work.length, device="cuda")

            for subject, function in (("kernel:kp.masks", ours), ("baseline:create_block_mask", flex)):
                times = []
                for _ in range(3):
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                    function()
                    torch.cuda.synchronize()
                    times.append(time.perf_counter() - started)
                yield Measurement(
                    case=f"build the mask: {work.name.removesuffix(' d64')}",
                    phase="forward",
                    format="bfloat16",
                    subject=subject,
                    seconds=Quantiles(*quantiles(times)),
                    samples=len(times),
                    traffic_bytes=0,
                    flops=0,
                )


def memory() -> Iterator[Measurement]:
    """The peak of forward and backward together as the sequence grows; the mask's own tensors are counted."""
    for length in (16384, 32768, 65536, 131072, 262144):
        mask = masks.causal() & (masks.window(1024) | masks.sinks(64))
        shape = (1, 16, length, 128)
        q, k, v = (torch.randn(shape, device="cuda").bfloat16().requires_grad_() for _ in range(3))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        out = kp.attention(q, k, v, mask)
        gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        del out, gradients
        yield Measurement(
            case=f"memory of causal & (window(1024) | sinks(64)) {length} d128",
            phase="forward and backward",
            format="bfloat16",
            subject="kernel:auto",
            seconds=Quantiles(seconds, seconds, seconds),
            samples=1,
            traffic_bytes=0,
            flops=0,
            peak_bytes=torch.cuda.max_memory_allocated(),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="keep the result as evidence")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "evidence", help="folder for the record"
    )
    parser.add_argument("--dense", type=int, nargs="*", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--sparse", type=int, nargs="*", default=[16384, 32768])
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new workloads after this long")
    arguments = parser.parse_args()
    commit = clean_commit(benchmarking.checkout()) if arguments.record else ""
    from torch.nn.attention.flex_attention import flex_attention

    console, device = Console(), kp.device("cuda")
    started = time.perf_counter()
    gates = gated()
    bandwidth = measure_rates(device).bandwidth
    measurements = list(memory())
    if arguments.sparse:
        measurements += list(mask_costs())
    every = sorted(
        workloads(tuple(arguments.dense), tuple(arguments.sparse)),
        key=lambda work: (work.flex is not None, work.length),
    )
    for work in every:
        if time.perf_counter() - started > arguments.seconds:
            console.print(f"left out for lack of time: {work.name}")
            continue
        torch._dynamo.reset()  # past its recompile limit torch.compile runs FlexAttention unfused, without an error
        rows = list(measure(work, device, torch.compile(flex_attention, dynamic=False, fullgraph=True), gates))
        measurements += rows
        for row in rows:
            rate = f"{row.flops / row.seconds.median / 1e12:6.0f} TFLOP/s"
            console.print(f"{row.case:45} {row.phase:8} {row.subject:32} {row.seconds.median * 1e3:8.3f} ms {rate}")
        if arguments.record:  # after every workload: what was measured is kept whatever happens to the next
            kernels = [kernel for kernel in backend(device.backend).kernels if kernel.op == "attention"]
            record = benchmarking.record(
                OP.name,
                device,
                [kernel for kernel in kernels if kernel.name in TIMED],
                measurements,
                command="python benchmarks/attention.py --record",
                commit=commit,
                copy_bandwidth=bandwidth,
            )
            write_record(record, arguments.out / benchmarking.record_name(OP, device))
    console.print(measurement_table(measurements))


if __name__ == "__main__":
    main()
