"""Evidence: records are read, validated and written atomically, and determine the test status."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from tools.website.support_tables import support_markdown

from kernel_pytorch.documentation.support import Status, Support, support_table
from kernel_pytorch.evidence import (
    Benchmark,
    Checks,
    Compilation,
    ContractRun,
    EvidenceError,
    Facts,
    Interpretation,
    Measurement,
    PassedCases,
    Quantiles,
    Record,
    clean_commit,
    evidence_directory,
    load_evidence,
    read_record,
    schema,
    write_record,
)
from kernel_pytorch.hardware_abstraction import registry
from kernel_pytorch.ops.rms_norm import KERNEL_TORCH, KERNEL_TRITON

EVIDENCE = Path(__file__).parents[1] / "benchmarks" / "evidence"
COMMITTED = sorted(EVIDENCE.glob("*.json"))
MEASUREMENT = Measurement(
    case="16384x4096",
    phase="forward",
    format="bfloat16",
    subject="kernel:triton",
    seconds=Quantiles(1e-3, 2e-3, 3e-3),
    samples=10,
    traffic_bytes=100,
    flops=200,
    error=1e-3,
    budget=2e-3,
)
BENCHMARK = Benchmark(
    op="rms_norm",
    device=Facts("NVIDIA H200", "nvidia", "nvidia", "sm_90", 1 << 37, 132),
    versions={"torch": "2.13.0"},
    commit="0" * 40,
    command="kernel-pytorch bench rms_norm --record",
    recorded="2026-01-01T00:00:00Z",
    copy_bandwidth=4e12,
    sources={"triton": KERNEL_TRITON.source_digest, "torch": KERNEL_TORCH.source_digest},
    measurements=[MEASUREMENT],
)
CHECKS = Checks(
    op="rms_norm",
    versions={"torch": "2.13.0"},
    sources={"triton": KERNEL_TRITON.source_digest},
    compiled=[Compilation("triton", "_forward", "sm_90", "16384x4096", "bfloat16", 32, 16, 0)],
    interpreted=[Interpretation("triton", "float32", ["one-row", "odd-hidden"])],
)


def test_the_folder_of_our_records_is_the_checkouts() -> None:
    assert evidence_directory() == EVIDENCE
    assert COMMITTED, "no record is committed; make those that need no hardware with: make evidence"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_every_committed_record_is_valid_and_round_trips(path: Path, tmp_path: Path) -> None:
    jsonschema.validate(json.loads(path.read_text()), schema())
    record = read_record(path)
    write_record(record, tmp_path / path.name)
    assert read_record(tmp_path / path.name) == record
    # Fields that an older record lacks are null when it is written again; nothing else may change.
    assert _known(json.loads((tmp_path / path.name).read_text())) == _known(json.loads(path.read_text()))


def _known(data: Any) -> Any:
    """The data without its nulls."""
    if isinstance(data, dict):
        return {key: _known(value) for key, value in data.items() if value is not None}
    return [_known(value) for value in data] if isinstance(data, list) else data


@pytest.mark.parametrize("record", [BENCHMARK, CHECKS], ids=["benchmark", "checks"])
def test_records_round_trip_and_match_the_schema(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "record.json"
    write_record(record, path)
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(json.loads(path.read_text()), schema())
    assert read_record(path) == record
    assert path.read_bytes().endswith(b"}\n")


def _with(record: Record, **fields: object) -> bytes:
    return json.dumps({**json.loads(msgspec.json.encode(record)), **fields}).encode()


BAD = {
    "not-json": b"{",
    "empty": b"",
    "not-utf8": b'{"kind": "\xff"}',
    "cut-short": msgspec.json.encode(BENCHMARK)[:-20],
    "unknown-field": _with(BENCHMARK, speed=3),
    "unknown-kind": _with(BENCHMARK, kind="guess"),
    "no-kind": b'{"op": "rms_norm"}',
    "wrong-type": _with(BENCHMARK, copy_bandwidth="fast"),
    "missing-field": b'{"kind": "checks", "op": "rms_norm"}',
    "unknown-inner-field": _with(CHECKS, interpreted=[{"kernel": "a", "format": "b", "cases": [], "d": 1}]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_an_error_that_names_the_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.json"
    path.write_bytes(BAD[name])
    with pytest.raises(EvidenceError, match=f"{name}.json is not a valid record: .+"):
        read_record(path)
    with pytest.raises(EvidenceError, match=f"{name}.json"):
        load_evidence(tmp_path)


@pytest.mark.parametrize("name", ["unknown-field", "unknown-kind", "wrong-type", "missing-field"])
def test_the_schema_refuses_what_the_reader_refuses(name: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(BAD[name]), schema())


def test_a_missing_record_and_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"absent\.json"):
        read_record(tmp_path / "absent.json")
    assert load_evidence(tmp_path / "absent") == ()
    assert load_evidence(None) == ()


def test_load_evidence_reads_in_the_order_of_the_names(tmp_path: Path) -> None:
    write_record(CHECKS, tmp_path / "b.json")
    write_record(BENCHMARK, tmp_path / "a.json")
    (tmp_path / "notes.txt").write_text("not a record")
    assert load_evidence(tmp_path) == (BENCHMARK, CHECKS)


@pytest.mark.parametrize("failing", ["write_bytes", "replace"])
def test_a_failing_write_leaves_the_old_record_and_nothing_else(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    write_record(CHECKS, path)
    real = Path.write_bytes

    def fail(self: Path, *arguments: bytes) -> int:
        if failing == "write_bytes":
            real(self, b"half of ")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, failing, fail)
        with pytest.raises(OSError, match="no space left"):
            write_record(BENCHMARK, path)
    assert list(tmp_path.iterdir()) == [path]
    assert read_record(path) == CHECKS


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "inner").mkdir(parents=True)
    git(folder, "init", "--quiet")
    (folder / "inner" / "file").write_text("one")
    (folder / ".gitignore").write_text("ignored\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--no-gpg-sign", "--message", "one")
    return folder


def test_a_clean_checkout_has_a_commit(repository: Path) -> None:
    (repository / "ignored").write_text("build output")
    assert clean_commit(repository) == git(repository, "rev-parse", "HEAD")


@pytest.mark.parametrize("change", ["inner/file", "untracked"])
def test_a_changed_checkout_is_refused_with_the_changes(repository: Path, change: str) -> None:
    (repository / change).write_text("two")
    with pytest.raises(EvidenceError, match=f"uncommitted changes, commit them first:\n.*{change}"):
        clean_commit(repository)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="needs a git checkout of the project"):
        clean_commit(tmp_path)


def test_a_folder_inside_another_checkout_is_refused(repository: Path) -> None:
    """A package installed in some project's virtual environment must not record that project's commit."""
    with pytest.raises(EvidenceError, match=r"needs a git checkout of the project: .*inner is only a folder in"):
        clean_commit(repository / "inner")


def test_a_checkout_without_a_commit_is_refused(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    with pytest.raises(EvidenceError, match="needs a git checkout of the project"):
        clean_commit(tmp_path)


class Known:
    """The support table as it would be with the given records."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch

    def __call__(self, *records: Record) -> dict[tuple[str, str], Support]:
        for number, record in enumerate(records):
            write_record(record, self.folder / f"{number}.json")
        loaded = registry._load().backends
        for name in ("nvidia", "amd", "intel", "cpu"):
            self.monkeypatch.setitem(loaded, name, replace(loaded[name], evidence=self.folder))
        return {(row.backend, row.kernel): row for row in support_table() if row.op == "rms_norm"}


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Known:
    folder = tmp_path / "evidence"
    folder.mkdir()
    return Known(folder, monkeypatch)


def test_without_records_there_is_no_record(known: Known) -> None:
    table = known()
    assert {("nvidia", "triton"), ("amd", "triton"), ("intel", "triton"), ("cpu", "torch")} <= set(table)
    assert {row.status for row in table.values()} == {Status.NO_RECORD}


def test_a_benchmark_is_measured_on_its_backend_alone(known: Known) -> None:
    table = known(BENCHMARK)
    assert table["nvidia", "triton"].status is Status.MEASURED
    assert table["nvidia", "triton"].detail == "NVIDIA H200"
    assert table["amd", "triton"].status is Status.NO_RECORD


def test_a_kernel_that_was_there_but_not_timed_is_not_measured(known: Known) -> None:
    """A benchmark's sources name every kernel of the backend, those that refused its cases too."""
    assert "torch" in BENCHMARK.sources
    assert known(BENCHMARK)["nvidia", "torch"].status is Status.NO_RECORD


def test_a_larger_benchmark_measures_the_first_kernel_of_an_op(known: Known) -> None:
    digests = {f"rms_norm/{name}": digest for name, digest in BENCHMARK.sources.items()}
    table = known(msgspec.structs.replace(BENCHMARK, op="fp8", sources=digests))
    assert table["nvidia", "triton"].status is Status.MEASURED
    assert table["nvidia", "torch"].status is Status.NO_RECORD, "listed, and not what a model's calls use"


def test_a_contract_run_is_tested_on_its_backend_alone(known: Known) -> None:
    passed = [PassedCases("rms_norm/torch", "float32", ["odd-hidden"])]
    run = ContractRun(
        BENCHMARK.device, {}, "0", "command", "now", {"rms_norm/torch": KERNEL_TORCH.source_digest}, passed
    )
    table = known(run)
    assert table["nvidia", "torch"].status is Status.TESTED
    assert table["nvidia", "torch"].detail == "NVIDIA H200"
    assert table["cpu", "torch"].status is Status.NO_RECORD
    assert table["nvidia", "triton"].status is Status.NO_RECORD


def test_a_compiled_kernel_counts_for_the_backends_whose_architecture_it_is(known: Known) -> None:
    table = known(CHECKS)
    assert table["nvidia", "triton"].status is Status.COMPILED
    assert table["nvidia", "triton"].detail == "sm_90"
    # Not compiled for any of AMD's or Intel's architectures, but its cases pass in the interpreter.
    for vendor in ("amd", "intel"):
        assert table[vendor, "triton"].status is Status.INTERPRETED
        assert table[vendor, "triton"].detail == "float32: 2 cases"
    assert table["cpu", "torch"].status is Status.NO_RECORD


def test_the_best_status_counts(known: Known) -> None:
    assert known(CHECKS, BENCHMARK)["nvidia", "triton"].status is Status.MEASURED


@pytest.mark.parametrize("record", [BENCHMARK, CHECKS], ids=["benchmark", "checks"])
def test_a_record_of_another_kernel_source_does_not_count(known: Known, record: Record) -> None:
    stale = msgspec.structs.replace(record, sources={"triton": "0123456789abcdef"})
    assert {row.status for row in known(stale).values()} == {Status.NO_RECORD}


@pytest.mark.parametrize("record", [BENCHMARK, CHECKS], ids=["benchmark", "checks"])
def test_a_record_about_another_op_does_not_count(known: Known, record: Record) -> None:
    other = msgspec.structs.replace(record, op="attention")
    assert {row.status for row in known(other).values()} == {Status.NO_RECORD}


def test_the_generated_table_shows_statuses_and_where_they_come_from(known: Known) -> None:
    known(BENCHMARK, CHECKS)
    header, rule, *rows = support_markdown().splitlines()
    columns = [cell.strip() for cell in header.split("|")[1:-1]]
    assert rule.count("|---") == len(columns)
    cells = {tuple(cell.strip() for cell in row.split("|")[1:3]): row.split("|")[1:-1] for row in rows}
    row = cells["`rms_norm`", "`triton`"]
    assert row[columns.index("nvidia")].strip() == "**measured**: NVIDIA H200"
    assert row[columns.index("amd")].strip() == "**interpreted**: float32: 2 cases"
    assert row[columns.index("cpu")].strip() == "", "the CPU has no Triton kernel"
