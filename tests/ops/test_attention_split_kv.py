"""Attention of few queries: the split-over-keys kernel, and the masks that it takes as numbers."""

from __future__ import annotations

import itertools

import pytest
import torch

import kernel_pytorch as kp
from attention_calls import H200, drawn, heads, needs_interpreter
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.masks import Mask, blocks, causal, dilated, documents, full, intervals, padding, sinks, window
from kernel_pytorch.masks.layout import LAYOUTS, layout
from kernel_pytorch.masks.relative import relative_intervals
from kernel_pytorch.ops import attention
from kernel_pytorch.ops.attention.definition import ATTENTION
from kernel_pytorch.testing import compare, poisoned

pytestmark = pytest.mark.usefixtures("one_thread")

TABLE = torch.tensor([[1, 0, 0, 1, 0, 1, 1, 0, 0, 1]], dtype=torch.bool)
PER_HEAD = torch.stack([TABLE, ~TABLE, TABLE & False, TABLE | True])
DOCUMENTS = documents([[100, 1, 199], [300]], causal())

# name: mask, (batch, q_heads, kv_heads, q_len, kv_len, dim), value_dim
CALLS: dict[str, tuple[Mask, tuple[int, int, int, int, int, int], int]] = {
    "full": (full(), (1, 4, 2, 1, 300, 64), 64),
    "more-queries-than-keys": (causal(), (1, 2, 2, 20, 9, 16), 16),
    "several-row-tiles": (causal() & window(90), (1, 20, 1, 4, 300, 16), 16),
    "overlapping": (window(30) | sinks(290), (1, 2, 2, 9, 300, 32), 32),
    "empty": (window(3) & sinks(0), (1, 2, 1, 2, 300, 32), 32),
    "documents": (DOCUMENTS | sinks(3), (2, 2, 1, 7, 300, 32), 80),
    "documents-end": (DOCUMENTS, (2, 2, 1, 1, 300, 32), 32),
    "padding": (padding([300, 0, 17]), (3, 2, 2, 1, 300, 24), 24),
    "table": (causal() & blocks(TABLE, 32), (1, 2, 1, 5, 310, 32), 32),
    "table-per-head": (blocks(PER_HEAD, 32) | window(9), (2, 4, 2, 30, 310, 16), 16),
    "many-intervals": (dilated(3, 20), (1, 2, 2, 3, 200, 32), 32),
    "three-intervals": (intervals([[[0], [50], [200]]], [[[20], [51], [290]]]), (1, 2, 2, 1, 300, 32), 32),
}


def split_kv(*arguments, **keywords):
    from kernel_pytorch.ops.attention.triton_split_kv_kernel import split_kv

    with poisoned():
        return split_kv(kp.device(H200), *arguments, **keywords)


@needs_interpreter
@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("name", CALLS)
def test_within_budget(name: str, splits: int | None) -> None:
    mask, shape, value_dim = CALLS[name]
    batch, q_heads, kv_heads, q_len, kv_len, dim = shape
    qkv = heads(batch, q_heads, kv_heads, q_len, kv_len, dim, value_dim)
    arguments = dict(zip(ATTENTION.argument_names, (*qkv, mask, 0.2, "lse"), strict=True))
    found = compare(ATTENTION, lambda *values: split_kv(*values, splits=splits), arguments, gradients=False)
    assert all(one.ok for one in found), found


@needs_interpreter
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale(scale: float) -> None:
    q, k, v = heads(1, 2, 1, 2, 100, 32)
    exact, exact_lse = ATTENTION.reference(q.double(), k.double(), v.double(), causal(), scale, "lse")
    out, lse = split_kv(q, k, v, causal(), scale, "lse", splits=2)
    torch.testing.assert_close(out, exact.float())
    torch.testing.assert_close(lse, exact_lse.float())


@needs_interpreter
@pytest.mark.parametrize(
    "mask", [causal() & (window(40) | sinks(5)), blocks(TABLE, 32), documents([[100, 210]], causal())], ids=str
)
def test_keys_outside_the_mask_are_not_read(mask: Mask) -> None:
    q, k, v = heads(1, 4, 2, 1, 310, 32)
    out, lse = split_kv(q, k, v, mask, 0.2, "lse", splits=3)
    unseen = ~mask.dense(1, 310)[0, 0, 0]
    assert unseen.any()
    k[:, :, unseen], v[:, :, unseen] = torch.nan, torch.nan
    again, lse_again = split_kv(q, k, v, mask, 0.2, "lse", splits=3)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


@needs_interpreter
@pytest.mark.parametrize("name", ["full", "table", "documents"])
def test_the_backward_is_within_budget(name: str) -> None:
    mask, shape, value_dim = CALLS[name]
    qkv = heads(*shape, value_dim)
    arguments = dict(zip(ATTENTION.argument_names, (*qkv, mask, 0.2, "lse"), strict=True))
    from kernel_pytorch.testing import pretend

    with pretend(H200), poisoned():
        found = compare(ATTENTION, function_of(ATTENTION).pinned("triton-split-kv"), arguments)
    assert all(one.ok for one in found), found


@needs_interpreter
def test_splits_use_the_device_and_have_work() -> None:
    from kernel_pytorch.ops.attention.triton_split_kv_kernel import _splits

    assert _splits(8, 1024, 264) == 32  # 256 programs for 264 places, of 32 tiles each
    assert _splits(128, 128, 264) == 2
    assert _splits(264, 1000, 264) == 1
    for programs, tiles, places in itertools.product((1, 3, 8, 100, 500), (0, 1, 2, 5, 64, 1000), (1, 20, 264)):
        splits = _splits(programs, tiles, places)
        assert 1 <= splits <= max(1, tiles // 2)
        each = -(-tiles // splits)
        assert tiles == 0 or (splits - 1) * each < tiles  # no split without a tile


RELATIVE = [full(), causal(), window(5), window(3, 4), sinks(2), sinks(0), window(0), sinks(2**40)]


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 9), (4, 9), (9, 4), (3, 0)])
def test_relative_intervals_are_those_of_the_layout(q_len: int, kv_len: int) -> None:
    masks = RELATIVE + [a & b for a, b in itertools.combinations(RELATIVE, 2)]
    masks += [(a | b) & c for a, b, c in itertools.permutations(RELATIVE[1:5], 3)]
    for mask in masks:
        found = relative_intervals(mask.node)
        assert found is not None
        for query in range(q_len):
            keys = {j for one in found for j in range(*one.at(kv_len - q_len + query, kv_len))}
            pairs = layout(mask.node, q_len, kv_len).intervals_of(query)
            assert keys == {j for first, last in pairs for j in range(first, last)}, (mask, query)
        is_all = bool(mask.dense(q_len, kv_len).all())
        assert mask.simplified(q_len, kv_len).is_full == is_all or q_len > 1, mask


@pytest.mark.parametrize(
    "mask", [causal() & documents([9], full()), kp.masks.prefix(3), dilated(2, 1), padding([3]), blocks(TABLE, 16)]
)
def test_other_masks_are_not_relative(mask: Mask) -> None:
    assert relative_intervals(mask.node) is None
    assert relative_intervals((mask | causal()).node) is None


def test_a_decoding_step_makes_no_layout() -> None:
    mask = causal() & (window(50) | sinks(4))
    before = list(LAYOUTS._layouts)
    for kv_len in (501, 502, 300):
        qkv = heads(2, 8, 2, 1, kv_len, dim=64, dtype=torch.bfloat16)
        choice = kp.explain(kp.attention, *qkv, mask, device=H200)
        assert choice.kernel.name == "triton-split-kv"
    assert list(LAYOUTS._layouts) == before


def test_few_queries_alone_are_served() -> None:
    def name(*shape: int, mask: Mask) -> str:
        return kp.explain(kp.attention, *heads(*shape), mask, device=H200, kernel="triton-split-kv").kernel.name

    assert name(1, 32, 2, 8, 500, mask=causal()) == "triton-split-kv"
    for shape, words in (
        ((1, 32, 2, 9, 500), "there are 144"),
        ((1, 2, 2, 30, 100), "30 queries over 100 keys"),
    ):
        with pytest.raises(kp.UnsupportedCallError, match=f"is for few queries over many keys.*{words}"):
            name(*shape, mask=causal())
    with pytest.raises(kp.UnsupportedCallError, match=r"one row of the mask's tables: 20 exceed blocks of 16"):
        name(1, 2, 2, 20, 160, mask=blocks(torch.ones(2, 10).bool(), 16))


@pytest.mark.parametrize("kernel", [attention.KERNEL_CUDNN, attention.KERNEL_FLASH, attention.KERNEL_CPU_FLASH])
def test_masks_that_are_full_at_these_lengths_reach_torchs_kernels(kernel: kp.hardware_abstraction.Kernel) -> None:
    """Also in compiled functions, where the mask is not looked at before the kernel is chosen."""
    function = function_of(ATTENTION)
    q, k, v = heads(1, 4, 2, 1, 64, 64, dtype=torch.bfloat16)
    for mask, served in ((causal(), True), (causal() & window(63), True), (causal() & window(62), False)):
        call = function.call("forward", (q, k, v, mask, 0.2, "grad"))
        assert (kernel.refusal(call, kp.device(H200)) is None) == served, mask


def test_cpu_flash_serves_masks_that_are_full_at_these_lengths() -> None:
    q, k, v = heads(1, 4, 2, 1, 64, 64)
    out, _ = function_of(ATTENTION)(q, k, v, causal(), 0.2, "grad", kernel="cpu-flash")
    torch.testing.assert_close(out, ATTENTION.reference(q, k, v, causal(), 0.2, "grad")[0])


@pytest.mark.parametrize("kernel", [attention.KERNEL_CUDNN, attention.KERNEL_FLASH], ids=lambda kernel: kernel.name)
def test_grouped_heads_are_not_copied(
    kernel: kp.hardware_abstraction.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = heads(1, 8, 2, 64, 64, 64, dtype=torch.bfloat16)
    taken: list[torch.Tensor] = []

    def forward(q, k, v, *rest, **keywords):
        taken.extend((k, v))
        return q, drawn(*q.shape[:3])

    def backward(dout, q, k, v, *rest, **keywords):
        taken.extend((k, v))
        return q, k, v

    operator = f"_scaled_dot_product_{'cudnn' if kernel.name == 'cudnn' else 'flash'}_attention"
    monkeypatch.setattr(torch.ops.aten, operator, forward)
    monkeypatch.setattr(torch.ops.aten, f"{operator}_backward", backward)
    device = kp.device(H200)
    out, lse = kernel.function("forward")(device, q, k, v, causal(), 0.2, "grad")
    gradients = kernel.function("backward")(device, out, lse, q, k, v, out, lse, causal(), 0.2, "grad")
    assert [x.data_ptr() for x in taken] == [k.data_ptr(), v.data_ptr()] * 2
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
