"""What a page of documentation is made of, read from Markdown (MyST) or reStructuredText: sections, code, links."""

from __future__ import annotations

import ast
import bisect
import builtins
import doctest
import itertools
import re
import symtable
from dataclasses import dataclass, field
from pathlib import Path

try:
    from markdown_it import MarkdownIt
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "markdown-it-py reads the pages of a backend: pip install 'kernel-pytorch[backend]'", name="markdown_it"
    ) from error

__all__ = [
    "Code",
    "Link",
    "Page",
    "Section",
    "is_signature",
    "read_page",
    "read_text",
    "undefined_names",
    "visible",
]

MAX_BYTES = 2**20
"""The largest file that is read. The longest page of ExecuTorch's backends has 60 kB."""


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it, up to the next heading."""

    title: str
    level: int
    line: int
    body: str


@dataclass(frozen=True)
class Code:
    """A block of code."""

    language: str
    text: str
    line: int
    open: bool = False
    """Whether nothing ends it but the end of the page; then it may be a directive too."""


@dataclass(frozen=True)
class Link:
    """A place that the page points to."""

    target: str
    line: int
    kind: str
    """``"link"``, ``"doc"`` (a page without its ending), ``"toctree"`` or ``"file"``."""


@dataclass
class Page:
    """One page."""

    path: Path
    text: str
    sections: list[Section] = field(default_factory=list)
    code: list[Code] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def under(self, section: Section) -> str:
        """What a reader sees of a section and of its subsections."""
        start = bisect.bisect_left(self.sections, section.line, key=lambda one: one.line)
        texts = [visible(section.body)]
        for later in self.sections[start + 1 :]:
            if later.level <= section.level:
                break
            texts.append(visible(later.body))
        return "\n".join(texts).strip()


def read_text(path: Path) -> str:
    """Read a regular file of at most ``MAX_BYTES``, without its byte order mark.

    Bytes that are no UTF-8 become question marks.

    Raises:
        OSError: for a directory, a FIFO, a dangling link, or a file that is too large or may not be read.
    """
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(f"is a link to {path.readlink()}, which does not exist")
    if path.is_dir():
        raise IsADirectoryError("is a directory, not a page")
    if not path.is_file():
        raise OSError("is not a regular file")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise OSError(f"has {size:,} bytes; pages of up to {MAX_BYTES:,} bytes are read: split it")
    return path.read_text(encoding="utf-8-sig", errors="replace")


def read_page(path: Path) -> Page:
    """Read a page by its ending.

    Raises:
        OSError: where ``read_text`` does.
    """
    page = Page(path, read_text(path))
    (_read_rst if path.suffix == ".rst" else _read_markdown)(page)
    return page


# HTML comments, MyST's "[comment]: <> (...)", and reStructuredText's ".. text" without a directive or target.
_COMMENT = re.compile(
    r"<!--(?:.|\n)*?(?:-->|\Z)|^\[(?:comment|//)\]: .*$|^\.\. (?![\w:.-]+::|_|\[|\|).*$", re.MULTILINE
)
# What authors write in place of content.
_NOTHING = re.compile(
    r"(?:n\s*/?\s*a|none|nil|null|nothing|not (?:applicable|available|yet)|tba|tbc)?[\W_]*", re.IGNORECASE
)


def visible(text: str) -> str:
    """What a reader sees of a text: comments are left out, and words that stand for nothing are nothing.

    Example:
        >>> visible("<!-- later -->\\n*N/A*"), visible("None of the operators need it.")
        ('', 'None of the operators need it.')
    """
    text = _COMMENT.sub("", text).strip()
    return "" if _NOTHING.fullmatch(re.sub(r"[*_`>|\s-]+", " ", text).strip()) else text


def slug(title: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


_DIRECTIVE = re.compile(r"\{([\w:.-]+)\}\s*(.*)")


def _read_markdown(page: Page) -> None:
    lines = page.text.splitlines()
    tokens = MarkdownIt("commonmark").enable("table").parse(page.text)
    headings: list[tuple[str, int, int, int]] = []
    for position, token in enumerate(tokens):
        first, last = token.map or (0, 0)
        if token.type == "heading_open":
            headings.append((tokens[position + 1].content, int(token.tag[1]), first, last))
        elif token.type == "fence":
            _block(page, token.info.strip(), token.content, first + 1)
            closing = lines[last - 1].strip(" \t>") if last - first > 1 else ""
            if last >= len(lines) and not (closing.startswith(token.markup) and set(closing) == {token.markup[0]}):
                page.code.append(Code("text", "", first + 1, open=True))
        elif token.type == "code_block" and token.content.lstrip().startswith(">>>"):
            page.code.append(Code("python", token.content, first + 1))
        elif token.type == "inline":
            for name in re.findall(r"\{doc\}`([^`]+)`", token.content):
                page.links.append(Link(_target(name), first + 1, "doc"))
            for child in token.children or ():
                target = child.attrGet("href") or child.attrGet("src")
                if target:
                    page.links.append(Link(str(target), first + 1, "link"))
    _colon_fences(page, lines)
    page.anchors |= _heading_anchors(headings)
    page.anchors |= set(re.findall(r"^\(([\w-]+)\)=", page.text, flags=re.MULTILINE))
    page.anchors |= set(re.findall(r"<a (?:name|id)=\"([^\"]+)\"", page.text))
    _sections(page, headings, lines)


def _colon_fences(page: Page, lines: list[str]) -> None:
    """MyST's directives between colons; the innermost open fence of a length is the one that such a line closes."""
    opened: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(lines):
        found = re.match(r"(:{3,})\s*(\{.*)?$", line.rstrip())
        if found is None:
            continue
        if found[2]:
            opened[found[1]] = (number, found[2])
        elif found[1] in opened:
            first, info = opened.pop(found[1])
            _block(page, info.strip(), "\n".join(lines[first + 1 : number]) + "\n", first + 1)


def _heading_anchors(headings: list[tuple[str, int, int, int]]) -> set[str]:
    """The anchors of headings: GitHub's, with ``-1`` for the second of a name, and the ids that Sphinx writes."""
    anchors: dict[str, int] = {}
    found = set()
    for title, *_ in headings:
        name = slug(title)
        count = anchors.get(name, 0)
        anchors[name] = count + 1
        found |= {f"{name}-{count}" if count else name, re.sub(r"[\W_]+", "-", title.lower()).strip("-")}
    return found


def _sections(page: Page, headings: list[tuple[str, int, int, int]], lines: list[str]) -> None:
    ends = [first for _, _, first, _ in headings[1:]] + [len(lines)]
    for (title, level, first, body), end in zip(headings, ends, strict=False):  # no heading, no end
        page.sections.append(Section(title, level, first + 1, "\n".join(lines[body:end]).strip()))


def _block(page: Page, info: str, text: str, line: int) -> None:
    found = _DIRECTIVE.match(info)
    if found is None:
        word = info.split()[0] if info else ""
        page.code.append(Code({"py": "python", "python3": "python"}.get(word, word), text, line))
        return
    name, argument = found[1], found[2]
    options = dict(re.findall(r"^:([\w-]+):[ \t]*(.*)$", text, flags=re.MULTILINE))
    body = re.sub(r"^:[\w-]+:.*\n?", "", text, flags=re.MULTILINE)
    if name in ("code-block", "code", "sourcecode", "code-cell"):
        page.code.append(Code(argument.split()[0] if argument else "python", body, line))
    elif name == "toctree":
        _toctree(page, text, line, "glob" in options)
    elif name == "eval-rst":
        _rst_blocks(page, body.splitlines(), line)
    elif name in ("csv-table", "include", "literalinclude", "image", "figure"):
        target = options.get("file", "") if name == "csv-table" else argument
        if target:
            page.links.append(Link(target.strip(), line, "file"))


def _toctree(page: Page, body: str, line: int, glob: bool) -> None:
    for number, entry in enumerate(body.splitlines(), 1):
        word = _target(entry.strip())
        if word and not (glob and "*" in word) and word != "self" and not word.startswith(":"):
            page.links.append(Link(word, line + number, "toctree"))


def _target(text: str) -> str:
    """The page in ``Title <page>`` or in ``page``."""
    found = re.search(r"<([^>]+)>\s*$", text)
    return (found[1] if found else text).strip()


def _read_rst(page: Page) -> None:
    lines = page.text.splitlines()
    headings: list[tuple[str, int, int, int]] = []
    marks: list[tuple[str, bool]] = []
    for number, (title, rule) in enumerate(itertools.pairwise(lines)):
        plain = title.strip()
        same = rule.strip() and set(rule.strip()) <= {rule.strip()[0]} and rule.strip()[0] in "=-~^\"'#*+`"
        if plain and same and len(rule.strip()) >= max(len(plain), 3) and not set(plain) <= set("=-~^\"'#*+`"):
            over = number > 0 and lines[number - 1].strip() == rule.strip()  # a rule above makes another level
            mark = (rule.strip()[0], over)
            if mark not in marks:
                marks.append(mark)
            headings.append((plain, marks.index(mark) + 1, number - over, number + 2))
    starts = list(itertools.accumulate((len(line) for line in page.text.splitlines(keepends=True)), initial=0))
    for found in re.finditer(r":doc:`([^`]+)`", page.text):
        page.links.append(Link(_target(found[1]), bisect.bisect(starts, found.start()), "doc"))
    for found in re.finditer(r"`[^`<]*<([^>`]+)>`_", page.text):
        page.links.append(Link(found[1].strip(), bisect.bisect(starts, found.start()), "link"))
    page.anchors |= _heading_anchors(headings)
    page.anchors |= {name.strip("`") for name in re.findall(r"^\.\. _([^:]+):", page.text, flags=re.MULTILINE)}
    _rst_blocks(page, lines, 1)
    _sections(page, headings, lines)


def _rst_blocks(page: Page, lines: list[str], first: int) -> None:
    """Directives with their indented blocks, handed on as if they were MyST's."""
    for number, line in enumerate(lines):
        found = re.match(r"(\s*)\.\. ([\w:.-]+)::\s*(.*)", line)
        if found is None:
            continue
        body: list[str] = []
        for later in lines[number + 1 :]:
            if later.strip() and len(later) - len(later.lstrip()) <= len(found[1]):
                break
            body.append(later)
        depth = min((len(one) - len(one.lstrip()) for one in body if one.strip()), default=0)
        text = "\n".join(one[depth:] for one in body).strip("\n") + "\n"
        _block(page, f"{{{found[2]}}} {found[3]}", text, first + number)


def undefined_names(code: str, known: set[str]) -> tuple[set[str], set[str]]:
    """The names that a block uses without having them, and those that it defines for the blocks after it.

    Raises:
        SyntaxError: where the block is no Python.
    """
    if re.search(r"^\s*>>> ", code, flags=re.MULTILINE):
        code = "".join(example.source for example in doctest.DocTestParser().get_examples(code))
    tree = ast.parse(code)
    top = symtable.symtable(code, "block", "exec")
    used: set[str] = set()
    defined: set[str] = set()
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree)):
        return set(), set(known)
    waiting = [top]
    while waiting:
        scope = waiting.pop()
        waiting += scope.get_children()
        for symbol in scope.get_symbols():
            here = scope is top or symbol.is_declared_global()
            if here and (symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()):
                defined.add(symbol.get_name())
            elif symbol.is_referenced() and (scope is top or symbol.is_global()):
                used.add(symbol.get_name())
    given = known | defined | set(dir(builtins)) | {"__name__", "__file__", "__doc__"}
    return used - given, defined


_SIGNATURE = re.compile(r"(?:@[^\n]*\n)*(?:(?:async\s+)?(?:def|class)\s+)?[A-Za-z_][\w.]*\s*(\(.*)", re.DOTALL)


def is_signature(code: str) -> bool:
    """Whether a block shows the signatures of an API, as ``help`` prints them, instead of a program.

    Example:
        >>> is_signature("class Quantizer(bits: int = 8) -> None"), is_signature("def Quantizer.run(self, x):")
        (True, True)
        >>> is_signature("quantizer.run(x)"), is_signature("for x in y")
        (False, False)
    """
    # A signature starts at the margin and may go on in lines that are indented or close a bracket.
    found = [
        _SIGNATURE.fullmatch(one.strip()) for one in re.split(r"\n(?=[A-Za-z_@])", code.strip()) if one.strip()
    ]
    if not found:
        return False
    for one in found:
        if one is None:
            return False
        try:
            ast.parse(f"def f{one[1].rstrip().rstrip(':')}: ...")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return False
