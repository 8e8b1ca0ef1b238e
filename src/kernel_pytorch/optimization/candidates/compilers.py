"""torch.compile and its modes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from kernel_pytorch.optimization.candidate import Candidate, Context, Sites, Stage
from kernel_pytorch.optimization.compiler import compile_in_place, unavailable
from kernel_pytorch.optimization.edits import Edits

__all__ = ["COMPILE", "COMPILE_MAX_AUTOTUNE", "COMPILE_REDUCE_OVERHEAD"]


def _match(model: nn.Module, context: Context) -> Sites | str:
    return unavailable() or Sites(("",))


def _match_on_accelerator(reason: str, model: nn.Module, context: Context) -> Sites | str:
    return reason if context.device.type == "cpu" else _match(model, context)


def _apply(mode: str | None, model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    compile_in_place(model, edits, **({"mode": mode} if mode else {}))


def _compiler(
    name: str, summary: str, mode: str | None, match: Callable[[nn.Module, Context], Sites | str]
) -> Candidate:
    settings = {"mode": mode or "default"}
    return Candidate(name, summary, "exact", Stage.COMPILE, match, partial(_apply, mode), settings=settings)


COMPILE = _compiler("compile", "torch.compile of the whole model", None, _match)
COMPILE_REDUCE_OVERHEAD = _compiler(
    "compile-reduce-overhead",
    "torch.compile with CUDA graphs",
    "reduce-overhead",
    partial(_match_on_accelerator, "records CUDA graphs, and the model is on a CPU"),
)
COMPILE_MAX_AUTOTUNE = _compiler(
    "compile-max-autotune",
    "torch.compile with measured kernels",
    "max-autotune-no-cudagraphs",
    partial(_match_on_accelerator, "tunes kernels of GPUs, and the model is on a CPU"),
)
