"""Recorded times order the kernels for calls near the recorded ones, and for no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch.evidence import Benchmark, Facts, Measurement, Quantiles, evidence_directory, write_record
from kernel_pytorch.hardware_abstraction import registry
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import forget_choices
from kernel_pytorch.hardware_abstraction.op import Call, Kernel, Phase, Problem, TensorSpec
from kernel_pytorch.hardware_abstraction.records import recorded_runs
from kernel_pytorch.hardware_abstraction.selection import Choice, Policy, select
from kernel_pytorch.masks import Mask, causal, full, sinks, window
from kernel_pytorch.ops.attention import KERNEL_TILED

H200 = kp.device("nvidia/h200")
CAUSAL, NO_POLICY = causal(), Policy()
Times = Mapping[str, float]


def attention_call(
    mask: Mask = CAUSAL,
    *,
    phase: Phase = "forward",
    length: int = 4096,
    queries: int | None = None,
    heads: int = 16,
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> Call:
    """An attention call; the kernels of these tests look at nothing else of a backward."""
    q_shape, k_shape = (1, heads, queries or length, dim), (1, heads, length, dim)
    q, k = (
        TensorSpec(shape, torch.empty(shape, device="meta").stride(), dtype, "cuda:0")
        for shape in (q_shape, k_shape)
    )
    arguments = (("q", q), ("k", k), ("v", k), ("mask", mask), ("scale", 0.125), ("wanted", "grad"))
    return Call("attention", phase, arguments)


def row(kernel: str, seconds: float, call: Call, case: str = "measured") -> Measurement:
    return Measurement(
        case=case,
        phase=call.phase,
        format="bfloat16",
        subject=f"kernel:{kernel}",
        seconds=Quantiles(seconds, seconds, seconds),
        samples=9,
        traffic_bytes=0,
        flops=0,
        problem=call.problem,
    )


def benchmark(rows: list[Measurement], arch: str = "sm_90", recorded: str = "2026-11-01T00:00:00Z") -> Benchmark:
    return Benchmark(
        op="attention",
        device=Facts("NVIDIA H200", "nvidia", "nvidia", arch, 1 << 37, 132),
        versions={},
        commit="0123456789" * 4,
        command="",
        recorded=recorded,
        copy_bandwidth=4e12,
        sources={},
        measurements=rows,
    )


def kernel(name: str, supports: Callable[[Call, Device], str | None] = lambda *_: None) -> Kernel:
    return dataclasses.replace(KERNEL_TILED, name=name, supports=supports)


class Bench:
    """A backend with kernels and records of these tests."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.list("first", "second", "third")

    def list(self, *kernels: str | Kernel) -> None:
        listed = tuple(kernel(one) if isinstance(one, str) else one for one in kernels)
        record = dataclasses.replace(registry.backend("nvidia"), kernels=listed, evidence=self.folder)
        self.monkeypatch.setitem(registry._load().backends, "nvidia", record)
        forget_choices()

    def record(self, times: Times, call: Call, name: str = "attention.h200", **facts: str) -> None:
        rows = [row(known, seconds, call) for known, seconds in times.items()]
        write_record(benchmark(rows, **facts), self.folder / f"{name}.json")
        forget_choices()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    yield Bench(tmp_path, monkeypatch)
    monkeypatch.undo()
    forget_choices()


def chosen(call: Call, device: Device = H200, policy: Policy = NO_POLICY) -> str:
    return select(call, device, policy).kernel.name


TIMES = {"first": 3e-3, "second": 2e-3, "third": 1e-3}


def test_the_fastest_recorded_kernel_is_chosen_and_its_record_is_cited(bench: Bench) -> None:
    assert chosen(attention_call()) == "first"
    bench.record({"first": 1.9e-3, "second": 1.5234e-3}, attention_call())
    choice = select(attention_call(), H200)
    assert str(choice).splitlines()[2:] == [
        "-> second  the fastest recorded near this call: 1.52 ms",
        "   first   fits; recorded 1.9 ms",
        "   third   fits; ranked after second",
        "recorded in attention.h200 at commit 0123456: measured, bfloat16, forward; changed since: first, second",
    ]


def test_a_kernel_whose_source_is_the_measured_one_has_not_changed(bench: Bench) -> None:
    rows = [row(name, seconds, attention_call()) for name, seconds in TIMES.items()]
    sources = {"first": KERNEL_TILED.source_digest, "second": "another", "third": KERNEL_TILED.source_digest}
    write_record(msgspec.structs.replace(benchmark(rows), sources=sources), bench.folder / "attention.h200.json")
    assert str(select(attention_call(), H200)).endswith("; changed since: second")


@pytest.mark.parametrize(
    "near",
    [
        attention_call(length=16384),
        attention_call(length=1024),
        attention_call(heads=4),
        attention_call(dim=64),
        attention_call(dtype=torch.float16),
        attention_call(window(1 << 20)),  # the same as causal at this length
    ],
    ids=lambda call: call.problem.kind + str(list(call.problem.sizes.values())),
)
def test_a_record_orders_the_kernels_of_similar_calls(bench: Bench, near: Call) -> None:
    bench.record(TIMES, attention_call())
    assert chosen(near) == "third"


@pytest.mark.parametrize(
    "unlike",
    [
        attention_call(length=16400),
        attention_call(length=1023),
        attention_call(queries=1000),
        attention_call(heads=3),
        attention_call(dtype=torch.float32),
        attention_call(full()),
        attention_call(causal() & window(64)),
        attention_call(causal() & (window(64) | sinks(4))),
        attention_call(phase="backward"),
    ],
    ids=lambda call: f"{call.phase} {call.problem.kind}{list(call.problem.sizes.values())}",
)
def test_the_backends_order_stands_for_other_calls(bench: Bench, unlike: Call) -> None:
    bench.record(TIMES, attention_call())
    choice = select(unlike, H200)
    assert choice.run is None
    assert [verdict.kernel for verdict in choice.verdicts] == ["first", "second", "third"]
    assert "in the backend's order" in choice.verdicts[0].reason


def test_a_record_holds_for_its_architecture(bench: Bench) -> None:
    bench.record(TIMES, attention_call())
    assert chosen(attention_call(), kp.device("nvidia/h100")) == "third"
    assert chosen(attention_call(), kp.device("nvidia/a100")) == "first"
    bench.record(TIMES, attention_call(), arch="sm_80")
    assert chosen(attention_call(), kp.device("nvidia/a100")) == "third"
    assert chosen(attention_call()) == "first"


def test_the_number_of_keys_that_a_query_attends_to_counts(bench: Bench) -> None:
    narrow, wide = (attention_call(causal() & window(size)) for size in (64, 1024))
    bench.record({"first": 2e-3, "second": 1e-3}, narrow, "narrow")
    bench.record({"first": 1e-3, "second": 2e-3}, wide, "wide")
    assert chosen(attention_call(causal() & window(100))) == "second"
    assert chosen(attention_call(causal() & window(700))) == "first"


def test_the_nearest_run_decides(bench: Bench) -> None:
    bench.record({"first": 1e-3, "second": 2e-3}, attention_call(length=16384), "long")
    bench.record({"first": 2e-3, "second": 1e-3}, attention_call(length=2048), "short")
    assert [chosen(attention_call(length=length)) for length in (2000, 4096, 8192, 32768)] == [
        "second",
        "second",
        "first",
        "first",
    ]


def test_of_equally_near_runs_that_with_most_kernels_decides_then_the_latest(bench: Bench) -> None:
    call = attention_call()
    bench.record({"first": 1e-3, "second": 2e-3}, call, "a", recorded="2026-01-01T00:00:00Z")
    bench.record({"first": 2e-3, "second": 1e-3}, call, "b", recorded="2026-02-01T00:00:00Z")
    assert chosen(call) == "second"
    bench.record(TIMES, call, "c", recorded="2025-01-01T00:00:00Z")
    assert chosen(call) == "third"


def test_forward_and_backward_are_selected_separately(bench: Bench) -> None:
    forward, backward = attention_call(), attention_call(phase="backward")
    rows = [row("first", 2e-3, forward), row("second", 1e-3, forward)]
    rows += [row("first", 3e-3, backward), row("second", 4e-3, backward)]
    write_record(benchmark(rows), bench.folder / "attention.h200.json")
    assert (chosen(forward), chosen(backward)) == ("second", "first")


def test_a_kernel_that_refuses_the_call_takes_no_part(bench: Bench) -> None:
    bench.list("first", "second", kernel("third", lambda *_: "is not installed"))
    bench.record(TIMES, attention_call())
    choice = select(attention_call(), H200)
    assert choice.kernel.name == "second"
    assert {verdict.kernel: verdict.reason for verdict in choice.verdicts}["third"] == "is not installed"


def test_kernels_that_were_not_timed_keep_their_places(bench: Bench) -> None:
    bench.list("new", "first", "second", "other")
    bench.record({"first": 2e-3, "second": 1e-3}, attention_call())
    choice = select(attention_call(), H200)
    assert [verdict.kernel for verdict in choice.verdicts] == ["new", "second", "first", "other"]
    assert choice.verdicts[0].reason == "the first in the backend's order that fits"
    assert choice.verdicts[1].reason == "fits; recorded 1 ms"


def test_one_timed_kernel_orders_nothing(bench: Bench) -> None:
    bench.record({"third": 1e-3, "absent": 1e-4}, attention_call())
    assert select(attention_call(), H200).run is None


def test_pins_and_measured_times_precede_records(bench: Bench) -> None:
    bench.record(TIMES, attention_call())
    assert chosen(attention_call(), policy=Policy(kernel="first")) == "first"
    measured = select(attention_call(), H200, Policy(measure=True), (("first", 1e-6), ("third", 2e-6)))
    assert measured.kernel.name == "first"
    assert measured.run is None
    unmeasured = select(attention_call(), H200, Policy(measure=True))
    assert unmeasured.verdicts[0].reason == "the fastest recorded near this call: 1 ms; not measured here"


def test_records_without_problems_and_other_ops_are_left_alone(bench: Bench) -> None:
    old = [
        msgspec.structs.replace(row(name, seconds, attention_call()), problem=None)
        for name, seconds in TIMES.items()
    ]
    write_record(benchmark(old), bench.folder / "attention.old.json")
    other = msgspec.structs.replace(benchmark([row("third", 1e-3, attention_call())]), op="rms_norm")
    write_record(other, bench.folder / "rms_norm.h200.json")
    forget_choices()
    assert select(attention_call(), H200).run is None


def test_a_record_that_cannot_be_read_is_a_warning(bench: Bench) -> None:
    bench.record(TIMES, attention_call())
    (bench.folder / "broken.json").write_text("{}")
    with pytest.warns(UserWarning, match="broken.json is not a valid record: .*; it orders no kernels"):
        assert chosen(attention_call()) == "third"


def test_a_backend_without_evidence_keeps_its_order() -> None:
    assert recorded_runs(None) == ()
    assert recorded_runs(Path("a folder that is not there")) == ()


# What ships.


def from_problem(problem: Problem, phase: Phase) -> Call | None:
    """A call of a recorded problem, for the kinds whose mask follows from it."""
    sizes = problem.sizes
    width, _, mask_kind = problem.kind.partition(" ")
    mask: dict[str, Mask] = {
        "full": full(),
        "causal": causal(),
        "causal window": causal() & window(sizes["attended"]),
        "causal window sinks": causal() & (window(sizes["attended"]) | sinks(4)),
    }
    if mask_kind not in mask:
        return None
    shapes = {
        name: (1, heads, length, sizes[dim])
        for name, heads, length, dim in (
            ("q", sizes["heads"], sizes["queries"], "head_dim"),
            ("k", sizes["heads"] // sizes["group"], sizes["keys"], "head_dim"),
            ("v", sizes["heads"] // sizes["group"], sizes["keys"], "value_dim"),
        )
    }
    dtype = {"16-bit": torch.bfloat16, "32-bit": torch.float32}[width.removesuffix(",")]
    specs = [
        (name, TensorSpec(shape, torch.empty(shape, device="meta").stride(), dtype, "cpu"))
        for name, shape in shapes.items()
    ]
    return Call("attention", phase, (*specs, ("mask", mask[mask_kind]), ("scale", 0.125), ("wanted", "grad")))


def test_our_own_records_order_kernels() -> None:
    runs = [run for run in recorded_runs(evidence_directory()) if run.op == "attention" and len(run.seconds) > 1]
    calls = [(run, call) for run in runs if (call := from_problem(run.problem, run.phase)) is not None]
    assert calls, "no record of attention orders kernels: make one with python benchmarks/attention.py --record"
    decided = 0
    for run, call in calls:
        device = next(known for known in registry.backend(run.backend).catalogue if known.arch == run.arch)
        choice: Choice = select(call, device)
        if choice.run is not None:
            decided += 1
            fits = {verdict.kernel for verdict in choice.verdicts if verdict.chosen or "fits" in verdict.reason}
            fastest = min(fits & choice.run.seconds.keys(), key=choice.run.seconds.__getitem__)
            assert choice.kernel.name == fastest or choice.kernel.name not in choice.run.seconds, str(choice)
    assert decided
