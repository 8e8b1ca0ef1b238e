"""The report of parity runs: a self-contained HTML page, and the loss curves as a PNG."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any

import numpy as np

from kernel_pytorch import html_page
from kernel_pytorch.parity.model import size_named
from kernel_pytorch.parity.statistics import RELATIVE_LIMIT, Arm, Summary, Verdict, smoothed, summarize
from kernel_pytorch.parity.training import BASELINE, Results

__all__ = ["NO_PLOTS", "PICTURE", "draw", "duration", "mean_text", "page", "sentence", "write_report"]

NO_PLOTS = "no curves: matplotlib is not installed. Install kernel-pytorch[plots] and draw them with --from DIR"
PICTURE = "report.png"
_COLOURS = ("#d9730d", "#2f6fde", "#0f9d78", "#a4479b", "#b8860b", "#c0392b")
_GREY = "#4a5260"


def write_report(results: Results, folder: str | Path) -> tuple[Summary, list[Path], str]:
    """Write ``report.html`` and ``report.png``; return the summary, the files, and a note on anything left out."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    summary, files, picture, missing = summarize(results), [], folder / PICTURE, ""
    try:
        draw(results, summary, picture)
        files.append(picture)
    except ImportError:
        missing = NO_PLOTS
        picture.unlink(missing_ok=True)  # a picture of earlier results would not match the page
    text = folder / "report.html"
    text.write_text(page(results, summary, picture.read_bytes() if files else None), encoding="utf-8")
    return summary, [text, *files], missing


def duration(seconds: float | None) -> str:
    """Format a time with a fitting unit.

    Example:
        >>> duration(0.01234), duration(75.0), duration(None)
        ('12.3 ms', '75 s', '-')
    """
    if seconds is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def sentence(verdict: Verdict) -> str:
    """Return one verdict as a sentence."""
    if not verdict.passes:
        return f"{verdict.arm.name} does not pass: {verdict.reason}"
    gaps = " and ".join(f"{gap.relative:+.2%} {gap.measure}" for gap in verdict.gaps)
    inside = all(abs(gap.mean) <= gap.yardstick > 0 for gap in verdict.gaps)  # one seed has no spread
    yardstick = f"within the spread of the {BASELINE} seeds" if inside else f"where {RELATIVE_LIMIT:.2%} passes"
    return f"{verdict.arm.name} passes: loss {gaps}, {yardstick}"


# Curves


def draw(results: Results, summary: Summary, path: Path) -> None:
    """Draw loss by step, gap by step and loss by time as a PNG; raise ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 8.2), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.25, 1))
    by_step, gaps, by_time = (figure.add_subplot(cell) for cell in (grid[0, :], grid[1, 0], grid[1, 1]))
    arms = [(summary.baseline, _GREY)]
    arms += [(verdict.arm, _COLOURS[i % len(_COLOURS)]) for i, verdict in enumerate(summary.verdicts)]
    _draw_losses(by_step, results, summary, arms)
    _draw_gaps(gaps, summary)
    _draw_times(by_time, summary, arms)
    for axes in (by_step, gaps, by_time):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6e8eb", linewidth=0.7)
        axes.set_axisbelow(True)
    figure.suptitle(_title(summary), fontsize=12, fontweight="bold")
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110)


def _title(summary: Summary) -> str:
    settings = summary.settings
    mode = "compiled" if settings.compiled else "eager"
    return f"Training in 8 bits beside {BASELINE}: {settings.size}, {settings.device_name}, {mode}"


def _draw_losses(axes: Any, results: Results, summary: Summary, arms: list[tuple[Arm, str]]) -> None:
    for arm, colour in arms:
        runs = [losses for (name, _), losses in sorted(results.losses.items()) if name == arm.name]
        wide = 3.6 if arm is summary.baseline else 1.5  # a wide baseline stays visible under the other lines
        for losses in runs:  # including runs that did not finish, to show where they fail
            axes.plot(smoothed(losses, summary.window), color=colour, linewidth=0.8, alpha=0.45)
        if len(arm.curve):
            seeds = f"{len(arm.seeds)} seed{'s' if len(arm.seeds) != 1 else ''}"
            axes.plot(
                smoothed(arm.curve, summary.window), color=colour, linewidth=wide, label=f"{arm.name}, {seeds}"
            )
        if arm.failure is not None and arm.failure.failed_step is not None:
            axes.axvline(arm.failure.failed_step, color=colour, linestyle=":", label=str(arm.failure))
    axes.set(xlabel="step", ylabel="training loss", title=f"Loss, mean of the last {summary.window} steps")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


def _draw_gaps(axes: Any, summary: Summary) -> None:
    limits = [verdict.gaps[0].allowed for verdict in summary.verdicts if verdict.gaps]
    means = [
        smoothed(np.mean(list(verdict.matched.values()), axis=0), summary.window)
        if verdict.matched
        else np.zeros(1)
        for verdict in summary.verdicts
    ]
    axes.axhline(0, color=_GREY, linewidth=1)
    if limits:
        axes.axhspan(-limits[0], limits[0], color=_GREY, alpha=0.12, linewidth=0, label="passes at the end")
        reach = 1.5 * max(limits[0], *(float(np.abs(mean).max()) for mean in means))
        axes.set_ylim(-reach, reach)
    for i, verdict in enumerate(summary.verdicts):
        colour = _COLOURS[i % len(_COLOURS)]
        for matched in verdict.matched.values():
            axes.plot(smoothed(matched, summary.window), color=colour, linewidth=0.8, alpha=0.45)
        axes.plot(means[i], color=colour, linewidth=2)
    axes.set(xlabel="step", ylabel=f"loss less {BASELINE}'s", title="Gap on the same batches")
    if limits:
        axes.legend(frameon=False, loc="upper right")


def _draw_times(axes: Any, summary: Summary, arms: list[tuple[Arm, str]]) -> None:
    for arm, colour in arms:
        if arm.step is not None:
            seconds = np.arange(1, len(arm.curve) + 1) * arm.step.median
            axes.plot(seconds, smoothed(arm.curve, summary.window), color=colour, linewidth=2)
            if arm.seconds_to_loss is not None and summary.target is not None:
                axes.plot([arm.seconds_to_loss], [summary.target], "o", color=colour, markersize=7)
    if summary.target is not None:
        axes.axhline(summary.target, color=_GREY, linestyle="--", linewidth=1)
    axes.set(xlabel="seconds of warm steps", ylabel="training loss", title="Time to the loss (dashed)")


# Page

_STYLE = f"""{html_page.STYLE}
:root {{ color-scheme: light }} body {{ color: #20242a; background: #fff }}
p.verdict {{ border-left: .35rem solid #0f9d78; background: #f1faf7; padding: .6rem .9rem; margin: .6rem 0 }}
p.fails {{ border-color: #c0392b; background: #fdf3f2 }}
table {{ white-space: nowrap; font-size: .92rem }} th, td {{ text-align: right }}
th:first-child, td:first-child {{ text-align: left }} small {{ color: #5b6470 }}
img {{ max-width: 100%; height: auto }}
"""
"""The curves are drawn on white, so the page is light in every theme."""


def page(results: Results, summary: Summary, picture: bytes | None) -> str:
    """Return the report as one self-contained HTML file."""
    settings = summary.settings
    size = size_named(settings.size)
    if picture is None:
        curves = f"<p><small>{html.escape(NO_PLOTS[0].upper() + NO_PLOTS[1:])}.</small></p>"
    else:
        data = base64.b64encode(picture).decode()
        curves = f'<p><img src="data:image/png;base64,{data}" alt="Loss curves, gaps and time to the loss"></p>'
    verdicts = "\n".join(
        f'<p class="verdict{"" if verdict.passes else " fails"}">{html.escape(_capital(sentence(verdict)))}.</p>'
        for verdict in summary.verdicts
    )
    if summary.baseline.failure is not None:
        verdicts += f'\n<p class="verdict fails">{html.escape(str(summary.baseline.failure))}.</p>'
    mode = "compiled" if settings.compiled else "eager"
    body = (
        f"<h1>Training in FP8 and in {BASELINE}</h1>",
        f"<p>{size.parameters / 1e6:,.1f} million parameters, {settings.steps:,} steps of "
        f"{size.batch * size.length:,} tokens, on {html.escape(settings.device_name)}, {mode}, "
        f"torch {html.escape(settings.torch)}.</p>",
        verdicts,
        curves,
        "<h2>Loss and speed</h2>",
        html_page.table(_ARM_HEAD, _arm_rows(summary)),
        f"<h2>Gap to {BASELINE}</h2>",
        html_page.table(_GAP_HEAD, _gap_rows(summary)),
        "<h2>Every run</h2>",
        html_page.table(_RUN_HEAD, _run_rows(results, summary)),
        "<h2>How to read it</h2>",
        _method(summary),
    )
    return html_page.document(_title(summary), body, _STYLE)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def mean_text(values: dict[int, float]) -> str:
    """Format the mean over the seeds.

    Example:
        >>> mean_text({0: 2.0, 1: 3.0}), mean_text({})
        ('2.5000', '-')
    """
    return f"{np.mean(list(values.values())):.4f}" if values else "-"


_ARM_HEAD = ("arm", "training loss", "held-out loss", "held out, in bf16", "step", "20 to 80 %", "speed-up",
             "to the loss", "peak memory")  # fmt: skip


def _arm_rows(summary: Summary) -> list[tuple[str, ...]]:
    arms = [(summary.baseline, "")]
    arms += [(verdict.arm, f"{verdict.speedup:.2f}x" if verdict.speedup else "-") for verdict in summary.verdicts]
    rows: list[tuple[str, ...]] = []
    for arm, speedup in arms:
        band = f"{duration(arm.step.p20)} to {duration(arm.step.p80)}" if arm.step else "-"
        reached = (
            f"{duration(arm.seconds_to_loss)}, {arm.steps_to_loss} steps" if arm.steps_to_loss else "not reached"
        )
        memory = f"{arm.peak_bytes / 2**30:.2f} GiB" if arm.peak_bytes else "-"
        step = duration(arm.step.median) if arm.step else "-"
        losses = (mean_text(arm.training), mean_text(arm.held_out), mean_text(arm.held_out_bf16))
        rows.append((arm.name, *losses, step, band, speedup, reached, memory))
    return rows


_GAP_HEAD = ("recipe", "loss", "gap", "relative", f"{BASELINE} spread", "deviation", "passes up to", "by seed")


def _gap_rows(summary: Summary) -> list[tuple[str, ...]]:
    return [
        (
            verdict.arm.name,
            gap.measure,
            f"{gap.mean:+.4f}",
            f"{gap.relative:+.2%}",
            f"{gap.spread:.4f}",
            f"{gap.deviation:.4f}",
            f"{gap.allowed:.4f}",
            ", ".join(f"{value:+.4f}" for value in gap.by_seed.values()),
        )
        for verdict in summary.verdicts
        for gap in verdict.gaps
    ]


_RUN_HEAD = ("run", "steps", "last losses", "held-out loss", f"mean gap to {BASELINE}, all steps", "ended")


def _run_rows(results: Results, summary: Summary) -> list[tuple[str, ...]]:
    matched = {verdict.arm.name: verdict.matched for verdict in summary.verdicts}
    rows: list[tuple[str, ...]] = []
    for (arm, seed), losses in results.losses.items():
        run = results.finished.get((arm, seed))
        gap = matched.get(arm, {}).get(seed)
        if run is None:
            ended = "interrupted"
        else:
            ended = "complete" if run.failed_step is None else f"loss {run.failed_loss} at step {run.failed_step}"
            ended += f", {len(run.fell_back)} layers fell back" if run.fell_back else ""
        rows.append(
            (
                f"{arm}, seed {seed}",
                f"{len(losses):,}",
                f"{np.mean(losses[-summary.window :]):.4f}" if losses else "-",
                f"{run.held_out:.4f}" if run is not None and run.held_out is not None else "-",
                f"{gap.mean():+.4f}" if gap is not None else "-",
                ended,
            )
        )
    return rows


def _method(summary: Summary) -> str:
    target = "" if summary.target is None else f", here {summary.target:.4f}"
    return f"""<ul>
<li>All arms of a seed start from the same parameters and see the same batches in the same order; only the linear
layers of the blocks differ. Embedding, norms, attention and head are those of {BASELINE} everywhere. Parameters are
float32 under bfloat16 autocast; AdamW, warm-up, cosine decay, clipped gradients.</li>
<li>The training loss is the mean of the last {summary.window} steps, the held-out loss that of text which no run
trained on, the same for every run; <em>held out, in bf16</em> evaluates the trained parameters unconverted.</li>
<li>A recipe passes where the gap of its mean, in both losses, is at most the spread (largest less smallest) of the
held-out losses of the {BASELINE} seeds, or {RELATIVE_LIMIT:.2%} of the loss where that is
larger, and every loss is finite.</li>
<li>Step times leave out the first {summary.warmup} steps of each run and are those of the device. The time to the
loss is the number of steps until the smoothed mean curve is down to the final {BASELINE} loss plus
{RELATIVE_LIMIT:.2%}{target}, times the median step.</li>
<li>On a CPU the 8-bit arithmetic is exact and slow: losses are meaningful there, speed-ups are not.</li>
</ul>"""
