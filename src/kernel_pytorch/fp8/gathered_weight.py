"""A weight of which only its 8-bit cast is there: what a layer has between FSDP2's all-gather and resharding.

To autograd it is a leaf of the weight's shape and format, so its gradient is what it always is. Its numbers are the
codes that came over the wire, which a layer multiplies as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from kernel_pytorch.fp8.scaled_tensor import ScaledTensor

__all__ = ["GatheredWeight"]

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
# What asks for shape and format alone.
_LIKE = (
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
)


class GatheredWeight(torch.Tensor):
    """(N, K) in the format that FSDP2 computes in, made of 8-bit codes and the inverse of their scale."""

    codes: torch.Tensor
    """(N, K) in an 8-bit format: memory of FSDP2's, freed and filled again by it."""
    inverse_scale: torch.Tensor
    """float32, no dimensions: that of the codes which are there."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype) -> GatheredWeight:
        made: GatheredWeight = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device
        )
        made.codes, made.inverse_scale = codes, inverse
        return made

    def cast(self) -> ScaledTensor:
        """As ``quantize_layer_weight`` returns it, but with data in place of the transposed data.

        Only the backward needs that, and makes it then: FSDP2 frees the codes in between.
        """
        return ScaledTensor(self.codes, self.codes, self.inverse_scale, self.inverse_scale)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "inverse_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], dtype: Any, *_: Any) -> GatheredWeight:
        return GatheredWeight(inner["codes"], inner["inverse_scale"], dtype)

    def _stable_hash_for_caching(self) -> str:
        # What torch.compile's cache tells compiled functions apart by.
        inner = [(each.dtype, [*each.shape], each.stride()) for each in (self.codes, self.inverse_scale)]
        return f"GatheredWeight {self.device} {self.dtype} {self.requires_grad} {inner}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        self = next(each for each in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(each, cls))
        if func in _SAME:
            return cls(self.codes, self.inverse_scale, self.dtype)
        if func is _aten.as_strided.default and [*args[1]] == [*self.shape] and [*args[2]] == [*self.stride()]:
            return cls(self.codes, self.inverse_scale, self.dtype)
        if func in _LIKE:
            # One number stands for all of them: nobody reads it.
            number = torch.empty(1, dtype=self.dtype, device=self.device)
            return func(number.expand(self.shape), *args[1:], **kwargs)
        raise NotImplementedError(
            f"{func} of a weight of shape {[*self.shape]} that FSDP2 has gathered in 8 bits: its numbers in "
            f"{str(self.dtype).removeprefix('torch.')} are not there. Read the sharded parameter instead (after "
            f"reshard(), with full_tensor()), or gather this layer in its own precision: leave it out with "
            f"kp.fp8.gather(model, layers=...)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight(shape={[*self.shape]}, dtype={self.dtype}, codes={self.codes.dtype})"
