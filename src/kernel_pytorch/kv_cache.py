"""Key-value cache of constant size: attention sinks and a sliding window in a ring buffer.

``KVCache`` is the definition: it runs in eager mode, in any float dtype, on any device. ``kp.lower`` lowers it as one
stateful operator, whose memory then lies inside the delegate and is shared by the methods of a program.

Slot s < sinks always holds position s. Position p >= sinks lies in slot ``sinks + (p - sinks) % ring``, where
``ring = window + longest``: a call writes its tokens before it attends, and the first of ``longest`` new tokens must
still find its whole window.
"""

from __future__ import annotations

import torch

__all__ = ["KVCache", "cache_slots", "quantized_rows"]

DTYPES = (torch.float32, torch.float16, torch.int8)
_LAST_POSITION = 1 << 40

_LIBRARY = torch.library.Library("kernel_pytorch", "FRAGMENT")
_LIBRARY.define(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor position, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor(c!) key_scales, Tensor(d!) value_scales, Tensor(e!) held, int window, int sinks, float scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class KVCache(torch.nn.Module):
    """Cached keys and values, and attention over them. Memory does not grow with the length of the text.

    ``cache(q, k, v, position)`` appends the keys and values of new tokens, the first of which is at ``position``, and
    returns the attention output of their queries: ``kp.attention`` over the whole history under the mask
    ``causal() & (window(window) | sinks(sinks))``. The result does not depend on how the tokens are split into calls.

    Keys are stored as given. A model with rotary embeddings rotates them first, at absolute positions.

    To continue, pass the number of tokens so far as ``position``. To start again, pass 0. To remove tokens, pass an
    earlier position: at most ``longest`` tokens before the largest so far, or any position whose window was not
    overwritten. Any other position raises an error.

    Args:
        kv_heads: number of heads of keys and values.
        head_dim: elements of a key.
        window: number of previous tokens that a token attends to.
        sinks: number of first tokens that every token attends to.
        longest: maximum number of tokens that one call may append.
        batch: number of sequences; all are at the same position.
        dtype: float32, float16, or int8: symmetric, one scale per token and head.
        value_dim: elements of a value; ``head_dim`` if None.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> cache = kp.KVCache(kv_heads=2, head_dim=8, window=4, sinks=1, longest=3)
        >>> q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
        >>> parts = [cache(*(x[:, :, at : at + 3] for x in (q, k, v)), at) for at in (0, 3, 6)]
        >>> whole = kp.attention(q, k, v, kp.masks.causal() & (kp.masks.window(4) | kp.masks.sinks(1)))
        >>> torch.allclose(torch.cat(parts, dim=2), whole, atol=1e-6)
        True
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor
    value_scales: torch.Tensor
    held: torch.Tensor

    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        *,
        window: int,
        sinks: int = 0,
        longest: int = 128,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        value_dim: int | None = None,
    ) -> None:
        super().__init__()
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "longest": longest, "batch": batch}
        for name, size in {**sizes, "value_dim": value_dim, "window": window + 1, "sinks": sinks + 1}.items():
            if size < 1:
                least = 0 if name in ("window", "sinks") else 1
                raise ValueError(f"{name}={size - 1 + least}: at least {least} is needed")
        if dtype not in DTYPES:
            known = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
            raise ValueError(f"dtype={dtype}: a cache holds one of {known}")
        self.window, self.sinks, self.longest = window, sinks, longest
        slots = (batch, kv_heads, sinks + window + longest)
        scales = slots if dtype == torch.int8 else (0,)
        # Not persistent: the cache is not part of a checkpoint.
        self.register_buffer("keys", torch.zeros(*slots, head_dim, dtype=dtype), persistent=False)
        self.register_buffer("values", torch.zeros(*slots, value_dim, dtype=dtype), persistent=False)
        self.register_buffer("key_scales", torch.zeros(scales), persistent=False)
        self.register_buffer("value_scales", torch.zeros(scales), persistent=False)
        # The number of tokens so far, and the first position that is still in the ring.
        self.register_buffer("held", torch.tensor([0, sinks]), persistent=False)

    def extra_repr(self) -> str:
        batch, heads, _, dim = self.keys.shape
        kind = str(self.keys.dtype).removeprefix("torch.")
        return (
            f"kv_heads={heads}, head_dim={dim}, window={self.window}, sinks={self.sinks}, longest={self.longest}, "
            f"batch={batch}, dtype={kind}"
        )

    @property
    def nbytes(self) -> int:
        """Memory of the cache in bytes; constant."""
        return sum(x.nbytes for x in (self.keys, self.values, self.key_scales, self.value_scales))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor | int,
        *,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Append keys and values at ``position`` (an int, or a tensor with one int64 element), and attend."""
        _check(self, q, k, v)
        if isinstance(position, int):
            position = torch.tensor([position], device=q.device)
        if position.dtype != torch.int64 or position.numel() != 1:
            raise ValueError(
                f"position is {position.dtype} {list(position.shape)}: pass one int64 number, where the first new "
                "token stands"
            )
        scale = float(q.shape[-1]) ** -0.5 if scale is None else float(scale)
        own = (self.keys, self.values, self.key_scales, self.value_scales, self.held)
        with torch.no_grad():
            return torch.ops.kernel_pytorch.cached_attention(  # type: ignore[no-any-return]
                q, k, v, position, *own, self.window, self.sinks, scale
            )


def _check(cache: KVCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    batch, heads, _, dim = cache.keys.shape
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise ValueError(f"{name} has {tensor.ndim} dimensions: pass (batch, heads, tokens, head_dim)")
        if tensor.shape[0] != batch:
            raise ValueError(f"{name} has batch {tensor.shape[0]}: the cache was made with batch={batch}")
        if not tensor.is_floating_point() or tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {tensor.dtype}: q, k and v must be floating numbers of one format")
    tokens = q.shape[2]
    for name, tensor, width in (("k", k, dim), ("v", v, cache.values.shape[3])):
        if tensor.shape[1] != heads or tensor.shape[3] != width:
            raise ValueError(
                f"{name} has {tensor.shape[1]} heads of {tensor.shape[3]} numbers: the cache was made for {heads} "
                f"heads of {width}"
            )
        if tensor.shape[2] != tokens:
            raise ValueError(f"{name} has {tensor.shape[2]} tokens and q has {tokens}")
    if q.shape[1] % heads or q.shape[3] != dim:
        raise ValueError(
            f"q has {q.shape[1]} heads of {q.shape[3]} numbers: it needs a multiple of {heads} heads of {dim}"
        )
    if tokens > cache.longest:
        raise ValueError(
            f"{tokens} new tokens at once: the cache was made with longest={cache.longest}; pass them in parts, or "
            "make it with a larger longest"
        )


def cache_slots(positions: torch.Tensor, sinks: int, ring: int) -> torch.Tensor:
    """Return the slots of positions.

    Example:
        >>> cache_slots(torch.arange(8), sinks=2, ring=4).tolist()
        [0, 1, 2, 3, 4, 5, 2, 3]
    """
    return torch.where(positions < sinks, positions, sinks + (positions - sinks) % ring)


def quantized_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to int8, each with the scale amax / 127; return data and scales.

    Rows of zeros have scale 0. Rows with a non-finite element have a non-finite scale and dequantize to NaN.

    Example:
        >>> rows, scales = quantized_rows(torch.tensor([[0.0, 2.0, -4.0]]))
        >>> rows.tolist(), round(scales.item() * 127, 6)
        ([[0, 64, -127]], 4.0)
    """
    x = x.float()
    scales = x.abs().amax(dim=-1) / 127
    usable = (scales > 0) & scales.isfinite()
    divisor = torch.where(usable, scales, 1.0)[..., None]
    return torch.where(usable[..., None], (x / divisor).round(), 0.0).to(torch.int8), scales


def _write(held: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> None:
    if held.dtype == torch.int8:
        rows, own = quantized_rows(x)
        held[:, :, slots], scales[:, :, slots] = rows, own
    else:
        held[:, :, slots] = x.to(held.dtype)


def _cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_scales: torch.Tensor,
    value_scales: torch.Tensor,
    held: torch.Tensor,
    window: int,
    sinks: int,
    scale: float,
) -> torch.Tensor:
    count, ring = q.shape[2], keys.shape[2] - sinks
    start = int(position)
    seen, low = held.tolist()
    if not 0 <= start <= min(seen, _LAST_POSITION):
        raise ValueError(f"position={start}: the cache has seen {seen} tokens; pass 0 to {seen}")
    if start <= sinks:
        low = sinks  # no position of the ring is read
    elif max(sinks, start - window) < low:
        raise ValueError(
            f"position={start}: tokens from {max(sinks, start - window)} on are needed, and those before {low} have "
            "been overwritten; start anew at 0, or make the cache with a larger longest"
        )
    new = torch.arange(start, start + count, device=q.device)
    slots = cache_slots(new, sinks, ring)
    _write(keys, key_scales, slots, k)
    _write(values, value_scales, slots, v)
    seen = start + count
    low = max(low, seen - ring)
    held.copy_(torch.tensor([seen, low]))

    # All cached positions in ascending order, as one dense attention.
    there = torch.cat([torch.arange(min(sinks, seen)), torch.arange(low, max(seen, low))]).to(q.device)
    places = cache_slots(there, sinks, ring)
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // keys.shape[1]

    def read(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        found = rows[:, :, places].to(exact)
        if rows.dtype == torch.int8:
            found = found * scales[:, :, places, None].to(exact)
        return found.repeat_interleave(group, dim=1)

    keep = (there <= new[:, None]) & ((there >= new[:, None] - window) | (there < sinks))
    scores = q.to(exact) @ read(keys, key_scales).transpose(2, 3) * scale
    shares = scores.masked_fill(~keep, float("-inf")).softmax(dim=-1)
    return (shares @ read(values, value_scales)).to(q.dtype)


def _cached_attention_fake(q: torch.Tensor, _: torch.Tensor, v: torch.Tensor, *__: object) -> torch.Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


_LIBRARY.impl("cached_attention", _cached_attention, "CompositeExplicitAutograd")
torch.library.register_fake("kernel_pytorch::cached_attention", _cached_attention_fake, lib=_LIBRARY)
