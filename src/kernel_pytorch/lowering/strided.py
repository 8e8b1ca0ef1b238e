"""Tensors inside the delegate: strided views of buffers, with symbolic sizes.

``permute``, ``view``, ``slice`` and the like change the view and copy no data. Sizes are ints or sympy expressions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import sympy
import torch

__all__ = [
    "Size",
    "Storage",
    "Strided",
    "as_size",
    "broadcast",
    "contiguous_strides",
    "equal",
    "product",
    "reshaped",
]

Size: TypeAlias = Any
"""An int, or a sympy expression of symbols (sympy has no types to check)."""


def as_size(value: Any) -> Size:
    """Convert a size of torch to an int or its sympy expression."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        value = value.node.expr
    if isinstance(value, sympy.Expr):
        return int(value) if value.is_Integer else value
    return int(value)


def equal(a: Size, b: Size) -> bool:
    return bool(a == b or sympy.expand(sympy.sympify(a) - sympy.sympify(b)) == 0)


def product(sizes: Sequence[Size]) -> Size:
    return math.prod(sizes)


@dataclass(eq=False)
class Storage:
    """A buffer whose location is planned after all ops are emitted."""

    dtype: torch.dtype
    numel: Size
    input: int | None = None
    output: int | None = None
    constant: torch.Tensor | None = None

    @property
    def is_arena(self) -> bool:
        return self.input is None and self.output is None and self.constant is None


@dataclass(frozen=True, eq=False)
class Strided:
    storage: Storage
    dims: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def contiguous(self) -> bool:
        wanted = contiguous_strides(self.dims)
        return all(
            equal(size, 1) or equal(stride, want)
            for size, stride, want in zip(self.dims, self.strides, wanted, strict=True)
        )

    def permute(self, order: Sequence[int]) -> Strided:
        order = [axis % len(self.dims) for axis in order]
        return replace(self, dims=_picked(self.dims, order), strides=_picked(self.strides, order))

    def unsqueeze(self, axis: int) -> Strided:
        axis %= len(self.dims) + 1
        dims, strides = list(self.dims), list(self.strides)
        dims.insert(axis, 1)
        strides.insert(axis, 0)
        return replace(self, dims=tuple(dims), strides=tuple(strides))

    def squeeze(self, axes: Sequence[int]) -> Strided:
        gone = {axis % len(self.dims) for axis in axes if equal(self.dims[axis], 1)} if self.dims else set()
        kept = [axis for axis in range(len(self.dims)) if axis not in gone]
        return replace(self, dims=_picked(self.dims, kept), strides=_picked(self.strides, kept))

    def narrow(self, axis: int, start: Size, length: Size, step: int = 1) -> Strided:
        axis %= len(self.dims)
        dims, strides = list(self.dims), list(self.strides)
        offset = self.offset + start * strides[axis]
        dims[axis], strides[axis] = length, strides[axis] * step
        return replace(self, dims=tuple(dims), strides=tuple(strides), offset=offset)

    def select(self, axis: int, index: Size) -> Strided:
        return self.narrow(axis, index, 1).squeeze([axis])


def _picked(items: tuple[Size, ...], order: Sequence[int]) -> tuple[Size, ...]:
    return tuple(items[axis] for axis in order)


def contiguous_strides(dims: Sequence[Size]) -> tuple[Size, ...]:
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(dims):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def broadcast(view: Strided, dims: Sequence[Size]) -> Strided:
    """Return the view with stride 0 in broadcast dimensions."""
    for _ in range(len(dims) - len(view.dims)):
        view = view.unsqueeze(0)
    strides = tuple(
        stride if equal(own, wanted) else 0
        for own, wanted, stride in zip(view.dims, dims, view.strides, strict=True)
    )
    return replace(view, dims=tuple(dims), strides=strides)


def reshaped(view: Strided, dims: Sequence[Size]) -> Strided | None:
    """Return the view in another shape, or None if that needs a copy."""
    if view.contiguous:
        return replace(view, dims=tuple(dims), strides=contiguous_strides(dims))
    strides: list[Size] = []
    old = [(size, stride) for size, stride in zip(view.dims, view.strides, strict=True) if not equal(size, 1)]
    new = list(dims)
    at = 0
    while at < len(new):
        if equal(new[at], 1):
            strides.append(0)
            at += 1
            continue
        # The shortest groups of old and of new dimensions with equal numbers of elements.
        for old_count in range(1, len(old) + 1):
            group = old[:old_count]
            found = next(
                (
                    new_count
                    for new_count in range(1, len(new) - at + 1)
                    if equal(product([size for size, _ in group]), product(new[at : at + new_count]))
                ),
                None,
            )
            if found is not None:
                break
        else:
            return None
        for (_, outer), (size, inner) in pairwise(group):
            if not equal(outer, size * inner):
                return None
        step = group[-1][1]
        strides += [step * inner for inner in contiguous_strides(new[at : at + found])]
        old, at = old[old_count:], at + found
    return replace(view, dims=tuple(dims), strides=tuple(strides)) if not old else None
