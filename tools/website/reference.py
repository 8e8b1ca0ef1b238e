"""Generate the API reference from the code: an index, and a page per module.

Public names with signature, types, fields, docstring, and a link to the source.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import kernel_pytorch
from kernel_pytorch.documentation.declared_fields import declared_fields

__all__ = ["index_page", "module_pages"]

# Module -> the name of its page, its opening sentence, and additional imports of its examples.
_MODULES = {
    "kernel_pytorch": (
        "kernel_pytorch",
        "What most programs need. Import it as `kp`; the import is cheap and touches no device.",
        "",
    ),
    "kernel_pytorch.masks": (
        "masks",
        "What attention attends to. Reach it as `kp.masks`; [Attention](../attention.md) is the guide.",
        "",
    ),
    "kernel_pytorch.context_parallel": (
        "context_parallel",
        "Sequences over several devices. Reach it as `kp.context_parallel`; "
        "[Context parallelism](../context_parallel.md) is the guide.",
        "",
    ),
    "kernel_pytorch.fp8": (
        "fp8",
        "Training in 8 bits. Reach it as `kp.fp8`; [FP8 training](../fp8.md) is the guide.",
        "from kernel_pytorch.hardware_abstraction.formats import E4M3FN, E4M3FNUZ, E5M2\n"
        "from kernel_pytorch.fp8.autograd import COUNTS_SHAPE, fp8_linear",
    ),
    "kernel_pytorch.optimization": (
        "optimization",
        "Automatic optimisation: candidates, plans and reports. [Optimising a model](../optimize.md) is the guide.",
        "",
    ),
    "kernel_pytorch.lowering": (
        "lowering",
        "Programs for devices, with the extra `lowering`. [Deployment](../lowering.md) is the guide.",
        "from kernel_pytorch.lowering.recipes import find_recipe",
    ),
    "kernel_pytorch.hardware_abstraction": (
        "hardware_abstraction",
        "What a backend or a tool is made of: ops, kernels, devices, the catalogue and selection. "
        "[Hardware](../hardware.md) is the guide.",
        "",
    ),
    "kernel_pytorch.testing": (
        "testing",
        "What holds a kernel to its definition; shipped so that a backend elsewhere can use it.",
        "",
    ),
}
_WIDTH = 100
_SECTION = re.compile(r"^(Args|Returns|Raises|Example):$")


def index_page() -> str:
    """Return the index of modules and public names, each with its docstring's first sentence and a link."""
    lines = [
        "# API",
        "",
        "The public names by module. Each entry has the signature with its types, the docstring, an example that the",
        "tests execute, and a link to the source. Anything else in the package is internal and may change.",
    ]
    for module_name, (page, opening, _) in _MODULES.items():
        module = importlib.import_module(module_name)
        names, modules = _names(module_name)
        anchors = _anchors(names)
        lines += ["", f"## {module_name}", "", opening.replace("(../", "(docs/"), "", "| Name | What it is |"]
        lines += ["|---|---|"]
        lines += [
            f"| [{name}](docs/api/{name}.md) | a module, [below](#kernel_pytorch{name}) |" for name in modules
        ]
        lines += [
            f"| [{_plain(name)}](docs/api/{page}.md#{anchors[name]}) | {_first_sentence(getattr(module, name))} |"
            for name in names
        ]
    return "\n".join(lines) + "\n"


def _anchors(names: list[str]) -> dict[str, str]:
    """Return the anchor of each name's heading; names that differ only in case get a number."""
    seen: Counter[str] = Counter()
    anchors = {}
    for name in names:
        plain = name.lower()
        anchors[name] = f"{plain}-{seen[plain]}" if seen[plain] else plain
        seen[plain] += 1
    return anchors


def _plain(name: str) -> str:
    """Return a name with underscores escaped, which Markdown would read as emphasis."""
    return name.replace("_", "\\_") if name.startswith("_") else name


def _first_sentence(value: Any) -> str:
    if not callable(value):
        return "a constant"
    paragraph = " ".join(inspect.cleandoc(value.__doc__ or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.])\s", paragraph)[0].rstrip(".:").replace("|", "\\|")


def module_pages() -> dict[str, str]:
    """Return the page of each module, by its path in the checkout."""
    shown: dict[int, tuple[str, str]] = {}  # id of the value -> page and anchor
    return {f"docs/api/{page}.md": _module_page(name, shown) for name, (page, _, _) in _MODULES.items()}


def _names(module_name: str) -> tuple[list[str], list[str]]:
    """Return a module's public names in the order of the page, and separately those that are modules."""
    module = importlib.import_module(module_name)
    names = sorted(module.__all__, key=lambda name: (name.strip("_").lower(), name))
    modules = [name for name in names if inspect.ismodule(getattr(module, name))]
    return [name for name in names if name not in modules], modules


def _module_page(module_name: str, shown: dict[int, tuple[str, str]]) -> str:
    page, opening, imports = _MODULES[module_name]
    module = importlib.import_module(module_name)
    names, modules = _names(module_name)
    anchors = _anchors(names)
    lines = [f"# {module_name}", "", opening, "", "```python", "import torch", "", "import kernel_pytorch as kp"]
    if module_name != "kernel_pytorch":
        lines += [f"from {module_name} import (", *(f"    {name}," for name in sorted(names)), ")"]
    lines += [*imports.splitlines(), "```"]
    if modules:
        lines += ["", f"Modules with a page of their own: {', '.join(f'[{name}]({name}.md)' for name in modules)}."]
    for name in names:
        value = getattr(module, name)
        lines += ["", f"## {_plain(name)}"]
        if id(value) in shown and callable(value):
            there, anchor = shown[id(value)]
            lines += ["", f"The same as [`{there}.{name}`]({there}.md#{anchor})."]
        else:
            lines += [*_entry(name, value), "", _source(module_name, name, value)]
            shown[id(value)] = page, anchors[name]
    return "\n".join(lines) + "\n"


def _source(module_name: str, name: str, value: Any) -> str:
    """Return a link to the file that defines a name, with the place in the link's title."""
    known = inspect.unwrap(value) if callable(value) else value
    if inspect.isclass(known) or inspect.isfunction(known):
        path, defined = Path(inspect.getsourcefile(known) or ""), known.__qualname__
    else:
        path, defined = _assigned_in(module_name, name), name
    inside = path.relative_to(Path(kernel_pytorch.__file__).parents[1]).as_posix()
    return f'[Source](../../src/{inside} "{defined} in {inside}")'


def _assigned_in(module_name: str, name: str) -> Path:
    """Return the file that assigns a constant, found by following imports from its module."""
    path = Path(importlib.import_module(module_name).__file__ or "")
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
            return _assigned_in(node.module or "", name)
    return path


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
        parameters: Any = cls.__dataclass_params__  # type: ignore[attr-defined]
        kind = "A frozen dataclass" if parameters.frozen else "A dataclass"
        lines += ["", f"{kind} with the fields below.", *_docstring(cls), *_fields(cls)]
    else:
        bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
        made = "__init__" in vars(cls)
        if made:
            lines += ["", *_signature(name, cls.__init__)]  # type: ignore[misc]
        if bases or not made:
            lines += ["", f"A class{f' derived from `{bases}`' if bases else ''}."]
        lines += _docstring(cls)
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
    """Return the fields as a Markdown list."""
    return [
        "",
        *(
            f"- `{name}: {kind}{f' = {default}' if default else ''}`" + (f": {note}" if note else "")
            for name, kind, default, note in declared_fields(cls)
            if not name.startswith("_")
        ),
    ]


class _Bare:
    """Prints an annotation as in the source instead of as a quoted string."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _signature(name: str, function: Callable[..., Any]) -> list[str]:
    signature = inspect.signature(function)

    def bare(annotation: Any) -> Any:
        return _Bare(annotation) if isinstance(annotation, str) else annotation

    def named(default: Any) -> Any:
        """Return a function's name instead of its repr, which contains an address."""
        return _Bare(default.__name__) if inspect.isroutine(default) else default

    parameters = [
        parameter.replace(annotation=bare(parameter.annotation), default=named(parameter.default))
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    returns = inspect.Signature.empty if function.__name__ == "__init__" else bare(signature.return_annotation)
    signature = signature.replace(parameters=parameters, return_annotation=returns)
    line = f"{name}{signature}"
    if len(line) > _WIDTH:
        inner = str(signature.replace(return_annotation=inspect.Signature.empty))[1:-1]
        line = f"{name}(\n    {_one_a_line(inner)},\n){str(signature).rpartition(')')[2]}"
    return ["```text", *line.splitlines(), "```"]


def _one_a_line(parameters: str) -> str:
    """Insert line breaks between parameters, at commas outside brackets."""
    depth, out = 0, ""
    for character in parameters:
        depth += (character in "([{") - (character in ")]}")
        out += character
        if character == "," and depth == 0:
            out += "\n   "
    return out


def _docstring(value: Any) -> list[str]:
    """Convert a docstring to Markdown: arguments to a list, examples to executed blocks."""
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
    """Put indented lines of prose, such as equations, into text blocks."""
    out: list[str] = []
    for inside, found in itertools.groupby(lines, lambda line: line.startswith("    ")):
        group = [line.removeprefix("    ") for line in found]
        out += ["```text", *group, "```"] if inside else group
    return out
