"""torch.compile of a model in place, with counts of graphs and breaks; private names of torch are used only here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kernel_pytorch._compat.compiler import compile_counts, compile_supported
from kernel_pytorch._compat.structures import pytree
from kernel_pytorch.optimization.edits import Edits, Forward

__all__ = [
    "Compilations",
    "compilations",
    "compile_in_place",
    "compiled_already",
    "map_tensors",
    "unavailable",
]

_numbers = itertools.count()


@dataclass(frozen=True)
class Compilations:
    """Numbers of graphs and graph breaks of torch.compile in this process so far."""

    graphs: int
    breaks: int

    def __sub__(self, before: Compilations) -> Compilations:
        return Compilations(self.graphs - before.graphs, self.breaks - before.breaks)


def compilations() -> Compilations:
    """Return the counts of this process."""
    return Compilations(*compile_counts())


class CompiledCall:
    """The compiled call of a model, which refreshes the modules' weight caches before each call."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            return model._call_impl(*args, **kwargs)

        # Dynamo keeps at most 8 compiled graphs per code object. A separate code object has room for all inputs,
        # and its graphs are freed with it.
        call.__code__ = call.__code__.replace(co_name=f"optimized_call_{next(_numbers)}")
        self._compiled: Callable[..., Any] = torch.compile(call, **options)
        forwards = [vars(module).get("forward") for module in model.modules()]
        self._caches = [cache for cache in map(weight_cache_of, forwards) if cache is not None]
        for cache in self._caches:
            cache.guarded = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for cache in self._caches:
            cache.refresh()
        return self._compiled(*args, **kwargs)


def weight_cache_of(forward: Any) -> Any:
    """Return the weight cache of a replaced forward, or None."""
    while isinstance(forward, Forward):
        if hasattr(forward.settings, "refresh"):
            return forward.settings
        forward = forward.inner
    return None


def compile_in_place(model: nn.Module, edits: Edits, **options: Any) -> None:
    """Compile a model's call, as ``nn.Module.compile`` does, reversibly.

    A copy or a pickle of the model is not compiled, as with ``nn.Module.compile``.
    """
    edits.set(model, "_compiled_call_impl", CompiledCall(model, options))


def compiled_already(model: nn.Module) -> bool:
    """Return whether the user has compiled this model or one of its modules."""
    return any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())


def unavailable() -> str | None:
    """Return why torch.compile cannot be used here, or None."""
    return None if compile_supported() else "torch.compile does not support this Python or platform"


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """Map a function over the tensors of nested outputs, including registered output classes of transformers."""
    return pytree.tree_map_only(torch.Tensor, change, output)
