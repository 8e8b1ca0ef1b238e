"""The C++ kernel of attention in eager mode: every kind of mask, its backward, and its division among threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import kernel_pytorch as kp
from attention_calls import budgeted, everything, heads
from kernel_pytorch.masks import Mask
from kernel_pytorch.ops.attention import native_kernel
from requirements import missing_for_lowering

pytestmark = pytest.mark.skipif(missing_for_lowering() is not None, reason=str(missing_for_lowering()))
QUERIES, KEYS = 37, 70
M = kp.masks
MASKS: dict[str, Mask] = {
    "padding": M.causal() & M.padding([70, 9], "left"),
    "padding on the right": M.padding([0, 64], "right"),
    "intervals": M.intervals(
        np.arange(QUERIES)[None, None] + np.array([[[0], [20]], [[3], [40]]]),
        np.arange(QUERIES)[None, None] + np.array([[[7], [30]], [[3], [33]]]),
    ),
    "unequal documents": M.documents([[30, 40], [69, 1]], M.causal(), query_lengths=[[36, 1], [30, 7]]),
    "dilated": M.causal() & M.dilated(3, 5, 2),
    "dilated without gaps": M.dilated(1, 4),
    "scattered": M.from_dense(torch.rand(QUERIES, KEYS, generator=torch.Generator().manual_seed(0)) < 0.4),
    "dilated documents": M.documents([[30, 40]], M.dilated(2, 4)),
    "table and padding": M.padding([70, 40], "left")
    & M.blocks(torch.rand(2, 2, 3, 5, generator=torch.Generator().manual_seed(1)) < 0.6, block=16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name: str, dtype: torch.dtype) -> None:
    budgeted(heads(2, 2, 1, QUERIES, KEYS, 24, 40, dtype=dtype), MASKS[name], "native")


@pytest.mark.parametrize("dims", [(1, 1), (7, 16), (16, 7), (33, 80), (64, 64), (128, 48)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 3), (1, 90), (5, 64), (17, 33), (64, 65), (130, 40)], ids=str)
def test_every_size(lengths: tuple[int, int], dims: tuple[int, int]) -> None:
    budgeted(heads(1, 4, 2, *lengths, *dims), M.causal() | M.sinks(1), "native")


@pytest.mark.parametrize("scale", [0.0, -0.5, 4.0])
def test_any_scale(scale: float) -> None:
    budgeted(heads(q_len=20), M.causal(), "native", scale=scale)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_rows_are_divided_among_threads(threads: int) -> None:
    """One head: the rows are divided into parts, whose gradients of keys and values are summed."""
    assert native_kernel._parts(1, 300, threads) == {1: 1, 2: 4, 5: 9}[threads]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        budgeted(heads(1, 1, 1, 300, dim=16), M.causal() & M.window(100), "native")
        first, second = (everything(heads(1, 1, 1, 300), M.causal(), "native") for _ in range(2))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_output_gradient_without_memory_of_its_own() -> None:
    leaves = [x.requires_grad_() for x in heads(q_len=33)]
    found = torch.autograd.grad(kp.attention(*leaves, M.causal(), kernel="native").sum(), leaves)
    known = torch.autograd.grad(kp.attention(*leaves, M.causal(), kernel="tiled").sum(), leaves)
    torch.testing.assert_close(found, known)


def test_calls_of_several_threads() -> None:
    """A program has one set of scratch memory, which calls share."""
    calls = [heads(q_len=65, seed=seed) for seed in range(4)]
    known = [everything(call, M.causal(), "native") for call in calls]
    found: list[list[torch.Tensor]] = [[] for _ in calls]

    def work(own: int) -> None:
        for _ in range(10):
            found[own] = everything(calls[own], M.causal(), "native")

    threads = [threading.Thread(target=work, args=(own,)) for own in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, theirs in zip(found, known, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_padded_calls_go_to_it() -> None:
    q, k, v = heads(2, 2, 2, 1, 70)
    choice = kp.explain(kp.attention, q, k, v, M.causal() & M.padding([70, 9], "left"))
    assert choice.kernel.name == "native"


def test_a_step_of_decoding_changes_sizes_in_one_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of decoding has shapes of its own, in a cache of fixed strides or in a concatenated one."""
    made: list[object] = []
    original = native_kernel.Payload.to_bytes
    monkeypatch.setattr(native_kernel.Payload, "to_bytes", lambda self: (made.append(self), original(self))[1])
    q, k, v = heads(1, 4, 2, 1, 60, 24, 40)
    scale = 0.3071  # of no other test, so that no payload is there yet
    for length in range(50, 60):
        for keys, values in (
            (k[:, :, :length], v[:, :, :length]),
            (k[:, :, -length:].clone(), v[:, :, -length:].clone()),
        ):
            out = kp.attention(q, keys, values, M.causal(), scale=scale, kernel="native")
            tiled = kp.attention(q, keys, values, M.causal(), scale=scale, kernel="tiled")
            torch.testing.assert_close(out, tiled)
    assert len(made) == 1
