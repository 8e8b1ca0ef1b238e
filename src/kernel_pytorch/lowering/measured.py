"""``kp.lower(..., measure=True)``: lower a model in several ways, time each program, keep the fastest."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kernel_pytorch._compat.structures import pytree

if TYPE_CHECKING:
    from kernel_pytorch.lowering.program import LoweredProgram

__all__ = ["fastest", "seconds_of"]

_SECONDS, _MOST_ROUNDS = 0.5, 50


def seconds_of(programs: Mapping[str, LoweredProgram]) -> dict[str, float]:
    """Return the median time of each program on its example inputs, summed over all methods.

    The programs alternate, so that changes of the machine's speed affect all of them.
    """
    calls = {}
    for name, program in programs.items():
        loaded = program.load()
        calls[name] = [(loaded, method, pytree.tree_leaves(given)) for method, given in program.inputs.items()]
    taken: dict[str, list[float]] = {name: [] for name in programs}
    start = time.perf_counter()
    for round_number in range(_MOST_ROUNDS):
        for name, own in calls.items():
            before = time.perf_counter()
            for loaded, method, given in own:
                loaded.run(method, given)
            if round_number:  # the first is a warm-up
                taken[name].append(time.perf_counter() - before)
        if round_number > 2 and time.perf_counter() - start > _SECONDS * len(calls):
            break
    return {name: statistics.median(times) for name, times in taken.items()}


def fastest(
    make: Callable[[Any], LoweredProgram], ways: Mapping[str, Any], tell: Callable[[str], None]
) -> LoweredProgram:
    """Lower with each set of options and return the fastest program; its report has the times of all.

    Args:
        make: function from partitioner options to a program.
        ways: options by their name in the report. The first must succeed; others that are refused are left out.
        tell: called with a line for each step.
    """
    made: dict[str, LoweredProgram] = {}
    for name, options in ways.items():
        tell(f"lowering: {name}")
        try:
            made[name] = make(options)
        except ValueError:
            if not made:
                raise
    tell(f"timing {len(made)} programs")
    seconds = seconds_of(made)
    best = min(seconds, key=seconds.__getitem__)
    order = {best: seconds[best], **seconds}
    report = dataclasses.replace(made[best].report, measured=tuple(order.items()))
    return dataclasses.replace(made[best], report=report)
