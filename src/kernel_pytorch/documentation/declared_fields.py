"""The fields of a dataclass with their defaults and docstrings, read from its source."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap

__all__ = ["declared_fields"]


def declared_fields(cls: type) -> list[tuple[str, str, str, str]]:
    """Return name, type, default and docstring of each field of a dataclass, from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, tuple[str, str, str, str]] = {}
    for statement, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            default = "" if statement.value is None else _plain(ast.unparse(statement.value))
            found[name] = (name, ast.unparse(statement.annotation), default, _string(following))
    return [found[field.name] for field in dataclasses.fields(cls)]


def _plain(default: str) -> str:
    """Return a default in short form: the factory's name for ``field(default_factory=...)``."""
    found = re.fullmatch(r"field\(default_factory=(\w+).*\)", default)
    return f"{found[1]}()" if found else default


def _string(statement: ast.stmt | None) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return " ".join(inspect.cleandoc(str(statement.value.value)).split())
    return ""
