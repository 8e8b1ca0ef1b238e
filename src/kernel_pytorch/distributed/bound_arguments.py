"""Access the arguments of a call by name, including those in ``**kwargs``."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["argument_of", "named_of", "set_argument", "variable_of"]


def variable_of(signature: inspect.Signature) -> str | None:
    """Return the name of ``**kwargs``, or None."""
    return next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)


def named_of(bound: inspect.BoundArguments) -> list[tuple[str, Any]]:
    variable = variable_of(bound.signature)
    named = [(name, value) for name, value in bound.arguments.items() if name != variable]
    return [*named, *bound.arguments.get(variable or "", {}).items()]


def argument_of(bound: inspect.BoundArguments, name: str) -> Any:
    return dict(named_of(bound)).get(name)


def set_argument(signature: inspect.Signature, bound: inspect.BoundArguments, name: str, value: Any) -> None:
    if name in signature.parameters:
        bound.arguments[name] = value
    else:
        variable = variable_of(signature)
        assert variable is not None
        bound.arguments.setdefault(variable, {})[name] = value
