"""Kernels cross-compiled for absent hardware, compared with the committed record."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernel_pytorch.evidence import Checks, Compilation, Interpretation, read_record
from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE
from kernel_pytorch.hardware_abstraction.op import Case, Kernel, Op, registered_op
from kernel_pytorch.ops import rms_norm
from kernel_pytorch.testing import BackendContract
from kernel_pytorch.testing.checks import compile_targets, make_checks, refuses, triton_kernels, triton_ops
from kernel_pytorch.testing.contract import prepared
from kernel_pytorch.testing.cross_compile import cross_compile
from kernel_pytorch.testing.devices import test_device

ARCHITECTURES = {"sm_80", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100"}
# Compiled again for one architecture of each vendor; the record has all.
REBUILT = ("sm_90", "gfx942")
EVIDENCE = Path(__file__).parents[2] / "benchmarks" / "evidence"
# Attention kernels may spill: a tile of scores and the accumulators are in registers.
_FP8 = {"fp8_cast", "fp8_rms_norm", "fp8_swiglu", "fp8_swiglu_grad"}
MAY_SPILL = {"attention", "score_mod_attention", "paged_attention"} | _FP8


def remedy(op: Op) -> str:
    return f"make the record anew: python -m kernel_pytorch.testing.checks {op.name} --write"


# One op at a time: pytest keeps the tests of one parameter together, so each record is made once.


@pytest.fixture(scope="module", params=[op.name for op in triton_ops()])
def op(request: pytest.FixtureRequest) -> Op:
    return registered_op(request.param)


@pytest.fixture(scope="module")
def committed(op: Op) -> Checks:
    path = EVIDENCE / f"{op.name}.checks.json"
    assert path.exists(), f"no record {path.name}; {remedy(op)}"
    record = read_record(path)
    assert isinstance(record, Checks)
    return record


@pytest.fixture(scope="module")
def checks(op: Op, committed: Checks) -> Checks:
    """The record made anew; minutes for a large kernel, so only where there is one to compare it with."""
    return make_checks(op, interpret=interpreted_here(op), architectures=REBUILT)


def interpreted_here(op: Op) -> bool:
    """Whether the record's cases are interpreted in this file; the contract in tests/backends does it as well."""
    return op.name == "rms_norm" or test_device("nvidia").present


class _Nvidia(BackendContract):
    backend_name = "nvidia"


class _Contract:
    """Collect the parameters that the contract passes to pytest."""

    fixturenames = ("kernel", "case", "number_format")

    def __init__(self, contract: BackendContract) -> None:
        self.held: list[tuple[Kernel, Case, str]] = []
        contract.pytest_generate_tests(self)

    def parametrize(self, names: str, rows: list[tuple[Kernel, Case, str]], ids: list[str]) -> None:
        self.held += rows


def interpreted(op: Op, kernel: Kernel, checks: Checks) -> list[Interpretation]:
    """The cases that pass in the interpreter: from the new record, or from the contract with the same budget.

    Both run a kernel on the first device that it is compiled for, on poisoned memory, and compare outputs and
    gradients with float64. Once is enough; that it is done, and skipped for no case, is seen here.
    """
    if interpreted_here(op):
        return [row for row in checks.interpreted if row.kernel == kernel.name]
    device = test_device("nvidia")
    assert compile_targets(kernel)[0] == device
    held: dict[str, list[str]] = {}
    for one, case, number_format in _Contract(_Nvidia()).held:
        if one == kernel:
            with prepared(kernel, device, case, getattr(torch, number_format)) as ready:
                if not isinstance(ready, str):
                    held.setdefault(number_format, []).append(case.name)
    return [Interpretation(kernel.name, number_format, cases) for number_format, cases in held.items()]


def key(row: Compilation) -> tuple[str, ...]:
    return row.kernel, row.function, row.arch, row.case, row.format


def source(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def reached(tree: ast.Module, starts: set[str]) -> set[str]:
    """The names that definitions of a module use, directly or through other definitions of the module."""
    definitions: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign):
            definitions |= {name.id: node for name in node.targets if isinstance(name, ast.Name)}
    found, wanted = set(), set(starts)
    while wanted:
        name = wanted.pop()
        found.add(name)
        if name in definitions:
            used = {node.id for node in ast.walk(definitions[name]) if isinstance(node, ast.Name)}
            wanted |= used - found
    return found


def launched_functions(module: str, starts: set[str]) -> set[str]:
    """The Triton functions that a module's definitions launch, from its source and that of the Triton modules it
    imports: under the interpreter they cannot be compiled."""
    tree = source(module)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    compiled = {
        node.name
        for node in functions
        if any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
    }
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and ".triton_" in str(node.module)]
    compiled |= {name.name for node in imports for name in node.names}
    # A launch is function[grid](...), launch(function, grid, ...) or (function, grid, constants) for Launches;
    # what is called without a grid is part of the function that calls it.
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    launched = {ast.unparse(call.func.value) for call in calls if isinstance(call.func, ast.Subscript)}
    launched |= {ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "launch"}
    triples = [node.elts for node in ast.walk(tree) if isinstance(node, ast.Tuple) and len(node.elts) == 3]
    launched |= {ast.unparse(function) for function, _, _ in triples}
    names = reached(tree, starts)
    found = launched & compiled & names
    for node in imports:
        used = {name.name for name in node.names} & names - found
        if used:
            found |= launched_functions(str(node.module), used)
    return found


def phases(kernel: Kernel, op: Op) -> set[str]:
    return {"forward", "backward"} if kernel.backward and op.differentiable_outputs else {"forward"}


def test_the_registry_has_ops_with_triton_kernels() -> None:
    """The tests below would pass without any."""
    assert {"attention", "rms_norm"} <= {op.name for op in triton_ops()}


def test_every_function_is_built_for_every_architecture(committed: Checks, op: Op) -> None:
    assert len({key(row) for row in committed.compiled}) == len(committed.compiled)
    for kernel in triton_kernels(op):
        functions = launched_functions(kernel.module, phases(kernel, op))
        assert functions
        rows = [row for row in committed.compiled if row.kernel == kernel.name]
        built = {(row.function, row.arch) for row in rows}
        assert {(function, arch) for function in functions for arch in ARCHITECTURES} <= built
        assert {row.function for row in rows} == functions


def test_every_compile_case_is_built_forward_and_backward(committed: Checks, op: Op) -> None:
    for kernel in triton_kernels(op):
        rows = [row for row in committed.compiled if row.kernel == kernel.name]
        cases = [name for name in op.compile_cases if not refuses(kernel, CATALOGUE["nvidia/h200"], op.case(name))]
        assert {row.case for row in rows} == set(cases)
        for case in cases:
            built = {
                arch: {row.function for row in rows if (row.arch, row.case) == (arch, case)}
                for arch in ARCHITECTURES
            }
            if kernel.name != "triton-split-kv":  # whose splits need a second function on large devices alone
                assert len(set(map(frozenset, built.values()))) == 1, (
                    "every architecture launches the same functions"
                )
            for phase in phases(kernel, op):
                assert built["sm_90"] & launched_functions(kernel.module, {phase}), (case, phase)


def test_compile_cases_name_a_small_case_and_one_that_fills_a_device(op: Op) -> None:
    assert {op.case(name).benchmark for name in op.compile_cases} == {False, True}


def test_every_catalogue_architecture_that_triton_builds_for_is_there(committed: Checks) -> None:
    known = {device.arch for device in CATALOGUE.values() if device.backend in ("nvidia", "amd")}
    assert {row.arch for row in committed.compiled} == known


def test_kernels_fit_the_device(checks: Checks, committed: Checks, op: Op) -> None:
    shared = {device.arch: device.shared_memory_bytes for device in CATALOGUE.values()}
    for row in (*checks.compiled, *committed.compiled):
        assert 0 < row.registers <= 512, row
        assert row.spill_bytes == 0 or op.name in MAY_SPILL, row
        assert 0 <= row.shared_memory_bytes <= shared[row.arch], row


def test_every_small_case_passes_in_the_interpreter(checks: Checks, op: Op) -> None:
    for kernel in triton_kernels(op):
        device = compile_targets(kernel)[0]
        small = [case.name for case in op.cases if not case.benchmark and not refuses(kernel, device, case)]
        passed = [Interpretation(kernel.name, name, small) for name in ("float32", "float16")]
        assert interpreted(op, kernel, checks) == passed


def test_the_committed_record_is_about_the_present_sources(checks: Checks, committed: Checks, op: Op) -> None:
    assert committed.sources == checks.sources, remedy(op)


def test_the_committed_record_lists_what_compiles_now(checks: Checks, committed: Checks, op: Op) -> None:
    rebuilt = {key(row) for row in committed.compiled if row.arch in REBUILT}
    assert rebuilt == {key(row) for row in checks.compiled}, remedy(op)
    assert {row.arch for row in checks.compiled} == set(REBUILT)
    assert committed.op == checks.op == op.name


def test_the_committed_record_lists_what_the_interpreter_passes_now(
    checks: Checks, committed: Checks, op: Op
) -> None:
    now = [row for kernel in triton_kernels(op) for row in interpreted(op, kernel, checks)]
    assert committed.interpreted == now, remedy(op)


def test_compiling_under_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    case = registered_op("rms_norm").case("one-row")
    with pytest.raises(RuntimeError, match=r"TRITON_INTERPRET=1 is set: .* cannot be compiled; unset it"):
        cross_compile(rms_norm.KERNEL_TRITON, CATALOGUE["nvidia/h200"], case, "float32")


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
from kernel_pytorch.testing.contract import prepared
from kernel_pytorch.testing.cross_compile import cross_compile

kernel = Kernel(
    op="rms_norm", name="own", module="own_kernel", supports=lambda *_: None, language="triton", backward=False
)
rows = cross_compile(kernel, CATALOGUE["DEVICE"], registered_op("rms_norm").case("one-row"), "float32")
assert [row.function for row in rows] == ["_forward"], rows
"""


SMALL_CASTS = """
from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE
from kernel_pytorch.hardware_abstraction.op import Case
from kernel_pytorch.ops.fp8_cast import KERNEL_TRITON, refusal
from kernel_pytorch.ops.fp8_cast.definition import GRANULARITIES, _tensors
from kernel_pytorch.testing.cross_compile import cross_compile

for kind in GRANULARITIES:
    for rows, columns in ((1, 1), (1, 16), (16, 1)):
        if refusal(CATALOGUE["nvidia/h200"], (rows, columns), kind) is None:
            case = Case("small", _tensors(rows, columns, kind, transposed=True, power_of_two=True))
            assert cross_compile(KERNEL_TRITON, CATALOGUE["nvidia/h200"], case, "float32")
"""


def test_casts_of_the_smallest_matrices_store_what_was_computed(tmp_path: Path) -> None:
    """Sizes of 1 are specialised to constants, which ptxas 12.8 miscompiles in one case."""
    (tmp_path / "compile_it.py").write_text(SMALL_CASTS)
    compiled_elsewhere(tmp_path)


def compiled_elsewhere(folder: Path, error: str = "") -> None:
    """In a new process, because kernels may be interpreted in this one."""
    done = subprocess.run(
        [sys.executable, str(folder / "compile_it.py")],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "triton")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == bool(error), done.stderr
    assert error in done.stderr


@pytest.mark.parametrize("device", ["nvidia/h200", "amd/mi300x"])
@pytest.mark.parametrize(
    ("change", "error"),
    [("* 2", ""), ("+ tl.arange(0, 2 * BLOCK)", "CompilationError"), (".no_such_thing()", "AttributeError")],
    ids=["right", "shapes-differ", "no-such-function"],
)
def test_a_kernel_that_does_not_compile_raises(tmp_path: Path, device: str, change: str, error: str) -> None:
    """The correct kernel shows that the test can pass."""
    (tmp_path / "own_kernel.py").write_text(BROKEN_KERNEL.replace("BROKEN", change))
    (tmp_path / "compile_it.py").write_text(COMPILE_IT.replace("DEVICE", device))
    compiled_elsewhere(tmp_path, error)
