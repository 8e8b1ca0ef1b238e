"""Numbers in prose: each is what its record says, of the kernel that is here now; anything else is found."""

import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tools.website import freshness
from tools.website.measured import check, check_file, duration, refresh, resolve
from tools.website.pages import renewed
from tools.website.plots import PLOTS, drawn, intact

from kernel_pytorch.documentation.op_support import lowering_digest
from kernel_pytorch.evidence import (
    Benchmark,
    Block,
    Checks,
    EvidenceError,
    Execution,
    Facts,
    Measurement,
    OpSupport,
    Quantiles,
    evidence_directory,
    listed_sums,
    named_evidence,
    sums,
    write_record,
    write_sums,
)
from kernel_pytorch.hardware_abstraction import backend
from kernel_pytorch.hardware_abstraction.source_digest import part_digest
from kernel_pytorch.ops.rms_norm import KERNEL_TORCH
from requirements import needs_executorch

CPU = Facts("Some CPU", "arm", "cpu", "neon", 8 << 30, 4)


def row(case: str, subject: str, median: float, **facts: float) -> Measurement:
    seconds = Quantiles(median * 0.9, median, median * 1.2)
    return Measurement(case, "forward", "float32", subject, seconds, 100, 8_000_000, 2 * 10**12, **facts)


RECORD = Benchmark(
    op="rms_norm",
    device=CPU,
    versions={"torch": "2.0", "triton": "3.0"},
    commit="0123456789abcdef",
    command="some command --record",
    recorded="2026-01-02T03:04:05Z",
    copy_bandwidth=3.5e12,
    sources={"torch": KERNEL_TORCH.source_digest},
    measurements=[
        row("small -> (1 | 2)", "kernel:torch", 1e-3, error=1e-8, budget=4e-8),
        row("small -> (1 | 2)", "baseline:slow", 3e-3),
        row("small -> (1 | 2)", "baseline:best", 2e-3),
        row("large", "kernel:torch", 1.0, peak_bytes=3 << 30),
        row("large", "baseline:best", 0.5),
    ],
)
RECORDS = {"some": RECORD}


@pytest.mark.parametrize(
    ("title", "text"),
    [
        ("time; case=small -> (1 | 2)", "1 ms"),
        ("time; case=small*; baseline=slow", "3 ms"),
        ("time; case=large; phase=forward; format=float32; kernel=torch", "1 s"),
        ("speedup; case=small*", "2.00x"),
        ("speedup; case=small*; over=slow", "3.00x"),
        ("speedup; case=large", "0.50x"),
        ("lowest speedup", "0.50x"),
        ("highest speedup", "2.00x"),
        ("rate; case=large", "2 TFLOP/s"),
        ("bandwidth; case=small*", "8 GB/s"),
        ("memory", "3.0 GiB"),
        ("error; case=small*", "25%"),
        ("noise; case=small*", "160.0 dB"),
        ("copy", "3,500 GB/s"),
    ],
)
def test_a_title_names_a_number(title: str, text: str) -> None:
    found = resolve("some", f"measured: {title}", RECORDS)
    assert found.text == text
    for part in ("Some CPU", "torch 2.0", "triton 3.0", "0123456789", "2026-01-02", "some command --record"):
        assert part in found.provenance


@pytest.mark.parametrize(
    ("record", "title", "error"),
    [
        ("other", "time; case=large", "no benchmark record 'other'; there are some"),
        ("some", "time", "matches 2 measurements"),
        ("some", "time; case=medium", "matches 0 measurements"),
        ("some", "time; shape=large", "the keys are case"),
        ("some", "beauty; case=large", "quantities are time"),
        ("some", "mean time", "quantities are time"),
        ("some", "speedup; case=large; over=slow", "no baseline 'slow'"),
        ("some", "error; case=large", "no error is recorded"),
    ],
)
def test_what_cannot_be_resolved_is_an_error(record: str, title: str, error: str) -> None:
    with pytest.raises(EvidenceError, match=error):
        resolve(record, f"measured: {title}", RECORDS)


def test_a_record_about_an_older_text_of_the_kernel_is_an_error() -> None:
    stale = msgspec.structs.replace(RECORD, sources={"torch": "another text"})
    with pytest.raises(EvidenceError, match=r"'torch' of some has changed since; .* anew: some command --record"):
        resolve("some", "measured: time; case=large", {"some": stale})


def test_an_older_number_names_its_commit_on_the_page(tmp_path: Path) -> None:
    commit, title = RECORD.commit[:7], "measured: time; case=large"
    stale = msgspec.structs.replace(RECORD, sources={"torch": "another text"})
    assert resolve("some", f"{title}; at={commit}", {"some": stale}).text == "1 s"
    for at, record, error in (
        (commit, RECORD, "is current; leave it out"),
        ("0badc0d", stale, "is of commit"),
        (commit[:3], stale, "is of commit"),
    ):
        with pytest.raises(EvidenceError, match=error):
            resolve("some", f"{title}; at={at}", {"some": record})
    (tmp_path / "some.json").touch()
    link = f'It takes [1 s](some.json "{title}; at={commit}").'
    page = tmp_path / "page.md"
    assert not list(check(f"{link} That was at commit `{commit}`.", page, {"some": stale}))
    assert "earlier commit" in str(list(check(link, page, {"some": stale})))


def test_a_record_of_a_whole_program_is_about_the_kernels_it_names() -> None:
    sources = {"rms_norm/torch": KERNEL_TORCH.source_digest}
    program = msgspec.structs.replace(RECORD, op="model", sources=sources)
    assert resolve("some", "measured: time; case=large", {"some": program}).text == "1 s"
    for name, error in (("rms_norm/torch", "has changed since"), ("rms_norm/gone", "is no longer in the table")):
        stale = msgspec.structs.replace(program, sources={**sources, name: "another text"})
        with pytest.raises(EvidenceError, match=f"'{name}' of some {error}"):
            resolve("some", "measured: time; case=large", {"some": stale})


def test_durations() -> None:
    assert [duration(x) for x in (12.34, 0.5, 2e-3, 3.456e-6, 7e-9)] == [
        "12.3 s",
        "500 ms",
        "2 ms",
        "3.46 µs",
        "7 ns",
    ]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    write_record(RECORD, tmp_path / "evidence" / "some.json")
    return tmp_path / "page.md"


LINK = '(evidence/some.json "measured: speedup; case=large")'
OVER_SLOW = '(evidence/some.json "measured: speedup; case=small*; over=slow")'


@pytest.mark.parametrize(
    "text",
    [
        "It is 2x faster.",
        "up to 40 %",
        "3.5 ms",
        "4,800 GB/s",
        "| a | b |\n|---|---|\n| 1.3x | 2 |",
        "90%",
        "# Twice as fast",
        "It is faster.",
        "a great speedup",
        f"[0.50x]{LINK} is measured.\n\nThe next paragraph is faster.",
        f"[0.50x]{LINK} is measured, 3x is not.",
        f"[0.51x]{LINK}",
        '[0.50x](evidence/gone.json "measured: speedup; case=large")',
        '[0.50x](evidence/some.json "measured: speedup; case=medium")',
    ],
)
def test_check_finds(text: str, page: Path) -> None:
    assert len(list(check(text, page, RECORDS))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "AVX on x86, case 16384x4096, sm_90, version 2.13",
        "`2x faster` in code",
        "```python\nlimit = 3  # a timeout of 600 s; the fastest wins\n```",
        "```text\ncausal  fastest  128\n```",
        "the 80 % quantile <!-- not a measurement: the definition -->",
        f"It is faster: [0.50x]{LINK}.",
        f"| a | b |\n|---|---|\n| faster | [0.50x]{LINK} |",
        f"[3.00x]{OVER_SLOW} over the slow one",
        f"[0.50x]{LINK} over the best rival. It is not compared with FlashAttention.",
        "A double buffer, two stages, three warps, half of the heads, blocks of 128 x 128 elements.",
        "Ten seconds, one hundred tokens, four ranks, a timeout of 600 s, 80 GB of memory.",
        "The second half of the time axis; twice the number of heads.",
        "![Bars: speed-up over bf16](plots/some.svg)",
        "<!-- it is 2x faster -->",
        "The H200 has 141 GiB. A timeout of 600 s ends it; it waits for 5 seconds.",
        "```{code-block} python\ntime = 3  # in ms\n```",
        "`recipe='2x'` and `x * 2x`",
        f"Over slow it is [3.00x]{OVER_SLOW}, and SDPA has no such mask.",
        '[0.50x][gain] faster\n\n[gain]: evidence/some.json "measured: speedup; case=large"',
    ],
)
def test_check_passes(text: str, page: Path) -> None:
    assert not list(check(text, page, RECORDS))


PLANTED = [
    # amounts
    "It runs at 2X the speed of SDPA.",
    "A 3× gain.",  # noqa: RUF001
    "Training is 2.5 x the baseline's rate.",
    "It saves forty percent of the step.",
    "It needs thirty-five per cent less memory.",
    "A call takes 3 milliseconds.",
    "A call takes five microseconds.",
    "Overhead is 800 nanoseconds.",
    "Latency fell to 12 msecs.",
    "A threefold gain.",
    "A 4-fold gain in speed.",
    "It uses 3 times less memory.",
    "It uses three times fewer kernels' launches.",
    "It decodes 95 tokens per second.",
    "It decodes 95 tok/s.",
    "It reads 3.1 TB/s.",
    "It reads 800 GB per second.",
    "It reaches 640 TFLOPS.",
    "It reaches 640 TFLOP/s.",
    "It gains ten percentage points.",
    "12 images/s on a phone.",
    # comparisons without an amount
    "It doubles throughput.",
    "FP8 nearly doubles the training throughput.",
    "It halves latency.",
    "Memory is halved.",
    "Throughput more than tripled.",
    "It cuts memory in half.",
    "It reduces the peak memory by a third.",
    "It outperformed every library.",
    "State-of-the-art kernels.",
    "Orders of magnitude ahead.",
    "It is blazingly fast.",
    "It speeds up training.",
    "As fast as cuDNN.",
    "It has higher throughput.",
    "It beats FlashAttention.",
    "A third of the time.\n\nIt takes a third of the time.",
    # places
    "![twice as fast as SDPA](picture.svg)",
    '![a picture](picture.svg "1.8x over SDPA")',
    "<pre>\n2x faster\n</pre>",
    "Text with <b>2x</b> in it.",
    '<p><img src="a.svg" alt="40 % faster"></p>',
    "```mermaid\ngraph LR; A -->|3x faster| B\n```",
    # a true number, and a rival that it is not over
    f"[3.00x]{OVER_SLOW} over FlashAttention",
    f"It is [3.00x]{OVER_SLOW} faster than the best library.",
    f"[3.00x]{OVER_SLOW} against cuDNN",
    f"[2.00x]{LINK.replace('large', 'small*')} over slow",
]


# Written after the patterns, to see what they miss: wordings that nobody had in mind.
UNSEEN = [
    "A step takes 3.2 seconds on the H200 instead of 5.",
    "Training takes 4 hours instead of 9.",
    "The kernel runs in 0.8 s.",
    "It finishes in half the time.",
    "Memory drops from 80 GB to 20 GB.",
    "It needs 20 GiB less.",
    "It needs only a tenth of the memory.",
    "Peak memory falls to 12 GiB.",
    "It sustains 700 teraflops.",
    "700 TFLOP per second.",
    "It gets 3.9 terabytes per second.",
    "Bandwidth: 900 GB/sec.",
    "12k tok/s.",
    "1200 tokens a second.",
    "FP8 gives a big speed boost.",
    "It runs twice as quickly.",
    "It significantly accelerates training.",
    "It boosts throughput considerably.",
    "Much lower latency than vLLM.",
    "It improves training speed by a wide margin.",
    "It easily surpasses FlashAttention.",
    "It is superior to cuDNN.",
    "It quadruples the tokens per second.",
    "Performance is doubled.",
    "Two-fold gain over torchao.",
    "> 3x faster than eager",
    "[3x faster than eager](other.md)",
    "<details><summary>2x faster</summary></details>",
    "```{note}\nIt is 2x faster.\n```",
    "```{figure} a.png\n:alt: twice as fast\n\nTwice as fast\n```",
    "`kp.attention` runs in `3 ms`.",
    f"[3.00x]{OVER_SLOW} faster than SDPA",
    f"[3.00x]{OVER_SLOW} as fast as SDPA",
    f"[3.00x]{OVER_SLOW} than torchao",
    f"Compared with FlashAttention it is [3.00x]{OVER_SLOW}.",
    f"| what | over bf16 |\n|---|---|\n| linear | [3.00x]{OVER_SLOW} |",
]


# A third set, after those patterns.
LATER = [
    "We measured a factor of three over SDPA.",
    "By a factor of 2.5 it leads SDPA.",
    "The kernel reaches nine tenths of the hardware's peak.",
    "A training step of 70B parameters fits in 40 GB.",
    "It halves the time to first token.",
    "Loading takes a mere 2 seconds.",
    "Nothing else comes close to its speed.",
    "Its performance is unmatched.",
    "It leaves FlashAttention in the dust.",
    "30 fps on a tablet.",
    "It decodes thirty frames each second.",
    "It cuts cost by half.",
    "Twice the tokens per second of llama.cpp.",
    "The speed doubles.",
    "It is more efficient than cuDNN.",
    "It has lower overhead than torch.compile.",
    "Near-zero overhead.",
    "It scales linearly to 512 GPUs.",
    "```{admonition} 2x faster\ntext\n```",
    "It takes $3$ ms.",
    "```text\nkp.attention   3 ms\nSDPA          90 ms\n```",
    "```\n2x faster than SDPA\n```",
    "```console\n$ kernel-pytorch bench attention\n3 ms, 20x over SDPA\n```",
    "```python\nkp.attention(q, k, v)  # 3 ms, SDPA takes 90 ms\n```",
    'Fast.[](x "2x faster")',
    "Inference costs one third of what vLLM needs: a third of the cost.",
    "Peak RAM is 1.2GB.",
    "Its throughput is twice that of torchao.",
    "Its latency is a third of ExecuTorch's.",
    "It easily outruns XNNPACK.",
    "It loads in under a second.",
    "A quarter of the size.",
    "SNR stays above 40 dB.",
    "Training throughput increases by more than half.",
    "Zero-cost abstraction.",
    "2.0 times",
    "five times as many tokens per second",
    "the lowest latency of all backends",
    f"[3.00x]{OVER_SLOW} the speed of xFormers.",
]


def test_planted_claims_are_caught(page: Path) -> None:
    missed = [text for text in [*PLANTED, *UNSEEN, *LATER] if not list(check(text, page, RECORDS))]
    assert len(PLANTED) == 47
    assert not missed


ATTENTION = msgspec.structs.replace(
    RECORD,
    op="attention",
    device=Facts("NVIDIA H200", "nvidia", "nvidia", "sm_90", 8 << 30, 132),
    measurements=[
        row("causal 32768 d128", "kernel:flash", 1e-3),
        row("causal 32768 d128", "kernel:triton", 2e-3),
        row("window-4k-d64", "kernel:triton", 4e-3),
        row("Llama block, 4 x 2048", "kernel:triton", 5e-3),
    ],
    sources={},
)
FLASH = '(evidence/some.json "measured: lowest time; case=causal*")'
WINDOW = '(evidence/some.json "measured: time; case=window*")'
BLOCK = '(evidence/some.json "measured: time; case=Llama*")'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"On an H100 it takes [1 ms]{FLASH}.", "'H100': the record is of nvidia NVIDIA H200"),
        (f"On an RTX 4090 it takes [1 ms]{FLASH}.", "'RTX 4090'"),
        (f"An AMD MI300X takes [1 ms]{FLASH}.", "'MI300X'"),
        (f"A phone takes [1 ms]{FLASH}.", "'phone'"),
        (f"| case | H100 |\n|---|---|\n| causal | [1 ms]{FLASH} |", "'H100'"),
        (f"The backward takes [1 ms]{FLASH}.", "'backward': the record's phase is 'forward'"),
        (f"With head dimension 64 it takes [1 ms]{FLASH}.", "'head dimension 64': the record's is 128"),
        (f"131,072 tokens take [1 ms]{FLASH}.", "'131,072 tokens': the record's case is 'causal 32768 d128'"),
        (f"A million tokens take [1 ms]{FLASH}.", "'1,048,576 tokens'"),
        (f"The Triton kernel takes [1 ms]{FLASH}.", "'triton': the record's kernel is 'flash'"),
        (f"In FP8 it takes [1 ms]{FLASH}.", "'FP8': the record is of attention"),
    ],
)
def test_a_true_number_under_other_conditions_is_found(text: str, error: str, page: Path) -> None:
    (problem,) = check(text, page, {"some": ATTENTION})
    assert problem.message.startswith(error)


@pytest.mark.parametrize(
    "text",
    [
        f"On an H200 with head dimension 128, 32,768 tokens take [1 ms]{FLASH} in the forward.",
        f"On an NVIDIA GPU, the H200, Flash takes [1 ms]{FLASH}.",
        f"Flash takes [1 ms]{FLASH}, Triton [2 ms]{FLASH.replace('lowest', 'highest')}.",
        f"It takes [1 ms]{FLASH}. On an H100 nothing is measured; nor on a phone.",
        f"4,096 tokens, or 4k tokens, take [4 ms]{WINDOW}.",
        f"8,192 tokens take [5 ms]{BLOCK}.",
        f"Of forward and backward, the forward takes [1 ms]{FLASH}.",
    ],
)
def test_a_true_number_under_its_conditions_passes(text: str, page: Path) -> None:
    assert not list(check(text, page, {"some": ATTENTION}))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.rst", "Title\n=====\n\nIt is 2x faster.\n"),
        ("a.py", 'def f():\n    """Make it fast.\n\n    It doubles throughput.\n    """\n'),
        ("a.py", '"""A kernel that is 30 % faster and takes 3 ms."""\n'),
        ("a.py", '"""Faster than SDPA."""\n'),
        ("a.ipynb", '{"cells": [{"cell_type": "markdown", "source": ["It is ", "2x faster."]}]}'),
        ("a.svg", "<svg><text>2x the speed</text></svg>"),
        ("a.svg", '<svg><text><tspan x="0">3</tspan><tspan>ms</tspan></text></svg>'),
        ("a.md", "<!-- Generated by something -->\n\n# API\n\nIt doubles throughput.\n"),
    ],
)
def test_claims_are_caught_in_every_kind_of_file(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert len(list(check_file(tmp_path / name, RECORDS))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.rst", "Title\n=====\n\nUse ``2x faster``::\n\n    2x faster\n\nText.\n"),
        ("a.py", '"""Take the fastest kernel within 5 % of the mean.\n\n>>> 1  # 2x faster\n1\n"""\n'),
        ("a.py", "x = 1  # 2x faster\n"),
        ("a.ipynb", '{"cells": [{"cell_type": "code", "source": "time = 2 * x  # 3 ms"}]}'),
        ("a.svg", "<svg><style>.a{width:50 %}</style><text>or the fastest measured here</text></svg>"),
        ("a.md", "<!-- Generated by something -->\n\n| a |\n|---|\n| 1.3x |\n"),
    ],
)
def test_honest_files_pass(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert not list(check_file(tmp_path / name, RECORDS))


def test_a_problem_names_its_line_and_the_right_number(page: Path) -> None:
    (problem,) = check(f"One\n\nTwo [3x]{LINK}", page, RECORDS)
    assert problem.line == 3
    assert "'0.50x' in the record" in problem.message


def test_refresh_writes_the_records_numbers_and_leaves_the_rest(page: Path) -> None:
    definition = '[a b]: evidence/some.json "measured: time; case=small -> (1 | 2)"\n'
    gone = '[x](evidence/gone.json "measured: time")'
    text = f"[?][a b] and [9x]{LINK}, {gone} [other][link]\n\n{definition}"
    assert refresh(text, RECORDS) == f"[1 ms][a b] and [0.50x]{LINK}, {gone} [other][link]\n\n{definition}"
    assert not list(check(refresh(f"[?][a b]\n\n{definition}", RECORDS), page, RECORDS))


def test_a_generated_region_that_nobody_makes_is_an_error() -> None:
    assert "| `rms_norm` |" in renewed("<!-- generated: support-matrix -->\nold\n<!-- end -->", None)
    with pytest.raises(ValueError, match=r"nonsense.*support-matrix"):
        renewed("<!-- generated: nonsense -->\n<!-- end -->", None)


# Plots


@pytest.mark.parametrize("path", PLOTS)
def test_a_plot_shows_its_records_numbers_in_the_readers_colours(path: str) -> None:
    records = named_evidence(evidence_directory())
    name, charts = PLOTS[path]
    svg = drawn(PLOTS[path], records)
    record = records[name]
    assert isinstance(record, Benchmark)
    assert record.commit[:10] in svg
    assert svg.count("currentColor") > 10
    assert "#010203" not in svg
    words = svg[svg.index("<desc>") : svg.index("</desc>")]
    assert sum(words.count(series) for chart in charts(record) for series in chart.series) >= 3
    assert drawn(PLOTS[path], records, svg) is svg, "the same data are not drawn again"
    root = Path(__file__).parents[2]
    if (
        f"matplotlib=={version('matplotlib')}" in (root / "constraints.txt").read_text()
    ):  # another draws other digits
        assert (root / path).read_text(encoding="utf-8") == svg, "edited, with digests that fit the edit"
    slower = [
        msgspec.structs.replace(row, seconds=Quantiles(1, 1 + place, 1 + place))
        for place, row in enumerate(record.measurements)
    ]
    assert drawn(PLOTS[path], {name: msgspec.structs.replace(record, measurements=slower)}, svg) is not svg


def test_an_edited_plot_is_noticed_and_drawn_anew() -> None:
    records = named_evidence(evidence_directory())
    plot = PLOTS["docs/plots/attention-sparse.svg"]
    svg = drawn(plot, records)
    assert intact(svg)
    start = svg.index("<desc>")
    number = re.compile(r"\d\.\d\dx").search(svg, start)
    assert number is not None
    forged = svg[: number.start()] + "9.99x" + svg[number.end() :]
    unsigned = svg[: svg.rindex("<!-- content")]
    for other in (forged, unsigned, svg + "<text>9x</text>\n", svg.replace("currentColor", "red", 1)):
        assert not intact(other)
        assert drawn(plot, records, other) == svg


def test_a_plot_without_its_record_says_so() -> None:
    assert "There is no record yet." in drawn(next(iter(PLOTS.values())), {})


# The age of records


def test_an_edited_file_beside_the_records_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "evidence"
    folder.mkdir(parents=True)
    (folder / "curves.png").write_bytes(b"picture")
    assert freshness._edited_files(tmp_path)[0].changed == ("curves.png",)
    write_sums(folder, sums(folder))
    assert freshness._edited_files(tmp_path) == []
    (folder / "curves.png").write_bytes(b"forged")
    (folder / "more.txt").touch()
    (age,) = freshness._edited_files(tmp_path)
    assert (age.state, age.changed) == ("broken", ("curves.png", "more.txt"))
    (folder / "curves.png").unlink()
    assert "curves.png" in freshness._edited_files(tmp_path)[0].changed


def test_an_edited_record_is_noticed_and_a_written_one_is_listed(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "evidence"
    for name in ("one", "two"):
        write_record(RECORD, folder / f"{name}.json")
    write_sums(folder, sums(folder))
    forged = (folder / "one.json").read_text().replace('"median": 0.001', '"median": 0.0005')
    (folder / "one.json").write_text(forged)
    assert freshness._edited_files(tmp_path)[0].changed == ("one.json",)
    write_record(msgspec.structs.replace(RECORD, commit="1" * 40), folder / "two.json")
    write_record(RECORD, folder / "three.json")
    assert freshness._edited_files(tmp_path)[0].changed == ("one.json",), "a new record hides no edited one"
    assert set(listed_sums(folder)) == {"one.json", "two.json", "three.json"}


def test_the_files_of_our_records_are_as_they_were_made() -> None:
    root = Path(__file__).parents[2]
    assert freshness._edited_files(root) == []
    assert (root / "benchmarks" / "evidence" / "SHA256SUMS").is_file()


@pytest.mark.parametrize(
    ("facts", "error"),
    [
        ({"seconds": Quantiles(2e-3, 1e-3, 3e-3)}, "quantiles are out of order"),
        ({"flops": 10**16}, "exceed the device's peak"),
        ({"error": 2e-8, "budget": 1e-8}, "error exceeds its budget"),
    ],
)
def test_a_measurement_that_cannot_be_is_found(facts: dict[str, Any], error: str) -> None:
    honest = msgspec.structs.replace(ATTENTION.measurements[0], flops=10**9)
    assert freshness.implausible(msgspec.structs.replace(ATTENTION, measurements=[honest])) == []
    record = msgspec.structs.replace(ATTENTION, measurements=[msgspec.structs.replace(honest, **facts)])
    (found,) = freshness.implausible(record)
    assert error in found
    assert freshness._age(Path(), "attention.x", record, 0).state == "broken"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with a record of its own, a page that shows it, and a block that needs a GPU."""
    kernel = tmp_path / "src" / "kernel_pytorch" / "ops" / "rms_norm" / "api.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("one\n")
    block = '<!--- skip: next if(not has_gpu, reason="needs a GPU") -->\n\n```python\n1\n```\n'
    (tmp_path / "docs").mkdir()
    link = '(../benchmarks/evidence/rms_norm.cpu.json "measured: time; case=large")'
    (tmp_path / "docs" / "page.md").write_text(f"[1 s]{link}\n\n{block}")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one")
    return tmp_path


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def states(root: Path, record: Benchmark) -> dict[str, str]:
    write_record(record, root / "benchmarks" / "evidence" / "rms_norm.cpu.json")
    return {age.record: age.state for age in freshness.ages(root)}


def test_the_age_of_a_record(project: Path) -> None:
    record = msgspec.structs.replace(RECORD, commit=git(project, "rev-parse", "HEAD"))
    gpu = "documentation on a GPU"
    assert states(project, record) == {"rms_norm.cpu": "current", gpu: "stale"}
    assert next(age.shown for age in freshness.ages(project)) == 1

    (project / "src" / "kernel_pytorch" / "ops" / "rms_norm" / "api.py").write_text("two\n")
    assert states(project, record)["rms_norm.cpu"] == "older"
    assert freshness.ages(project)[0].changed == ("ops/rms_norm/api.py",)
    assert states(project, msgspec.structs.replace(record, sources={"torch": "x"}))["rms_norm.cpu"] == "stale"
    assert states(project, msgspec.structs.replace(record, commit="0" * 40))["rms_norm.cpu"] == "unknown"

    another = Block("docs/page.md", 5, "0123456789abcdef")
    ran = Execution("documentation", CPU, {}, "", "", "2026-01-01", [another], {})
    write_record(ran, project / "benchmarks" / "evidence" / "documentation.gpu.json")
    assert states(project, record)[gpu] == "stale"
    (fence,) = freshness.fences((project / "docs" / "page.md").read_text())
    ran = msgspec.structs.replace(ran, passed=[Block("docs/page.md", 5, fence.digest)])
    write_record(ran, project / "benchmarks" / "evidence" / "documentation.gpu.json")
    assert gpu not in states(project, record)


def test_a_change_that_compiles_to_the_same_code_makes_no_record_older(project: Path) -> None:
    record = msgspec.structs.replace(RECORD, commit=git(project, "rev-parse", "HEAD"))
    folder = project / "src" / "kernel_pytorch" / "ops" / "rms_norm"
    (folder / "api.py").write_text('"""A docstring."""\n\none  # a comment\n')
    (folder / "kernel.cpp").write_text("int f() { return 1; }\n")
    git(project, "add", "-A")
    assert states(project, record)["rms_norm.cpu"] == "older", "a file that was not there"
    git(project, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "two")
    record = msgspec.structs.replace(RECORD, commit=git(project, "rev-parse", "HEAD"))
    (folder / "api.py").write_text("one\n")
    (folder / "kernel.cpp").write_text("// one\nint f() {\n  /* two */ return 1;\n}\n")
    assert states(project, record)["rms_norm.cpu"] == "current"
    (folder / "kernel.cpp").write_text("int f() { return 2; }\n")
    assert states(project, record)["rms_norm.cpu"] == "older"
    assert freshness.ages(project)[0].changed == ("ops/rms_norm/kernel.cpp",)


def test_the_command_has_a_table_data_and_an_exit_code(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(freshness, "checkout", lambda: project)
    states(project, msgspec.structs.replace(RECORD, commit=git(project, "rev-parse", "HEAD")))
    assert freshness.main([]) == 0  # the page's block has not run, which says nothing against a record
    assert freshness.main(["--strict"]) == 1
    assert "docs/page.md:5" in capsys.readouterr().out
    (project / "docs" / "page.md").write_text("nothing\n")
    assert freshness.main(["--strict", "--json"]) == 0
    (only,) = msgspec.json.decode(capsys.readouterr().out)
    assert only["record"] == "rms_norm.cpu"
    assert only["state"] == "current"


def test_a_record_of_parts_is_older_once_their_code_changes(project: Path) -> None:
    part = "hardware_abstraction/dispatch.py"
    record = msgspec.structs.replace(RECORD, sources={part: part_digest(part)}, commit="0" * 40)
    assert states(project, record)["rms_norm.cpu"] == "current", "the digest says so without the commit"
    record = msgspec.structs.replace(record, sources={part: "another"})
    assert states(project, record)["rms_norm.cpu"] == "older"
    assert freshness.ages(project)[0].changed == (part,)


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        ({"gone/": "x"}, "gone/ is not there"),
        ({"fp8/gone.py": "x"}, "fp8/gone.py is not there"),
        ({"gone": "x"}, "kernel gone is no longer in the table"),
        ({}, "names no code"),
    ],
)
def test_a_record_that_cannot_be_judged_fails_the_check(
    project: Path, monkeypatch: pytest.MonkeyPatch, sources: dict[str, str], why: str
) -> None:
    monkeypatch.setattr(freshness, "checkout", lambda: project)
    record = msgspec.structs.replace(RECORD, op="rms_norm", sources=sources)
    assert states(project, record)["rms_norm.cpu"] == "broken"
    assert why in freshness.ages(project)[0].changed[0]
    assert why in freshness.markdown(freshness.ages(project))
    assert freshness.main([]) == 1


def test_no_record_of_the_checkout_is_broken() -> None:
    broken = {age.record: age.changed for age in freshness.ages(Path(__file__).parents[2]) if age.state == "broken"}
    assert not broken


def test_the_age_of_a_table_of_operators(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("executorch", reason="the extra lowering is not installed")
    name = "op-support.cpu"
    path = project / "benchmarks" / "evidence" / f"{name}.json"

    def age(**facts: Any) -> freshness.Age:
        record = OpSupport("cpu", {}, {"lowering": lowering_digest(backend("cpu"))}, [])
        write_record(msgspec.structs.replace(record, **facts), path)
        return next(age for age in freshness.ages(project) if age.record == name)

    assert age().state == "current"
    assert age(backend="gone").state == "unknown"
    old = age(sources={"lowering": "another"})
    assert (old.state, old.changed) == ("older", ("the lowering of cpu",))  # no commit has the record

    source = project / "src" / "kernel_pytorch" / "ops" / "rms_norm" / "api.py"
    monkeypatch.setattr(freshness, "lowering_sources", lambda _: {"api": source})
    git(project, "add", "-A")
    git(project, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "the record")
    source.write_text("two\n")
    assert age(sources={"lowering": "another"}).changed == ("ops/rms_norm/api.py",)


@needs_executorch  # whose version is in a record's digest
def test_every_record_of_the_checkout_has_an_age() -> None:
    root = Path(__file__).parents[2]
    records = named_evidence(root / "benchmarks" / "evidence")
    wanted = {name for name, record in records.items() if isinstance(record, (Benchmark, Checks, OpSupport))}
    assert "op-support.cpu" in wanted
    assert wanted <= {age.record for age in freshness.ages(root)}


def test_what_records_measure_is_there() -> None:
    root = Path(__file__).parents[2]
    assert all(
        (root / "src" / "kernel_pytorch" / path).exists()
        for paths in freshness._MEASURES.values()
        for path in paths
    )
