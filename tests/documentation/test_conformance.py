"""``kernel-pytorch backend check``: each defect that documentation of backends has been seen to have is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_pytorch import cli
from kernel_pytorch.documentation.conformance import Conformance, check_folder
from kernel_pytorch.documentation.sources import undefined_names

SECTIONS = (
    "Features",
    "Target Requirements",
    "Development Requirements",
    "Using",
    "Runtime Integration",
    "Reference",
)
OVERVIEW = "# Acme\n\nRuns models.\n\n" + "".join(f"## {title}\n\nIt has this.\n\n" for title in SECTIONS)
GOOD = {
    "acme-overview.md": OVERVIEW + "## Quantization\n\nint8.\n",
    "acme-quantization.md": "# Quantization\n\nint8.\n",
    "acme-partitioner.rst": "Partitioner\n===========\n\nIt takes linears.\n",
    "op-support.csv": "Operator,Compute DType,Quantization,Constraints\nlinear,float32,int8,\n",
    "acme-troubleshooting.md": "# Troubleshooting\n\nLook at the log.\n",
    "acme-op-support.rst": "Operators\n=========\n\n.. csv-table::\n   :file: op-support.csv\n",
    "acme-arch-internals.md": "# Internals\n\nA payload is data.\n",
    "tutorials/acme-tutorials.md": "# Tutorials\n\n```{toctree}\n:maxdepth: 1\n\nacme-basic\n```\n",
    "tutorials/acme-basic.md": "# Basic\n\n```python\nx = 1\n```\n",
    "guides/acme-guides.md": "# Guides\n\nNone yet are needed.\n",
}


def checked(folder: Path, changes: dict[str, str | None] | None = None) -> Conformance:
    """The good folder with some files changed or, for None, left out."""
    for name, text in {**GOOD, **(changes or {})}.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return check_folder(folder)


def codes(result: Conformance) -> list[tuple[str, str, str]]:
    return [(one.severity, one.page, one.code) for one in result.findings]


def overview(**changes: str) -> str:
    """The overview with the text of a section, or with its title, replaced."""
    text = GOOD["acme-overview.md"]
    for old, new in changes.items():
        text = text.replace(old.replace("_", " "), new)
    return text


def test_a_good_folder_has_no_finding(tmp_path: Path) -> None:
    result = checked(tmp_path)
    assert codes(result) == []
    assert result.passes(strict=True)
    assert result.backend == "acme"
    assert {row["status"] for row in [*result.pages, *result.sections]} == {"present"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"acme-overview.md": None}, ("error", "acme-overview.md", "missing-page")),
        ({"acme-quantization.md": None}, ("warning", "acme-quantization.md", "missing-page")),
        ({"acme-troubleshooting.md": None}, ("note", "acme-troubleshooting.md", "missing-page")),
        (
            {"acme-quantization.md": None, "quantizing.md": "# Quantization\n\nint8.\n"},
            ("warning", "quantizing.md", "renamed-page"),
        ),
        (
            {"acme-overview.md": overview(Reference="Additional Resources")},
            ("warning", "acme-overview.md", "renamed-section"),
        ),
        (
            {"acme-overview.md": overview(Runtime_Integration="Runtime integration")},
            ("warning", "acme-overview.md", "renamed-section"),
        ),
        ({"acme-overview.md": overview(Features="Colours")}, ("error", "acme-overview.md", "missing-section")),
        (
            {"acme-overview.md": GOOD["acme-overview.md"].replace("## Features\n\nIt has this.", "## Features", 1)},
            ("error", "acme-overview.md", "empty-section"),
        ),
        (
            {"acme-overview.md": GOOD["acme-overview.md"].replace("It has this.", "TBD", 1)},
            ("error", "acme-overview.md", "placeholder"),
        ),
        (
            {
                "acme-overview.md": GOOD["acme-overview.md"].replace(
                    "It has this.", "Which chips? Which systems?", 1
                )
            },
            ("error", "acme-overview.md", "placeholder"),
        ),
        (
            {"acme-overview.md": overview(Using="Using *Backend Name*")},
            ("error", "acme-overview.md", "placeholder"),
        ),
        ({"acme-quantization.md": ""}, ("error", "acme-quantization.md", "empty-page")),
        ({"acme-quantization.md": "# Title\n"}, ("error", "acme-quantization.md", "empty-page")),
        (
            {"acme-quantization.md": "# Q\n\n```python\nfor bits in 8\n```\n"},
            ("error", "acme-quantization.md", "python-syntax"),
        ),
        (
            {"acme-quantization.md": "# Q\n\n```python\nQuantizer(bits: int = 8) -> None\n```\n"},
            ("note", "acme-quantization.md", "python-signature"),
        ),
        (
            {"acme-quantization.md": "# Q\n\n```python\ndef Quantizer.run(\n    self, x: int\n):\n```\n"},
            ("note", "acme-quantization.md", "python-signature"),
        ),
        (
            {"acme-overview.md": overview(Target_Requirements="Target Support")},
            ("warning", "acme-overview.md", "renamed-section"),
        ),
        (
            {"acme-overview.md": overview(Target_Requirements="Prerequisites (Hardware and Software)")},
            ("warning", "acme-overview.md", "renamed-section"),
        ),
        (
            {"acme-quantization.md": "# Q\n\n``` python\n  x = 1\n y = 2\n```\n"},
            ("error", "acme-quantization.md", "python-syntax"),
        ),
        (
            {"acme-quantization.md": "# Q\n\n```python\nlower(model_to_quantize)\n```\n"},
            ("error", "acme-quantization.md", "python-undefined"),
        ),
        (
            {"acme-quantization.md": "# Q\n\n:::{code-block} python\nlower(model)\n:::\n"},
            ("error", "acme-quantization.md", "python-undefined"),
        ),
        (
            {"acme-partitioner.rst": "P\n===\n\n.. code-block:: python\n\n   partition(graph)\n\nText.\n"},
            ("error", "acme-partitioner.rst", "python-undefined"),
        ),
        ({"acme-quantization.md": "# Q\n\n```\nx\n```\n"}, ("warning", "acme-quantization.md", "unlabelled-block")),
        (
            {"acme-quantization.md": "# Q\n\nText.\n\n```{toctree}\n\nacme-overview\n"},
            ("warning", "acme-quantization.md", "unclosed-block"),
        ),
        (
            {"acme-quantization.md": "# Q\n\n- Text:\n\n  ~~~text\n  x = 1\n  ```\n"},
            ("warning", "acme-quantization.md", "unclosed-block"),
        ),
        (
            # Titles between rules are of another level than titles above one.
            {"acme-partitioner.rst": "=====\nP\n=====\n\nA\n\n-----\nEmpty\n-----\n\n-----\nFull\n-----\n\nB\n"},
            ("error", "acme-partitioner.rst", "empty-section"),
        ),
        (
            {"acme-quantization.md": "# Q\n\nSee [it](acme-gone).\n"},
            ("error", "acme-quantization.md", "dead-link"),
        ),
        (
            {"acme-quantization.md": "# Q\n\nSee [it](getting-started.md).\n"},
            ("error", "acme-quantization.md", "dead-link"),
        ),
        (
            {"acme-quantization.md": "# Q\n\nSee [it](acme-overview.md#nowhere).\n"},
            ("error", "acme-quantization.md", "dead-link"),
        ),
        (
            {"acme-quantization.md": "# Q\n\nSee {doc}`acme-missing`.\n"},
            ("error", "acme-quantization.md", "dead-link"),
        ),
        ({"acme-partitioner.rst": "P\n===\n\nSee :doc:`gone`.\n"}, ("error", "acme-partitioner.rst", "dead-link")),
        (
            {"tutorials/acme-basic.md": None},
            ("error", "tutorials/acme-tutorials.md", "dead-toctree"),
        ),
        ({"op-support.csv": "Namespace,Operator,Notes\naten,add,\n"}, ("error", "op-support.csv", "csv-columns")),
        ({"op-support.csv": GOOD["op-support.csv"] + "relu,float32\n"}, ("error", "op-support.csv", "csv-row")),
        (
            {"op-support.csv": GOOD["op-support.csv"] + "operator2,dtype2,q,c\n"},
            ("error", "op-support.csv", "placeholder"),
        ),
        (
            {"op-support.csv": None, "acme-ops.csv": GOOD["op-support.csv"], "acme-op-support.rst": None},
            ("warning", "acme-ops.csv", "renamed-page"),
        ),
    ],
)
def test_each_defect_is_found(
    tmp_path: Path, changes: dict[str, str | None], expected: tuple[str, str, str]
) -> None:
    result = checked(tmp_path, changes)
    assert expected in codes(result)
    assert result.passes() == (expected[0] != "error")


@pytest.mark.parametrize(
    "nothing", ["N/A", "n/a.", "-", "*None*", "…", "---", "<!-- later -->", "Not applicable.", "| - |", "TBA"]
)
def test_a_section_or_page_that_says_nothing_is_empty(tmp_path: Path, nothing: str) -> None:
    empty = ("error", "acme-overview.md", "empty-section")
    result = checked(tmp_path, {"acme-overview.md": GOOD["acme-overview.md"].replace("It has this.", nothing, 1)})
    assert codes(result) == [empty]
    assert result.sections[0] == {"title": "Features", "status": "empty"}
    assert codes(checked(tmp_path, {"acme-quantization.md": f"# Q\n\n{nothing}\n"})) == [
        ("error", "acme-quantization.md", "empty-page")
    ]


@pytest.mark.parametrize(
    "text", ["None of the operators need it.", "`-`-separated names.", "Not yet on Windows.", "1"]
)
def test_short_sections_are_not_empty(tmp_path: Path, text: str) -> None:
    changes = {"acme-overview.md": GOOD["acme-overview.md"].replace("It has this.", text, 1)}
    assert codes(checked(tmp_path, changes)) == []


def test_what_only_the_author_sees_is_no_placeholder(tmp_path: Path) -> None:
    text = "# Q\n\nint8.\n\n<!-- TODO: int4 -->\n\n[comment]: <> (TODO: move this)\n"
    assert codes(checked(tmp_path, {"acme-quantization.md": text})) == []


def test_a_relative_folder_is_judged_like_an_absolute_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "docs" / "backends" / "acme"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "conf.py").touch()
    changes = {
        "acme-quantization.md": "# Q\n\n[own](/backends/acme/acme-overview) {doc}`/backends/acme/acme-overview`\n"
    }
    assert codes(checked(folder, changes)) == []
    monkeypatch.chdir(folder.parent)
    assert codes(check_folder(Path("acme"))) == []
    monkeypatch.chdir(folder)
    assert codes(check_folder(Path())) == []


def test_a_file_that_cannot_be_read_does_not_end_the_report(tmp_path: Path) -> None:
    checked(tmp_path)
    (tmp_path / "dangling.md").symlink_to("gone.md")
    (tmp_path / "loop.md").symlink_to("loop.md")
    (tmp_path / "folder.md").mkdir()
    os.mkfifo(tmp_path / "pipe.md")
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "large.md").write_bytes(b"# L\n\n" + b"x\n" * 15_000_000)
    (tmp_path / "acme-quantization.md").write_text(
        "# Q\n\n[a](large.md#there) [b](pipe.md#there) " + "[c](" + "x" * 9999 + ")"
    )
    found = {(one.page, one.code): one.message for one in check_folder(tmp_path).findings}
    unreadable = {page for page, code in found if code == "unreadable-page"}
    assert unreadable == {"dangling.md", "loop.md", "folder.md", "pipe.md", "large.md"}
    assert "30,000,005 bytes" in found["large.md", "unreadable-page"]
    assert ("acme-quantization.md", "dead-link") in found, "the other pages are still checked"


def test_deep_nesting_ends(tmp_path: Path) -> None:
    """Each of these took minutes or ended the report."""
    deep = {
        "brackets.md": "# B\n\n" + "[" * 3000 + "\n",
        "quotes.md": "# Q\n\n" + ">" * 3000 + " text\n",
        "directives.md": "# D\n\n" + ":::{note}\n" * 20_000,
        "headings.md": "# H\n\n" + "## Heading\n\nText.\n\n" * 5_000,
        "python.md": "# P\n\n```python\nx = " + "-" * 100_000 + "1\n```\n",
        "sum.md": "# P\n\n```python\nx = " + "+".join(["1"] * 20_000) + "\n```\n",
        "links.md": "# L\n\n[a](a" + "/a" * 5_000 + ")\n",
    }
    found = {(page, code) for _, page, code in codes(checked(tmp_path, dict(deep)))}
    assert ("python.md", "python-syntax") in found
    assert ("links.md", "dead-link") in found


def test_a_byte_order_mark_is_no_part_of_a_page_or_table(tmp_path: Path) -> None:
    marked = {
        name: f"\ufeff{GOOD[name]}" for name in ("op-support.csv", "acme-overview.md", "acme-partitioner.rst")
    }
    assert codes(checked(tmp_path, dict(marked))) == []


def test_a_cell_may_have_lines_and_a_table_may_end_in_a_blank_one(tmp_path: Path) -> None:
    assert codes(checked(tmp_path, {"op-support.csv": GOOD["op-support.csv"] + 'relu,float32,,"a\nb"\n\n'})) == []


def test_a_link_may_have_spaces_and_name_the_second_heading_of_its_name(tmp_path: Path) -> None:
    text = "# Q\n\n## Run\n\nThis.\n\n## Run\n\nThat: [a](<a page.md>) [b](#run-1) "
    text += "[c](tutorials/../acme-overview.md#using)\n"
    assert codes(checked(tmp_path, {"acme-quantization.md": text, "a page.md": "# A\n\nText.\n"})) == []


def test_pages_that_the_build_makes_are_not_dead(tmp_path: Path) -> None:
    (tmp_path / "conf.py").write_text('sphinx_gallery_conf = {"gallery_dirs": ["tutorials"]}\n')
    text = "# Q\n\n[a](/tutorials/made) [b](/other/gone) [c](acme-overview#runtime---on-device)\n"
    changes = {
        "acme-quantization.md": text,
        "acme-overview.md": OVERVIEW.replace("## Reference", "## Runtime - on Device"),
    }
    found = [code for code in codes(checked(tmp_path / "acme", changes)) if code[1] == "acme-quantization.md"]
    assert [(severity, code) for severity, _, code in found] == [("error", "dead-link"), ("note", "unchecked-link")]


def test_a_backend_of_one_page_may_have_sections_for_pages(tmp_path: Path) -> None:
    more = "".join(
        f"## {title}\n\nText.\n\n" for title in ("Quantization", "Partitioner API", "Supported Operators")
    )
    more += "### Issues\n\nText.\n\n#### Guide\n\nText.\n\n##### Issue 2: Error 1 (Internal)\n\nText.\n"
    page = tmp_path / "backends-acme.md"
    page.write_text(OVERVIEW + more)
    (tmp_path / "backends-other.md").write_text("# TODO\n")
    result = check_folder(page)
    assert result.backend == "acme"
    assert [code for code in codes(result) if code[0] != "note"] == [
        ("warning", "backends-acme.md", "renamed-page")
    ]
    status = {row["role"]: row["status"] for row in result.pages}
    assert [status[role] for role in ("quantization", "partitioner", "op-support.csv")] == ["section"] * 3
    assert status["tutorials"] == status["guides"] == status["arch-internals"] == "missing"
    page.rename(tmp_path / "acme-overview.md")
    assert check_folder(tmp_path / "acme-overview.md").passes(strict=True)
    (tmp_path / "acme-overview.md").write_text(OVERVIEW)
    assert ("warning", "acme-quantization.md", "missing-page") in codes(check_folder(tmp_path / "acme-overview.md"))
    with pytest.raises(ValueError, match="a page that ends in"):
        check_folder(Path(__file__))


def test_a_page_without_folder_or_name_is_found_by_its_sections(tmp_path: Path) -> None:
    (tmp_path / "backends-acme.md").write_text(OVERVIEW)
    result = check_folder(tmp_path)
    assert ("error", "backends-acme.md", "renamed-page") in codes(result)
    assert {row["status"] for row in result.sections} == {"present"}


def test_a_template_that_nobody_filled_in(tmp_path: Path) -> None:
    """The standard layout as it is copied: every section asks or instructs, and its links lead nowhere."""
    asks = "Which hardware does it need? Does the user have to install a driver?"
    tells = "Describe here what the user has to do. Include a sample that can be run."
    text = "# Backend Title\n\nDescribe the backend in a sentence.\n\n"
    for number, title in enumerate(SECTIONS[:-1]):
        text += f"## {'Using *Backend Name*' if title == 'Using' else title}\n\n{(asks, tells)[number % 2]}\n\n"
    text += "## Reference\n\n{doc}`backend-partitioner`\n\n"
    text += "```{toctree}\n:caption: {BACKEND}\n\nbackend-op-support\n```\n"
    (tmp_path / "backend-overview.md").write_text(text)
    (tmp_path / "op-support.csv").write_text(
        "Operator,Compute DType,Quantization,Constraints\noperator1,dtype1,,\n"
    )
    result = check_folder(tmp_path)
    assert [row["status"] for row in result.sections] == ["placeholder"] * 5 + ["present"]
    found = {code for _, _, code in codes(result)}
    assert {"placeholder", "dead-link", "dead-toctree", "template-name", "missing-page"} <= found
    assert not result.passes()


@pytest.mark.parametrize(
    ("code", "known", "missing"),
    [
        ("import torch\ntorch.ones(2)", set(), set()),
        ("y = x + 1", set(), {"x"}),
        ("y = x + 1", {"x"}, set()),
        ("def f(a):\n    return a + b", set(), {"b"}),
        ("def f(a):\n    b = 1\n    return a + b", set(), set()),
        ("class A:\n    n = 1\n    def f(self):\n        return [n for n in range(self.n)]", set(), set()),
        ("with open('f') as file:\n    print(file)", set(), set()),
        ("for i in range(3):\n    print(i, j)", set(), {"j"}),
        (">>> import os\n>>> os.getcwd()\n'/x'\n>>> nothing", set(), {"nothing"}),
        ("from somewhere import *\nanything()", set(), set()),
        ("try:\n    pass\nexcept ValueError as error:\n    print(error)", set(), set()),
        ("lambda a: a + late\nlate = 1", set(), set()),
    ],
)
def test_names_that_come_from_nowhere(code: str, known: set[str], missing: set[str]) -> None:
    assert undefined_names(code, known)[0] == missing


def test_links_that_are_fine(tmp_path: Path) -> None:
    text = "# Q\n\n(a-label)=\n## Some Part\n\n[a](acme-overview.md#features) [b](#some-part) [c](#a-label) "
    text += "[d](https://example.org/x) [e](tutorials) [f](mailto:a@b.c) "
    text += "{doc}`acme-overview` {doc}`Title </acme-overview>` [g](acme-overview) [h](/acme-overview#features)\n"
    text += "\n> ```text\n> quoted\n> ```\n"
    assert codes(checked(tmp_path, {"acme-quantization.md": text})) == []


def test_a_copy_of_the_folder_alone_is_not_blamed_for_what_is_around_it(tmp_path: Path) -> None:
    """Paths from the documentation's root, and paths that leave the folder."""
    folder = tmp_path / "docs" / "backends" / "acme"
    links = "[own](/backends/acme/acme-overview) [root](/start.md#run) [up](../../other/start.md)"
    changes = {"acme-quantization.md": f"# Q\n\n{links}\n"}
    unchecked = ("note", "acme-quantization.md", "unchecked-link")
    assert codes(checked(folder, changes)) == [unchecked, unchecked]
    gone = {"acme-quantization.md": "# Q\n\n[own](/backends/acme/acme-gone)\n"}
    assert codes(checked(folder, gone)) == [("error", "acme-quantization.md", "dead-link")]

    (tmp_path / "docs" / "conf.py").touch()  # now all of it is here
    dead = ("error", "acme-quantization.md", "dead-link")
    assert codes(checked(folder, changes)) == [dead, dead]
    (tmp_path / "docs" / "start.md").write_text("# Start\n\n## Run\n\nThis.\n")
    assert codes(checked(folder, changes)) == [dead]

    out = {"acme-quantization.md": "# Q\n\n[code](../../../tool/run.py)\n"}
    assert codes(checked(folder, out)) == [unchecked], "the repository around the documentation is not here"
    (tmp_path / ".git").touch()
    assert codes(checked(folder, out)) == [dead]


def test_a_tutorial_of_another_name_is_a_tutorial(tmp_path: Path) -> None:
    """ExecuTorch's arm-ethos-u has tutorials/ethos-u-getting-started.md and no list of tutorials."""
    result = checked(tmp_path, {"tutorials/acme-tutorials.md": None})
    assert codes(result) == [("warning", "tutorials/acme-basic.md", "renamed-page")]


def test_a_finding_has_the_line_of_its_entry(tmp_path: Path) -> None:
    tree = "# Tutorials\n\nText.\n\n```{toctree}\n:hidden:\n\nacme-basic\nacme-gone\n```\n"
    rst = "===\nP\n===\n\nText.\n\n.. toctree::\n   :hidden:\n\n   acme-quantization\n   gone\n"
    result = checked(tmp_path, {"tutorials/acme-tutorials.md": tree, "acme-partitioner.rst": rst})
    assert [(one.page, one.line) for one in result.findings] == [
        ("acme-partitioner.rst", 11),
        ("tutorials/acme-tutorials.md", 9),
    ]


# The command


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


def test_the_command_reports_and_its_status_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checked(tmp_path, {"acme-quantization.md": None})
    assert run("backend", "check", str(tmp_path)) == 0
    told = capsys.readouterr().out
    assert "acme-quantization.md: the recommended page is not there" in told
    assert run("backend", "check", str(tmp_path), "--strict") == 1
    (tmp_path / "acme-overview.md").unlink()
    capsys.readouterr()
    assert run("backend", "check", str(tmp_path), "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["passes"] is False
    assert data["counts"]["error"] == len([one for one in data["findings"] if one["severity"] == "error"]) == 1
    assert data["findings"][0]["code"] == "missing-page"


def test_the_command_takes_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "acme-overview.md"
    page.write_text(OVERVIEW + "## Quantization\n\nint8.\n")
    assert run("backend", "check", str(page)) == 0
    assert "section" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("backend", "check", str(tmp_path / "gone")) == 1
    assert "no such folder" in capsys.readouterr().err


def test_docs_writes_then_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "amd")
    assert run("backend", "docs", "amd", "--out", out, "--check") == 1
    assert run("backend", "docs", "amd", "--out", out) == 0
    assert run("backend", "docs", "amd", "--out", out, "--check") == 0
    capsys.readouterr()
    assert run("backend", "check", out, "--strict") == 0
    assert "leads out of this folder" in capsys.readouterr().out
    assert run("backend", "docs", "nobody", "--out", out) == 1
    assert "no such backend" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "arguments"), [("jinja2", ["docs", "cpu", "--out", "pages"]), ("markdown_it", ["check", "pages"])]
)
def test_a_missing_extra_is_named(package: str, arguments: list[str], tmp_path: Path) -> None:
    call = f"from kernel_pytorch.cli import main; main({['backend', *arguments]})"
    command = [sys.executable, "-c", f"import sys; sys.modules[{package!r}] = None; {call}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'kernel-pytorch[backend]'" in done.stderr
