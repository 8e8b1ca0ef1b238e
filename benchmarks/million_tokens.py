"""Benchmark one training step of a model with a billion parameters on a million tokens, on one GPU.

``demos/million_tokens.py`` shows how to write such a step. Here most layers attend with ``causal & (window |
sinks)`` and some with exact dense causal attention; the rest of the model runs in chunks of tokens. Run it with
``python benchmarks/million_tokens.py``: if the step does not fit the device, or with ``--small``, a small model
uses the same code in a few seconds. The gradients are compared with a plain implementation before timing, and the
peak memory with a formula. ``benchmarks/long_sequences.py`` records it.

Shapes: N tokens (C in a chunk), E hidden, G key heads, H query heads per key head, D head dimension, F inner width of
the feed-forward, V vocabulary. Tokens are always the dimension before the last, and the batch is one sequence.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.nn import functional

import kernel_pytorch as kp
from kernel_pytorch.masks import Mask


@dataclass(frozen=True)
class Config:
    tokens: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    window: int
    sinks: int
    dense_every: int
    """Every ``dense_every``-th layer attends to all earlier tokens, the others to the window and the sinks."""
    chunk: int
    """Number of tokens per chunk of the token-local parts."""
    loss_chunk: int
    """Number of tokens per chunk of the loss, separate because a token has far more logits than other elements."""
    dtype: torch.dtype
    check_tokens: int
    """The length at which gradients are compared with the plain implementation."""
    check_layers: int
    rope_base: float = 500_000.0

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def masks(self, layers: int | None = None, share: int = 1) -> list[Mask]:
        """Return the mask of each layer; windows and sinks are divided by ``share``, for shorter sequences."""
        near = kp.masks.window(self.window // share) | kp.masks.sinks(max(1, self.sinks // share))
        layers = self.layers if layers is None else layers
        every = min(self.dense_every, layers)
        return [kp.masks.causal() if (i + 1) % every == 0 else kp.masks.causal() & near for i in range(layers)]


FULL = Config(
    tokens=1 << 20, layers=16, hidden=2048, heads=16, kv_heads=4, head_dim=128, ffn=8192, vocab=32768,
    window=4096, sinks=64, dense_every=8, chunk=32768, loss_chunk=8192, dtype=torch.bfloat16,
    check_tokens=4096, check_layers=4,
)  # fmt: skip
SMALL = Config(
    tokens=2048, layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=192, vocab=512,
    window=256, sinks=8, dense_every=2, chunk=512, loss_chunk=128, dtype=torch.float32,
    check_tokens=700, check_layers=2,
)  # fmt: skip


# The model


def rotated(x_CHD: torch.Tensor, first: int, base: float) -> torch.Tensor:
    """Apply the rotary embedding to tokens that start at position ``first``.

    Angles are float64: at position one million, float32 has errors of hundredths of a radian.
    """
    half = x_CHD.shape[-1] // 2
    position_C = torch.arange(first, first + x_CHD.shape[0], dtype=torch.float64, device=x_CHD.device)
    rate = base ** (-torch.arange(half, dtype=torch.float64, device=x_CHD.device) / half)
    angle = (position_C.unsqueeze(-1) * rate).unsqueeze(1)
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x_CHD.float().split(half, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_CHD.dtype)


class Layer(nn.Module):
    """Attention and a gated feed-forward, each with a pre-norm and a residual."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__()
        self.config = config
        hidden, depth = config.hidden, (2 * config.layers) ** -0.5
        per_group = (config.group + 2) * config.head_dim  # its query heads, the key and the value

        def weight(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, device=device) * (scale * columns**-0.5))

        self.attention_norm = nn.Parameter(torch.ones(hidden, device=device))
        self.qkv = weight(config.kv_heads * per_group, hidden)
        self.out = weight(hidden, config.heads * config.head_dim, depth)
        self.ffn_norm = nn.Parameter(torch.ones(hidden, device=device))
        self.gate_up = weight(2 * config.ffn, hidden)
        self.down = weight(hidden, config.ffn, depth)

    def project(self, first: int, x_CE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        qkv = functional.linear(kp.rms_norm(x_CE, self.attention_norm), self.qkv.to(x_CE.dtype))
        # In order: the query heads of a key head, the key and the value; then those of the next key head.
        qkv_CGHD = qkv.view(len(x_CE), config.kv_heads, config.group + 2, config.head_dim)
        q_CHD = rotated(qkv_CGHD[:, :, :-2].flatten(1, 2), first, config.rope_base)
        k_CGD = rotated(qkv_CGHD[:, :, -2], first, config.rope_base)
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q_CHD, k_CGD, qkv_CGHD[:, :, -1]))
        return q, k, v

    def finish(self, _first: int, x_CE: torch.Tensor, heads_1HCD: torch.Tensor) -> torch.Tensor:
        """Compute the output projection and the feed-forward."""
        dtype = x_CE.dtype
        attended = heads_1HCD.squeeze(0).transpose(0, 1).flatten(1)
        x_CE = x_CE + functional.linear(attended, self.out.to(dtype))
        inner_CF = functional.linear(kp.rms_norm(x_CE, self.ffn_norm), self.gate_up.to(dtype))
        gate_CF, up_CF = inner_CF.chunk(2, dim=-1)
        return x_CE + functional.linear(functional.silu(gate_CF) * up_CF, self.down.to(dtype))

    def forward(self, x_NE: torch.Tensor, mask: Mask) -> torch.Tensor:
        parameters = tuple(self.parameters())
        return kp.context_parallel.chunked_layer(
            x_NE, mask, self.project, self.finish, chunk=self.config.chunk, parameters=parameters
        )


class Model(nn.Module):
    """A Llama-shaped decoder.

    Parameters are float32 and are cast to the compute dtype inside each chunk: they are their own master weights, and
    the gradients of all chunks accumulate in float32. The cast is repeated for every chunk, which costs far less than
    the chunk's GEMMs. The embedding is also the output projection.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.randn(config.vocab, config.hidden, device=device) * config.hidden**-0.5)
        self.layers = nn.ModuleList(Layer(config, device) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.hidden, device=device))

    def embed(self, _first: int, tokens_C1: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens_C1.squeeze(-1), self.embedding).to(self.config.dtype)

    def losses(self, _first: int, x_CE: torch.Tensor, targets_C1: torch.Tensor) -> torch.Tensor:
        logits_CV = functional.linear(kp.rms_norm(x_CE, self.norm), self.embedding.to(x_CE.dtype)).float()
        return functional.cross_entropy(logits_CV, targets_C1.squeeze(-1), reduction="none").unsqueeze(-1)

    def forward(
        self,
        tokens_N1: torch.Tensor,
        targets_N1: torch.Tensor,
        masks: Sequence[Mask],
        on_layer: Callable[[str], None] = lambda _: None,
    ) -> torch.Tensor:
        """Return the mean loss, using the first ``len(masks)`` layers."""
        config = self.config
        tokenwise = kp.context_parallel.tokenwise
        x_NE = tokenwise(self.embed, tokens_N1, chunk=config.chunk, parameters=[self.embedding])
        for layer, mask in zip(self.layers, masks, strict=False):
            if x_NE.requires_grad:  # the gradient of a layer's input is complete when its backward is done
                x_NE.register_hook(lambda _: on_layer("backward"))
            x_NE = layer(x_NE, mask)
            on_layer("forward")
        parameters = [self.norm, self.embedding]
        losses_N1: torch.Tensor = tokenwise(
            self.losses, x_NE, targets_N1, chunk=config.loss_chunk, parameters=parameters
        )
        return losses_N1.mean()


def plain_loss(
    model: Model, tokens_N1: torch.Tensor, targets_N1: torch.Tensor, masks: Sequence[Mask]
) -> torch.Tensor:
    """Return the loss of the same model in plain float32: dense masks, no chunks, no recomputation."""
    config, tokens = model.config, len(tokens_N1)

    def norm(x_NE: torch.Tensor, weight_E: torch.Tensor) -> torch.Tensor:
        return x_NE * torch.rsqrt(x_NE.square().mean(dim=-1, keepdim=True) + 1e-6) * weight_E

    x_NE = model.embedding[tokens_N1.squeeze(-1)]
    for layer, mask in zip(model.layers, masks, strict=False):
        assert isinstance(layer, Layer)
        qkv = norm(x_NE, layer.attention_norm) @ layer.qkv.T
        qkv = qkv.view(tokens, config.kv_heads, config.group + 2, config.head_dim)
        q = rotated(qkv[:, :, :-2].flatten(1, 2), 0, config.rope_base)
        k = rotated(qkv[:, :, -2], 0, config.rope_base)
        k, v = (x.repeat_interleave(config.group, dim=1) for x in (k, qkv[:, :, -1]))
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
        hidden = ~mask.dense(tokens, tokens)[0].to(scores.device)
        p = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        x_NE = x_NE + torch.einsum("hqk,khd->qhd", p, v).flatten(1) @ layer.out.T
        gate, up = (norm(x_NE, layer.ffn_norm) @ layer.gate_up.T).chunk(2, dim=-1)
        x_NE = x_NE + (functional.silu(gate) * up) @ layer.down.T
    return functional.cross_entropy(norm(x_NE, model.norm) @ model.embedding.T, targets_N1.squeeze(-1))


# Memory and FLOPs


def count_parameters(config: Config) -> int:
    heads = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    layer = config.hidden * (heads + 3 * config.ffn + 2)
    return config.layers * layer + config.vocab * config.hidden + config.hidden


def predicted_peak(config: Config) -> dict[str, int]:
    """Return the peak memory in bytes by parts: in the last layer's backward, with every layer's input saved.

    The working set is the larger of two phases: a chunk of the feed-forward, with the incoming gradient, and the
    attention backward of one group, after that gradient is freed.
    """
    n, size = config.tokens, config.dtype.itemsize
    stream = n * config.hidden * size
    query, key = (n * heads * config.head_dim * size for heads in (config.heads, config.kv_heads))
    chunk = min(config.chunk, n)
    # At its peak a chunk holds six tensors of the feed-forward's width (gate and up, their gradients, and these
    # concatenated) and six of the residual stream's width; also the weights in the compute dtype, and the gradient
    # of the largest while it is converted to float32.
    in_chunk = stream + chunk * size * 6 * (config.ffn + config.hidden)
    in_chunk += config.hidden * size * (config.heads * config.head_dim + 3 * config.ffn)
    in_chunk += config.hidden * 2 * config.ffn * (size + 4)
    # Keys and values repeated for each query head, the gradients of all three, and dq again in float32.
    in_attention = 5 * query // config.kv_heads + n * config.group * config.head_dim * 4
    return {
        "parameters, gradients and AdamW's two moments, float32": 16 * count_parameters(config),
        "inputs of the layers": config.layers * stream,
        "gradient of the layer's input": stream,
        "queries, keys, values, attended heads and their gradient": 3 * query + 2 * key,
        "working set: a chunk or one group's attention": max(in_chunk, in_attention),
    }


def step_flops(config: Config) -> tuple[int, int]:
    """Return the FLOPs of (the model, this step with recomputation).

    The step computes every forward twice, and the projections to q, k and v three times: for the attention of the
    recomputed layer, and for their own gradient. The attention backward recomputes the scores.
    """
    attended = sum(mask.density(config.tokens, config.tokens) for mask in config.masks()) * config.tokens**2
    attention = int(attended * config.heads * config.head_dim)
    dense = count_parameters(config) * config.tokens
    projected = (
        config.layers * config.hidden * (config.heads + 2 * config.kv_heads) * config.head_dim * config.tokens
    )
    return 6 * dense + 12 * attention, 8 * dense + 2 * projected + (4 + 4 + 10) * attention


def synthetic(
    tokens: int, vocab: int, device: torch.device, seed: int = 0, block: int = 256
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens, next tokens), each (N, 1), with frequencies as in language; half of the blocks are copies of an
    earlier block, so that many next tokens can be predicted from distant context."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-(tokens + 1) // block)
    frequency = 1.0 / torch.arange(1, vocab + 1, dtype=torch.float64)
    fresh = torch.multinomial(frequency, blocks * block, replacement=True, generator=generator).view(blocks, block)
    copies, back = torch.rand(2, blocks, generator=generator).tolist()
    source = list(range(blocks))
    for i in range(1, blocks):
        if copies[i] < 0.5:
            source[i] = source[int(back[i] * i)]
    text = fresh[torch.tensor(source)].flatten()[: tokens + 1].unsqueeze(-1).to(device)
    return text[:-1], text[1:]


# Checks before timing


def tolerance(config: Config, roundings: int) -> float:
    """Return the maximum norm of a gradient's error relative to the gradient's norm.

    In float32 only the order of accumulation differs. In a narrower dtype each of ``roundings`` intermediate results
    has an independent error of up to the unit roundoff, so that their squares add up.
    """
    if config.dtype == torch.float32:
        return 1e-4
    return float(torch.finfo(config.dtype).eps / 2 * roundings**0.5)


def apart(ours: torch.Tensor, truth: torch.Tensor) -> float:
    truth = truth.float()
    return float((ours.float() - truth).norm() / truth.norm())


def check_gradients(model: Model, device: torch.device) -> tuple[dict[str, float], float]:
    """Return the errors of the loss and of all gradients against the plain float32 model, and their tolerance."""
    config = model.config
    masks = config.masks(config.check_layers, share=max(1, config.window * 8 // config.check_tokens))
    data = synthetic(config.check_tokens, config.vocab, device, seed=1)
    truth_loss = plain_loss(model, *data, masks)
    truth = torch.autograd.grad(truth_loss, list(model.parameters()), allow_unused=True)
    model.zero_grad()
    loss = model(*data, masks)
    loss.backward()
    errors = {"loss": apart(loss.detach(), truth_loss.detach())}
    for (name, parameter), exact in zip(model.named_parameters(), truth, strict=True):
        if exact is not None:  # of the layers in use
            assert parameter.grad is not None, name
            errors[name] = apart(parameter.grad, exact)
    model.zero_grad()
    # About a dozen results per layer are rounded in the forward, and as many in the backward.
    return errors, tolerance(config, 24 * config.check_layers)


def check_end(config: Config, mask: Mask, device: torch.device, last: int = 64) -> tuple[dict[str, float], float]:
    """Return the errors of attention for the last queries and keys of the full length, and their tolerance.

    No later query attends to the last keys, so the last queries give the complete gradients of these keys.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    last = min(last, config.tokens)

    def drawn(heads: int) -> torch.Tensor:
        shape = (1, heads, config.tokens, config.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=config.dtype)

    q, k, v, dout = drawn(config.group), drawn(1), drawn(1), drawn(config.group)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = kp.attention(q, k, v, mask)
    assert isinstance(out, torch.Tensor)
    ours = [x[:, :, -last:] for x in (out, *torch.autograd.grad(out, leaves, dout))]
    wide = [x.detach().float().requires_grad_() for x in (q[:, :, -last:], k, v)]
    scores = wide[0] @ wide[1].transpose(-1, -2) * config.head_dim**-0.5
    keep = mask.dense(last, config.tokens).to(device)
    exact = torch.softmax(scores.masked_fill_(~keep, -torch.inf), dim=-1) @ wide[2]
    truth = [exact, *torch.autograd.grad(exact, wide, dout[:, :, -last:].float())]
    names = ("out", "dq", "dk", "dv")
    errors = {n: apart(x.detach(), y[:, :, -last:].detach()) for n, x, y in zip(names, ours, truth, strict=True)}
    return errors, tolerance(config, 4)  # roundings of probabilities, score gradients, their sums and the result


def demand(errors: dict[str, float], limit: float, what: str, console: Console) -> None:
    worst = max(errors, key=lambda name: errors[name])
    console.print(f"{what}: largest error {errors[worst]:.1e} ({worst}), tolerance {limit:.1e}", highlight=False)
    wrong = {name: error for name, error in errors.items() if not error <= limit}
    if wrong:
        raise SystemExit(f"{what}: errors above {limit:.1e}: {wrong}")


# The step


def train_step(
    model: Model,
    optimiser: torch.optim.Optimizer,
    data: tuple[torch.Tensor, torch.Tensor],
    masks: Sequence[Mask],
    wait: Callable[[], None],
    on_layer: Callable[[str], None] = lambda _: None,
) -> tuple[float, dict[str, float]]:
    """Run a step and return the loss and the seconds of each phase; gradients are zero before and after."""

    def clock() -> float:
        wait()
        return time.perf_counter()

    started = clock()
    loss = model(*data, masks, on_layer)
    forward = clock()
    loss.backward()
    backward = clock()
    optimiser.step()
    optimiser.zero_grad(set_to_none=False)
    done = clock()
    seconds = {"forward": forward - started, "backward": backward - forward, "optimizer": done - backward}
    return float(loss.detach()), seconds


def choose(arguments: argparse.Namespace, device: kp.Device, console: Console) -> Config:
    config = SMALL if arguments.small else FULL
    asked = {
        name: getattr(arguments, name) for name in ("tokens", "layers") if getattr(arguments, name) is not None
    }
    config = replace(config, **asked)
    needed = sum(predicted_peak(config).values())
    if arguments.small or (device.backend != "cpu" and needed < device.memory_bytes):
        return replace(config, check_layers=min(config.check_layers, config.layers))
    there = "a CPU" if device.backend == "cpu" else f"a GPU with {device.memory_bytes / 2**30:.0f} GiB"
    lack = f"{config.tokens:,} tokens need a GPU with {needed / 2**30:.0f} GiB, and this is {there}"
    if asked:
        raise SystemExit(f"{lack}; use --small, fewer --tokens or fewer --layers")
    console.print(f"{lack}: the small model instead, as with --small.", highlight=False)
    return SMALL


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="One training step on a million tokens, on one GPU.")
    parser.add_argument("--tokens", type=int, help="length of the sequence")
    parser.add_argument("--layers", type=int, help="number of layers")
    parser.add_argument("--small", action="store_true", help="a small model that any machine can take")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args(argv)
    # Merge freed blocks: otherwise the sizes of different phases would not fit into each other's gaps.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

    console = Console()
    found = kp.device()
    config = choose(arguments, found, console)
    device = torch.device(found.torch_device or "cpu")
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)

    def wait() -> None:
        if accelerator is not None:
            accelerator.synchronize(device)

    torch.manual_seed(0)
    model, masks = Model(config, device), config.masks()
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"{found.name}: {parameters:,} parameters, {config.tokens:,} tokens, {config.layers} layers")
    for mask in dict.fromkeys(masks):
        console.print(f"  {masks.count(mask)} x {mask}", highlight=False)

    errors, limit = check_gradients(model, device)
    demand(errors, limit, f"gradients at {config.check_tokens:,} tokens against the plain model", console)
    ends = {}
    for mask in dict.fromkeys(masks):
        ends[str(mask)], limit_end = check_end(config, mask, device)
        demand(ends[str(mask)], limit_end, f"the last of {config.tokens:,} tokens under {mask}", console)

    fused = True if device.type == "cuda" else None
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    warm = min(config.tokens, 2 * config.chunk)
    console.print(f"Warm-up: a step on {warm:,} tokens, which compiles kernels and allocates AdamW's moments.")
    train_step(model, optimiser, synthetic(warm, config.vocab, device, seed=2), masks, wait)
    data = synthetic(config.tokens, config.vocab, device)
    if accelerator is not None:
        accelerator.empty_cache()
        accelerator.reset_peak_memory_stats(device)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tasks = {phase: progress.add_task(phase, total=config.layers) for phase in ("forward", "backward")}

        def on_layer(phase: str) -> None:
            wait()  # per layer and direction, so that the bar shows completed, not queued, work
            progress.advance(tasks[phase])

        loss, seconds = train_step(model, optimiser, data, masks, wait, on_layer)

    total = sum(seconds.values())
    peak = None if accelerator is None else int(accelerator.max_memory_allocated(device))
    parts = predicted_peak(config)
    asked_flops, done_flops = step_flops(config)
    result = {
        "device": found.name,
        "torch": torch.__version__,
        "dtype": str(config.dtype).removeprefix("torch."),
        "tokens": config.tokens,
        "parameters": parameters,
        "layers": config.layers,
        "masks": [str(mask) for mask in masks],
        "seconds": {**seconds, "total": total},
        "tokens_per_second": config.tokens / total,
        "model_flops": asked_flops,
        "computed_flops": done_flops,
        "loss": loss,
        "peak_bytes": peak,
        "reserved_bytes": None if accelerator is None else int(accelerator.max_memory_reserved(device)),
        "predicted_peak_bytes": sum(parts.values()),
        "predicted_parts": parts,
        "gradient_errors": errors,
        "gradient_tolerance": limit,
        "end_errors": ends,
        "end_tolerance": limit_end,
    }
    report(result, console)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def report(result: dict[str, Any], console: Console) -> None:
    table = Table("", "", title=f"one step on {result['tokens']:,} tokens", show_header=False)
    for phase, seconds in result["seconds"].items():
        table.add_row(phase, f"{seconds:.2f} s")
    table.add_row("tokens per second", f"{result['tokens_per_second']:,.0f}")
    table.add_row("TFLOP/s asked for", f"{result['model_flops'] / result['seconds']['total'] / 1e12:,.2f}")
    table.add_row("TFLOP/s computed", f"{result['computed_flops'] / result['seconds']['total'] / 1e12:,.2f}")
    table.add_row("loss", f"{result['loss']:.4f}", end_section=True)
    for part, size in result["predicted_parts"].items():
        table.add_row(part, f"{size / 2**30:.3f} GiB")
    table.add_row("predicted peak", f"{result['predicted_peak_bytes'] / 2**30:.3f} GiB")
    peak = result["peak_bytes"]
    table.add_row("measured peak", "not counted on a CPU" if peak is None else f"{peak / 2**30:.3f} GiB")
    console.print(table)


if __name__ == "__main__":
    main()
