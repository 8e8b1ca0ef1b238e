"""Measured numbers in prose: each is a link to its record, and the link's title selects the number.

    It takes [0.92 ms][window], ...

    [window]: ../benchmarks/evidence/attention.nvidia-h200.json "measured: time; case=causal 4096 d64; phase=forward"

In plain Markdown this is a number with a link to its record. The site also shows its provenance. ``check`` reports a
number that differs from its record, a record that is missing or measured an older source of the kernel, a number
without a record, a sentence about another device, phase or case than the record's, and a word such as "faster"
without a measured number in the same paragraph. ``refresh`` updates the numbers.

The title is ``measured: QUANTITY; KEY=VALUE; ...``. Quantities: time, speedup, rate, bandwidth, memory, error (as a
fraction of its budget), noise (an error relative to a norm, in decibels), each also as ``lowest`` or ``highest`` of
all matches; copy, of the whole record. Keys select one measurement: case, phase, format, kernel or baseline, with
``*`` as wildcard; ``over`` names the baseline of a speedup, by default the best one. If a kernel has changed since
its record, ``at`` shows the number as that of the record's commit, which the page must then name; remove ``at`` with
the next record.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from markdown_it import MarkdownIt
from markdown_it.token import Token

from kernel_pytorch.benchmarking import source_name
from kernel_pytorch.evidence import Benchmark, EvidenceError, Measurement, Record
from kernel_pytorch.hardware_abstraction.registry import backends
from kernel_pytorch.hardware_abstraction.source_digest import is_part
from tools.website.claims import (
    ALLOWED,
    CODE,
    DIAGRAMS,
    is_amount,
    notebook,
    numbers,
    prose,
    visible_html,
    without_behaviour,
    words,
)
from tools.website.conditions import Conditions, contradiction, sentence_around

__all__ = [
    "GONE",
    "Measured",
    "Problem",
    "check",
    "check_file",
    "duration",
    "gigabytes",
    "provenance",
    "refresh",
    "resolve",
    "stale_kernels",
]

PREFIX = "measured: "

_DEFINITION = re.compile(r'^\[([^\]]+)\]: +\S*evidence/([\w.-]+)\.json "(measured: [^"]+)"$', re.MULTILINE)
_INLINE = re.compile(r'\[([^\]]*)\](\(\S*evidence/([\w.-]+)\.json "(measured: [^"]+)"\))')
GONE = "is no longer in the table"
"""State of a kernel that no backend lists any more."""
_REGION = re.compile(r"<!-- generated: [\w-]+ -->\n.*?<!-- end -->", re.DOTALL)  # compared elsewhere
_AT = re.compile(r"; at=(\w+)")
_KEYS = ("case", "phase", "format", "kernel", "baseline", "over", "at")


@dataclass(frozen=True)
class Measured:
    """A number as printed, with its provenance."""

    text: str
    provenance: str
    rivals: frozenset[str] = frozenset()
    """The baselines of a speedup."""
    conditions: Conditions | None = None
    """The conditions of the measurement; None for a number of the whole record."""


@dataclass(frozen=True)
class Problem:
    """A problem on a line of a page."""

    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}"


def resolve(record_name: str, title: str, records: Mapping[str, Record]) -> Measured:
    """Return the number that a link's title selects in a record; raise EvidenceError if it is missing or stale.

    Example:
        >>> from kernel_pytorch.evidence import evidence_directory, named_evidence
        >>> title = "measured: lowest time; kernel=torch; format=float32"
        >>> resolve("rms_norm.amd-epyc", title, named_evidence(evidence_directory())).text.endswith(" ms")
        True
    """
    record = records.get(record_name)
    if not isinstance(record, Benchmark):
        known = sorted(name for name, known in records.items() if isinstance(known, Benchmark))
        raise EvidenceError(f"no benchmark record {record_name!r}; there are {', '.join(known)}")
    wanted, *conditions = title.removeprefix(PREFIX).split("; ")
    chosen: dict[str, str] = {}
    for condition in conditions:
        key, equals, value = condition.partition("=")
        if key not in _KEYS or not equals:
            raise EvidenceError(f"{condition!r} in {title!r}: the keys are {', '.join(_KEYS)}")
        chosen[key] = value
    if wanted == "copy":
        return Measured(f"{gigabytes(record.copy_bandwidth)} GB/s", provenance(record))
    extreme, _, quantity = wanted.rpartition(" ")
    if quantity not in _SHOWN or extreme not in ("", "lowest", "highest"):
        raise EvidenceError(f"{wanted!r} in {title!r}: quantities are {', '.join(_SHOWN)}, copy")
    rows = [row for row in record.measurements if _matches(row, chosen)]
    if quantity == "memory":
        rows = [row for row in rows if row.peak_bytes is not None]
    if not rows or (len(rows) > 1 and not extreme):
        found = "; ".join(f"{row.case}, {row.phase}, {row.format}, {row.subject}" for row in rows[:4])
        raise EvidenceError(f"{title!r} matches {len(rows)} measurements of {record_name}: {found or 'none'}")
    stale = [item for row in rows for item in stale_kernels(record, row).items()]
    if "at" in chosen:
        _check_commit(chosen["at"], bool(stale), record_name, record)
    elif stale:
        name, what = stale[0]
        raise EvidenceError(
            f"kernel {name!r} of {record_name} {what}; record it anew: {record.command}; until then add "
            f"'; at={record.commit[:7]}' to the link and name that commit on the page"
        )
    values = [_value(quantity, record, row, chosen.get("over", "")) for row in rows]
    best = min(values) if extreme == "lowest" else max(values)
    shown = _SHOWN[quantity](best)
    over = chosen.get("over", "")
    rivals = frozenset(_rival(record, row, over)[1] for row in rows) if quantity == "speedup" else frozenset()
    chosen_rows = [row for row, value in zip(rows, values, strict=True) if value == best]
    return Measured(shown, provenance(record), rivals, Conditions.of(record, chosen_rows))


def _check_commit(at: str, stale: bool, record_name: str, record: Benchmark) -> None:
    """Raise an error unless a number is of the earlier commit ``at`` and not current."""
    if len(at) < 7 or not record.commit.startswith(at):
        raise EvidenceError(f"at={at}: {record_name} is of commit {record.commit[:7]}")
    if not stale:
        raise EvidenceError(f"at={at}: {record_name} is current; leave it out")


def _matches(row: Measurement, chosen: Mapping[str, str]) -> bool:
    kind, _, name = row.subject.partition(":")
    wanted_kind = "baseline" if "baseline" in chosen else "kernel"
    facts = {"case": row.case, "phase": row.phase, "format": row.format, wanted_kind: name}
    return kind == wanted_kind and all(_like(facts[key], value) for key, value in chosen.items() if key in facts)


def _like(value: str, pattern: str) -> bool:
    return fnmatchcase(value, pattern.replace("[", "[[]").replace("?", "[?]"))


def _rival(record: Benchmark, row: Measurement, over: str) -> tuple[float, str]:
    """Return the best time of the baselines of a measurement, and that baseline's name."""
    rivals = [
        (rival.seconds.median, rival.subject.removeprefix("baseline:"))
        for rival in record.measurements
        if (rival.case, rival.phase, rival.format) == (row.case, row.phase, row.format)
        and rival.subject.startswith("baseline:")
        and _like(rival.subject.removeprefix("baseline:"), over or "*")
    ]
    if not rivals:
        raise EvidenceError(f"no baseline {over or '*'!r} beside {row.case!r}, {row.phase}")
    return min(rivals)


def _value(quantity: str, record: Benchmark, row: Measurement, over: str) -> float:
    if quantity == "speedup":
        return _rival(record, row, over)[0] / row.seconds.median
    if quantity == "memory":
        return float(row.peak_bytes or 0)
    if quantity in ("error", "noise"):
        if row.error is None or not row.budget:
            raise EvidenceError(f"no error is recorded for {row.case!r}, {row.phase}")
        if quantity == "error":
            return row.error / row.budget
        return -20 * math.log10(row.error) if row.error else math.inf
    seconds = row.seconds.median
    return {"time": seconds, "rate": row.flops / seconds, "bandwidth": row.traffic_bytes / seconds}[quantity]


def duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def gigabytes(rate: float) -> str:
    return f"{rate / 1e9:,.0f}" if rate >= 1e11 else f"{rate / 1e9:.3g}"


_SHOWN: dict[str, Callable[[float], str]] = {
    "time": duration,
    "speedup": lambda gain: f"{gain:.2f}x",
    "rate": lambda rate: f"{rate / 1e12:.0f} TFLOP/s",
    "bandwidth": lambda rate: f"{gigabytes(rate)} GB/s",
    "memory": lambda size: f"{size / 2**30:.1f} GiB",
    "error": lambda share: f"{share:.0%}",
    "noise": lambda decibels: f"{decibels:.1f} dB",
}


def provenance(record: Benchmark) -> str:
    """Return the provenance of a record's numbers in one line."""
    versions = ", ".join(
        f"{name} {record.versions[name]}" for name in ("torch", "triton") if name in record.versions
    )
    return (
        f"{record.device.name}, {versions}, commit {record.commit[:10]}, {record.recorded[:10]}: {record.command}"
    )


def stale_kernels(record: Record, row: Measurement | None = None) -> dict[str, str]:
    """Return the state of each kernel of a record, or of one row, whose source has changed since."""
    kernels = [kernel for owner in backends() for kernel in owner.kernels]
    names = {source_name(record.op, kernel) for kernel in kernels}
    now = {(source_name(record.op, kernel), kernel.source_digest) for kernel in kernels}
    sources = [name for name in record.sources if not is_part(name)]
    about = [
        name for name in sources if row is not None and row.subject.partition(":")[2].startswith(name)
    ] or sources  # a row of a whole program concerns all of them
    return {
        name: "has changed since" if name in names else GONE
        for name in about
        if (name, record.sources[name]) not in now
    }


def check(text: str, page: Path, records: Mapping[str, Record]) -> Iterator[Problem]:
    """Yield the problems of the numbers of a Markdown page, outside of its generated regions."""
    text = _REGION.sub(lambda found: "\n" * found[0].count("\n"), text)
    for line, tokens in _paragraphs(text):
        prose, backed = "", False
        inside: Token | None = None
        shown = ""
        links: list[tuple[int, str, Measured]] = []  # (end position, column head, recorded number)
        for token in tokens:
            title = str(token.attrGet("title") or "")
            if token.type == "link_open" and title.startswith(PREFIX):
                inside, shown = token, ""
            elif token.type == "link_open":
                prose += f" {title} "
            elif token.type == "link_close" and inside is not None:
                found, right = _check_link(inside, shown, page, records)
                if found:
                    yield Problem(line, found)
                earlier = _AT.search(str(inside.attrGet("title") or ""))
                if earlier and f"`{earlier[1]}`" not in text:
                    yield Problem(line, f"the number is of an earlier commit: say `{earlier[1]}` on the page")
                if right is not None:
                    links.append((len(prose), str(inside.meta.get("head", "")), right))
                inside, backed, prose = None, True, prose + " "
            elif token.type in ("text", "softbreak", "html_inline", "html_block", "image", "fence"):
                content = _shown(token)
                if token.type == "image":
                    content += f" {title}"
                    backed = backed or "/plots/" in f"/{token.attrGet('src')}"  # drawn from a record
                shown, prose = (shown + content, prose) if inside is not None else (shown, prose + content)
            elif token.type == "code_inline" and is_amount(token.content):
                prose += f" {token.content} "
        if any(ALLOWED.search(token.content) for token in tokens if token.type.startswith("html")):
            continue
        for place, head, right in links:
            rivals = right.rivals
            said = f"{head}: {sentence_around(prose, place)}"
            wrong = contradiction(said, right.conditions) if right.conditions is not None else ""
            if wrong:
                yield Problem(line, wrong)
            start = max((end for end, _, _ in links if end < place), default=0)
            around = (prose[place:], re.split(r"[.;]\s", prose[start:place])[-1], head)
            named = next(filter(None, (_other_rival(said, rivals, records) for said in around)), "")
            if named:
                yield Problem(line, f"{named!r}: the record's speedup is over {' and '.join(sorted(rivals))!r}")
        yield from _unbacked(prose, line, backed)


def check_file(path: Path, records: Mapping[str, Record]) -> Iterator[Problem]:
    """Yield the problems of the claims of a page, a notebook, a diagram or a module's docstrings."""
    if path.suffix == ".md":
        text = path.read_text(encoding="utf-8")
        if text.startswith("<!-- Generated by"):  # tables come from records, sentences from docstrings
            text = without_behaviour(re.sub(r"^\|.*$", "", text, flags=re.MULTILINE))
        yield from check(text, path, records)
    elif path.suffix == ".ipynb":
        for cell in notebook(path.read_text(encoding="utf-8")):
            yield from check(cell, path, records)
    else:
        for line, text in prose(path):
            if not ALLOWED.search(text):
                told = text if path.suffix == ".rst" else without_behaviour(text)
                yield from _unbacked(told, line, backed=False)


def _unbacked(text: str, line: int, backed: bool) -> Iterator[Problem]:
    bare, word = numbers(text), words(text)
    if bare:
        yield Problem(line, f"{bare[0]!r} has no record: link it to one, see CONTRIBUTING.md")
    elif word and not backed:
        yield Problem(line, f"{word[0]!r} without a measured number in the same paragraph")


# Libraries that a sentence may name as the baseline of a speedup, in addition to the records' baselines.
_LIBRARIES = (
    "SDPA",
    "scaled_dot_product_attention",
    "FlashAttention",
    "FlexAttention",
    "PyTorch",
    "torch.compile",
    "eager",
    "bf16",
    "torchao",
    "XNNPACK",
    "xFormers",
    "TransformerEngine",
    "Transformer Engine",
    "vLLM",
    "TensorRT",
    "cuDNN",
    "cuBLAS",
)
_COMPARED = re.compile(
    r"\b(?:over|than|against|versus|vs\.?|compared (?:to|with)|relative to|as fast as|the (?:speed|rate) of)\s+"
    r"([^.;:,()]{0,60})",
    re.IGNORECASE,
)


def _other_rival(after: str, rivals: frozenset[str], records: Mapping[str, Record]) -> str:
    """Return the rival that a sentence names next to a speedup if it is not the speedup's baseline, or empty."""
    found = _COMPARED.search(re.split(r"[.;]\s", after, maxsplit=1)[0])
    if found is None or not rivals:
        return ""
    known = {
        word.lower()
        for record in records.values()
        if isinstance(record, Benchmark)
        for row in record.measurements
        if row.subject.startswith("baseline:")
        for word in re.findall(r"[A-Za-z][\w-]{3,}", row.subject.removeprefix("baseline:"))
    } | {name.lower() for name in _LIBRARIES}
    said = found[1].lower()
    named = [word for word in known if re.search(rf"(?<![\w-]){re.escape(word)}(?![a-z])", said)]
    about = " ".join(rivals).lower()
    return found[0].strip() if named and not any(word in about for word in named) else ""


def _check_link(link: Token, shown: str, page: Path, records: Mapping[str, Record]) -> tuple[str, Measured | None]:
    """Return a problem with a measured number, or empty, and the recorded number."""
    target = PurePosixPath(str(link.attrGet("href")))
    if target.suffix != ".json" or not (page.parent / target).is_file():
        return f"no record at {target}", None
    try:
        right = resolve(target.stem, str(link.attrGet("title")), records)
    except EvidenceError as error:
        return str(error), None
    wrong = f"{shown!r} is {right.text!r} in the record: run 'python -m tools.website --write'"
    return wrong if shown != right.text else "", right


def _paragraphs(text: str) -> Iterator[tuple[int, list[Token]]]:
    """Yield the blocks of prose with their first lines; a table row is one block, and so is a diagram."""
    rows: dict[int, list[Token]] = {}
    heads: list[str] = []
    column, in_head = 0, False
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type in ("thead_open", "thead_close"):
            in_head = token.type == "thead_open"
            heads = [] if in_head else heads
        elif token.type == "tr_open":
            column = 0
        elif token.type in ("th_open", "td_open"):
            column += 1
        elif token.type == "table_close":
            heads = []
        if token.map is None:
            continue
        cells = rows.setdefault(token.map[0] + 1, [])
        if token.type == "inline":
            if in_head:
                heads.append(token.content)
            elif heads:
                for child in token.children or ():
                    child.meta["head"] = heads[column - 1]
            cells += [*(token.children or ()), Token("softbreak", "", 0)]
        elif token.type == "html_block" or (token.type == "fence" and _is_prose(token.info.strip())):
            cells.append(token)
    yield from rows.items()


def _is_prose(language: str) -> bool:
    """Return whether a fenced block has prose: a note, a diagram, or code with comments."""
    return not CODE.match(language) or "block" in language


def _shown(token: Token) -> str:
    """Return the text of a token as rendered; for a code block, its comments."""
    if token.type.startswith("html"):
        return f" {visible_html(token.content)} "
    if token.type != "fence":
        return token.content.replace("$", "") or " "
    language = token.info.strip()
    if language.startswith("{") and not CODE.match(language):
        return f"{language.partition('}')[2]} {token.content}"
    if language.strip("{} ") in DIAGRAMS or language in _OUTPUT:
        return without_behaviour(token.content)
    comments = re.findall(r"(?:^|\s)(?:#|//) (.*)$", token.content, re.MULTILINE)
    return without_behaviour("\n".join(comments))


_OUTPUT = ("", "text", "console", "output", "none", "shell-session")
"""Languages of blocks that show what a command prints."""


def refresh(text: str, records: Mapping[str, Record]) -> str:
    """Return the page with every measured number updated from its record; numbers without a record stay."""

    def right(record: str, title: str, there: str) -> str:
        try:
            return resolve(record, title, records).text
        except EvidenceError:
            return there

    for label, record, title in _DEFINITION.findall(text):
        link = re.compile(rf"\[([^\]]*)\]\[{re.escape(label)}\]")
        text = link.sub(lambda found: f"[{right(record, title, found[1])}][{label}]", text)  # noqa: B023 - used here
    return _INLINE.sub(lambda found: f"[{right(found[3], found[4], found[1])}]{found[2]}", text)
