"""rms_norm on generated shapes, strides and formats: the CPU kernel, and the Triton kernel in the interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.ops.rms_norm.definition import RMS_NORM
from kernel_pytorch.testing import compare, interpreting, poisoned, pretend

# Triton's interpreter computes bfloat16 wrongly.
FORMATS = {"torch": (torch.float32, torch.float16, torch.bfloat16), "triton": (torch.float32, torch.float16)}
DEVICES = {"torch": "cpu", "triton": "nvidia/h200"}
every_kernel = pytest.mark.parametrize(
    "kernel",
    [
        "torch",
        # On a GPU the contract tests run the kernel itself.
        pytest.param("triton", marks=pytest.mark.skipif(not interpreting(), reason="needs the interpreter")),
    ],
)
# The same examples each time: a budget is an estimate, which a right kernel misses at one of 1000 small shapes.
generated = settings(max_examples=25, deadline=None, derandomize=True)
# compare() draws dy from seed 1; a dy equal to x would leave a dx of mere cancellation.
seeds = st.integers(2, 2**31)


@dataclass(frozen=True)
class Layout:
    """How x lies in memory: a larger tensor, permuted, then every few along each dimension."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    steps: tuple[int, ...]
    broadcast: bool
    """The first dimension has stride 0."""

    def lay_out(self, seed: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        sizes = [size * step for size, step in zip(self.shape, self.steps, strict=True)]
        memory = torch.randn([sizes[dim] for dim in self.order], generator=generator).to(dtype)
        back = [self.order.index(dim) for dim in range(len(self.order))]
        x = memory.permute(back)[tuple(slice(None, None, step) for step in self.steps)]
        assert x.shape == self.shape
        return x[:1].expand(self.shape) if self.broadcast and len(self.shape) > 1 else x


@st.composite
def layouts(draw: st.DrawFn, narrowest: int = 1) -> Layout:
    rank = draw(st.integers(1, 4))
    leading = draw(st.lists(st.sampled_from([1, 2, 3, 5, 7, 0]), min_size=rank - 1, max_size=rank - 1))
    hidden = draw(st.integers(narrowest, 70) | st.sampled_from([127, 128, 129]))
    return Layout(
        shape=(*leading, hidden),
        order=tuple(draw(st.permutations(range(rank)))),
        steps=tuple(draw(st.lists(st.sampled_from([1, 1, 2, 3]), min_size=rank, max_size=rank))),
        broadcast=draw(st.booleans()),
    )


@contextlib.contextmanager
def on(kernel: str) -> Iterator[None]:
    """The device a kernel runs on, real or pretended, with poisoned memory."""
    with contextlib.nullcontext() if kernel == "torch" else pretend(DEVICES[kernel]), poisoned():
        yield


@every_kernel
@generated
@given(
    data=st.data(),
    # The fewer numbers in a row, the likelier a dx of mere cancellation, which no budget can foresee.
    layout=layouts(narrowest=8),
    weight=st.sampled_from(["none", "same", "float32", "strided"]),
    eps=st.sampled_from([0.0, 1e-6, 1e-5, 0.1, 3.0]),
    seed=seeds,
)
def test_outputs_and_gradients_meet_their_budget(
    kernel: str, data: st.DataObject, layout: Layout, weight: str, eps: float, seed: int
) -> None:
    dtype = data.draw(st.sampled_from(FORMATS[kernel]))
    x = layout.lay_out(seed, dtype)
    w: torch.Tensor | None = None
    if weight != "none":
        w = torch.randn(2 * x.shape[-1], generator=torch.Generator().manual_seed(seed + 1))
        w = w[::2] if weight == "strided" else w[: x.shape[-1]]
        w = w if weight == "float32" else w.to(dtype)
    function = function_of(RMS_NORM)
    with on(kernel):
        assert kp.explain(kp.rms_norm, x, w, eps).kernel.name == kernel
        compared = compare(RMS_NORM, function, {"x": x, "weight": w, "eps": eps})
    assert {comparison.tensor for comparison in compared} >= {"y", "rstd", "dx"}
    failed = [str(comparison) for comparison in compared if not comparison.ok]
    assert not failed, "\n".join(failed)


@every_kernel
@generated
@given(layout=layouts(), seed=seeds)
@example(layout=Layout((3, 0, 5), (2, 1, 0), (1, 1, 1), False), seed=0)
def test_the_result_is_contiguous_and_the_input_untouched(kernel: str, layout: Layout, seed: int) -> None:
    x = layout.lay_out(seed, torch.float32)
    before = x.clone()
    with on(kernel):
        y = kp.rms_norm(x)
        rows = [kp.rms_norm(row) for row in x.reshape(-1, x.shape[-1])]
    assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, x.dtype, True)
    assert torch.equal(x, before)
    for together, alone in zip(y.reshape(-1, x.shape[-1]), rows, strict=True):
        torch.testing.assert_close(together, alone)  # a row's result depends on that row alone


@every_kernel
@generated
@given(layout=layouts(), exponent=st.integers(-20, 20), seed=seeds)
def test_scaling_x_does_not_change_the_result(kernel: str, layout: Layout, exponent: int, seed: int) -> None:
    """Without eps the definition does not see a power of two; neither may a kernel, to the bit."""
    x = layout.lay_out(seed, torch.float32).contiguous()
    with on(kernel):
        y, scaled = kp.rms_norm(x, None, 0.0), kp.rms_norm(x * 2.0**exponent, None, 0.0)
    assert torch.equal(scaled, y)
