"""Kernels built for hardware that is not here, and the committed record of it, made anew and compared."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_pytorch.evidence import Checks, Compilation, Interpretation, read_record
from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE
from kernel_pytorch.hardware_abstraction.op import Op, registered_op
from kernel_pytorch.ops.rms_norm import KERNEL_TRITON
from kernel_pytorch.testing.checks import make_checks
from kernel_pytorch.testing.cross_compile import cross_compile

ARCHITECTURES = {"sm_80", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100"}
COMMITTED = Path(__file__).parents[1] / "benchmarks" / "evidence" / "rms_norm.checks.json"
REMEDY = "make the record anew: python -m kernel_pytorch.testing.checks rms_norm --write"


@pytest.fixture(scope="module")
def op() -> Op:
    return registered_op("rms_norm")


@pytest.fixture(scope="module")
def checks(op: Op) -> Checks:
    return make_checks(op)


@pytest.fixture(scope="module")
def committed() -> Checks:
    assert COMMITTED.exists(), f"{COMMITTED.name} is missing; {REMEDY}"
    record = read_record(COMMITTED)
    assert isinstance(record, Checks)
    return record


def key(row: Compilation) -> tuple[str, ...]:
    return row.kernel, row.function, row.arch, row.case, row.format


def triton_functions() -> set[str]:
    """The kernels in the module's text; importing it would tell nothing where kernels are interpreted."""
    spec = importlib.util.find_spec(KERNEL_TRITON.module)
    assert spec is not None
    assert spec.origin is not None
    functions = [
        node for node in ast.parse(Path(spec.origin).read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    return {node.name for node in functions if "triton.jit" in map(ast.unparse, node.decorator_list)}


def test_every_function_is_built_for_every_architecture(checks: Checks) -> None:
    functions = triton_functions()
    assert functions
    built = {(row.function, row.arch) for row in checks.compiled}
    assert {(function, arch) for function in functions for arch in ARCHITECTURES} <= built
    assert {row.function for row in checks.compiled} == functions
    assert len({key(row) for row in checks.compiled}) == len(checks.compiled)


def test_every_benchmark_case_and_the_odd_one_are_built_forward_and_backward(checks: Checks, op: Op) -> None:
    cases = {case.name for case in op.cases if case.benchmark} | {op.odd_case}
    for phase in ("_forward", "_backward"):
        built = {(row.arch, row.case) for row in checks.compiled if row.function.startswith(phase)}
        assert {(arch, case) for arch in ARCHITECTURES for case in cases} <= built


def test_every_catalogue_architecture_that_triton_builds_for_is_there(checks: Checks) -> None:
    known = {device.arch for device in CATALOGUE.values() if device.backend in ("nvidia", "amd")}
    assert {row.arch for row in checks.compiled} == known


def test_kernels_fit_the_device_without_spilling(checks: Checks) -> None:
    shared = {device.arch: device.shared_memory_bytes for device in CATALOGUE.values()}
    for row in checks.compiled:
        assert 0 < row.registers <= 512, row
        assert row.spill_bytes == 0, row
        assert 0 <= row.shared_memory_bytes <= shared[row.arch], row


def test_every_small_case_passes_in_the_interpreter(checks: Checks, op: Op) -> None:
    small = [case.name for case in op.cases if not case.benchmark]
    assert checks.interpreted == [Interpretation("triton", name, small) for name in ("float32", "float16")]


def test_the_committed_record_is_about_the_present_sources(checks: Checks, committed: Checks) -> None:
    assert committed.sources == checks.sources, REMEDY


def test_the_committed_record_lists_what_compiles_now(checks: Checks, committed: Checks) -> None:
    assert {key(row) for row in committed.compiled} == {key(row) for row in checks.compiled}, REMEDY
    assert committed.op == checks.op


def test_the_committed_record_lists_what_the_interpreter_passes_now(checks: Checks, committed: Checks) -> None:
    assert committed.interpreted == checks.interpreted, REMEDY


def test_compiling_under_the_interpreter_is_refused(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match=r"TRITON_INTERPRET=1 is set: .* cannot be compiled; unset it"):
        cross_compile(KERNEL_TRITON, CATALOGUE["nvidia/h200"], op.case("one-row"), "float32")


BROKEN_KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def _forward(x, y, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    tl.store(y + column, tl.load(x + column) BROKEN)


def forward(device, x, weight, eps):
    y = torch.empty_like(x)
    _forward[(1,)](x, y, BLOCK=64)
    return y, x.new_empty(x.shape[:-1])
"""
COMPILE_IT = """
from kernel_pytorch.hardware_abstraction import Kernel, registered_op
from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE
from kernel_pytorch.testing.cross_compile import cross_compile

kernel = Kernel(
    op="rms_norm", name="own", module="own_kernel", supports=lambda *_: None, language="triton", backward=False
)
rows = cross_compile(kernel, CATALOGUE["DEVICE"], registered_op("rms_norm").case("one-row"), "float32")
assert [row.function for row in rows] == ["_forward"], rows
"""


@pytest.mark.parametrize("device", ["nvidia/h200", "amd/mi300x"])
@pytest.mark.parametrize(
    ("change", "error"),
    [("* 2", ""), ("+ tl.arange(0, 2 * BLOCK)", "CompilationError"), (".no_such_thing()", "AttributeError")],
    ids=["right", "shapes-differ", "no-such-function"],
)
def test_a_kernel_that_does_not_compile_raises(tmp_path: Path, device: str, change: str, error: str) -> None:
    """In a process of its own, for here kernels may be interpreted; the right kernel shows the others can fail."""
    (tmp_path / "own_kernel.py").write_text(BROKEN_KERNEL.replace("BROKEN", change))
    (tmp_path / "compile_it.py").write_text(COMPILE_IT.replace("DEVICE", device))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "compile_it.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == bool(error), done.stderr
    assert error in done.stderr
