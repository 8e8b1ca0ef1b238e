"""The documentation is true: generated, executed, backed by records, and without dead links."""

import dataclasses
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from markdown_it import MarkdownIt
from markdown_it.token import Token
from sybil import Document
from sybil.parsers.myst import PythonCodeBlockParser
from tools.website import __main__ as command
from tools.website import measured, pages
from tools.website.blocks import OTHER_LANGUAGES, fences, page_gaps
from tools.website.measured import duration
from tools.website.reference import _class, _signature

import kernel_pytorch as kp
from kernel_pytorch.evidence import (
    Benchmark,
    Checks,
    Compilation,
    Facts,
    Interpretation,
    Measurement,
    Quantiles,
    evidence_directory,
    named_evidence,
    write_record,
)
from kernel_pytorch.hardware_abstraction import backend
from requirements import needs_executorch

ROOT = Path(__file__).parents[2]
ALL_PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "demos/**/*.md", "benchmarks/**/*.md")
    for page in ROOT.glob(pattern)
)

RECORDS = named_evidence(evidence_directory())


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def tokens(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(text)


# Generated pages


@needs_executorch  # the API reference has kp.lower
def test_generated_pages_are_up_to_date() -> None:
    stale = pages.outdated(ROOT, evidence_directory())
    shown = "\n".join(stale.values())[:4000]
    assert not stale, f"out of date: {', '.join(stale)}; {command.REMEDY}\n{shown}"


def test_pages_can_be_made_without_evidence(tmp_path: Path) -> None:
    for evidence in (None, tmp_path, tmp_path / "missing"):
        assert "There is no record yet." in pages.benchmarks_page(evidence)
        support = pages.support_page(evidence)
        assert "**no record**" in support
        assert "**measured**:" not in support.partition("- **measured**")[0]


@needs_executorch
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


def test_a_signature_names_functions_and_shows_no_address() -> None:
    def outer(run: object = duration, by: int = 2) -> None:
        """Nothing."""

    assert _signature("outer", outer) == ["```text", "outer(run: object = duration, by: int = 2) -> None", "```"]


def test_a_class_has_the_signature_of_its_constructor_and_its_public_fields() -> None:
    class Made:
        """Something."""

        def __init__(self, folder: Path, *, size: int = 1) -> None:
            """Nothing."""

    @dataclasses.dataclass
    class Record:
        """Facts."""

        name: str
        _kept: int = 0

    assert _class("Made", Made) == [
        "",
        "```text",
        "Made(folder: pathlib.Path, *, size: int = 1)",
        "```",
        "",
        "Something.",
    ]
    text = "\n".join(_class("Record", Record))
    assert "A dataclass with the fields below." in text
    assert "`name: str`" in text
    assert "_kept" not in text


def measurement(subject: str, median: float, **facts: float) -> Measurement:
    seconds = Quantiles(median * 0.9, median, median * 1.2)
    return Measurement("64x32", "forward", "float32", subject, seconds, 100, 8_000_000, 10, **facts)


def benchmark(op: str, sources: dict[str, str], *measurements: Measurement) -> Benchmark:
    return Benchmark(
        op=op,
        device=Facts("Some CPU", "arm", "cpu", "neon", 8 << 30, 4),
        versions={"torch": "2.0"},
        commit="0123456789abcdef",
        command="kernel-pytorch bench rms_norm --record",
        recorded="2026-01-02T03:04:05Z",
        copy_bandwidth=1e10,
        sources=sources,
        measurements=list(measurements),
    )


def test_a_benchmark_record_becomes_a_row_with_its_provenance(tmp_path: Path) -> None:
    kernel = next(kernel for kernel in backend("cpu").kernels if kernel.op == "rms_norm")
    record = benchmark(
        "rms_norm",
        {"torch": kernel.source_digest, "gone": "0"},
        measurement("kernel:torch", 1e-3, error=1e-8, budget=4e-8),
        measurement("baseline:slow", 3e-3),
        measurement("baseline:best", 2e-3),
    )
    write_record(record, tmp_path / "record.json")
    page = pages.benchmarks_page(tmp_path)
    row = next(line for line in page.splitlines() if line.startswith("| 64x32"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        *("64x32", "`torch`", "1 ms (900 µs to 1.2 ms)", "8 GB/s, 80% of copy", "`best` 2 ms", "2.00x", "25%"),
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
    record = benchmark(
        "attention",
        {},
        msgspec.structs.replace(
            measurement("kernel:tiled", 1.0),
            case="window(1) | sinks(1)",
            peak_bytes=3 << 20,
            predicted_peak_bytes=4 << 20,
        ),
    )
    write_record(record, tmp_path / "record.json")
    page = pages.benchmarks_page(tmp_path)
    assert "| window(1) \\| sinks(1) | `tiled` | 1 s | 0 TFLOP/s | 3 | 4 |" in page
    assert "**forward**, float32: memory" in page


def test_benchmarks_are_grouped_by_the_question_that_they_answer(tmp_path: Path) -> None:
    for name in ("attention.a", "attention-step.a", "fp8-linears.a", "fp8-parity.a", "something.a"):
        write_record(benchmark("attention", {}, measurement("kernel:tiled", 1.0)), tmp_path / f"{name}.json")
    page = pages.benchmarks_page(tmp_path)
    sections = {
        part.partition("\n")[0]: re.findall(r"^### (\S+)", part, re.MULTILINE) for part in page.split("\n## ")
    }
    assert sections["How fast is attention, by mask and length?"] == ["attention"]
    assert sections["How long can a sequence be on one GPU?"] == ["attention-step"]
    assert sections["What does FP8 training gain in time and memory?"] == ["fp8-linears"]
    assert sections["Does FP8 training learn as bf16 does?"] == ["fp8-parity"]
    assert sections["What else is recorded?"] == ["something"]
    assert set(re.findall(r"\]\(#([\w-]+)\)", page)) <= {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^##+ (.+)", page, re.MULTILINE)
    }


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
    conftest = root_conftest(request)
    (sybil,) = [sybil for sybil in (conftest.PAGES, conftest.SHELL) if sybil.should_parse(page)] or [None]
    lines = {example.line for example in sybil.parse(page).examples()} if sybil else set()
    # Parsed is not yet run: pytest collects only what its test paths hold.
    paths = [ROOT / path for path in request.config.getini("testpaths")]
    assert not lines or any(page == path or path in page.parents for path in paths), "not in testpaths"
    languages = OTHER_LANGUAGES - {"bash", "console"} if sybil is conftest.SHELL else OTHER_LANGUAGES
    gaps = page_gaps(page.read_text(encoding="utf-8"), lines, languages)
    assert not gaps, f"{name_of(page)}: {gaps}; use python or one of {sorted(languages)}"


# Commands of pages that are rendered, or stand beside programs: how they begin, and why they are not run there.
NOT_RUN = {
    r"pip install ": "installs a release",
    r"kernel-pytorch doctor$": "the set-up page runs it",
    r"kernel-pytorch (lower|run|build-runtime) ": "test_lowering.py runs it, with a model that is there",
    r'"\$\(kernel-pytorch build-runtime .*/bin/kernel_pytorch_runner ': "the tutorial lower-a-llama.md runs it",
    r"\.venv/bin/(python|torchrun) .*demos/": "test_demo_runs runs every demo",
}
WALKED = ROOT / "docs" / "backends" / "adding-a-backend.md"  # by test_backend_kit.py, every block


def commands_without_a_reason(text: str) -> list[str]:
    blocks = [fence for fence in fences(text) if fence.language in ("bash", "console")]
    lines = [line.strip() for fence in blocks for line in fence.text.splitlines()]
    return [line for line in lines if line and not any(re.match(known, line) for known in NOT_RUN)]


@pytest.mark.parametrize("page", [page for page in ALL_PAGES if page != WALKED], ids=name_of)
def test_every_command_is_run_or_has_a_reason(page: Path, request: pytest.FixtureRequest) -> None:
    if root_conftest(request).SHELL.should_parse(page):
        return  # the test above lets no block in bash pass there
    assert commands_without_a_reason(page.read_text(encoding="utf-8")) == []


def test_a_command_without_a_reason_is_found() -> None:
    text = "```bash\npip install x\nrm -r y\n```\n\n```console\n$ z\n```\n\n```text\nw\n```\n"
    assert commands_without_a_reason(text) == ["rm -r y", "$ z"]


@pytest.mark.parametrize(
    "opening", ["```py", "``` python", '```python title="x"', "```", "~~~", ":::{code-block} python"]
)
def test_gate_finds_blocks_that_would_be_passed_over_in_silence(opening: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{opening}\n1 / 0\n{opening[:3]}\n\n```python\n1 + 1\n```\n")
    seen = {example.line for example in Document.parse(str(page), PythonCodeBlockParser()).examples()}
    assert seen == {7}, "Sybil sees it by now: the gate may be narrower"
    (gap,) = page_gaps(page.read_text(), seen)[:1]
    assert gap.startswith("line 3: ")


@pytest.mark.parametrize("mark", ["skip: start", "skip: next", "skip: next if(True, reason='x')"])
def test_gate_finds_blocks_that_are_skipped_on_every_machine(mark: str) -> None:
    text = f"# Page\n\n<!--- {mark} -->\n\n```python\n1 / 0\n```\n"
    (gap,) = page_gaps(text, {5})
    assert gap.startswith("line 3: ")


def test_blocks_that_need_a_device_are_known() -> None:
    marked = '<!--- skip: next if(not has_gpu, reason="needs one") -->\n\n```python\n1\n```\n\n```python\n2\n```\n'
    assert [fence.needs for fence in fences(marked)] == ["gpu", ""]
    assert [fence.needs for fence in fences(marked.replace("gpu", "amd"))] == ["amd", ""]


# Numbers and links


@pytest.mark.parametrize("page", pages.hand_written(ROOT), ids=name_of)
def test_every_number_of_a_page_is_what_its_record_says(page: Path) -> None:
    found = list(measured.check_file(page, RECORDS))
    assert not found, f"{name_of(page)}: {[str(problem) for problem in found]}"


OTHER_PROSE = sorted(
    path
    for pattern in (
        "API.md",
        "docs/api/*.md",
        "docs/backends/**/*.md",
        "docs/**/*.rst",
        "docs/diagrams/*.svg",
        "**/*.ipynb",
        "src/kernel_pytorch/**/*.py",
        "demos/*.py",
    )
    for path in ROOT.glob(pattern)
    if ".venv" not in path.parts
)


def test_generated_pages_docstrings_and_diagrams_make_no_claim_without_a_record() -> None:
    found = [
        f"{name_of(path)}: {problem}" for path in OTHER_PROSE for problem in measured.check_file(path, RECORDS)
    ]
    assert not found
    assert len(OTHER_PROSE) > 100


def headings(page: Path) -> set[str]:
    """The anchors a page offers, as GitHub makes them from its headings."""
    found = tokens(page.read_text(encoding="utf-8"))
    titles = [after.content for token, after in itertools.pairwise(found) if token.type == "heading_open"]
    plain = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    counted = {f"{one}-{plain[:place].count(one)}" for place, one in enumerate(plain) if one in plain[:place]}
    return {*plain, *counted}


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


def test_running_the_documentation_on_a_gpu_needs_one() -> None:
    command = [sys.executable, "-m", "tools.website.execute", "--record"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "no GPU is here" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that a GPU is here")
def test_what_ran_on_a_gpu_is_counted() -> None:
    pretend = "import sys, kernel_pytorch as kp; from tools.website import execute; "
    call = "sys.exit(execute.main(['docs/setup.md'], kp.device('nvidia/h200')))"
    command = [sys.executable, "-c", pretend + call]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert "2 blocks passed on nvidia/h200, 6 were left out" in done.stdout  # the commands, that is


# Demos


DEMOS = sorted((ROOT / "demos").glob("*.py"))
NEEDS = {"deploy.py": "executorch", "long_chat.py": "executorch", "optimize_model.py": "transformers"}


def test_every_demo_is_listed_and_short() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]", (ROOT / "demos" / "README.md").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == [demo.name for demo in DEMOS]
    assert [demo.name for demo in DEMOS if len(demo.read_text().splitlines()) >= 100] == []


def test_every_program_of_the_benchmarks_is_listed() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    table = page[page.index("| Program |") : page.index("Predictions need")]
    programs = [path.name for path in (ROOT / "benchmarks").glob("*.py") if '"__main__"' in path.read_text()]
    assert sorted(re.findall(r"^\| `(\w+\.py)`", table, flags=re.MULTILINE)) == sorted(programs)


@pytest.mark.parametrize("demo", DEMOS, ids=name_of)
def test_demo_runs(demo: Path) -> None:
    if demo.name in NEEDS:
        pytest.importorskip(NEEDS[demo.name], reason=f"{demo.name} needs it")
    done = subprocess.run([sys.executable, str(demo)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


# What the map must lead to, by audience

WANTED = {
    "New users": ["../README.md", "setup.md", "../demos/README.md", "../BENCHMARKS.md"],
    "Developers": ["architecture.md", "../CONTRIBUTING.md", "../API.md", "performance.md"],
    "Hardware engineers": [
        *("hardware.md", "performance.md", "setup.md"),
        "../src/kernel_pytorch/hardware_abstraction",
    ],
    "Performance engineers": ["../BENCHMARKS.md", "performance.md", "../benchmarks", "architecture.md"],
    "Key features": [
        *("architecture.md", "performance.md", "hardware.md", "fp8.md", "context_parallel.md", "optimize.md"),
        "lowering.md",
    ],
    "How these pages stay true": ["releases.md", "../CHANGELOG.md"],
}


@pytest.mark.parametrize("title", WANTED)
def test_the_map_has_every_link_for_its_audience(title: str) -> None:
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    section = re.split(rf"^##+ {title}$", text, flags=re.MULTILINE)[1]
    section = re.split(r"^## " if title.startswith(("Key", "How")) else r"^##", section, flags=re.MULTILINE)[0]
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", section)}
    assert set(WANTED[title]) <= links


def test_a_table_opens_the_map() -> None:
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    for page in ("setup.md", "architecture.md", "hardware.md", "performance.md", "releases.md"):
        assert f"]({page})" in text


def test_what_the_page_of_releases_says() -> None:
    text = (ROOT / "docs" / "releases.md").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(\S+)\]", changes, flags=re.MULTILINE)[0] in ("Unreleased", kp.__version__)
    assert f"## [{kp.__version__}]" in changes
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = {word for words in re.findall(r"make ([a-z][a-z -]*)", text) for word in words.split()}
    assert named <= set(targets)
    assert "make evidence-check" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    shown = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert "<!-- evidence check -->" in shown, "where the site shows the table"
