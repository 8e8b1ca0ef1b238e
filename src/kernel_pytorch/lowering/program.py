"""Lower a model to a ``.pte`` for ExecuTorch, with our delegate beside XNNPACK."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass
from executorch.exir.tensor import contiguous_stride_from_shape, dim_order_from_stride
from torch.export import ExportedProgram

from kernel_pytorch._compat.structures import pytree
from kernel_pytorch.fp8.monitor import layers_of
from kernel_pytorch.lowering.checksum import ProgramFile, write_whole
from kernel_pytorch.lowering.decomposition import decomposed
from kernel_pytorch.lowering.definitions import with_definitions
from kernel_pytorch.lowering.difference import Difference, differences
from kernel_pytorch.lowering.measured import fastest
from kernel_pytorch.lowering.quiet import quiet_libraries
from kernel_pytorch.lowering.recipes import find_recipe
from kernel_pytorch.lowering.refusals import refuse_without_kernels
from kernel_pytorch.lowering.report import Report, joined, report_of
from kernel_pytorch.lowering.runtime import LoadedProgram
from kernel_pytorch.lowering.spool import spool_folder
from kernel_pytorch.lowering.target import CPU, Lowering, lowering_of

__all__ = ["Difference", "LoweredProgram", "lower"]


def _silent(text: str) -> None:
    pass


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

    file: ProgramFile = field(repr=False)
    """Temporary file with the ``.pte`` and a checksum that ``kp.load`` verifies; ``save`` copies it."""
    report: Report
    eager: Mapping[str, Callable[..., Any]] = field(repr=False)
    """The eager model of each method, quantized if there is a recipe."""
    inputs: Mapping[str, tuple[Any, ...]] = field(repr=False)
    """Example inputs of each method."""

    def save(self, path: str | Path) -> None:
        """Write the ``.pte`` atomically; programs loaded from an earlier file at this path keep using that file."""
        write_whole(Path(path), self.file.path)

    @property
    def buffer(self) -> bytes:
        """The ``.pte`` as bytes, read from the file on each access."""
        return self.file.path.read_bytes()

    def load(self) -> LoadedProgram:
        """Load the program into this process."""
        return self._loaded

    @cached_property
    def _loaded(self) -> LoadedProgram:
        return LoadedProgram(self.file, "the program")

    def __call__(self, *inputs: Any) -> Any:
        return self._loaded(*inputs)

    def compare(self, *inputs: Any, method: str = "forward") -> tuple[Difference, ...]:
        """Run a method and eager PyTorch on the same inputs (by default, those of ``lower``).

        If the model has caches, both continue from the previous calls.
        """
        if method not in self.inputs:
            raise ValueError(f"method={method!r}: the program has {', '.join(self.inputs)}")
        given = inputs or self.inputs[method]
        leaves = pytree.tree_leaves(given)
        found = self._loaded.run(method, leaves)
        with torch.no_grad():
            return differences(found, self.eager[method](*given))


def _as_tuple(inputs: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(inputs, tuple):
        shown = (
            f"tensor of shape {list(inputs.shape)}" if isinstance(inputs, torch.Tensor) else type(inputs).__name__
        )
        raise TypeError(f"{name} is a {shown}: pass a tuple of the model's inputs, as (x,) for one")
    return inputs


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model={model!r}: expected a torch.nn.Module")
    if model.training:
        raise ValueError("model is in training mode: call model.eval() first")
    for name, layer in layers_of(model).items():
        if not layer.fp8_auto:  # recipe "auto" does not convert layers on a CPU
            raise ValueError(
                f"model trains in FP8 (recipe {layer.fp8_recipe}, layer {name!r}): call kp.fp8.revert(model) first, "
                f"which leaves the parameters as they are; recipe= quantizes for the device"
            )


@quiet_libraries()
def lower(
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    inputs: tuple[Any, ...] | Mapping[str, tuple[Any, ...]],
    *,
    backend: str = "cpu",
    recipe: str | None = None,
    dynamic_shapes: Any = None,
    options: Any = None,
    metadata: Mapping[str, Any] | None = None,
    measure: bool = False,
    tell: Callable[[str], None] | None = None,
) -> LoweredProgram:
    """Lower a model to a ``.pte``; ``kernel_pytorch.lowering.entry.lower`` describes the arguments."""
    target = lowering_of(backend)
    for one in model.values() if isinstance(model, Mapping) else (model,):
        _check_model(one)
    tell = tell or _silent
    chosen = None if recipe is None else find_recipe(recipe, target.recipes)
    if isinstance(inputs, Mapping):
        given = {name: _as_tuple(own, f"inputs[{name!r}]") for name, own in inputs.items()}
        shapes = dynamic_shapes or {}
    else:
        given, shapes = {"forward": _as_tuple(inputs, "inputs")}, {"forward": dynamic_shapes}
    unknown = [name for name in shapes if name not in given] if isinstance(shapes, Mapping) else [shapes]
    if not given or unknown:
        raise ValueError(f"inputs has the methods {list(given)}, dynamic_shapes has {unknown}: name each in inputs")

    if isinstance(model, Mapping) and set(model) != set(given):
        raise ValueError(f"model has the methods {list(model)}, inputs has {list(given)}: name the same in both")

    def make(own_options: Any) -> LoweredProgram:
        exported: dict[str, ExportedProgram] = {}
        eager: dict[str, torch.nn.Module] = {}
        if chosen is not None:
            tell(f"quantizing the model: {chosen.name}")
            for one, methods in _by_model(model, given):
                made = target.quantize(chosen, one, methods, shapes)
                exported, eager = {**exported, **made[0]}, {**eager, **made[1]}
        else:
            tell("exporting the model")
            for one, methods in _by_model(model, given):
                eager.update(dict.fromkeys(methods, one))
                for name, own in methods.items():
                    with torch.no_grad():
                        exported[name] = torch.export.export(one, own, dynamic_shapes=shapes.get(name))
        return lower_exported(
            exported, eager, given, options=own_options, metadata=metadata, tell=tell, target=target
        )

    if measure:
        return fastest(make, {f"{target.delegate} as asked": options, **target.alternatives}, tell)
    return make(options)


def _by_model(
    model: torch.nn.Module | Mapping[str, torch.nn.Module], inputs: Mapping[str, tuple[Any, ...]]
) -> list[tuple[torch.nn.Module, Mapping[str, tuple[Any, ...]]]]:
    """Group methods by model: return each model with the inputs of its methods."""
    if isinstance(model, Mapping):
        return [(model[name], {name: own}) for name, own in inputs.items()]
    return [(model, inputs)]


class _RowMajorShapes(ConstraintBasedSymShapeEvalPass):  # type: ignore[misc]
    """Give outputs of ``nonzero`` row-major strides: eager PyTorch's are transposed, and ExecuTorch's kernel (1.5.1)
    ignores strides and writes rows."""

    def call(self, graph_module: torch.fx.GraphModule) -> Any:
        done = super().call(graph_module)
        for node in graph_module.graph.nodes:
            if "nonzero" in str(node.target):
                spec = node.meta["spec"]
                spec.stride = contiguous_stride_from_shape(torch.Size(spec.shape))
                spec.dim_order = dim_order_from_stride(spec.stride)
        return done


def lower_exported(
    exported: Mapping[str, ExportedProgram],
    eager: Mapping[str, Callable[..., Any]],
    inputs: Mapping[str, tuple[Any, ...]],
    *,
    options: Any = None,
    metadata: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] | None = None,
    target: Lowering = CPU,
) -> LoweredProgram:
    """Lower methods that are already exported."""
    with spool_folder():
        return _lowered(exported, eager, inputs, options, metadata, tell or _silent, target)


def _lowered(
    exported: Mapping[str, ExportedProgram],
    eager: Mapping[str, Callable[..., Any]],
    inputs: Mapping[str, tuple[Any, ...]],
    options: Any,
    metadata: Mapping[str, Any] | None,
    tell: Callable[[str], None],
    target: Lowering,
) -> LoweredProgram:
    if target is CPU:  # a third-party backend may take any custom operator
        exported = {method: with_definitions(program) for method, program in exported.items()}
        for program in exported.values():
            refuse_without_kernels(program)
    partitioners = {method: target.partitioners(target.checked(options)) for method in exported}
    tell(f"partitioning the graph for {target.delegate}")
    ready = {method: decomposed(program, partitioners[method]) for method, program in exported.items()}
    edge = to_edge_transform_and_lower(
        {method: program for method, (program, _) in ready.items()},
        partitioner={method: asked for method, (_, asked) in ready.items()},
        constant_methods=dict(metadata) if metadata else None,
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=False),
    )
    reports = [
        report_of(edge.exported_program(name).graph_module, getattr(own[0], "refusals", []), name)
        for name, own in partitioners.items()
    ]
    tell("planning memory and writing the program")
    try:
        finished = edge.to_executorch(ExecutorchBackendConfig(sym_shape_eval_pass=_RowMajorShapes()))
    except RuntimeError as error:
        text = str(error)
        if "Missing out variants" not in text:
            raise
        left = {refusal.operator: refusal.reason for report in reports for refusal in report.left}
        why = "; ".join(f"{name}: {left.get(name, 'no rule')}" for name in sorted(re.findall(r"\w+::\w+", text)))
        raise ValueError(
            f"operators are left that ExecuTorch has no kernel for ({why}): let a backend take them"
        ) from error
    file = ProgramFile(finished.write_to_file)
    planned = sum(sum(plan.non_const_buffer_sizes) for plan in finished.executorch_program.execution_plan)
    return LoweredProgram(file, joined(reports, program_bytes=file.size, planned_bytes=planned), eager, inputs)
