"""``Float8Linear``: an ``nn.Linear`` whose GEMMs run in FP8; ``Float8Conv1D``: the same for GPT-2's ``Conv1D``.

Weight and bias stay the same Parameters under the same names. The layer adds four small buffers that no state dict
has: forward and gradient counts of saturated, underflowed and non-finite elements, and the amax histories of delayed
scaling. ``forward`` chooses how calls of one kind are computed (``autotune`` with recipe auto), then calls
``autograd.checked_linear``.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import is_grad_enabled, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import functional

from kernel_pytorch._compat.modes import backward_running, forward_ad_active, jit_tracing
from kernel_pytorch._compat.structures import disable_modes
from kernel_pytorch.fp8.autograd import (
    COUNTS_SHAPE,
    STATE_SHAPE,
    Buffers,
    GemmSpec,
    check_linear,
    checked_linear,
    compute_dtype,
    quantize_layer_weight,
)
from kernel_pytorch.fp8.autotune import Measured, call_of, can_measure, may_have_matrix_units, measured_for, rounded
from kernel_pytorch.fp8.checkpoint import reset_layer_state
from kernel_pytorch.fp8.fsdp import GatheredWeight, ShardedWeight, plain_weight, restore
from kernel_pytorch.fp8.quantize import ScaledTensor
from kernel_pytorch.fp8.recipe import Recipe, recipe_of
from kernel_pytorch.fp8.rms_norm import request_cast
from kernel_pytorch.fp8.transforms import refuse, refuse_transforms, transforms_active

__all__ = [
    "BUFFERS",
    "Float8Conv1D",
    "Float8Linear",
    "WeightCache",
    "accumulate",
    "conv1d_class",
    "unsupported_weight",
]

BUFFERS = {
    "fp8_forward_counts": ((COUNTS_SHAPE[0] - 1, *COUNTS_SHAPE[1:]), torch.int64),
    "fp8_history": (STATE_SHAPE[1:], torch.float32),
    "fp8_gradient_counts": ((1, *COUNTS_SHAPE[1:]), torch.int64),
    "fp8_gradient_history": (STATE_SHAPE[1:], torch.float32),
}
"""Shapes and dtypes of the buffers, see ``autograd.Buffers``."""
_CACHES: Mapping[str, Callable[[], Any]] = {
    "weight_cache": lambda: None,
    "_plain_numel": dict,
    "_plain_up_to": lambda: -1,
    "_narrow": bool,
    "_calls": dict,
}
"""Per-instance caches and their initial values. Dropped by copy and pickle."""
_SET = ("fp8_text", "fp8_auto", "fp8_alone", "fp8_fallback", "fp8_gather")
"""Further attributes that ``from_linear`` sets."""


def _new_buffers(device: torch.device) -> dict[str, torch.Tensor]:
    """Return zeroed buffers."""
    with torch.inference_mode(False):
        return {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in BUFFERS.items()}


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


class _CallKind(NamedTuple):
    """The key of ``_calls``: everything that decides how a call is computed."""

    own: bool
    """Whether x is the input of the layer itself, not that of a fused SwiGLU."""
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    x_requires_grad: bool
    weight_requires_grad: bool
    weight_dtype: torch.dtype
    weight_device: torch.device
    weight_type: type
    bias_dtype: torch.dtype | None
    grad_enabled: bool
    autocast_dtype: torch.dtype | None
    training: bool


class Float8Linear(nn.Linear):
    """An ``nn.Linear`` converted in place by ``kp.fp8.convert``; see there."""

    fp8_text: str
    """``Recipe.text``: compiled code guards on this one string instead of nine fields."""
    fp8_auto: bool
    """Whether each GEMM runs in FP8 only where that was measured to be faster."""
    fp8_alone: bool
    """Whether it is the only converted layer of the model."""
    fp8_fallback: str | None
    """Why the layer has fallen back to its dtype, or None."""
    fp8_gather: bool | str | None
    """True if FSDP2 all-gathers the weight in FP8, or the reason why it does not; None if not asked for."""
    fp8_forward_counts: torch.Tensor
    fp8_history: torch.Tensor
    fp8_gradient_counts: torch.Tensor
    fp8_gradient_history: torch.Tensor
    weight_cache: WeightCache | None
    """Set inside ``kp.fp8.accumulate``."""
    _plain_numel: dict[Any, int]
    """By ``_kind``: inputs of at most this many elements are not faster in FP8."""
    _plain_up_to: int
    """``_plain_numel`` for calls that need every gradient, if the weight is 16-bit: read without a dict lookup."""
    _narrow: bool
    """Whether the weight is 16-bit, so that a measurement holds with and without autocast."""
    _calls: dict[_CallKind, tuple[Recipe, GemmSpec] | None]

    _plain: Callable[..., torch.Tensor] = staticmethod(functional.linear)
    """The layer in its dtype: a function of x, weight and bias."""

    @staticmethod
    def from_linear(linear: nn.Module, recipe: Recipe, auto: bool, alone: bool) -> Float8Linear:
        """Convert the layer in place and return it."""
        layer: Any = linear
        if type(linear) is nn.Linear:
            layer.__class__ = Float8Linear
        else:
            layer.__class__ = Float8Conv1D
            layer.in_features, layer.out_features = layer.weight.shape
        layer.fp8_text, layer.fp8_auto, layer.fp8_fallback, layer.fp8_gather = recipe.text, auto, None, None
        layer.fp8_alone = alone
        for name, initial in _CACHES.items():
            setattr(layer, name, initial())
        for name, buffer in _new_buffers(layer.weight.device).items():
            layer.register_buffer(name, buffer, False)
        layer._clear_caches()
        converted: Float8Linear = layer
        return converted

    def revert(self) -> nn.Module:
        """Undo ``from_linear``, in place, and return the layer."""
        for name in BUFFERS:
            del self._buffers[name]
            self._non_persistent_buffers_set.discard(name)
        for name in (*_SET, *_CACHES):
            delattr(self, name)
        self.__class__ = self._unconverted()
        return self

    def _unconverted(self) -> Any:
        """Return the class of the layer before its conversion."""
        return nn.Linear

    def matrix(self) -> torch.Tensor:
        """Return the weight as (N, K)."""
        return self.weight

    @property
    def fp8_recipe(self) -> Recipe:
        """The recipe of the conversion."""
        return recipe_of(self.fp8_text)

    @fp8_recipe.setter
    def fp8_recipe(self, recipe: Recipe) -> None:
        self.fp8_text = recipe.text
        self._clear_caches()

    def _clear_caches(self) -> None:
        """Drop the caches: the weight, its dtype or its device has changed."""
        self._calls.clear()
        self._plain_numel.clear()
        self._plain_up_to = -1
        self._narrow = self.weight.itemsize < 4

    def recipe_for(self, x: torch.Tensor) -> Recipe | None:
        """Return the recipe of a call, with the GEMMs that run in FP8; None if none does."""
        call = self._call_for(x, False)
        return None if call is None else call[0]

    def _call_for(self, x: torch.Tensor, own: bool) -> tuple[Recipe, GemmSpec] | None:
        """Return how calls of this kind are computed, decided and checked once; None if not in FP8.

        Args:
            own: whether x is the input of the layer itself, not that of a fused SwiGLU.
        """
        if self.fp8_fallback is not None:
            return None
        if is_compiling():
            return self._new_call_for(x, own)
        weight, bias, kind = self.weight, self.bias, x.device.type
        mixed = torch.is_autocast_enabled(kind) if kind != "meta" else False
        key = _CallKind(
            own,
            x.shape,
            x.dtype,
            x.device,
            x.requires_grad,
            weight.requires_grad,
            weight.dtype,
            weight.device,
            type(weight),
            None if bias is None else bias.dtype,
            is_grad_enabled(),
            torch.get_autocast_dtype(kind) if mixed else None,
            self.training,
        )
        if key not in self._calls:
            if len(self._calls) > 4096:
                self._calls.clear()
            found = self._new_call_for(x, own)
            if self.fp8_auto and (jit_tracing() or not can_measure(kind)):
                return found  # sizes are symbolic, or the call could not be measured: do not cache
            if self._narrow != (weight.itemsize < 4):
                self._clear_caches()
            self._calls[key] = found
            recording = weight.requires_grad and is_grad_enabled()
            if found is None and self.fp8_auto and own and recording and kind != "meta":
                # Fewer rows are not faster in FP8 either.
                same = self._kind(x)
                self._plain_numel[same] = max(self._plain_numel.get(same, -1), x.numel())
                if self._narrow:
                    self._plain_up_to = self._plain_numel.get(True, -1)
        call = self._calls[key]
        if call is not None and (transforms_active() or forward_ad_active()):
            refuse_transforms(x, weight, bias)
        return call

    def _new_call_for(self, x: torch.Tensor, own: bool) -> tuple[Recipe, GemmSpec] | None:
        weight, recording = self.matrix(), is_grad_enabled()
        if not is_compiling():
            why = unsupported_weight(self.weight)
            if why is not None:
                raise TypeError(f"a layer that kp.fp8.convert has converted: {why}")
        if self.fp8_auto and not may_have_matrix_units(x.device.type):
            return None
        rows = rounded(math.prod(x.shape[:-1])) if self.fp8_auto else 0
        call = call_of(
            self.fp8_text, self.training, rows, self.fp8_alone, is_compiling(), x.device.type,
            x.device.index, compute_dtype(x), (weight.shape[0], weight.shape[1]), weight.dtype, self.bias is not None,
            recording and x.requires_grad, recording and weight.requires_grad,
        )  # fmt: skip
        if call is None:
            return None
        if own:
            check_linear(x, weight, self.bias)
        recipe, gemms = call
        return recipe, GemmSpec(*gemms)

    def fp8_gains_nothing(self, x: torch.Tensor) -> bool:
        """Return whether ``auto`` has measured that such a call is not faster in FP8."""
        numel = x.numel()
        return numel <= self._plain_up_to or numel <= self._plain_for(x)

    def _plain_for(self, x: torch.Tensor) -> int:
        """Return the largest number of elements for which inputs such as x are not faster in FP8; -1 if unknown."""
        known = self._plain_numel
        return known.get(self._kind(x), -1) if known else -1

    def _kind(self, x: torch.Tensor) -> Any:
        """Return the key of ``_plain_numel``: all that decides whether FP8 is faster, except the rows."""
        recorded = x.requires_grad or not is_grad_enabled()
        return recorded if self._narrow else (compute_dtype(x), recorded)

    def fp8_last_call(self) -> tuple[torch.Size | None, tuple[Recipe, GemmSpec] | None]:
        """Return the input shape, recipe and spec of the last new kind of eager call."""
        return next(((key.shape, call) for key, call in reversed(self._calls.items()) if key.own), (None, None))

    def fp8_measured(self) -> tuple[Measured, ...]:
        """Return the measurements of ``auto`` for this layer in training, by ascending rows."""
        recording = {key.x_requires_grad for key in self._calls if key.grad_enabled}
        needs_dx = (True, False) if len(recording) != 1 else (*recording,)
        found = (measured_for(self.matrix(), self.bias is not None, self.fp8_recipe, each) for each in needs_dx)
        return next(filter(None, found), ())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_dynamo_compiling():  # a graph must not depend on measurements of eager calls
            # ``fp8_gains_nothing`` inlined, and without nn.Module.__getattr__, which takes longer than the check: a
            # layer that auto leaves in bf16 must not be slower than nn.Linear. Symbolic sizes are not compared.
            numel = x.numel()
            if type(numel) is int and (numel <= self._plain_up_to or numel <= self._plain_for(x)):
                own: Any = self._parameters
                try:
                    weight, bias = own["weight"], own["bias"]
                except KeyError:  # a parametrized weight
                    weight, bias = self.weight, self.bias
                return self._plain(x, weight, bias)
        call = self._call_for(x, True)
        if call is None:
            weight = self.weight
            weight = weight.dequantize() if isinstance(weight, GatheredWeight) else weight
            return self._plain(x, weight, self.bias)
        recipe, gemms = call
        if gemms.y_fp8 and not is_compiling():
            request_cast(x, self, recipe, gemms.forward_format, gemms.needs_dw and gemms.dw_fp8)
        cast = self.quantized_weight(recipe, gemms.forward_format, gemms.needs_dx and gemms.dx_fp8)
        return checked_linear(x, self.matrix(), self.bias, recipe, gemms, self.fp8_buffers(recipe), cast)

    def fp8_buffers(self, recipe: Recipe) -> Buffers:
        """Return the buffers that a call updates."""
        counts, history = self.fp8_forward_counts, self.fp8_history if recipe.delayed else None
        if not is_compiling() and backward_running():
            # Activation checkpointing recomputes this forward, which must not count twice, and compares the
            # operators of both.
            with disable_modes():
                counts, history = counts.clone(), None if history is None else history.clone()
        gradient_history = self.fp8_gradient_history if recipe.delayed else None
        return Buffers(counts, history, self.fp8_gradient_counts, gradient_history)

    @property
    def fp8_counts(self) -> torch.Tensor:
        """A copy of all counts, of shape ``COUNTS_SHAPE``."""
        return torch.cat([self.fp8_forward_counts, self.fp8_gradient_counts])

    @property
    def fp8_state(self) -> torch.Tensor:
        """A copy of both amax histories, of shape ``STATE_SHAPE``."""
        return torch.stack([self.fp8_history, self.fp8_gradient_history])

    def quantized_weight(self, recipe: Recipe, number_format: str, transposed: bool) -> ScaledTensor | None:
        """Return the quantized weight gathered by FSDP2 or cached by ``kp.fp8.accumulate``, or None."""
        weight = self.weight
        if isinstance(weight, GatheredWeight):
            return weight.cast()
        cache = self.weight_cache
        if cache is None or is_compiling() or ("y" in recipe.high_precision and not transposed):
            return None
        kind = (number_format, recipe.weight, recipe.power_of_two)
        cast = cache.get(weight, kind, transposed)
        if cast is None:
            counts = self.fp8_buffers(recipe).counts
            cast = quantize_layer_weight(self.matrix(), recipe, number_format, transposed=transposed, counts=counts)
            cache.put(weight, kind, cast)
        return cast

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the buffers with the weight and keep their dtypes."""
        kept = {name: self._buffers[name] for name in BUFFERS}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        restore(self)
        device = self.weight.device
        for name, fresh in _new_buffers(device).items():
            before = kept[name]
            assert before is not None
            self._buffers[name] = fresh if before.is_meta or device.type == "meta" else before.to(device)
        self._clear_caches()  # measurements of another device or dtype do not apply
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: kept for name, kept in self.__dict__.items() if name not in _CACHES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({name: initial() for name, initial in _CACHES.items()} | state)  # type: ignore[no-untyped-call]

    def __prepare_scriptable__(self) -> NoReturn:
        # torch.jit.script calls this first.
        refuse("torch.jit.script", "use torch.compile")

    # Checkpoints.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        name = prefix + "weight"
        if name in destination and not keep_vars:
            destination[name] = plain_weight(destination[name])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        restore(self)
        self._clear_caches()  # the weight may have another dtype
        if self.fp8_history.is_meta and not self.weight.is_meta:  # assigned to a model without buffers
            self._buffers.update(_new_buffers(self.weight.device))
        if prefix + "weight" in state_dict:  # the histories of another weight do not apply
            reset_layer_state(self)

    def extra_repr(self) -> str:
        gemms = "auto" if self.fp8_auto else ", ".join(self.fp8_recipe.low_precision)
        if self.fp8_fallback is not None:
            gemms = f"fell back to {str(self.weight.dtype).removeprefix('torch.')}"
        return f"{super().extra_repr()}, fp8={self.fp8_recipe} ({gemms})"


def unsupported_weight(weight: Any) -> str | None:
    """Return why an FP8 layer cannot use a weight that is a tensor subclass; None for a plain tensor."""
    if isinstance(weight, (GatheredWeight, ShardedWeight)) or not hasattr(weight, "__tensor_flatten__"):
        return None
    kind = type(weight).__name__
    if kind == "DTensor":
        return (
            "its weight is a DTensor: use kp.fp8.convert before fully_shard, and call the module that fully_shard "
            "was applied to; tensor parallelism (parallelize_module) is not supported"
        )
    return f"its weight is a {kind}, which is quantized or computed already: FP8 training needs a plain tensor"


def _conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Compute a ``Conv1D``; weight is (K, N)."""
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])


class Float8Conv1D(Float8Linear):
    """A ``Conv1D`` of Hugging Face's GPT-2 converted in place: a linear layer that stores its weight as (K, N)."""

    _plain = staticmethod(_conv1d)

    def matrix(self) -> torch.Tensor:
        return self.weight.t()

    def revert(self) -> nn.Module:
        del self.in_features, self.out_features
        return super().revert()

    def _unconverted(self) -> Any:
        return importlib.import_module("transformers.pytorch_utils").Conv1D


def conv1d_class() -> type[nn.Module] | None:
    """Return Hugging Face's ``Conv1D``, or None if nothing has imported it."""
    found: type[nn.Module] | None = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return found


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
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: expected a torch.nn.Module")
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
