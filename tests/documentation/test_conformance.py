"""``kernel-pytorch backend check``: each defect that documentation of backends has been seen to have is found."""

from __future__ import annotations

import json
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
            {"acme-quantization.md": "# Q\n\n```python\nQuantizer(bits: int = 8) -> None\n```\n"},
            ("error", "acme-quantization.md", "python-syntax"),
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
