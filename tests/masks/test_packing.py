"""Masks by batch entry and by query: padding, intervals, unequal documents, dilation, tensors of booleans."""

from __future__ import annotations

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch.masks import causal, dilated, documents, from_dense, intervals, padding, prefix, window


def check_kernels(mask: kp.masks.Mask, batch: int, q_len: int, kv_len: int, heads: int = 2) -> None:
    """Forward and gradients of the tiled kernel against the dense definition, in float64."""
    torch.manual_seed(0)
    shapes = [(batch, heads, q_len, 16), (batch, 1, kv_len, 16), (batch, 1, kv_len, 16)]
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    out = kp.attention(*tensors, mask, kernel="tiled")
    q, k, v = tensors
    scores = (q @ k.transpose(-1, -2) * 0.25).masked_fill(~mask.dense(q_len, kv_len), -torch.inf)
    expected = torch.nan_to_num(scores.softmax(-1)) @ v
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad(expected.square().sum(), tensors)
    for found, known in zip(torch.autograd.grad(out.square().sum(), tensors), wanted, strict=True):
        torch.testing.assert_close(found, torch.nan_to_num(known))


def test_python_and_is_an_error():
    for compose in (lambda: causal() and window(3), lambda: causal() or window(3), lambda: not causal()):
        with pytest.raises(TypeError, match=r"causal\(\) has no truth value: compose masks with & and \|"):
            compose()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side):
    mask = causal() & padding([3, 7, 0], side=side)
    dense = mask.dense(7, 7)
    for entry, length in enumerate((3, 7, 0)):
        for i in range(7):
            for j in range(7):
                real = j < length if side == "right" else j >= 7 - length
                assert bool(dense[entry, 0, i, j]) == (real and j <= i)
    assert mask == causal() & padding(torch.tensor([3, 7, 0]), side=side)
    check_kernels(mask, 3, 7, 7)
    check_kernels(mask, 3, 2, 9)
    with pytest.raises(ValueError, match="there are 5 keys"):
        mask.dense(5, 5)
    with pytest.raises(ValueError, match="batch of 3 and q has 2"):
        kp.attention(*torch.zeros(3, 2, 1, 7, 8), mask)
    with pytest.raises(ValueError, match="side='middle'"):
        padding([1], side="middle")


def test_intervals():
    mask = intervals([[0, 1, 2], [0, 0, 0]], [[1, 1, 5], [5, 4, 3]])
    expected = torch.tensor(
        [[[1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]], [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]]
    )
    assert torch.equal(mask.dense(3, 5)[:, 0], expected.bool())
    check_kernels(mask, 2, 3, 5)
    check_kernels(mask & window(2, 1), 2, 3, 5)
    with pytest.raises(ValueError, match="intervals for 3 queries and q has 4"):
        mask.dense(4, 5)
    with pytest.raises(ValueError, match="up to key 5 and k has 4"):
        mask.dense(3, 4)
    with pytest.raises(ValueError, match="have no local positions"):
        documents([5], mask)


def test_documents_of_queries_and_keys():
    mask = documents([3, 0, 4], causal(), query_lengths=[1, 2, 5])
    expected = torch.zeros(8, 7, dtype=torch.bool)
    expected[0, :3] = True
    expected[3:8, 3:7] = causal().dense(5, 4)[0, 0]
    assert torch.equal(mask.dense(8, 7)[0, 0], expected)
    check_kernels(mask, 1, 8, 7)
    with pytest.raises(ValueError, match="give each document both"):
        documents([3, 4], query_lengths=[3])


def test_a_cache_with_unequal_lengths():
    """Keys are padded on the right, and two new queries are at the end of each entry's keys."""
    lengths, most = [5, 9, 2], 9
    mask = documents([[n, most - n] for n in lengths], causal(), query_lengths=[[2, 0]] * 3)
    for entry, n in enumerate(lengths):
        alone = causal().dense(2, n)[0, 0]
        assert torch.equal(mask.dense(2, most)[entry, 0, :, :n], alone)
        assert not mask.dense(2, most)[entry, 0, :, n:].any()
    check_kernels(mask, 3, 2, most)


def test_a_mask_for_each_document():
    inner = [causal() | prefix(2), causal() | prefix(3)]
    mask = documents([4, 5], inner)
    expected = torch.zeros(9, 9, dtype=torch.bool)
    expected[:4, :4], expected[4:, 4:] = inner[0].dense(4, 4)[0, 0], inner[1].dense(5, 5)[0, 0]
    assert torch.equal(mask.dense(9, 9)[0, 0], expected)
    check_kernels(mask, 2, 9, 9)
    with pytest.raises(TypeError, match="one for each of 3 documents"):
        documents([4, 4, 1], inner)


def test_cu_seqlens():
    ends = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    assert documents(cu_seqlens=ends, inner=causal()) == documents([3, 0, 5], causal())
    with pytest.raises(ValueError, match="must begin with 0"):
        documents(cu_seqlens=ends[1:])
    with pytest.raises(ValueError, match=r"cu_seqlens=\[\]: it must begin with 0"):
        documents(cu_seqlens=ends[:0])
    with pytest.raises(ValueError, match="give one of the two"):
        documents([3], cu_seqlens=ends)
    with pytest.raises(ValueError, match="lengths=-1"):
        documents(cu_seqlens=torch.tensor([0, 3, 2]))


def test_cu_seqlens_are_copied_to_the_host_once_and_read_there():
    """Each further read of a GPU tensor would synchronize."""
    ends, copied = torch.tensor([0, 3, 8]), []

    class OnDevice(torch.Tensor):
        """A tensor that may be copied to the host; every other read raises."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.cpu:
                copied.append(func)
                return ends
            if func in (torch.Tensor.ndim.__get__, torch.Tensor.is_floating_point):
                return super().__torch_function__(func, types, args, kwargs or {})
            raise AssertionError(f"{func} reads the tensor")

    assert documents(cu_seqlens=ends.as_subclass(OnDevice)) == documents([3, 5])
    assert len(copied) == 1


def test_dilated():
    mask = dilated(3, left=2, right=1)
    dense = mask.dense(20, 20)[0, 0]
    for i in range(20):
        for j in range(20):
            assert bool(dense[i, j]) == (j - i in (-6, -3, 0, 3))
    check_kernels(mask, 1, 20, 20)
    check_kernels(documents([7, 13], mask) & causal(), 1, 20, 20)
    with pytest.raises(ValueError, match="at most 256 positions in all"):
        dilated(2, left=256)


def test_from_dense():
    torch.manual_seed(0)
    assert from_dense(torch.ones(3, 5, dtype=torch.bool)).is_full
    assert from_dense(causal().dense(3, 5)).is_causal
    assert from_dense(causal().dense(5, 3)).is_causal
    keep = torch.rand(2, 1, 30, 40) < 0.5
    keep[:, :, 3] = False
    assert torch.equal(from_dense(keep).dense(30, 40), keep)
    check_kernels(from_dense(keep), 2, 30, 40)
    with pytest.raises(ValueError, match="attends to 100 separate runs"):
        from_dense((torch.arange(200) % 2 == 0).expand(2, 200))
    with pytest.raises(ValueError, match=r"use \(queries, keys\)"):
        from_dense(torch.ones(1, 2, 3, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    "mask", [padding([3, 5]), intervals([0, 1], [2, 3]), dilated(2, 3), padding([2, 1], "left") & causal()], ids=str
)
def test_codes(mask):
    assert kp.masks.from_code(mask.code) == mask
    assert kp.masks.from_code(mask.code) is not None
    with pytest.raises(ValueError, match=r"make masks with kp\.masks"):
        kp.masks.from_code(torch.cat([mask.code[:-1], mask.code[-1:] + 1]))


def test_padding_in_a_compiled_function():
    q, k, v = torch.randn(3, 2, 2, 8, 16)

    @torch.compile(backend="eager", fullgraph=True)
    def padded(q, k, v, lengths):
        return kp.attention(q, k, v, kp.masks.causal() & kp.masks.padding(lengths, side="left"))

    for lengths in (torch.tensor([3, 8]), torch.tensor([8, 1])):
        expected = kp.attention(q, k, v, causal() & padding(lengths, side="left"))
        torch.testing.assert_close(padded(q, k, v, lengths), expected)


@pytest.mark.parametrize("mask", [padding([9, 5]), dilated(2, 3)], ids=str)
def test_parts(mask):
    dense = mask.dense(12, 12)
    part = mask.part(12, 12, queries=[(2, 5), (8, 12)], keys=[(0, 6), (7, 11)])
    rows, columns = [2, 3, 4, 8, 9, 10, 11], [0, 1, 2, 3, 4, 5, 7, 8, 9, 10]
    assert torch.equal(part.dense(7, 10), dense[:, :, rows][..., columns])
    known = part.layout(7, 10)
    for query in range(7):
        kept = torch.zeros(10, dtype=torch.bool)
        for first, last in known.intervals_of(query):
            kept[first:last] = True
        assert torch.equal(kept, part.dense(7, 10)[0, 0, query])
