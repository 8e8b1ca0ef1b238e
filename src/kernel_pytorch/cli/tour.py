"""``kernel-pytorch tour``: run each part once on this machine, and write a page with charts."""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.rule import Rule
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

import kernel_pytorch as kp
from kernel_pytorch.html_page import bar_chart, document, line_chart

__all__ = ["run"]

_RANKS, _LENGTH = 4, 256


def run(out: Path) -> None:
    """Run the tour and write its page."""
    console = Console()
    body = ["<h1>KernelPyTorch on this machine</h1>"]
    device = kp.device()
    line = f"{device.name}, {device.arch}, {device.compute_units} compute units, torch {torch.__version__}"
    console.print(line, highlight=False)
    body.append(f"<p>{escape(line)}</p>")
    sections = (
        ("Exact attention over a window: kp.attention", _attention),
        ("A Hugging Face model, optimised: kp.optimize", _optimize),
        ("FP8 training follows bf16: kp.fp8.convert", _fp8),
        (f"{_RANKS} ranks compute what one does: kp.context_parallel", _ranks),
        ("A lowered model chats: kp.TextGenerator", _chat),
    )
    for number, (title, section) in enumerate(sections, 1):
        console.print(Rule(f"{number} of {len(sections)}. {title}", align="left"))
        began = time.perf_counter()
        with console.status("computing"):
            lines, chart = section(device.torch_device or "cpu")
        for text in lines:
            console.print(text, highlight=False, markup=False, soft_wrap=True)
        console.print(f"[dim]{time.perf_counter() - began:.0f} s[/dim]", highlight=False)
        body += [f"<h2>{escape(title)}</h2>", chart, *(f"<p>{escape(text)}</p>" for text in lines)]
    out.write_text(document("KernelPyTorch tour", body), encoding="utf-8")
    console.print(Rule("Next", align="left"))
    console.print(f"{out} has the charts; docs/README.md is the documentation", highlight=False, soft_wrap=True)
    console.print("kernel-pytorch doctor shows more of this machine", highlight=False)


def _median(call: Callable[[], object], device: str, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        call()
        if device != "cpu":
            torch.get_device_module(device).synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _attention(device: str) -> tuple[list[str], str]:
    length, window = 4096, 256
    q, k, v = (torch.randn(1, 8, length, 64, device=device) for _ in range(3))
    mask = kp.masks.causal() & kp.masks.window(window)
    rows = torch.arange(length, device=device)
    dense = (rows[:, None] >= rows) & (rows[:, None] - rows <= window)
    ours: Any = kp.attention(q, k, v, mask)
    exact = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=dense)
    error = (ours.double() - exact).abs().max().item()
    seconds = {
        "SDPA, dense mask": _median(
            lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=dense), device
        ),
        "kp.attention": _median(lambda: kp.attention(q, k, v, mask), device),
    }
    slow, fast = seconds.values()
    lines = [
        f"kp.attention(q, k, v, causal() & window({window})) over {length} tokens: {fast * 1e3:.1f} ms",
        f"SDPA with the same mask as a tensor: {slow * 1e3:.1f} ms, {slow / fast:.1f} times as long",
        f"largest difference from float64: {error:.1e}; kernel {kp.explain(kp.attention, q, k, v, mask).kernel.name}",
    ]
    chart = bar_chart([(name, value, f"{value * 1e3:.1f} ms") for name, value in seconds.items()], "time of a call")
    return lines, chart


def _language_model() -> tuple[nn.Module, torch.Tensor]:
    ids = torch.randint(0, 512, (1, 128))
    if importlib.util.find_spec("transformers") is None:
        layer = nn.TransformerEncoderLayer(256, 8, 688, batch_first=True)
        return nn.Sequential(nn.Embedding(512, 256), nn.TransformerEncoder(layer, 2)).eval(), ids
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=8
    )
    return LlamaForCausalLM(config).eval(), ids


def _optimize(device: str) -> tuple[list[str], str]:
    model, ids = _language_model()
    best = kp.optimize(model.to(device), (ids.to(device),), goal="latency", budget=20)
    report = best.report
    lines = [f"{report.model}, goal latency: {report.verdict}", *(f"note: {note}" for note in report.notes)]
    lines += [
        f"{one.label}: eager {one.eager_seconds * 1e3:.1f} ms, optimised {one.best_seconds * 1e3:.1f} ms, "
        f"{one.speedup:.2f}x"
        for one in report.inputs
    ]
    lines += [f"step {step.candidate}: {step.speedup:.2f}x, {step.summary}" for step in report.steps]
    rows = [("eager", one.eager_seconds) for one in report.inputs]
    rows += [("optimised", one.best_seconds) for one in report.inputs]
    chart = bar_chart([(name, value, f"{value * 1e3:.1f} ms") for name, value in rows], "time") if rows else ""
    lines.append(f"{len(report.refusals)} candidates refused, each with its reason in best.report")
    return lines, chart


def _fp8(device: str) -> tuple[list[str], str]:
    def losses(recipe: str | None) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
        if recipe is not None:
            kp.fp8.convert(model, recipe=recipe)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        found = []
        for step in range(60):
            torch.manual_seed(step)
            x = torch.randn(256, 64, device=device)
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                loss = (model(x) - x.roll(1, dims=1)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    plain, quantized = losses(None), losses("delayed")
    lines = [
        f"kp.fp8.convert(model, recipe='delayed'): loss {quantized[-1]:.4f} after 60 steps, bf16 {plain[-1]:.4f}"
    ]
    return lines, line_chart({"bf16": plain, "FP8, delayed": quantized}, "loss over 60 steps")


def _rank(rank: int, folder: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_RANKS)
    mask = kp.masks.causal() & kp.masks.window(64)
    cp = kp.context_parallel.Context(dist.group.WORLD, length=_LENGTH, mask=mask)
    q, k, v = (cp.shard(x, dim=2) for x in _qkv())
    out: Any = kp.attention(q, k, v, mask, group=cp)
    whole = cp.unshard(out, dim=2)
    if rank == 0:
        torch.save(whole, f"{folder}/out.pt")
    dist.barrier()
    dist.destroy_process_group()


def _qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, _LENGTH, 32, generator=generator) for _ in range(3))
    return q, k, v


def _ranks(_: str) -> tuple[list[str], str]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (folder,), nprocs=_RANKS)
        found = torch.load(f"{folder}/out.pt")
    q, k, v = _qkv()
    one = kp.attention(q, k, v, kp.masks.causal() & kp.masks.window(64))
    difference = (found - one).abs().max().item()
    held = _LENGTH // _RANKS
    rows = [("one process", float(_LENGTH), f"{_LENGTH} tokens"), ("each rank", float(held), f"{held} tokens")]
    return [
        f"kp.attention(..., group=cp) on {_RANKS} Gloo ranks, {held} of {_LENGTH} tokens on each",
        f"largest difference from one process: {difference:.1e}",
    ], bar_chart(rows, "tokens held")


def _chat(_: str) -> tuple[list[str], str]:
    missing = [name for name in ("executorch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        return [
            f"left out: needs {' and '.join(missing)} (pip install 'kernel-pytorch[lowering]' transformers)"
        ], ""
    from kernel_pytorch.testing.checkpoints import tiny_checkpoint

    lines = ["a tiny Llama with random weights, lowered to a .pte; what it says is nonsense"]
    with tempfile.TemporaryDirectory() as folder:
        kept = os.environ.get("KERNEL_PYTORCH_PROGRAMS")
        os.environ["KERNEL_PYTORCH_PROGRAMS"] = f"{folder}/programs"
        try:
            generator = kp.TextGenerator.from_pretrained(tiny_checkpoint(Path(folder) / "model"))
            chat = generator.chat()
            for message in ("hello", "and what does the fox say"):
                answer = " ".join("".join(chat.stream(message, max_tokens=16)).split())
                lines += [f"you: {message}", f"model: {answer}"]
        finally:
            if kept is None:
                del os.environ["KERNEL_PYTORCH_PROGRAMS"]
            else:
                os.environ["KERNEL_PYTORCH_PROGRAMS"] = kept
    made = generator.last
    assert made is not None
    lines.append(
        f"first token after {made.first_token_seconds * 1e3:.2g} ms, then {made.tokens_per_second:.0f} tokens/s; "
        f"{made.reused_tokens} of {made.prompt_tokens} tokens of the prompt reused from the turn before"
    )
    return lines, ""
