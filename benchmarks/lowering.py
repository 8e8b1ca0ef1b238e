"""Benchmark lowered programs on the CPU against eager PyTorch and XNNPACK alone, each arm in separate processes.

Run it with ``python benchmarks/lowering.py``; add ``--record`` in a clean checkout to keep the result. Every program
is compared with eager before it is timed. The arms of a case alternate, so that other load on the machine affects all
of them. ``custom_sdpa`` is ExecuTorch's own attention operator, ``portable`` its kernels without any backend.
``--state FILE --limit SECONDS`` splits a run over several.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import split_run
import torch

import kernel_pytorch as kp
from kernel_pytorch import benchmarking
from kernel_pytorch.evidence import Measurement, Quantiles
from kernel_pytorch.hardware_abstraction.timing import quantiles
from kernel_pytorch.kv_cache import quantized_rows

THREADS = 2
ARMS = {
    "block-512": ("eager", "xnnpack", "custom_sdpa", "ours"),
    "block-1024": ("eager", "xnnpack", "custom_sdpa", "ours"),
    "attention-8192-window-512": ("eager", "custom_sdpa", "ours"),
    "decode-after-4k-tokens": ("ours",),
    "decode-after-128k-tokens": ("ours",),
    "smallest-call": ("portable", "ours"),
}
# Cases that are compared with each other alternate too.
TOGETHER = (
    ("block-512",), ("block-1024",), ("attention-8192-window-512",), ("smallest-call",),
    ("decode-after-4k-tokens", "decode-after-128k-tokens"),
)  # fmt: skip
WINDOW, SINKS, PREFILL = 4096, 64, 1024
FEWEST_DECIBELS = 60.0


class Block(torch.nn.Module):
    """A transformer block: d 256, 8 heads, f 1024."""

    def __init__(self, dim: int = 256, heads: int = 8, wide: int = 1024) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = torch.nn.LayerNorm(dim), torch.nn.LayerNorm(dim)
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)
        self.up, self.down = torch.nn.Linear(dim, wide), torch.nn.Linear(wide, dim)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend; all tensors are (batch, length, heads, head_dim)."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        parts = self.qkv(self.first(x)).split(dim, dim=2)
        y = self.attend(*(part.view(batch, length, self.heads, dim // self.heads) for part in parts))
        x = x + self.out(y.reshape(batch, length, dim))
        return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))


class BlockWithCustomAttention(Block):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.ops.llama.custom_sdpa(q, k, v, 0, None, 0.0, True)  # type: ignore[no-any-return]


class Decoder(torch.nn.Module):
    """Attention over an int8 KV cache with 8 heads of dimension 64."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = kp.KVCache(8, 64, window=WINDOW, sinks=SINKS, longest=PREFILL, dtype=torch.int8)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        q, k, v = x
        return self.cache(q, k, v, position)


class Windowed(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return kp.attention(q, k, v, kp.masks.causal() & kp.masks.window(512))


def checked(program: kp.lowering.LoweredProgram) -> Callable[..., object]:
    for difference in program.compare():
        if difference.snr < FEWEST_DECIBELS:
            raise benchmarking.GateError(str(difference))
    return program.load()


def without_us(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], *, xnnpack: bool) -> Callable[..., object]:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    edge = to_edge_transform_and_lower(
        torch.export.export(model, inputs),
        partitioner=[XnnpackPartitioner()] if xnnpack else [],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    program = kp.load(bytes(edge.to_executorch().buffer))
    torch.testing.assert_close(program(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)
    return program


def after(tokens: int) -> tuple[Callable[..., object], tuple[torch.Tensor, ...]]:
    """Return a decoding step after ``tokens`` tokens of history, which repeat one prefill, and its inputs."""
    model, start = Decoder().eval(), torch.tensor([0])
    some, one = torch.randn(3, 1, 8, PREFILL, 64), torch.randn(3, 1, 8, 1, 64)
    program = kp.lower(model, {"prefill": (some, start), "decode": (one, start)}).load()
    for at in range(0, tokens, PREFILL):
        program.run("prefill", (some, torch.tensor([at])))
    inputs = (one, torch.tensor([tokens]))
    # The attended keys: sinks beyond the window, the window, and the token itself.
    sinks = some[:, :, :, : SINKS if tokens > WINDOW else 0]
    q, k, v = torch.cat([sinks, some.repeat(1, 1, 1, WINDOW // PREFILL, 1), one], dim=3).double()
    k, v = (rows.double() * scales[..., None] for rows, scales in (quantized_rows(x) for x in (k, v)))
    exact = torch.nn.functional.scaled_dot_product_attention(q[:, :, -1:], k, v)
    torch.testing.assert_close(program.run("decode", inputs).double(), exact, rtol=1e-4, atol=1e-5)
    return lambda *given: program.run("decode", given), inputs


def subject(case: str, arm: str) -> tuple[Callable[..., object], tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    if arm == "custom_sdpa":
        from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401 - registers the operator
    if case == "smallest-call":
        model, inputs = torch.nn.Softmax(-1).eval(), (torch.randn(1, 4),)
        return (
            without_us(model, inputs, xnnpack=False) if arm == "portable" else checked(kp.lower(model, inputs))
        ), inputs
    if case.startswith("decode"):
        return after(131072 if "128k" in case else WINDOW)
    if case.startswith("block"):
        model, inputs = Block().eval(), (torch.randn(1, int(case.partition("-")[2]), 256),)
        if arm == "eager":
            return model, inputs
        if arm == "ours":
            return checked(kp.lower(model, inputs)), inputs
        if arm == "custom_sdpa":
            model = BlockWithCustomAttention().eval()
        return without_us(model, inputs, xnnpack=True), inputs
    q, k, v = inputs = tuple(torch.randn(1, 8, 8192, 64) for _ in range(3))
    if arm == "eager":
        dense = torch.nn.functional.scaled_dot_product_attention
        return lambda *qkv: dense(*qkv, is_causal=True), inputs
    if arm == "custom_sdpa":
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


def measure(cases: tuple[str, ...], seconds: float, rounds: int) -> list[Measurement]:
    """Time the arms of related cases alternately, each in a separate process."""
    samples: dict[tuple[str, str], list[float]] = {}
    turns = [(case, arm) for case in cases for arm in ARMS[case]]
    for case, arm in turns * rounds:
        command = [sys.executable, __file__, "--case", case, "--arm", arm, "--seconds", str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{case} {arm}: {done.stderr[-2000:]}")
        samples.setdefault((case, arm), []).extend(json.loads(done.stdout.splitlines()[-1]))
        print(f"{case} {arm}: median {statistics.median(samples[case, arm]) * 1e3:.3f} ms", file=sys.stderr)
    rows = []
    for (case, arm), taken in samples.items():
        subject = "kernel:delegate" if arm == "ours" else f"baseline:{arm}"
        rows.append(
            Measurement(case, "forward", "float32", subject, Quantiles(*quantiles(taken)), len(taken), 0, 0)
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    split_run.add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=3.0, help="time to sample each arm for, in each round")
    parser.add_argument("--rounds", type=int, default=3, help="how often the arms of a case take turns")
    parser.add_argument("--case", choices=list(ARMS), action="append", help="this case alone; may be repeated")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(time_arm(arguments.case[0], arguments.arm, arguments.seconds)))
        return
    chosen = [tuple(case for case in cases if case in (arguments.case or ARMS)) for cases in TOGETHER]
    groups = {" and ".join(cases): cases for cases in chosen if cases}
    split_run.measure(
        "lowering",
        list(groups),
        lambda name: measure(groups[name], arguments.seconds, arguments.rounds),
        arguments,
        settings=(arguments.seconds, arguments.rounds),
    )


if __name__ == "__main__":
    main()
