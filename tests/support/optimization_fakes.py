"""Deterministic timers and planted candidates for the tests of kp.optimize."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from kernel_pytorch.optimization import Candidate, Edits, Forward, Sites, Stage
from kernel_pytorch.optimization.timing import Arm


class ScriptedTimer:
    """Runs each arm once, and returns times that follow from the names of its candidates."""

    def __init__(self, factors: Mapping[str, float] | None = None, default: float = 0.8) -> None:
        self.factors, self.default = dict(factors or {}), default
        self.arms: list[tuple[str, ...]] = []

    def __call__(self, arms: Sequence[Arm], device: torch.device, seconds: float) -> list[list[float]]:
        self.arms.append(tuple(arm.name for arm in arms))
        times = []
        for arm in arms:
            arm.enter()
            arm.run()
            total = 1e-3
            for name in arm.name.split(" + "):
                total *= 1.0 if name == "eager" else self.factors.get(name, self.default)
            times.append([total] * 5)
        return times


def rewrite(
    name: str,
    forward: Callable[..., Any],
    kind: type[nn.Module] = nn.Linear,
    *,
    exact: bool = True,
    apply: Callable[[nn.Module, tuple[str, ...], Edits], None] | None = None,
    **fields: Any,
) -> Candidate:
    """A candidate that gives every module of a kind this forward."""

    def match(model: nn.Module, context: Any) -> Sites | str:
        found = tuple(name for name, module in model.named_modules() if type(module) is kind)
        return Sites(found) if found else f"the model has no {kind.__name__}"

    def replace(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
        for site in sites:
            edits.replace_forward(model.get_submodule(site), forward, name)

    kinds = "exact" if exact else "approximate"
    return Candidate(name, f"planted: {name}", kinds, Stage.MODULE, match, apply or replace, **fields)  # type: ignore[arg-type]


def unchanged(call: Forward, x: torch.Tensor) -> Any:
    """A right candidate: the original."""
    return call.original(x)
