"""Find claims about speed, memory and gain in the prose of documentation, notebooks, diagrams and docstrings.

``numbers`` finds amounts with a unit of speed or gain, ``words`` finds comparisons without one. ``prose`` yields the
paragraphs of reStructuredText, diagrams and docstrings, and ``notebook`` those of notebooks.
``tools.website.measured`` also compares Markdown with the records.
"""

from __future__ import annotations

import ast
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "ALLOWED",
    "CODE",
    "DIAGRAMS",
    "is_amount",
    "notebook",
    "numbers",
    "prose",
    "visible_html",
    "without_behaviour",
    "words",
]

ALLOWED = re.compile(r"<!-- not a measurement: .+? -->|\.\. not a measurement: .+|\(not a measurement: .+?\)")
"""Marker of a paragraph whose numbers we did not measure: a definition, a setting, a vendor's datasheet."""

DIAGRAMS = frozenset({"mermaid", "dot", "graphviz", "plantuml", "d2"})
"""Languages of fenced blocks that are rendered as an image."""

CODE = re.compile(r"\{(?:code(?:-block|-cell)?|sourcecode|literalinclude|toctree|math|eval-rst)\b")
"""Fenced directives whose content is not prose."""

_ONES = "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
_TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
_SPELT = rf"(?:(?:{_TENS})(?:[ -](?:{_ONES}))?|{_ONES}|fifteen|(?:a |one )?hundred)"
_AMOUNT = rf"(?:(?<![\w.])\d[\d.,]*[kKM]?|\b{_SPELT}\b)"
_UNITS = (
    r"%|per ?cents?\b|percentage points?\b|(?:milli|micro|nano)(?:-?seconds?|secs?)\b|"
    r"(?:ns|ms|msecs?|us|[µμ]s)(?![\w/])|"
    r"(?:[KMGTP]i?B|(?:mega|giga|tera|peta)bytes?)(?:/s(?:ec(?:ond)?)?|ps| (?:per|a) sec(?:ond)?)(?!\w)|"
    r"[GTP]?FLOP/?s(?:/s)?\b|[GTP]FLOPS?(?: (?:per|a) second)?\b|(?:giga|tera|peta)flops?(?:/s)?\b|TOPS\b|"
    r"(?:tok(?:en)?s?|samples|images|steps|iterations|requests|queries)(?:/s(?:ec)?| (?:per|a|each) second)(?!\w)"
)
_SIZE = rf"{_AMOUNT} ?(?:[KMGT]i?B|(?:mega|giga|tera)bytes?)\b"
_DURATION = rf"{_AMOUNT} ?(?:s|secs?|seconds?|min|minutes?|h|hours?|days?)\b"
# Only durations of runs: a timeout of 600 s or a device with 80 GB is a setting.
_TOOK = (
    r"(?:takes?|took|taking|runs? in|ran in|(?:finish(?:es|ed)?|completes?|done|trains?) (?:in|after|within)|"
    r"(?:falls?|fell|drops?|dropped|shrinks?|goes|went) (?:from [^.;]{1,30} )?to|instead of|down (?:to|from))"
    r" (?:only |just |about |nearly |under |less than |a mere |barely |no more than )*"
)
_HELD = r"(?:(?:needs?|uses?|takes?|saves?|peaks? at|peak(?: memory)? (?:of|is)) (?:only |just |about |under )*)"
_NUMBER = re.compile(
    rf"(?<![\w.])\d[\d.,]*(?:[x×]|\s+[x×](?!\s*\d))(?![\w/])"  # noqa: RUF001 - "x86", "16384x4096" and "2 x 3" are no gains
    rf"|{_AMOUNT}[\s-]*(?:{_UNITS})"
    rf"|\b(?:\d[\d.,]*|{_SPELT})[ -]?fold\b"
    rf"|\b{_TOOK}(?:{_DURATION}|{_SIZE})|\b{_HELD}{_SIZE}|{_SIZE} (?:less|fewer|more|saved)\b"
    rf"|\b(?:by a factor of|factor of (?={_AMOUNT} (?:over|faster|less|more|fewer))) ?(?:about |up to )?{_AMOUNT}"
    rf"|(?<![\w.])\d+\.\d+ times\b|{_AMOUNT} (?:J|joules|watts) per\b"
    rf"|\b(?:SNR|signal-to-noise ratio|noise|error|accuracy) (?:is|stays|reaches|of|remains)(?: \w+)? {_AMOUNT} ?dB\b"
    rf"|\b(?:RAM|memory) (?:is|stays|of)(?: below| under| about| only)? {_SIZE}|\btokens in {_SIZE}"
    r"|\bin (?:under|less than|about|just) an? (?:second|minute|hour)\b"
    rf"|{_AMOUNT}[\s-]*(?:fps\b|frames (?:per|a|each) second)"
    rf"|\bfits? (?:in|into) (?:only |just |about |under )*{_SIZE}"
    r"|\b(?:one|two|three|four|five|six|seven|eight|nine) (?:halves|thirds|quarters|fifths|tenths) of "
    r"(?:the |its )?(?:\S+ )?(?:peak|roofline|time|throughput|bandwidth|rate)\b"
    rf"|{_AMOUNT} times (?:less|more|fewer|smaller|lower|higher|better|cheaper|larger|the (?:throughput|speed))\b",
    re.IGNORECASE,
)
_GAINED = r"(?:throughput|speed|performance|latency|run-?time|bandwidth|memory|footprint|training time|step time)"
_PART = (
    r"(?:twice|thrice|half|double|triple|quadruple|\w+ times|"
    r"(?:a|one|two) (?:half|thirds?|quarters?|fifths?|tenths?))"
)
_RIVAL = (
    r"SDPA|FlashAttention|FlexAttention|cuDNN|cuBLAS|torchao|torch\.compile|PyTorch|eager|vLLM|XNNPACK|ExecuTorch|"
    r"TensorRT|llama\.cpp|xFormers|bf16"
)
_WORD = re.compile(
    r"\b(?:faster|fastest|quicker|quickest|slower|speed-?ups?|speeds? up|sped up|speeding up"
    r"|outperform(?:s|ed|ing)?|outpaces?|state[ -]of[ -]the[ -]art|best[ -]in[ -]class|lightning[ -]fast"
    r"|blazing(?:ly)?[ -]fast|orders? of magnitude|record-breaking"
    r"|(?:twice|thrice|half|\w+ times|(?:a|one) (?:half|third|quarter|fifth|tenth|fraction) of) (?:as|the|its) "
    r"(?:fast|slow|quick|speed|time|throughput|latency|memory)(?:ly)?"
    rf"|(?:doubl|tripl|quadrupl|halv)(?:e|es|ed|ing) (?:\w+ ){{0,3}}?(?:{_GAINED}|\w+ per second)"
    rf"|{_GAINED} (?:boost|gain|improvement|win|advantage)s?"
    rf"|(?:boost|improv|increas|rais)(?:e|es|ed|s|ing)? (?:\w+ ){{0,2}}?{_GAINED}"
    r"|accelerat(?:es|ed) (?:\w+ ){0,2}?(?:training|inference|decoding|attention|models?|it)"
    r"|surpass(?:es|ed)|superior to"
    rf"|{_GAINED} (?:is |was |has |are )?(?:more than |nearly |almost )?(?:doubled|tripled|quadrupled|halved)"
    rf"|(?:higher|better|superior|unmatched|unrivall?ed) (?:throughput|performance)|lower latency"
    rf"|(?:cuts?|reduces?|slash(?:es)?) (?:\w+ ){{0,3}}?{_GAINED}(?: \w+)?(?: (?:in|by)) (?:half|two thirds|a \w+)"
    rf"|beats (?:\w+ ){{0,2}}?(?:{_RIVAL})"
    r"|as fast as"
    rf"|{_GAINED} (?:doubles|triples|quadruples|halves)"
    r"|(?:halv|doubl|tripl)(?:e|es|ed|ing) the time"
    rf"|(?:cuts?|reduces?|lowers?|slash(?:es)?) (?:the |our |your )?(?:{_GAINED}|costs?|energy|power|bills?)"
    r"(?: \w+)? (?:by|in) (?:half|two thirds|an order|a (?:half|third|quarter|fifth|tenth|factor))"
    rf"|{_PART} (?:the |of the |of its |its |as (?:much|many|little) |of what )(?:{_GAINED}|size|cost|tokens per|"
    r"tokens a|tokens/s|samples per|images per|steps per|frames per)"
    rf"|(?:{_GAINED}|cost|costs|rate) (?:is |was |of |by )?(?:more than |nearly |almost |about )?{_PART} (?:of|that)"
    rf"|(?:increases|improves|drops|falls) by (?:more than |nearly |almost |about )?{_PART}"
    rf"|(?:lowest|highest|best|smallest) (?:\w+ )?{_GAINED}"
    r"|(?:lower|less|smaller) overhead than|more efficient than|(?:near-)?zero[- ](?:overhead|cost)|no overhead"
    r"|(?:outruns?|trounces?|crush(?:es)?|dominates?|outclass(?:es)?|overtakes?|(?:win|lead|edge) over)"
    rf" (?:\w+ ){{0,2}}?(?:{_RIVAL})"
    r"|scales? (?:near-|almost |nearly )?(?:perfectly|linearly)|linear scaling|perfect overlap"
    rf"|(?:performance|speed|throughput|efficiency) (?:is|remains) (?:unmatched|unrivall?ed|unbeaten|unsurpassed)"
    r"|in the dust|speed of light|light[ -]?speed|comes? close to its (?:speed|performance|rate)"
    r"|(?:nothing|nobody|no other \w+) (?:else )?(?:beats|matches|comes close)|real[ -]time)\b",
    re.IGNORECASE,
)


# In descriptions of code, "takes the fastest kernel" and "within 5 % of the mean" are behaviour, not claims.
_BEHAVIOUR = re.compile(
    r"\b(?:faster|fastest|quicker|quickest|slower|speed-?ups?|speeds? up|sped up|speeding up|as fast as)\b"
    r"(?! than (?:SDPA|Flash|Flex|cuDNN|cuBLAS|torchao|torch\.compile|PyTorch|eager|vLLM|bf16|any|all))"
    r"|(?<!by )(?<!by up to )\b\d[\d.,]*\s?%"
    r"(?! (?:faster|slower|quicker|less|more|fewer|better|higher|lower|of peak))",
    re.IGNORECASE,
)


def without_behaviour(text: str) -> str:
    """Return the text of a docstring or diagram without phrases that describe behaviour.

    Example:
        >>> without_behaviour("Take the fastest."), without_behaviour("It is faster than SDPA.")
        ('Take the .', 'It is faster than SDPA.')
    """
    return _BEHAVIOUR.sub("", text)


def numbers(text: str) -> re.Match[str] | None:
    """Return the first amount with a unit of speed or gain, or None.

    Example:
        >>> numbers("It saves forty percent.")[0], numbers("AVX on x86, case 16384x4096")
        ('forty percent', None)
    """
    return _NUMBER.search(text)


def is_amount(code: str) -> bool:
    """Return whether inline code is only an amount, and is read as prose.

    Example:
        >>> is_amount("3 ms"), is_amount("2x"), is_amount("2x + 1")
        (True, True, False)
    """
    return _NUMBER.fullmatch(code.strip()) is not None


def words(text: str) -> re.Match[str] | None:
    """Return the first comparison without an amount, or None.

    Example:
        >>> words("It doubles throughput.")[0], words("A double buffer.")
        ('doubles throughput', None)
    """
    return _WORD.search(text)


def visible_html(text: str) -> str:
    """Return the text of HTML with the alternative texts of its images, without comments.

    Example:
        >>> visible_html('<pre>one</pre><!-- two --><img alt="three">').split()
        ['one', 'three']
    """
    text = re.sub(r"<!--.*?-->|<style.*?</style>|<metadata.*?</metadata>", " ", text, flags=re.DOTALL)
    said = re.findall(r"""\b(?:alt|title|aria-label)\s*=\s*"([^"]*)\"""", text)
    return html.unescape(" ".join([re.sub(r"<[^>]*>", " ", text), *said]))


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a file that is not Markdown, with their line numbers; the suffix selects the parser."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".svg":
        yield 1, visible_html(re.sub(r"\s*</?tspan[^>]*>\s*", " ", text))
    elif path.suffix == ".rst":
        yield from _rst(text)
    elif path.suffix == ".py":
        yield from _docstrings(text)
    else:
        raise ValueError(f"path={str(path)!r}: the prose of .svg, .rst and .py files is read")


def notebook(text: str) -> Iterator[str]:
    """Yield the Markdown cells of a notebook."""
    for cell in json.loads(text)["cells"]:
        source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source


def _rst(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of reStructuredText, without the indented lines of ``::`` and code directives."""
    line, code = 1, False
    for block in re.split(r"(\n\s*\n)", text):
        indented = block.startswith((" ", "\t"))
        code = code and (indented or not block.strip())
        if block.strip() and not code:
            plain = re.sub(r"``.*?``", "", block, flags=re.DOTALL)
            yield line, plain
            code = bool(re.search(r"::\s*$", block)) or bool(
                re.match(r"\.\. (?:code|sourcecode|literalinclude)", block)
            )
        line += block.count("\n")


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=True)
            if text:
                plain = re.sub(r"``.*?``|`[^`\n]*`", "", text, flags=re.DOTALL)
                plain = re.sub(r"^\s*>>> (?:.*\n?(?!\s*$))*", "", plain, flags=re.MULTILINE)
                first = node.body[0].lineno if node.body else 1
                for found in re.finditer(r"(?:.+\n?)+", plain):
                    yield first + plain.count("\n", 0, found.start()), found[0]
