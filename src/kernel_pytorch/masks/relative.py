"""Masks whose intervals are the same for every query but for its position: causal, windows, sinks, and compositions.

Such a mask is a few numbers at any lengths, so a kernel works out the keys of a query by itself. In decoding, where
every token has another number of keys, nothing has to be computed or copied for it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from kernel_pytorch.masks import code as mask_code
from kernel_pytorch.masks.code import Node

__all__ = [
    "MOST_RELATIVE_INTERVALS",
    "RelativeInterval",
    "attended_keys",
    "attends_to_all",
    "relative_intervals",
]

MOST_RELATIVE_INTERVALS = 2
"""Intervals of a query that a kernel works out by itself."""
_FAR = 1 << 30


class RelativeInterval(NamedTuple):
    """For a query at position p, the keys from ``max(first, p + first_offset)`` up to but not including
    ``min(last, p + last_offset)``."""

    first: int = 0
    first_offset: int = -_FAR
    last: int = _FAR
    last_offset: int = _FAR

    def __and__(self, other: RelativeInterval) -> RelativeInterval:
        return RelativeInterval(
            max(self.first, other.first),
            max(self.first_offset, other.first_offset),
            min(self.last, other.last),
            min(self.last_offset, other.last_offset),
        )

    @property
    def empty(self) -> bool:
        """Whether no query has a key in it, whatever its position."""
        return self.first >= self.last or self.first_offset >= self.last_offset

    def at(self, position: int, kv_len: int) -> tuple[int, int]:
        """The interval of a query, perhaps empty, as [first, last)."""
        first = max(self.first, position + self.first_offset)
        return first, min(self.last, position + self.last_offset, kv_len)


@lru_cache(maxsize=1024)
def relative_intervals(node: Node) -> tuple[RelativeInterval, ...] | None:
    """The intervals whose union a query attends to, which may overlap; None for a mask that is not relative.

    Example:
        >>> import kernel_pytorch as kp
        >>> relative_intervals((kp.masks.causal() & kp.masks.sinks(4)).node)[0].at(position=2, kv_len=10)
        (0, 3)
        >>> relative_intervals(kp.masks.prefix(4).node) is None
        True
    """
    kind, numbers = node.kind, [min(number, _FAR) for number in node.numbers[:2]]
    if kind == mask_code.FULL:
        return (RelativeInterval(),)
    if kind == mask_code.CAUSAL:
        return (RelativeInterval(last_offset=1),)
    if kind == mask_code.WINDOW:
        return (RelativeInterval(first_offset=-numbers[0], last_offset=min(numbers[1] + 1, _FAR)),)
    if kind == mask_code.SINKS:
        return (RelativeInterval(last=numbers[0]),)
    if kind not in (mask_code.AND, mask_code.OR):
        return None
    left, right = (relative_intervals(child) for child in node.children)
    if left is None or right is None:
        return None
    found = left + right if kind == mask_code.OR else tuple(a & b for a in left for b in right)
    return tuple(one for one in dict.fromkeys(found) if not one.empty)


def attended_keys(intervals: tuple[RelativeInterval, ...], position: int, kv_len: int) -> int:
    """How many keys the query at a position attends to.

    Example:
        >>> import kernel_pytorch as kp
        >>> attended_keys(relative_intervals((kp.masks.sinks(4) | kp.masks.window(2)).node), position=9, kv_len=10)
        7
    """
    count, covered = 0, 0
    for first, last in sorted(interval.at(position, kv_len) for interval in intervals):
        count += max(0, last - max(first, covered))
        covered = max(covered, last)
    return count


def attends_to_all(intervals: tuple[RelativeInterval, ...], position: int, kv_len: int) -> bool:
    """Whether the query at a position attends to every key."""
    return attended_keys(intervals, position, kv_len) == kv_len
