"""The cache of layouts is bounded in bytes, and several block tables combine as the definition says."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_pytorch.masks import blocks, causal, window
from kernel_pytorch.masks.layout import _COUNTED_EVERY, LayoutCache


@dataclass
class Kept:
    tensor: torch.Tensor

    def tensors(self):
        return (self.tensor,)


def test_the_cache_is_bounded_in_bytes():
    cache = LayoutCache(most_bytes=1 << 20)
    for left in range(200):
        known = cache.find(window(left).node, 4096, 4096)
        known.walk(64, 64)  # counts as well
        assert cache.bytes <= (1 << 20) + known.bytes
    assert 1 < len(cache) < 200
    assert cache.find(window(199).node, 4096, 4096) is known


def test_what_kernels_add_later_counts_too():
    cache = LayoutCache(most_bytes=1 << 20)
    first = [cache.find(window(left).node, 1024, 1024) for left in range(20)]
    for known in first:
        known.keep("of a kernel", lambda _: Kept(torch.zeros(1 << 17, dtype=torch.uint8)))
    assert cache.bytes > 2 << 20
    for left in range(100, 100 + _COUNTED_EVERY):
        cache.find(window(left).node, 16, 16)
    assert cache.bytes <= 1 << 20


def test_a_step_of_decoding_does_not_count_every_layout(monkeypatch):
    cache, counted = LayoutCache(most_bytes=1 << 30), []
    count = cache._count
    monkeypatch.setattr(cache, "_count", lambda key: (counted.append(key), count(key)))
    for kv_len in range(1, 257):
        cache.find(window(3).node, 1, kv_len)
    assert len(counted) < 256 * 2 + 256 * 257 / _COUNTED_EVERY


def test_a_layout_larger_than_the_bound_is_kept_alone():
    cache = LayoutCache(most_bytes=1)
    first = cache.find(causal().node, 64, 64)
    assert cache.find(causal().node, 64, 64) is first
    cache.find(window(3).node, 64, 64)
    assert len(cache) == 1


def test_three_tables():
    torch.manual_seed(0)
    tables = [torch.rand(1, heads, 6, 6) < 0.5 for heads in (1, 2, 1)]
    mask = (blocks(tables[0], 16) & blocks(tables[1], 16) & causal()) | blocks(tables[2], 16)
    dense = mask.dense(90, 90)
    known = mask.layout(90, 90)
    walk = known.walk(16, 16)
    found = torch.zeros(2, 6, 6, dtype=torch.bool)
    for row in range(12):
        head, t = divmod(row, 6)
        for n in (
            *range(*walk.span[row].tolist()),
            *walk.full[walk.full_offsets[row] : walk.full_offsets[row + 1]],
        ):
            found[head, t, int(n)] = True
        for n in walk.partial[walk.partial_offsets[row] : walk.partial_offsets[row + 1]]:
            found[head, t, int(n)] = True
    padded = torch.nn.functional.pad(dense[0], (0, 6, 0, 6)).unflatten(1, (6, 16)).unflatten(3, (6, 16))
    assert torch.equal(found, padded.any(dim=4).any(dim=2))
    assert known.density == dense.double().mean().item()
