"""The order in which pytest-xdist's workers get tests: long ones first.

``--dist loadscope`` hands out whole files and pages, those with the most tests first. A file with a few long tests
would come last and keep one worker busy while the others wait, so the long ones are named here.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

# Approximate seconds in one worker, without compilation caches. They only decide the order. Scopes that are unlisted
# come later, in loadscope's order; the end of a run names those that should be listed.
SECONDS = {
    "tests/testing/test_cross_compile.py[attention]": 30,
    "tests/backends/test_backends.py::TestNvidia": 165,
    "tests/documentation/test_backend_kit.py": 140,
    "tests/lowering/test_text_generator.py": 70,
    "docs/tutorials/generate-text.md": 60,
    "tests/lowering/test_loaded_programs.py": 45,
    "tests/lowering/test_awkward_models.py": 30,
    "tests/lowering/test_partitioning_costs.py": 25,
    "tests/lowering/test_lowering.py": 130,
    "tests/testing/test_cross_compile.py[fp8_swiglu_grad]": 25,
    "tests/fp8/test_fp8_swiglu_parts.py": 100,
    "tests/lowering/test_lowering_bad_payloads.py": 75,
    "tests/lowering/test_native.py": 45,
    "tests/backends/test_backends.py::TestAmd": 50,
    "tests/backends/test_backends.py::TestIntel": 50,
    "tests/distributed/test_context_parallel_models.py": 70,
    "tests/lowering/test_lowering_models.py": 65,
    "tests/testing/test_cross_compile.py[fp8_cast]": 20,
    "tests/testing/test_cross_compile.py[fp8_rms_norm]": 20,
    "tests/testing/test_cross_compile.py[fp8_swiglu]": 20,
    "tests/optimization/test_architectures.py": 60,
    "tests/lowering/test_kv_cache.py": 60,
    "tests/fp8/test_fp8_cast.py": 55,
    "tests/distributed/test_context_parallel.py": 50,
    "tests/distributed/test_context_parallel_uses.py": 50,
    "docs/lowering.md": 50,
    "tests/website/test_documentation.py": 50,
    "tests/fp8/test_fp8_norm_compile.py": 30,
    "tests/fp8/test_fp8_rms_norm.py": 50,
    "tests/fp8/test_fp8_sharded.py": 50,
    "tests/fp8/test_fp8_swiglu.py": 50,
    "tests/website/test_site.py": 50,
    "tests/backends/test_third_party_backend.py": 50,
    "tests/lowering/test_lowering_suite.py": 45,
    "docs/tutorials/lower-a-llama.md": 40,
    "tests/fp8/test_fp8_norm.py": 40,
    "tests/testing/test_cross_compile.py[rms_norm]": 30,
    "docs/api/kernel_pytorch.md": 30,
    "tests/ops/test_attention_layout.py": 30,
    "tests/ops/test_attention_properties.py": 30,
    "tests/backends/test_backends.py::TestCpu": 30,
    "tests/fp8/test_fp8_linear.py": 30,
    "tests/fp8/test_fp8_norm_training.py": 15,
    "tests/fp8/test_fp8_compile.py": 10,
    "tests/fp8/test_fp8_convert.py": 5,
    "tests/fp8/test_fp8_delayed.py": 5,
    "tests/fp8/test_fp8_norm_casts.py": 5,
}
# Files whose tests only share fixtures of their last parameter: each parameter is a scope.
BY_PARAMETER = {"tests/testing/test_cross_compile.py"}
LONG = 60


def scope_of(nodeid: str) -> str:
    """Return the unit that one worker runs: a file, a class, a page of documentation, or a file's parameter."""
    name, bracket, parameter = nodeid.partition("[")  # which may have colons of its own
    scope = name.rpartition("::")[0]
    return f"{scope}{bracket}{parameter}" if scope in BY_PARAMETER else scope


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class LongestFirst(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            # The next unit is the first of the queue; of those that are not named, the one with the most tests.
            self.workqueue.move_to_end(max(self.workqueue, key=lambda scope: SECONDS.get(scope, 0)), last=False)
            super()._assign_work_unit(node)

    return LongestFirst(config, log)


class Clock:
    """Sum the time of each scope, and report long ones that are not listed."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[scope_of(report.nodeid)] += report.duration

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        unnamed = [
            (scope, spent) for scope, spent in self.seconds.most_common() if spent > LONG and scope not in SECONDS
        ]
        for scope, spent in unnamed:
            terminalreporter.write_line(
                f"{scope} took {spent:.0f} s: name it in tests/support/scheduling.py, to begin earlier"
            )
