"""Placement of tokens on ranks, and the keys that each rank needs from each other.

Ranks hold ascending ranges of tokens, with equal numbers of tokens as far as the length allows. There are three
styles, from the most local to the most balanced: one range per rank (windows, where every token has the same work), a
low and a high range per rank (causal: *zigzag*), and tiles assigned by their number of kept pairs (anything else).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np

from kernel_pytorch.masks import Mask
from kernel_pytorch.masks.layout import Layout
from kernel_pytorch.masks.part import Ranges, checked_ranges, indices, size

__all__ = ["NO_INTERVALS", "Placement", "joined_intervals", "needed_keys", "place", "table_unit", "work_of_queries"]

Style = Literal["auto", "contiguous", "zigzag", "balanced"]
_EVEN_ENOUGH = 1.05  # largest accepted work of the busiest rank over the mean, for a more local style
_TILES_A_RANK = 32  # tiles per rank of the balanced style, at most

Array = np.ndarray[Any, Any]
NO_INTERVALS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Placement:
    """The tokens of every rank.

    Example:
        >>> import kernel_pytorch as kp
        >>> placement = kp.context_parallel.place(kp.masks.causal(), length=16, ranks=2)
        >>> placement.style, placement.ranges
        ('zigzag', (((0, 4), (12, 16)), ((4, 12),)))
    """

    length: int
    ranges: tuple[Ranges, ...]
    """For each rank, its ascending [first, last) ranges of tokens."""
    style: str
    imbalance: float
    """The work of the busiest rank over the mean, for the mask that it was made for."""

    def __post_init__(self) -> None:
        own = tuple(
            checked_ranges("ranges", tuple((first, last) for first, last in ranges), self.length)
            for ranges in self.ranges
        )
        object.__setattr__(self, "ranges", own)  # adjacent ranges joined, empty ones dropped
        every = sorted(one for ranges in self.ranges for one in ranges)
        ends = [0, *(last for _, last in every)]
        if [first for first, _ in every] != ends[:-1] or ends[-1] != self.length:
            raise ValueError(f"ranges={self.ranges}: every token of {self.length} must be on one rank")

    @cached_property
    def _hash(self) -> int:
        return hash((self.length, self.ranges))  # cached: every call across ranks looks up plans by it

    def __hash__(self) -> int:
        return self._hash

    @property
    def ranks(self) -> int:
        return len(self.ranges)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        return tuple(size(ranges) for ranges in self.ranges)

    def tokens(self, rank: int) -> Array:
        """Return the positions of a rank's tokens in the full sequence."""
        return indices(self.ranges[rank])

    def local(self, rank: int, ranges: Ranges) -> Ranges:
        """Convert ranges of the full sequence, all on this rank, to positions among its tokens."""
        found, before = [], 0
        for own_first, own_last in self.ranges[rank]:
            for first, last in ranges:
                low, high = max(first, own_first), min(last, own_last)
                if high > low:
                    found.append((before + low - own_first, before + high - own_first))
            before += own_last - own_first
        return checked_ranges("ranges", found, before)


def work_of_queries(mask: Mask, length: int, tile: int) -> Array:
    """Return the kept pairs of each tile of queries, over all heads and the batch; a partial tile counts half."""
    known = mask.layout(length, length)
    starts = np.arange(0, max(length, 1), tile)
    if length == 0:
        return np.zeros(1)
    if not known.tables:
        pairs = (known.last - known.first).astype(np.int64).sum(axis=(0, 1))
        return np.add.reduceat(pairs, starts).astype(np.float64)
    fine = known.finest_block
    walk = known.walk(fine, fine)
    span, full, partial = (x.numpy() for x in (walk.span, walk.full_offsets, walk.partial_offsets))
    tiles = (span[:, 1] - span[:, 0]) + np.diff(full) + 0.5 * np.diff(partial)
    rows = -(-length // fine)
    by_tile = tiles.reshape(-1, rows).sum(axis=0) * fine * fine
    return np.add.reduceat(by_tile, starts // fine).astype(np.float64)


def table_unit(known: Layout) -> int:
    """Return the number that ranges must be a multiple of: the block size of the mask's tables."""
    return math.lcm(1, *(table.numbers[4] for table in known.tables))


@lru_cache(maxsize=256)
def place(mask: Mask, length: int, ranks: int, style: Style = "auto") -> Placement:
    """Place ``length`` tokens on ranks so that each has the same number of tokens and the same work under the mask.

    Args:
        style: ``"auto"`` takes the most local style whose busiest rank is within 5 % of the mean, else the most
            balanced; ``"contiguous"``, ``"zigzag"`` and ``"balanced"`` pin one.

    Example:
        >>> import kernel_pytorch as kp
        >>> kp.context_parallel.place(kp.masks.window(64, 64), length=1024, ranks=4).style
        'contiguous'
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: use 1 or more")
    if length < 0:
        raise ValueError(f"length={length}: use 0 or more")
    styles = ("contiguous", "zigzag", "balanced")
    if style not in ("auto", *styles):
        raise ValueError(f"style={style!r}: use auto, {', '.join(styles)}")
    unit = table_unit(mask.layout(length, length))
    tile = unit * max(1, min(128, length // (ranks * _TILES_A_RANK)) // unit)
    work = work_of_queries(mask, length, tile)
    best: Placement | None = None
    for name in styles if style == "auto" else (style,):
        if name == "balanced":
            ranges = _dealt(work, tile, length, ranks)
        else:
            ranges = _pieces(length, ranks, unit, zigzag=name == "zigzag")
        found = Placement(length, ranges, name, _imbalance(ranges, work, tile))
        if best is None or found.imbalance < best.imbalance - 1e-9:
            best = found
        if best.imbalance <= _EVEN_ENOUGH:
            break
    assert best is not None
    return best


def _pieces(length: int, ranks: int, unit: int, *, zigzag: bool) -> tuple[Ranges, ...]:
    """Return one range per rank; in zigzag two halves, the second in the opposite order."""
    units = -(-length // unit)
    # The last unit may be shorter: give it to a rank with one more unit.
    shares = [units // ranks + ((r if zigzag else ranks - 1 - r) < units % ranks) for r in range(ranks)]
    low = [share // 2 if zigzag else share for share in shares]
    order = [*range(ranks), *reversed(range(ranks))]
    sizes = [*low, *(shares[r] - low[r] for r in reversed(range(ranks)))]
    own: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for rank, (first, last) in zip(order, pairwise(accumulate(sizes, initial=0)), strict=True):
        own[rank].append((min(length, first * unit), min(length, last * unit)))
    return tuple(checked_ranges("ranges", ranges, length) for ranges in own)


def _dealt(work: Array, tile: int, length: int, ranks: int) -> tuple[Ranges, ...]:
    """Assign tiles in descending order of work, each to the least busy rank that has room."""
    room = [len(work) // ranks + (r < len(work) % ranks) for r in range(ranks)]
    busy = [0.0] * ranks
    own: list[list[int]] = [[] for _ in range(ranks)]
    falling, last = np.argsort(-work, kind="stable").tolist(), len(work) - 1
    # Assign the last tile first, which may be shorter: to rank 0, which has one more tile.
    for t in (last, *(t for t in falling if t != last)):
        rank = min((r for r in range(ranks) if len(own[r]) < room[r]), key=lambda r: (busy[r], r))
        own[rank].append(t)
        busy[rank] += work[t]
    ranges = [[(t * tile, min(length, (t + 1) * tile)) for t in sorted(tiles)] for tiles in own]
    return tuple(checked_ranges("ranges", one, length) for one in ranges)


def _imbalance(ranges: tuple[Ranges, ...], work: Array, tile: int) -> float:
    total = float(work.sum())
    if total == 0:
        return 1.0
    before = np.concatenate([[0.0], np.cumsum(work)])
    tiles = np.arange(len(before)) * tile
    tiles[-1] = sum(size(own) for own in ranges)

    def until(position: int) -> float:
        return float(np.interp(position, tiles, before))

    busiest = max(sum(until(last) - until(first) for first, last in own) for own in ranges)
    return busiest * len(ranges) / total


def joined_intervals(first: Array, last: Array) -> tuple[Array, Array]:
    """Return the union of intervals as ascending, disjoint intervals."""
    some = last > first
    if not some.all():
        first, last = first[some], last[some]
    if len(first) == 0:
        return NO_INTERVALS, NO_INTERVALS
    if (first[1:] < first[:-1]).any():
        order = np.argsort(first, kind="stable")
        first, last = first[order], last[order]
    reach = np.maximum.accumulate(last)
    new = np.flatnonzero(first[1:] > reach[:-1]) + 1
    return first[np.concatenate([[0], new])], reach[np.concatenate([new - 1, [len(reach) - 1]])]


@lru_cache(maxsize=64)
def needed_keys(mask: Mask, placement: Placement) -> tuple[tuple[Ranges, ...], ...]:
    """Return ``[r][s]``: the keys on rank s that rank r's queries attend to, as ranges of the full sequence.

    Exact to the token, or to the block if the mask has tables.
    """
    known = mask.layout(placement.length, placement.length)
    found = []
    for rank in range(placement.ranks):
        first, last = _attended_keys(known, placement.ranges[rank])
        runs = tuple(zip(first.tolist(), last.tolist(), strict=True))
        found.append(tuple(_common(runs, own) for own in placement.ranges))
    return tuple(found)


def _common(a: Ranges, b: Ranges) -> Ranges:
    """Return the intersection of two ascending lists of ranges."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if high > low:
            found.append((low, high))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def _attended_keys(known: Layout, queries: Ranges) -> tuple[Array, Array]:
    """Return the keys that any of these queries attends to, as intervals."""
    if known.tables:
        tile = known.finest_block
        walk = known.walk(tile, tile)
        rows = -(-known.q_len // tile)
        span, full_offsets, full, partial_offsets, partial, _ = (x.numpy() for x in walk.tensors())
        tiles = np.zeros(-(-known.kv_len // tile), dtype=bool)
        for first, last in queries:
            for entry in range(len(span) // max(rows, 1)):
                a, b = entry * rows + first // tile, entry * rows + -(-last // tile)
                tiles[full[full_offsets[a] : full_offsets[b]]] = True
                tiles[partial[partial_offsets[a] : partial_offsets[b]]] = True
                for low, high in span[a:b]:
                    tiles[low:high] = True
        # Whole blocks: a sub-mask cannot cut one.
        a_unit = table_unit(known) // tile
        units = np.pad(tiles, (0, -len(tiles) % a_unit)).reshape(-1, a_unit).any(axis=1)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], units.view(np.int8), [0]]))) * table_unit(known)
        return edges[::2], edges[1::2].clip(max=known.kv_len)
    if not queries:
        return NO_INTERVALS, NO_INTERVALS
    # Slot by slot, where intervals mostly ascend and need no sort.
    ends = [np.concatenate([part[:, :, a:b] for a, b in queries], axis=2) for part in (known.first, known.last)]
    slots = zip(*(part.reshape(-1, part.shape[2]) for part in ends), strict=True)
    parts = [joined_intervals(first, last) for first, last in slots]
    return joined_intervals(*(np.concatenate(one) for one in zip(*parts, strict=True)))
