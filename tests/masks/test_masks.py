"""Masks: constructors against their definitions, walks against the dense matrix, memory, bad input."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import example, given, settings

import kernel_pytorch as kp
from kernel_pytorch.masks import Mask, blocks, causal, documents, from_code, full, prefix, sinks, window
from kernel_pytorch.masks import code as mask_code
from kernel_pytorch.masks.layout import LAYOUTS
from mask_expressions import Expression, built, cases, check_layout, in_words

generated = settings(max_examples=200, deadline=None, derandomize=True)


# The constructors.

LENGTHS = [(1, 1), (5, 5), (40, 40), (3, 40), (40, 3), (33, 70), (17, 16)]
LEAVES: list[Expression] = [
    ("full",),
    ("causal",),
    ("window", 0),
    ("window", 4),
    ("window", 2, 3),
    ("window", 0, 100),
    ("window", 2**40, 2**40),
    ("sinks", 0),
    ("sinks", 3),
    ("sinks", 2**40),
    ("prefix", 0),
    ("prefix", 7),
    ("prefix", 2**40),
]


@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
@pytest.mark.parametrize("expression", LEAVES, ids=str)
def test_constructors(expression: Expression, q_len: int, kv_len: int) -> None:
    mask = built(expression)
    assert torch.equal(mask.dense(q_len, kv_len), in_words(expression, 1, 1, q_len, kv_len))
    check_layout(mask, q_len, kv_len)


@pytest.mark.parametrize(
    ("expression", "batch", "heads", "q_len", "kv_len"),
    [
        (("documents", [3, 0, 37], ("causal",)), 1, 1, 40, 40),
        (("documents", [3, 10, 27, 0], ("window", 2, 1)), 1, 1, 20, 40),
        (("documents", [0, 3, 10, 27], ("sinks", 2)), 1, 1, 60, 40),
        (("documents", [[40], [20, 20], [1] * 40], ("&", ("causal",), ("window", 5))), 3, 1, 40, 40),
        (("documents", [5, 35], ("|", ("prefix", 3), ("causal",))), 1, 1, 40, 40),
        (("blocks", [[True, False, True], [False, False, False]], 16), 1, 1, 20, 40),
        (("blocks", [[[True, False], [False, True]], [[False, True], [True, True]]], 32), 1, 2, 40, 50),
        (("blocks", [[[[True, False]]], [[[False, True]]]], 48), 2, 1, 17, 90),
    ],
    ids=str,
)
def test_documents_and_blocks(expression: Expression, batch: int, heads: int, q_len: int, kv_len: int) -> None:
    mask = built(expression)
    assert torch.equal(mask.dense(q_len, kv_len), in_words(expression, batch, heads, q_len, kv_len))
    check_layout(mask, q_len, kv_len)


def test_a_table_in_every_form_is_the_same_mask() -> None:
    table = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) < 0.4
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), table.sum(dim=1).cumsum(0)])
    columns = table.nonzero()[:, 1]
    expected = blocks(table, 16).dense(80, 112)
    sparse = [(offsets, columns), (offsets.int().numpy(), columns.tolist())]
    for form in (table.numpy(), table.tolist(), table[None], table[None, None], *sparse):
        assert torch.equal(blocks(form, 16).dense(80, 112), expected)
    assert blocks(table.numpy(), 16) == blocks(table[None], 16) == blocks(table, 16)
    assert blocks(sparse[0], 16) == blocks(sparse[1], 16)
    twice = (torch.tensor([0, 3]), torch.tensor([2, 0, 2]))
    assert blocks(twice, 16).dense(16, 48)[0, 0, 0].tolist() == [True] * 16 + [False] * 16 + [True] * 16
    check_layout(blocks((offsets, columns), 16), 80, 112)


def test_documents_take_lengths_in_any_form() -> None:
    expected = documents([2, 3, 1])
    for form in ((2, 3, 1), torch.tensor([2, 3, 1]), np.array([2, 3, 1]), [[2, 3, 1]], torch.tensor([[2, 3, 1]])):
        assert documents(form) == expected
    assert documents(range(1, 4)) == documents([1, 2, 3])
    assert documents(torch.tensor([[2, 4], [3, 3]])) == documents([[2, 4], [3, 3]])


# Expressions.


@generated
@given(cases())
@example((("|", ("&", ("causal",), ("window", 3)), ("sinks", 2)), 1, 1, 50, 50))
def test_expressions(case: tuple[Expression, int, int, int, int]) -> None:
    """Dense matrix, walks, density and intervals of any expression agree with the definition."""
    expression, batch, heads, q_len, kv_len = case
    mask = built(expression)
    dense = mask.dense(q_len, kv_len)
    assert torch.equal(dense.expand(batch, heads, -1, -1), in_words(expression, batch, heads, q_len, kv_len))
    check_layout(mask, q_len, kv_len)
    if dense.numel():
        assert mask.density(q_len, kv_len) == pytest.approx(dense.double().mean().item())


@generated
@given(cases())
def test_codes(case: tuple[Expression, int, int, int, int]) -> None:
    mask = built(case[0])
    assert mask.code.dtype == torch.int64
    assert mask_code.decode(mask.code) == mask.node
    assert torch.equal(mask_code.encode(mask_code.decode(mask.code)), mask.code)
    again = Mask(mask.code.clone())
    others = (
        again,
        from_code(mask.code.clone()),
        pickle.loads(pickle.dumps(mask)),
        copy.deepcopy(mask),
        built(case[0]),
    )
    for other in others:
        assert (other, hash(other), repr(other)) == (mask, hash(mask), repr(mask))
    leaves, tree = pytree.tree_flatten((mask, 1))
    assert pytree.tree_unflatten(leaves, tree)[0] == mask
    # A truncated code raises an error.
    for cut in range(1, len(mask.code), max(1, len(mask.code) // 8)):
        with pytest.raises(ValueError, match=r"make masks with kp\.masks|lengths"):
            Mask(mask.code[cut:]).node  # noqa: B018


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([], "cut short"),
        ([1], "cut short"),
        ([99, 0], r"unknown node \(99, 0\)"),
        ([0, 0, 9, 0], "wrong numbers for part"),
        ([0, 0, 4, 4, 0, 0, 1, 0, 5, 1, 0, 4, 9, 10], "wrong numbers for part"),
        ([0, 0, 4, 4, 0, 0, 7, 0, 4, 1, 0, 4, 9, 10], "wrong numbers for part"),
        ([-1, 0], r"unknown node \(-1, 0\)"),
        ([1, 5], r"unknown node \(1, 5\)"),
        ([1, -1], r"unknown node \(1, -1\)"),
        ([0, 0, 1, 0], "numbers left over"),
        ([1, 0, 7, 0], "cut short"),
        ([5, 2, 1], "wrong numbers for window"),
        ([-5, 0, 2, 2], "wrong numbers for window"),
        ([3, 1, 1], "wrong numbers for causal"),
        ([0, 0, 5, 0], "wrong numbers for documents"),
        ([0, 0, 1, 3, 2, 5, 3], "wrong numbers for documents"),
        ([0, 0, 1, 2, -2, 3, 5, 4], "lengths=-2"),
        ([0, 0, 2, 1, 4, 1, 5, 5, 5], r"lengths sum to \[4, 5\]"),
        ([1, 1, 2, 2, 16, 1, 1, 0, 6, 8], "wrong numbers for blocks"),
        ([1, 1, 1, 2, 16, 1, 7, 6, 7], "wrong numbers for blocks"),
    ],
)
def test_a_corrupt_code_is_an_error(numbers: list[int], message: str) -> None:
    code = torch.tensor(numbers, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        Mask(code).node  # noqa: B018
    with pytest.raises(ValueError, match=message):
        from_code(code)


def test_a_converted_code_is_an_error() -> None:
    for code in (causal().code.int(), causal().code.half(), causal().code[None]):
        with pytest.raises(TypeError, match=r"mask's code is .*: it must stay int64"):
            from_code(code)


def test_whole_numbers_of_numpy_are_taken() -> None:
    three = np.int64(3)
    assert str(window(three, np.int32(1)) | sinks(three)) == "window(3, 1) | sinks(3)"
    assert documents([three, np.uint8(2)]) == documents([3, 2])
    assert blocks(EYE, np.int64(16)) == blocks(EYE, 16)


def test_equality() -> None:
    assert window(5) == window(5, 0) != window(5, 1)
    assert causal() != full()
    assert causal() & full() != full() & causal(), "expressions, not what they mean"
    assert causal() != "causal()"
    assert len({causal(), causal(), full(), window(3) | sinks(2), window(3) | sinks(2)}) == 3
    assert documents([2, 3]) != documents([3, 2])
    assert causal().is_causal
    assert not causal().is_full
    assert full().is_full
    assert not (causal() & full()).is_causal


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (causal() & (window(4096) | sinks(64)), "causal() & (window(4096) | sinks(64))"),
        ((causal() & window(3, 2)) & full(), "(causal() & window(3, 2)) & full()"),
        (prefix(9), "prefix(9)"),
        (documents([5, 6], causal()), "documents([5, 6], causal())"),
        (documents([[5, 6], [11]]), "documents([[5, 6], [11]], full())"),
        (documents([1] * 9), "documents([1, 1, 1, 1, ...] (9 of them), full())"),
        (blocks(torch.eye(3, dtype=torch.bool), 16), "blocks(3x3, 3 kept, block=16)"),
        (blocks(torch.ones(4, 2, 3, dtype=torch.bool)), "blocks(4 of 2x3, 24 kept, block=128)"),
    ],
    ids=str,
)
def test_repr(mask: Mask, text: str) -> None:
    assert repr(mask) == text


def test_repr_of_a_table_in_csr_form() -> None:
    text = repr(blocks((torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1])), 16))
    assert text == "blocks(2 rows, 3 kept, block=16)"


def test_a_repr_is_short_for_any_mask() -> None:
    large = documents([[1] * 500] * 50) & blocks(torch.ones(500, 500, dtype=torch.bool))
    assert len(repr(large)) < 400


# Size: O(queries + tiles), never queries x keys.


def test_a_million_tokens() -> None:
    length, mask = 1 << 20, causal() & (window(4096) | sinks(64))
    LAYOUTS.clear()
    tracemalloc.start()
    known = mask.layout(length, length)
    walks = [known.walk(128, 128), known.walk(128, 128, by_key=True), known.walk(64, 64)]
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    LAYOUTS.clear()
    tensors = [tensor for walk in walks for tensor in walk.tensors()]
    held = known.first.nbytes + known.last.nbytes + sum(tensor.nbytes for tensor in tensors)
    assert held < 64e6
    assert kept < 64e6
    assert peak < 128e6, "what is made on the way"
    assert mask.code.nbytes < 1000
    assert known.density == pytest.approx((4097 + 64) / length, rel=0.01)


def test_memory_of_a_table_follows_what_it_keeps() -> None:
    table = torch.eye(2048, dtype=torch.bool)
    mask = blocks(table) & causal()
    walk = mask.layout(2048 * 128, 2048 * 128).walk(128, 128)
    assert walk.tiles == 2048
    assert mask.code.nbytes < 5 * 2048 * 8


def test_the_same_mask_is_built_once() -> None:
    LAYOUTS.clear()
    known = (causal() & (window(4096) | sinks(64))).layout(1 << 20, 1 << 20)
    assert (causal() & (window(4096) | sinks(64))).layout(1 << 20, 1 << 20) is known
    assert known.walk(64, 64) is known.walk(64, 64)
    LAYOUTS.clear()


# Bad input: each error names the argument, its value and the remedy.

EYE = torch.eye(2, dtype=torch.bool)
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "window-negative": (lambda: window(-1), ValueError, "left=-1: use 0 or more"),
    "window-right": (lambda: window(1, -2), ValueError, "right=-2: use 0 or more"),
    "window-float": (lambda: window(1.5), TypeError, r"left=1\.5: expected a whole number"),
    "window-bool": (lambda: window(True), TypeError, "left=True: expected a whole number"),
    "window-text": (lambda: window("3"), TypeError, "left='3': expected a whole number"),
    "window-none": (lambda: window(None), TypeError, "left=None: expected a whole number"),
    "window-huge": (lambda: window(1 << 70), ValueError, r"left=\d+: use less than"),
    "sinks-negative": (lambda: sinks(-3), ValueError, "n=-3: use 0 or more"),
    "sinks-float": (lambda: sinks(3.0), TypeError, r"n=3\.0: expected a whole number"),
    "prefix-negative": (lambda: prefix(-3), ValueError, "n=-3: use 0 or more"),
    "prefix-bool": (lambda: prefix(False), TypeError, "n=False: expected a whole number"),
    "lengths-none": (lambda: documents(None), TypeError, "lengths=None: expected a list of lengths"),
    "lengths-number": (lambda: documents(5), TypeError, "lengths=5: expected a list of lengths"),
    "lengths-scalar": (lambda: documents(torch.tensor(5)), TypeError, r"lengths=tensor\(5\): expected a list"),
    "lengths-text": (lambda: documents("55"), TypeError, "lengths='55': expected a list of lengths"),
    "lengths-empty": (lambda: documents([]), ValueError, r"lengths=\[\]: name at least one"),
    "lengths-empty-row": (lambda: documents([[5], []]), ValueError, r"lengths=\[\[5\], \[\]\]: every entry"),
    "lengths-mixed": (lambda: documents([[5], 5]), TypeError, r"lengths=\[\[5\], 5\]: .*use one list"),
    "lengths-mixed-2": (lambda: documents([5, [5]]), TypeError, r"lengths=\[5\]: expected a whole number"),
    "lengths-negative": (lambda: documents([5, -1]), ValueError, "lengths=-1: use 0 or more"),
    "lengths-float": (lambda: documents(torch.tensor([1.0])), TypeError, r"lengths=1\.0: expected a whole"),
    "lengths-bool": (lambda: documents([True]), TypeError, "lengths=True: expected a whole number"),
    "lengths-differ": (lambda: documents([[5, 1], [5]]), ValueError, r"lengths sum to \[6, 5\]: .* same number"),
    "lengths-short": (lambda: documents([5, 1]).dense(7, 7), ValueError, "lengths sum to 6: there are 7 keys"),
    "lengths-long": (lambda: documents([5, 1]).density(4, 4), ValueError, "lengths sum to 6: there are 4 keys"),
    "inner-documents": (
        lambda: documents([6], documents([6])),
        ValueError,
        r"inner=documents.*compose them with &",
    ),
    "inner-blocks": (lambda: documents([6], causal() & blocks(EYE)), ValueError, "inner=.*compose them with &"),
    "inner-text": (lambda: documents([6], "causal"), TypeError, "inner='causal': expected a mask"),
    "table-dtype": (lambda: blocks(EYE.int()), TypeError, "table has dtype int32: use booleans, or"),
    "table-ndim": (lambda: blocks(EYE[0]), ValueError, r"table has shape \[2\]: use \(rows, columns\)"),
    "table-5d": (lambda: blocks(EYE[None, None, None]), ValueError, r"table has shape \[1, 1, 1, 2, 2\]: use"),
    "table-empty": (lambda: blocks(EYE[:0]), ValueError, r"table has shape \[0, 2\]: use"),
    "table-list": (lambda: blocks([[1, 0]]), TypeError, "table has dtype int64: use booleans"),
    "table-none": (lambda: blocks(None), TypeError, "table has dtype object: use booleans"),
    "table-small": (lambda: blocks(EYE, 16).dense(64, 64), ValueError, "table has 2x2 tiles of 16: .* need 4x4"),
    "table-wide": (lambda: blocks(EYE, 16).layout(32, 16), ValueError, "table has 2x2 tiles of 16: .* need 2x1"),
    "block-odd": (lambda: blocks(EYE, 24), ValueError, "block=24: use a multiple of 16"),
    "block-small": (lambda: blocks(EYE, 8), ValueError, "block=8: use 16 or more"),
    "block-negative": (lambda: blocks(EYE, -16), ValueError, "block=-16: use 16 or more"),
    "block-float": (lambda: blocks(EYE, 16.0), TypeError, r"block=16\.0: expected a whole number"),
    "csr-three": (lambda: blocks((EYE, EYE, EYE)), ValueError, r"table is a tuple of 3: .* \(offsets, columns\)"),
    "csr-start": (lambda: blocks(([1, 2], [0, 1])), ValueError, "table's offsets must rise from 0"),
    "csr-end": (lambda: blocks(([0, 3], [0, 1])), ValueError, "table's offsets must rise from 0"),
    "csr-falls": (lambda: blocks(([0, 2, 1, 2], [0, 1])), ValueError, "table's offsets must rise from 0"),
    "csr-2d": (lambda: blocks(([[0, 2]], [0, 1])), ValueError, "table in CSR form needs one-dimensional"),
    "csr-negative": (lambda: blocks(([0, 2], [0, -1])), ValueError, "table's columns hold -1"),
    "csr-float": (lambda: blocks(([0.0, 1.5], [0.0])), TypeError, "table's offsets .*float64: use whole numbers"),
    "csr-wide": (
        lambda: blocks(([0, 2], [0, 9]), 16).dense(16, 64),
        ValueError,
        "table has 1x10 tiles .* need 1x4",
    ),
    "and-number": (lambda: causal() & 3, TypeError, "a mask composes with a mask, not with int"),
    "or-tensor": (lambda: causal() | EYE, TypeError, "a mask composes with a mask, not with Tensor"),
    "batches": (
        lambda: (documents([[6]] * 2) & documents([[6]] * 3)).layout(6, 6),
        ValueError,
        r"mask mixes batches \[2, 3\].*: use one size, or 1",
    ),
    "batches-or": (
        lambda: (documents([[6]] * 2) | blocks(EYE[:1, :1].expand(3, 1, 1, 1), 16)).layout(6, 6),
        ValueError,
        r"mask mixes batches \[2, 3\]",
    ),
    "heads": (
        lambda: (blocks(EYE.expand(2, 2, 2), 16) & blocks(EYE.expand(3, 2, 2), 16)).layout(32, 32),
        ValueError,
        r"mask mixes .*heads \[2, 3\]: use one size, or 1",
    ),
    "five-tables": (
        lambda: (blocks(EYE, 16) | blocks(EYE, 16) | blocks(EYE, 16) | blocks(EYE, 16) | blocks(EYE, 16)).layout(
            32, 32
        ),
        ValueError,
        "mask has 5 block tables: combine them",
    ),
    "tile": (
        lambda: blocks(EYE, 16).layout(32, 32).walk(32, 16),
        ValueError,
        "queries=32: it must divide the blocks of the tables, so 16",
    ),
    "show-empty": (lambda: causal().show(0), ValueError, "q_len=0, kv_len=0: there is nothing to draw"),
    "show-size": (lambda: causal().show(4, size=0), ValueError, "size=0: use 1 or more"),
}


@pytest.mark.parametrize(("make", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# Drawings.


def test_show() -> None:
    picture = (causal() & (window(2) | sinks(1))).show(6)
    assert picture == "█\n██\n███\n████\n█ ███\n█  ███"
    assert blocks(EYE, 16).show(32, size=4) == "██\n██\n  ██\n  ██"
    assert causal().show(2, 4) == "███\n████"
    assert sinks(0).show(2) == "\n"
    # A cell with any kept pair is not blank.
    assert full().show(1000, size=2) == "██\n██"
    assert sinks(1).show(1000, size=3) == "░\n░\n░"


def test_show_takes_memory_in_proportion_to_the_length() -> None:
    mask = causal() & (window(4096) | sinks(64))
    tracemalloc.start()
    lines = mask.show(1 << 20).split("\n")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 128e6, "a dense matrix would be a terabyte"
    assert len(lines) == 32
    assert all(line[0] != " " and line[-1] != " " and len(line) == row + 1 for row, line in enumerate(lines))


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "mask.png"
    text = (causal() & window(30)).show(200, path=path)
    assert text.count("\n") == 31
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_mask_first_made_in_inference_mode_can_be_trained_with() -> None:
    with torch.inference_mode():
        mask = causal() & window(137)
    assert not mask.code.is_inference()
    q = torch.randn(1, 1, 8, 16, requires_grad=True)
    torch.compile(lambda q: kp.attention(q, q, q, mask), backend="aot_eager")(q).sum().backward()
    assert q.grad is not None
