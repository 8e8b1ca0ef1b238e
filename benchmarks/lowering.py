"""Programs for devices against eager PyTorch and against XNNPACK alone, on the CPU: each arm in a process of its own.

Run it with ``python benchmarks/lowering.py``; add ``--record`` in a clean checkout to keep the result. Every program
is compared with eager before it is timed. ``custom_sdpa`` is ExecuTorch's own attention operator.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console

import kernel_pytorch as kp
from kernel_pytorch import benchmarking
from kernel_pytorch.bench_command import measurement_table
from kernel_pytorch.evidence import Measurement, Quantiles, clean_commit, evidence_directory, write_record
from kernel_pytorch.hardware_abstraction.op import registered_op
from kernel_pytorch.hardware_abstraction.timing import quantiles

THREADS = 2
ARMS = {
    "block-512": ("eager", "xnnpack", "ours"),
    "block-1024": ("eager", "xnnpack", "ours"),
    "attention-8192-window-512": ("eager", "custom_sdpa", "ours"),
    "smallest-call": ("ours",),
}
FEWEST_DECIBELS = 60.0


class Block(torch.nn.Module):
    """A transformer block: d 256, 8 heads, f 1024."""

    def __init__(self, dim: int = 256, heads: int = 8, wide: int = 1024) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = torch.nn.LayerNorm(dim), torch.nn.LayerNorm(dim)
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)
        self.up, self.down = torch.nn.Linear(dim, wide), torch.nn.Linear(wide, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        parts = self.qkv(self.first(x)).split(dim, dim=2)
        q, k, v = (part.view(batch, length, self.heads, dim // self.heads).transpose(1, 2) for part in parts)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))


class Windowed(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return kp.attention(q, k, v, kp.masks.causal() & kp.masks.window(512))


def checked(program: kp.lowering.LoweredProgram) -> Callable[..., object]:
    for difference in program.compare():
        if difference.snr < FEWEST_DECIBELS:
            raise benchmarking.GateError(str(difference))
    return program.load()


def xnnpack_alone(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Callable[..., object]:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    edge = to_edge_transform_and_lower(torch.export.export(model, inputs), partitioner=[XnnpackPartitioner()])
    return kp.load(bytes(edge.to_executorch().buffer))


def subject(case: str, arm: str) -> tuple[Callable[..., object], tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    if case == "smallest-call":
        inputs = (torch.randn(1, 4),)
        return checked(kp.lower(torch.nn.Softmax(-1).eval(), inputs)), inputs
    if case.startswith("block"):
        model, inputs = Block().eval(), (torch.randn(1, int(case.partition("-")[2]), 256),)
        if arm == "eager":
            return model, inputs
        return (xnnpack_alone(model, inputs) if arm == "xnnpack" else checked(kp.lower(model, inputs))), inputs
    q, k, v = inputs = tuple(torch.randn(1, 8, 8192, 64) for _ in range(3))
    if arm == "eager":
        dense = torch.nn.functional.scaled_dot_product_attention
        return lambda *qkv: dense(*qkv, is_causal=True), inputs
    if arm == "custom_sdpa":
        from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401 - registers the operator

        rows = tuple(x.transpose(1, 2).contiguous() for x in (q, k, v))
        return lambda *qkv: torch.ops.llama.custom_sdpa(*qkv, 0, None, 0.0, True), rows
    return checked(kp.lower(Windowed().eval(), inputs)), inputs


def time_arm(case: str, arm: str, seconds: float) -> list[float]:
    torch.set_num_threads(THREADS)
    call, inputs = subject(case, arm)
    samples: list[float] = []
    with torch.no_grad():
        call(*inputs)
        stop = time.perf_counter() + seconds
        while len(samples) < 5 or time.perf_counter() < stop:
            started = time.perf_counter()
            call(*inputs)
            samples.append(time.perf_counter() - started)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="keep the result in benchmarks/evidence")
    parser.add_argument("--seconds", type=float, default=3.0, help="time to sample each arm for")
    parser.add_argument("--case", choices=list(ARMS), action="append", help="this case alone; may be repeated")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(time_arm(arguments.case[0], arguments.arm, arguments.seconds)))
        return
    commit = clean_commit(benchmarking.checkout()) if arguments.record else ""
    measurements = []
    for case in arguments.case or ARMS:
        for arm in ARMS[case]:
            command = [sys.executable, __file__, "--case", case, "--arm", arm, "--seconds", str(arguments.seconds)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{case} {arm}: {done.stderr[-2000:]}")
            samples = json.loads(done.stdout.splitlines()[-1])
            name = "kernel:delegate" if arm == "ours" else f"baseline:{arm}"
            seconds = Quantiles(*quantiles(samples))
            measurements.append(Measurement(case, "forward", "float32", name, seconds, len(samples), 0, 0))
    Console().print(measurement_table(measurements))
    folder = evidence_directory()
    if arguments.record and folder is not None:
        device = kp.device("cpu")
        name = benchmarking.record_name(registered_op("attention"), device)
        evidence = benchmarking.record(
            "lowering", device, (), measurements, command="python benchmarks/lowering.py --record", commit=commit
        )
        write_record(evidence, folder / name.replace("attention", "lowering", 1))


if __name__ == "__main__":
    main()
