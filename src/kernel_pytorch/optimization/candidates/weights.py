"""Cached weights of inference plans, in addition to the model's own: in lower precision, or folded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kernel_pytorch.optimization.edits import Forward

__all__ = ["WeightCache", "needs_gradients", "warn_of_gradients"]


class WeightCache:
    """Tensors derived from the weights of some modules, recomputed when a weight changes. Not copied or pickled.

    Changes are detected by the version and the address of a weight. An in-place operation on ``weight.data`` changes
    neither. PEFT merges adapters in this way, so the merged adapters of ``owner``, the enclosing layer, are checked
    as well.
    """

    def __init__(
        self,
        make: Callable[..., tuple[torch.Tensor, ...]],
        *modules: nn.Module,
        owner: nn.Module | None = None,
    ) -> None:
        self.make, self.modules, self.owner = make, modules, owner
        self.guarded = False
        """Whether code outside the compiled graph refreshes the cache before each call."""
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._source: tuple[object, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "guarded": False, "_tensors": (), "_source": ()}

    def refresh(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors; recompute them if a weight has changed."""
        source = (
            *getattr(self.owner, "merged_adapters", ()),
            *(
                (part.data_ptr(), part._version)
                for module in self.modules
                for part in (*module._parameters.values(), *module._buffers.values())
                if part is not None
            ),
        )
        if source != self._source:
            with torch.no_grad():
                made = self.make(*self.modules)
                if self._tensors and [x.shape for x in made] == [x.shape for x in self._tensors]:
                    for old, new in zip(self._tensors, made, strict=True):
                        old.copy_(new)  # in place, because compiled graphs hold the old tensors
                else:
                    self._tensors = made
            self._source = source
        return self._tensors

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors; also works in a compiled graph."""
        if not torch.compiler.is_compiling():
            return self.refresh()
        return self._tensors if self.guarded else self.make(*self.modules)


def needs_gradients(call: Forward, x: torch.Tensor) -> bool:
    """Return whether a call of a linear layer needs gradients and must run in full precision; warn if so."""
    recorded = torch.is_grad_enabled() and (x.requires_grad or call.module.get_parameter("weight").requires_grad)
    if recorded:
        warn_of_gradients()
    return recorded


def warn_of_gradients() -> None:
    """Warn that a call does not use the inference plan and runs as in the original model."""
    if not torch.compiler.is_compiling():
        warnings.warn(
            "a plan for inference runs a call that records gradients in full precision: call the model under "
            "torch.no_grad() or torch.inference_mode(), or optimise it for training",
            stacklevel=3,
        )
