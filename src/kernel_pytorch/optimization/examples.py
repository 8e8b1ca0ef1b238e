"""Example inputs of a model: one call each, as the user passes them, and redrawn values of the same shapes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Example", "examples_of", "leaves", "real", "widened"]

_STRUCTURE = frozenset(
    {"attention_mask", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "position_ids", "token_type_ids"}
)
"""Integer arguments that describe a sequence, such as its padding. Shuffling would make them invalid."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True)
class Example:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The shapes of the tensors, such as ``2x128``."""
        shapes = ["x".join(map(str, x.shape)) or "scalar" for _, x in leaves((self.args, dict(self.kwargs)))]
        return ", ".join(dict.fromkeys(shapes)) or "no tensors"

    @property
    def signature(self) -> str:
        """The names, shapes and dtypes of the tensors."""
        tensors = leaves((self.args, dict(self.kwargs)))
        return " ".join(f"{name}:{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for name, x in tensors)

    def map(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Example:
        """Return the example with ``change(name, tensor)`` applied to each tensor."""
        args = tuple(_mapped(str(number), value, change) for number, value in enumerate(self.args))
        return Example(args, {name: _mapped(name, value, change) for name, value in self.kwargs.items()})

    def own(self) -> Example:
        """Return the example with copies of everything that a call could mutate, such as a KV cache."""
        return self.map(lambda _, tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))

    def redrawn(self, seed: int) -> Example:
        """Return an example with random values of the same shapes and ranges.

        Floating-point tensors are redrawn with the same mean, deviation and bounds. The values of integer tensors
        are shuffled, so that indices stay valid. Masks, positions and constants are unchanged.
        """
        generator = torch.Generator().manual_seed(seed)
        return self.map(lambda name, tensor: _redrawn(name, tensor, generator))


def examples_of(inputs: Any) -> tuple[Example, ...]:
    """Convert a user's inputs to examples: a tuple of arguments, a mapping, a tensor, or a list of these.

    Example:
        >>> import torch
        >>> [example.label for example in examples_of([(torch.ones(2, 8),), {"input_ids": torch.ones(4, 16)}])]
        ['2x8', '4x16']
    """
    several = inputs if isinstance(inputs, list) else [inputs]
    if not several:
        raise ValueError("inputs=[]: give at least one example, such as (x,) or {'input_ids': ids}")
    return tuple(_example(one) for one in several)


def _example(given: Any) -> Example:
    if isinstance(given, Example):
        return given
    if isinstance(given, torch.Tensor):
        return Example((given,), {})
    if isinstance(given, tuple):
        return Example(given, {})
    if isinstance(given, Mapping):
        return Example((), dict(given))
    raise TypeError(
        f"inputs: an example is a tuple of arguments, a mapping of named arguments or a tensor, and this is a "
        f"{type(given).__name__}; give several examples as a list"
    )


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested containers with its path: Hugging Face outputs and KV caches included."""
    if isinstance(value, torch.Tensor):
        yield name or "output", value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        named = getattr(value, "_fields", range(len(value)))
        for key, item in zip(named, value, strict=True):
            yield from leaves(item, f"{name}.{key}".lstrip("."))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from leaves(getattr(value, part.name), f"{name}.{part.name}".lstrip("."))
    elif isinstance(getattr(value, "layers", None), list):  # a transformers KV cache
        for number, layer in enumerate(value.layers):
            for half in ("keys", "values"):
                yield from leaves(getattr(layer, half, None), f"{name}.{number}.{half}".lstrip("."))
    elif hasattr(value, "self_attention_cache"):  # an encoder-decoder cache
        yield from leaves(value.self_attention_cache, f"{name}.self".lstrip("."))
        yield from leaves(value.cross_attention_cache, f"{name}.cross".lstrip("."))


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as a real one with a last dimension of 2, and other tensors unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a floating-point or complex tensor in float64 or complex128, and other tensors unchanged."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _mapped(name: str, value: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(name, value)
    if isinstance(value, _PLAIN):
        return value
    if type(value) in (list, tuple):
        return type(value)(_mapped(name, item, change) for item in value)
    if type(value) is dict:
        return {key: _mapped(str(key), item, change) for key, item in value.items()}
    return copy.deepcopy(value)


def _redrawn(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if name in _STRUCTURE or tensor.numel() < 2 or tensor.dtype is torch.bool or tensor.is_complex():
        return tensor
    values = tensor.detach().cpu()
    flat = values.flatten()
    if not tensor.is_floating_point():
        ordered = values.ndim > 0 and bool((values.diff(dim=-1) >= 0).all())
        if ordered or bool(((flat == 0) | (flat == 1)).all()):
            return tensor  # positions, offsets or a mask
        shuffled = flat[torch.randperm(flat.numel(), generator=generator)]
        return shuffled.reshape(values.shape).to(tensor.device)
    wide = flat.double()
    if not bool(wide.isfinite().all()) or bool(((wide == 0) | (wide == 1)).all()) or float(wide.std()) == 0:
        return tensor  # an additive or multiplicative mask, or a constant
    drawn = torch.randn(values.shape, generator=generator, dtype=torch.float64) * wide.std() + wide.mean()
    fresh = drawn.clamp(float(wide.min()), float(wide.max())).to(tensor.dtype).to(tensor.device)
    return fresh.requires_grad_(tensor.requires_grad)
