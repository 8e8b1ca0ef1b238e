"""The documentation is true: generated, executed, backed by records, and without dead links."""

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from kernel_pytorch.documentation import __main__ as command
from kernel_pytorch.documentation import pages
from kernel_pytorch.evidence import (
    Benchmark,
    Checks,
    Compilation,
    Facts,
    Interpretation,
    Measurement,
    Quantiles,
    evidence_directory,
    write_record,
)
from kernel_pytorch.hardware_abstraction import backend

ROOT = Path(__file__).parents[1]
ALL_PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "demos/**/*.md", "benchmarks/**/*.md")
    for page in ROOT.glob(pattern)
)
OTHER_LANGUAGES = {"bash", "console", "text", "cpp", "cmake", "json", "toml", "yaml", "make"}

# A number with a unit of speed or gain. "x86" and "16384x4096" are neither.
CLAIM = re.compile(r"(?<![\w.])\d[\d.,]*\s*(?:x|×|%|ms|us|µs|[GT]B/s|TFLOP/s|tok/s)(?![\w/])")  # noqa: RUF001
ALLOWED = re.compile(r"<!-- not a measurement: .+ -->")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def tokens(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(text)


def generated(page: Path) -> bool:
    return page.read_text(encoding="utf-8").startswith(pages.GENERATED)


# Generated pages


def test_generated_pages_are_up_to_date() -> None:
    stale = pages.outdated(ROOT, evidence_directory())
    shown = "\n".join(stale.values())[:4000]
    assert not stale, f"out of date: {', '.join(stale)}; {command.REMEDY}\n{shown}"


def test_pages_can_be_made_without_evidence(tmp_path: Path) -> None:
    for evidence in (None, tmp_path, tmp_path / "missing"):
        assert "There is no record yet." in pages.benchmarks_page(evidence)
        support = pages.support_page(evidence)
        assert "**untested**" in support
        assert "**measured**:" not in support.partition("- **measured**")[0]


def test_check_fails_with_a_difference_and_write_repairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "checkout", lambda: tmp_path)
    (tmp_path / "pyproject.toml").touch()
    assert command.main(["--check"]) == 1
    out = capsys.readouterr()
    assert "+# Benchmarks" in out.out
    assert "--write" in out.err
    assert command.main(["--write"]) == 0
    assert command.main(["--check"]) == 0
    (tmp_path / "API.md").write_text("edited by hand")
    assert command.main(["--check"]) == 1
    assert "-edited by hand" in capsys.readouterr().out


def measurement(subject: str, median: float, **facts: float) -> Measurement:
    seconds = Quantiles(median * 0.9, median, median * 1.2)
    return Measurement("64x32", "forward", "float32", subject, seconds, 100, 8_000_000, 10, **facts)


def test_a_benchmark_record_becomes_a_row_with_its_provenance(tmp_path: Path) -> None:
    kernel = next(kernel for kernel in backend("cpu").kernels if kernel.op == "rms_norm")
    record = Benchmark(
        op="rms_norm",
        device=Facts("Some CPU", "arm", "cpu", "neon", 8 << 30, 4),
        versions={"torch": "2.0"},
        commit="0123456789abcdef",
        command="kernel-pytorch bench rms_norm --record",
        recorded="2026-01-02T03:04:05Z",
        copy_bandwidth=1e10,
        sources={"torch": kernel.source_digest, "gone": "0"},
        measurements=[
            measurement("kernel:torch", 1e-3, error=1e-8, budget=4e-8),
            measurement("baseline:slow", 3e-3),
            measurement("baseline:best", 2e-3),
        ],
    )
    write_record(record, tmp_path / "record.json")
    page = pages.benchmarks_page(tmp_path)
    row = next(line for line in page.splitlines() if line.startswith("| 64x32"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        *("64x32", "float32", "forward", "`torch`", "1 ms (900 µs to 1.2 ms)"),
        *("8", "80%", "`best`", "2 ms", "2.00x", "25%"),
    ]
    for fact in (
        "2026-01-02",
        "`0123456789`",
        "`kernel-pytorch bench rms_norm --record`",
        "Some CPU",
        "neon",
        "torch 2.0",
        "10 GB/s",
    ):
        assert fact in page
    assert "Kernel `gone` is no longer in the table." in page
    assert "Kernel `torch` has changed" not in page
    assert "**measured**: Some CPU" in pages.support_page(tmp_path)


def test_a_measurement_of_memory_has_a_table_of_its_own(tmp_path: Path) -> None:
    record = Benchmark(
        op="attention",
        device=Facts("Some CPU", "arm", "cpu", "neon", 8 << 30, 4),
        versions={"torch": "2.0"},
        commit="0123456789abcdef",
        command="some command",
        recorded="2026-01-02T03:04:05Z",
        copy_bandwidth=1e10,
        sources={},
        measurements=[
            msgspec.structs.replace(
                measurement("kernel:tiled", 1.0),
                case="window(1) | sinks(1)",
                peak_bytes=3 << 20,
                predicted_peak_bytes=4 << 20,
            )
        ],
    )
    write_record(record, tmp_path / "record.json")
    page = pages.benchmarks_page(tmp_path)
    assert "| window(1) \\| sinks(1) | float32 | forward | `tiled` | 1 s | 0 | 3 | 4 |" in page


def test_a_checks_record_shows_the_most_any_case_needs_and_when_it_is_stale(tmp_path: Path) -> None:
    compiled = [
        Compilation("triton", "_forward", "sm_90", case, "float32", registers, 128, 0)
        for case, registers in (("small", 40), ("large", 90))
    ]
    interpreted = [Interpretation("triton", "float16", ["small"])]
    record = Checks("rms_norm", {"triton": "3.0"}, {"triton": "another text"}, compiled, interpreted)
    write_record(record, tmp_path / "record.json")
    page = pages.support_page(tmp_path)
    assert "| `triton` | `_forward` | `sm_90` | 2 | 90 | 128 | 0 |" in page
    assert "| `triton` | float16 | small |" in page
    assert "Kernel `triton` has changed since" in page
    assert "**compiled**: sm_90" not in page  # a record about another text proves nothing


# Examples


def root_conftest(request: pytest.FixtureRequest) -> Any:
    path = str(ROOT / "conftest.py")
    plugins = request.config.pluginmanager.get_plugins()
    found = [plugin for plugin in plugins if getattr(plugin, "__file__", None) == path]
    assert found, "the root conftest.py is not loaded; run pytest inside the checkout"
    return found[0]


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_every_block_is_executed_or_in_another_language(page: Path, request: pytest.FixtureRequest) -> None:
    sybil = root_conftest(request).PAGES
    text = page.read_text(encoding="utf-8")
    collected = sybil.should_parse(page)
    lines = {example.line for example in sybil.parse(page).examples()} if collected else set()
    # Parsed is not yet run: pytest collects only what its test paths hold.
    paths = [ROOT / path for path in request.config.getini("testpaths")]
    assert not lines or any(page == path or path in page.parents for path in paths), "not in testpaths"
    wrong = [
        f"line {i}: ':::' blocks are not executed" for i, line in enumerate(text.splitlines(), 1) if ":::" in line
    ]
    for token in tokens(text):
        if token.type not in ("fence", "code_block") or token.map is None:
            continue
        first, last = token.map
        executed = any(first < line <= last for line in lines)
        if token.info not in OTHER_LANGUAGES and not executed:
            wrong.append(f"line {first + 1}: block of language {token.info!r} is not executed")
    assert not wrong, f"{name_of(page)}: {wrong}; use python or one of {sorted(OTHER_LANGUAGES)}"


# Numbers and links


def bare_claims(text: str) -> Iterator[str]:
    """Lines outside code that give a number with a unit of speed or gain and no reason why they may."""
    lines = text.splitlines()
    for token in tokens(text):
        if token.type in ("fence", "code_block") and token.map is not None:
            for number in range(*token.map):
                lines[number] = ""
    for number, line in enumerate(lines, 1):
        prose = re.sub(r"(`+).*?\1", "", line)
        found = CLAIM.search(prose)
        if found and not ALLOWED.search(line):
            yield f"line {number}: {found[0]!r}"


@pytest.mark.parametrize(
    "page",
    [page for page in ALL_PAGES if page.parent in (ROOT, ROOT / "docs", ROOT / "demos") and not generated(page)],
    ids=name_of,
)
def test_no_number_stands_in_prose_without_a_record(page: Path) -> None:
    found = list(bare_claims(page.read_text(encoding="utf-8")))
    assert not found, (
        f"{name_of(page)}: {found}: link to BENCHMARKS.md instead, or, where it is no measurement, "
        f"end the line with '<!-- not a measurement: the reason -->'"
    )


@pytest.mark.parametrize("text", ["It is 2x faster.", "up to 40 %", "3.5 ms", "4,800 GB/s", "| 1.3x |", "90%"])
def test_linter_finds_a_bare_number(text: str) -> None:
    assert list(bare_claims(text))


@pytest.mark.parametrize(
    "text",
    [
        "AVX on x86, case 16384x4096, sm_90, version 2.13",
        "`2x` in code",
        "```text\n90 % faster\n```",
        "the 80 % quantile <!-- not a measurement: the definition -->",
    ],
)
def test_linter_passes_what_is_no_claim(text: str) -> None:
    assert not list(bare_claims(text))


def headings(page: Path) -> set[str]:
    """The anchors a page offers, as GitHub makes them from its headings."""
    found = tokens(page.read_text(encoding="utf-8"))
    titles = [after.content for token, after in itertools.pairwise(found) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for token in tokens(page.read_text(encoding="utf-8")):
        for child in token.children or ():
            target = str(child.attrGet("href") or child.attrGet("src") or "")
            if not target or "://" in target or target.startswith("mailto:"):
                continue
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            if not there.exists() or (anchor and anchor not in headings(there)):
                dead.append(target)
    assert not dead, f"{name_of(page)}: {dead}"


# Demos


@pytest.mark.parametrize("demo", sorted((ROOT / "demos").glob("*.py")), ids=name_of)
def test_demo_runs(demo: Path) -> None:
    done = subprocess.run([sys.executable, str(demo)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
