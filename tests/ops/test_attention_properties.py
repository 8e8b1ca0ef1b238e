"""Attention on generated masks and shapes, through every kernel that runs here; and the tests, tested.

The second half breaks kernels on purpose, in ways that public libraries shipped, and shows that the op's own cases
catch each: the contract test runs exactly these cases on every kernel.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings

import kernel_pytorch as kp
from attention_shapes import FORMATS, HALF, Shape, one_key_mostly, shapes
from kernel_pytorch.hardware_abstraction.dispatch import forget_choices, function_of
from kernel_pytorch.masks.layout import LAYOUTS, Layout, Walk
from kernel_pytorch.ops.attention import tiled_kernel
from kernel_pytorch.ops.attention.definition import ATTENTION
from kernel_pytorch.testing import Comparison, compare, interpreting, poisoned, pretend

pytestmark = pytest.mark.usefixtures("one_thread")


needs_interpreter = pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter")


@contextlib.contextmanager
def on(kernel: str) -> Iterator[None]:
    with pretend("nvidia/h200") if kernel == "triton" else contextlib.nullcontext(), poisoned():
        yield


def compared(kernel: str, arguments: dict[str, Any]) -> dict[str, Comparison]:
    function = function_of(ATTENTION)
    with poisoned() if arguments["q"].is_cuda else on(kernel):
        found = compare(ATTENTION, lambda *values: function(*values, kernel=kernel), arguments)
    return {comparison.tensor: comparison for comparison in found}


def wrong(kernel: str, arguments: dict[str, Any]) -> set[str]:
    """The tensors that are out of their budget."""
    return {name for name, comparison in compared(kernel, arguments).items() if not comparison.ok}


# Generated calls.


def within_budget(kernel: str, shape: Shape, device: str = "cpu") -> None:
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in shape.arguments().items()
    }
    found = compared(kernel, arguments)
    assert set(found) == {"out", "lse", "dq", "dk", "dv"}
    # dq and dk are what is left of larger terms, most of all in rows with one or two keys, where the reference
    # cancels exactly and a kernel that works from sum(out * dout) cannot. What is wrong is out by far more.
    slack = math.inf if one_key_mostly(shape) else 4.0
    for name, comparison in found.items():
        assert comparison.error <= comparison.budget * (slack if name in ATTENTION.cancelling else 1), str(
            comparison
        )


# The same examples each time: a budget is an estimate, which a right kernel misses at one of some 1000 shapes.


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shapes(("float32", "float16", "bfloat16"), 150))
def test_tiled(shape: Shape) -> None:
    within_budget("tiled", shape)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(shapes(("float32", "float16", "bfloat16"), 150, dense=True))
def test_cpu_flash(shape: Shape) -> None:
    within_budget("cpu-flash", shape)


@needs_interpreter
@settings(max_examples=15, deadline=None, derandomize=True)
@given(shapes(("float32", "float16"), 100))
def test_triton(shape: Shape) -> None:
    within_budget("triton", shape)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("number_format", FORMATS)
def test_triton_on_a_gpu(number_format: str, dim: int) -> None:
    # No shrinking: every smaller example would be compiled anew.
    @settings(max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(shapes((number_format,), 300, dims=(dim,)))
    def run(shape: Shape) -> None:
        within_budget("triton", shape, "cuda")

    run()


@needs_gpu
@pytest.mark.parametrize("kernel", ["cudnn", "flash", "tiled"])
def test_other_kernels_on_a_gpu(kernel: str) -> None:
    formats, dims = tuple(HALF), (64, 80, 96, 128)
    fewest = 2 if kernel == "cudnn" else 1  # it takes no single key

    @settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(shapes(formats, 300, dense=kernel != "tiled", dims=dims).filter(lambda shape: shape.kv_len >= fewest))
    def run(shape: Shape) -> None:
        within_budget(kernel, shape, "cuda")

    run()


# The tests, tested: kernels broken on purpose.

SMALL = [case for case in ATTENTION.cases if not case.benchmark]


def case_arguments(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return dict(ATTENTION.case(name).arguments(dtype, torch.device("cpu")))


def module_of(kernel: str) -> Any:
    if kernel == "tiled":
        return tiled_kernel
    from kernel_pytorch.ops.attention import triton_kernel

    return triton_kernel


def break_backward(monkeypatch: pytest.MonkeyPatch, kernel: str, change: Callable[..., Any]) -> None:
    """Replaces the kernel's backward by ``change(backward, arguments by name)``."""
    module = module_of(kernel)
    original = module.backward
    names = ("device", *ATTENTION.backward_names)

    def broken(*values: Any) -> Any:
        return change(original, dict(zip(names, values, strict=True)))

    monkeypatch.setattr(module, "backward", broken)
    forget_choices()


def break_walk(
    monkeypatch: pytest.MonkeyPatch, kernel: str, change: Callable[[Walk, int, int], Walk], *, backward: bool
) -> None:
    """Replaces what the kernel walks over, in the backward alone or everywhere."""
    module = module_of(kernel)
    walk = Layout.walk

    def changed(self: Layout, queries: int, keys: int, *, by_key: bool = False, device: Any = "cpu") -> Walk:
        whole = (self.q_len // queries if by_key else self.kv_len // keys) if active else -1
        found = walk(self, queries, keys, by_key=by_key, device=device)
        return change(found, whole, by_key) if active else found

    active = not backward
    if backward:
        original = module.backward

        def broken(*values: Any) -> Any:
            nonlocal active
            active = True
            LAYOUTS.clear()  # with what the forward's kernel kept there
            try:
                return original(*values)
            finally:
                active = False
                LAYOUTS.clear()

        monkeypatch.setattr(module, "backward", broken)
    monkeypatch.setattr(Layout, "walk", changed)
    LAYOUTS.clear()
    forget_choices()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    LAYOUTS.clear()
    forget_choices()


def split(offsets: torch.Tensor, values: torch.Tensor) -> list[list[int]]:
    return [values[offsets[row] : offsets[row + 1]].tolist() for row in range(len(offsets) - 1)]


def joined(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    return torch.tensor(offsets, dtype=torch.int32), torch.tensor(
        [n for row in rows for n in row], dtype=torch.int32
    )


def without_the_last_partial_tile(walk: Walk, whole: int, by_key: bool) -> Walk:
    rows = split(walk.partial_offsets, walk.partial)
    slots = split(walk.partial_offsets, walk.slots)
    offsets, partial = joined([row[:-1] for row in rows])
    return Walk(walk.span, walk.full_offsets, walk.full, offsets, partial, joined([row[:-1] for row in slots])[1])


def partial_taken_for_full(walk: Walk, whole: int, by_key: bool) -> Walk:
    """Those inside the matrix: a full tile at its edge would read past the end."""
    kept, slots, full = [], [], split(walk.full_offsets, walk.full)
    for row, (tiles, first) in enumerate(
        zip(split(walk.partial_offsets, walk.partial), split(walk.partial_offsets, walk.slots), strict=True)
    ):
        full[row] += [tile for tile in tiles if tile < whole]
        kept.append([tile for tile in tiles if tile >= whole])
        slots.append([slot for tile, slot in zip(tiles, first, strict=True) if tile >= whole])
    return Walk(walk.span, *joined(full), *joined(kept), joined(slots)[1])


both_kernels = pytest.mark.parametrize("kernel", ["tiled", pytest.param("triton", marks=needs_interpreter)])


@both_kernels
@pytest.mark.parametrize("name", ["causal", "grouped", "window-and-sinks", "table-per-head"])
def test_a_backward_that_drops_the_last_partial_tile_is_caught(
    kernel: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_walk(monkeypatch, kernel, without_the_last_partial_tile, backward=True)
    caught = wrong(kernel, case_arguments(name))
    assert caught == {"dq", "dk", "dv"}, "the forward is right"


@both_kernels
@pytest.mark.parametrize("name", ["causal", "prefix", "documents", "window-and-sinks"])
def test_a_partial_tile_taken_for_a_full_one_is_caught(
    kernel: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_walk(monkeypatch, kernel, partial_taken_for_full, backward=False)
    assert wrong(kernel, case_arguments(name)) >= {"out", "lse"}


def scaled_at_64(original: Callable[..., Any], values: dict[str, Any]) -> Any:
    dq, dk, dv = original(*values.values())
    return (dq, dk * 1.5, dv * 1.5) if values["q"].shape[3] == 64 else (dq, dk, dv)


def test_gradients_wrong_at_one_head_dim_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """One library shipped exactly this, and its tests had no such head dim."""
    break_backward(monkeypatch, "tiled", scaled_at_64)
    caught = {case.name: wrong("tiled", case_arguments(case.name)) for case in SMALL}
    dims = {case.name: case_arguments(case.name)["q"].shape[3] for case in SMALL}
    assert sum(dim == 64 for dim in dims.values()) >= 3
    for name, tensors in caught.items():
        assert tensors == ({"dk", "dv"} if dims[name] == 64 else set()), name


@needs_interpreter
def test_gradients_wrong_at_one_head_dim_are_caught_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    break_backward(monkeypatch, "triton", scaled_at_64)
    assert wrong("triton", case_arguments("table")) == {"dk", "dv"}
    assert wrong("triton", case_arguments("value-dim")) == set()


@pytest.mark.parametrize("dtype", FORMATS.values(), ids=FORMATS)
def test_a_block_sparse_dq_without_its_scale_is_caught(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def unscaled(original: Callable[..., Any], values: dict[str, Any]) -> Any:
        dq, dk, dv = original(*values.values())
        sparse = bool(values["mask"].layout(values["q"].shape[2], values["k"].shape[2]).tables)
        return (dq / values["scale"] if sparse else dq), dk, dv

    break_backward(monkeypatch, "tiled", unscaled)
    for name in ("table", "table-per-head"):
        assert wrong("tiled", case_arguments(name, dtype)) == {"dq"}
    assert wrong("tiled", case_arguments("causal", dtype)) == set()


@both_kernels
def test_a_backward_without_the_lse_is_caught(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_backward(monkeypatch, kernel, lambda original, values: original(*({**values, "wanted": "grad"}).values()))
    assert wrong(kernel, case_arguments("documents")) == {"dq", "dk"}


class _Bfloat16Sums:
    """torch, whose products of probabilities and values come out in bfloat16, and so does what is added to them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = torch.bmm(a, b)
        return product.bfloat16() if b.stride(-1) == 1 else product  # scores multiply by a transposed view


def test_bfloat16_accumulation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 at once; in bfloat16, where the result is rounded anyway, where many parts are added."""
    monkeypatch.setattr(tiled_kernel, "_KEYS_A_PIECE", 128)
    generator = torch.Generator().manual_seed(0)
    long = {
        **case_arguments("full", torch.bfloat16),
        "mask": kp.masks.full(),
        **{name: torch.randn(1, 2, 4096, 32, generator=generator).bfloat16() for name in ("k", "v")},
    }
    assert wrong("tiled", case_arguments("causal")) == set()
    assert wrong("tiled", long) == set()
    monkeypatch.setattr(tiled_kernel, "torch", _Bfloat16Sums())
    assert "out" in wrong("tiled", case_arguments("causal"))
    assert "out" in wrong("tiled", long)


def test_unbroken_kernels_pass_the_same_cases() -> None:
    """What the tests above rely on: each failure there is the break's."""
    for case in SMALL:
        assert wrong("tiled", case_arguments(case.name)) == set(), case.name
