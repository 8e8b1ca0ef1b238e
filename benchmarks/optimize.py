"""kp.optimize on whole models: eager, torch.compile and the plan that was found, in turns, and the time to find it.

Run it with ``python benchmarks/optimize.py``; add ``--record`` in a clean checkout to keep the result. Every plan is
verified by kp.optimize itself before it is timed: exact steps against a float64 budget, approximate ones in dB. The
arms of a model are then timed in turns once more, apart from the search. On a CPU the models are small versions of
twelve architectures of transformers; on a GPU they are a Llama-3-shaped training step of 2 x 4096 tokens, its prefill
of 8k tokens, a Mistral-shaped prefill of 32k tokens with a window of 4096, ViT-L and a Whisper encoder, in bfloat16.
``--small`` runs tiny versions to check the program itself.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kernel_pytorch as kp
from kernel_pytorch import benchmarking
from kernel_pytorch.evidence import Measurement, Quantiles, clean_commit, write_record
from kernel_pytorch.hardware_abstraction.timing import quantiles
from kernel_pytorch.optimization.timing import Arm, alternate, saved_bytes
from kernel_pytorch.optimization.workload import Workload

SECONDS = 5.0


@dataclass(frozen=True)
class Case:
    """A model with inputs, and the goal that it is optimised for."""

    name: str
    goal: str
    make: Callable[[torch.device], tuple[torch.nn.Module, Any]]


def text(
    kind: str, rows: int, tokens: int, *, labels: bool = False, head: str = "ForCausalLM", **fields: Any
) -> Any:
    """A decoder of transformers with random weights."""

    def make(device: torch.device) -> tuple[torch.nn.Module, Any]:
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**fields)
        dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
        with torch.device(device):
            model = getattr(transformers, f"{kind}{head}")(config).to(dtype)
        ids = torch.randint(config.vocab_size, (rows, tokens), device=device)
        return model.train(labels), {"input_ids": ids, **({"labels": ids} if labels else {"use_cache": False})}

    return make


def pixels(kind: str, rows: int, size: int, **fields: Any) -> Any:
    """A vision encoder of transformers with random weights."""

    def make(device: torch.device) -> tuple[torch.nn.Module, Any]:
        import transformers

        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
        model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**fields))
        return model.to(device, dtype).eval(), {
            "pixel_values": torch.randn(rows, 3, size, size, device=device, dtype=dtype)
        }

    return make


def speech(rows: int, **fields: Any) -> Any:
    """The encoder of Whisper with random weights."""

    def make(device: torch.device) -> tuple[torch.nn.Module, Any]:
        import transformers

        torch.manual_seed(0)
        config = transformers.WhisperConfig(**fields)
        dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
        model = transformers.WhisperModel(config).encoder.to(device, dtype).eval()
        frames = 2 * config.max_source_positions
        return model, {"input_features": torch.randn(rows, config.num_mel_bins, frames, device=device, dtype=dtype)}

    return make


def decoder(
    width: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary, **more,
    }  # fmt: skip


def cases(device: torch.device, small: bool) -> list[Case]:
    if device.type != "cpu" and not small:
        llama = decoder(4096, 14336, 4, 32, 8, 128256, max_position_embeddings=8192)
        window = decoder(4096, 14336, 4, 32, 8, 32000, max_position_embeddings=32768, sliding_window=4096)
        whisper = {
            "d_model": 1280,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "decoder_layers": 1,
            "decoder_attention_heads": 20,
        }
        image = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        return [
            Case("llama step 2x4096", "training", text("Llama", 2, 4096, labels=True, **llama)),
            Case("llama prefill 8192", "latency", text("Llama", 1, 8192, **llama)),
            Case("mistral prefill 32768 window 4096", "latency", text("Mistral", 1, 32768, **window)),
            Case("vit-l", "latency", pixels("ViT", 32, 224, **image)),
            Case("whisper encoder", "latency", speech(1, **whisper)),
        ]
    width, layers, tokens = (32, 1, 16) if small else (512, 4, 256)
    common = decoder(width, 3 * width, layers, 8, 4, 64 if small else 8192)
    plain = {key: value for key, value in common.items() if key != "num_key_value_heads"}
    image = {key: value for key, value in plain.items() if key != "vocab_size"}
    whisper = {
        "d_model": width, "encoder_layers": layers, "decoder_layers": 1, "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "encoder_ffn_dim": 3 * width, "max_source_positions": tokens,
    }  # fmt: skip
    gpt2 = {"n_embd": width, "n_layer": layers, "n_head": 8, "vocab_size": common["vocab_size"]}
    t5 = {
        "d_model": width,
        "d_ff": 3 * width,
        "num_layers": layers,
        "num_heads": 8,
        "vocab_size": common["vocab_size"],
    }
    return [
        Case("llama", "latency", text("Llama", 1, tokens, **common)),
        Case("qwen3", "latency", text("Qwen3", 1, tokens, **common)),
        Case("gemma", "latency", text("Gemma", 1, tokens, **common)),
        Case("mistral", "latency", text("Mistral", 1, tokens, sliding_window=tokens // 4, **common)),
        Case("mixtral", "latency", text("Mixtral", 1, tokens, num_local_experts=4, **common)),
        Case("gpt2", "latency", text("GPT2", 1, tokens, head="LMHeadModel", **gpt2)),
        Case("bert", "latency", text("Bert", 4, tokens, head="ForMaskedLM", **plain)),
        Case("modernbert", "latency", text("ModernBert", 4, tokens, head="ForMaskedLM", pad_token_id=0, **plain)),
        Case("t5 encoder", "latency", text("T5", 4, tokens, head="EncoderModel", **t5)),
        Case("vit", "latency", pixels("ViT", 4, 32 if small else 224, image_size=32 if small else 224, **image)),
        Case("convnext", "latency", pixels("ConvNext", 4, 32 if small else 224)),
        Case("whisper encoder", "latency", speech(1, **whisper)),
        Case("llama step", "training", text("Llama", 2, tokens, labels=True, **common)),
    ]


def measure(case: Case, device: torch.device, budget: float, exclude: tuple[str, ...]) -> list[Measurement]:
    """Optimise one model, and time eager, torch.compile and the result in turns."""
    model, inputs = case.make(device)
    started = time.perf_counter()
    best: Any = kp.optimize(model, inputs, case.goal, budget=budget, exclude=exclude, resume=False)
    spent = time.perf_counter() - started
    print(best.report, flush=True)
    plan, report = best.plan, best.report
    from kernel_pytorch.optimization.compiler import compile_in_place
    from kernel_pytorch.optimization.edits import Edits
    from kernel_pytorch.optimization.examples import examples_of

    (example,) = examples_of(inputs)
    workload = Workload(model, case.goal == "training")
    found, compiled = best.revert.edits, Edits()
    best.revert()
    arms = {"baseline:eager": Edits(), "kernel:plan": found}
    if "compile" not in exclude:
        compile_in_place(model, compiled)
        compiled.undo()
        arms["baseline:torch.compile"] = compiled

    def entering(edits: Edits) -> Callable[[], None]:
        def enter() -> None:
            for other in arms.values():
                other.undo()
            edits.redo()

        return enter

    rows = []
    with workload.mode(), workload.kept():
        timed = [Arm(name, entering(edits), lambda: workload.step(example)) for name, edits in arms.items()]
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
        entering(Edits())()
    steps = " + ".join(step.candidate for step in plan.steps) or "left as it is"
    medians = ", ".join(f"{row.subject} {row.seconds.median * 1e3:.3g} ms" for row in rows)
    print(f"{case.name}: {medians}; {steps}; found in {spent:.0f} s; noise {report.noise:.1%}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None, help="a torch device; the best one when left out")
    parser.add_argument("--case", action="append", help="a case by name; may be repeated")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for each model")
    parser.add_argument("--exclude", action="append", default=[], help="a candidate to leave out")
    parser.add_argument("--small", action="store_true", help="tiny models, to check the program")
    parser.add_argument("--record", action="store_true", help="keep the result as evidence")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "evidence", help="folder for the record"
    )
    arguments = parser.parse_args()
    if arguments.record and arguments.small:
        parser.error("--record with --small: tiny models are not worth a record")
    commit = clean_commit(benchmarking.checkout()) if arguments.record else ""
    where = kp.device(arguments.device)
    device = torch.device(where.torch_device or "cpu")
    known = cases(device, arguments.small)
    unknown = set(arguments.case or ()) - {case.name for case in known}
    if unknown:
        parser.error(f"--case {min(unknown)!r}: use one of {', '.join(case.name for case in known)}")
    rows: list[Measurement] = []
    for case in known:
        if arguments.case and case.name not in arguments.case:
            continue
        rows += measure(case, device, arguments.budget, tuple(arguments.exclude))
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
        if arguments.record:  # after every model: what was measured is kept whatever happens to the next
            command = shlex.join(["python", "benchmarks/optimize.py", *sys.argv[1:]])
            record = benchmarking.record(
                "optimize", where, (), rows, command=command, commit=commit, parts=("optimization/",)
            )
            write_record(record, arguments.out / benchmarking.record_name("optimize", where))


if __name__ == "__main__":
    main()
