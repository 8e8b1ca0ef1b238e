"""An example model: ``kernel-pytorch lower acme_backend.example:model --backend acme ...``."""

from __future__ import annotations

import torch


def model() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model and its example inputs."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))
    return layers.eval(), (torch.ones(4, 64),)
