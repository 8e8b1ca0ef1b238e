"""The backward of a SwiGLU in row chunks of dh, against the backward without chunks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import kernel_pytorch as kp
from fp8_models import SwiGLU
from kernel_pytorch.fp8 import swiglu as swiglu_ops
from kernel_pytorch.fp8.quantize import transpose_data
from kernel_pytorch.hardware_abstraction.formats import FORMATS
from kernel_pytorch.hardware_abstraction.registry import device_of
from kernel_pytorch.ops.fp8_swiglu import HiddenGradients, fp8_swiglu_grad
from kernel_pytorch.testing import interpreting, poisoned, pretend

pytestmark = pytest.mark.usefixtures("one_thread", "own_monitors")

HERE = "cuda" if torch.cuda.is_available() else "cpu"
PART = 512 if HERE == "cuda" else 64  # the interpreter takes about a second for a few tiles
ROWS, COLUMNS = 2 * PART + 37, 72
NARROW = COLUMNS if HERE == "cuda" else 40  # one tile across, because requantizing is slow in the interpreter
needs_triton = pytest.mark.skipif(HERE == "cpu" and not interpreting(), reason="needs a GPU, or TRITON_INTERPRET=1")


@pytest.fixture
def on_gpu() -> Iterator[None]:
    """The GPU, or a pretended one in the interpreter."""
    with pretend("nvidia/h200") if HERE == "cpu" else contextlib.nullcontext():
        yield


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(HERE, dtype)


def codes(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.uint8)


class Found:
    """Run all row chunks; return the results, counts and histories."""

    def __init__(
        self,
        dh: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        histories: tuple[torch.Tensor, torch.Tensor],
        number_format: str,
        h_inverse: torch.Tensor | None = None,
    ) -> None:
        from kernel_pytorch.ops.fp8_swiglu.triton_parts import PreparedParts
        from kernel_pytorch.ops.triton_launch import Place

        with_h = h_inverse is not None
        cast = PreparedParts(
            device_of(gate.device), gate.shape, gate.stride(), up.stride(), number_format, "e4m3fn", with_h,
            len(histories[0]), False, PART,
        )  # fmt: skip
        self.counts = torch.zeros(2, 2, 4, dtype=torch.int64, device=HERE)
        self.histories = [history.clone() for history in histories]
        self.asked: list[tuple[int, int]] = []

        def dh_of(first: int, last: int) -> torch.Tensor:
            self.asked.append((first, last))
            return dh[first:last].clone()

        places = [Place(self.counts, torch.int64), Place(self.counts, torch.int64, 64)]
        remembered = [Place(history, torch.float32) for history in self.histories]
        with poisoned():
            results = cast(dh_of, gate, up, h_inverse, *places, *remembered)
        self.dgate, self.dgate_inverse, self.dup, self.dup_inverse, self.h_t = results


def three(dtype: torch.dtype = torch.float32, columns: int = COLUMNS) -> tuple[torch.Tensor, ...]:
    return tuple(random(ROWS, columns, seed=seed, dtype=dtype) for seed in range(3))


def history(*entries: float) -> torch.Tensor:
    return torch.tensor(entries, device=HERE)


def at_once(
    matrices: tuple[torch.Tensor, ...],
    histories: tuple[torch.Tensor, torch.Tensor],
    form: str,
    h_inverse: Any = None,
) -> HiddenGradients:
    gate_history, up_history = histories
    return fp8_swiglu_grad(
        *matrices, form, h_inverse=h_inverse, gate_history=gate_history, up_history=up_history, kernel="triton"
    )


def check_rounded_twice(
    found: Found, whole: HiddenGradients, matrices: tuple[torch.Tensor, ...], form: str
) -> None:
    """Against float64: chunks that are rescaled are rounded once more, and lose no more than that."""
    dh, *others = (matrix.double() for matrix in matrices)
    gates, ups = (matrix.requires_grad_() for matrix in others)
    exact = torch.autograd.grad(torch.nn.functional.silu(gates) * ups, (gates, ups), dh)
    chosen = FORMATS[form]
    for name, wanted in zip(("dgate", "dup"), exact, strict=True):
        inverse = getattr(found, f"{name}_inverse")
        assert torch.equal(inverse, getattr(whole, f"{name}_inverse"))
        back = getattr(found, name).float().double() * inverse.double()
        assert bool(back.isfinite().all())
        half = 2.0 ** -(chosen.mantissa_bits + 1)  # of the last place, and twice
        budget = wanted.abs() * (2.01 * half + half * half) + 1.01 * chosen.smallest_subnormal * inverse.double()
        assert bool(((back - wanted).abs() <= budget).all()), name


@needs_triton
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("form", "dtype"), [*((form, torch.float32) for form in FORMATS), ("e5m2", torch.float16)], ids=str
)
def test_chunks_that_fit_their_history_equal_one_cast(form: str, dtype: torch.dtype) -> None:
    dh, gate, up = three(dtype)
    gate[3, 4], up[PART + 1, 5], dh[-1, -1] = torch.inf, torch.nan, -torch.inf
    inverse, histories = torch.tensor(0.0625, device=HERE), (history(25.0, 1.0, 0.0), history(2.0, 0.0, 20.0))
    found = Found(dh, gate, up, histories, form, inverse)
    whole = at_once((dh, gate, up), histories, form, inverse)
    for name in ("dgate", "dup", "h_t"):
        assert torch.equal(codes(getattr(found, name)), codes(getattr(whole, name))), name
    assert torch.equal(found.dgate_inverse, whole.dgate_inverse)
    assert torch.equal(found.dup_inverse, whole.dup_inverse)
    assert torch.equal(found.histories[0], whole.gate_next_history)
    assert torch.equal(found.histories[1], whole.up_next_history)
    assert torch.equal(found.counts[:, 0, :3], whole.counts)
    assert torch.equal(found.counts[:, 1], found.counts[:, 0])
    assert found.counts[:, 0, 3].tolist() == [ROWS * COLUMNS] * 2
    assert found.asked == [(0, PART), (PART, 2 * PART), (2 * PART, ROWS)]


@needs_triton
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("form", "before"), [*((form, 0.25) for form in FORMATS), ("e4m3fn", 0.0)])
def test_a_chunk_beyond_its_history_rescales_all_chunks(form: str, before: float) -> None:
    """Nothing is clipped; chunks that are rescaled are rounded once more, and lose no more than that."""
    dh, gate, up = three(columns=NARROW)
    dh[PART + 5] *= 100
    histories = (history(before, 0.0), history(30.0, before))  # dup exceeds its history slightly, or has none
    found, whole = Found(dh, gate, up, histories, form), at_once((dh, gate, up), histories, form)
    assert torch.equal(found.histories[0], whole.gate_next_history)
    assert torch.equal(found.histories[1], whole.up_next_history)
    assert torch.equal(found.counts[:, 0, 0], whole.counts[:, 0])
    assert found.counts[0, 0, 0] > 0 or before == 0.0
    check_rounded_twice(found, whole, (dh, gate, up), form)


@needs_triton
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("form", "size"), [("e5m2", 1.0), ("e4m3fn", 1e-3)], ids=["all", "one_of_them"])
def test_chunks_far_below_their_history_do_not_underflow(form: str, size: float) -> None:
    """All chunks after an outlier, or one chunk, which is rescaled to the scale of the others."""
    dh, gate, up = three(columns=NARROW)
    dh[:PART] *= size
    histories = (history(1e13, 1.0), history(1e13, 1.0)) if size == 1.0 else (history(12.0), history(12.0))
    found, whole = Found(dh, gate, up, histories, form), at_once((dh, gate, up), histories, form)
    assert torch.equal(found.histories[0], whole.gate_next_history)
    assert torch.equal(found.histories[1], whole.up_next_history)
    assert not found.counts[:, :, 0].any()
    check_rounded_twice(found, whole, (dh, gate, up), form)
    if size != 1.0:
        assert torch.equal(codes(found.dgate[PART:]), codes(whole.dgate[PART:]))
        assert torch.equal(codes(found.dup[PART:]), codes(whole.dup[PART:]))


@needs_triton
@pytest.mark.usefixtures("on_gpu")
def test_a_chunk_of_zeros_does_not_set_the_scale() -> None:
    """Without a history its scale is 1, under which small gradients would underflow."""
    dh, gate, up = three(columns=NARROW)
    dh *= 1e-6
    dh[:PART] = 0
    histories = (history(0.0), history(0.0))
    found, whole = Found(dh, gate, up, histories, "e4m3fn"), at_once((dh, gate, up), histories, "e4m3fn")
    assert torch.equal(found.dgate_inverse, whole.dgate_inverse)
    assert found.dgate.float().norm() > 0.99 * whole.dgate.float().norm()
    assert found.dgate[:PART].float().abs().max() == 0


@needs_triton
@pytest.mark.usefixtures("on_gpu")
def test_zeros_alone_are_zeros() -> None:
    dh, gate, up = three(columns=NARROW)
    found = Found(dh * 0, gate, up, (history(0.0), history(4.0)), "e5m2")
    assert found.dgate.float().abs().max() == 0
    assert found.dup.float().abs().max() == 0
    assert found.dgate_inverse.isfinite()
    assert found.dup_inverse.isfinite()
    assert [each.tolist() for each in found.histories] == [[0.0], [0.0]]


@needs_triton
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (128, 256), (132, 260), (260, 130)])
def test_the_transpose_is_exact(shape: tuple[int, int]) -> None:
    from kernel_pytorch.ops.fp8_cast.triton_turn import PreparedTurn

    drawn = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8).to(HERE)
    given = drawn.view(torch.float8_e4m3fn)
    with poisoned():
        turned = PreparedTurn(shape)(given)
    assert turned.dtype == given.dtype
    assert torch.equal(codes(turned), drawn.t())
    assert torch.equal(codes(transpose_data(given)), drawn.t())


# A whole module.


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Lower the size above which dh is chunked."""
    monkeypatch.setattr(swiglu_ops, "_LARGE", 1)
    monkeypatch.setattr(swiglu_ops, "_CHUNK_ROWS", PART)
    return monkeypatch


def trained(recipe: str, compiled: bool, rows: int = ROWS) -> list[torch.Tensor]:
    """Return outputs, gradients, counts and histories of three steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if HERE == "cuda" else torch.float32
    model = kp.fp8.convert(SwiGLU(64, 96).to(HERE, dtype), recipe)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    seen = []
    for step in range(3):
        x = random(rows, 64, seed=step, dtype=dtype).requires_grad_()
        y = run(x)
        y.backward(random(rows, 64, seed=9, dtype=dtype))
        seen += [y.detach(), x.grad]
    return [*seen, *(each.grad for each in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("recipe", ["delayed", "delayed-e4m3"])
def test_a_module_in_chunks_trains_like_one_without(recipe: str, small_parts: pytest.MonkeyPatch) -> None:
    """On a GPU the first step, without a history, is rounded once more."""
    served = []
    original = swiglu_ops._hidden_gradients_in_chunks

    def watched(*arguments: Any) -> Any:
        found = original(*arguments)
        served.append(found is not None)
        return found

    small_parts.setattr(swiglu_ops, "_hidden_gradients_in_chunks", watched)
    parted = [trained(recipe, compiled) for compiled in (False, True)]
    for eager, compiled in zip(*parted, strict=True):
        assert torch.equal(eager, compiled)
    assert served == [HERE == "cuda"] * 6
    small_parts.setattr(swiglu_ops, "_LARGE", 1 << 60)
    whole = trained(recipe, False)
    for found, wanted in zip(parted[0], whole, strict=True):
        if HERE == "cpu":
            assert torch.equal(found, wanted)
        else:
            assert (found.double() - wanted.double()).norm() <= 0.1 * wanted.double().norm()


def test_only_large_calls_with_a_history_are_chunked() -> None:
    large, small = (torch.empty(rows, 16384, device="meta") for rows in (8192, 8191))
    assert swiglu_ops.in_row_chunks(large, torch.zeros(16))
    assert not swiglu_ops.in_row_chunks(large, None)
    assert not swiglu_ops.in_row_chunks(small, torch.zeros(16))
    few = torch.empty(swiglu_ops._CHUNK_ROWS, 1 << 20, device="meta")
    assert not swiglu_ops.in_row_chunks(few, torch.zeros(16))


@pytest.mark.usefixtures("small_parts")
def test_any_number_of_rows_is_compiled_once() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = kp.fp8.convert(SwiGLU(64, 96).to(HERE), "delayed")
    run = torch.compile(model, fullgraph=True, backend=counter)
    for rows in (PART * 5, PART // 2, PART * 9 + 1):
        x = random(rows, 64)
        torch._dynamo.mark_dynamic(x, 0)
        run(x.requires_grad_()).sum().backward()
        assert x.grad.shape == (rows, 64)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("small_parts")
def test_rows_known_at_run_time_are_compiled() -> None:
    """Rows selected by data, as in a mixture of experts."""
    torch._dynamo.reset()
    model = kp.fp8.convert(SwiGLU(64, 96).to(HERE), "delayed")

    def chosen(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(x[torch.nonzero(mask).squeeze(1)])

    x, mask = random(PART * 5, 64).requires_grad_(), random(PART * 5) > 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        y = torch.compile(chosen, fullgraph=True, backend="aot_eager")(x, mask)
    y.sum().backward()
    assert y.shape == (int(mask.sum()), 64)
    assert bool((x.grad[~mask] == 0).all())


@pytest.mark.skipif(HERE == "cpu", reason="needs a GPU")
def test_chunks_take_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []
    for large in (1 << 60, 1):
        monkeypatch.setattr(swiglu_ops, "_LARGE", large)
        torch._dynamo.reset()
        model = kp.fp8.convert(SwiGLU(512, 2048).to(HERE, torch.bfloat16), "delayed")
        run = torch.compile(model, fullgraph=True)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(random(16384, 512, dtype=torch.bfloat16).requires_grad_()).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    hidden = 16384 * 2048
    assert peaks[1] < peaks[0] - 3 * hidden


COMPILE = """
import torch
from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE
from kernel_pytorch.ops.fp8_cast.triton_kernel import PreparedCast
from kernel_pytorch.ops.fp8_cast.triton_turn import PreparedTurn
from kernel_pytorch.ops.fp8_rms_norm.triton_cast import PreparedNormCast
from kernel_pytorch.ops.fp8_swiglu import GRAD_KERNEL_TRITON
from kernel_pytorch.ops.fp8_swiglu.triton_parts import PreparedParts
from kernel_pytorch.ops.triton_launch import Place
from kernel_pytorch.fp8.swiglu import _CHUNK_ROWS
from kernel_pytorch.testing.cross_compile import _caught_launches, _compile

def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")

for name in ("nvidia/h200", "amd/mi300x"):
    gate = empty(2 * _CHUNK_ROWS, 14336, dtype=torch.bfloat16)
    counts, history = Place(empty(2, 2, 4, dtype=torch.int64), torch.int64), Place(empty(16), torch.float32)
    with _caught_launches() as launches:
        cast = PreparedParts(
            CATALOGUE[name], gate.shape, gate.stride(), gate.stride(), "e5m2", "e4m3fn", True, 16, False, _CHUNK_ROWS
        )
        cast(lambda first, last: gate[first:last], gate, gate, empty(), counts, counts, history, history)
        PreparedTurn((4096, 14336))(empty(4096, 14336, dtype=torch.float8_e5m2))
        norm = PreparedNormCast(CATALOGUE[name], gate.shape, gate.stride(), "e4m3fn", 16, False, True)
        norm(gate, empty(gate.shape[0]), empty(14336, dtype=torch.bfloat16), counts, history)
        guessing = PreparedCast(CATALOGUE[name], gate.shape, gate.stride(), "e4m3fn", "tensor", True, 1, True, True)
        guessing(gate, counts, history)
    built = [_compile(launch, GRAD_KERNEL_TRITON, CATALOGUE[name], "parts", "bfloat16") for launch in launches]
    print(name, *(f"{each.function}:{each.spill_bytes}" for each in built))
"""


def test_the_kernels_of_chunks_compile_for_nvidia_and_amd() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    part = ["_cast:0", "_settle:0"]
    expected = [*part, *part, "_agree:0", "_turn:0", *part, "cast_whole:0", "settle:0"]
    assert [line.split()[1:] for line in done.stdout.splitlines()] == [expected, expected]
