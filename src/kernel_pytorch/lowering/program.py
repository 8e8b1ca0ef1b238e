"""``kp.lower``: from a model to a program for devices, with our delegate beside XNNPACK."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from torch.export import ExportedProgram

from kernel_pytorch.lowering.recipes import find_recipe
from kernel_pytorch.lowering.report import Report, report_of
from kernel_pytorch.lowering.runtime import LoadedProgram
from kernel_pytorch.lowering.target import CPU, Lowering, lowering_of

__all__ = ["Difference", "LoweredProgram", "lower"]


def _silent(text: str) -> None:
    pass


@dataclass(frozen=True)
class Difference:
    """One output of the program against eager PyTorch."""

    output: int
    largest: float
    """The largest absolute difference."""
    snr: float
    """Signal to noise in decibels; infinite where nothing differs."""

    def __str__(self) -> str:
        return f"output {self.output}: largest difference {self.largest:.3g}, {self.snr:.1f} dB"


def difference(output: int, found: torch.Tensor, wanted: torch.Tensor) -> Difference:
    if found.shape != wanted.shape:
        raise AssertionError(f"output {output} has shape {list(found.shape)}, eager {list(wanted.shape)}")
    exact, noise = wanted.double(), found.double() - wanted.double()
    if exact.numel() == 0 or not bool(noise.any()):
        return Difference(output, 0.0, math.inf)
    power = exact.square().sum().item()
    ratio = power / noise.square().sum().item()
    return Difference(output, noise.abs().max().item(), 10 * math.log10(ratio) if ratio > 0 else -math.inf)


@dataclass(frozen=True, eq=False)
class LoweredProgram:
    """A model lowered to a ``.pte``.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).eval(), torch.randn(2, 8)
        >>> program = kp.lower(model, (x,))
        >>> program.compare(x)[0].snr > 60
        True
    """

    buffer: bytes
    """The ``.pte`` itself."""
    report: Report
    eager: Callable[..., Any] = field(repr=False)
    """What the program was made from: the model, quantized where a recipe says so."""
    inputs: tuple[Any, ...] = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the ``.pte``."""
        Path(path).write_bytes(self.buffer)

    def load(self) -> LoadedProgram:
        """The program, ready to run here."""
        return self._loaded

    @cached_property
    def _loaded(self) -> LoadedProgram:
        return LoadedProgram(self.buffer, "the program")

    def __call__(self, *inputs: Any) -> Any:
        return self._loaded(*inputs)

    def compare(self, *inputs: Any) -> tuple[Difference, ...]:
        """Run the program and eager PyTorch on the same inputs (those of ``lower`` when left out)."""
        given = inputs or self.inputs
        with torch.no_grad():
            wanted = torch.utils._pytree.tree_leaves(self.eager(*given))
        found = torch.utils._pytree.tree_leaves(self._loaded(*torch.utils._pytree.tree_leaves(given)))
        if len(found) != len(wanted):
            raise AssertionError(f"the program has {len(found)} outputs, eager {len(wanted)}")
        return tuple(difference(n, *pair) for n, pair in enumerate(zip(found, wanted, strict=True)))


def lower(
    model: torch.nn.Module,
    inputs: Sequence[Any],
    *,
    backend: str = "cpu",
    recipe: str | None = None,
    dynamic_shapes: Any = None,
    options: Any = None,
    tell: Callable[[str], None] | None = None,
) -> LoweredProgram:
    """Lower a model to a ``.pte`` that runs on ExecuTorch, with our kernels for what XNNPACK leaves behind.

    Args:
        model: in eval mode.
        inputs: an example of its inputs, as a tuple.
        backend: where it will run: ``"cpu"``, or a backend elsewhere whose record says how it lowers.
        recipe: how to quantize it: one of the backend's, such as ``"int8-dynamic"``; None for not at all.
        dynamic_shapes: which dimensions may change, as ``torch.export.export`` takes them; each needs a ``max``.
        options: what the delegate takes, as the backend's own record (``PartitionerOptions`` for ``"cpu"``);
            everything it can when left out.
        tell: gets a line for each step.

    Returns:
        A program with ``save``, ``report`` (who runs what, and why not) and ``compare`` (against eager).

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> class Attends(torch.nn.Module):
        ...     def forward(self, q, k, v):
        ...         return kp.attention(q, k, v, kp.masks.causal() & kp.masks.window(16))
        >>> qkv = tuple(torch.randn(1, 2, 64, 8) for _ in range(3))
        >>> program = kp.lower(Attends().eval(), qkv)
        >>> program.report.count("KernelPyTorchBackend", "kernel_pytorch_lowering::attention")
        1
    """
    target = lowering_of(backend)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model={model!r}: expected a torch.nn.Module")
    if model.training:
        raise ValueError("model is in training mode: call model.eval() first")
    tell = tell or _silent
    chosen = None if recipe is None else find_recipe(recipe, target.recipes)
    given = tuple(inputs)
    if chosen is not None:
        tell(f"quantizing the model: {chosen.name}")
        exported, eager = target.quantize(chosen, model, given, dynamic_shapes)
        return lower_exported(exported, eager, given, options=options, tell=tell, target=target)
    tell("exporting the model")
    with torch.no_grad():
        exported = torch.export.export(model, given, dynamic_shapes=dynamic_shapes)
    return lower_exported(exported, model, given, options=options, tell=tell, target=target)


def lower_exported(
    exported: ExportedProgram,
    eager: Callable[..., Any],
    inputs: tuple[Any, ...],
    *,
    options: Any = None,
    tell: Callable[[str], None] | None = None,
    target: Lowering = CPU,
) -> LoweredProgram:
    """The second half of ``lower``, for a program that is exported already."""
    tell = tell or _silent
    ours, *others = target.partitioners(target.checked(options))
    tell(f"partitioning the graph for {target.delegate}")
    edge = to_edge_transform_and_lower(
        exported,
        partitioner=[ours, *others],
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=False),
    )
    found = report_of(edge.exported_program().graph_module, getattr(ours, "refusals", []))
    tell("planning memory and writing the program")
    finished = edge.to_executorch()
    buffer = bytes(finished.buffer)
    planned = sum(finished.executorch_program.execution_plan[0].non_const_buffer_sizes)
    return LoweredProgram(buffer, replace(found, program_bytes=len(buffer), planned_bytes=planned), eager, inputs)
