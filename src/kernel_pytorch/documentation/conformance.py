"""Check a folder of backend documentation against ExecuTorch's standard set of pages.

The layout: ``NAME-overview`` is required; ``NAME-quantization``, ``NAME-partitioner`` and ``op-support.csv`` are
recommended; ``NAME-troubleshooting``, ``NAME-op-support``, ``NAME-arch-internals``, ``tutorials/NAME-tutorials`` and
``guides/NAME-guides`` are optional. Pages are Markdown or reStructuredText. A backend with only an overview may have
the recommended and optional pages as sections of it.
"""

from __future__ import annotations

import csv
import difflib
import io
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from kernel_pytorch.documentation.op_support import COLUMNS
from kernel_pytorch.documentation.sources import (
    Page,
    Section,
    is_signature,
    read_page,
    read_text,
    undefined_names,
    visible,
)

__all__ = ["Conformance", "Finding", "check_folder"]

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Role:
    """A page of the standard set."""

    name: str
    level: Literal["required", "recommended", "optional"]
    words: tuple[str, ...]
    """Words in the name of a renamed page."""
    folder: str = ""


ROLES = (
    Role("overview", "required", ("overview", "index", "readme")),
    Role("quantization", "recommended", ("quanti",)),
    Role("partitioner", "recommended", ("partition",)),
    Role("op-support.csv", "recommended", (".csv",)),
    Role("troubleshooting", "optional", ("trouble", "debug", "faq")),
    Role("op-support", "optional", ("op-support", "ops-support", "operator", "supported-op")),
    Role("arch-internals", "optional", ("arch-", "internal", "architecture", "design")),
    Role("tutorials", "optional", ("tutorial",), "tutorials"),
    Role("guides", "optional", ("guide",), "guides"),
)
# Section of the overview to alternative names.
SECTIONS = {
    "Features": ("highlights", "capabilities", "what is supported"),
    "Target Requirements": (
        "hardware requirements",
        "supported hardware",
        "supported targets",
        "supported devices",
        "target support",
        "runtime requirements",
        "prerequisites",
    ),
    "Development Requirements": (
        "host requirements",
        "software requirements",
        "installation",
        "setup",
        "setting up developer environment",
        "setting up your developer environment",
    ),
    "Using": ("usage", "quick start", "lowering a model", "export", "exporting"),
    "Runtime Integration": (
        "runtime",
        "deployment",
        "running on device",
        "deploying and running on device",
        "integration",
    ),
    "Reference": ("additional resources", "references", "further reading", "see also", "links"),
}
_MARKERS = re.compile(
    r"\bTODO\b|\bTBD\b|\bFIXME\b|\bXXX\b|lorem ipsum|coming soon|\{BACKEND\}|\*?backend name\*|<your[ -]|"
    r"under construction",
    re.IGNORECASE,
)
# Phrases of templates that address the author instead of the reader.
_INSTRUCTION = re.compile(
    r"^(provide|list|describe|include|document|explain|consider|add|make sure|use this|fill|replace|"
    r"this (section|page) (is intended|describes the steps|should|will))\b",
    re.IGNORECASE,
)
_OPERATORS = ("operator", "op support", "ops support", "supported op")
_ROW_PLACEHOLDER = re.compile(r"^(operator|dtype|quantization|constraints?)\s?\d*$", re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """One violation."""

    severity: Severity
    page: str
    line: int
    code: str
    message: str


@dataclass
class Conformance:
    """The pages and sections of a folder, and the findings."""

    backend: str
    pages: list[dict[str, str]] = field(default_factory=list)
    """Role, level, status (present, renamed, section, shared, missing) and path of each page of the set."""
    sections: list[dict[str, str]] = field(default_factory=list)
    """Title and status (present, renamed, missing, empty, placeholder) of the overview's sections."""
    blocks: dict[str, int] = field(
        default_factory=lambda: {"python": 0, "parse": 0, "self_contained": 0, "signatures": 0, "unlabelled": 0}
    )
    findings: list[Finding] = field(default_factory=list)

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    def passes(self, strict: bool = False) -> bool:
        return not self.count("error") and not (strict and self.count("warning"))

    def as_data(self) -> dict[str, Any]:
        counts = {name: self.count(name) for name in ("error", "warning", "note")}
        return {**asdict(self), "counts": counts}


def check_folder(folder: Path) -> Conformance:
    """Check a backend's documentation: a folder, or the single page of a backend without a folder.

    A file that cannot be read is a finding.

    Raises:
        FileNotFoundError: for a path that does not exist.
        ValueError: for a file that is not a page.

    Example:
        >>> import tempfile
        >>> [finding.code for finding in check_folder(Path(tempfile.mkdtemp())).findings][:1]
        ['missing-page']
    """
    path = folder.resolve()  # absolute, because links are resolved in parent folders too
    if not path.exists():
        raise FileNotFoundError(f"folder={str(folder)!r}: no such folder")
    if not path.is_dir() and path.suffix not in _PAGES:
        raise ValueError(f"folder={str(folder)!r}: pass a folder, or a page that ends in {' or '.join(_PAGES)}")
    return _Check(path).run()


_PAGES = (".md", ".rst")


class _Check:
    def __init__(self, path: Path) -> None:
        self.only = None if path.is_dir() else path
        self.folder = folder = path if self.only is None else path.parent
        self.result = Conformance("")
        self.read: dict[Path, Page | None] = {}
        found = [one for ending in _PAGES for one in folder.rglob(f"*{ending}")] if self.only is None else [path]
        self.pages = {one: page for one in sorted(found) if (page := self._page(one)) is not None}
        self.tables = sorted(one for one in folder.rglob("*.csv") if one.is_file()) if self.only is None else []
        self.result.backend = self._name()
        around = (folder, *folder.parents)
        # Whether this is a copy of the folder without the rest of the documentation.
        self.alone = not any((above / sign).exists() for above in around for sign in ("conf.py", ".git"))
        self.generated = _generated_folders(around)
        # The documentation's root if the rest of its repository is missing.
        roots = (above for above in around if (above / "conf.py").is_file())
        cloned = any((above / ".git").exists() for above in around)
        self.root = None if cloned else next(roots, None)

    def _page(self, path: Path) -> Page | None:
        """Return the page at a path, cached; None, with a finding, if it cannot be read."""
        if path not in self.read:
            try:
                self.read[path] = read_page(path)
            except Exception as error:  # continue with the other files
                self.read[path] = None
                self._say("error", path, 0, "unreadable-page", _reason(error))
        return self.read[path]

    def run(self) -> Conformance:
        for role in ROLES:
            self._role(role)
        for page in self.pages.values():
            for check in (self._contents, self._blocks, self._links):
                try:
                    check(page)
                except Exception as error:  # as in _page
                    self._say("error", page.path, 0, "unreadable-page", _reason(error))
        order = {"error": 0, "warning": 1, "note": 2}
        self.result.findings.sort(key=lambda one: (order[one.severity], one.page, one.line))
        return self.result

    def _say(self, severity: Severity, where: Path | str, line: int, code: str, message: str) -> None:
        if isinstance(where, Path):
            where = where.relative_to(self.folder) if self.folder in where.parents else where
        page = where if isinstance(where, str) else where.as_posix()
        self.result.findings.append(Finding(severity, page, line, code, message))

    def _name(self) -> str:
        """Return the backend's name: the prefix of the pages' names, or the folder's name."""
        if self.only is not None:
            return re.sub(r"^backends?-|-overview$", "", self.only.stem)
        names = [
            path.stem.removesuffix(f"-{role.name}")
            for role in ROLES
            for path in self.pages
            if path.stem.endswith(f"-{role.name}") and path.parent == self.folder / role.folder
        ]
        return max(names, key=names.count, default=self.folder.name)

    # Pages

    def _role(self, role: Role) -> None:
        wanted = f"{role.folder}/" if role.folder else ""
        wanted += role.name if role.name.endswith(".csv") else f"{self.result.backend}-{role.name}"
        exact = [self.folder / f"{wanted}{ending}" for ending in ("", ".md", ".rst")]
        there = next((path for path in exact if path in self.pages or path in self.tables), None)
        status, shown = "present", there
        if there is None:
            shown = self._renamed(role)
            status = "missing" if shown is None else "renamed"
        if shown is None and self._as_section(role):
            status = "section"
        elif shown is None and self._is_shared(role):
            status = "shared"
        row = {"role": role.name, "level": role.level, "status": status}
        row["path"] = "" if shown is None else shown.relative_to(self.folder).as_posix()
        self.result.pages.append(row)
        ending = "" if role.name.endswith(".csv") else ".md"
        severity: Severity = {"required": "error", "recommended": "warning", "optional": "note"}[role.level]  # type: ignore[assignment]
        if status == "missing":
            self._say(severity, f"{wanted}{ending}", 0, "missing-page", f"the {role.level} page is not there")
        elif status == "renamed":
            worse: Severity = "error" if role.level == "required" and self.only is None else "warning"
            self._say(worse, row["path"], 0, "renamed-page", f"the {role.name} page, expected as {wanted}{ending}")
        if shown is None:
            return
        if role.name == "overview":
            self._overview(self.pages[shown])
        if role.name.endswith(".csv"):
            self._table(shown)
        if shown in self.pages and shown.stem.startswith("backend-"):
            self._say("warning", shown, 0, "template-name", "has the template's name: put your backend's in front")

    def _is_shared(self, role: Role) -> bool:
        """Return whether the overview links to a page of this role in a sibling folder, which backends share."""
        overview = self.folder / f"{self.result.backend}-overview"
        page = self.pages.get(overview.with_suffix(".md")) or self.pages.get(overview.with_suffix(".rst"))
        for link in page.links if page is not None else ():
            target = (self.folder / unquote(link.target).partition("#")[0]).resolve()
            beside = target.is_relative_to(self.folder.parent) and not target.is_relative_to(self.folder)
            if beside and target.is_file() and (target.name == role.name or target.stem.endswith(f"-{role.name}")):
                return True
            if beside and role.name.endswith(".csv") and (target.parent / role.name).is_file():
                return True  # next to the page of operators that the overview links to
        return False

    def _as_section(self, role: Role) -> bool:
        """Return whether a single-page backend has a section for this role."""
        if len(self.pages) != 1 or role.level == "required":
            return False
        (page,) = self.pages.values()
        words = _OPERATORS if role.name.startswith("op-support") else role.words
        return any(
            1 < section.level <= 3  # deeper headings, such as "Error 1 (Internal)", do not count
            and page.under(section)
            and any(word in section.title.lower() for word in words)
            for section in page.sections
        )

    def _renamed(self, role: Role) -> Path | None:
        if self.only is not None:
            return self.only if role.name == "overview" and self.only in self.pages else None
        if role.name.endswith(".csv"):
            return self.tables[0] if self.tables else None
        taken = {row["path"] for row in self.result.pages}
        for word in role.words:
            for path in self.pages:
                name = path.relative_to(self.folder).as_posix()
                inside = not role.folder and "/" in name  # a page inside a tutorial is not a page of the set
                if word in path.stem.lower().replace("_", "-") and name not in taken and not inside:
                    return path
        if role.folder:  # ExecuTorch's Ethos-U only has tutorials/ethos-u-getting-started.md
            return next((path for path in self.pages if path.parent == self.folder / role.folder), None)
        if role.name == "overview":  # any page with some of its sections
            for path, page in self.pages.items():
                titles = {section.title for section in page.sections}
                if len(titles & set(SECTIONS)) >= 2 and path.parent == self.folder:
                    return path
        return None

    # Sections

    def _overview(self, page: Page) -> None:
        titles = [section for section in page.sections if section.level == 2]
        matched: set[int] = set()
        for wanted, others in SECTIONS.items():
            section, renamed = _find(wanted, others, titles)
            status = "missing" if section is None else "renamed" if renamed else "present"
            if section is None:
                self._say("error", page.path, 0, "missing-section", f"section '{wanted}' is not there")
            else:
                matched.add(section.line)
                if renamed:
                    message = f"section '{section.title}' stands where '{wanted}' is expected"
                    self._say("warning", page.path, section.line, "renamed-section", message)
                if not page.under(section):
                    status = "empty"
                elif _is_placeholder(f"{section.title}\n{page.under(section)}"):
                    status = "placeholder"
            self.result.sections.append({"title": wanted, "status": status})
        for section in titles:
            if section.line not in matched and not section.title.startswith("Quantization"):
                self._say("note", page.path, section.line, "other-section", f"section '{section.title}' is extra")
        if not any(section.title.startswith("Quantization") for section in page.sections):
            self._say("note", page.path, 0, "missing-section", "section 'Quantization' would help a reader")

    def _contents(self, page: Page) -> None:
        if not any(visible(section.body) for section in page.sections) and (
            page.sections or not visible(page.text)
        ):
            self._say("error", page.path, 1, "empty-page", "the page has no text")
            return
        if not page.sections:
            self._say("error", page.path, 1, "no-title", "the page has no title")
        for section in page.sections:
            if section.level > 1 and not page.under(section):
                self._say("error", page.path, section.line, "empty-section", f"section '{section.title}' is empty")
            elif _is_placeholder(f"{section.title}\n{visible(section.body)}"):
                message = f"section '{section.title}' still has a template's text"
                self._say("error", page.path, section.line, "placeholder", message)

    # Code

    def _blocks(self, page: Page) -> None:
        known: set[str] = set()
        count = self.result.blocks
        for block in page.code:
            if block.open:
                message = "the block is never closed: all that is added below is part of it"
                self._say("warning", page.path, block.line, "unclosed-block", message)
            if not block.language:
                count["unlabelled"] += 1
                self._say("warning", page.path, block.line, "unlabelled-block", "the block names no language")
            if block.language != "python":
                continue
            if is_signature(block.text):
                count["signatures"] += 1
                message = "an API's signature, which no Python reads: name the block's language 'text'"
                self._say("note", page.path, block.line, "python-signature", message)
                continue
            count["python"] += 1
            try:
                missing, defined = undefined_names(block.text, known)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                line = block.line + (getattr(error, "lineno", None) or 0)
                message = f"no valid Python: {getattr(error, 'msg', '') or _reason(error)}"
                self._say("error", page.path, line, "python-syntax", message)
                continue
            count["parse"] += 1
            known |= defined | missing  # report each missing name once
            if missing:
                come = "comes" if len(missing) == 1 else "come"
                message = f"not self-contained: {', '.join(sorted(missing))} {come} from nowhere on this page"
                self._say("error", page.path, block.line, "python-undefined", message)
            else:
                count["self_contained"] += 1

    # Links

    def _links(self, page: Page) -> None:
        for link in page.links:
            if re.match(r"[a-z][a-z0-9+.-]*:", link.target) or not link.target:
                continue
            shown = unquote(link.target)
            path, _, anchor = shown.partition("#")
            there = self._resolved(page.path, path, link.kind) if path else page.path
            if there is None and self._elsewhere(page.path, path):
                message = f"'{shown}' leads out of this folder, and what is around it is not here"
                self._say("note", page.path, link.line, "unchecked-link", message)
            elif there is None and path.startswith(self.generated):
                message = f"'{shown}' leads to a page that is made when the documentation is built"
                self._say("note", page.path, link.line, "unchecked-link", message)
            elif there is None:
                code = "dead-toctree" if link.kind == "toctree" else "dead-link"
                self._say("error", page.path, link.line, code, f"'{shown}' leads to no file")
            elif anchor and there.suffix in (".md", ".rst"):
                target = self._page(there)
                if target is not None and anchor not in target.anchors:
                    message = f"'{shown}': that page has no such heading"
                    self._say("error", page.path, link.line, "dead-link", message)

    def _elsewhere(self, page: Path, target: str) -> bool:
        """Return whether a link leads outside of a copied folder, or of documentation without its repository."""
        if self.root is not None and not target.startswith("/"):
            return self.root not in (page.resolve().parent / target).resolve().parents
        if not self.alone:
            return False
        if target.startswith("/"):
            return self.folder.name not in target.split("/")[:-1]
        return self.folder not in (page.resolve().parent / target).resolve().parents

    def _resolved(self, page: Path, target: str, kind: str) -> Path | None:
        if len(target) > 1024 or "\0" in target:  # no file system has such a name
            return None
        # A path from the documentation's root may start in any parent folder.
        starts = list(page.parents)[:8] if target.startswith("/") else [page.parent]
        # MyST resolves pages without extension in roles, toctrees and plain links; other files need their full name.
        endings = ("",) if kind == "file" else ("", ".md", ".rst")
        plain = target.lstrip("/")
        names = [plain + ending for ending in endings]
        if target.startswith("/") and self.alone:
            # The root is unknown: resolve links between the folder's own pages in the folder.
            parts = plain.split("/")
            names += ["/".join(parts[start:]) + ending for start in range(1, len(parts)) for ending in endings]
        if plain.endswith(".html"):
            names += [plain.removesuffix(".html") + ending for ending in (".md", ".rst")]
        for start in starts:
            for name in names:
                if any(len(part.encode()) > 255 for part in name.split("/")):
                    continue
                path = Path(os.path.normpath(start / name))
                if path.is_file() or (kind == "link" and path.is_dir()):
                    return path
        return None

    # The table of operators

    def _table(self, path: Path) -> None:
        try:
            rows = [row for row in csv.reader(io.StringIO(read_text(path), newline="")) if row]
        except (OSError, csv.Error) as error:
            self._say("error", path, 0, "unreadable-page", _reason(error))
            return
        head = tuple(cell.strip() for cell in rows[0]) if rows else ()
        if head != COLUMNS:
            message = f"columns are {', '.join(head) or 'none'}; expected {', '.join(COLUMNS)}"
            self._say("error", path, 1, "csv-columns", message)
            return
        if len(rows) == 1:
            self._say("warning", path, 1, "csv-empty", "the table has no operator")
        seen: set[str] = set()
        for number, row in enumerate(rows[1:], 2):
            if len(row) != len(COLUMNS):
                self._say("error", path, number, "csv-row", f"{len(row)} cells; {len(COLUMNS)} are expected")
            elif not row[0].strip():
                self._say("error", path, number, "csv-row", "names no operator")
            elif _ROW_PLACEHOLDER.match(row[0].strip()):
                self._say("error", path, number, "placeholder", f"'{row[0]}' is a template's row")
            elif row[0] in seen:
                self._say("warning", path, number, "csv-row", f"'{row[0]}' stands twice")
            seen.add(row[0] if row else "")


def _generated_folders(around: tuple[Path, ...]) -> tuple[str, ...]:
    """Return the folders that Sphinx-Gallery fills according to ``conf.py``, relative to the documentation's root."""
    settings = next((above / "conf.py" for above in around if (above / "conf.py").is_file()), None)
    if settings is None:
        return ()
    found = re.search(r"gallery_dirs[\"']?\s*[:=]\s*(\[[^\]]*\]|[\"'][^\"']*[\"'])", read_text(settings))
    return tuple(f"/{name.strip('/')}/" for name in re.findall(r"[\"']([^\"']+)[\"']", found[1])) if found else ()


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if isinstance(error, (RecursionError, MemoryError)):
        return "is nested too deeply to be read"
    return str(error) or type(error).__name__


def _find(wanted: str, others: tuple[str, ...], titles: list[Section]) -> tuple[Section | None, bool]:
    """Return the section of this name, or under an alternative name."""
    plain = {section.line: re.sub(r"[*_`]|\(.*\)", "", section.title).strip() for section in titles}

    def first(test: Any) -> Section | None:
        return next((section for section in titles if test(plain[section.line])), None)

    exact = first(lambda title: title == wanted or (wanted == "Using" and re.match(r"Using\b", title)))
    if exact is not None:
        return exact, False
    taken = {name for name in SECTIONS if any(title == name for title in plain.values())}
    renamed = first(
        lambda title: (
            title not in taken
            and (
                title.lower() in others
                or difflib.SequenceMatcher(None, title.lower(), wanted.lower()).ratio() > 0.8
            )
        )
    )
    return renamed, True


def _is_placeholder(text: str) -> bool:
    """Return whether a text is a placeholder: a marker, or mostly questions and instructions to the author."""
    prose = re.sub(r"^```.*?^```|^(?: {4}|\t).*$", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"`[^`]*`", "", prose)
    if _MARKERS.search(prose):
        return True
    body = prose.partition("\n")[2]
    sentences = [one.strip(" -*\t") for one in re.split(r"(?<=[.?!:])\s+|\n\s*\n|\n(?=\s*[-*] )", body)]
    sentences = [one for one in sentences if re.search(r"\w", one)]
    told = [one for one in sentences if one.endswith("?") or _INSTRUCTION.match(one)]
    return bool(sentences) and len(told) * 2 > len(sentences)
