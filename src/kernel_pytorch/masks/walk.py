"""Compute the tiles of queries x keys that a kernel visits, from a mask's intervals and block tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from kernel_pytorch.masks.layout import Layout

__all__ = ["Walk", "attended_pairs", "expand", "walk_of"]

Array = np.ndarray[Any, Any]

_TILES_A_PIECE = 1024  # partial tiles whose pairs are counted at a time


@dataclass(frozen=True)
class Walk:
    """For each row of tiles, the tiles to visit: a span of full ones, other full ones, and partial ones.

    A row is (batch, head, tile of queries), or of keys in the transposed walk; batch and head have size 1 if the mask
    is the same for all.
    """

    span: torch.Tensor
    """(rows, 2): first and last (exclusive) tile of the longest run of full tiles."""
    full_offsets: torch.Tensor
    full: torch.Tensor
    """Full tiles outside the span; row r has those from full_offsets[r] to full_offsets[r + 1]."""
    partial_offsets: torch.Tensor
    partial: torch.Tensor
    slots: torch.Tensor
    """The first slot of a partial tile, which is compared with the intervals of ``Layout.slots`` slots."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.span, self.full_offsets, self.full, self.partial_offsets, self.partial, self.slots)

    @property
    def tiles(self) -> int:
        """Number of visited tiles."""
        return int((self.span[:, 1] - self.span[:, 0]).sum()) + len(self.full) + len(self.partial)


@dataclass(frozen=True)
class _Spans:
    """For each batch entry, slot and tile row: tiles that may have kept pairs, and tiles that are full."""

    may_first: Array
    may_last: Array
    all_first: Array
    all_last: Array


def _spans(first: Array, last: Array, queries: int, tile: int) -> _Spans:
    """Return spans of (D, S, T); the may-spans of a row are made disjoint, a shared tile belongs to the first."""
    tiles = -(-first.shape[-1] // queries)
    starts = np.arange(tiles) * queries
    empty = last <= first

    def reduced(function: Any, values: Array) -> Array:
        return function.reduceat(values, starts, axis=-1) if tiles else values[..., :0]

    low = reduced(np.minimum, np.where(empty, np.int32(2**31 - 1), first))
    high = reduced(np.maximum, np.where(empty, 0, last))
    used = high > 0
    may_first = np.where(used, low // tile, 0)
    may_last = np.where(used, -(-high // tile), 0)
    whole = ~reduced(np.logical_or, empty)
    all_first = np.where(whole, -(-reduced(np.maximum, first) // tile), 0)
    all_last = np.where(whole, reduced(np.minimum, last) // tile, 0)
    for slot in range(1, first.shape[1]):
        taken = may_last[:, :slot].max(axis=1)
        may_first[:, slot] = np.maximum(may_first[:, slot], taken)
        may_last[:, slot] = np.maximum(may_last[:, slot], may_first[:, slot])
    all_first = np.clip(all_first, may_first, may_last)
    all_last = np.clip(all_last, all_first, may_last)
    return _Spans(may_first, may_last, all_first, all_last)


def expand(first: Array, last: Array) -> tuple[Array, Array]:
    """Return every integer of every range [first, last), as (index of the range, integer)."""
    counts = np.maximum(last - first, 0).astype(np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    inside = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, first[owner].astype(np.int64) + inside


def walk_of(known: Layout, queries: int, keys: int, by_key: bool) -> Walk:
    rows, columns = -(-known.q_len // queries), -(-known.kv_len // keys)
    entries = known.batch * known.heads
    if known.tables:
        row, column, partial, variant = _tiles_with_tables(known, queries, keys)
        span = np.zeros((entries * rows, 2), dtype=np.int64)
    else:
        span, row, column, partial = _tiles_of_spans(_spans(known.first, known.last, queries, keys), rows)
        variant = np.zeros(len(row), dtype=np.int64)
    if by_key:
        if known.q_len % queries:
            # A kernel that loops over queries checks their number in partial tiles only.
            ragged = np.arange(len(span)) % rows == rows - 1
            owner, inner = expand(np.where(ragged, span[:, 0], 0), np.where(ragged, span[:, 1], 0))
            span = np.where(ragged[:, None], 0, span)
            row, column = np.concatenate([row, owner]), np.concatenate([column, inner])
            partial = np.concatenate([partial, np.ones(len(owner), dtype=bool)]) | (row % rows == rows - 1)
            variant = np.concatenate([variant, np.zeros(len(owner), dtype=np.int64)])
        span, row, column, partial, variant = _transposed(
            span, row, column, partial, variant, entries, rows, columns
        )
    return _sorted_walk(span, row, column, partial, variant, known.slots)


def _tiles_of_spans(spans: _Spans, rows: int) -> tuple[Array, Array, Array, Array]:
    """Return the longest span of full tiles of each row, and every other tile as (row, column, is partial)."""
    lengths = spans.all_last - spans.all_first
    best = lengths.argmax(axis=1)[:, None]
    span = np.stack(
        [np.take_along_axis(a, best, axis=1)[:, 0] for a in (spans.all_first, spans.all_last)], axis=-1
    ).reshape(-1, 2)
    chosen = np.arange(lengths.shape[1])[None, :, None] == best
    pieces = [
        (spans.may_first, spans.all_first, True),
        (np.where(chosen, 0, spans.all_first), np.where(chosen, 0, spans.all_last), False),
        (spans.all_last, spans.may_last, True),
    ]
    # (D, S, T) -> the row of each range is (D, T), whatever its slot.
    owner = np.broadcast_to(
        (np.arange(lengths.shape[0])[:, None, None] * rows + np.arange(rows)[None, None, :]), lengths.shape
    ).reshape(-1)
    found = [(*expand(first.reshape(-1), last.reshape(-1)), partial) for first, last, partial in pieces]
    row = np.concatenate([owner[index] for index, _, _ in found])
    column = np.concatenate([column for _, column, _ in found])
    partial = np.concatenate([np.full(len(column), flag) for _, column, flag in found])
    return span.astype(np.int64), row, column, partial


def _tiles_with_tables(known: Layout, queries: int, keys: int) -> tuple[Array, Array, Array, Array]:
    """Return tiles as (row, column, is partial, variant) of a mask with block tables.

    Blocks are classified first; tiles of full and masked blocks need no classification.
    """
    block = known.finest_block
    sets = [slice(n * known.slots, (n + 1) * known.slots) for n in range(1 << len(known.tables))]
    # Independent of the tile size: the walks of the forward and the backward share it.
    row, column, partial, variant = known.keep("blocks", _blocks_with_tables).arrays
    tall, wide = block // queries, block // keys  # tiles per block
    if (tall, wide) == (1, 1):
        return row, column, partial, variant
    rows, columns = -(-known.q_len // queries), -(-known.kv_len // keys)
    entry, block_row = np.divmod(row, max(-(-known.q_len // block), 1))
    row_in, column_in = np.divmod(np.arange(tall * wide), wide)
    t = ((block_row * tall)[:, None] + row_in).reshape(-1)
    n = ((column * wide)[:, None] + column_in).reshape(-1)
    entry, partial, variant = (np.repeat(values, tall * wide) for values in (entry, partial, variant))
    if rows % tall or columns % wide:
        inside = (t < rows) & (n < columns)
        t, n, entry, partial, variant = (values[inside] for values in (t, n, entry, partial, variant))
    if partial.any():
        kept = ~partial
        for number, own in enumerate(sets):
            (looked_at,) = np.nonzero(partial & (variant == number))
            if len(looked_at):
                fine = _spans(known.first[:, own], known.last[:, own], queries, keys)
                may, every = _classified(known, fine, entry[looked_at], t[looked_at], n[looked_at])
                kept[looked_at], partial[looked_at] = may, ~every
        t, n, entry, partial, variant = (values[kept] for values in (t, n, entry, partial, variant))
    return entry * rows + t, n, partial, variant


def _classified(known: Layout, spans: _Spans, entry: Array, t: Array, n: Array) -> tuple[Array, Array]:
    """Return whether each tile may have a kept pair, and whether it is full."""
    d = entry // known.heads if known.first.shape[0] > 1 else np.zeros_like(entry)
    may, every = np.zeros(len(n), dtype=bool), np.zeros(len(n), dtype=bool)
    for slot in range(spans.may_first.shape[1]):
        may |= (n >= spans.may_first[d, slot, t]) & (n < spans.may_last[d, slot, t])
        every |= (n >= spans.all_first[d, slot, t]) & (n < spans.all_last[d, slot, t])
    return may, every


@dataclass(frozen=True)
class _Blocks:
    """Tiles of the finest block as (row, column, partial, variant)."""

    arrays: tuple[Array, Array, Array, Array]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.from_numpy, self.arrays))


def _blocks_with_tables(known: Layout) -> _Blocks:
    """Return the tiles of ``_tiles_with_tables`` for square tiles of the finest block."""
    block = known.finest_block
    sets = [slice(n * known.slots, (n + 1) * known.slots) for n in range(1 << len(known.tables))]
    spans = [_spans(known.first[:, own], known.last[:, own], block, block) for own in sets]
    rows, columns = -(-known.q_len // block), -(-known.kv_len // block)
    width = columns + 1
    held = []
    for table in known.tables:
        batch, heads, table_rows, _, size = table.numbers[:5]
        counts, kept = table.kept_blocks
        owner = np.repeat(np.arange(len(counts)), counts)
        tall = size // block
        row_in, column_in = np.divmod(np.arange(tall * tall), tall)
        t = ((owner % table_rows)[:, None] * tall + row_in).reshape(-1)
        n = (kept[:, None] * tall + column_in).reshape(-1)
        b, h = np.divmod(np.repeat(owner // table_rows, tall * tall), heads)
        inside = (t < rows) & (n < columns)
        t, n, b, h = t[inside], n[inside], b[inside], h[inside]
        repeated = []
        for batch_entry in range(known.batch) if batch == 1 else [None]:
            for head in range(known.heads) if heads == 1 else [None]:
                entry = b if batch_entry is None else np.full_like(b, batch_entry)
                which = h if head is None else np.full_like(h, head)
                repeated.append(((entry * known.heads + which) * rows + t) * width + n)
        tiles = np.concatenate(repeated)
        held.append(tiles if (tiles[1:] > tiles[:-1]).all() else np.sort(tiles))
    in_tables, number = _combinations(held)
    found: list[tuple[Array, Array, int]] = []
    for variant, span in enumerate(spans):
        if variant == 0:
            # The combination without any table: every tile of the spans that is in no table.
            main, row, column, partial = _tiles_of_spans(span, rows)
            owner, inner = expand(main[:, 0], main[:, 1])
            row, column = np.concatenate([row, owner]), np.concatenate([column, inner])
            partial = np.concatenate([partial, np.zeros(len(owner), dtype=bool)])
            entries = np.arange(known.batch * known.heads)
            source = entries // known.heads if known.first.shape[0] > 1 else np.zeros_like(entries)
            own = [row // rows == entry for entry in range(known.first.shape[0])] if len(row) else []
            for entry in entries.tolist() if len(row) else []:
                picked = own[source[entry]]
                key = (entry * rows + row[picked] % rows) * width + column[picked]
                free = ~np.isin(key, in_tables)
                found.append((key[free], partial[picked][free], variant))
        else:
            key = in_tables[number == variant]
            may, every = _classified(known, span, key // width // rows, key // width % rows, key % width)
            found.append((key[may], ~every[may], variant))
    every_key = np.concatenate([key for key, _, _ in found])
    flags = np.concatenate([flag for _, flag, _ in found])
    variants = np.concatenate([np.full(len(key), variant) for key, _, variant in found])
    return _Blocks((every_key // width, every_key % width, flags, variants))


def _combinations(held: list[Array]) -> tuple[Array, Array]:
    """Return the sorted tiles of all tables, and a bit mask of the tables with each (first table: lowest bit)."""
    if len(held) == 1:
        return held[0], np.ones(len(held[0]), dtype=np.int64)
    every = np.sort(np.concatenate(held))  # np.unique hashes, which takes longer than sorting runs
    in_tables = every[np.concatenate([[True], every[1:] != every[:-1]])] if len(every) else every
    number = np.zeros(len(in_tables), dtype=np.int64)
    for bit, own in enumerate(held):
        number[np.searchsorted(in_tables, own)] |= 1 << bit
    return in_tables, number


def _transposed(
    span: Array, row: Array, column: Array, partial: Array, slots: Array, entries: int, rows: int, columns: int
) -> tuple[Array, Array, Array, Array, Array]:
    """Transpose the walk: spans stay spans if their ends ascend, else they are listed tile by tile."""
    by_entry = span.reshape(entries, rows, 2)
    # The position of an empty span is arbitrary: move it so that it keeps the order.
    ends = np.maximum.accumulate(by_entry[..., 1], axis=1) if rows else by_entry[..., 1]
    starts = np.where(by_entry[..., 0] == by_entry[..., 1], ends, by_entry[..., 0])
    span_t = np.zeros((entries, columns, 2), dtype=np.int64)
    if rows and (ends == np.where(starts == ends, ends, by_entry[..., 1])).all() and (np.diff(starts) >= 0).all():
        for entry in range(entries):
            span_t[entry, :, 0] = np.searchsorted(ends[entry], np.arange(columns), side="right")
            span_t[entry, :, 1] = np.searchsorted(starts[entry], np.arange(columns), side="right")
        span_t[..., 1] = np.maximum(span_t[..., 0], span_t[..., 1])
    else:
        owner, inner = expand(span[:, 0], span[:, 1])
        row, column = np.concatenate([row, owner]), np.concatenate([column, inner])
        partial = np.concatenate([partial, np.zeros(len(owner), dtype=bool)])
        slots = np.concatenate([slots, np.zeros(len(owner), dtype=np.int64)])
    entry_of_row = row // max(rows, 1)
    return span_t.reshape(-1, 2), entry_of_row * columns + column, row % max(rows, 1), partial, slots


def _sorted_walk(span: Array, row: Array, column: Array, partial: Array, variant: Array, slots: int) -> Walk:
    """Sort the tiles by row, then column; a variant has ``slots`` slots."""
    rows = len(span)

    def ordered(chosen: Array, *fields: Array) -> list[Array]:
        """Return the fields of the chosen tiles, sorted by the first field, then by the next ones."""
        if not chosen.all():
            fields = tuple(field[chosen] for field in fields)
        # One integer per tile, because sorting integers is faster than np.lexsort.
        widths = [int(field.max(initial=0)).bit_length() for field in fields]
        packed = fields[0].astype(np.int32 if sum(widths) < 32 else np.int64)
        for field, width in zip(fields[1:], widths[1:], strict=True):
            packed = packed << width | field.astype(packed.dtype, copy=False)
        packed.sort()
        found = []
        for width in widths[:0:-1]:
            found.append(packed & (1 << width) - 1)
            packed = packed >> width
        return [packed, *reversed(found)]

    full_row, full_column = ordered(~partial, row, column)
    partial_row, partial_column, partial_variant = ordered(partial, row, column, variant)

    def offsets(owner: Array) -> torch.Tensor:
        return torch.from_numpy(
            np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=rows))]).astype(np.int32)
        )

    def numbers(values: Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values).astype(np.int32))

    return Walk(
        span=numbers(span),
        full_offsets=offsets(full_row),
        full=numbers(full_column),
        partial_offsets=offsets(partial_row),
        partial=numbers(partial_column),
        slots=numbers(partial_variant * slots),
    )


def attended_pairs(known: Layout) -> int:
    """Return the number of kept query-key pairs, over all batch entries and heads."""
    tile = known.finest_block
    arrays = (tensor.numpy() for tensor in known.walk(tile, tile).tensors())
    span, full_offsets, full, partial_offsets, partial, slots = arrays
    rows, columns = -(-known.q_len // tile), -(-known.kv_len // tile)
    tall = np.tile(np.minimum(known.q_len - np.arange(rows) * tile, tile), known.batch * known.heads)
    wide = np.minimum(known.kv_len - np.arange(columns) * tile, tile)
    before = np.concatenate([[0], np.cumsum(wide)])
    attended = int((tall * (before[span[:, 1]] - before[span[:, 0]])).sum())
    attended += int((np.repeat(tall, np.diff(full_offsets)) * wide[full]).sum())
    owner = np.repeat(np.arange(len(tall)), np.diff(partial_offsets))
    for begin in range(0, len(owner), _TILES_A_PIECE):
        piece = slice(begin, begin + _TILES_A_PIECE)
        entry, t = np.divmod(owner[piece], rows)
        batch = entry // known.heads if known.first.shape[0] > 1 else np.zeros_like(entry)
        query = (t * tile)[:, None] + np.arange(tile)
        slot = slots[piece, None] + np.arange(known.slots)
        low = (partial[piece].astype(np.int64) * tile)[:, None, None]
        at = (batch[:, None, None], slot[:, :, None], np.minimum(query, known.q_len - 1)[:, None])
        ends = [ends[at].clip(low, low + tile) for ends in (known.first, known.last)]
        attended += int((np.maximum(ends[1] - ends[0], 0) * (query < known.q_len)[:, None]).sum())
    return attended
