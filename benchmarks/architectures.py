"""Benchmark whole models lowered with our delegate beside XNNPACK, against XNNPACK alone, on the CPU.

Architectures have their usual sizes, with random weights. Both programs of a model are first compared with eager
PyTorch. They are then timed alternately in one process, so that both run under the same conditions.

    python benchmarks/architectures.py                    # all of it; --model NAME for one, --record to keep it
    python benchmarks/architectures.py --lower --programs FOLDER   # the programs alone; --record if they are for one

``--state FILE --limit SECONDS`` splits a run over several.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import split_run
import torch
import transformers as hf

import kernel_pytorch as kp
from kernel_pytorch import benchmarking
from kernel_pytorch.evidence import Measurement, Quantiles, clean_commit
from kernel_pytorch.hardware_abstraction.timing import quantiles
from kernel_pytorch.lowering.difference import difference

THREADS = 2
FEWEST_DECIBELS = 60.0
TURN_SECONDS = 0.2
ARMS = ("ours", "xnnpack")


class FirstOutput(torch.nn.Module):
    """A transformers model as a function of one tensor that returns one tensor."""

    def __init__(self, model: torch.nn.Module, **options: object) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x, return_dict=False, **self.options)[0]  # type: ignore[no-any-return]


class InvertedResidual(torch.nn.Module):
    """A MobileNetV3 block: expand, depthwise, squeeze and excite, project."""

    def __init__(
        self, inputs: int, kernel: int, wide: int, outputs: int, excite: bool, hard: bool, stride: int
    ) -> None:
        super().__init__()
        activation = torch.nn.Hardswish if hard else torch.nn.ReLU
        self.expand = torch.nn.Sequential(
            torch.nn.Conv2d(inputs, wide, 1, bias=False), torch.nn.BatchNorm2d(wide), activation()
        )
        self.depthwise = torch.nn.Sequential(
            torch.nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False),
            torch.nn.BatchNorm2d(wide),
            activation(),
        )
        narrow = max(8, (wide // 4 + 4) // 8 * 8)
        self.gate = (
            torch.nn.Sequential(
                torch.nn.AdaptiveAvgPool2d(1), torch.nn.Conv2d(wide, narrow, 1), torch.nn.ReLU(),
                torch.nn.Conv2d(narrow, wide, 1), torch.nn.Hardsigmoid(),
            )
            if excite
            else None
        )  # fmt: skip
        self.project = torch.nn.Sequential(
            torch.nn.Conv2d(wide, outputs, 1, bias=False), torch.nn.BatchNorm2d(outputs)
        )
        self.skips = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depthwise(self.expand(x))
        y = self.project(y if self.gate is None else y * self.gate(y))
        return x + y if self.skips else y


# kernel, expanded channels, output channels, squeeze and excite, hard swish, stride: table 1 of arXiv:1905.02244
_MOBILENET_V3_LARGE = (
    (3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2), (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2), (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1), (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1), (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1), (5, 960, 160, True, True, 1),
)  # fmt: skip


def mobilenet_v3() -> torch.nn.Module:
    layers: list[torch.nn.Module] = [
        torch.nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        torch.nn.BatchNorm2d(16),
        torch.nn.Hardswish(),
    ]
    inputs = 16
    for kernel, wide, outputs, excite, hard, stride in _MOBILENET_V3_LARGE:
        layers.append(InvertedResidual(inputs, kernel, wide, outputs, excite, hard, stride))
        inputs = outputs
    layers += [torch.nn.Conv2d(160, 960, 1, bias=False), torch.nn.BatchNorm2d(960), torch.nn.Hardswish()]
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(960, 1280), torch.nn.Hardswish()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(1280, 1000))


def _tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 1000, (1, count))


def _image() -> torch.Tensor:
    return torch.randn(1, 3, 224, 224)


def _decoder(config: hf.PretrainedConfig) -> torch.nn.Module:
    return FirstOutput(hf.AutoModelForCausalLM.from_config(config), use_cache=False)


Made = tuple[torch.nn.Module, torch.Tensor]
MODELS: dict[str, Callable[[], Made]] = {
    # Vocabularies are cut to 32,000, and Qwen3-0.6B to 8 layers.
    "Llama": lambda: (
        _decoder(
            hf.LlamaConfig(
                hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
                num_key_value_heads=12, vocab_size=32000,
            )
        ),
        _tokens(128),
    ),
    "SmolLM2-135M": lambda: (
        _decoder(
            hf.LlamaConfig(
                hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                num_key_value_heads=3, vocab_size=32000, tie_word_embeddings=True,
            )
        ),
        _tokens(128),
    ),
    "Qwen3": lambda: (
        _decoder(
            hf.Qwen3Config(
                hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=16,
                num_key_value_heads=8, head_dim=128, vocab_size=32000, tie_word_embeddings=True,
            )
        ),
        _tokens(128),
    ),
    "Gemma 3": lambda: (
        _decoder(
            hf.Gemma3TextConfig(
                hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
                num_key_value_heads=1, head_dim=256, vocab_size=32000, sliding_window=512,
            )
        ),
        _tokens(128),
    ),
    "GPT-2": lambda: (_decoder(hf.GPT2Config()), _tokens(128)),
    "BERT": lambda: (FirstOutput(hf.BertModel(hf.BertConfig())), _tokens(128)),
    "ModernBERT": lambda: (FirstOutput(hf.ModernBertModel(hf.ModernBertConfig(vocab_size=32000))), _tokens(128)),
    "ViT": lambda: (FirstOutput(hf.ViTForImageClassification(hf.ViTConfig(num_labels=1000))), _image()),
    "Swin": lambda: (FirstOutput(hf.SwinForImageClassification(hf.SwinConfig(num_labels=1000))), _image()),
    "MobileNetV3": lambda: (mobilenet_v3(), _image()),
    "EfficientNet-B0": lambda: (
        FirstOutput(  # its classifier's pooling takes seconds in ExecuTorch's portable kernels
            hf.EfficientNetModel(
                hf.EfficientNetConfig(
                    width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, image_size=224
                )
            )
        ),
        _image(),
    ),
    "ConvNeXt": lambda: (
        FirstOutput(hf.ConvNextForImageClassification(hf.ConvNextConfig(num_labels=1000))),
        _image(),
    ),
    "RegNet": lambda: (FirstOutput(hf.RegNetForImageClassification(hf.RegNetConfig(num_labels=1000))), _image()),
}  # fmt: skip


def lower(name: str, arm: str, folder: Path) -> None:
    """Write one arm's program, its input and its report."""
    torch.manual_seed(0)
    with torch.no_grad():
        model, x = MODELS[name]()
        model.eval()
        if arm == "ours":
            program = kp.lower(model, (x,))
            for found in program.compare():
                if found.snr < FEWEST_DECIBELS:
                    raise benchmarking.GateError(f"{name}: {found}")
            program.save(folder / f"{name}.{arm}.pte")
            (folder / f"{name}.report.txt").write_text(str(program.report))
        else:
            made = alone(model, x)
            (folder / f"{name}.{arm}.pte").write_bytes(made)
            torch.testing.assert_close(kp.load(made)(x), model(x), rtol=1e-3, atol=1e-3)
    torch.save(x, folder / f"{name}.input.pt")


def alone(model: torch.nn.Module, x: torch.Tensor) -> bytes:
    """Lower with ExecuTorch's own flow and XNNPACK's partitioner."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    edge = to_edge_transform_and_lower(
        torch.export.export(model, (x,)),
        partitioner=[XnnpackPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    return bytes(edge.to_executorch().buffer)


def time_turns(name: str, folder: Path, seconds: float) -> dict[str, list[float]]:
    torch.set_num_threads(THREADS)
    x = torch.load(folder / f"{name}.input.pt")
    programs = {arm: kp.load(folder / f"{name}.{arm}.pte") for arm in ARMS}
    taken: dict[str, list[float]] = {arm: [] for arm in ARMS}
    found = {arm: program(x) for arm, program in programs.items()}
    apart = difference(0, found["ours"], found["xnnpack"])
    if apart.snr < FEWEST_DECIBELS:
        raise benchmarking.GateError(f"{name}: the arms differ: {apart}")
    stop = time.perf_counter() + seconds * len(ARMS)
    while time.perf_counter() < stop:
        for arm, program in programs.items():
            program(x)  # evict the other arm's data from the caches
            turn = time.perf_counter() + TURN_SECONDS
            while time.perf_counter() < turn:
                before = time.perf_counter()
                program(x)
                taken[arm].append(time.perf_counter() - before)
    return taken


def _subprocess(*options: str) -> str:
    done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(options)}: {done.stderr[-2000:]}")
    return done.stdout


def lowered(name: str, folder: Path) -> None:
    """Lower both arms of a model, each in a separate process, unless the folder has them."""
    for arm in ARMS:
        if not (folder / f"{name}.{arm}.pte").exists():
            _subprocess("--model", name, "--arm", arm, "--programs", str(folder))
            print(f"{name}: lowered, {arm}", file=sys.stderr)


def measure(name: str, folder: Path, seconds: float) -> list[Measurement]:
    lowered(name, folder)
    given = ("--programs", str(folder), "--seconds", str(seconds))
    taken = json.loads(_subprocess("--model", name, "--time", *given).splitlines()[-1])
    medians = {arm: statistics.median(times) for arm, times in taken.items()}
    times = ", ".join(f"{arm} {median * 1e3:.2f} ms" for arm, median in medians.items())
    print(f"{name}: {times}, {medians['xnnpack'] / medians['ours']:.3f}x", file=sys.stderr)
    rows = []
    for arm, samples in taken.items():
        subject = "kernel:delegate" if arm == "ours" else "baseline:XNNPACK alone"
        found = Quantiles(*quantiles(samples))
        rows.append(Measurement(name, "forward", "float32", subject, found, len(samples), 0, 0))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    split_run.add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=4.0, help="time to sample each arm for")
    parser.add_argument("--model", choices=list(MODELS), action="append", help="this model alone; may be repeated")
    parser.add_argument("--lower", action="store_true", help="lower and check the programs that are not there yet")
    parser.add_argument("--programs", type=Path, help="a folder for programs; with --record they are by commit")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--time", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.model or list(MODELS)
    if arguments.arm:
        lower(names[0], arguments.arm, arguments.programs)
        return
    if arguments.time:
        print(json.dumps(time_turns(names[0], arguments.programs, arguments.seconds)))
        return
    commit = clean_commit(benchmarking.checkout()) if arguments.record else ""
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.programs or Path(temporary)) / commit
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.lower:
            for name in names:
                lowered(name, folder)
            return
        split_run.measure(
            "architectures",
            names,
            lambda name: measure(name, folder, arguments.seconds),
            arguments,
            settings=(arguments.seconds,),
        )


if __name__ == "__main__":
    main()
