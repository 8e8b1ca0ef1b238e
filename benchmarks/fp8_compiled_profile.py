"""Profile a compiled FP8 training step: GPU time by kind of kernel, eager beside compiled.

Run it with ``python benchmarks/fp8_compiled_profile.py`` on a GPU with FP8 matrix units. It trains a Llama of
Hugging Face (4 layers of 4096/14336, 4 x 4096 tokens), in bf16 and converted with ``delayed``, eager and compiled,
and prints for each kind of kernel the number of launches and the milliseconds of a step, and the kernels whose time
differs most between eager and compiled. The difference of wall time and GPU time shows where the GPU waits.

It does so with the attention ``sdpa`` and ``kernel_pytorch``: under torch.compile, transformers passes ``sdpa`` a
mask tensor and repeated keys where eager mode passes ``is_causal``, and SDPA's causal kernels do not take a mask.

``--graphs`` needs no GPU: it compiles the model and counts what the generated code of a step calls: operators of
this package, library calls, fused kernels, and what only moves data (clones, copies, transposes, casts).
``--small`` takes a tiny model, to check this program on any machine.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import kernel_pytorch as kp

__all__ = ["KINDS", "Profile", "calls_of", "differences", "kind_of", "table"]

KINDS = (
    ("fused reduction", r"^triton_(red|per)_"),
    ("copy or fill", r"^triton_poi_fused_(clone|_to_copy|t|view)_?\d*$"),
    ("fused pointwise", r"^triton_(poi|tem)_"),
    ("attention", r"attention|fmha|flash|cudnn_generated|sdpa|^_(forward|dq|dkdv)$"),
    ("FP8 GEMM", r"e4m3|e5m2|fp8.*gemm|gemm.*fp8|scaled_mm|float8|nvjet_[qr]"),
    ("FP8 quantize", r"^_?(cast|settle|amax|norm|quarter|hidden|gradients|agree|scales_of|turn)|_(cast|settle)|fp8_"),
    ("other GEMM", r"gemm|nvjet|cutlass|cublas|_mm_|addmm"),
    ("copy or fill", r"memcpy|memset|copy|fill|clone|transpose"),
    ("loss", r"softmax|nll|cross_entropy"),
    ("torch reduction", r"reduce_kernel"),
    ("torch pointwise", r"elementwise|vectorized|foreach|CatArray|index"),
)  # fmt: skip
"""Kinds of kernels with a pattern of their names; the first that matches counts."""


def kind_of(name: str) -> str:
    """Return the kind of a kernel.

    Example:
        >>> kind_of("triton_red_fused__to_copy_mul_3"), kind_of("nvjet_hsh_128x256"), kind_of("odd")
        ('fused reduction', 'other GEMM', 'other')
    """
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


@dataclass
class Profile:
    """Launches and seconds of a training step, by kernel."""

    wall: float = 0.0
    """Seconds of a step without the profiler."""
    launches: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, name: str, launches: float, seconds: float) -> None:
        self.launches[name] += launches  # type: ignore[assignment]  # a mean over steps
        self.seconds[name] += seconds

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def by_kind(self) -> dict[str, tuple[float, float]]:
        """Return (launches, seconds) of each kind."""
        found: dict[str, tuple[float, float]] = {}
        for name, seconds in self.seconds.items():
            launches, taken = found.get(kind_of(name), (0.0, 0.0))
            found[kind_of(name)] = (launches + self.launches[name], taken + seconds)
        return found


def table(eager: Profile, compiled: Profile) -> list[str]:
    """Return one line per kind of kernel: launches and milliseconds in both modes, and the difference."""
    kinds = [*dict.fromkeys([kind for kind, _ in KINDS]), "other"]
    found = eager.by_kind(), compiled.by_kind()
    lines = [f"{'':18}{'eager':>18}{'compiled':>20}{'difference':>14}"]
    for kind in [kind for kind in kinds if kind in found[0] or kind in found[1]]:
        (some, before), (others, after) = (mode.get(kind, (0.0, 0.0)) for mode in found)
        lines.append(
            f"{kind:18}{some:8.0f}{before * 1e3:7.2f} ms{others:10.0f}{after * 1e3:7.2f} ms"
            f"{(after - before) * 1e3:+11.2f} ms"
        )
    for name, before, after in (("GPU", eager.total, compiled.total), ("wall", eager.wall, compiled.wall)):
        lines.append(f"{name:18}{before * 1e3:15.2f} ms{after * 1e3:17.2f} ms{(after - before) * 1e3:+11.2f} ms")
    return lines


def differences(eager: Profile, compiled: Profile, most: int = 20) -> list[str]:
    """Return the kernels whose time differs most between the modes, one per line."""
    names = {*eager.seconds, *compiled.seconds}
    gaps = {name: compiled.seconds.get(name, 0.0) - eager.seconds.get(name, 0.0) for name in names}
    largest = sorted(names, key=lambda name: abs(gaps[name]), reverse=True)[:most]
    return [
        f"{gaps[name] * 1e3:+8.3f} ms  {eager.launches[name]:5.0f} -> {compiled.launches[name]:5.0f}  {name[:100]}"
        for name in largest
    ]


def calls_of(code: str) -> Counter[str]:
    """Count what the code that Inductor generated calls, by kind.

    Example:
        >>> dict(calls_of("def call(args):\\n  buf0 = torch.ops.kernel_pytorch.rope.default(a)\\n  buf1.copy_(buf0)"))
        {'op rope': 1, 'moves copy_': 1}
    """
    found: Counter[str] = Counter()
    body = code.split("def call(", 1)[-1]
    for space, name in re.findall(r"torch\.ops\.(kernel_pytorch|aten)\.(\w+)\.\w+\(", body):
        found[f"{'op' if space == 'kernel_pytorch' else 'library'} {name}"] += 1
    for name in re.findall(r"extern_kernels\.(\w+)\(", body):
        found[f"library {name}"] += 1
    for name in re.findall(r"\b((?:triton_(?:poi|red|per|tem)|cpp)_fused_\w+?)(?:_\d+)?(?:\.run)?\(", body):
        found[f"fused {name}"] += 1
    for name in re.findall(r"\.(copy_|clone|contiguous|fill_|zero_)\(", body):
        found[f"moves {name}"] += 1
    return found


def llama(small: bool, attention: str, device: str) -> tuple[nn.Module, torch.Tensor]:
    """Return the model in bf16 and a batch of tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096,
    }  # fmt: skip
    if small:
        sizes |= {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                  "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation=attention)).bfloat16()
        tokens = torch.randint(sizes["vocab_size"], (2, 32) if small else (4, 4096))
    return model, tokens


def step_of(model: nn.Module, tokens: torch.Tensor, compiled: bool) -> Callable[[], None]:
    """Return a training step without the optimizer."""
    call = torch.compile(model, dynamic=False) if compiled else model

    def step() -> None:
        call(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def profiled(step: Callable[[], None], device: torch.device, steps: int) -> Profile:
    """Time a step, then profile some, and return the mean of a step."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(3):
        step()
    found = Profile()
    wait()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    found.wall = (time.perf_counter() - started) / steps
    activity = torch.profiler.ProfilerActivity
    on_gpu = device.type == "cuda"
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA] if on_gpu else [activity.CPU]) as profiler:
        for _ in range(steps):
            step()
        wait()
    for row in profiler.key_averages():
        is_kernel = "CUDA" in str(row.device_type) if on_gpu else True
        taken = row.self_device_time_total if on_gpu else row.self_cpu_time_total
        if is_kernel and taken > 0 and not row.key.startswith(("ProfilerStep", "Activity Buffer")):
            found.add(row.key, row.count / steps, taken / 1e6 / steps)
    return found


def arms(small: bool, attentions: Iterable[str], device: str) -> Iterable[tuple[str, nn.Module, torch.Tensor]]:
    """Yield the models with their names, one after another."""
    for attention in attentions:
        for recipe in ("bf16", "delayed"):
            model, tokens = llama(small, attention, device)
            if recipe != "bf16":
                kp.fp8.convert(model, recipe, monitor=None)
            yield f"{recipe}, attention {attention}", model, tokens


def print_graphs(small: bool, attentions: Iterable[str], device: str) -> None:
    """Print what the generated code of a compiled step calls."""
    from torch._inductor.utils import run_and_get_code

    for recipe, model, tokens in arms(small, attentions, device):
        torch._dynamo.reset()
        _, codes = run_and_get_code(step_of(model, tokens, True))
        total = sum((calls_of(code) for code in codes), Counter[str]())
        print(f"{recipe}: {len(codes)} graphs, {sum(total.values())} calls a step")
        for name, count in sorted(total.items()):
            print(f"  {count:5} {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--attention", nargs="+", default=["sdpa", "kernel_pytorch"], help="attn_implementation of the model"
    )
    parser.add_argument("--steps", type=int, default=5, help="profiled steps")
    parser.add_argument("--graphs", action="store_true", help="count calls of the generated code; needs no GPU")
    parser.add_argument("--small", action="store_true", help="a tiny model, to check this program")
    asked = parser.parse_args()
    if asked.graphs:
        print_graphs(asked.small, asked.attention, asked.device)
        return
    if asked.device == "cpu" and not asked.small:
        parser.error("a GPU is needed: add --small to check this program on a CPU, or --graphs to read the graphs")
    device = torch.device(asked.device)
    for recipe, model, tokens in arms(asked.small, asked.attention, asked.device):
        torch._dynamo.reset()
        eager = profiled(step_of(model, tokens, False), device, asked.steps)
        compiled = profiled(step_of(model, tokens, True), device, asked.steps)
        print(f"\n{recipe}: launches and time of a step by kind of kernel")
        print("\n".join(table(eager, compiled)))
        print(f"\n{recipe}: kernels with the largest differences, compiled - eager")
        print("\n".join(differences(eager, compiled)), flush=True)
        del model


if __name__ == "__main__":
    main()
