"""Benchmark AOTInductor packages against ``torch.compile`` and eager PyTorch, on the best available device.

Run it with ``python benchmarks/aoti.py``; add ``--record`` in a clean checkout to keep the result. Each package first
runs in a process that cannot import this library, and its output is compared with float64: its error may be twice
that of eager PyTorch, plus one rounding. The subjects of a case alternate.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

import kernel_pytorch as kp
from kernel_pytorch import benchmarking
from kernel_pytorch.cli.bench import measurement_table
from kernel_pytorch.evidence import Measurement, Quantiles, clean_commit, evidence_directory, write_record
from kernel_pytorch.hardware_abstraction.registry import backend
from kernel_pytorch.hardware_abstraction.timing import quantiles, require_quiet, sample_seconds

MASK = kp.masks.causal() & (kp.masks.window(1024) | kp.masks.sinks(64))


class Attends(torch.nn.Module):
    """Attention with a window and sinks, by our operator or by torch's with a dense mask."""

    def __init__(self, length: int, ours: bool) -> None:
        super().__init__()
        self.ours = ours
        if not ours:
            self.register_buffer("dense", MASK.dense(length, length)[0, 0])

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.ours:
            return kp.attention(q, k, v, MASK)
        grouped = q.shape[1] != k.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, self.dense, enable_gqa=grouped)


class Block(torch.nn.Module):
    """A Llama block."""

    def __init__(self, length: int, dim: int, heads: int, ours: bool) -> None:
        super().__init__()
        self.heads, self.ours = heads, ours
        self.attends = Attends(length, ours)
        self.first, self.second = (torch.nn.Parameter(torch.ones(dim)) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim, bias=False), torch.nn.Linear(dim, dim, bias=False)
        self.gate_up, self.down = (
            torch.nn.Linear(dim, 6 * dim, bias=False),
            torch.nn.Linear(3 * dim, dim, bias=False),
        )

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.ours:
            return kp.rms_norm(x, weight, 1e-6)
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm(x, self.first)).unflatten(-1, (3, self.heads, -1))
        y = self.attends(*(part.transpose(1, 2) for part in qkv.unbind(2)))
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm(x, self.second)).chunk(2, dim=-1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


@dataclass(frozen=True)
class Subject:
    """A case: a model with our operators, the same model with torch's only, and the inputs' shapes."""

    ours: torch.nn.Module
    plain: torch.nn.Module
    shapes: tuple[tuple[int, ...], ...]


def cases(small: bool) -> dict[str, Callable[[], Subject]]:
    length, dim, heads = (256, 64, 4) if small else (8192, 4096, 32)

    def block() -> Subject:
        ours, plain = Block(length, dim, heads, True), Block(length, dim, heads, False)
        plain.load_state_dict(ours.state_dict(), strict=False)
        return Subject(ours, plain, ((1, length, dim),))

    def attention() -> Subject:
        own = (1, heads, 2 * length, dim // heads)
        return Subject(Attends(2 * length, True), Attends(2 * length, False), (own,) * 3)

    def norm() -> Subject:
        class Norm(torch.nn.Module):
            def __init__(self, ours: bool) -> None:
                super().__init__()
                self.ours = ours

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return kp.rms_norm(x) if self.ours else torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)

        return Subject(Norm(True), Norm(False), ((2 * length, dim),))

    return {
        f"Llama block {length}x{dim}, window and sinks": block,
        f"attention {2 * length}, window and sinks": attention,
        f"RMS norm {2 * length}x{dim}": norm,
    }


ALONE = """
import sys
sys.modules["kernel_pytorch"] = None  # importing it is an error from here on
import torch
inputs = torch.load(sys.argv[2])
torch.save(torch._inductor.aoti_load_package(sys.argv[1])(*inputs), sys.argv[3])
"""


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest error relative to the amax of its row."""
    largest = exact.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(exact.dtype).tiny)
    return float(((found.double() - exact) / largest).abs().max())


def measured(
    name: str,
    make: Callable[[], Subject],
    device: kp.Device,
    seconds: float,
    rounds: int,
    used: set[tuple[str, str]],
) -> list[Measurement]:
    torch.manual_seed(0)
    where = str(device.torch_device)
    dtype = torch.float32 if device.backend == "cpu" else torch.bfloat16
    subject = make()
    ours, plain = (model.eval().to(where, dtype) for model in (subject.ours, subject.plain))
    inputs = tuple(torch.randn(*shape, device=where, dtype=dtype) for shape in subject.shapes)
    with torch.no_grad():
        exact = copy.deepcopy(ours).double()(*(x.double() for x in inputs))
        budget = 2 * relative_error(ours(*inputs), exact) + torch.finfo(dtype).eps
    package = kp.lower(ours, inputs, backend=device.backend, runtime="aoti")
    print(package.report, file=sys.stderr)
    used |= {(call.op, call.kernel) for call in package.report.calls}
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / file) for file in ("model.pt2", "inputs.pt", "outputs.pt")]
        package.save(paths[0])
        torch.save(inputs, paths[1])
        done = subprocess.run([sys.executable, "-c", ALONE, *paths], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
        error = relative_error(torch.load(paths[2]), exact)
    if error > budget:
        raise benchmarking.GateError(f"{name}: error {error:.3g} exceeds {budget:.3g}")
    loaded = package.load()
    runs = {
        "kernel:package": lambda: loaded(*inputs),
        "baseline:torch.compile of the same model": torch.compile(ours, fullgraph=True),
        "baseline:torch.compile with torch's operators": torch.compile(plain, fullgraph=True),
        "baseline:eager": ours,
    }
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        for who, run in runs.items():
            call = run if who.startswith("kernel") else lambda run=run: run(*inputs)
            with torch.no_grad():
                taken.setdefault(who, []).extend(sample_seconds(call, device, seconds))
            print(f"{name}: {who}: {statistics.median(taken[who]) * 1e6:.1f} us", file=sys.stderr)
    number_format = str(dtype).removeprefix("torch.")
    return [
        Measurement(
            name, "forward", number_format, who, Quantiles(*quantiles(times)), len(times), 0, 0,
            error=error if who.startswith("kernel") else None, budget=budget if who.startswith("kernel") else None,
        )
        for who, times in taken.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="keep the result in benchmarks/evidence")
    parser.add_argument("--small", action="store_true", help="sizes for trying the program out")
    parser.add_argument("--seconds", type=float, default=1.0, help="time to sample each subject for, in each round")
    parser.add_argument("--rounds", type=int, default=3, help="how often the subjects of a case take turns")
    arguments = parser.parse_args()
    device = kp.device()
    if arguments.record and arguments.small:
        parser.error("--small is for trying the program out: nothing is recorded")
    commit = clean_commit(benchmarking.checkout()) if arguments.record else ""
    if arguments.record:
        require_quiet(device)
    measurements: list[Measurement] = []
    used: set[tuple[str, str]] = set()
    for name, make in cases(arguments.small).items():
        measurements += measured(name, make, device, arguments.seconds, arguments.rounds, used)
    Console().print(measurement_table(measurements))
    folder = evidence_directory()
    if arguments.record and folder is not None:
        kernels = [kernel for kernel in backend(device.backend).kernels if (kernel.op, kernel.name) in used]
        evidence = benchmarking.record(
            "aoti", device, kernels, measurements, command="python benchmarks/aoti.py --record", commit=commit,
            parts=("lowering/inlining.py", "lowering/package.py"),
        )  # fmt: skip
        write_record(evidence, folder / benchmarking.record_name("aoti", device))


if __name__ == "__main__":
    main()
