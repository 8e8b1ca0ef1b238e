"""The public names: unchanged, documented with examples that run, and cheap to import."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from tools.website.blocks import docstring_gaps, docstrings

import kernel_pytorch as kp
from requirements import needs_executorch

PUBLIC = kp.__all__  # docs/api shows them: that it is up to date is a test, so a name cannot change unseen
PUBLIC_MODULES = {"context_parallel", "fp8", "masks"}  # the public names that are meant to be modules
# Kernel modules need a device, the interpreter or their library to be imported, and have no doctests.
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(kp.__path__, "kernel_pytorch.")
    if not module.name.endswith(("triton_kernel", "flash4_mask", "__main__"))
)


@needs_executorch
def test_the_public_names_are_there() -> None:
    assert sorted(PUBLIC) == PUBLIC
    assert set(PUBLIC) >= PUBLIC_MODULES
    for name in PUBLIC:
        assert hasattr(kp, name)
    assert sorted(kp.masks.__all__) == kp.masks.__all__


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_executorch if name in ("TextGenerator", "load", "lower") else ())
        for name in PUBLIC
        if name not in {"__version__", *PUBLIC_MODULES}
    ],
)
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


@needs_executorch
def test_no_module_shares_a_public_functions_name() -> None:
    """``kernel_pytorch.devices`` must be the function, whatever was imported before."""
    functions = {f"kernel_pytorch.{name}" for name in set(PUBLIC) - PUBLIC_MODULES}
    modules = {module.name for module in pkgutil.walk_packages(kp.__path__, "kernel_pytorch.")}
    assert "kernel_pytorch.cli" in modules
    assert functions.isdisjoint(modules)
    for name in PUBLIC:
        assert inspect.ismodule(getattr(kp, name)) == (name in PUBLIC_MODULES), name


IMPORT = """
import json, sys
import torch
before = set(sys.modules)
import {module}
assert not torch.cuda.is_initialized()
print(json.dumps(sorted(set(sys.modules) - before)))
"""
SLOW = {"sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.testing", "triton"}


def imported(module: str) -> tuple[set[str], set[str]]:
    """(modules of ours, other packages) that importing a module adds to torch."""
    command = [sys.executable, "-c", IMPORT.format(module=module)]
    new = set(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
    assert SLOW.isdisjoint(new)
    ours = {name for name in new if name.partition(".")[0] == "kernel_pytorch"}
    packages = {name.partition(".")[0] for name in new - ours} - sys.stdlib_module_names
    return ours, packages


def test_import_is_light_and_touches_no_gpu() -> None:
    """Counts imported modules, because the import time depends on the machine's load."""
    ours, packages = imported("kernel_pytorch")
    assert packages <= {"msgspec", "numpy", "platformdirs"}
    assert {"kernel_pytorch.masks", "kernel_pytorch.ops.attention"} <= ours
    assert not [name for name in ours if name.endswith("_kernel")], (
        "a kernel's module is imported when it is chosen"
    )
    assert len(ours) <= 60


def test_the_command_line_imports_a_command_when_it_runs() -> None:
    ours, packages = imported("kernel_pytorch.cli")
    assert {name for name in ours if name.startswith("kernel_pytorch.cli.")} == {"kernel_pytorch.cli.commands"}
    assert packages.isdisjoint({"rich", "jinja2", "markdown_it"})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_executorch if ".lowering" in name else ()) for name in MODULES]
)
def test_the_doctests_of_a_module_pass(name: str) -> None:
    module = importlib.import_module(name)
    source = inspect.getsource(module)
    report: list[str] = []
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for line, text in docstrings(source):
        names = vars(module).copy()
        runner.run(parser.get_doctest(text, names, name, module.__file__, line - 1), out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
    assert not docstring_gaps(source)


@pytest.mark.parametrize("path", sorted(Path(kp.__path__[0]).rglob("*.py")), ids=lambda path: path.stem)
def test_modules_that_are_not_imported_here_have_no_doctests(path: Path) -> None:
    name = ".".join(path.relative_to(Path(kp.__path__[0]).parent).with_suffix("").parts).removesuffix(".__init__")
    if name not in MODULES and name != "kernel_pytorch":
        assert not [text for _, text in docstrings(path.read_text(encoding="utf-8")) if ">>> " in text]


def test_the_gate_for_docstrings_finds_examples_that_are_no_doctests() -> None:
    source = '''
class One:
    @property
    def two(self):
        """Example:
            >>> 1 + 1
            2
        """

def three():
    """Example:
        1 + 1
    """

def four():
    """
    ```python
    1 + 1
    ```
    """
'''
    assert [line for line, _ in docstrings(source)] == [11, 16, 5]
    assert [gap.partition(":")[0] for gap in docstring_gaps(source)] == ["line 11", "line 17", "line 19"]


def test_there_are_doctests() -> None:
    """The tests above would pass on a package without any."""
    source = inspect.getsource(importlib.import_module("kernel_pytorch.hardware_abstraction.formats"))
    assert sum(text.count(">>> ") for _, text in docstrings(source)) > 5
