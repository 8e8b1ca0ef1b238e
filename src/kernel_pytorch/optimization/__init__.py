"""Automatic optimisation of a user's model: verified and timed candidates, reports and plans."""

from __future__ import annotations

from kernel_pytorch.optimization.candidate import Candidate, Context, Sites, Stage, registered_candidates
from kernel_pytorch.optimization.driver import Optimized, apply, optimize
from kernel_pytorch.optimization.edits import Edits, Forward
from kernel_pytorch.optimization.examples import Example
from kernel_pytorch.optimization.plan import Plan, PlanError
from kernel_pytorch.optimization.report import Report
from kernel_pytorch.optimization.results import Progress

__all__ = [
    "Candidate",
    "Context",
    "Edits",
    "Example",
    "Forward",
    "Optimized",
    "Plan",
    "PlanError",
    "Progress",
    "Report",
    "Sites",
    "Stage",
    "apply",
    "optimize",
    "registered_candidates",
]
