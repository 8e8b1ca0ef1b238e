"""Digest of a kernel's code, which a record names so that it counts for that code alone.

Comments, docstrings, formatting and import statements do not enter the digest: they compile to the same kernel. The
syntax tree is written out here rather than by ``ast.dump``, whose text differs between versions of Python.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
from pathlib import Path
from typing import Any

__all__ = ["code_of", "source_digest"]

_TRITON_MODULE = re.compile(r"\S+\.\w*triton_\w+")
_WITHOUT_MEANING = frozenset({"ctx", "kind", "type_comment", "type_params"})


def source_digest(module: str) -> str:
    """The digest of a module's code and of the ``triton_*`` modules that it imports, directly or not."""
    code: dict[str, str] = {}
    modules = [module]
    while modules:
        name = modules.pop()
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"module={name!r}: there is no such module to take the digest of")
        tree = ast.parse(Path(spec.origin).read_bytes())
        code[name] = code_of(tree)
        imported = (node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module)
        modules += [found for found in imported if _TRITON_MODULE.fullmatch(found) and found not in code]
    return hashlib.sha256("\0".join(code[name] for name in sorted(code)).encode()).hexdigest()[:16]


def code_of(node: Any) -> str:
    """A syntax tree as text, the same for all versions of Python.

    Example:
        >>> one = ast.parse("import torch  # a comment\\ndef f(x): 'docstring'; return (x)")
        >>> code_of(one) == code_of(ast.parse("def f(x):\\n    return x"))
        True
    """
    if isinstance(node, list):
        return f"[{','.join(code_of(item) for item in node if not _without_effect(item))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _WITHOUT_MEANING)
    written = (f"{name}={code_of(value)}" for name, value in fields if value is not None and value != [])
    return f"{type(node).__name__}({','.join(written)})"


def _without_effect(node: Any) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, (ast.Import, ast.ImportFrom))
