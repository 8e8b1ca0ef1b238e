"""Point-to-point exchanges between the ranks of a group, with errors that name the failed rank.

Every schedule consists of exchanges. Sends and receives are posted together and waited for later, to overlap with
compute. Sent bytes are counted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

__all__ = ["Pending", "RankError", "Traffic", "Transport"]


class RankError(RuntimeError):
    """A rank does not respond, or disagrees with this one.

    Example:
        >>> import kernel_pytorch as kp
        >>> issubclass(kp.context_parallel.RankError, RuntimeError)
        True
    """


@dataclass
class Traffic:
    """Bytes that this rank has sent.

    Example:
        >>> from kernel_pytorch.distributed.transport import Traffic
        >>> Traffic().sent_bytes
        0
    """

    sent_bytes: int = 0
    messages: int = 0


@dataclass
class Pending:
    """Sends and receives in flight."""

    transport: Transport
    step: str
    works: list[tuple[int, Any]] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    """The sent tensors, kept alive until the exchange completes."""

    def wait(self) -> None:
        deadline = time.monotonic() + self.transport.timeout.total_seconds()
        for rank, work in self.works:
            left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
            try:
                work.wait(left)
            except RuntimeError as error:
                self.transport.fail(rank, self.step, error)
        self.works.clear()
        self.kept.clear()


class Transport:
    """Exchanges between the ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.group, self.timeout = group, timeout
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = Traffic()

    def exchange(
        self, step: str, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], tag: int = 0
    ) -> Pending:
        """Post every send and receive, by rank of the group. ``step`` names the exchange in errors."""
        pending = Pending(self, step)
        operations, peers = [], []
        for rank, tensor in receives.items():
            if tensor.numel():
                operations.append(dist.P2POp(dist.irecv, tensor, group=self.group, tag=tag, group_peer=rank))
                peers.append(rank)
        for rank, tensor in sends.items():
            if tensor.numel():
                whole = tensor.contiguous()
                operations.append(dist.P2POp(dist.isend, whole, group=self.group, tag=tag, group_peer=rank))
                peers.append(rank)
                pending.kept.append(whole)
                self.traffic.sent_bytes += whole.numel() * whole.element_size()
                self.traffic.messages += 1
        if operations:
            works = self._posted(step, operations, peers)
            # One work per operation, or one for all if the backend groups them.
            named = peers if len(works) == len(peers) else [peers[0]] * len(works)
            pending.works = list(zip(named, works, strict=True))
        return pending

    def _posted(self, step: str, operations: list[dist.P2POp], peers: list[int]) -> list[Any]:
        if "nccl" not in dist.get_backend_config(self.group):
            # One by one, so that an error can be attributed to a rank.
            works = []
            for operation, rank in zip(operations, peers, strict=True):
                try:
                    works.append(operation.op(operation.tensor, operation.peer, operation.group, operation.tag))
                except RuntimeError as error:
                    self.fail(rank, step, error)
            return works
        try:
            return list(dist.batch_isend_irecv(operations))
        except RuntimeError as error:
            self.fail(peers[0] if len(set(peers)) == 1 else None, step, error)

    def fail(self, rank: int | None, step: str, error: Exception) -> NoReturn:
        """Raise an error that names the rank that failed first, if another rank has already reported it."""
        seen = f"rank {rank}" if rank is not None else "a rank"
        own, first = f"{seen} in {step}", ""
        with contextlib.suppress(Exception):  # the store is unavailable if its rank has failed
            store = dist.distributed_c10d._get_default_store()
            first = store.compare_set(f"kernel_pytorch/failed/{self.group.group_name}", "", own).decode()
        why = f", after the group lost {first}" if first not in ("", own) else ""
        raise RankError(
            f"{seen} did not answer in {step} within {self.timeout.total_seconds():g} s{why} ({error}): "
            "it has died or waits elsewhere; restart the ranks, or give a longer timeout"
        ) from error
