"""Benchmark attention on one device: our kernels against PyTorch's SDPA and FlexAttention.

Every kernel that supports the call is pinned and timed, forward and backward separately. The baselines are PyTorch's
SDPA backends for full and causal masks, and compiled FlexAttention for all others. On a CPU, where FlexAttention has
no backward, SDPA gets the other masks as dense tensors too.

Run it with ``python benchmarks/attention.py``; add ``--record`` in a clean checkout to keep the result, from which
later calls choose their kernels. ``--only REGEX`` selects workloads. ``--state FILE --seconds N`` splits a run into
several, at one commit on one kind of device; the exit status is 75 while workloads are left. Each kernel is first
checked against float64, with each kind of mask at a small length. FlexAttention gets the mask as its users write it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import kernel_pytorch as kp
from kernel_pytorch import benchmarking, masks
from kernel_pytorch.benchmarking import UNFINISHED, Checkpoint
from kernel_pytorch.evidence import Measurement, Quantiles, clean_commit, versions, write_record
from kernel_pytorch.hardware_abstraction import Policy, select
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.op import Call, Kernel, Phase, registered_op
from kernel_pytorch.hardware_abstraction.rates import measure_rates
from kernel_pytorch.hardware_abstraction.registry import backend
from kernel_pytorch.hardware_abstraction.timing import quantiles, sample_seconds
from kernel_pytorch.masks.layout import LAYOUTS
from kernel_pytorch.testing.budget import Comparison, compare, exceeded

OP = registered_op("attention")
FUNCTION = function_of(OP)
SDPA = {
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
}
SLOW = 4.0
"""A subject is timed once if it takes this many times as long as the fastest, and a run takes 20 ms."""

MaskMod = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Pattern:
    """A kind of mask at any lengths, as a mask of ``kp.masks`` and as a mask function of FlexAttention."""

    name: str
    mask: Callable[[Workload], masks.Mask]
    flex: Callable[[Workload, str], MaskMod] | None = None
    """Return the mask function of a workload on a device; None if SDPA supports the mask."""
    per_head: bool = False


@dataclass(frozen=True)
class Workload:
    """One pattern at one shape."""

    pattern: Pattern
    length: int
    """The number of keys, and of queries if there is more than one."""
    dim: int
    batch: int = 1
    heads: int = 16
    kv_heads: int = 16
    one_query: bool = False

    @property
    def name(self) -> str:
        parts = ["one query, " if self.one_query else "", self.pattern.name]
        if self.heads != self.kv_heads:
            parts.append(f", {self.kv_heads} kv heads")
        if self.one_query:
            parts.append(f", batch {self.batch}")
        return f"{''.join(parts)} {self.length} d{self.dim}"

    @property
    def queries(self) -> int:
        return 1 if self.one_query else self.length

    @property
    def phases(self) -> tuple[Phase, ...]:
        return ("forward",) if self.one_query else ("forward", "backward")

    def small(self) -> Workload:
        """Return the same pattern at a length that float64 can check; equal for workloads that share their check."""
        length = min(self.length, 4096 if self.one_query else 1024)
        return replace(self, length=length, batch=1, heads=4, kv_heads=4 * self.kv_heads // self.heads)

    def arguments(self, number_format: str, device: str) -> dict[str, Any]:
        """Return the arguments of the op, by name."""
        dtype = getattr(torch, number_format)
        generator = None if device == "meta" else torch.Generator(device=device).manual_seed(0)
        kv_shape = (self.batch, self.kv_heads, self.length, self.dim)
        q, k, v = (
            torch.randn(shape, device=device, generator=generator).to(dtype)
            for shape in ((self.batch, self.heads, self.queries, self.dim), kv_shape, kv_shape)
        )
        mask = self.pattern.mask(self).simplified(self.queries, self.length)
        return {"q": q, "k": k, "v": v, "mask": mask, "scale": self.dim**-0.5, "wanted": "out"}

    def block_mask(self, device: str) -> Any:
        """Return the mask as a BlockMask of FlexAttention."""
        assert self.pattern.flex is not None
        per_head = self.heads if self.pattern.per_head else None
        mask_mod = self.pattern.flex(self, device)
        # In eager mode it evaluates the mask function on all pairs: 128 GiB for 16 heads of 32,768 tokens.
        pairs = (per_head or 1) * self.queries * self.length
        make = create_block_mask if pairs <= 1 << 31 else torch.compile(create_block_mask)
        return make(mask_mod, None, per_head, self.queries, self.length, device=device)


def random_blocks(percent: int, *, per_head: bool = False) -> Pattern:
    """Return random 128 x 128 tiles, per head or the same for all heads."""

    def table(work: Workload) -> torch.Tensor:
        generator = torch.Generator().manual_seed(percent)
        shape = (work.heads if per_head else 1, -(-work.queries // 128), -(-work.length // 128))
        return torch.rand(shape, generator=generator) < percent / 100

    def flex(work: Workload, device: str) -> MaskMod:
        there = table(work).to(device)
        if per_head:
            return lambda _b, h, i, j: there[h, i // 128, j // 128]
        return lambda _b, _h, i, j: there[0, i // 128, j // 128]

    name = f"random {percent} % of blocks" + (", one table per head" if per_head else "")
    return Pattern(name, lambda work: masks.blocks(table(work)), flex, per_head)


def windowed(window: int, sinks: int = 0) -> Pattern:
    """Return a causal window with optional sinks; narrower at small lengths, so that it still restricts attention."""

    def width(work: Workload) -> int:
        return window if work.length > 4 * window else work.length // 16

    def mask(work: Workload) -> masks.Mask:
        near = masks.window(width(work))
        return masks.causal() & (near | masks.sinks(sinks) if sinks else near)

    def flex(work: Workload, _device: str) -> MaskMod:
        first, left = work.length - work.queries, width(work)
        if sinks:
            return lambda _b, _h, i, j: (j <= i + first) & ((i + first - j <= left) | (j < sinks))
        return lambda _b, _h, i, j: (j <= i + first) & (i + first - j <= left)

    inner = f"(window({window}) | sinks({sinks}))" if sinks else f"window({window})"
    return Pattern(f"causal & {inner}", mask, flex)


def packed(count: int) -> Pattern:
    """Return documents of uneven lengths, the same in each run."""

    def lengths(work: Workload) -> list[int]:
        cuts = np.random.default_rng(0).choice(np.arange(1, work.length), size=count - 1, replace=False)
        found: list[int] = np.diff(np.sort(np.concatenate([[0], cuts, [work.length]]))).tolist()
        return found

    def flex(work: Workload, device: str) -> MaskMod:
        owner = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths(work))).to(device)
        return lambda _b, _h, i, j: (j <= i) & (owner[i] == owner[j])

    return Pattern(f"{count} documents, causal", lambda work: masks.documents(lengths(work), masks.causal()), flex)


FULL = Pattern("full", lambda _work: masks.full())
CAUSAL = Pattern("causal", lambda _work: masks.causal())


def gpu_workloads() -> Iterator[Workload]:
    """Yield workloads, the most important first, because ``--seconds`` cuts off the end. 2048 elements per token."""
    long = {dim: partial(Workload, dim=dim, heads=2048 // dim, kv_heads=2048 // dim) for dim in (128, 64)}
    for dim in (128, 64):
        yield long[dim](CAUSAL, 32768)
    yield Workload(CAUSAL, 8192, 128, batch=2, heads=32, kv_heads=8)
    yield Workload(CAUSAL, 65536, 128, heads=32, kv_heads=8, one_query=True)
    yield Workload(CAUSAL, 8192, 128, batch=16, heads=32, kv_heads=8, one_query=True)
    yield Workload(windowed(4096), 65536, 128, heads=32, kv_heads=8, one_query=True)
    yield Workload(windowed(4096, 64), 65536, 128, heads=32, kv_heads=8, one_query=True)
    yield Workload(random_blocks(10), 65536, 128, heads=32, kv_heads=8, one_query=True)
    for dim in (128, 64):
        yield long[dim](random_blocks(10), 32768)
        yield long[dim](FULL, 32768)
        yield long[dim](windowed(1024), 32768)
        yield long[dim](windowed(1024, 64), 32768)
        yield long[dim](packed(64), 65536)
    yield long[128](random_blocks(10, per_head=True), 32768)
    yield Workload(random_blocks(10), 32768, 128, heads=16, kv_heads=8)
    yield long[128](random_blocks(10), 16384)
    yield long[128](FULL, 16384)
    yield long[128](random_blocks(50), 32768)
    for dim in (128, 64):
        for length in (16384, 8192, 4096, 2048):
            yield replace(long[dim](CAUSAL, length), batch=16384 // length)
        yield replace(long[dim](FULL, 4096), batch=4)
        yield replace(long[dim](windowed(1024), 8192), batch=2)
        yield long[dim](packed(16), 16384)
    yield Workload(CAUSAL, 8192, 128, batch=2, heads=32, kv_heads=8, one_query=True)
    yield Workload(windowed(1024), 8192, 128, batch=8, heads=32, kv_heads=8, one_query=True)


def cpu_workloads() -> Iterator[Workload]:
    """Yield workloads, one of each kind first, because ``--seconds`` cuts off the end."""
    eight = partial(Workload, dim=64, heads=8, kv_heads=8)
    grouped = partial(Workload, dim=64, heads=8, kv_heads=2)
    yield eight(CAUSAL, 2048)
    yield grouped(CAUSAL, 2048)
    yield eight(windowed(205), 4096)
    yield grouped(CAUSAL, 16384, one_query=True)
    yield grouped(CAUSAL, 2048, batch=8, one_query=True)
    yield grouped(windowed(205), 16384, one_query=True)
    yield eight(CAUSAL, 256)
    yield eight(FULL, 256)
    yield eight(windowed(64), 512)
    yield eight(FULL, 1024)
    yield grouped(windowed(205), 2048)
    yield eight(windowed(205, 16), 4096)
    yield eight(packed(16), 4096)
    yield eight(random_blocks(10), 4096)


class Checks:
    """Checks of kernels against float64, once per kind of mask and shape; a kernel over its budget is not timed."""

    def __init__(self, device: kp.Device, console: Console) -> None:
        self.device, self.console = device, console
        self.known: dict[tuple[Workload, str, Phase, str], Comparison | None] = {}
        self.failed: list[str] = []

    def closest(self, work: Workload, number_format: str, phase: Phase, kernel: Kernel) -> Comparison | None:
        """Return the result closest to its budget; None if the kernel exceeds it or does not support the case."""
        key = (work.small(), number_format, phase, kernel.name)
        if key not in self.known:
            try:
                self.known[key] = self._compared(*key[:3], kernel)
            except Exception as error:  # another library may raise anything; continue with the other kernels
                self.known[key] = None
                self.fail(f"{kernel.name} on {key[0].name}, {phase}: {type(error).__name__}: {error}")
        return self.known[key]

    def fail(self, reason: str) -> None:
        self.failed.append(reason)
        self.console.print(f"not timed: {reason}", style="red", markup=False)

    def _compared(self, work: Workload, number_format: str, phase: Phase, kernel: Kernel) -> Comparison:
        arguments = work.arguments(number_format, str(self.device.torch_device)) | {"wanted": "grad"}
        pinned = FUNCTION.pinned(kernel.name)
        compared = compare(OP, pinned, arguments, gradients=phase == "backward")
        if exceeded(compared):
            raise benchmarking.GateError(exceeded(compared))
        return max(compared, key=lambda one: one.error / one.budget)


Subject = tuple[str, Callable[[], object], Comparison | None]


def our_kernels(
    work: Workload, phase: Phase, arguments: dict[str, Any], number_format: str, checks: Checks
) -> Iterator[Subject]:
    """Yield each kernel that supports the call, pinned; backward kernels get the results of the selected forward."""
    values = tuple(arguments.values())
    if phase == "backward":
        trained = (*values[:-1], "grad")
        out, lse = FUNCTION.run("forward", trained, Policy().encoded)
        values = (torch.randn_like(out), torch.zeros_like(lse), *values[:3], out, lse, *trained[3:])
    call = FUNCTION.call(phase, values)
    for kernel in backend(checks.device.backend).kernels:
        if kernel.language == "torch" and checks.device.backend != "cpu":
            continue  # takes seconds on a GPU, and is selected only as a last resort
        if kernel.op == OP.name and kernel.refusal(call, checks.device) is None:
            checked = checks.closest(work, number_format, phase, kernel)
            if checked is not None:
                pinned = Policy(kernel=kernel.name).encoded
                yield f"kernel:{kernel.name}", partial(FUNCTION.run, phase, values, pinned), checked


def baselines(work: Workload, phase: Phase, arguments: dict[str, Any]) -> Iterator[Subject]:
    q, k, v, mask, scale, _ = arguments.values()
    grouped = work.heads != work.kv_heads
    functions: dict[str, Callable[..., torch.Tensor]] = {}
    if mask.is_full or mask.is_causal:
        for name, choice in (SDPA if q.is_cuda else {"SDPA": None}).items():

            def sdpa(q: Any, k: Any, v: Any, choice: SDPBackend | None = choice) -> torch.Tensor:
                with sdpa_kernel(choice) if choice is not None else contextlib.nullcontext():
                    return torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=mask.is_causal, scale=scale, enable_gqa=grouped
                    )

            functions[name] = sdpa
    elif not q.is_cuda:
        dense = mask.dense(work.queries, work.length)
        functions["SDPA with the dense mask"] = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=dense, scale=scale, enable_gqa=grouped
        )
    if work.one_query and mask.node.constructors == ("causal", "window"):
        kept = round(mask.density(1, work.length) * work.length)
        functions["SDPA on the window's keys"] = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
            q, k[:, :, -kept:], v[:, :, -kept:], scale=scale, enable_gqa=grouped
        )
    if work.pattern.flex is not None and (q.is_cuda or phase == "forward"):
        block_mask = work.block_mask(str(q.device))
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        functions["compiled FlexAttention"] = lambda q, k, v: compiled(
            q, k, v, block_mask=block_mask, scale=scale, enable_gqa=grouped
        )
    for name, function in functions.items():
        if phase == "forward":
            yield f"baseline:{name}", partial(function, q, k, v), None
        else:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]

            def both(function: Any = function, leaves: Any = leaves) -> Callable[[], object]:
                out = function(*leaves)
                return partial(torch.autograd.grad, out, leaves, torch.randn_like(out), retain_graph=True)

            yield f"baseline:{name}", _Later(both), None


class _Later:
    """A backward whose forward runs on its first call."""

    def __init__(self, make: Callable[[], Callable[[], object]]) -> None:
        self.make = make
        self.run: Callable[[], object] | None = None

    def __call__(self) -> object:
        if self.run is None:
            self.run = self.make()
        return self.run()


def sampled(run: Callable[[], object], device: kp.Device, seconds: float, fastest: float) -> list[float]:
    """Return the seconds of each run; of only one run if it takes much longer than the fastest subject."""

    def once() -> float:
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        return time.perf_counter() - started

    once()  # compiles and loads
    taken = once()
    if taken > max(SLOW * fastest, 0.02):
        return [taken]
    return sample_seconds(run, device, seconds, least=5)


def _wait(device: kp.Device) -> None:
    if device.backend != "cpu":
        torch.get_device_module(str(device.torch_device)).synchronize()


def measure(work: Workload, number_format: str, checks: Checks, seconds: float) -> Iterator[Measurement]:
    arguments = work.arguments(number_format, str(checks.device.torch_device))
    call = FUNCTION.call("forward", tuple(arguments.values()))
    for phase in work.phases:
        fastest = float("inf")
        counted = replace(call, phase=phase)
        subjects = [
            *our_kernels(work, phase, arguments, number_format, checks),
            *baselines(work, phase, arguments),
        ]
        while subjects:  # popped, so that its tensors are freed before the next one runs
            subject, run, checked = subjects.pop(0)
            try:
                with torch.set_grad_enabled(phase == "backward"):
                    samples = sampled(run, checks.device, seconds, fastest)
            except Exception as error:  # such as an SDPA backend that does not support the call
                reason = f"{subject} on {work.name}, {phase}: {type(error).__name__}: {error}"
                if checked is not None:
                    checks.fail(reason)
                else:
                    checks.console.print(f"not timed: {reason.splitlines()[0][:160]}", markup=False)
                continue
            found = benchmarking.measurement(
                OP, counted, case=work.name, number_format=number_format, subject=subject, samples=samples,
                checked=checked,
            )  # fmt: skip
            fastest = min(fastest, found.seconds.median)
            yield found


def selected(work: Workload, row: Measurement, device: kp.Device) -> str:
    """Return the kernel that would be selected for this workload now."""
    arguments = work.arguments(row.format, "meta")
    forward = FUNCTION.call("forward", tuple(arguments.values()))
    if row.phase == "forward":
        return select(forward, device).kernel.name
    fakes = dict(zip(OP.outputs, OP.fake(*arguments.values()), strict=True))
    known = arguments | fakes | {f"d{name}": fake for name, fake in fakes.items()} | {"wanted": "grad"}
    call: Call = FUNCTION.call("backward", tuple(known[name] for name in OP.backward_names))
    return select(call, device).kernel.name


def summary(works: list[Workload], measurements: list[Measurement], device: kp.Device) -> Iterator[str]:
    """Yield a line per workload: TFLOP/s of each subject, and the selected kernel's relative to the best subject."""
    names = list(dict.fromkeys(row.subject.partition(":")[2] for row in measurements if row.flops))
    width = max([len(work.name) for work in works], default=0) + 4
    for number, name in enumerate(names):
        yield f"{chr(ord('a') + number)}: {name}"
    letters = "".join(f"{chr(ord('a') + number):>8}" for number in range(len(names)))
    yield f"{'TFLOP/s':{width}} phase    {letters}  over the best: selected, our fastest"
    for work in works:
        rows = [row for row in measurements if row.case == work.name]
        for number_format, phase in dict.fromkeys((row.format, row.phase) for row in rows):
            own = [row for row in rows if (row.format, row.phase) == (number_format, phase)]
            times = {row.subject: row.seconds.median for row in own}
            rates = {row.subject.partition(":")[2]: row.flops / row.seconds.median / 1e12 for row in own}
            cells = "".join(f"{f'{rates[name]:.3g}' if name in rates else '':>8}" for name in names)
            chosen, best = selected(work, own[0], device), min(times.values())
            ours = {name: time for name, time in times.items() if name.startswith("kernel:")}
            ratios = ""
            if f"kernel:{chosen}" in ours:
                ratios += f"{chosen} {best / ours[f'kernel:{chosen}']:.2f}"
            if ours:
                first = min(ours, key=ours.__getitem__)
                ratios += f", {first.removeprefix('kernel:')} {best / ours[first]:.2f}"
            short = "" if number_format == "bfloat16" else f" {number_format[0]}{number_format[-2:]}"
            yield f"{work.name + short:{width}} {phase:9}{cells}  {ratios}"


def mask_costs(works: list[Workload]) -> Iterator[Measurement]:
    """Measure the time to build each mask, including the tiles on the device."""
    for work in works:
        if work.length != 32768 or work.dim != 128 or work.kv_heads != work.heads or work.pattern.flex is None:
            continue

        def ours(work: Workload = work) -> None:
            LAYOUTS.clear()
            known = work.pattern.mask(work).layout(work.length, work.length)
            known.walk(64, 64, device="cuda")
            known.walk(64, 64, by_key=True, device="cuda")
            known.intervals("cuda")

        flex = partial(work.block_mask, "cuda")
        for subject, function in (("kernel:kp.masks", ours), ("baseline:create_block_mask", flex)):
            times = []
            for _ in range(3):
                torch.cuda.synchronize()
                started = time.perf_counter()
                function()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
            yield Measurement(
                case=f"build the mask: {work.pattern.name} {work.length}",
                phase="forward",
                format="bfloat16",
                subject=subject,
                seconds=Quantiles(*quantiles(times)),
                samples=len(times),
                traffic_bytes=0,
                flops=0,
            )


def memory() -> Iterator[Measurement]:
    """Measure peak memory of forward plus backward at growing lengths, including the mask's own tensors."""
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
    parser.add_argument("--device", help="a torch device; the best here when left out")
    parser.add_argument("--only", default="", help="a regular expression: the workloads whose names it finds")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new workloads after this long")
    parser.add_argument("--state", type=Path, help="keep finished workloads in this file, and go on where it ends")
    parser.add_argument("--sample", type=float, default=0.05, help="seconds for one measurement, about")
    arguments = parser.parse_args()
    if arguments.record and arguments.only:
        parser.error("--record keeps all workloads of one run: leave out --only")
    commit = clean_commit(benchmarking.checkout()) if arguments.record else ""
    console, device = Console(soft_wrap=True), kp.device(arguments.device)
    started = time.perf_counter()
    bandwidth = measure_rates(device).bandwidth if arguments.record else None
    gpu = device.backend != "cpu"
    works = [work for work in (gpu_workloads() if gpu else cpu_workloads()) if re.search(arguments.only, work.name)]
    checks = Checks(device, console)
    libraries = [name for name in ("flash_attn", "cudnn") if gpu and importlib.util.find_spec(name) is not None]
    name = benchmarking.record_name("attention-libraries" if libraries else "attention", device)
    state = Checkpoint(arguments.state, (commit, device.name, versions(), libraries, arguments.sample), Measurement)
    others = "masks and memory"

    def keep() -> list[Measurement]:
        rows = [row for case in (others, *(work.name for work in works)) for row in state.rows.get(case, ())]
        timed = {row.subject for row in rows}
        kernels = [kernel for kernel in backend(device.backend).kernels if kernel.op == OP.name]
        if arguments.record and rows:
            record = benchmarking.record(
                OP.name,
                device,
                [kernel for kernel in kernels if f"kernel:{kernel.name}" in timed],
                rows,
                command="python benchmarks/attention.py --record",
                commit=commit,
                copy_bandwidth=bandwidth,
            )
            write_record(record, arguments.out / name)
        return rows

    left = []
    for work in works:
        if work.name in state.rows:
            continue
        if time.perf_counter() - started > arguments.seconds:
            left.append(work.name)
            console.print(f"left out for lack of time: {work.name}", markup=False)
            continue
        measured: list[Measurement] = []
        torch._dynamo.reset()  # past its recompile limit torch.compile runs FlexAttention unfused, without an error
        for number_format in ("bfloat16",) if gpu else ("float32", "bfloat16"):
            for row in measure(work, number_format, checks, arguments.sample):
                measured.append(row)
                rate = f"{row.flops / row.seconds.median / 1e12:8.3g} TFLOP/s"
                console.print(
                    f"{time.perf_counter() - started:5.0f} s {row.case:52} {row.format:8} {row.phase:8} "
                    f"{row.subject:32} {row.seconds.median * 1e3:8.3f} ms {rate}",
                    markup=False,
                    highlight=False,
                )
        state.add(work.name, measured)
        keep()  # after every workload, in case a later one fails
    if gpu and others not in state.rows:
        if time.perf_counter() - started > arguments.seconds:
            left.append(others)
        else:
            state.add(others, [*mask_costs(works), *(() if arguments.only else memory())])
    measurements = keep()
    for line in summary(works, measurements, device):
        console.print(line, markup=False, highlight=False)
    if checks.failed:
        raise SystemExit("\n".join(["kernels that were not timed:", *checks.failed]))
    if left and arguments.state:
        raise SystemExit(UNFINISHED)


if __name__ == "__main__":
    main()
