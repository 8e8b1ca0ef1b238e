"""Sphinx extension of the site: measured numbers, inline SVG, source pages, and navigation.

- A link whose title begins with ``measured:`` becomes a number with its provenance; the page's numbers are checked.
- SVG images are inlined, so that they follow the page's theme.
- A link to a file of the checkout leads to a page with its highlighted text; with a title that begins with a name,
  such as ``"attention in ..."``, to the definition of that name. A link to a folder becomes plain text, because the
  site has no page for it. A link whose text is a page's file name shows the page's title.
- Signatures in the API reference are highlighted as Python.
- ``<!-- evidence check -->`` becomes the table of all records with their age relative to the built code.
- The navigation is generated from ``site_map`` in conf.py; the build fails if a page is missing there.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

from kernel_pytorch.evidence import Benchmark, EvidenceError, named_evidence
from tools.website.freshness import ages, markdown
from tools.website.measured import PREFIX, check, resolve
from tools.website.pages import hand_written
from tools.website.text_files import is_signature, is_text, page_of, text_page

__all__ = ["setup"]

_LOG = logging.getLogger(__name__)
_AGES = "<!-- evidence check -->"


class MeasuredNumber(nodes.inline):  # type: ignore[misc]
    """A measured number; ``provenance`` is shown beside it."""


def _visit_measured(translator: HTML5Translator, node: MeasuredNumber) -> None:
    translator.body.append(f'<span class="measured" data-provenance="{html.escape(node["provenance"])}">')


def _depart_measured(translator: HTML5Translator, _: MeasuredNumber) -> None:
    translator.body.append("</span>")


class PagesOfACheckout(SphinxTransform):
    """Replaces links and images that work only in a checkout by their equivalents on the site."""

    default_priority = 100  # before Sphinx collects downloads and images

    def apply(self, **_: Any) -> None:
        for link in list(self.document.findall(addnodes.download_reference)):
            if str(link.get("reftitle", "")).startswith(PREFIX):
                self.measured(link)
            elif is_text(path := self.there(link["reftarget"])):
                inside = path.relative_to(Path(self.env.srcdir)).as_posix()
                place = f"#{link['reftitle'].partition(' in ')[0]}" if " in " in link.get("reftitle", "") else ""
                address = self.env.app.builder.get_relative_uri(self.env.docname, page_of(inside))
                link.replace_self(nodes.reference("", "", *link.children, refuri=address + place, text_file=inside))
        for link in list(self.document.findall(addnodes.pending_xref)):
            if link.get("refdomain") is None and self.there(link["reftarget"]).is_dir():
                link.replace_self(nodes.inline("", "", *link.children, classes=["folder"]))
            elif link.get("refdomain") == "doc" and link.astext().endswith(".md"):
                link["refexplicit"] = False  # MyST then uses the title of the target
                link[0].clear()
        if self.env.docname.startswith("docs/api/"):
            for block in self.document.findall(nodes.literal_block):
                if is_signature(block.astext()):
                    block["language"] = "python"
                    block["classes"].append("signature")
        for image in list(self.document.findall(nodes.image)):
            path = self.there(image["uri"])
            if path.suffix == ".svg" and path.is_file():
                self.env.note_dependency(str(path))
                image.replace_self(
                    nodes.raw("", _inlined(path.read_text("utf-8"), image.get("alt", "")), format="html")
                )

    def there(self, target: str) -> Path:
        return (Path(self.env.doc2path(self.env.docname)).parent / target.partition("#")[0]).resolve()

    def measured(self, link: addnodes.download_reference) -> None:
        path = self.there(link["reftarget"])
        self.env.note_dependency(str(path))
        records = _records(self.env.srcdir)
        try:
            provenance = resolve(path.stem, link["reftitle"], records).provenance
        except EvidenceError as error:
            _LOG.warning("%s", error, location=link)
            return
        record = records[path.stem]
        assert isinstance(record, Benchmark)  # resolve supports no other kind
        heading = f"{path.stem.partition('.')[0]} on {record.device.name}"
        target = addnodes.pending_xref(
            "",
            *link.children,
            refdomain="doc",
            reftarget="BENCHMARKS",
            reftargetid=re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"),
            refdoc=self.env.docname,
            reftype="myst",
            refexplicit=True,
        )
        link.replace_self(MeasuredNumber("", "", target, provenance=provenance))


def _records(root: Any) -> dict[str, Any]:
    return {**named_evidence(Path(root) / "benchmarks" / "evidence")}


def _inlined(svg: str, alt: str) -> str:
    """Return an SVG for inlining: without its own styles, and with the alternative text as its label."""
    svg = re.sub(r"<style>.*?</style>|<title>.*?</title>|<!--.*?-->", "", svg, flags=re.DOTALL)
    return svg.replace("<svg ", f'<svg aria-label="{html.escape(alt)}" ', 1)


def _on_source(app: Sphinx, docname: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(docname))
    if page in hand_written(Path(app.srcdir)):
        for problem in check(source[0], page, _records(app.srcdir)):
            _LOG.warning("%s", problem.message, location=(docname, problem.line))
    if _AGES in source[0]:
        source[0] = source[0].replace(_AGES, markdown(ages(Path(app.srcdir))))
    for caption, entries in _navigation(app, docname).items():
        options = f":caption: {caption}\n" if caption else ""
        source[0] += "\n```{toctree}\n:hidden:\n" + options + "\n" + "\n".join(entries) + "\n```\n"


def _navigation(app: Sphinx, docname: str) -> dict[str, list[str]]:
    """Return the tables of contents of a page: the site's for the first page, a backend's for its overview."""
    known = sorted(app.env.found_docs)
    if docname == app.config.root_doc:
        return {
            caption: [
                f"/{found}"
                for pattern in patterns
                for found in known
                if found != docname and _match(found, pattern)
            ]
            for caption, patterns in app.config.site_map.items()
        }
    if docname in app.config.below:
        patterns = app.config.below[docname]
        return {"": [f"/{found}" for pattern in patterns for found in known if _match(found, pattern)]}
    if docname.startswith("docs/backends/") and docname.endswith("-overview"):
        folder = docname.rpartition("/")[0] + "/"
        below = [f"/{found}" for found in known if found.startswith(folder) and found != docname]
        return {"": below} if below else {}
    return {}


def _match(docname: str, pattern: str) -> bool:
    return docname.count("/") == pattern.count("/") and fnmatchcase(docname, pattern)


def _on_read(app: Sphinx, _: nodes.document) -> None:
    if app.env.docname in app.config.wide_pages:
        app.env.metadata[app.env.docname]["hide-toc"] = ""  # the name that the furo theme reads


def _text_files(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield a page for each linked file."""
    linked = {
        link["text_file"]
        for docname in app.env.found_docs
        for link in app.env.get_doctree(docname).findall(nodes.reference)
        if "text_file" in link
    }
    for inside in sorted(linked):
        context = {"title": inside, "body": text_page(inside, Path(app.srcdir) / inside), "furo_hide_toc": True}
        yield page_of(inside), context, "page.html"


def _on_finish(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        first = app.builder.get_target_uri(app.config.root_doc)
        page = (
            f'<!doctype html><html lang="en"><title>{app.config.html_title}</title>'
            f'<link rel="icon" href="_static/favicon.svg"><meta http-equiv="refresh" content="0; url={first}">'
            f'<a href="{first}">{app.config.html_title}</a></html>\n'
        )
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("site_map", {}, "env", types=[dict])
    app.add_config_value("below", {}, "env", types=[dict])
    app.add_config_value("wide_pages", [], "env", types=[list])
    app.add_node(MeasuredNumber, html=(_visit_measured, _depart_measured))
    app.add_transform(PagesOfACheckout)
    app.connect("html-collect-pages", _text_files)
    app.connect("source-read", _on_source)
    app.connect("doctree-read", _on_read)
    app.connect("build-finished", _on_finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
