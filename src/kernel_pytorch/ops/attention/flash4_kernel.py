"""FlashAttention-4, from its own library: windows and packed sequences as its arguments, block tables as tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kernel_pytorch._compat.adopted import flash_4_backward, flash_4_forward
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.masks.layout import Layout
from kernel_pytorch.ops.attention.definition import lse_flows
from kernel_pytorch.ops.attention.sequences import TILE, PackedSequences, Window, packed_sequences, window_of

if TYPE_CHECKING:
    from kernel_pytorch.masks import Mask


@dataclass(frozen=True)
class _Sequences:
    """The offsets of packed sequences on a device."""

    offsets: torch.Tensor
    longest: int

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.offsets,)


@dataclass(frozen=True)
class _Tiles:
    """For each row of tiles, the counts and indices of its partial and full tiles; and the intervals."""

    partial_count: torch.Tensor
    partial: torch.Tensor
    full_count: torch.Tensor
    full: torch.Tensor
    intervals: tuple[torch.Tensor, ...]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.partial_count, self.partial, self.full_count, self.full, *self.intervals)


def _sequences(known: Layout, packed: PackedSequences, batch: int, device: torch.device) -> _Sequences:
    offsets = torch.tensor(packed.offsets(batch), dtype=torch.int32, device=device)
    return _Sequences(offsets, packed.longest)


def _tiles(known: Layout, device: torch.device, by_key: bool) -> _Tiles:
    walk = known.walk(TILE, TILE, by_key=by_key)
    rows = -(-(known.kv_len if by_key else known.q_len) // TILE)

    def listed(offsets: torch.Tensor, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counts = np.diff(offsets.numpy())
        padded = np.zeros((len(counts), max(1, int(counts.max(initial=0)))), dtype=np.int32)
        padded[np.arange(padded.shape[1]) < counts[:, None]] = tiles.numpy()
        shape = (known.batch, known.heads, rows)
        return (
            torch.from_numpy(counts.astype(np.int32)).view(shape).to(device),
            torch.from_numpy(padded).view(*shape, -1).to(device),
        )

    first_slot = int(walk.slots[0]) if walk.slots.numel() else 0
    own = slice(first_slot, first_slot + known.slots)
    ends = tuple(torch.from_numpy(np.ascontiguousarray(x[:, own])).to(device) for x in (known.first, known.last))
    return _Tiles(
        *listed(walk.partial_offsets, walk.partial), *listed(walk.full_offsets, walk.full), intervals=ends
    )


def _window_arguments(window: Window) -> dict[str, Any]:
    return {"causal": window.is_causal, "window_size_left": window.left, "window_size_right": window.right}


@dataclass(frozen=True)
class _Call:
    """The library's arguments for one call, and the conversion of tensors to and from its layout."""

    arguments: dict[str, Any]
    packed: bool = False

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Convert (batch, heads, length, dim) to the library's layout: length before heads, batch entries joined."""
        x = x.transpose(1, 2)
        return x if not self.packed else x[0] if len(x) == 1 else x.flatten(0, 1)

    def enter_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Convert (batch, heads, length) like ``enter``; heads stay before length."""
        return x if not self.packed else x[0] if len(x) == 1 else x.transpose(0, 1).flatten(1)


def _call(mask: Mask, q: torch.Tensor, k: torch.Tensor, by_key: bool) -> _Call:
    window = window_of(mask.node)
    if window is not None:
        return _Call(_window_arguments(window))
    known = mask.layout(q.shape[2], k.shape[2])
    packed = packed_sequences(mask.node)
    if packed is not None:
        made = partial(_sequences, packed=packed, batch=len(q), device=q.device)
        sequences = known.keep(("flash-4", "sequences", len(q), str(q.device)), made)
        offsets = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), sequences.offsets)
        longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), sequences.longest)
        return _Call({**_window_arguments(packed.window), **offsets, **longest}, packed=True)
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    from kernel_pytorch.ops.attention.flash4_mask import in_intervals

    make = partial(_tiles, device=q.device, by_key=by_key)
    tiles = known.keep(("flash-4", "tiles", by_key, str(q.device)), make)
    block_sparse = BlockSparseTensorsTorch(
        tiles.partial_count, tiles.partial, tiles.full_count, tiles.full, block_size=(TILE, TILE)
    )
    return _Call(
        {
            "block_sparse_tensors": block_sparse,
            "mask_mod": in_intervals(known.slots, len(known.first) > 1),
            "aux_tensors": list(tiles.intervals),
        }
    )


def _leave(packed: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Convert a result with joined batch entries to (batch, heads, length, ...)."""
    return own.copy_(packed.unflatten(0, (len(own), -1)).transpose(1, 2))


def forward(
    device: Device, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, wanted: str
) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call(mask, q, k, by_key=False)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    own_out, own_lse = call.enter(out), call.enter_rows(lse)
    flash_4_forward()(
        call.enter(q),
        call.enter(k),
        call.enter(v),
        softmax_scale=scale,
        return_lse=wanted != "out",
        out=own_out,
        lse=own_lse if wanted != "out" else None,
        **call.arguments,
    )
    if call.packed and len(q) > 1:
        _leave(own_out, out)
        lse.copy_(own_lse.unflatten(1, (len(q), -1)).transpose(0, 1))
    return out, lse


def backward(
    device: Device,
    dout: torch.Tensor,
    dlse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: Mask,
    scale: float,
    wanted: str,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = _call(mask, q, k, by_key=True)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    own = [call.enter(x) for x in (dq, dk, dv)]
    flash_4_backward()(
        *(call.enter(x) for x in (q, k, v, out, dout)),
        call.enter_rows(lse),
        softmax_scale=scale,
        deterministic=deterministic,
        dq=own[0],
        dk=own[1],
        dv=own[2],
        dlse=call.enter_rows(dlse) if lse_flows(wanted) else None,
        **call.arguments,
    )
    if call.packed and len(q) > 1:
        for packed, gradient in zip(own, (dq, dk, dv), strict=True):
            _leave(packed, gradient)
    return dq, dk, dv
