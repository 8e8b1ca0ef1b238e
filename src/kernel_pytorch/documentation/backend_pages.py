"""Generate a backend's pages from its records: the same pages with the same sections for every backend.

Hand-written text comes from the backend's notes file, with one ``##`` section for each of ``NOTES``.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

try:
    import jinja2
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "jinja2 renders the pages of a backend: pip install 'kernel-pytorch[backend]'", name="jinja2"
    ) from error

from kernel_pytorch.documentation.declared_fields import declared_fields
from kernel_pytorch.documentation.fp8_tables import architecture_rows, matmul_rows, matrix_rows, recipe_rows
from kernel_pytorch.documentation.op_support import (
    OperatorRow,
    csv_text,
    lowering_digest,
    operator_rows,
    recorded,
)
from kernel_pytorch.documentation.support import support_table
from kernel_pytorch.evidence import Benchmark, read_record
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.registry import ENTRY_POINT_GROUP, Backend

__all__ = ["NOTES", "PAGE_SET", "index_page", "measured_rows", "read_notes", "render", "write_backend_pages"]

TEMPLATES = Path(__file__).parent / "templates"
PAGE_SET = {
    "overview": "{name}-overview.md",
    "quantization": "{name}-quantization.md",
    "partitioner": "{name}-partitioner.md",
    "op-support": "{name}-op-support.md",
    "troubleshooting": "{name}-troubleshooting.md",
    "arch-internals": "{name}-arch-internals.md",
    "tutorials/tutorials": "tutorials/{name}-tutorials.md",
    "tutorials/first-model": "tutorials/{name}-first-model.md",
    "guides/guides": "guides/{name}-guides.md",
    "guides/performance": "guides/{name}-performance.md",
}
"""Template to page; ``op-support.csv`` is written with them."""
_SHARED = {
    "partitioner": "{shared}-partitioner.md",
    "op-support": "{shared}-op-support.md",
    "tutorials/tutorials": "tutorials/{shared}-tutorials.md",
    "guides/guides": "guides/{shared}-guides.md",
}
"""Pages that several backends of one kind share, in a folder next to their own."""
NOTES = (
    "Overview",
    "Features",
    "Target Requirements",
    "Development Requirements",
    "Quantization",
    "Partitioner",
    "Runtime Integration",
    "Troubleshooting",
    "Architecture",
    "Tutorial",
    "Guide",
)
_ONCE = ("build the mask",)
"""Prefixes of cases that time one-time work."""
_NO_SPEED = ("selection", "fp8-parity")
"""Ops whose records time no kernel beside a rival: the dispatcher, and a comparison of losses."""
_NO_PTE = "No `.pte` path for this target yet: the kernels run in eager and compiled PyTorch, not in ExecuTorch."
_PACKAGES = "Programs are `.pt2` packages for PyTorch's AOTInductor; there is no `.pte` path for this target."


def read_notes(path: Path | None) -> dict[str, str]:
    """Return a notes file by section; raise an error for a section that no page has."""
    if path is None:
        return {}
    if not path.is_file():
        raise FileNotFoundError(f"notes={path.name!r}: no such file")
    parts = re.split(r"^## (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = {title.strip(): text.strip() for title, text in zip(parts[1::2], parts[2::2], strict=True)}
    unknown = [title for title in found if title not in NOTES]
    if unknown:
        raise ValueError(f"{path.name}: section {unknown[0]!r} is on no page; use {', '.join(NOTES)}")
    return {title: text for title, text in found.items() if text}


def render(record: Backend, folder: Path | None = None, *, shared: str = "") -> dict[str, str]:
    """Return a backend's pages by their path in its folder.

    Args:
        record: any backend; it need not be registered.
        folder: the destination; its existing tutorials and guides are listed in the indexes.
        shared: the folder next to it with the pages that several backends share (partitioner, operators, tutorials
            and guides); the overview links to those.
    """
    facts = {**_facts(record), "shared": shared, "pages": _places(record.name, shared)}
    pages: dict[str, str] = {}
    # Indexes last, because they list the other pages.
    own = {
        name: path.format(name=record.name) for name, path in PAGE_SET.items() if not shared or not _is_shared(name)
    }
    for template in sorted(own, key=lambda name: name in ("tutorials/tutorials", "guides/guides")):
        path = own[template]
        depth = path.count("/")
        listed = _listed(path, pages, folder) if template in ("tutorials/tutorials", "guides/guides") else []
        places = {"root": "../" * (3 + depth), "docs": "../" * (2 + depth), "listed": listed}
        text = _templates().get_template(f"{template}.md.j2").render(facts, **places)
        pages[path] = f"{_header(record)}\n\n{_tidy(text)}"
    ordered = {path: pages[path] for path in own.values()}
    return ordered if shared else {**ordered, "op-support.csv": csv_text(operator_rows(record))}


def _is_shared(template: str) -> bool:
    return template in _SHARED or template.startswith(("tutorials/", "guides/"))


def _places(name: str, shared: str) -> dict[str, str]:
    """Return the link from the overview to each page."""
    places = {template: path.format(name=name) for template, path in PAGE_SET.items()}
    if shared:
        places |= {template: f"../{shared}/{path.format(shared=shared)}" for template, path in _SHARED.items()}
    return places


def write_backend_pages(record: Backend, folder: Path) -> list[Path]:
    """Write the pages that are out of date; other files in the folder are not touched."""
    written = []
    for name, text in render(record, folder).items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            written.append(path)
    return written


def index_page(records: tuple[Backend, ...]) -> str:
    """Return the page that lists the backends."""
    rows = [
        [
            f"[{record.name}]({record.name}/{record.name}-overview.md)",
            record.title,
            f"`.pte` through `{_lowering(record)['delegate']}`"
            if record.lowering
            else "`.pt2` through AOTInductor"
            if _packages(record)
            else "eager and compiled PyTorch",
        ]
        for record in records
    ]
    text = _templates().get_template("index.md.j2").render(rows=rows, names=[record.name for record in records])
    return _tidy(text)


def _header(record: Backend) -> str:
    return f"<!-- Generated by kernel-pytorch backend docs {record.name}; do not edit, write into the notes. -->"


@cache
def _templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown, not HTML
    )
    made.filters["code"] = lambda text: f"`{text}`"
    return made


def _tidy(text: str) -> str:
    """Collapse repeated empty lines outside of code blocks."""
    pieces = re.split(r"(^```.*?^```$)", text.strip(), flags=re.MULTILINE | re.DOTALL)
    tidied = [piece if piece.startswith("```") else re.sub(r"\n{3,}", "\n\n", piece) for piece in pieces]
    return "".join(tidied).strip() + "\n"


def _own(record: Backend) -> bool:
    return record.name in {"cpu", "nvidia", "amd", "intel"}


def _packages(record: Backend) -> bool:
    """Return whether ``kp.lower`` makes an AOTInductor package for the backend instead of a ``.pte``."""
    return _own(record) and record.lowering is None


def _listed(index: str, pages: dict[str, str], folder: Path | None) -> list[tuple[str, str]]:
    part = index.partition("/")[0]
    texts = {path: text for path, text in pages.items() if path.startswith(f"{part}/")}
    for path in sorted((folder / part).glob("*.md")) if folder is not None else ():
        texts.setdefault(f"{part}/{path.name}", path.read_text(encoding="utf-8"))
    texts.pop(index, None)
    return [(Path(path).stem, _title(text, path)) for path, text in texts.items()]


def _title(text: str, path: str) -> str:
    found = re.search(r"^# (.+)$", text, flags=re.MULTILINE)
    return found[1] if found else Path(path).stem


def _facts(record: Backend) -> dict[str, Any]:
    rows = operator_rows(record)
    taken = [row for row in rows if row.formats]
    known = [
        [f"`{row.op}`", f"`{row.kernel}`", row.status.value + (f": {row.detail}" if row.detail else "")]
        for row in support_table((record,))
    ]
    lowering = _lowering(record) if record.lowering else None
    return {
        "backend": {
            "name": record.name,
            "shown": _shown(record),
            "title": record.title.rstrip("."),
            "lowers": record.lowering is not None,
            "packages": _packages(record),
            "install_hint": record.install_hint,
        },
        "own": _own(record),
        "notes": read_notes(record.notes),
        "no_pte": _PACKAGES if _packages(record) else _NO_PTE,
        "no_recipe": "No recipe quantizes for this target yet." if record.lowering is None else "No recipe yet.",
        "install": _install(record),
        "python": "3.10 to 3.13",
        "kernels_known": known,
        "fp8": [row for row in known if row[0].startswith("`fp8_")],
        "devices": [_device_cells(device) for device in record.catalogue],
        "architectures": architecture_rows(record),
        "matrix_units": matrix_rows(record),
        "fp8_recipes": recipe_rows(),
        "fp8_products": matmul_rows(record),
        "example_device": record.catalogue[0].name if record.catalogue else "cpu",
        "kernel_rows": [
            [f"`{k.op}`", f"`{k.name}`", k.language, "yes" if k.backward else "no", f"`{k.module}`"]
            for k in record.kernels
        ],
        "lowering": lowering,
        "taken_sentence": _taken_sentence(record, taken),
        "taken_rows": [_operator_cells(row, record) for row in taken],
        "untaken_rows": [[f"`{row.operator}`", "; ".join(row.constraints)] for row in rows if not row.formats],
        "how_known": _how_known(record),
        "probed": record.lowering is not None and recorded(record) is not None,
        "measured": list(measured_rows(record)),
        "problems": _problems(lowering, _packages(record)),
        **({} if lowering is None else _tables(lowering, rows)),
    }


def _shown(record: Backend) -> str:
    """Return the backend's name in the vendor's spelling: the start of its title, or upper case if it is short."""
    first = record.title.partition(" ")[0]
    if first.lower() == record.name:
        return first
    return record.name.upper() if len(record.name) <= 3 else record.name.capitalize()


def _device_cells(device: Device) -> list[str]:
    memory = f"{device.memory_bytes / 2**30:.0f} GiB" if device.memory_bytes else "-"
    bandwidth = f"{device.rates.bandwidth / 1e12:.3g} TB/s" if device.rates else "-"
    return [f"`{device.name}`", f"`{device.arch}`", memory, bandwidth, device.interconnect or "-"]


def _operator_cells(row: OperatorRow, record: Backend) -> list[str]:
    cells = [f"`{row.operator}`", ", ".join(row.formats)]
    if record.lowering is not None:
        cells.append(", ".join(row.recipes) or "-")
    return [*cells, "; ".join(row.constraints) or "-"]


def _lowering(record: Backend) -> dict[str, Any]:
    from kernel_pytorch.lowering.target import lowering_from

    assert record.lowering is not None
    target = lowering_from(record.lowering)
    package = Path(str(sys.modules[record.lowering.partition(".")[0].partition(":")[0]].__file__)).parent
    return {
        "delegate": target.delegate,
        "native_name": target.native_name,
        "path": record.lowering,
        "sources": f"{package.name}/{target.sources.relative_to(package).as_posix()}",
        "bundled": target.bundled,
        "recipes": list(target.recipes.values()),
        "options": target.options,
        "options_name": target.options.__name__,
        "options_module": target.options.__module__,
        "partitioners": [type(one).__name__ for one in target.partitioners(target.options())],
    }


def _tables(lowering: dict[str, Any], rows: tuple[OperatorRow, ...]) -> dict[str, Any]:
    recipes = lowering["recipes"]
    from kernel_pytorch.lowering.recipes import QuantizationRecipe

    def weights(one: QuantizationRecipe) -> str:
        return f"{one.weight_bits} bits, {'symmetric' if one.weight_symmetric else 'asymmetric'}"

    def activations(one: QuantizationRecipe) -> str:
        return "float" if one.activations == "float" else f"{one.activation_bits} bits, {one.activations}"

    return {
        "option_rows": [
            [f"`{name}`", f"`{kind}`", f"`{default}`", note]
            for name, kind, default, note in declared_fields(lowering["options"])
        ],
        "recipe_fields": [
            [f"`{name}`", f"`{kind}`", note] for name, kind, _, note in declared_fields(QuantizationRecipe)
        ],
        "recipes_short": [
            [f"`{one.name}`", weights(one), activations(one), ", ".join(one.operators)] for one in recipes
        ],
        "recipes_long": [
            [
                f"`{one.name}`",
                str(one.weight_bits),
                f"per {one.weight_granularity}",
                "symmetric" if one.weight_symmetric else "asymmetric",
                str(one.activation_bits),
                one.activations,
                one.flow,
            ]
            for one in recipes
        ],
        "recipes_probed": [
            [
                f"`{one.name}`",
                ", ".join(one.operators),
                ", ".join(f"`{row.operator}`" for row in rows if one.name in row.recipes) or "not probed yet",
            ]
            for one in recipes
        ],
    }


def _install(record: Backend) -> str:
    if _own(record):
        return "pip install 'kernel-pytorch[lowering]'" if record.lowering else "pip install kernel-pytorch"
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=record.name):
        if entry.dist is not None:
            return f"pip install {entry.dist.name}"
    package = (record.lowering or record.name).partition(".")[0]
    return f"pip install {package.replace('_', '-')}"


def _taken_sentence(record: Backend, taken: list[OperatorRow]) -> str:
    if record.lowering is None:
        return ""
    if recorded(record) is None:
        return "Its operators are not probed yet."
    table = f"[the table]({record.name}-op-support.md)"
    return f"{len(taken)} of the operators that were probed run in it or beside it: see {table}."


def _how_known(record: Backend) -> str:
    if record.lowering is None:
        return (
            "An op is listed with a format if one of its kernels supports the op's first case in that format on a "
            "device of the catalogue. No kernel was run for this; the overview has the test status of each kernel."
        )
    found = recorded(record)
    if found is None:
        return (
            f"Not probed yet: `kernel-pytorch backend docs {record.name} --probe` lowers and runs each operator "
            "and makes these tables."
        )
    made = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    text = (
        "These tables are generated. Each operator was lowered in a model of its own, in each dtype, with each "
        "recipe and with a dynamic first dimension, then run and compared with eager PyTorch. It is supported if "
        f"no node of it was left to portable kernels and the results agreed. Made with {made}; "
        f"`kernel-pytorch backend docs {record.name} --probe` makes them again."
    )
    if found.sources.get("lowering") != lowering_digest(record):
        text += " The lowering's code has changed since: the tables are of an earlier version."
    return text


def measured_rows(record: Backend) -> Iterator[list[str]]:
    """Yield a row per benchmark of a backend's hardware: record, device, cases, range of the speed-up, date."""
    now = {(kernel.op, kernel.name): kernel.source_digest for kernel in record.kernels}
    for path in sorted(record.evidence.glob("*.json")) if record.evidence is not None else ():
        found = read_record(path)
        if not isinstance(found, Benchmark) or found.device.backend != record.name or found.op in _NO_SPEED:
            continue
        ratios = []
        # Skip rows about memory and about one-time work.
        timed = [row for row in found.measurements if row.peak_bytes is None and not row.case.startswith(_ONCE)]
        groups = {(row.case, row.format, row.phase) for row in timed}
        for group in groups:
            rows = [row for row in timed if (row.case, row.format, row.phase) == group]
            ours = [row.seconds.median for row in rows if row.subject.startswith("kernel:")]
            baselines = [row.seconds.median for row in rows if row.subject.startswith("baseline:")]
            if ours and baselines:
                ratios.append(min(baselines) / min(ours))
        ends = (min(ratios), max(ratios)) if ratios else ()
        span = " to ".join(dict.fromkeys(f"{ratio:.2f}x" for ratio in ends)) or "no baseline in the record"
        when = f"{found.recorded[:10]} at `{found.commit[:10]}`"
        changed = [name for name, digest in found.sources.items() if now.get((found.op, name), digest) != digest]
        if changed:
            when += f"; {', '.join(f'`{name}`' for name in changed)} changed since"
        if timed:
            yield [f"`{path.stem.partition('.')[0]}`", found.device.name, str(len(groups)), span, when]


def _problems(lowering: dict[str, Any] | None, packages: bool) -> list[list[str]]:
    general = [
        [
            "a device is missing in `kernel-pytorch doctor`",
            "torch does not see it: the report says what to install",
        ],
        ["`UnsupportedCallError`", "no kernel serves the call exactly; the message has each kernel's reason"],
    ]
    no_pte = ["`no .pte path for this target yet`", "ExecuTorch's programs cannot be made for this backend"]
    if packages:
        return [
            *general,
            no_pte,
            ["`torch sees no ... device here`", "a package is compiled on the device that it is for"],
            ["`was made for ..., and this is ...`", "lower the model again on a device of this architecture"],
            ["`input 0 is ...; it was lowered for ...`", "lower with `dynamic_shapes` for sizes that change"],
            ["`definition` in `package.report`", "no kernel could be packaged for the call; the reasons follow it"],
        ]
    if lowering is None:
        return [*general, no_pte]
    return [
        *general,
        [
            f"`Backend {lowering['delegate']} is not registered`",
            "the runtime does not know the delegate: load the program with `kp.load`, or link "
            f"`{lowering['native_name']}::backend`",
        ],
        ["`has no upper bound`", "memory is planned ahead: give `torch.export.Dim` a `max`"],
        ["a node in `report.left`", "no delegate took it; its reason is beside it"],
        ["`refused its inputs`", "the message names the input, what was given, and what it was lowered for"],
        ["`cmake failed`", "the message ends with the compiler's own; a C++17 compiler is needed"],
    ]
