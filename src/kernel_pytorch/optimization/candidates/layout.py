"""Memory formats: channels-last convolutions."""

from __future__ import annotations

import torch
from torch import nn

from kernel_pytorch.optimization.candidate import Candidate, Context, Sites, Stage
from kernel_pytorch.optimization.candidates.modules import sites_of
from kernel_pytorch.optimization.edits import Edits

__all__ = ["CHANNELS_LAST"]


def _match(model: nn.Module, context: Context) -> Sites | str:
    return sites_of(model, lambda module: type(module) is nn.Conv2d, "the model has no nn.Conv2d")


def _apply(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    for name in sites:
        weight = model.get_submodule(name).get_parameter("weight")
        edits.set_layout(weight, torch.channels_last)


CHANNELS_LAST = Candidate(
    "channels-last", "weights of convolutions in channels-last memory format", "exact", Stage.LAYOUT, _match, _apply
)
