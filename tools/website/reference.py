"""The API reference: public names with their signatures, fields and docstrings, read from the code."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from kernel_pytorch.documentation.declared_fields import declared_fields

__all__ = ["reference_page"]

# Module -> the sentence that opens its section, and the imports its examples take for granted.
_MODULES = {
    "kernel_pytorch": (
        "What most programs need. Import it as `kp`; the import is cheap and touches no device.",
        "import torch\nimport kernel_pytorch as kp",
    ),
    "kernel_pytorch.masks": (
        "What attention attends to: reach it as `kp.masks`. [docs/attention.md](docs/attention.md) is the guide.",
        "",
    ),
    "kernel_pytorch.context_parallel": (
        "Sequences over several devices: reach it as `kp.context_parallel`. "
        "[docs/context_parallel.md](docs/context_parallel.md) is the guide.",
        "",
    ),
    "kernel_pytorch.fp8": (
        "Training in 8 bits: reach it as `kp.fp8`. [docs/fp8.md](docs/fp8.md) is the guide.",
        "from kernel_pytorch.fp8 import RECIPES, Format, Recipe, convert, linear, report, revert\n"
        "from kernel_pytorch.hardware_abstraction.formats import E4M3FN, E4M3FNUZ, E5M2\n"
        "from kernel_pytorch.fp8.autograd import COUNTS_SHAPE, fp8_linear",
    ),
    "kernel_pytorch.optimization": (
        "Automatic optimisation: candidates, plans and reports. [docs/optimize.md](docs/optimize.md) is the guide.",
        "",
    ),
    "kernel_pytorch.lowering": (
        "Programs for devices, with the extra `lowering`. [docs/lowering.md](docs/lowering.md) is the guide.",
        "from kernel_pytorch.lowering import (\n"
        "    CachedLanguageModel, KernelPartitioner, KernelQuantizer, PartitionerOptions,\n"
        "    Sampling, TextGenerator, TextProgram, load, lower, lower_checkpoint, lowering_of, probe,\n"
        ")\n"
        "from kernel_pytorch.lowering.recipes import find_recipe",
    ),
    "kernel_pytorch.hardware_abstraction": (
        "What a backend or a tool is made of: the table's records, the catalogue, and selection.",
        "",
    ),
    "kernel_pytorch.testing": (
        "What holds a kernel to its definition; shipped so that a backend elsewhere can use it.",
        "",
    ),
}
_WIDTH = 100
_SECTION = re.compile(r"^(Args|Returns|Raises|Example):$")


def reference_page() -> str:
    """The whole page as Markdown."""
    lines = ["# API", "", "The public names, with their docstrings. Every example on this page is executed."]
    shown: set[int] = set()
    for module_name, (opening, imports) in _MODULES.items():
        module = importlib.import_module(module_name)
        names = sorted(module.__all__, key=lambda name: (name.strip("_").lower(), name))
        modules = [name for name in names if inspect.ismodule(getattr(module, name))]
        names = [name for name in names if name not in modules]
        lines += ["", f"## {module_name}", "", opening, "", "```python"]
        lines += imports.splitlines() or [f"from {module_name} import (", *(f"    {n}," for n in names), ")"]
        lines += ["```"]
        if modules:
            links = ", ".join(f"[{name}](#{module_name}{name})" for name in modules)
            lines += ["", f"Modules with sections of their own: {links}."]
        for name in names:
            value = getattr(module, name)
            lines += ["", f"### {module_name.removeprefix('kernel_pytorch.')}.{name}"]
            if id(value) in shown and callable(value):
                lines += ["", f"The same as `kernel_pytorch.{name}`."]
            else:
                lines += _entry(name, value)
                shown.add(id(value))
    return "\n".join(lines) + "\n"


def _entry(name: str, value: Any) -> list[str]:
    if inspect.isclass(value):
        return _class(name, value)
    if callable(value):
        return ["", *_signature(name, value), *_docstring(value)]
    if isinstance(value, Mapping):
        keys = ", ".join(f"`{key}`" for key in value)
        return ["", *textwrap.wrap(f"A mapping with {keys}.", _WIDTH, break_on_hyphens=False)]
    return ["", f"`{value!r}`"]


def _class(name: str, cls: type) -> list[str]:
    lines: list[str] = []
    if dataclasses.is_dataclass(cls):
        lines += ["", "A frozen record.", *_docstring(cls), *_fields(cls)]
    else:
        bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
        lines += ["", f"A class{f' derived from `{bases}`' if bases else ''}.", *_docstring(cls)]
    for member_name, member in vars(cls).items():
        if member_name.startswith(("_", "test_", "pytest_")):
            continue
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if inspect.isfunction(function):
            lines += ["", *_signature(f"{name}.{member_name}", function), *_docstring(function)]
        elif callable(getattr(member, "fget", getattr(member, "func", None))):
            lines += ["", f"`{name}.{member_name}` is a property.", *_docstring(member)]
    return lines


def _fields(cls: type) -> list[str]:
    """The fields as a list."""
    return [
        "",
        *(
            f"- `{name}: {kind}{f' = {default}' if default else ''}`" + (f": {note}" if note else "")
            for name, kind, default, note in declared_fields(cls)
        ),
    ]


class _Bare:
    """Prints an annotation as it stands in the source instead of as a quoted string."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _signature(name: str, function: Callable[..., Any]) -> list[str]:
    signature = inspect.signature(function)

    def bare(annotation: Any) -> Any:
        return _Bare(annotation) if isinstance(annotation, str) else annotation

    def named(default: Any) -> Any:
        """A function by its name: its repr holds an address."""
        return _Bare(default.__name__) if inspect.isroutine(default) else default

    parameters = [
        parameter.replace(annotation=bare(parameter.annotation), default=named(parameter.default))
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    signature = signature.replace(parameters=parameters, return_annotation=bare(signature.return_annotation))
    line = f"{name}{signature}"
    if len(line) > _WIDTH:
        inner = str(signature.replace(return_annotation=inspect.Signature.empty))[1:-1]
        line = f"{name}(\n    {_one_a_line(inner)},\n){str(signature).rpartition(')')[2]}"
    return ["```text", *line.splitlines(), "```"]


def _one_a_line(parameters: str) -> str:
    """Break between parameters: at commas outside brackets."""
    depth, out = 0, ""
    for character in parameters:
        depth += (character in "([{") - (character in ")]}")
        out += character
        if character == "," and depth == 0:
            out += "\n   "
    return out


def _docstring(value: Any) -> list[str]:
    """A docstring as Markdown: arguments as a list, examples as executed blocks."""
    text = value.__doc__
    if not text:
        return []
    lines: list[str] = [""]
    section, body = "", []
    for line in [*inspect.cleandoc(text).splitlines(), "Example:"]:
        found = _SECTION.match(line)
        if found is None:
            body.append(line)
            continue
        lines += _section(section, textwrap.dedent("\n".join(body)).strip())
        section, body = found[1], []
    return lines[:-1] if lines[-1] == "" else lines


def _section(name: str, body: str) -> list[str]:
    if not body:
        return []
    if name == "Example":
        return ["```python", *body.splitlines(), "```", ""]
    if name == "Args":
        items = re.sub(r"\n\s+", " ", body).splitlines()
        return [*(f"- `{item.partition(':')[0]}`:{item.partition(':')[2]}" for item in items), ""]
    if name:
        return [f"{name}: {' '.join(body.split())}", ""]
    return [*_fenced(body.splitlines()), ""]


def _fenced(lines: list[str]) -> list[str]:
    """Prose with its indented lines, equations for one, as blocks of text."""
    out: list[str] = []
    for inside, found in itertools.groupby(lines, lambda line: line.startswith("    ")):
        group = [line.removeprefix("    ") for line in found]
        out += ["```text", *group, "```"] if inside else group
    return out
