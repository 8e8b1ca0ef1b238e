"""Find the code blocks of documentation pages, and those that no test executes."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from markdown_it import MarkdownIt

__all__ = ["OTHER_LANGUAGES", "Fence", "docstring_gaps", "docstrings", "fences", "page_gaps"]

OTHER_LANGUAGES = frozenset({"bash", "console", "text", "cpp", "cmake", "json", "toml", "yaml", "make"})
"""Languages of blocks that are not executed as Python."""

_NEEDS = re.compile(r"<!--- skip: next if\(not has_(\w+),.*-->\s*\Z")


_SKIPS = re.compile(r"<!---?\s*(skip:\s*(?:start|next(?!\s+(?:if\(not has_\w+,|\"[^\"]{8,}\"))))")


@dataclass(frozen=True)
class Fence:
    """A code block: its first and last line, language and text."""

    first: int
    last: int
    language: str
    text: str
    needs: str = ""
    """The device that it needs, else it is skipped: ``"gpu"``, or the name of a backend."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def fences(text: str) -> Iterator[Fence]:
    """Yield every code block of a Markdown page, fenced or indented.

    Example:
        >>> [(fence.first, fence.language) for fence in fences("One\\n\\n```python\\n1 + 1\\n```\\n")]
        [(3, 'python')]
    """
    lines = text.splitlines()
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type in ("fence", "code_block") and token.map is not None:
            first, last = token.map
            needs = _NEEDS.search("\n".join(lines[:first]))
            yield Fence(first + 1, last, token.info, token.content, needs[1] if needs else "")


def page_gaps(text: str, executed: set[int], languages: frozenset[str] = OTHER_LANGUAGES) -> list[str]:
    """Return the blocks that look like code and are not executed, given the lines of those that are.

    Documentation test runners ignore unknown fences: ``py``, ``Python``, ``python title="x"``,
    ``{code-block} python``, no language at all, or three colons. Here these are errors.

    Example:
        >>> page_gaps("```py\\nimport this\\n```\\n", executed=set())
        ["line 1: a block of language 'py' is not executed"]
    """
    gaps = [
        f"line {number}: blocks between ':::' are not executed"
        for number, line in enumerate(text.splitlines(), 1)
        if line.lstrip().startswith(":::")
    ]
    for found in _SKIPS.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        remedy = """write 'skip: next if(not has_...)' or 'skip: next "REASON"'"""
        gaps.append(f"line {line}: {found[1]!r} passes over blocks in silence; {remedy}")
    for fence in fences(text):
        run = any(fence.first <= line <= fence.last for line in executed)
        if not run and fence.language not in languages:
            gaps.append(f"line {fence.first}: a block of language {fence.language!r} is not executed")
    return gaps


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield every docstring of a module with its line, including cached properties, which doctest ignores."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield node.body[0].lineno, text


def docstring_gaps(source: str) -> list[str]:
    """Return the examples in a module's docstrings that are not doctests and therefore not executed."""
    gaps = []
    for start, text in docstrings(source):
        for found in re.finditer(r"^ *(?:```|~~~|\.\. code(?:-block)?::)", text, re.MULTILINE):
            line = start + text[: found.start()].count("\n")
            gaps.append(f"line {line}: a fence in a docstring is not executed; write '>>> '")
        for found in re.finditer(r"^ *Examples?:\n(?: *\n)* *(\S+)", text, re.MULTILINE):
            if not found[1].startswith(">>>"):
                line = start + text[: found.start()].count("\n")
                gaps.append(f"line {line}: an example without '>>> ' is not executed")
    return gaps
