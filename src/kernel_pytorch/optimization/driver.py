"""``kp.optimize``: make a model faster, with a report and a plan; ``kp.apply``: apply a plan to a model."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from kernel_pytorch.evidence import versions
from kernel_pytorch.optimization.candidate import (
    GOALS,
    Candidate,
    Context,
    Sites,
    broken_entry_points,
    registered_candidates,
)
from kernel_pytorch.optimization.combinations import build, device_of
from kernel_pytorch.optimization.compiler import compiled_already
from kernel_pytorch.optimization.edits import Edits
from kernel_pytorch.optimization.examples import examples_of
from kernel_pytorch.optimization.outcome import plan_of, report_of
from kernel_pytorch.optimization.plan import (
    Plan,
    PlanError,
    device_name,
    fingerprint,
    library_versions,
    read_plan,
    source_digest,
)
from kernel_pytorch.optimization.report import Refusal, Report
from kernel_pytorch.optimization.results import Progress
from kernel_pytorch.optimization.search import Search
from kernel_pytorch.optimization.timing import Timer, alternate
from kernel_pytorch.optimization.trials import TrialCache
from kernel_pytorch.optimization.verify import BUDGET_DB, Verifier
from kernel_pytorch.optimization.workload import Loss, Workload

__all__ = ["Optimized", "apply", "optimize"]

_ATTRIBUTES = ("report", "plan", "revert")


class Revert:
    """Restores the original state of an optimised model."""

    def __init__(self, model: nn.Module, edits: Edits) -> None:
        self.model, self.edits = model, edits

    def __call__(self) -> nn.Module:
        """Undo every change and remove ``report``, ``plan`` and ``revert``; return the model."""
        self.edits.undo()
        for name in _ATTRIBUTES:
            vars(self.model).pop(name, None)
        return self.model


class Optimized(nn.Module):
    """The static type of the result of ``kp.optimize`` and ``kp.apply``: the given model with more attributes.

    There are no instances: the model keeps its class, and its own attributes have the type ``Any`` here.
    """

    report: Report
    """Set by ``kp.optimize`` only, because ``kp.apply`` measures nothing."""
    plan: Plan
    revert: Revert

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def optimize(
    model: nn.Module,
    inputs: Any,
    goal: str = "latency",
    *,
    budget: float = 300.0,
    budget_db: float | None = None,
    loss: Loss | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    resume: bool = True,
    progress: Callable[[Progress], None] | None = None,
    timer: Timer = alternate,
) -> Optimized:
    """Make a model faster or smaller in place, and verify its results against the original.

    Each candidate's outputs, and gradients for training, are compared with the original's; then it is timed beside
    the original. It is kept only if its gain on every input exceeds the noise of the machine. The result is the same
    object with the same parameters and state dict, and three more attributes: ``report``, ``plan`` and ``revert``.

    Args:
        inputs: the arguments of a call: a tuple, a mapping of named arguments, a tensor; or a list of several
            examples of different shapes.
        goal: ``latency`` or ``throughput`` of inference, ``training`` steps, or ``memory`` of training steps.
        budget: seconds to spend. Ctrl-C ends the search early, with the best result so far.
        budget_db: minimum signal-to-noise ratio of approximate candidates, by default 30 dB for inference and 12 dB
            for training; losses always need 40 dB. ``math.inf`` allows exact candidates only.
        loss: a function of the model's output, for training; by default, the model's own loss, or the mean square of
            its outputs.
        include: names of the only candidates to try.
        exclude: names of candidates to exclude; ``"compile"`` also excludes ``"compile-max-autotune"``.
        resume: reuse and save the trials of interrupted runs with the same model, inputs, device and versions.
        progress: called with a ``Progress`` before each trial.
        timer: function that times the arms of a comparison.

    Returns:
        The model.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
        >>> x = torch.randn(16, 64)
        >>> before = model(x)
        >>> best = kp.optimize(model, (x,), exclude=("compile",), budget=2)
        >>> best is model, best.report.speedup >= 1 - best.report.noise
        (True, True)
        >>> torch.equal(best.revert()(x), before)
        True
    """
    started = time.monotonic()
    _check(model, goal, budget, budget_db, loss)
    examples = examples_of(inputs)
    context = Context(goal, device_of(model), examples)
    decibels = BUDGET_DB[goal] if budget_db is None else float(budget_db)
    workload = Workload(model, context.training, loss)
    matched, refused = _matched(model, context, decibels, include, exclude)
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    with workload.mode(), workload.own_random_state():
        try:
            for example in examples:
                workload.check(example)
            verifier = Verifier(workload, examples, decibels)
            problem = _problem(model, context, decibels)
            cache = TrialCache(problem, enabled=resume and loss is None)
            left = budget - (time.monotonic() - started)
            search = Search(
                workload, context, verifier, matched, timer=timer, budget=left, cache=cache, progress=progress
            )
            if verifier.random:
                search.result.notes.append(f"nothing was changed: {verifier.random}, so nothing can be verified")
            else:
                if verifier.float64:
                    search.result.notes.append(f"compared with the original: no float64 run, {verifier.float64}")
                search.run()
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
    result = search.result
    if cache.resumed:
        result.notes.append(
            f"{cache.resumed} trials were read from an earlier run; resume=False (--no-resume) makes them anew"
        )
    sites = {candidate.name: found for candidate, found in matched}
    known = {candidate.name: candidate for candidate, _ in matched}
    plan = plan_of(model, context, decibels, result, known, sites)
    report = report_of(model, context, decibels, result, known, sites, refused, time.monotonic() - started)
    edits = build(model, [(known[name], sites[name].names) for name in result.best])
    return _attached(model, edits, plan, report)


def apply(model: nn.Module, plan: Plan | str | os.PathLike[str], *, force: bool = False) -> Optimized:
    """Apply a plan to a model without measuring.

    The model's structure of modules and parameters, the device and the library versions must match the plan.
    Otherwise a ``PlanError`` lists the differences.

    Args:
        plan: a plan of ``kp.optimize``, or the path of its file.
        force: apply it even if the device or versions differ; a different model is always an error.

    Returns:
        The model, changed in place, with ``plan`` and ``revert``.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> def make():
        ...     return torch.nn.Sequential(torch.nn.Linear(64, 64)).eval()
        >>> plan = kp.optimize(make(), (torch.randn(16, 64),), exclude=("compile",), budget=2).plan
        >>> kp.apply(make(), plan).plan == plan
        True
        >>> kp.apply(torch.nn.Sequential(torch.nn.Linear(64, 65)), plan)
        Traceback (most recent call last):
        ...
        kernel_pytorch.optimization.plan.PlanError: plan does not fit: the model's ...
    """
    _check_model(model)
    known_plan = read_plan(plan)
    device = device_of(model)
    differences = known_plan.differences(model, device)
    if force:
        differences = [one for one in differences if one.startswith("the model's")]
    if differences:
        raise PlanError(f"plan does not fit: {'; '.join(differences)}; make one with kp.optimize")
    known = {candidate.name: candidate for candidate in registered_candidates()}
    if known_plan.goal not in GOALS:
        raise PlanError(f"plan has the goal {known_plan.goal!r}; this release has {', '.join(GOALS)}")
    context = Context(known_plan.goal, device, ())
    steps: list[tuple[Candidate, tuple[str, ...]]] = []
    for step in known_plan.steps:
        if step.candidate not in known:
            raise PlanError(f"plan needs the candidate {step.candidate!r}, which is not installed")
        for other, _ in steps:
            if other.name == step.candidate or known[step.candidate].excludes(other):
                raise PlanError(f"plan combines {other.name} with {step.candidate}, which exclude each other")
        found = known[step.candidate].match(model, context)
        if isinstance(found, str):
            raise PlanError(f"plan needs {step.candidate}, which {found}")
        gone = set(step.sites) - set(found.names)
        if gone:
            raise PlanError(f"plan applies {step.candidate} to {min(gone)!r}, where it does not match now")
        steps.append((known[step.candidate], tuple(step.sites)))
    return _attached(model, build(model, steps), known_plan, None)


def _attached(model: nn.Module, edits: Edits, plan: Plan, report: Report | None) -> Optimized:
    values = {"report": report, "plan": plan, "revert": Revert(model, edits)}
    for name, value in values.items():
        if value is not None:
            setattr(model, name, value)
    return cast(Optimized, model)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: expected a torch.nn.Module")
    if isinstance(getattr(model, "revert", None), Revert):
        raise ValueError("model: is optimised already; call model.revert() first")
    taken = [name for name in _ATTRIBUTES if hasattr(model, name)]
    if taken:
        raise ValueError(f"model: has an attribute {taken[0]!r} of its own; wrap it in another nn.Module")
    if compiled_already(model) or type(model).__name__ == "OptimizedModule":
        raise ValueError("model: is compiled already; give the model before torch.compile, which is a candidate")
    for module in model.modules():
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
            raise TypeError(
                f"model: has a {type(module).__name__}; optimise the module inside on one rank, and kp.apply the "
                "plan on all ranks before wrapping"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor.data).__name__ == "DTensor":
            raise TypeError(
                f"model: {name} is sharded; optimise on one rank and kp.apply the plan before fully_shard"
            )
        if tensor.is_inference():
            raise TypeError(
                f"model: {name} was made under torch.inference_mode() and cannot be changed outside of it; build or "
                "load the model outside"
            )
        if tensor.layout is not torch.strided:
            raise TypeError(f"model: {name} is a {tensor.layout} tensor; convert it with to_dense() first")
        if tensor.is_meta:
            raise TypeError(f"model: {name} is on the meta device; load its weights first")


def _check(model: Any, goal: str, budget: float, budget_db: float | None, loss: Loss | None) -> None:
    _check_model(model)
    if goal not in GOALS:
        raise ValueError(f"goal={goal!r}: use one of {', '.join(GOALS)}")
    if not isinstance(budget, (int, float)) or not budget > 0:
        raise ValueError(f"budget={budget!r}: use a positive number of seconds")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss={loss!r}: use a function of the model's output that returns its loss")
    if budget_db is not None and not (isinstance(budget_db, (int, float)) and budget_db > 0):
        raise ValueError(
            f"budget_db={budget_db!r}: use a positive number of decibels, or None for the goal's default"
        )


def _matched(
    model: nn.Module, context: Context, budget_db: float, include: Sequence[str] | None, exclude: Sequence[str]
) -> tuple[list[tuple[Candidate, Sites]], list[Refusal]]:
    everything = registered_candidates()
    names = {candidate.name for candidate in everything}
    for argument, given in (("include", include or ()), ("exclude", exclude)):
        if isinstance(given, str):
            raise TypeError(f"{argument}={given!r}: use a tuple of names, such as ({given!r},)")
        unknown = [name for name in given if not any(_covers(name, one) for one in names)]
        if unknown:
            raise ValueError(f"{argument}={unknown!r}: use some of {', '.join(sorted(names))}")
    matched, refused = [], []
    for candidate in everything:
        reason: str | Sites
        if include is not None and candidate.name not in include:
            reason = "not included"
        elif any(_covers(name, candidate.name) for name in exclude):
            reason = "excluded"
        elif context.goal not in candidate.goals:
            reason = f"serves {' and '.join(sorted(candidate.goals))}"
        elif not candidate.exact and budget_db == math.inf:
            reason = "is approximate, and budget_db allows exact candidates only"
        else:
            try:
                reason = candidate.match(model, context)
            except Exception as error:  # a third-party candidate
                reason = f"could not be matched: {type(error).__name__}: {error}"
        if isinstance(reason, Sites):
            matched.append((candidate, reason))
        else:
            refused.append(Refusal(candidate.name, reason))
    refused += [Refusal(name, f"entry point failed: {error}") for name, error in broken_entry_points().items()]
    return matched, refused


def _covers(pattern: str, name: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}-")


def _problem(model: nn.Module, context: Context, budget_db: float) -> str:
    """Return everything that a trial depends on."""
    signatures = [example.signature for example in context.examples]
    return repr(
        (
            fingerprint(model),
            source_digest(model),
            context.goal,
            device_name(context.device),
            signatures,
            budget_db,
            {**versions(), **library_versions()},
            torch.get_num_threads(),
        )
    )
