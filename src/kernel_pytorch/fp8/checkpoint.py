"""Save and restore the FP8 state of a layer: its amax histories and whether it has fallen back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kernel_pytorch.fp8.linear import STATE_SHAPE

if TYPE_CHECKING:
    from kernel_pytorch.fp8.layer import Float8Linear

__all__ = ["layer_state", "load_layer_state", "restore_layer_state", "save_layer_state"]

STATE_KEY = "fp8_state"
_SHAPE = (STATE_SHAPE[0] + 1, STATE_SHAPE[1])
"""Amax history of input and weight, amax history of the gradient, and a row of ones if the layer has fallen back."""


def layer_state(layer: Float8Linear) -> torch.Tensor:
    """Return a copy of the layer's FP8 state, float32 of shape ``_SHAPE``."""
    state = layer.fp8_state
    return torch.cat([state, state.new_full((1, state.shape[1]), float(layer.fp8_fallback is not None))])


@torch.no_grad()
def restore_layer_state(layer: Float8Linear, state: torch.Tensor, reason: str) -> None:
    """Set the layer's FP8 state. ``reason`` is reported if the layer has fallen back in ``state`` but not here."""
    layer.fp8_history.copy_(state[0])
    layer.fp8_gradient_history.copy_(state[1])
    if layer.fp8_fallback is None and bool(state[-1, 0]):
        layer.fp8_fallback = reason


def save_layer_state(layer: Float8Linear, destination: dict[str, Any], prefix: str) -> None:
    """Add the layer's FP8 state to a state dict."""
    if layer.fp8_recipe.delayed or layer.fp8_fallback is not None:
        destination[prefix + STATE_KEY] = layer_state(layer)


def load_layer_state(
    layer: Float8Linear, state: torch.Tensor | None, prefix: str, has_weight: bool, errors: list[str]
) -> None:
    """Restore the FP8 state from a state dict; reset it if the state dict has a weight and no state."""
    if state is None:
        if has_weight:
            layer.fp8_history.zero_()
            layer.fp8_gradient_history.zero_()
            layer.fp8_fallback = None
    elif tuple(state.shape) != _SHAPE or not bool((state >= 0).all()):
        errors.append(
            f"{prefix}{STATE_KEY} has shape {list(state.shape)} or negative numbers: expected the histories "
            f"that a converted layer saves, of shape {list(_SHAPE)}"
        )
    else:
        layer.fp8_fallback = None
        restore_layer_state(layer, state, "it had when the checkpoint was saved")
