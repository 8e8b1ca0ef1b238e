"""FSDP2 all-gather of FP8 weights, through FSDP2's hooks for tensor subclasses.

``kp.fp8.convert(..., fsdp_all_gather=True)`` wraps the weights in ``ShardedWeight``; ``fully_shard`` shards them.
Before each all-gather FSDP2 calls ``fsdp_pre_all_gather``, which quantizes the local shard with the amax of the whole
weight, and after it ``fsdp_post_all_gather``, which makes a ``GatheredWeight`` of the data. The layer multiplies that
data as it is: it is bitwise what the layer would have quantized itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kernel_pytorch._compat.structures import disabled_torch_function, preserve_version, pytree
from kernel_pytorch.fp8.autograd import formats_on
from kernel_pytorch.fp8.quantize import ScaledTensor, weight_power_of_two
from kernel_pytorch.fp8.recipe import Recipe
from kernel_pytorch.hardware_abstraction.formats import FORMATS
from kernel_pytorch.ops.fp8_cast.part import amax_of_part, cast_of_part, inverses_from

__all__ = ["GatheredWeight", "ShardedWeight", "plain_weight", "refusal", "restore", "unwrap", "wrap"]

_aten = torch.ops.aten
_KEEP_SHARDED = {
    _aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default, _aten.view.default,
    _aten.as_strided.default, _aten.slice.Tensor, _aten.split.Tensor, _aten.new_zeros.default,
    _aten._pin_memory.default,
}  # fmt: skip
"""Operators with which FSDP2 shards, pads and moves parameters. All others take and return plain tensors."""
_SCALING = {"row": "rowwise", "block": "1x128 block", "square": "128x128 block"}
_KEEP_GATHERED = {_aten.detach.default, _aten.alias.default}
_SHAPE_ONLY = {
    _aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.new_empty.default,
    _aten.new_zeros.default,
}  # fmt: skip


class ShardedWeight(torch.Tensor):
    """A weight, or this rank's shard of it, that FSDP2 all-gathers in FP8. Computes like the tensor it wraps."""

    tensor: torch.Tensor
    """The weight in the layer's dtype."""

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> ShardedWeight:
        made: ShardedWeight = torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, strides=tensor.stride(), storage_offset=tensor.storage_offset(), dtype=tensor.dtype,
            device=tensor.device, layout=tensor.layout,
        )  # fmt: skip
        made.tensor = tensor
        return made

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["tensor"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> ShardedWeight:
        return ShardedWeight(inner["tensor"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        inner_args, inner_kwargs = pytree.tree_map_only(cls, lambda each: each.tensor, (args, kwargs or {}))
        out = func(*inner_args, **inner_kwargs)
        if func in _KEEP_SHARDED:
            return pytree.tree_map_only(torch.Tensor, cls, out)
        if args and isinstance(args[0], cls) and out is inner_args[0]:  # in place
            return args[0]
        return out

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.tensor!r})"

    # Called by FSDP2.

    @torch.no_grad()
    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],  # noqa: ARG002
        module: Any,
        mp_policy: Any,
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, str, torch.Size]]:
        recipe: Recipe = module.fp8_recipe
        why = refusal(recipe, module.fp8_auto)
        if why is not None:
            raise ValueError(
                f"a layer whose weight FSDP2 all-gathers in FP8 has the recipe {recipe} now: {why}; use a recipe "
                f"with tensorwise weight scaling"
            )
        shard = self.tensor.detach().to(mp_policy.param_dtype or self.dtype)
        # The amax is reduced in every call: a rank cannot tell whether the weight has changed on all of them.
        amax = amax_of_part(shard)
        if mesh.size() > 1:
            dist.all_reduce(amax, dist.ReduceOp.MAX, mesh.get_group())
        number_format, _ = formats_on(shard.device.type, shard.device.index, recipe.gradient_format)
        power_of_two = weight_power_of_two(recipe.weight, recipe.power_of_two)
        data = cast_of_part(shard, amax, number_format, power_of_two, module.fp8_forward_counts, 1)
        sent = data.view(torch.uint8)
        if shard.shape[1] == outer_size[1]:  # FSDP2 pads shards of rows to the size of the first
            missing = -(-outer_size[0] // mesh.size()) - shard.shape[0]
            sent = nn.functional.pad(sent, (0, 0, 0, missing)) if missing else sent
        # All ranks have computed the same scale, so it is not gathered.
        return (sent,), (inverses_from(amax.reshape(1), number_format, power_of_two)[0], number_format, outer_size)

    @torch.no_grad()
    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: tuple[torch.Tensor, str, torch.Size],
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        inverse, number_format, (n, k) = metadata
        if out is not None:  # its data is the buffer that was just gathered into
            with preserve_version(out.inverse_scale):  # as FSDP2 does for the data
                out.inverse_scale.copy_(inverse)
            return None
        data = all_gather_outputs[0].view(-1)[: n * k].view(n, k).view(FORMATS[number_format].dtype)
        return GatheredWeight(data, inverse.clone(), param_dtype), []


class GatheredWeight(torch.Tensor):
    """(N, K), the unsharded weight of a layer between all-gather and reshard: FP8 data and its inverse scale.

    To autograd it is a leaf with the weight's shape and dtype. Operators other than the layer's raise an error.
    """

    data_fp8: torch.Tensor
    """(N, K) in an FP8 dtype. FSDP2 owns the memory, frees it and fills it again."""
    inverse_scale: torch.Tensor
    """float32 scalar."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype) -> GatheredWeight:
        made: GatheredWeight = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=dtype, device=data.device
        )
        made.data_fp8, made.inverse_scale = data, inverse
        return made

    def cast(self) -> ScaledTensor:
        """Return the quantized weight, with the data in place of its transpose: FSDP2 frees the data between forward
        and backward, so the backward transposes it."""
        return ScaledTensor(self.data_fp8, self.data_fp8, self.inverse_scale, self.inverse_scale)

    def dequantize(self) -> torch.Tensor:
        """Return the weight in the layer's dtype, differentiable; for layers that have fallen back."""
        found: torch.Tensor = _Dequantize.apply(self)  # type: ignore[no-untyped-call]
        return found

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_fp8", "inverse_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], dtype: Any, *_: Any) -> GatheredWeight:
        return GatheredWeight(inner["data_fp8"], inner["inverse_scale"], dtype)

    def _stable_hash_for_caching(self) -> str:
        # Part of the key of torch.compile's cache.
        inner = [(each.dtype, [*each.shape], each.stride()) for each in (self.data_fp8, self.inverse_scale)]
        return f"GatheredWeight {self.device} {self.dtype} {self.requires_grad} {inner}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        self = next(each for each in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(each, cls))
        same = func is _aten.as_strided.default and [*args[1]] == [*self.shape] and [*args[2]] == [*self.stride()]
        if same or func in _KEEP_GATHERED:
            return cls(self.data_fp8, self.inverse_scale, self.dtype)
        if func in _SHAPE_ONLY:
            one = torch.empty(1, dtype=self.dtype, device=self.device)
            return func(one.expand(self.shape), *args[1:], **kwargs)
        raise NotImplementedError(
            f"{func} of a weight of shape {[*self.shape]} that FSDP2 has all-gathered in FP8: there is no copy in "
            f"{str(self.dtype).removeprefix('torch.')}. Read the sharded parameter instead (after reshard(), with "
            f"full_tensor()), or convert without fsdp_all_gather"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight(shape={[*self.shape]}, dtype={self.dtype}, data={self.data_fp8.dtype})"


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: GatheredWeight) -> torch.Tensor:  # noqa: ARG004
        return (weight.data_fp8.float() * weight.inverse_scale).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradient


def refusal(recipe: Recipe, auto: bool) -> str | None:
    """Return why the weight of a layer cannot be all-gathered in FP8; None if it can."""
    if auto:
        return "auto decides with each input which GEMMs are in FP8"
    if recipe.weight != "tensor":
        return f"its weight has {_SCALING[recipe.weight]} scaling"
    needed = [product for product in ("y", "dx") if product in recipe.high_precision]
    return f"{' and '.join(needed)} in high precision" if needed else None


def wrap(layer: Any, shared: bool) -> None:
    """Let FSDP2 all-gather the layer's weight in FP8 if it can be."""
    if layer.matrix() is not layer.weight:
        why: str | None = "it stores the transposed weight"
    else:
        why = "other modules share its weight" if shared else refusal(layer.fp8_recipe, layer.fp8_auto)
    layer.fp8_gather = True if why is None else why
    if layer.fp8_gather is True:
        weight = layer.weight
        layer.weight = nn.Parameter(ShardedWeight(weight.detach()), requires_grad=weight.requires_grad)


def unwrap(layer: Any) -> None:
    """Undo ``wrap``, before ``fully_shard``."""
    if layer.fp8_gather is True:
        weight = layer.weight
        if not isinstance(weight, ShardedWeight):
            raise ValueError(
                "model: FSDP2 has sharded it for FP8 all-gather, which cannot be undone; use kp.fp8.revert(model) "
                "before fully_shard, or load its state dict into an unconverted model"
            )
        layer.weight = nn.Parameter(weight.tensor, requires_grad=weight.requires_grad)
    layer.fp8_gather = None


def restore(layer: Any) -> None:
    """Wrap a sharded weight again after loading with assign=True or ``_apply`` replaced it by a plain tensor."""
    if layer.fp8_gather is not True:
        return
    weight = layer._parameters.get("weight")
    local = getattr(weight, "_local_tensor", None)
    if isinstance(weight, (ShardedWeight, GatheredWeight)) or isinstance(local, ShardedWeight):
        return
    made: Any = ShardedWeight(weight.detach()) if local is None else _with_local(weight, ShardedWeight(local))
    layer.weight = nn.Parameter(made, requires_grad=weight.requires_grad)


def plain_weight(weight: Any) -> Any:
    """Return a weight of a state dict without the wrapper, sharing its memory."""
    if isinstance(weight, ShardedWeight):
        return weight.tensor
    local = getattr(weight, "_local_tensor", None)
    return _with_local(weight, local.tensor) if isinstance(local, ShardedWeight) else weight


def _with_local(weight: Any, local: torch.Tensor) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
