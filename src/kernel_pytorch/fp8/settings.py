"""What a module's forward may read besides its parameters, to see whether it has changed since it was looked at.

A module is taken for a SwiGLU or a norm by what it computes when it is converted. A flag that is set later, or
another activation, may make it compute something else: then it must run as it is.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["SETTINGS", "settings_of", "unchanged"]

SETTINGS = "_fp8_settings"
"""The attribute of a module that is fused."""
_PLAIN = (bool, int, float, str, type(None))


def settings_of(module: nn.Module, *apart: str) -> list[tuple[nn.Module, str, Any]]:
    """Numbers, texts, flags and children of a module and of its parts, but for its linear layers.

    Args:
        apart: attributes that whoever runs the module reads himself.
    """
    found: list[tuple[nn.Module, str, Any]] = []
    for part in module.modules():
        if isinstance(part, nn.Linear):
            continue
        plain = [(name, value) for name, value in vars(part).items() if type(value) in _PLAIN]
        children = [(name, child) for name, child in part.named_children() if not isinstance(child, nn.Linear)]
        found += [(part, name, value) for name, value in plain + children if name not in ("training", *apart)]
    return found


def unchanged(settings: list[tuple[nn.Module, str, Any]]) -> bool:
    """Whether all of them are what they were. Read so that torch.compile looks at them before each call."""
    for part, name, value in settings:
        now = getattr(part, name, settings)
        if now is not value and (isinstance(value, nn.Module) or now != value):
            return False
    return True
