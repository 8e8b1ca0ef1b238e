"""How masks reach FlashAttention-4 and cuDNN's interval attention, and what refuses them; the kernels themselves run
in the backend contract where the libraries and a GPU are."""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Iterator

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch import masks
from kernel_pytorch.hardware_abstraction import library
from kernel_pytorch.hardware_abstraction.library import FLASH_ATTENTION_4
from kernel_pytorch.hardware_abstraction.selection import select
from kernel_pytorch.ops.attention.cudnn_flex_kernel import interval_ends
from kernel_pytorch.ops.attention.flash4_kernel import _tiles
from kernel_pytorch.ops.attention.sequences import Window, packed_sequences, tile_refusal, window_of

BAND = [
    (masks.full(), Window()),
    (masks.causal(), Window(right=0)),
    (masks.window(5, 2), Window(5, 2)),
    (masks.causal() & masks.window(5), Window(5, 0)),
    (masks.window(9, 3) & masks.window(4, 8), Window(4, 3)),
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The versions that libraries claim to have."""
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name in versions:
            return versions[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    for cached in (library._missing, select):
        cached.cache_clear()
    yield versions
    for cached in (library._missing, select):
        cached.cache_clear()


def _reasons(mask: masks.Mask, *, dim: int = 128, value_dim: int | None = None, arch: str = "nvidia/h200") -> dict:
    q, k = (torch.empty(1, 4, 384, dim, dtype=torch.bfloat16, device="meta") for _ in range(2))
    v = torch.empty(1, 4, 384, value_dim or dim, dtype=torch.bfloat16, device="meta")
    choice = kp.explain(kp.attention, q, k, v, mask, device=arch)
    return {verdict.kernel: verdict.reason for verdict in choice.verdicts}


@pytest.mark.parametrize(("mask", "window"), BAND, ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (3, 9), (9, 3)])
def test_a_window_equals_the_mask(mask: masks.Mask, window: Window, q_len: int, kv_len: int) -> None:
    assert window_of(mask.node) == window
    i = torch.arange(q_len)[:, None] + kv_len - q_len
    j = torch.arange(kv_len)[None, :]
    left = torch.inf if window.left is None else window.left
    right = torch.inf if window.right is None else window.right
    assert torch.equal((i - j <= left) & (j - i <= right), mask.dense(q_len, kv_len)[0, 0])


@pytest.mark.parametrize(
    "mask", [masks.sinks(3), masks.causal() | masks.prefix(4), masks.causal() & masks.sinks(2)]
)
def test_masks_that_are_not_a_window_have_none(mask: masks.Mask) -> None:
    assert window_of(mask.node) is None
    assert packed_sequences(mask.node) is None


@pytest.mark.parametrize(
    "mask",
    [
        masks.documents([[4, 0, 2, 6]], masks.causal()),
        masks.documents([[4, 8], [12]], masks.full()),
        masks.documents([[5, 7]], masks.causal()) & masks.window(2),
        masks.window(2, 1) & masks.documents([[5, 7]], masks.window(1, 3)),
    ],
    ids=str,
)
def test_packed_sequences_equal_the_mask(mask: masks.Mask) -> None:
    packed = packed_sequences(mask.node)
    assert packed is not None
    offsets = packed.offsets(2)
    dense = torch.zeros(2, 12, 12, dtype=torch.bool)
    for begin, end in itertools.pairwise(offsets):
        i, j = torch.arange(12)[:, None], torch.arange(12)[None, :]
        left = torch.inf if packed.window.left is None else packed.window.left
        right = torch.inf if packed.window.right is None else packed.window.right
        inside = (i >= begin % 12) & (i < (end - 1) % 12 + 1) & (j >= begin % 12) & (j < (end - 1) % 12 + 1)
        dense[begin // 12] |= inside & (i - j <= left) & (j - i <= right)
    assert torch.equal(dense, mask.dense(12, 12)[:, 0].expand(2, -1, -1))
    assert packed.longest == max(b - a for a, b in itertools.pairwise(offsets))


@pytest.mark.parametrize(
    "mask",
    [
        masks.full(),
        masks.causal() & (masks.window(3) | masks.sinks(2)),
        masks.window(2, 1),
        masks.causal() | masks.prefix(5),
        masks.documents([[4, 1, 8], [13]], masks.causal() & (masks.window(2) | masks.sinks(1))),
        masks.causal() & masks.padding([3, 13], side="left"),
        masks.dilated(3, left=2),
    ],
    ids=str,
)
def test_interval_ends_equal_the_mask(mask: masks.Mask) -> None:
    ends = interval_ends(mask.layout(13, 13), 2)
    assert ends.shape[1] % 2 == 1
    assert ends.dtype == torch.int32
    assert ends.is_contiguous()
    keys = torch.arange(13)
    by_end = ends[0].reshape(-1, 2, 13, 1)
    attends = keys < by_end[0]
    for index in range(1, len(by_end), 2):
        attends = attends | ((keys >= by_end[index]) & (keys < by_end[index + 1]))
    assert torch.equal(attends, mask.dense(13, 13)[:, 0].expand(2, -1, -1))


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_tiles_and_intervals_equal_the_mask(by_key: bool, heads: int) -> None:
    table = torch.rand(heads, 3, 4, generator=torch.Generator().manual_seed(1)) < 0.6
    mask = masks.causal() & masks.blocks(table)
    known = mask.layout(300, 490)
    assert tile_refusal(known) is None
    tiles = _tiles(known, torch.device("cpu"), by_key)
    first, last = tiles.intervals
    keys = torch.arange(490)
    inside = ((keys >= first[0, :, :, None]) & (keys < last[0, :, :, None])).any(dim=0)
    dense = torch.zeros(1, heads, 300, 490, dtype=torch.bool)
    for head in range(heads):
        for counts, listed, is_full in (
            (tiles.partial_count, tiles.partial, False),
            (tiles.full_count, tiles.full, True),
        ):
            for row in range(counts.shape[2]):
                for column in listed[0, head, row, : int(counts[0, head, row])].tolist():
                    t, n = (column, row) if by_key else (row, column)
                    where = (0, head, slice(t * 128, (t + 1) * 128), slice(n * 128, (n + 1) * 128))
                    dense[where] = True if is_full else inside[where[2:]]
    assert torch.equal(dense, mask.dense(300, 490))


def test_without_the_libraries_the_reason_says_what_to_install(installed: dict[str, str]) -> None:
    reasons = _reasons(masks.causal())
    assert reasons["flash-4"] == "needs flash-attn-4: pip install 'kernel-pytorch[hopper]'"
    assert "nvidia-cudnn-frontend" in reasons["cudnn-flex"]


def test_another_version_is_refused_with_the_tested_one(installed: dict[str, str]) -> None:
    installed["flash-attn-4"] = "9.9"
    reason = _reasons(masks.causal())["flash-4"]
    assert "9.9 is installed" in reason
    assert FLASH_ATTENTION_4.tested[-1] in reason


def _pretend(installed: dict[str, str]) -> None:
    for known in (library.FLASH_ATTENTION_4, library.CUDNN_FRONTEND):
        installed[known.distribution] = known.tested[-1]


@pytest.mark.parametrize(
    ("mask", "fits"),
    [
        (masks.full(), ("flash-4", "cudnn-flex")),
        (masks.causal() & masks.window(100), ("flash-4", "cudnn-flex")),
        (masks.documents([[100, 284]], masks.causal()), ("flash-4", "cudnn-flex")),
        (masks.causal() & (masks.window(100) | masks.sinks(4)), ("cudnn-flex",)),
        (masks.blocks(torch.ones(3, 3, dtype=torch.bool)), ("flash-4",)),
        (masks.blocks(torch.ones(6, 6, dtype=torch.bool), block=64), ()),
        ((masks.causal() & masks.blocks(torch.eye(3, dtype=torch.bool))) | masks.window(9), ()),
        (masks.dilated(3, left=20), ()),
    ],
    ids=str,
)
def test_masks_reach_the_kernel_that_knows_them(
    installed: dict[str, str], mask: masks.Mask, fits: tuple[str, ...]
) -> None:
    _pretend(installed)
    reasons = _reasons(mask)
    refused = ("takes", "knows", "walks", "compares")
    found = tuple(name for name in ("flash-4", "cudnn-flex") if not reasons[name].startswith(refused))
    assert found == fits, reasons


@pytest.mark.parametrize("dim", [8, 40, 80, 104, 112])
def test_head_dims_with_wrong_gradients_are_refused(installed: dict[str, str], dim: int) -> None:
    _pretend(installed)
    assert "wrong dq" in _reasons(masks.causal(), dim=dim)["flash-4"]
    assert ("wrong dq" in _reasons(masks.causal(), dim=dim)["cudnn-flex"]) == (dim > 96)


def test_other_architectures_are_refused(installed: dict[str, str]) -> None:
    _pretend(installed)
    assert "sm_90 alone" in _reasons(masks.causal(), arch="nvidia/b200")["flash-4"]
