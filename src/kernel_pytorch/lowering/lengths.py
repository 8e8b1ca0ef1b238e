"""Masks that a graph computes from a length: worked out at many lengths, to see whether they are data after all.

A mask that is the same mask of kp.masks at every length tried becomes data. All lengths of the range are tried up to
512; beyond, those around powers of two and around every number that the graph mentions, up to 4096.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

from kernel_pytorch import masks
from kernel_pytorch.lowering.constants import Constants

__all__ = ["mask_of_a_length"]

_TRIED_ALL = 512
_LONGEST_TRIED = 4096


class _AtLengths:
    """What nodes compute when symbols have given values; None where that depends on an input's numbers."""

    def __init__(self, constants: Constants, values: Mapping[Any, int]) -> None:
        self._constants, self._values = constants, values
        self._known: dict[Node, Any] = {}

    def of(self, node: Node) -> Any:
        if node not in self._known:
            self._known[node] = self._computed(node)
        return self._known[node]

    def _computed(self, node: Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            found = sympy.sympify(value.node.expr).subs(self._values)
            return int(found) if found.is_Integer else None
        if node.op == "placeholder" or not callable(node.target):
            return self._constants.of(node)
        sources = {source: self.of(source) for source in node.all_input_nodes}
        if any(source is None for source in sources.values()):
            return None
        arguments, options = torch.fx.node.map_arg((node.args, node.kwargs), sources.__getitem__)
        with torch.no_grad():
            return node.target(*arguments, **options)


def mask_of_a_length(
    bias: Node, length: Any, constants: Constants, ranges: Mapping[Any, Any], recognise: Any
) -> masks.Mask | None:
    """The mask that a mask tensor is at every length tried, where queries and keys are both ``length`` long."""
    if not isinstance(length, sympy.Symbol) or length not in ranges:
        return None
    low, high = int(ranges[length].lower), min(int(min(ranges[length].upper, _LONGEST_TRIED)), _LONGEST_TRIED)
    if low > high:
        return None
    found = _at(bias, length, high, constants)
    candidate: masks.Mask | None = recognise(found, high, high) if isinstance(found, torch.Tensor) else None
    if candidate is None:
        return None
    for tried in _lengths(bias, low, high):
        dense = _at(bias, length, tried, constants)
        # At a short length several masks say the same: what counts is whether this one does.
        kept = dense if dense.dtype == torch.bool else dense == 0
        own = candidate.dense(tried, tried)[0, 0]
        if not bool((kept == own).all()):
            return None
        if dense.dtype != torch.bool and recognise(dense, tried, tried) is None:
            return None  # addends other than "attend" and "do not"
    return candidate


def _at(bias: Node, length: Any, value: int, constants: Constants) -> Any:
    return _AtLengths(constants, {length: value}).of(bias)


def _lengths(bias: Node, low: int, high: int) -> list[int]:
    numbers = {2**power for power in range(13)} | _numbers_in(bias)
    around = {number + offset for number in numbers for offset in (-1, 0, 1)}
    return sorted(n for n in around | set(range(low, min(high, _TRIED_ALL) + 1)) if low <= n <= high)


def _numbers_in(bias: Node) -> set[int]:
    """Every whole number that the graph behind a node mentions, such as a window's."""
    found: set[int] = set()
    seen, stack = {bias}, [bias]
    while stack:
        node = stack.pop()
        torch.fx.node.map_aggregate((node.args, node.kwargs), lambda x: found.add(x) if type(x) is int else None)
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return {abs(number) for number in found if abs(number) <= _LONGEST_TRIED}
