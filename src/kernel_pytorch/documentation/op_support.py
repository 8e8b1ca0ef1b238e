"""Probe which operators a backend supports, by lowering and running each in each dtype and with each recipe.

``kernel-pytorch backend docs NAME --probe`` writes the record, from which the pages and ``op-support.csv`` are made.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import importlib.util
import io
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernel_pytorch.evidence import EvidenceError, OpSupport, Probed, load_evidence, versions, write_record
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.op import registered_op
from kernel_pytorch.hardware_abstraction.registry import Backend

__all__ = ["COLUMNS", "OperatorRow", "csv_text", "operator_rows", "probe_backend", "recorded", "write_support"]

COLUMNS = ("Operator", "Compute DType", "Quantization", "Constraints")
FORMATS = ("float32", "float16", "bfloat16")
# Smallest accepted SQNR in dB against eager in the same dtype; for quantized programs, against the quantized model.
_LEAST = {"float32": 60.0, "float16": 45.0, "bfloat16": 30.0}
_LEAST_QUANTIZED = 25.0


def probe_backend(
    record: Backend, *, only: Iterable[str] | None = None, tell: Callable[[str], None] | None = None
) -> OpSupport:
    """Lower and run every operator of a backend's probes. Wrong results raise an error; refusals are recorded.

    Args:
        record: a backend with a ``Lowering``.
        only: probe only these operators; empty for all.
        tell: called with a line of progress per operator, each of which takes seconds.
    """
    from kernel_pytorch.lowering.target import lowering_of

    target, tell = lowering_of(record.name), tell or (lambda _: None)
    wanted = None if only is None else set(only)
    unknown = (wanted or set()) - {one.operator for one in target.probes}
    if unknown:
        raise ValueError(f"only={sorted(unknown)}: backend {record.name!r} has no probe of these operators")
    chosen = [one for one in target.probes if wanted is None or one.operator in wanted]
    results: list[Probed] = []
    for number, one in enumerate(chosen, 1):
        tell(f"{number} of {len(chosen)}: {one.operator}" + (f", {one.variant}" if one.variant else ""))
        first = _probed(record.name, one, FORMATS[0])
        results.append(first)
        if one.variant:
            continue
        results += [_probed(record.name, one, number_format) for number_format in FORMATS[1:]]
        if one.dynamic and first.delegate:
            results.append(_probed(record.name, one, FORMATS[0], dynamic=True))
        results += [_probed(record.name, one, FORMATS[0], recipe=recipe) for recipe in target.recipes]
    return OpSupport(record.name, _versions(), {"lowering": lowering_digest(record)}, results)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {**versions(), "executorch": version("executorch"), "torchao": version("torchao")}


def _probed(name: str, one: Any, number_format: str, *, recipe: str = "", dynamic: bool = False) -> Probed:
    from kernel_pytorch.lowering.target import lowering_of

    target = lowering_of(name)
    facts = {"variant": one.variant, "recipe": recipe, "dynamic": dynamic}

    def refused(reason: str) -> Probed:
        return Probed(one.operator, number_format, reason=reason, **facts)

    dtype = getattr(torch, number_format)
    torch.manual_seed(0)
    model, inputs = one.make().eval().to(dtype), one.inputs(dtype)
    shapes: Any = None
    if dynamic:
        rows = torch.export.Dim("rows", min=2, max=64)
        shapes = tuple({0: rows} for _ in inputs)
        shapes = (shapes,) if _takes_any_number(model) else shapes
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            exported = torch.export.export(model, inputs, dynamic_shapes=shapes)
            if one.operator not in _operators(exported):
                raise EvidenceError(
                    f"the probe of {one.operator} has other operators: {', '.join(sorted(_operators(exported)))}"
                )
            eager = model
            if recipe:
                methods, quantized = target.quantize(target.recipes[recipe], model, {"forward": inputs}, {})
                exported, eager = methods["forward"], quantized["forward"]
                if not any("quantize" in operator for operator in _operators(exported)):
                    return refused("the recipe leaves it as it is")
            return _lowered(target, exported, eager, inputs, refused, facts, one.operator, number_format)
        except EvidenceError:
            raise
        except Exception as error:  # third-party passes may fail in any way; record the failure
            return refused(f"lowering fails: {_first_line(error)}")


def _lowered(
    target: Any,
    exported: Any,
    eager: Any,
    inputs: tuple[torch.Tensor, ...],
    refused: Callable[[str], Probed],
    facts: dict[str, Any],
    operator: str,
    number_format: str,
) -> Probed:
    from kernel_pytorch.lowering.program import lower_exported

    method = {"forward": exported}, {"forward": eager}, {"forward": inputs}
    program = lower_exported(*method, options=target.probe_options, target=target)
    if program.report.left:
        return refused(_why(program.report.left))
    if not program.report.delegates:
        return refused("nothing of it is left to run")
    try:
        worst = min(difference.snr for difference in program.compare())
    except (ValueError, RuntimeError) as error:
        return refused(f"it is lowered and does not run: {_first_line(error)}")
    least = _LEAST_QUANTIZED if facts["recipe"] else _LEAST[number_format]
    if worst < least:
        raise EvidenceError(f"{operator} in {number_format} {facts}: {worst:.1f} dB, and {least} are the least")
    names = " + ".join(dict.fromkeys(delegate.backend for delegate in program.report.delegates))
    return Probed(operator, number_format, delegate=names, **facts)


def _takes_any_number(model: torch.nn.Module) -> bool:
    import inspect

    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL in kinds


def _operators(exported: Any) -> set[str]:
    return {
        str(node.target.name())
        for node in exported.graph.nodes
        if node.op == "call_function" and hasattr(node.target, "name")
    }


def _why(left: Iterable[Any]) -> str:
    """Return the reasons, without those of nodes that passes have inserted around a refused one."""
    told = [f"{one.operator}: {one.reason}" for one in left if "after partitioning" not in one.reason]
    return "; ".join(dict.fromkeys(told)) or "another pass left something of it to portable kernels"


def _first_line(error: Exception) -> str:
    """Return an error as one short line without paths of this machine."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"/\S+/", "", text)[:120]


def lowering_sources(record: Backend) -> dict[str, Path]:
    """Return the sources that a backend's operators depend on: modules that its lowering imports, and C++ files."""
    if record.lowering is None:
        raise ValueError(f"backend {record.name!r} has no lowering")
    from kernel_pytorch.lowering.target import lowering_from

    first = record.lowering.partition(":")[0]
    paths, waiting = {}, [first]
    while waiting:
        name = waiting.pop()
        spec = importlib.util.find_spec(name) if name not in paths else None
        if spec is None or spec.origin is None:
            continue
        paths[name] = Path(spec.origin)
        waiting += _imported(paths[name], first.rpartition(".")[0])
    sources = lowering_from(record.lowering).sources
    native = {path.relative_to(sources).as_posix(): path for path in sources.rglob("*") if path.is_file()}
    return dict(sorted({**paths, **native}.items()))


def lowering_digest(record: Backend) -> str:
    """Return the digest of ``lowering_sources``."""
    digest = hashlib.sha256()
    for name, path in lowering_sources(record).items():
        digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _imported(path: Path, package: str) -> list[str]:
    """Return the modules of a package that a file imports, also inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.startswith(f"{package}.")]


def recorded(record: Backend, evidence: Path | None = None) -> OpSupport | None:
    """Return the backend's operator record, from its own folder or another, or None."""
    for found in load_evidence(evidence or record.evidence):
        if isinstance(found, OpSupport) and found.backend == record.name:
            return found
    return None


def write_support(record: Backend, support: OpSupport) -> Path:
    """Write the record to the backend's folder of records."""
    if record.evidence is None:
        raise EvidenceError(f"backend {record.name!r} names no folder for evidence: give its record one")
    path = record.evidence / f"op-support.{record.name}.json"
    write_record(support, path)
    return path


@dataclass(frozen=True)
class OperatorRow:
    """One row of the table of operators."""

    operator: str
    formats: tuple[str, ...]
    """The dtypes in which it is lowered whole with correct results; empty if in none."""
    recipes: tuple[str, ...]
    constraints: tuple[str, ...]
    """Other delegates that run it, and refused variants with the reasons."""


def operator_rows(record: Backend, evidence: Path | None = None) -> tuple[OperatorRow, ...]:
    """Return the rows of a backend: from its probe record, or without a ``Lowering`` from its kernels."""
    if record.lowering is None:
        return tuple(_asked(record))
    found = recorded(record, evidence)
    from kernel_pytorch.lowering.target import lowering_from

    if found is None:
        names = dict.fromkeys(one.operator for one in lowering_from(record.lowering).probes)
        return tuple(OperatorRow(name, ("not probed yet",), ("not probed yet",), ()) for name in names)
    own = lowering_from(record.lowering).delegate
    return tuple(
        _row(name, [one for one in found.results if one.operator == name], own)
        for name in dict.fromkeys(one.operator for one in found.results)
    )


def _row(name: str, results: list[Probed], own: str) -> OperatorRow:
    plain = [one for one in results if not (one.variant or one.recipe or one.dynamic)]
    taken = [one for one in plain if one.delegate]
    constraints: list[str] = []
    refused: dict[str, list[str]] = {}
    for one in plain:
        if not one.delegate:
            refused.setdefault(one.reason, []).append(one.format)
    beside: dict[str, list[str]] = {}
    for one in results:
        if one.delegate not in ("", own) and not (one.variant or one.dynamic):
            beside.setdefault(one.delegate, []).append(one.recipe or one.format)
    constraints += [f"{', '.join(which)} in {delegate}" for delegate, which in beside.items()]
    for reason, formats in refused.items():
        constraints.append(f"not {' or '.join(formats)}: {reason}" if taken else reason)
    for one in results if taken else ():
        if one.delegate or one.recipe:
            continue
        if one.dynamic:
            constraints.append(f"fixed shapes: {one.reason}")
        elif one.variant:
            constraints.append(f"not with {one.variant}: {one.reason}")
    return OperatorRow(
        name,
        tuple(one.format for one in taken),
        tuple(one.recipe for one in results if one.recipe and one.delegate),
        tuple(constraints),
    )


def _asked(record: Backend) -> Iterable[OperatorRow]:
    """Return rows from the kernels' ``supports`` for each op's first case, on the first catalogue device it fits."""
    for name in dict.fromkeys(kernel.op for kernel in record.kernels):
        op = registered_op(name)
        case = next(one for one in op.cases if not one.benchmark)
        formats: dict[str, str] = {}
        for number_format in case.formats:
            arguments = case.arguments(getattr(torch, number_format), torch.device("meta"))
            call = function_of(op).call("forward", tuple(arguments.values()))
            for kernel in record.kernels:
                fits = [d for d in record.catalogue if kernel.op == name and kernel.refusal(call, d) is None]
                if fits:
                    formats.setdefault(number_format, kernel.name)
        yield OperatorRow(
            f"kernel_pytorch::{name}",
            tuple(formats),
            (),
            ("no .pte path for this target yet",),
        )


def csv_text(rows: Iterable[OperatorRow]) -> str:
    """Return ``op-support.csv``: the supported operators."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        if row.formats:
            writer.writerow(
                (row.operator, ", ".join(row.formats), ", ".join(row.recipes), "; ".join(row.constraints))
            )
    return text.getvalue()
