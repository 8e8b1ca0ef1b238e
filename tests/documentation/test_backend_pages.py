"""The pages of the backends: one set with one list of sections, made from records, and true."""

from __future__ import annotations

import csv
import difflib
import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_pytorch.documentation import op_support
from kernel_pytorch.documentation.backend_pages import PAGE_SET, read_notes, render, write_backend_pages
from kernel_pytorch.documentation.conformance import check_folder
from kernel_pytorch.documentation.declared_fields import declared_fields
from kernel_pytorch.documentation.op_support import COLUMNS, operator_rows, probe_backend, recorded, write_support
from kernel_pytorch.evidence import EvidenceError, OpSupport, Probed, evidence_directory
from kernel_pytorch.fp8.recipe import RECIPES as FP8_RECIPES
from kernel_pytorch.hardware_abstraction import Backend, backend
from kernel_pytorch.lowering import PartitionerOptions, lowering_of
from kernel_pytorch.lowering.recipes import RECIPES, QuantizationRecipe

DOCS = Path(__file__).parents[2] / "docs" / "backends"
OURS = ("cpu", "nvidia", "amd", "intel")


def sections(text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^## (.+)$", prose, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def rendered() -> dict[str, dict[str, str]]:
    return {name: render(backend(name)) for name in OURS}


def test_every_backend_has_the_same_pages_with_the_same_sections(rendered: dict[str, dict[str, str]]) -> None:
    def shape(name: str) -> dict[str, list[str]]:
        return {path.replace(name, "NAME"): sections(text) for path, text in rendered[name].items()}

    first = shape("cpu")
    assert len(first) == len(PAGE_SET) + 1
    assert first["NAME-overview.md"] == [
        *("Features", "Target Requirements", "Development Requirements", "Using"),
        *("Quantization", "Runtime Integration", "Reference"),
    ]
    assert all(first[path] for path in first if path.endswith(".md"))
    for name in OURS[1:]:
        assert shape(name) == first


@pytest.mark.parametrize("name", OURS)
def test_committed_pages_conform(name: str) -> None:
    result = check_folder(DOCS / name)
    assert result.findings == []
    shared = {"partitioner", "op-support.csv", "op-support", "tutorials", "guides"} if name != "cpu" else set()
    assert {row["role"] for row in result.pages if row["status"] == "shared"} == shared
    assert {row["status"] for row in result.pages if row["role"] not in shared} == {"present"}
    assert result.blocks["python"] == result.blocks["self_contained"] > 2


def test_no_two_pages_are_copies() -> None:
    """Where a backend's page would say what another's says, there is one page for both."""
    pages = [(path, path.read_text().splitlines()) for path in sorted(DOCS.rglob("*.md"))]
    for (first, ours), (second, theirs) in itertools.combinations(pages, 2):
        names = first.parts[-2], second.parts[-2]
        lines = [
            [line.replace(name, "NAME") for line in text] for name, text in zip(names, (ours, theirs), strict=True)
        ]
        assert difflib.SequenceMatcher(None, *lines).ratio() < 0.9, (first.name, second.name)


def test_pages_in_common_leave_those_of_the_backend_and_are_linked(tmp_path: Path) -> None:
    folder = tmp_path / "amd"
    for path, text in render(backend("amd"), shared="gpu").items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    assert names == {f"amd-{page}.md" for page in ("overview", "quantization", "troubleshooting", "arch-internals")}
    assert {row["status"] for row in check_folder(folder).pages} == {"present", "missing"}
    for path in ("gpu-partitioner.md", "gpu-op-support.md", "tutorials/gpu-tutorials.md", "guides/gpu-guides.md"):
        (tmp_path / "gpu" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "gpu" / path).write_text("# Page\n\nText.\n")
    status = {row["role"]: row["status"] for row in check_folder(folder).pages}
    assert status["partitioner"] == status["tutorials"] == "shared"
    assert status["op-support.csv"] == "missing"


def test_what_is_not_there_is_said(rendered: dict[str, dict[str, str]]) -> None:
    overview = rendered["amd"]["amd-overview.md"]
    assert "No `.pte`: ExecuTorch has no delegate of ours for this hardware" in overview
    assert "find_package" not in overview
    assert "Not measured" in rendered["amd"]["guides/amd-performance.md"]
    assert "NVIDIA H200" in rendered["nvidia"]["guides/nvidia-performance.md"]


def test_every_option_and_every_recipe_is_on_its_page(rendered: dict[str, dict[str, str]]) -> None:
    partitioner = rendered["cpu"]["cpu-partitioner.md"]
    for name in PartitionerOptions.__dataclass_fields__:
        (row,) = re.findall(rf"^\| `{name}` \| .+$", partitioner, flags=re.MULTILINE)
        assert len(row.split("|")[4].strip()) > 10, f"{name} has no docstring"
    quantization = rendered["cpu"]["cpu-quantization.md"]
    for recipe in RECIPES.values():
        cells = f"| `{recipe.name}` | {recipe.weight_bits} | per {recipe.weight_granularity} | symmetric |"
        assert cells in quantization
        assert f'recipe="{recipe.name}"' in quantization


@pytest.mark.parametrize("name", ["nvidia", "amd", "intel"])
def test_a_gpus_page_has_every_fp8_recipe_and_architecture(name: str, rendered: dict[str, dict[str, str]]) -> None:
    quantization = rendered[name][f"{name}-quantization.md"]
    for recipe in FP8_RECIPES:
        assert f"| `{recipe}` |" in quantization
    for arch in {device.arch for device in backend(name).catalogue}:
        assert f"| `{arch}` |" in quantization
        assert f"| `{arch}` |" in rendered[name][f"{name}-arch-internals.md"]
    assert "`scaled-mm`" in quantization or name != "nvidia"
    overview = rendered[name][f"{name}-overview.md"]
    assert "torch.export.save" in overview
    assert "a `.pt2` package of `kp.lower`" in overview
    assert "https://" in overview, "the vendor's documentation"


def test_every_field_of_a_recipe_is_explained(rendered: dict[str, dict[str, str]]) -> None:
    for field, _, _, note in declared_fields(QuantizationRecipe):
        assert len(note.split()) > 4, field
        assert note in rendered["cpu"]["cpu-quantization.md"]


def test_the_csv_has_the_standard_columns_and_what_was_probed(rendered: dict[str, dict[str, str]]) -> None:
    for name in OURS:
        rows = list(csv.reader(rendered[name]["op-support.csv"].splitlines()))
        assert tuple(rows[0]) == COLUMNS
        assert len(rows) > 2
        assert {len(row) for row in rows} == {4}
    cells = {row[0]: row[1:] for row in csv.reader(rendered["cpu"]["op-support.csv"].splitlines())}
    assert "float32" in cells["aten::scaled_dot_product_attention"][0]
    assert "int8-weight" in cells["aten::linear"][1]
    assert "aten::elu" not in cells  # refused; it is under the operators that are not taken
    assert "`aten::elu`" in rendered["cpu"]["cpu-op-support.md"].partition("## Not Taken")[2]


def test_notes_reach_their_pages_and_unknown_sections_are_refused(tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("## Overview\n\nFirst.\n\n## Guide\n\nLast.\n\n## Tutorial\n")
    assert read_notes(notes) == {"Overview": "First.", "Guide": "Last."}
    pages = render(replace(backend("intel"), notes=notes))
    assert "\nFirst.\n" in pages["intel-overview.md"]
    assert pages["guides/intel-performance.md"].endswith("\nLast.\n")
    notes.write_text("## Overwiew\n\nFirst.\n")
    with pytest.raises(ValueError, match="'Overwiew' is on no page"):
        read_notes(notes)


def test_other_files_are_kept_and_listed(tmp_path: Path) -> None:
    mine = tmp_path / "tutorials" / "mine.md"
    mine.parent.mkdir()
    mine.write_text("# My own\n\nText.\n")
    assert len(write_backend_pages(backend("amd"), tmp_path)) == len(PAGE_SET) + 1
    assert write_backend_pages(backend("amd"), tmp_path) == []
    assert mine.read_text() == "# My own\n\nText.\n"
    assert "- [My own](mine.md)" in (tmp_path / "tutorials" / "amd-tutorials.md").read_text()


# Probing


def with_results(results: list[Probed], folder: Path) -> Backend:
    record = replace(backend("cpu"), evidence=folder)
    write_support(record, OpSupport("cpu", {"torch": "2.0"}, {"lowering": "another text"}, results))
    return record


def test_rows_say_what_the_results_say(tmp_path: Path) -> None:
    results = [
        Probed("aten::a", "float32", delegate="KernelPyTorchBackend"),
        Probed("aten::a", "float16", reason="too small"),
        Probed("aten::a", "bfloat16", reason="too small"),
        Probed("aten::a", "float32", dynamic=True, reason="moves"),
        Probed("aten::a", "float32", variant="a mask", reason="no masks"),
        Probed("aten::a", "float32", variant="a scale", delegate="Ours"),
        Probed("aten::a", "float32", recipe="int8", delegate="Other"),
        Probed("aten::a", "float32", recipe="int4", reason="the recipe leaves it as it is"),
        Probed("aten::b", "float32", reason="no rule"),
    ]
    record = with_results(results, tmp_path)
    taken, untaken = operator_rows(record)
    assert (taken.formats, taken.recipes) == (("float32",), ("int8",))
    assert taken.constraints == (
        "int8 in Other",
        "not float16 or bfloat16: too small",
        "fixed shapes: moves",
        "not with a mask: no masks",
    )
    assert (untaken.formats, untaken.constraints) == ((), ("no rule",))
    assert "has changed since" in render(record)["cpu-op-support.md"]


def test_without_a_record_nothing_is_claimed(tmp_path: Path) -> None:
    record = replace(backend("cpu"), evidence=tmp_path)
    assert recorded(record) is None
    assert {row.formats for row in operator_rows(record)} == {("not probed yet",)}
    assert "Not probed yet" in render(record)["cpu-op-support.md"]


def test_the_committed_record_is_about_every_probe_of_the_cpu() -> None:
    support = recorded(replace(backend("cpu"), evidence=evidence_directory()))
    assert support is not None
    target = lowering_of("cpu")
    seen = {(one.operator, one.variant) for one in support.results}
    assert seen == {(one.operator, one.variant) for one in target.probes}, "run 'make probe'"
    assert {one.recipe for one in support.results} == {"", *target.recipes}


def test_probing_a_part_anew_gives_the_recorded_results() -> None:
    sample = ["aten::silu", "aten::elu"]
    support = recorded(replace(backend("cpu"), evidence=evidence_directory()))
    assert support is not None
    found = probe_backend(backend("cpu"), only=sample)
    assert found.results == [one for one in support.results if one.operator in sample], "run 'make probe'"


def test_a_wrong_number_is_an_error_and_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(op_support._LEAST, "float32", 1000.0)
    probe = next(one for one in lowering_of("cpu").probes if one.operator == "aten::gelu")
    with pytest.raises(EvidenceError, match=r"aten::gelu in float32 .* dB"):
        op_support._probed("cpu", probe, "float32")


def test_a_probe_of_another_operator_than_it_says_is_an_error() -> None:
    probe = replace(lowering_of("cpu").probes[-1], operator="aten::gelu")
    with pytest.raises(EvidenceError, match="has other operators: aten::pad"):
        op_support._probed("cpu", probe, "float32")


def test_unknown_operators_and_backends_without_lowering_are_refused() -> None:
    with pytest.raises(ValueError, match="no probe of these operators"):
        probe_backend(backend("cpu"), only=["aten::nothing"])
    with pytest.raises(ValueError, match=r"no \.pte path for this target yet"):
        probe_backend(backend("nvidia"))


def test_the_table_is_dated_by_what_decides_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "dated_backend"
    files = {
        "__init__.py": "",
        "lowering.py": "from dataclasses import replace\nfrom pathlib import Path\n\n"
        "from dated_backend.rules import RULE  # noqa: F401\nfrom kernel_pytorch.lowering.target import CPU\n\n"
        "LOWERING = replace(CPU, sources=Path(__file__).parent / 'native')\n",
        "rules.py": "RULE = 1\n",
        "measure.py": "TIME = 1\n",
        "native/delegate.cpp": "// one\n",
    }
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    record = replace(backend("cpu"), name="dated", catalogue=(), lowering="dated_backend.lowering:LOWERING")
    seen = [op_support.lowering_digest(record)]
    for name in ("measure.py", "rules.py", "native/delegate.cpp"):
        (package / name).write_text("# changed\n")
        seen.append(op_support.lowering_digest(record))
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3
