"""FP8 training of linear layers with ``kp.fp8``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kernel_pytorch.hardware_abstraction.registry import device
from kernel_pytorch.optimization.candidate import Candidate, Context, Sites, Stage
from kernel_pytorch.optimization.candidates.modules import sites_of
from kernel_pytorch.optimization.edits import Edits

__all__ = ["FP8_TRAINING"]


def _match(model: nn.Module, context: Context) -> Sites | str:
    here = device(context.device)
    if not {"float8_e4m3fn", "float8_e4m3fnuz"} & here.matrix_formats:
        return f"{here.name} has no 8-bit matrix units"
    last = _head(model)

    def wanted(module: nn.Module) -> str | bool:
        if type(module) is not nn.Linear:
            return False
        if module is last:
            return "the logits are sensitive to rounding"
        if module.weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"its weight is {str(module.weight.dtype).removeprefix('torch.')}"
        return True

    return sites_of(model, wanted, "the model has no nn.Linear to convert")


def _head(model: Any) -> nn.Module | None:
    found = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return found if isinstance(found, nn.Module) else None


def _convert(model: nn.Module, sites: tuple[str, ...]) -> None:
    from kernel_pytorch.fp8 import convert

    convert(model, "auto", layers=lambda name, _: name in sites)


def _revert(model: nn.Module, _: tuple[str, ...]) -> None:
    from kernel_pytorch.fp8 import revert

    revert(model)


def _apply(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    edits.call(_convert, _revert, model, sites)


FP8_TRAINING = Candidate(
    "fp8-training",
    "linear layers trained in FP8 with kp.fp8, where that is measured to gain",
    "approximate",
    Stage.PRECISION,
    _match,
    _apply,
    goals=frozenset({"training", "memory"}),
    conflicts=frozenset({"torchao-float8"}),
    adds_state=frozenset({"fp8_state"}),
)
