"""The pages conform to the standard and are up to date with the records."""

from pathlib import Path

from acme_backend import BACKEND

from kernel_pytorch.documentation.backend_pages import render
from kernel_pytorch.documentation.conformance import check_folder

DOCS = Path(__file__).parents[1] / "docs"


def test_the_pages_conform() -> None:
    result = check_folder(DOCS)
    assert result.passes(strict=True), result.findings


def test_the_pages_are_up_to_date() -> None:
    stale = [name for name, text in render(BACKEND, DOCS).items() if (DOCS / name).read_text() != text]
    assert not stale, f"{stale}: run 'kernel-pytorch backend docs acme --out docs'"
