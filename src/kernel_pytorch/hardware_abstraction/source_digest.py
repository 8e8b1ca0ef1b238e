"""Digests of source code, stored in a record so that it applies to that code only.

Comments, docstrings, formatting and import statements are not part of a digest. The syntax tree is serialized here
instead of by ``ast.dump``, whose output differs between Python versions.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
from pathlib import Path
from typing import Any

__all__ = ["PACKAGE", "code_of", "file_code", "is_part", "part_digest", "source_digest"]

PACKAGE = Path(__file__).parents[1]

_CPP = (".cpp", ".cc", ".h", ".hpp", ".cu", ".cuh")
_TRITON_MODULE = re.compile(r"\S+\.\w*triton_\w+")
_WITHOUT_MEANING = frozenset({"ctx", "kind", "type_comment", "type_params"})


def source_digest(module: str, cpp: tuple[str, ...] = ()) -> str:
    """Return the digest of a module, of the ``triton_*`` modules that it imports (transitively), and of C++ files.

    Args:
        module: the module's full name.
        cpp: C++ files, relative to the package.
    """
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
    native = [file_code(name, (PACKAGE / name).read_bytes()) for name in cpp]
    return _digest([*(code[name] for name in sorted(code)), *native])


def is_part(name: str) -> bool:
    """Return whether a source named in a record is a folder or file of the package rather than a kernel.

    Example:
        >>> is_part("lowering/"), is_part("hardware_abstraction/dispatch.py"), is_part("fp8_cast/triton")
        (True, True, False)
    """
    return name.endswith(("/", ".py"))


def part_digest(name: str) -> str:
    """Return the digest of a folder of the package, whose name ends in a slash, or of a Python file.

    Example:
        >>> len(part_digest("lowering/"))
        16
    """
    path = PACKAGE / name
    if not is_part(name) or not (path.is_dir() if name.endswith("/") else path.is_file()):
        raise FileNotFoundError(f"name={name!r}: no folder (with a slash at its end) or Python file of the package")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    named = {file.relative_to(PACKAGE).as_posix(): file for file in files if "__pycache__" not in file.parts}
    return _digest([f"{name}\0{file_code(name, file.read_bytes())}" for name, file in sorted(named.items())])


def _digest(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def file_code(name: str, data: bytes) -> str:
    """Return the code of a file, without comments and layout if it is Python or C++; other files unchanged.

    Example:
        >>> file_code("a.cpp", b"int f() { // one\\n  return 1; }") == file_code("a.cpp", b"int f() { return 1; }")
        True
    """
    text = data.decode("utf-8", "replace")
    if name.endswith(".py"):
        try:
            return code_of(ast.parse(text))
        except SyntaxError:
            return text
    if name.endswith(_CPP):
        # Replace a comment or white space by one space; keep string literals as they are.
        parts = re.findall(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/|\s+|.', text, flags=re.DOTALL)
        plain = "".join(" " if part.isspace() or part.startswith(("//", "/*")) else part for part in parts)
        return re.sub(r"\s+", " ", plain).strip()
    return text


def code_of(node: Any) -> str:
    """Serialize a syntax tree to text that is the same for all versions of Python.

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
