"""Paired training runs in bf16 and FP8: loss curves and step times from the same seeds and batches.

Every arm (``bf16`` and each recipe) trains the same transformer for every seed, from the same parameters on the same
batches in the same order; only the linear layers of the blocks differ. Two seeds differ in parameters and batches.
Their difference in the ``bf16`` arm is the yardstick for the difference between arms. Results are appended to a file
of JSON lines during training, so an interrupted run continues after its last finished training.

Shapes: B sequences of T tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from kernel_pytorch._compat.compiler import compile_limits
from kernel_pytorch.parity.model import Size, Transformer, size_named

__all__ = [
    "BASELINE",
    "Convert",
    "Finished",
    "Results",
    "Settings",
    "Started",
    "Steps",
    "default_convert",
    "train",
]

BASELINE = "bf16"
"""The arm without conversion."""
RESULTS_FILE = "results.jsonl"

Convert = Callable[[nn.Module, str], nn.Module]
"""A function that converts the linear layers of a module to a recipe, in place, and returns the module."""


# Results


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="settings", tag_field="kind"):
    """The settings that all runs of a folder share; the first line of its results."""

    size: str
    steps: int
    device: str
    """The torch device."""
    device_name: str
    torch: str
    compiled: bool


class Started(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="started", tag_field="kind"):
    """The start of a training; it discards the steps of an interrupted one."""

    arm: str
    seed: int


class Steps(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="steps", tag_field="kind"):
    """The next steps of the current training: losses before each update, and seconds of each step."""

    arm: str
    seed: int
    losses: list[float]
    seconds: list[float]


class Finished(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="finished", tag_field="kind"):
    """The end of a training: at its last step, or at a non-finite loss."""

    arm: str
    seed: int
    commit: str
    """Commit of the checkout; empty if it had local changes."""
    held_out: float | None = None
    """Loss on the held-out text, with the arm's layers."""
    held_out_bf16: float | None = None
    """Held-out loss of the same parameters in the unconverted model."""
    peak_bytes: int | None = None
    """Peak device memory; None if the device does not count it."""
    failed_step: int | None = None
    """The step of a non-finite loss, from 0."""
    failed_loss: str = ""
    fell_back: tuple[str, ...] = ()
    """Names of the layers that fell back to their dtype."""

    def __str__(self) -> str:
        if self.failed_step is None:
            return f"{self.arm} seed {self.seed}: held-out loss {self.held_out}"
        return f"{self.arm} seed {self.seed}: the loss is {self.failed_loss} at step {self.failed_step}"


_Line = Settings | Started | Steps | Finished


class Results:
    """The results of a folder, to read and append to.

    Example:
        >>> import tempfile
        >>> settings = Settings("small", 200, "cpu", "a CPU", "2.13", False)
        >>> results = Results(tempfile.mkdtemp(), settings)
        >>> results.write(Started("bf16", 0))
        >>> results.write(Finished("bf16", 0, "", failed_step=0, failed_loss="nan"))
        >>> print(results.finished["bf16", 0])
        bf16 seed 0: the loss is nan at step 0
    """

    def __init__(self, folder: str | Path, settings: Settings | None = None) -> None:
        """Open a folder's results; with settings, which must equal the folder's, also for writing."""
        self.path = Path(folder) / RESULTS_FILE
        self.finished: dict[tuple[str, int], Finished] = {}
        self.losses: dict[tuple[str, int], list[float]] = {}
        self.seconds: dict[tuple[str, int], list[float]] = {}
        lines = list(self._read())
        if not lines and settings is None:
            raise FileNotFoundError(f"{self.path}: no results there; kernel-pytorch parity --out makes them")
        first = lines[0] if lines else settings
        if not isinstance(first, Settings):
            raise ValueError(f"{self.path} does not begin with its settings: it is no file of this command")
        self.settings = first
        for line in lines[1:]:
            self._take(line)
        if settings is not None and not lines:
            self.write(settings)
        elif settings is not None:
            self._check(settings)

    def _read(self) -> Iterator[_Line]:
        if not self.path.exists():
            return
        text = self.path.read_bytes()
        whole = text.rfind(b"\n") + 1
        for number, line in enumerate(text[:whole].splitlines(), 1):
            try:
                yield msgspec.json.decode(line, type=_Line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{self.path}, line {number}, cannot be read: {error}") from error

    def _check(self, wanted: Settings) -> None:
        for name in wanted.__struct_fields__:
            there, here = getattr(self.settings, name), getattr(wanted, name)
            if there != here:
                raise ValueError(
                    f"{self.path.parent} holds results with {name}={there!r} and this run has {here!r}: name another "
                    f"folder with --out"
                )

    def _take(self, line: _Line) -> None:
        if isinstance(line, Settings):
            raise ValueError(f"{self.path} holds settings twice: it is no file of this command")
        key = line.arm, line.seed
        if isinstance(line, Started):
            self.finished.pop(key, None)
            self.losses[key], self.seconds[key] = [], []
        elif isinstance(line, Steps):
            self.losses[key] += line.losses
            self.seconds[key] += line.seconds
        else:
            self.finished[key] = line

    def write(self, line: _Line) -> None:
        """Append a line and flush it to the system."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            if not isinstance(line, Settings):
                file.truncate(self._whole())
            file.write(msgspec.json.encode(line) + b"\n")
        if not isinstance(line, Settings):
            self._take(line)

    def _whole(self) -> int:
        """Return the number of bytes up to the last complete line."""
        return self.path.read_bytes().rfind(b"\n") + 1

    def failed(self, arm: str) -> Finished | None:
        """Return the failed run that ended an arm, or None."""
        return next((run for run in self.finished.values() if run.arm == arm and run.failed_step is not None), None)


# Training


def default_convert(module: nn.Module, recipe: str) -> nn.Module:
    """``kp.fp8.convert``, imported at first use."""
    from kernel_pytorch.fp8.conversion import convert

    return convert(module, recipe)


def train(
    results: Results,
    arm: str,
    seed: int,
    text: torch.Tensor,
    held_out: torch.Tensor,
    convert: Convert = default_convert,
    *,
    commit: str = "",
    on_steps: Callable[[Steps], None] = lambda _: None,
) -> Finished:
    """Train one arm from one seed on ``text`` (steps, B, T + 1), and append its results to ``results``.

    Every arm has float32 parameters under bfloat16 autocast, and AdamW with warm-up, cosine decay and gradient
    clipping.

    Example:
        >>> import tempfile
        >>> from kernel_pytorch.parity.model import SIZES, batches, held_out_batches
        >>> text, held_out = batches(SIZES["small"], 2, seed=0), held_out_batches(SIZES["small"])[:1]
        >>> results = Results(tempfile.mkdtemp(), Settings("small", 2, "cpu", "a CPU", "2.13", False))
        >>> run = train(results, "bf16", 0, text, held_out)
        >>> 5 < run.held_out < 7
        True
    """
    from kernel_pytorch.fp8.monitor import layers_of

    settings = results.settings
    size = size_named(settings.size)
    device = torch.device(settings.device)
    results.write(Started(arm, seed))
    model = Transformer(size, seed).to(device)
    if arm != BASELINE:
        model.blocks = convert(model.blocks, arm)  # type: ignore[assignment]
    counted = _reset_peak(device)
    losses: list[float] = []
    failure: tuple[int, str] | None = None
    with _compiled(model) if settings.compiled else nullcontext():
        for steps in _steps(model, arm, seed, text.to(device), size.learning_rate):
            finite = next((i for i, loss in enumerate(steps.losses) if not math.isfinite(loss)), None)
            if finite is not None:
                failure = len(losses) + finite, str(steps.losses[finite])
                steps = Steps(arm, seed, steps.losses[:finite], steps.seconds[:finite])
            losses += steps.losses
            results.write(steps)
            on_steps(steps)
            if failure:
                break
    if failure:
        run = Finished(arm, seed, commit, failed_step=failure[0], failed_loss=failure[1])
    else:
        run = Finished(
            arm,
            seed,
            commit,
            held_out=_evaluate(model, held_out.to(device)),
            held_out_bf16=_evaluate(_unconverted(model, size).to(device), held_out.to(device)),
            peak_bytes=torch.get_device_module(device).max_memory_allocated(device) if counted else None,
            fell_back=tuple(name for name, layer in layers_of(model).items() if layer.fp8_fallback is not None),
        )
    results.write(run)
    return run


def _reset_peak(device: torch.device) -> bool:
    """Reset the device's peak memory; return whether it counts memory."""
    if device.type == "cpu":
        return False
    module = torch.get_device_module(device)
    module.empty_cache()
    module.reset_peak_memory_stats(device)
    return True


@contextmanager
def _compiled(model: Transformer) -> Iterator[None]:
    """Compile the blocks inside the context. They share one compilation, as they differ only in their parameters."""
    torch.compiler.reset()  # do not depend on what was compiled before
    for block in model.blocks:
        block.compile(dynamic=False)
    # Differently converted blocks need a compilation each; past the limit a block would run uncompiled.
    limits = {"recompile_limit": 8 * len(model.blocks), "fail_on_recompile_limit_hit": True}
    with compile_limits(**limits):
        yield


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16)


def _schedule(step: int, steps: int) -> float:
    """Return the factor of the peak learning rate: linear warm-up, then cosine decay to 0.1."""
    warmup = max(1, min(100, steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def _steps(model: Transformer, arm: str, seed: int, text: torch.Tensor, learning_rate: float) -> Iterator[Steps]:
    """Train on all of the text; losses are copied from the device in batches, to avoid synchronizing."""
    device, count = text.device, len(text)
    every = 10 if device.type == "cpu" else 100
    optimizer = torch.optim.AdamW(
        model.parameters(), learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type != "cpu"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, count))
    losses, clock = torch.zeros(count, device=device), _Clock(device)
    for step in range(count):
        with _autocast(device):
            loss = model(text[step])
        # A separate autograd thread alternates with the main one on two cores, which fetch each other's caches.
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses[step] = loss.detach()
        clock.mark()
        if (step + 1) % every == 0 or step + 1 == count:
            seconds = clock.seconds()  # synchronizes
            fetched = losses[step + 1 - len(seconds) : step + 1].tolist()
            yield Steps(arm, seed, [round(x, 6) for x in fetched], [round(x, 7) for x in seconds])
            clock = _Clock(device)  # do not count the processing of losses in the next step


class _Clock:
    """Seconds between marks, by device events if the device has them, so that marking does not synchronize."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if self._module is None:
            self._marks.append(time.perf_counter())
            return
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        self._marks.append(event)

    def seconds(self) -> list[float]:
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self._module is None:
            return [end - start for start, end in pairs]
        self._marks[-1].synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in pairs]


def _evaluate(model: nn.Module, held_out: torch.Tensor) -> float:
    # Uncompiled: compiling again without gradients would take longer than the evaluation.
    with torch.no_grad(), _autocast(held_out.device), torch.compiler.set_stance("force_eager"):
        losses = torch.stack([model(batch) for batch in held_out])
    return round(float(losses.double().mean()), 6)


def _unconverted(model: Transformer, size: Size) -> Transformer:
    """Return an unconverted model with the same parameters."""
    plain = Transformer(size, seed=0)
    missing = plain.load_state_dict(model.state_dict(), strict=False).missing_keys
    if missing:
        raise RuntimeError(f"convert changed the names of parameters: {missing[0]} is gone; names must stay")
    return plain
