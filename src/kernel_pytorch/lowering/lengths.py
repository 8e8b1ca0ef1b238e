"""Recognise masks that a graph computes from a dynamic length, by evaluating them at many lengths.

A mask that equals the same mask of kp.masks at every tried length becomes a constant. All lengths of the range are
tried up to 512, and above, up to 4096, those around powers of two and around every integer constant of the graph.
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
    """Values of nodes for given values of the symbols; None if a node depends on the contents of an input."""

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
    """Return the mask that a mask tensor equals at every tried length, for ``length`` queries and keys; else None."""
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
        # At a short length several masks are equal: only check this one.
        kept = dense if dense.dtype == torch.bool else dense == 0
        own = candidate.dense(tried, tried)[0, 0]
        if not bool((kept == own).all()):
            return None
        if dense.dtype != torch.bool and recognise(dense, tried, tried) is None:
            return None  # additive values other than 0 and -inf
    return candidate


def _at(bias: Node, length: Any, value: int, constants: Constants) -> Any:
    return _AtLengths(constants, {length: value}).of(bias)


def _lengths(bias: Node, low: int, high: int) -> list[int]:
    numbers = {2**power for power in range(13)} | _numbers_in(bias)
    around = {number + offset for number in numbers for offset in (-1, 0, 1)}
    return sorted(n for n in around | set(range(low, min(high, _TRIED_ALL) + 1)) if low <= n <= high)


def _numbers_in(bias: Node) -> set[int]:
    """Return every integer constant in the graph that computes a node, such as a window size."""
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
