"""Convert the result of a search to a plan and a report."""

from __future__ import annotations

import math

from torch import nn

from kernel_pytorch.evidence import now, versions
from kernel_pytorch.optimization.candidate import Candidate, Context, Sites
from kernel_pytorch.optimization.plan import Plan, Step, device_name, fingerprint, library_versions
from kernel_pytorch.optimization.report import InputReport, ModuleReport, Refusal, Report, StepReport
from kernel_pytorch.optimization.results import Result
from kernel_pytorch.optimization.trials import Trial

__all__ = ["plan_of", "report_of"]


def plan_of(
    model: nn.Module,
    context: Context,
    budget_db: float,
    result: Result,
    known: dict[str, Candidate],
    sites: dict[str, Sites],
) -> Plan:
    gains = {name: trial for trial in result.steps for name in trial.added}
    required = {library for name in result.best for library in known[name].requires}
    return Plan(
        goal=context.goal,
        fingerprint=fingerprint(model),
        device=device_name(context.device),
        versions={**versions(), **library_versions(required)},
        steps=[
            Step(
                candidate=name,
                sites=list(sites[name].names),
                kind=known[name].kind,
                speedup=gains[name].speedup if name in gains else 1.0,
                error=gains[name].error if name in gains else None,
                snr_db=gains[name].snr_db if name in gains else None,
            )
            for name in result.best
        ],
        inputs=[example.signature for example in context.examples],
        budget_db=budget_db if math.isfinite(budget_db) else None,
        noise=result.noise,
        speedup_over_eager=[one.speedup for one in result.over_eager],
        speedup_over_compile=[one.speedup for one in result.over_compile] or [None] * len(context.examples),
        created=now(),
    )


def report_of(
    model: nn.Module,
    context: Context,
    budget_db: float,
    result: Result,
    known: dict[str, Candidate],
    sites: dict[str, Sites],
    refused: list[Refusal],
    seconds: float,
) -> Report:
    steps = tuple(_step(trial, known) for trial in result.steps)
    tried: dict[str, str] = {}
    for trial in result.trials:
        if trial.reason and len(trial.state) > len(trial.base):
            tried.setdefault(" + ".join(trial.state), trial.reason)
    for name in known:
        rivals = [other for other in result.best if known[name].excludes(known[other])]
        if name not in result.best and name not in tried:
            tried[name] = f"cannot be combined with {rivals[0]}, which gains more" if rivals else "was not tried"
    fallen = {text: " + ".join(trial.state) for trial in reversed(result.trials) for text in trial.fallbacks}
    inputs = []
    for number, example in enumerate(context.examples):
        eager = result.over_eager[number] if result.over_eager else None
        compiled = result.over_compile[number] if result.over_compile else None
        memory = result.memory[number] if result.memory else (None, None)
        if eager is not None:
            inputs.append(
                InputReport(
                    example.label,
                    eager.before,
                    compiled.before if compiled else None,
                    eager.after,
                    eager.speedup,
                    compiled.speedup if compiled else None,
                    *memory,
                )
            )
    return Report(
        model=type(model).__name__,
        goal=context.goal,
        device=device_name(context.device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        noise=result.noise,
        budget_db=budget_db,
        seconds=seconds,
        inputs=tuple(inputs),
        steps=steps,
        chosen=result.best,
        refusals=(*(Refusal(name, reason) for name, reason in tried.items()), *refused),
        modules=_modules(model, result, sites),
        notes=tuple(result.notes),
        versions={**versions(), **library_versions()},
        fallbacks=tuple(Refusal(state, text) for text, state in reversed(fallen.items())),
        memory_kind="saved for backward" if context.device.type == "cpu" else "peak memory",
    )


def _step(trial: Trial, known: dict[str, Candidate]) -> StepReport:
    """Return the report of one step: candidates that were added, removed or exchanged together."""
    added = [known[name] for name in trial.added]
    names = " + ".join(trial.added)
    if trial.removed:
        names = f"{names} instead of {', '.join(trial.removed)}" if names else f"without {', '.join(trial.removed)}"
    return StepReport(
        names,
        "; ".join(one.summary for one in added) or "the plan without a step that gains nothing any more",
        "approximate" if not all(one.exact for one in added) else "exact",
        trial.speedup,
        trial.error,
        trial.snr_db,
        tuple(sorted({name for one in added for name in one.drops})),
        trial.graphs,
        trial.breaks,
    )


def _modules(model: nn.Module, result: Result, sites: dict[str, Sites]) -> tuple[ModuleReport, ...]:
    rows = []
    for name, module in model.named_modules():
        changes = tuple(one for one in result.best if name in sites[one].names)
        alone = tuple(f"{one}: {sites[one].left_alone[name]}" for one in sites if name in sites[one].left_alone)
        if changes or alone:
            rows.append(ModuleReport(name or "(the model)", type(module).__name__, changes, alone))
    return tuple(rows)
