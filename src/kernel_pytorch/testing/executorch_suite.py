"""Run ExecuTorch's backend test suite with a backend's delegate, with stricter criteria.

The suite has only the flows of its own tree. As a pytest plugin, this file adds one and records the outcome of every
subtest, because the suite passes graphs of which nothing was delegated, and its tolerance is loose. Here a subtest is
*delegated* with at least 60 dB, *refused* with reasons, *skipped* by the suite, or *failed*.

    python -m kernel_pytorch.testing.executorch_suite [--backend acme] [--write] [test_softmax.py ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from functools import wraps
from pathlib import Path
from typing import Any

import torch

__all__ = ["run", "summary"]

LEAST_SNR = 60.0
NOTES, BACKEND = "KERNEL_PYTORCH_SUITE_NOTES", "KERNEL_PYTORCH_SUITE_BACKEND"


def _add_flow(backend: str) -> None:
    from executorch.backends.test.harness import Tester, stages
    from executorch.backends.test.suite import flow, runner
    from executorch.exir import EdgeCompileConfig

    from kernel_pytorch.lowering.target import lowering_of

    target = lowering_of(backend)
    target.register()
    last: dict[str, Any] = {}

    def partitioner() -> Any:
        own = target.partitioners(target.checked(target.probe_options))[0]
        if hasattr(own, "beside"):
            own.beside = ()  # test this delegate only, without those that follow it
        last["partitioner"] = own
        return own

    def tester(model: torch.nn.Module, inputs: tuple[Any, ...], **options: Any) -> Tester:
        classes = Tester.default_stage_classes() | {
            stages.StageType.TO_EDGE_TRANSFORM_AND_LOWER: lambda *_, **__: stages.ToEdgeTransformAndLower(
                default_partitioner_cls=partitioner,
                edge_compile_config=EdgeCompileConfig(_check_ir_validity=False),
            )
        }
        return Tester(model, inputs, stage_classes=classes, **options)

    ours = flow.TestFlow(backend, backend=backend, tester_factory=tester)
    known_flows, run_test = flow.all_flows, runner.run_test
    flow.all_flows = lambda: {**known_flows(), ours.name: ours}

    @wraps(run_test)
    def noted(*arguments: Any, **options: Any) -> Any:
        last.clear()
        summary = run_test(*arguments, **options)
        snr = [statistics.sqnr for statistics in summary.tensor_error_statistics]
        refusals = getattr(last.get("partitioner"), "refusals", [])
        detail = str(summary.error or "")[:300]
        result = summary.result.name
        if result == "SUCCESS":
            low = [value for value in snr if value is not None and value < LEAST_SNR]
            outcome = "failed" if low else "delegated"
            detail = f"{low} dB" if low else ""
        elif result == "SUCCESS_UNDELEGATED":
            outcome = "refused"
            detail = " | ".join(sorted({f"{refusal.operator}: {refusal.reason}" for refusal in refusals}))
        else:
            outcome = "skipped" if result == "SKIPPED" else "failed"
            detail = f"{result} {detail}"
        note = {"test": summary.name, "subtest": summary.subtest_index, "outcome": outcome, "detail": detail}
        with Path(os.environ[NOTES]).open("a") as file:
            file.write(json.dumps(note) + "\n")
        return summary

    runner.run_test = noted


if NOTES in os.environ:
    _add_flow(os.environ[BACKEND])


def run(files: list[str], backend: str = "cpu") -> list[dict[str, Any]]:
    """Run all operator tests, or some files, and return the outcome of each subtest.

    Args:
        files: such as ``"test_relu.py"``; empty for all, which takes minutes.
        backend: a backend with a ``Lowering``; only its own delegate is tested.
    """
    import executorch.backends.test.suite.operators as operators

    folder = Path(operators.__path__[0])
    with tempfile.TemporaryDirectory() as scratch:
        notes = Path(scratch) / "notes.jsonl"
        notes.touch()
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", __spec__.name, "-q", "-W", "ignore"]
        command += ["-p", "no:cacheprovider", "-m", f"flow_{backend}"]
        command += [str(folder / name) for name in files] or [str(folder)]
        environment = {**os.environ, NOTES: str(notes), BACKEND: backend, "PYTEST_ADDOPTS": ""}
        done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
        found = [json.loads(line) for line in notes.read_text().splitlines()]
        if not found:
            raise RuntimeError(f"the suite ran nothing:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return found


def summary(notes: list[dict[str, Any]]) -> str:
    """Return the number of subtests by outcome, all reasons for refusals, and all failures."""
    counts = Counter(note["outcome"] for note in notes)
    lines = [f"{counts[name]:5} {name}" for name in ("delegated", "refused", "skipped", "failed")]
    reasons = Counter(
        part for note in notes if note["outcome"] == "refused" for part in note["detail"].split(" | ")
    )
    lines += ["", "refused, by operator and reason"] + [f"{n:5} {part}" for part, n in sorted(reasons.items())]
    failed = [note for note in notes if note["outcome"] == "failed"]
    lines += ["", "failed"] + [f"      {note['test']} {note['subtest']}: {note['detail']}" for note in failed]
    return "\n".join(line.rstrip() for line in lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files of the suite's operators; all when left out")
    parser.add_argument("--write", action="store_true", help="keep the result in the backend's evidence")
    parser.add_argument("--backend", default="cpu", help="whose delegate; cpu when left out")
    options = parser.parse_args()
    told = summary(run(options.files, options.backend))
    sys.stdout.write(told)
    if options.write:
        from kernel_pytorch.hardware_abstraction.registry import backend as backend_of

        folder = backend_of(options.backend).evidence
        if folder is None:
            parser.error(f"backend {options.backend!r} names no folder for evidence")
        head = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(head, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
        (folder / "executorch_suite.txt").write_text(f"commit {commit}\n\n{told}")
