"""The ``Mask`` class: an expression of ``kp.masks`` with its code, its layout and its drawing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernel_pytorch._compat.structures import disable_modes, pytree
from kernel_pytorch.masks import code as mask_code
from kernel_pytorch.masks import part as mask_part
from kernel_pytorch.masks.code import Node
from kernel_pytorch.masks.layout import Layout, layout
from kernel_pytorch.masks.relative import attended_keys, relative_intervals

__all__ = ["Mask", "checked_count", "from_code", "leaf", "made", "traced"]

_FEW = 16  # queries of a decoding step, counted one by one


class Mask:
    """A mask expression; build one with the constructors of this module, compose with ``&`` and ``|``.

    Example:
        >>> import kernel_pytorch as kp
        >>> kp.masks.causal() & (kp.masks.window(4096) | kp.masks.sinks(64))
        causal() & (window(4096) | sinks(64))
    """

    __slots__ = ("__weakref__", "_node", "code")

    def __init__(self, code: torch.Tensor, node: Node | None = None) -> None:
        self.code = code
        """The mask encoded as one int64 tensor on the CPU."""
        self._node = node

    @property
    def node(self) -> Node:
        if self._node is None:
            self._node = mask_code.decode(self.code)
        return self._node

    def __and__(self, other: Mask) -> Mask:
        return _compose(mask_code.AND, self, other)

    def __or__(self, other: Mask) -> Mask:
        return _compose(mask_code.OR, self, other)

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self} has no truth value: compose masks with & and |, not with and and or; test for None with is None"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self.node == other.node

    def __hash__(self) -> int:
        return self.node._hash

    def __repr__(self) -> str:
        return str(self.node)

    def __reduce__(self) -> tuple[Any, ...]:
        return from_code, (self.code,)

    @property
    def is_full(self) -> bool:
        """Whether this is ``full()`` itself."""
        return self.node.kind == mask_code.FULL

    @property
    def is_causal(self) -> bool:
        """Whether this is ``causal()`` itself."""
        return self.node.kind == mask_code.CAUSAL

    def simplified(self, q_len: int, kv_len: int) -> Mask:
        """Return ``full()`` or ``causal()``, which more kernels support, if this mask equals it at these lengths.

        Example:
            >>> import kernel_pytorch as kp
            >>> kp.masks.causal().simplified(1, 100)
            full()
            >>> (kp.masks.causal() & kp.masks.window(4096)).simplified(1000, 1000)
            causal()
        """
        if self.node.kind == mask_code.FULL or (self.node.kind == mask_code.CAUSAL and q_len != 1):
            return self
        return _simplified(self, q_len, kv_len)

    def layout(self, q_len: int, kv_len: int) -> Layout:
        """Return the keys that each query attends to, as intervals; cached."""
        return layout(self.node, q_len, kv_len)

    def dense(self, q_len: int, kv_len: int) -> torch.Tensor:
        """Return the mask as booleans of shape (batch, heads, q_len, kv_len); batch or heads is 1 if all are alike.

        For small cases only: this is the N x N tensor that everything else avoids. It is computed from the definition
        of each constructor, independently of the intervals that kernels use, so that tests can compare the two.

        Example:
            >>> import kernel_pytorch as kp
            >>> kp.masks.causal().dense(2, 3)[0, 0].int().tolist()
            [[1, 1, 0], [1, 1, 1]]
        """
        self.layout(q_len, kv_len)  # raises if the mask does not fit the lengths
        return torch.from_numpy(mask_code.dense(self.node, q_len, kv_len))

    def density(self, q_len: int, kv_len: int) -> float:
        """Return the fraction of query-key pairs that the mask keeps.

        Example:
            >>> import kernel_pytorch as kp
            >>> kp.masks.window(1, 1).density(4, 4)
            0.625
        """
        relative = relative_intervals(self.node) if 0 < q_len <= _FEW and kv_len else None
        if relative is not None:  # no layout for each number of keys in decoding
            positions = range(kv_len - q_len, kv_len)
            return sum(attended_keys(relative, p, kv_len) for p in positions) / (q_len * kv_len)
        return self.layout(q_len, kv_len).density

    def part(
        self,
        q_len: int,
        kv_len: int,
        queries: Sequence[tuple[int, int]],
        keys: Sequence[tuple[int, int]],
        *,
        heads: tuple[int, int] | None = None,
    ) -> Mask:
        """Return the sub-mask of some of the queries and keys of this mask at the full lengths.

        Args:
            q_len, kv_len: the lengths of the full sequences.
            queries, keys: ascending [first, last) ranges; with block tables, whole blocks.
            heads: a range of query heads, for tables that differ by head.

        Example:
            >>> import kernel_pytorch as kp
            >>> kp.masks.causal().part(8, 8, queries=[(4, 8)], keys=[(0, 4)])
            full()
            >>> kp.masks.window(1).part(8, 8, queries=[(2, 3), (6, 7)], keys=[(1, 3), (6, 8)]).dense(2, 4).int()
            tensor([[[[1, 1, 0, 0],
                      [0, 0, 1, 0]]]], dtype=torch.int32)
        """
        if self.node.kind == mask_code.PART:
            raise TypeError(f"mask={self}: take the part from the whole mask")
        wanted = (
            mask_part.checked_ranges("queries", queries, q_len),
            mask_part.checked_ranges("keys", keys, kv_len),
        )
        node = mask_part.part_node(self.node, q_len, kv_len, *wanted, heads)
        known = layout(node, mask_part.size(wanted[0]), mask_part.size(wanted[1]))
        return made(node).simplified(known.q_len, known.kv_len)

    def show(self, q_len: int, kv_len: int | None = None, *, path: str | Path | None = None, size: int = 32) -> str:
        """Draw the mask as text, and as a PNG if ``path`` is given. Works at any length.

        Args:
            size: maximum rows and columns of the text drawing; a cell's shade is the fraction of kept pairs.

        Example:
            >>> import kernel_pytorch as kp
            >>> print(kp.masks.causal().show(4))
            █
            ██
            ███
            ████
        """
        from kernel_pytorch.masks.drawing import draw_png, draw_text

        kv_len = q_len if kv_len is None else kv_len
        if q_len < 1 or kv_len < 1:
            raise ValueError(f"q_len={q_len}, kv_len={kv_len}: there is nothing to draw; use 1 or more")
        if path is not None:
            draw_png(self.layout(q_len, kv_len), Path(path), title=repr(self))
        return draw_text(self.layout(q_len, kv_len), size)


def traced(kind: int, numbers: torch.Tensor, *children: Mask) -> Mask:
    """Return a mask in a graph that is being traced, from the numbers of its root node as a tensor."""
    tail = torch.tensor([kind, numbers.shape[0]], dtype=torch.int64)
    return Mask(torch.cat([*(child.code for child in children), numbers, tail]))


def leaf(kind: int, *numbers: int) -> Mask:
    if torch.compiler.is_compiling():
        return Mask(torch.tensor([*numbers, kind, len(numbers)], dtype=torch.int64))
    return _leaf(kind, numbers)


@lru_cache(maxsize=1024)
def _leaf(kind: int, numbers: tuple[int, ...]) -> Mask:
    return made(Node(kind, numbers))


@lru_cache(maxsize=1024)
def made(node: Node) -> Mask:
    """Return the cached Mask of an expression, so that a mask that is built in every step costs a look-up."""
    # The cached tensor must be neither a fake tensor nor an inference tensor, whatever mode is active now.
    with disable_modes(), torch.inference_mode(False):
        code = mask_code.encode(node)
    # torch._dynamo.maybe_mark_dynamic without its import: a code of another length needs no new graph.
    code._dynamo_weak_dynamic_indices = {0}  # type: ignore[attr-defined]
    return Mask(code, node)


@lru_cache(maxsize=1024)
def _simplified(mask: Mask, q_len: int, kv_len: int) -> Mask:
    relative = relative_intervals(mask.node) if q_len == 1 else None
    if relative is not None:  # decoding has a new length for every token: avoid building a layout
        return leaf(mask_code.FULL) if attended_keys(relative, kv_len - 1, kv_len) == kv_len else mask
    known = mask.layout(q_len, kv_len)
    if not known.tables and known.batch == 1:
        if mask_part.is_full(known.first, known.last, known.kv_len):
            return leaf(mask_code.FULL)
        if mask_part.is_causal(known.first, known.last, known.kv_len):
            return leaf(mask_code.CAUSAL)
    return mask


@lru_cache(maxsize=256)
def _read(code: bytes) -> Mask:
    return made(mask_code.decode(torch.frombuffer(bytearray(code), dtype=torch.int64)))


def from_code(code: torch.Tensor) -> Mask:
    """Return the mask that a graph carries as its code."""
    if code.dtype != torch.int64 or code.ndim != 1:
        shown = f"{str(code.dtype).removeprefix('torch.')}{list(code.shape)}"
        raise TypeError(f"mask's code is {shown}: it must stay int64 of one dimension; convert only q, k and v")
    if code.numel() == 0:
        mask_code.decode(code)  # raises
    return _read(code.cpu().numpy().tobytes())


def _compose(kind: int, left: Mask, right: object) -> Mask:
    if not isinstance(right, Mask):
        raise TypeError(f"a mask composes with a mask, not with {type(right).__name__}: use kp.masks.*")
    if torch.compiler.is_compiling():
        # Use the codes only, so that this can be traced: no Python value depends on the tensors' contents.
        return Mask(torch.cat([left.code, right.code, torch.tensor([kind, 0], dtype=torch.int64)]))
    return _composed(kind, left, right)


@lru_cache(maxsize=1024)
def _composed(kind: int, left: Mask, right: Mask) -> Mask:
    if mask_code.PART in (left.node.kind, right.node.kind):
        raise TypeError(f"{left} and {right}: compose the whole masks, then take the part")
    return made(Node(kind, (), (left.node, right.node)))


def checked_count(name: str, value: object, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}={value!r}: expected a whole number")
    value = value if isinstance(value, int) else int(value)
    if value < least:
        raise ValueError(f"{name}={value}: use {least} or more")
    if value >= 1 << 62:
        raise ValueError(f"{name}={value}: use less than 2 ** 62")
    return value


from_code.__module__ = "kernel_pytorch.masks"  # the name in pickled masks
torch.serialization.add_safe_globals([from_code])  # checkpoints may contain masks
# Masks may be arguments of compiled and exported functions; as a pytree, a mask has one leaf, its code.
pytree.register_pytree_node(
    Mask,
    lambda mask: ([mask.code], None),
    lambda leaves, _: Mask(next(iter(leaves))),
    flatten_with_keys_fn=lambda mask: ([(pytree.GetAttrKey("code"), mask.code)], None),
    serialized_type_name="kernel_pytorch.masks.Mask",
    to_dumpable_context=lambda _: "",
    from_dumpable_context=lambda _: None,
)
