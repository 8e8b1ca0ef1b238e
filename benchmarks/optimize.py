"""Benchmark kp.optimize on whole models against eager mode, torch.compile and common manual combinations.

Run it with ``python benchmarks/optimize.py``; add ``--record`` in a clean checkout to keep the result. kp.optimize
verifies every plan before it is timed: exact steps against a float64 budget, approximate ones in dB. The arms of a
model are then timed alternately once more, independently of the search. On a CPU the models are small versions of
architectures of transformers, and an ``nn.Transformer``; on a GPU they are a Llama-3-shaped training step of
2 x 4096 tokens, its prefill of 8k tokens, a Mistral-shaped prefill of 32k tokens with a window of 4096, ViT-L and a
Whisper encoder, in bfloat16.
Liger and torchao are used if they can be imported. A prefill computes only the logits of the last token, as
generation does, and may use steps of 15 dB, such as FP8. ``--small`` runs tiny versions to check the program itself.

``--state FILE`` keeps each finished model, so that a run can be split: ``--seconds 400`` starts no model after that
many seconds, and the next run continues with the missing ones; the exit status is 75 while models are missing.
Results of other code are measured again. The record is written after each model, and its command names the models. If
a model fails, the run continues with the next ones.
"""

from __future__ import annotations

import argparse
import gc
import math
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import kernel_pytorch as kp
from kernel_pytorch import benchmarking
from kernel_pytorch.benchmarking import UNFINISHED, Checkpoint
from kernel_pytorch.evidence import Measurement, Quantiles, clean_commit, versions, write_record
from kernel_pytorch.hardware_abstraction.rates import measure_rates
from kernel_pytorch.hardware_abstraction.source_digest import part_digest
from kernel_pytorch.hardware_abstraction.timing import BusyMachineError, quantiles, require_quiet
from kernel_pytorch.optimization import Context, Edits, Progress, Sites, registered_candidates
from kernel_pytorch.optimization.combinations import build
from kernel_pytorch.optimization.examples import examples_of
from kernel_pytorch.optimization.timing import Arm, alternate, saved_bytes
from kernel_pytorch.optimization.workload import Workload

SECONDS = 3.0
LIGER = ("liger-rms-norm", "liger-swiglu", "liger-rope")
COMPILE = {"baseline:torch.compile": ("compile",)}
TRAINING = {
    "baseline:Liger": (*LIGER, "liger-cross-entropy"),
    "baseline:Liger compiled": (*LIGER, "liger-cross-entropy", "compile"),
    "baseline:torchao float8 compiled": ("torchao-float8", "compile"),
}
PREFILL = {"baseline:Liger compiled": (*LIGER, "compile")}
MODES = {
    "baseline:torch.compile reduce-overhead": ("compile-reduce-overhead",),
    "baseline:torch.compile max-autotune": ("compile-max-autotune",),
}
"""Common manual combinations, as candidates. Those that do not match the model or the device are skipped."""


@dataclass(frozen=True)
class Case:
    """A model with inputs, and the goal of its optimisation."""

    name: str
    goal: str
    make: Callable[[torch.device], tuple[torch.nn.Module, Any]]
    budget: float = 120.0
    """Seconds for the search."""
    budget_db: float | None = None
    exclude: tuple[str, ...] = ()
    rivals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Baselines in addition to torch.compile."""


def text(
    kind: str,
    rows: int,
    tokens: int,
    *,
    labels: bool = False,
    head: str = "ForCausalLM",
    decoded: int = 0,
    **fields: Any,
) -> Any:
    """Return a transformers text model with random weights; ``decoded`` is the number of tokens for its decoder."""

    def make(device: torch.device) -> tuple[torch.nn.Module, Any]:
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**fields)
        dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
        with torch.device(device):
            model = getattr(transformers, f"{kind}{head}")(config).to(dtype)
        ids = torch.randint(config.vocab_size, (rows, tokens), device=device)
        prefill: dict[str, Any] = {"logits_to_keep": 1} if device.type != "cpu" else {"use_cache": False}
        if decoded:
            prefill["decoder_input_ids"] = torch.randint(config.vocab_size, (rows, decoded), device=device)
        return model.train(labels), {"input_ids": ids, **({"labels": ids} if labels else prefill)}

    return make


def pixels(kind: str, rows: int, size: int, **fields: Any) -> Any:
    """Return a transformers vision encoder with random weights."""

    def make(device: torch.device) -> tuple[torch.nn.Module, Any]:
        import transformers

        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
        model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**fields))
        return model.to(device, dtype).eval(), {
            "pixel_values": torch.randn(rows, 3, size, size, device=device, dtype=dtype)
        }

    return make


def speech(rows: int, *, decoded: int = 0, **fields: Any) -> Any:
    """Return Whisper with random weights; only its encoder if ``decoded``, the number of text tokens, is zero."""

    def make(device: torch.device) -> tuple[torch.nn.Module, Any]:
        import transformers

        torch.manual_seed(0)
        config = transformers.WhisperConfig(**fields)
        dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
        model = transformers.WhisperModel(config).to(device, dtype).eval()
        frames = 2 * config.max_source_positions
        inputs = {"input_features": torch.randn(rows, config.num_mel_bins, frames, device=device, dtype=dtype)}
        if not decoded:
            return model.encoder, inputs
        inputs["decoder_input_ids"] = torch.randint(config.vocab_size, (rows, decoded), device=device)
        return model, {**inputs, "use_cache": False}

    return make


def plain_transformer(rows: int, tokens: int, width: int, inner: int, layers: int, heads: int) -> Any:
    """Return PyTorch's ``nn.Transformer`` with random weights."""

    def make(device: torch.device) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        model = torch.nn.Transformer(width, heads, layers, layers, inner, batch_first=True, device=device).eval()
        source, target = (torch.randn(rows, length, width, device=device) for length in (tokens, tokens // 2))
        return model, (source, target)

    return make


def decoder(
    width: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary, **more,
    }  # fmt: skip


def large_cases(small: bool) -> list[Case]:
    """Return the cases for GPUs."""
    many = 128 if small else 1  # tokens and widths are divided by this
    shape = (32, 64, 1, 4, 2) if small else (4096, 14336, 4, 32, 8)
    llama = decoder(*shape, 64 if small else 128256, max_position_embeddings=8192)
    window = decoder(
        *shape, 64 if small else 32000, max_position_embeddings=32768, sliding_window=4096 // many, head_dim=None
    )
    heads, layers, width = (4, 1, 32) if small else (20, 32, 1280)
    whisper = {
        "d_model": width, "encoder_layers": layers, "encoder_attention_heads": heads, "encoder_ffn_dim": 4 * width,
        "decoder_layers": 1, "decoder_attention_heads": heads, "max_source_positions": 16 if small else 1500,
    }  # fmt: skip
    heads, layers, width = (4, 1, 32) if small else (16, 24, 1024)
    image = {
        "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "image_size": 32 if small else 224,
    }  # fmt: skip
    quick = ("compile-max-autotune", "compile-reduce-overhead")
    return [
        Case(
            "llama step 2x4096", "training", text("Llama", 2, 4096 // many, labels=True, **llama), 240.0,
            exclude=quick, rivals=TRAINING,
        ),
        Case(
            "llama prefill 8192", "latency", text("Llama", 1, 8192 // many, **llama), 120.0, 15.0, quick, PREFILL
        ),
        Case(
            "mistral prefill 32768 window 4096", "latency", text("Mistral", 1, 32768 // many, **window), 120.0, 15.0,
            quick, PREFILL,
        ),
        Case(
            "vit-l", "latency", pixels("ViT", 2 if small else 32, image["image_size"], **image), 240.0, rivals=MODES
        ),
        Case("whisper encoder", "latency", speech(1, **whisper), 240.0, rivals=MODES),
    ]  # fmt: skip


def small_cases(small: bool) -> list[Case]:
    """Return the cases for CPUs: two layers of each architecture, so that compilation takes seconds."""
    width, layers, tokens, size = (32, 1, 16, 32) if small else (512, 2, 256, 224)
    common = decoder(width, 3 * width, layers, 8, 4, 64 if small else 8192)
    plain = {key: value for key, value in common.items() if key != "num_key_value_heads"}
    image = {key: value for key, value in plain.items() if key != "vocab_size"}
    whisper = {
        "d_model": width, "encoder_layers": layers, "decoder_layers": layers, "encoder_attention_heads": 8,
        "decoder_attention_heads": 8, "encoder_ffn_dim": 3 * width, "decoder_ffn_dim": 3 * width,
        "max_source_positions": tokens, "vocab_size": common["vocab_size"], "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1, "decoded": tokens // 4,
    }  # fmt: skip
    gpt2 = {"n_embd": width, "n_layer": layers, "n_head": 8, "vocab_size": common["vocab_size"]}
    t5 = {
        "d_model": width, "d_ff": 3 * width, "num_layers": layers, "num_heads": 8, "vocab_size": common["vocab_size"],
        "decoded": tokens // 4,
    }  # fmt: skip
    modernbert = {**plain, "pad_token_id": 0, "global_attn_every_n_layers": 2}
    convnext = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2} if small else {"depths": [1, 1, 3, 1]}
    resnet = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]} if small else {}
    cases = [
        Case("llama", "latency", text("Llama", 1, tokens, **common)),
        Case("qwen3", "latency", text("Qwen3", 1, tokens, **common)),
        Case("gemma", "latency", text("Gemma", 1, tokens, **common)),
        Case("mistral", "latency", text("Mistral", 1, tokens, sliding_window=tokens // 4, **common)),
        Case("mixtral", "latency", text("Mixtral", 1, tokens, num_local_experts=4, **common)),
        Case("gpt2", "latency", text("GPT2", 1, tokens, head="LMHeadModel", **gpt2)),
        Case("bert", "latency", text("Bert", 2, tokens, head="ForMaskedLM", **plain)),
        Case("modernbert", "latency", text("ModernBert", 2, tokens, head="ForMaskedLM", **modernbert)),
        Case("t5", "latency", text("T5", 2, tokens, head="ForConditionalGeneration", **t5)),
        Case("vit", "latency", pixels("ViT", 2, size, image_size=size, **image)),
        Case("dinov2", "latency", pixels("Dinov2", 2, size, image_size=size, patch_size=16, **image)),
        Case("whisper", "latency", speech(1, **whisper)),
        Case("convnext", "latency", pixels("ConvNext", 2, size, **convnext)),
        Case("resnet-50", "latency", pixels("ResNet", 2, size, **resnet)),
        Case("nn.Transformer", "latency", plain_transformer(2, tokens, width, 3 * width, layers, 8)),
        Case("llama step", "training", text("Llama", 2, tokens, labels=True, **common)),
    ]
    long = ("resnet-50", "llama step")  # its compilation takes twice as long
    return [replace(case, budget=80.0 if case.name in long else 40.0) for case in cases]


def rivals(model: torch.nn.Module, case: Case, device: torch.device, exclude: tuple[str, ...]) -> dict[str, Edits]:
    """Return the edits of torch.compile and of each available combination, not applied; print a line for others."""
    known = {candidate.name: candidate for candidate in registered_candidates()}
    wanted = {**COMPILE, **case.rivals}
    made = {}
    for name, steps in wanted.items():
        if set(steps) & set(exclude):
            continue
        sites = {step: known[step].match(model, Context(case.goal, device, ())) for step in steps}
        missing = [str(reason) for reason in sites.values() if not isinstance(reason, Sites)]
        if missing:
            print(f"{name}: left out: {missing[0]}", flush=True)
            continue
        edits = build(model, [(known[step], found.names) for step, found in sites.items()])  # type: ignore[union-attr]
        edits.undo()
        made[name] = edits
    return made


def only(arms: dict[str, Edits], edits: Edits | None) -> None:
    """Switch to one arm."""
    for other in arms.values():
        other.undo()
    if edits is not None:
        edits.redo()


def measure(
    case: Case, device: torch.device, budget: float | None, exclude: tuple[str, ...], *, quiet: bool = False
) -> list[Measurement]:
    """Optimise one model, and time eager, torch.compile, the rivals and the result alternately.

    With ``quiet``, raise an error if the machine is too noisy for kp.optimize to decide.
    """
    model, inputs = case.make(device)
    started = time.perf_counter()

    def tell(now: Progress) -> None:
        print(f"  {time.perf_counter() - started:5.0f} s  best {now.best:.2f}x  {now.trying}", flush=True)

    best = kp.optimize(
        model, inputs, case.goal, budget=budget or case.budget, budget_db=case.budget_db,
        exclude=(*exclude, *case.exclude), resume=False, progress=tell,
    )  # fmt: skip
    spent = time.perf_counter() - started
    print(best.report, flush=True)
    plan, noise = best.plan, best.report.noise
    if quiet and any("too noisy" in note for note in best.report.notes):
        raise BusyMachineError(f"{case.name}: {best.report.notes[-1]}; finished models are kept with --state")
    (example,) = examples_of(inputs)
    workload = Workload(model, case.goal == "training")
    found = best.revert.edits
    best.revert()
    arms = {"baseline:eager": Edits(), **rivals(model, case, device, exclude), "kernel:plan": found}
    losses: dict[str, float] = {}
    rows = []
    with workload.mode(), workload.kept():
        for name, edits in list(arms.items()):
            try:
                only(arms, edits)
                result = workload.step(example)
                is_loss = isinstance(result, torch.Tensor) and result.numel() == 1
                losses[name] = float(result.detach()) if is_loss else math.nan
            except Exception as error:  # continue if a rival fails
                print(f"{name}: left out: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
                only(arms, None)
                del arms[name]
        if gone := {"baseline:eager", "kernel:plan"} - arms.keys():
            raise RuntimeError(f"{case.name}: {', '.join(sorted(gone))} failed, so there is nothing to compare")
        timed = [
            Arm(name, lambda edits=edits: only(arms, edits), lambda: workload.step(example))
            for name, edits in arms.items()
        ]
        samples = alternate(timed, device, SECONDS)
        for arm, times in zip(timed, samples, strict=True):
            arm.enter()
            workload.step(example)
            peak = saved_bytes(lambda: workload.step(example), device)
            p20, median, p80 = quantiles(times)
            ours = arm.name == "kernel:plan"
            worst = max((step.error or 0.0 for step in plan.steps), default=0.0)
            rows.append(
                Measurement(
                    case=case.name,
                    phase="training" if case.goal == "training" else "forward",
                    format=str(next(model.parameters()).dtype).removeprefix("torch."),
                    subject=arm.name,
                    seconds=Quantiles(p20, median, p80),
                    samples=len(times),
                    traffic_bytes=0,
                    flops=0,
                    error=worst if ours else None,
                    budget=1.0 if ours else None,
                    peak_bytes=peak if case.goal == "training" or device.type != "cpu" else None,
                )
            )
        only(arms, None)
    steps = " + ".join(step.candidate for step in plan.steps) or "left as it is"
    print(f"{case.name}: {steps}; found in {spent:.0f} s; noise {noise:.1%}")
    print(table(rows, losses), flush=True)
    return rows


def table(rows: list[Measurement], losses: dict[str, float] | None = None) -> str:
    """Return a table with milliseconds, time relative to the plan's, peak memory and loss of each arm."""
    lines = [f"{'case':34} {'arm':34} {'ms':>9} {'over plan':>9} {'GiB':>7} {'loss':>9}"]
    plans = {row.case: row.seconds.median for row in rows if row.subject == "kernel:plan"}
    for row in rows:
        memory = f"{row.peak_bytes / 2**30:7.2f}" if row.peak_bytes is not None else " " * 7
        loss = (losses or {}).get(row.subject, math.nan)
        shown = "" if math.isnan(loss) else f"{loss:9.4g}"
        ratio = row.seconds.median / plans[row.case] if row.case in plans else math.nan
        lines.append(
            f"{row.case:34} {row.subject:34} {row.seconds.median * 1e3:9.2f} {ratio:8.2f}x {memory} {shown}".rstrip()
        )
    return "\n".join(lines)


def command(arguments: argparse.Namespace, done: Iterable[str]) -> str:
    """Return the command that repeats the record in one run; ``done`` are its models if not all were measured."""
    words = ["python", "benchmarks/optimize.py", "--record"]
    for name in ("device", "models", "budget"):
        if getattr(arguments, name) is not None:
            words += [f"--{name}", str(getattr(arguments, name))]
    for name, values in (("only", done or arguments.only), ("exclude", arguments.exclude)):
        words += [word for value in values or () for word in (f"--{name}", value)]
    return shlex.join(words)


def parsed() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None, help="a torch device; the best one when left out")
    parser.add_argument("--only", action="append", help="cases whose name contains this; may be repeated")
    parser.add_argument("--models", choices=("small", "large"), help="which list; by the device when left out")
    parser.add_argument("--budget", type=float, help="seconds of each search; set for each case when left out")
    parser.add_argument("--exclude", action="append", default=[], help="a candidate to leave out")
    parser.add_argument("--small", action="store_true", help="tiny models, to check the program")
    parser.add_argument("--state", type=Path, help="keep finished models in this file, and go on where it ends")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no model after so many seconds")
    parser.add_argument("--record", action="store_true", help="keep the result as evidence")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "evidence", help="folder for the record"
    )
    return parser, parser.parse_args()


def cases(models: str, small: bool, wanted: Iterable[str], parser: argparse.ArgumentParser) -> list[Case]:
    every = small_cases(small) if models == "small" else large_cases(small)
    chosen = [case for case in every if any(part in case.name for part in wanted)]
    if not chosen:
        parser.error(f"--only {list(wanted)}: use parts of {', '.join(case.name for case in every)}")
    return chosen


def main() -> None:
    parser, arguments = parsed()
    if arguments.record and arguments.small:
        parser.error("--record with --small: tiny models are not worth a record")
    commit = clean_commit(benchmarking.checkout()) if arguments.record else ""
    where = kp.device(arguments.device)
    device = torch.device(where.torch_device or "cpu")
    models = arguments.models or ("small" if device.type == "cpu" else "large")
    chosen = cases(models, arguments.small, arguments.only or [""], parser)
    key = (part_digest("optimization/"), where.name, versions(), arguments.small, arguments.budget, commit)
    done = Checkpoint(arguments.state, key, Measurement)
    bandwidth = measure_rates(where).bandwidth if arguments.record else None
    failures = []

    def keep() -> list[Measurement]:
        names = [case.name for case in chosen if case.name in done.rows]
        rows = [row for name in names for row in done.rows[name]]
        if arguments.record and rows:
            record = benchmarking.record(
                "optimize", where, (), rows, command=command(arguments, names if len(names) < len(chosen) else ()),
                commit=commit, copy_bandwidth=bandwidth, parts=("optimization/",),
            )  # fmt: skip
            write_record(record, arguments.out / benchmarking.record_name("optimize", where))
        return rows

    started = time.perf_counter()
    for case in chosen:
        if case.name in done.rows or time.perf_counter() - started > arguments.seconds:
            continue
        try:
            if arguments.record:
                require_quiet(where)
            rows = measure(case, device, arguments.budget, tuple(arguments.exclude), quiet=arguments.record)
        except Exception as error:  # such as out of memory, a library or a busy machine: the next model may work
            failures.append(f"{case.name}: {type(error).__name__}: {error}")
            print(f"FAILED {failures[-1]}", flush=True)
        else:
            done.add(case.name, rows)
            keep()
        gc.collect()
        torch.compiler.reset()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
    rows = keep()
    spent = time.perf_counter() - started
    left = [case.name for case in chosen if case.name not in done.rows]
    print(f"\n{len(chosen) - len(left)} of {len(chosen)} models, in {spent:.0f} s\n{table(rows)}")
    if failures:
        raise SystemExit("\n".join([f"{len(failures)} models failed:", *failures]))
    if left and arguments.state:
        print(f"left for another run: {', '.join(left)}")
        raise SystemExit(UNFINISHED)


if __name__ == "__main__":
    main()
