"""Share one quantized weight between the micro-batches of a gradient accumulation step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from kernel_pytorch.fp8.scaled_tensor import ScaledTensor

__all__ = ["WeightCache", "accumulate"]


class _Entry(NamedTuple):
    weight: torch.Tensor
    version: int
    kind: tuple[object, ...]
    cast: ScaledTensor


class WeightCache:
    """The quantized weight of one layer, valid inside one ``accumulate`` scope."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._entry: _Entry | None = None

    def get(self, weight: torch.Tensor, kind: tuple[object, ...], transposed: bool) -> ScaledTensor | None:
        """Return the cached quantized weight, or None if there is none of this weight, kind and layout.

        Args:
            weight: (N, K), the weight that the layer is about to use.
            kind: format, granularity and whether scales are powers of two.
            transposed: whether the transposed data is needed too.

        Raises:
            RuntimeError: the weight was written to since it was quantized.
        """
        entry = self._entry
        if entry is None or entry.weight is not weight:
            return None
        if entry.version != weight._version:
            raise RuntimeError(
                f"{self.name} was changed inside kp.fp8.accumulate(model), which reuses its quantized data: call "
                f"optimizer.step(), load_state_dict() and other writes after the with block"
            )
        if entry.kind != kind or (transposed and entry.cast.data_t.numel() != weight.numel()):
            return None
        return entry.cast

    def put(self, weight: torch.Tensor, kind: tuple[object, ...], cast: ScaledTensor) -> None:
        """Cache a quantized weight. Inference tensors have no version to compare, so they are not cached."""
        if not weight.is_inference():
            self._entry = _Entry(weight, weight._version, kind, cast)


@contextlib.contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Quantize each weight once for all forwards inside the ``with`` block.

    For gradient accumulation: the first forward quantizes a weight, later ones reuse the quantized data, which takes
    one byte per element (two with the transposed data) until the block ends. Weights must not change inside. A write
    that torch's version counter sees raises an error that names the weight; a write through ``.data`` is not seen.
    Compiled forwards (``torch.compile``) quantize in every forward, with or without the scope.

    Args:
        model: a model converted by ``kp.fp8.convert``; layers that are not in FP8 are not affected.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> model = kp.fp8.convert(torch.nn.Sequential(torch.nn.Linear(32, 16)), "tensorwise")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with kp.fp8.accumulate(model):
        ...     for batch in torch.randn(4, 8, 32):
        ...         model(batch).sum().backward()
        >>> optimizer.step()
    """
    from kernel_pytorch.fp8.module import Float8Linear

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Float8Linear)}
    outer = {name: layer.weight_cache for name, layer in layers.items()}
    for name, layer in layers.items():
        if layer.weight_cache is None:  # an outer scope's cache is shared
            layer.weight_cache = WeightCache(f"{name}.weight".lstrip("."))
    try:
        yield
    finally:
        for name, layer in layers.items():
            if isinstance(layer, Float8Linear):  # it may have been reverted inside
                layer.weight_cache = outer[name]
