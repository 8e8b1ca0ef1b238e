"""``kernel-pytorch backend new``, ``docs`` and ``check``."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kernel_pytorch.documentation.conformance import Conformance, check_folder

__all__ = ["check", "docs", "new"]

_STYLES = {
    "present": "green",
    "section": "green",
    "renamed": "yellow",
    "shared": "green",
    "missing": "red",
    "empty": "red",
    "placeholder": "red",
    "error": "red",
    "warning": "yellow",
    "note": "dim",
}


def new(name: str, out: Path | None) -> None:
    from kernel_pytorch.documentation.scaffold import create_project

    console = Console()
    with console.status("making the project and rendering its pages"):
        folder = create_project(name, out)
    console.print(f"made {folder}: a backend that builds, is tested and documents itself", soft_wrap=True)
    console.print("\nNext:", style="bold")
    for line in (f"cd {folder}", "pip install -e '.[test]'", "python -m pytest", "less README.md"):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def docs(name: str, out: Path, *, probe: bool, only_check: bool) -> bool:
    """Render a backend's pages; return False if ``only_check`` finds one out of date."""
    from kernel_pytorch.documentation.backend_pages import render, write_backend_pages
    from kernel_pytorch.documentation.op_support import probe_backend, write_support
    from kernel_pytorch.hardware_abstraction.registry import backend

    console = Console()
    record = backend(name)
    if probe:
        with console.status("probing the operators") as status:
            support = probe_backend(record, tell=lambda text: status.update(f"probing operator {text}"))
        console.print(f"wrote {write_support(record, support)}", markup=False, soft_wrap=True)
    if only_check:
        pages = render(record, out).items()
        stale = [
            path
            for path, text in pages
            if not (out / path).is_file() or (out / path).read_text(encoding="utf-8") != text
        ]
        for name_of in stale:
            console.print(f"out of date: {out / name_of}", markup=False, soft_wrap=True)
        if stale:
            console.print(f"run: kernel-pytorch backend docs {name} --out {out}", markup=False, soft_wrap=True)
        else:
            console.print(f"the pages in {out} are up to date", markup=False, soft_wrap=True)
        return not stale
    written = write_backend_pages(record, out)
    for path in written:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    if not written:
        console.print(f"the pages in {out} were up to date", markup=False, soft_wrap=True)
    return True


def check(folder: Path, *, as_json: bool, strict: bool) -> bool:
    """Report on a folder of documentation; return False if it does not conform."""
    result = check_folder(folder)
    if as_json:
        print(json.dumps({**result.as_data(), "passes": result.passes(strict)}, indent=2))
    else:
        _show(result, folder, strict)
    return result.passes(strict)


def _show(result: Conformance, folder: Path, strict: bool) -> None:
    console = Console()
    pages = Table(
        "Page", "Level", "Status", "File", title=f"Documentation of {result.backend}", title_justify="left"
    )
    for row in result.pages:
        pages.add_row(row["role"], row["level"], Text(row["status"], style=_STYLES[row["status"]]), row["path"])
    console.print(pages)
    if result.sections:
        sections = Table("Section of the overview", "Status")
        for row in result.sections:
            sections.add_row(row["title"], Text(row["status"], style=_STYLES[row["status"]]))
        console.print(sections)
    count = result.blocks
    console.print(
        f"Python blocks: {count['python']}, of which {count['parse']} parse and {count['self_contained']} are "
        f"self-contained; {count['unlabelled']} blocks name no language"
    )
    for finding in result.findings:
        where = f"{finding.page}:{finding.line}" if finding.line else finding.page
        line = Text(f"{finding.severity:8}", style=_STYLES[finding.severity])
        console.print(line.append(f"{where}: {finding.message} [{finding.code}]", style="default"), soft_wrap=True)
    verdict = "conforms" if result.passes(strict) else "does not conform"
    told = ", ".join(f"{result.count(name)} {name}s" for name in ("error", "warning", "note"))
    console.print(f"{folder} {verdict}: {told}", style="green" if result.passes(strict) else "red", soft_wrap=True)
