"""``Context``: a sequence sharded across the ranks of a group, and checks that all ranks make the same calls."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from kernel_pytorch.distributed.cost import LINKS, Link
from kernel_pytorch.distributed.placement import Placement, Style, place
from kernel_pytorch.distributed.schedules import SCHEDULES, Schedule
from kernel_pytorch.distributed.transport import RankError, Traffic, Transport
from kernel_pytorch.masks import Mask

__all__ = ["Context", "group_of", "total_length"]

_contexts: WeakValueDictionary[str, Context] = WeakValueDictionary()
_numbers = itertools.count()


def group_of(group: Any) -> dist.ProcessGroup:
    """Return the process group of a group or of a one-dimensional mesh."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group={group}: a mesh of {group.ndim} dimensions; pass one of them, as mesh['cp']")
        return group.get_group()
    if isinstance(group, dist.ProcessGroup):
        return group
    raise TypeError(
        f"group={group!r}: expected a process group, a one-dimensional DeviceMesh, "
        "kp.context_parallel.Context or kp.context_parallel.Chunks"
    )


def total_length(tokens: int, group: Any) -> int:
    """Return the number of tokens of all ranks."""
    # Not an all-reduce, whose error does not name the rank that failed.
    transport = Transport(_control_group(group_of(group)), timedelta(seconds=300))
    counts = every_rank(transport, "the count of tokens", torch.tensor([tokens], dtype=torch.int64))
    return sum(int(count) for count in counts)


def every_rank(transport: Transport, step: str, own: torch.Tensor) -> list[torch.Tensor]:
    """Gather a small tensor from each rank; an error names the rank that does not respond."""
    others = [r for r in range(transport.ranks) if r != transport.rank]
    incoming = {r: torch.empty_like(own) for r in others}
    transport.exchange(step, dict.fromkeys(others, own), incoming, tag=3).wait()
    return [own if r == transport.rank else incoming[r] for r in range(transport.ranks)]


class Context:
    """A sequence sharded across the ranks of a group.

    Ranks must make the same calls in the same order, including backwards, from one thread per group: messages are
    matched by order only.

    Args:
        group: a process group, or one dimension of a DeviceMesh.
        length: tokens of the full sequence; any number.
        mask: the mask of most calls: tokens are placed so that each rank has the same work under it. Calls may use
            any other mask.
        placement: a ``Placement`` of your own, or the name of a style of ``place``.
        schedule: ``"ring"``, ``"gather"`` or ``"heads"`` pins one; ``"auto"`` takes the predicted fastest.
        timeout: seconds after which a rank that does not respond is an error.
        link: the interconnect, one of ``LINKS`` or your own ``Link``; None to guess it from the group.
        check: whether ranks compare shapes, dtype, mask and schedule before each call, which costs a small message.

    Example:
        >>> import torch, torch.distributed as dist, kernel_pytorch as kp
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> cp = kp.context_parallel.Context(dist.group.WORLD, length=100, mask=kp.masks.causal())
        >>> x = cp.shard(torch.randn(1, 100, 32))
        >>> q = k = v = x.unflatten(-1, (2, 16)).transpose(1, 2)
        >>> out = kp.attention(q, k, v, kp.masks.causal(), group=cp)
        >>> cp.unshard(out, dim=2).shape
        torch.Size([1, 2, 100, 16])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        group: Any,
        length: int,
        mask: Mask,
        *,
        placement: Placement | Style = "auto",
        schedule: Schedule | str = "auto",
        timeout: float = 300.0,
        link: Link | str | None = None,
        check: bool = True,
    ) -> None:
        if schedule not in ("auto", *SCHEDULES):
            raise ValueError(f"schedule={schedule!r}: use auto, {', '.join(SCHEDULES)}")
        if timeout <= 0:
            raise ValueError(f"timeout={timeout}: use seconds above 0")
        self.group = group_of(group)
        self.transport = Transport(self.group, timedelta(seconds=timeout))
        self.control = Transport(_control_group(self.group), timedelta(seconds=timeout))
        self.rank, self.ranks = self.transport.rank, self.transport.ranks
        self.placement = (
            placement if isinstance(placement, Placement) else place(mask, length, self.ranks, placement)
        )
        if (self.placement.length, self.placement.ranks) != (length, self.ranks):
            raise ValueError(
                f"placement is of {self.placement.length} tokens on {self.placement.ranks} ranks: "
                f"there are {length} on {self.ranks}"
            )
        self.schedule: Schedule | None = None if schedule == "auto" else schedule  # type: ignore[assignment]
        if isinstance(link, str) and link not in LINKS:
            raise ValueError(f"link={link!r}: use one of {', '.join(LINKS)}, or a kp.context_parallel.Link")
        self.link = LINKS[link] if isinstance(link, str) else link or _guessed_link(self.group)
        self.check = check
        self.name = f"{self.group.group_name}/{next(_numbers)}"
        _contexts[self.name] = self

    def __deepcopy__(self, memo: Any) -> Context:
        return self  # not part of a copied model's state

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Context belongs to the ranks of this process: save its placement, and make a Context there"
        )

    def __repr__(self) -> str:
        held = f"{self.tokens} of {self.length} tokens"
        return f"Context(rank {self.rank} of {self.ranks}, {held}, {self.placement.style})"

    @property
    def length(self) -> int:
        """Number of tokens of the full sequence."""
        return self.placement.length

    @property
    def tokens(self) -> int:
        """Number of tokens on this rank."""
        return self.placement.sizes[self.rank]

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent."""
        return self.transport.traffic

    def positions(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the positions of this rank's tokens in the full sequence, for rotary embeddings."""
        return torch.from_numpy(self.placement.tokens(self.rank)).to(device)

    def shard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return this rank's tokens of a tensor that every rank has in full."""
        if x.shape[dim] != self.length:
            raise ValueError(f"x has {x.shape[dim]} tokens in dimension {dim}: there are {self.length}")
        pieces = [x.narrow(dim, first, last - first) for first, last in self.placement.ranges[self.rank]]
        return torch.cat(pieces or [x.narrow(dim, 0, 0)], dim=dim)

    def unshard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Gather the full tensor on every rank.

        The gradient of this rank's tokens comes from this rank only, which is right if every rank computes the same
        loss from the result.
        """
        if x.shape[dim] != self.tokens:
            raise ValueError(f"x has {x.shape[dim]} tokens in dimension {dim}: this rank holds {self.tokens}")
        whole: torch.Tensor = _Unshard.apply(x, self, dim)  # type: ignore[no-untyped-call]
        return whole

    def agree(self, facts: Mapping[str, int], shown: Mapping[str, Any]) -> list[dict[str, int]]:
        """Return every rank's facts; raise on all ranks if one differs, except ``tokens`` and ``refused``."""
        own = torch.tensor(list(facts.values()), dtype=torch.int64)
        answers = every_rank(self.control, "the agreement before a call", own)
        every = [dict(zip(facts, answer.tolist(), strict=True)) for answer in answers]
        for name in facts:
            if name == "tokens":
                continue
            values = [one[name] for one in every]
            if name == "refused":
                refusing = [r for r, value in enumerate(values) if value and r != self.rank]
                if refusing and not facts[name]:
                    raise RankError(f"rank {refusing[0]} refused the call: its own error says why")
            elif len(set(values)) > 1:
                by_value: dict[int, list[int]] = {}
                for r, value in enumerate(values):
                    by_value.setdefault(value, []).append(r)
                listed = "; ".join(
                    f"ranks {ranks}: {_readable(name, value, facts[name])}" for value, ranks in by_value.items()
                )
                raise RankError(
                    f"ranks disagree on {name} ({listed}); here it is {shown.get(name, facts[name])}: "
                    "make every rank call with the same"
                )
        return every


_PLAIN = ("batch", "q_heads", "kv_heads", "head_dim", "value_dim")  # shown in errors; other facts are fingerprints


def bits_of(value: float) -> int:
    """Return the bits of a float as an integer, which ranks compare."""
    found: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return found


def _readable(name: str, value: int, own: int) -> str:
    """Format a rank's fact for an error; a fingerprint only as equal to this rank's or not."""
    if name == "scale":
        return str(struct.unpack("<d", struct.pack("<q", value))[0])
    if name == "gradients":
        return "needed" if value else "not needed"
    return str(value) if name in _PLAIN else "this one" if value == own else "another"


def fingerprint(*values: object) -> int:
    """Return a hash of the values that is the same in every process."""
    digest = hashlib.sha256()
    for value in values:
        digest.update(value if isinstance(value, bytes) else repr(value).encode())
    found: int = struct.unpack("<q", digest.digest()[:8])[0]
    return found


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, context: Context, dim: int) -> torch.Tensor:
        ctx.context, ctx.dim = context, dim
        placement, rank = context.placement, context.rank
        others = [r for r in range(context.ranks) if r != rank]
        mine = x.movedim(dim, 0).contiguous()
        parts = {r: mine.new_empty((placement.sizes[r], *mine.shape[1:])) for r in others}
        context.transport.exchange("unshard", dict.fromkeys(others, mine), parts, tag=4).wait()
        parts[rank] = mine
        whole = mine.new_empty((placement.length, *mine.shape[1:]))
        for r, part in parts.items():
            at = 0
            for first, last in placement.ranges[r]:
                whole[first:last] = part[at : at + last - first]
                at += last - first
        return whole.movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.context.shard(gradient, ctx.dim), None, None


@lru_cache(maxsize=64)
def _control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group for small CPU messages: the group itself if it is Gloo, else a Gloo group of the same ranks."""
    config = dist.get_backend_config(
        group
    )  # device:backend pairs; get_backend says "undefined" where there are two
    if "nccl" in config:
        # NCCL requires every rank in a group's first operation; later exchanges involve only some. Not dist.barrier,
        # which uses the CPU backend if a group has both.
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    if "cpu:gloo" in config:
        return group
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
    )
    return made


def _guessed_link(group: dist.ProcessGroup) -> Link:
    """Guess the link from the group's backend, the device, and whether all ranks can be on one host."""
    import os

    if "nccl" not in dist.get_backend_config(group):
        return LINKS["gloo"]
    if torch.version.hip:
        inner = LINKS["xgmi-mi300x"]
    else:
        inner = LINKS["nvlink5" if torch.cuda.get_device_capability()[0] >= 10 else "nvlink4"]
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if dist.get_world_size(group) <= on_host:
        return inner
    between = LINKS["infiniband-ndr"]
    return between.between_nodes(on_host, inner) if on_host > 1 else between


def context_named(name: str) -> Context:
    """Return the context that a compiled graph refers to by name."""
    found = _contexts.get(name)
    if found is None:
        raise RuntimeError(
            f"context {name!r} is not of this process, or gone: keep a Context here and compile again"
        )
    return found
