"""The public names: frozen, documented with examples that run, and cheap to import."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys

import pytest

import kernel_pytorch as kp

PUBLIC = [
    "Backend",
    "Device",
    "KVCache",
    "Policy",
    "UnsupportedCallError",
    "__version__",
    "attention",
    "context_parallel",
    "device",
    "devices",
    "explain",
    "fp8",
    "load",
    "lower",
    "masks",
    "policy",
    "rms_norm",
]
PUBLIC_MODULES = {"context_parallel", "fp8", "masks"}  # the public names that are meant to be modules
MASKS = ["Mask", "blocks", "causal", "documents", "full", "prefix", "sinks", "window"]
# Kernel modules need a device or the interpreter to be imported, and have no doctests.
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(kp.__path__, "kernel_pytorch.")
    if not module.name.endswith(("triton_kernel", "__main__"))
)


def test_the_public_names_are_frozen() -> None:
    assert sorted(kp.__all__) == PUBLIC
    assert sorted(PUBLIC) == PUBLIC
    for name in PUBLIC:
        assert hasattr(kp, name)
    assert sorted(kp.masks.__all__) == MASKS


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in {"__version__", *PUBLIC_MODULES}])
def test_every_public_name_has_a_docstring_with_an_example(name: str) -> None:
    text = inspect.getdoc(getattr(kp, name)) or ""
    assert text.splitlines()[0].strip()
    assert "Example:" in text
    assert ">>> " in text


@pytest.mark.parametrize("name", sorted(PUBLIC_MODULES))
def test_every_name_of_a_public_module_has_a_docstring(name: str) -> None:
    module = getattr(kp, name)
    assert (inspect.getdoc(module) or "").splitlines()[0].strip()
    texts = {member: inspect.getdoc(getattr(module, member)) or "" for member in module.__all__}
    assert all(texts.values()), texts
    assert any("Example:" in text for text in texts.values())


def test_the_version_is_the_installed_one() -> None:
    assert kp.__version__ == importlib.metadata.version("kernel-pytorch")


def test_no_module_shares_a_public_functions_name() -> None:
    """``kernel_pytorch.devices`` must be the function, whatever was imported before."""
    functions = {f"kernel_pytorch.{name}" for name in set(PUBLIC) - PUBLIC_MODULES}
    modules = {module.name for module in pkgutil.walk_packages(kp.__path__, "kernel_pytorch.")}
    assert "kernel_pytorch.cli" in modules
    assert functions.isdisjoint(modules)
    for name in PUBLIC:
        assert inspect.ismodule(getattr(kp, name)) == (name in PUBLIC_MODULES), name


IMPORT = """
import json, sys, time
import torch
before = set(sys.modules)
started = time.perf_counter()
import kernel_pytorch
seconds = time.perf_counter() - started
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({"seconds": seconds, "new": sorted(new), "cuda": torch.cuda.is_initialized()}))
"""
HEAVY = {"triton", "executorch", "rich", "typer", "torchao", "jsonschema", "matplotlib", "pytest"}


@pytest.fixture(scope="module")
def imports() -> list[dict[str, object]]:
    """What importing the package costs after torch, three times."""
    command = [sys.executable, "-c", IMPORT]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPROFILEIMPORTTIME"}
    return [
        json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
        for _ in range(3)
    ]


def test_import_is_quick(imports: list[dict[str, float]]) -> None:
    assert min(seen["seconds"] for seen in imports) < 0.3


def test_import_is_light_and_touches_no_gpu(imports: list[dict[str, list[str]]]) -> None:
    for seen in imports:
        assert HEAVY.isdisjoint(seen["new"])
        assert "kernel_pytorch" in seen["new"]
        assert not seen["cuda"]


@pytest.mark.parametrize("name", MODULES)
def test_the_doctests_of_a_module_pass(name: str) -> None:
    module = importlib.import_module(name)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_there_are_doctests() -> None:
    """The test above would pass on a package without any."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in PUBLIC for test in finder.find(getattr(kp, name), name) if test.examples]
    assert len(found) >= len(PUBLIC) // 2
