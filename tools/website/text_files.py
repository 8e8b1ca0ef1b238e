"""Render source code and records as pages of the site: highlighted, with an anchor for each line and each name."""

from __future__ import annotations

import ast
import html
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

__all__ = ["is_signature", "is_text", "page_of", "text_page"]

_LARGEST = 400_000  # bytes; larger files stay downloads


def is_text(path: Path) -> bool:
    """Return whether a file has a page on the site."""
    if not path.is_file() or path.stat().st_size > _LARGEST:
        return False
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def page_of(inside: str) -> str:
    """Return the name of the page for a file, given its path in the checkout."""
    return f"files/{inside}"


def is_signature(text: str) -> bool:
    """Return whether a block of text is the signature of a function.

    Example:
        >>> is_signature("f(x: int = 1) -> str"), is_signature("g(\\n    x,\\n)"), is_signature("a (b")
        (True, True, False)
    """
    name, bracket, rest = text.strip().partition("(")
    try:
        (node,) = ast.parse(f"def {name.replace('.', '_')}{bracket}{rest}: ...").body
    except (SyntaxError, ValueError):
        return False
    return isinstance(node, ast.FunctionDef)


def text_page(inside: str, path: Path) -> str:
    """Return the body of the page: the path, and the lines with anchors such as ``L1``, and one for each name."""
    text = path.read_text(encoding="utf-8")
    try:
        lexer = get_lexer_for_filename(path.name, stripnl=False, ensurenl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False, ensurenl=False)
    names = _definitions(text) if path.suffix == ".py" else {}
    lines = highlight(text, lexer, HtmlFormatter(nowrap=True)).split("\n")
    marked = "\n".join(
        "".join(f'<span id="{name}"></span>' for name in names.get(number, ()))
        + f'<span id="L{number}">{line}</span>'
        for number, line in enumerate(lines, 1)
    )
    title = html.escape(inside)
    return f'<h1><code>{title}</code></h1><div class="highlight text-file"><pre>{marked}</pre></div>'


def _definitions(text: str) -> dict[int, list[str]]:
    """Return the names of classes, functions, methods and constants that a module defines, by line."""
    found: dict[int, list[str]] = {}

    def visit(nodes: list[ast.stmt], before: str) -> None:
        for node in nodes:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found.setdefault(node.lineno, []).append(before + node.name)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{before}{node.name}.")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and not before:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                found.setdefault(node.lineno, []).extend(names)

    visit(ast.parse(text).body, "")
    seen: set[str] = set()
    for names in found.values():  # an overload has the same name as its function
        names[:] = [name for name in names if name not in seen and not seen.add(name)]  # type: ignore[func-returns-value]
    return found
