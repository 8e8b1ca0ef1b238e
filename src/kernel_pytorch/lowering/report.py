"""The report of a lowered model: delegates, nodes that were not taken with reasons, and sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch.fx import GraphModule

from kernel_pytorch.lowering.backend import KernelPyTorchBackend
from kernel_pytorch.lowering.partitioner import Refusal
from kernel_pytorch.lowering.payload import Cache
from kernel_pytorch.lowering.rules import cache_of, operator_name

__all__ = ["Delegate", "Report", "joined", "report_of"]

_CACHED = "kernel_pytorch_lowering::cached_attention"


@dataclass(frozen=True)
class Delegate:
    """One delegated subgraph."""

    backend: str
    operators: tuple[tuple[str, int], ...]
    """The count of each operator."""
    payload_bytes: int
    method: str = "forward"


@dataclass(frozen=True)
class Report:
    """Which backend runs each node of a model, and why; print it for all details.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> report = kp.lower(torch.nn.LayerNorm(8).eval(), (torch.ones(2, 8),)).report
        >>> [delegate.backend for delegate in report.delegates], report.left
        (['KernelPyTorchBackend'], ())
    """

    delegates: tuple[Delegate, ...]
    left: tuple[Refusal, ...]
    """Nodes that no backend took, each with our reason; ExecuTorch's portable kernels run them."""
    passed_on: tuple[Refusal, ...]
    """Nodes that another backend took, each with our reason for not taking it."""
    program_bytes: int = 0
    planned_bytes: int = 0
    """Memory that ExecuTorch plans for tensors between delegates."""
    caches: tuple[Cache, ...] = ()
    """The KV caches in our delegate, which all methods share."""
    measured: tuple[tuple[str, float], ...] = ()
    """With ``measure=True``: (name, seconds) of each set of options, with the chosen one first."""

    def count(self, backend: str, operator: str) -> int:
        """Return the number of nodes of an operator that a backend runs."""
        return sum(
            dict(delegate.operators).get(operator, 0) for delegate in self.delegates if delegate.backend == backend
        )

    @property
    def ours(self) -> tuple[Delegate, ...]:
        return tuple(delegate for delegate in self.delegates if delegate.backend == KernelPyTorchBackend.__name__)

    def __str__(self) -> str:
        lines = [f"program of {self.program_bytes:,} bytes, {self.planned_bytes:,} bytes planned for tensors"]
        for number, (way, seconds) in enumerate(self.measured):
            lines.append(f"{'slower' if number else 'kept'}: {way}, {seconds * 1e3:.3f} ms")
        several = len({delegate.method for delegate in self.delegates}) > 1
        if self.caches:
            held = sum(cache.nbytes for cache in self.caches)
            lines.append(f"{len(self.caches)} caches of {held:,} bytes in all, shared by the methods")
        for delegate in self.delegates:
            inside = ", ".join(f"{name} x{count}" if count > 1 else name for name, count in delegate.operators)
            of_method = f"{delegate.method}: " if several else ""
            lines.append(f"{of_method}{delegate.backend} ({delegate.payload_bytes:,} bytes): {inside}")
        for title, refusals in (
            ("left to portable kernels", self.left),
            ("taken by another backend", self.passed_on),
        ):
            counted = Counter((refusal.operator, refusal.reason) for refusal in refusals)
            for (operator, reason), count in counted.items():
                times = f" x{count}" if count > 1 else ""
                lines.append(f"{title}: {operator}{times}: {reason}")
        return "\n".join(lines)


def joined(reports: Sequence[Report], *, program_bytes: int, planned_bytes: int) -> Report:
    """Merge the reports of a program's methods."""
    return Report(
        tuple(delegate for report in reports for delegate in report.delegates),
        tuple(refusal for report in reports for refusal in report.left),
        tuple(refusal for report in reports for refusal in report.passed_on),
        program_bytes,
        planned_bytes,
        tuple(dict.fromkeys(cache for report in reports for cache in report.caches)),
    )


def report_of(module: GraphModule, refusals: list[Refusal], method: str = "forward") -> Report:
    """Return the report of a lowered graph, before ExecuTorch plans memory, which changes the graph in place."""
    delegates, caches = [], []
    for name, child in module.named_children():
        if isinstance(child, LoweredBackendModule) and name.startswith("lowered_module"):
            delegates.append(_delegate(child, method))
            nodes = child.original_module.graph.nodes
            caches += [cache_of(node) for node in nodes if operator_name(node) == _CACHED]
    nodes = [
        node for node in module.graph.nodes if node.op == "call_function" and not _is_plumbing(operator_name(node))
    ]
    # Passes of other backends rename nodes: match those without an equal name by operator, in order.
    waiting: dict[str, list[Refusal]] = {}
    for refusal in refusals:
        waiting.setdefault(refusal.operator, []).append(refusal)
    left = []
    for node in nodes:
        own = waiting.get(operator_name(node), [])
        same = next((refusal for refusal in own if refusal.node == node.name), own[0] if own else None)
        if same is None:
            same = Refusal(node.name, operator_name(node), "came in after partitioning")
        else:
            own.remove(same)
        left.append(same)
    passed_on = [refusal for own in waiting.values() for refusal in own if not _is_plumbing(refusal.operator)]
    return Report(tuple(delegates), tuple(left), tuple(passed_on), caches=tuple(caches))


def _delegate(lowered: Any, method: str) -> Delegate:
    nodes = lowered.original_module.graph.nodes
    counted = Counter(operator_name(node) for node in nodes if node.op == "call_function")
    counted = Counter({name: count for name, count in counted.items() if not _is_plumbing(name)})
    return Delegate(lowered.backend_id, tuple(counted.most_common()), len(lowered.processed_bytes), method)


def _is_plumbing(name: str) -> bool:
    """Return whether an operator does no computation: tuple elements, sizes, delegate calls."""
    return name in ("getitem", "", "alloc") or name.startswith(("aten::sym_", "executorch_call", "_operator"))
