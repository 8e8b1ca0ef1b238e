"""FSDP2 that gathers the weights of converted layers in 8 bits: a byte for a number, and nothing quantised twice.

A weight with one scale for the tensor needs the largest magnitude over all of its shards before any of them can be
cast. Those of all layers go around in one small all-reduce, at the first all-gather of every forward: whoever has
changed a weight by then, in whatever way, has changed its scale too. Each rank casts its shard with it, the codes
are gathered, and the layer multiplies them as they are; the transposed copy is made from them in the backward, after
FSDP2 has gathered them again if it freed them. Codes and scale are those of the layer's own cast, to the bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim.optimizer import register_optimizer_step_post_hook

from kernel_pytorch.fp8.autograd import formats_on
from kernel_pytorch.fp8.gathered_weight import GatheredWeight
from kernel_pytorch.fp8.module import Float8Linear
from kernel_pytorch.fp8.monitor import layers_of
from kernel_pytorch.fp8.quantize import weight_power_of_two
from kernel_pytorch.hardware_abstraction.formats import FORMATS
from kernel_pytorch.ops.fp8_cast.part import amax_of_part, cast_of_part, inverses_from

__all__ = ["gather", "stop_gathering"]


def gather(model: nn.Module, *, layers: Callable[[str, nn.Linear], bool] | None = None) -> nn.Module:
    """Let FSDP2 gather the weights of converted layers in 8 bits: half the bytes of bfloat16, a quarter of float32.

    Call it after ``fully_shard``. Parameters stay what FSDP2 made them: optimizers, state dicts and checkpoints see
    no difference, and every result is the same to the bit. Between gathering and resharding, a layer's ``weight``
    has its shape and format, but no numbers that others than the layer could read; who tries gets an error.

    Layers of recipes with scales of rows or blocks, of ``auto``, or with y or dx in high precision need more than
    the codes, and stay as they are, as do weights that are shared, offloaded, or split over a second mesh;
    ``kp.fp8.report`` has the reason for each. A layer that falls back to its own precision gets its weight in that
    precision on all ranks, from the second forward after it on; until then it goes on in 8 bits.

    Args:
        model: converted, then given to ``fully_shard`` with as many of its parts as you like; alike on all ranks.
        layers: called with the name and the layer; those it answers False for are gathered in their own precision.

    Returns:
        The model.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> from torch.distributed.fsdp import fully_shard
        >>> def prepared(model):  # on every rank that torchrun has started
        ...     kp.fp8.convert(model, "tensorwise")
        ...     for block in model.blocks:
        ...         fully_shard(block)
        ...     return kp.fp8.gather(fully_shard(model))
    """
    from kernel_pytorch.fp8 import fsdp2

    converted = layers_of(model)
    if not converted:
        raise ValueError("model: it has no converted layer; use kp.fp8.convert(model) first")
    roots = fsdp2.outermost(model)
    if not roots:
        raise ValueError("model: no part of it is sharded by FSDP2; use fully_shard(model) first")
    fsdp2.check_torch()
    stop_gathering(model)
    fsdp2.reshard(model)  # what is gathered is made anew
    sharded = fsdp2.sharded_weights(model)
    for name, layer in converted.items():
        layer.fp8_gather = _refusal(name, layer, sharded.get(layer), layers)
    for root in roots:
        inside = [module for module in root.modules() if isinstance(module, Float8Linear)]
        served = {layer: sharded[layer] for layer in inside if layer.fp8_gather is None}
        if served:
            Together(root, served)
    return model


def stop_gathering(model: nn.Module) -> None:
    """Let FSDP2 gather all weights in their own precision again."""
    together = {
        layer.fp8_gather.together for layer in layers_of(model).values() if isinstance(layer.fp8_gather, Shard)
    }
    for each in together:
        each.stop()
    for layer in layers_of(model).values():
        layer.fp8_gather = None


def _refusal(
    name: str, layer: Float8Linear, sharded: Any, layers: Callable[[str, nn.Linear], bool] | None
) -> str | None:
    """Why a layer's weight is gathered in its own precision; None where it is not."""
    recipe = layer.fp8_recipe
    needed = [product for product in ("y", "dx") if product in recipe.high_precision]
    if sharded is None:
        return "FSDP2 has not sharded it"
    if layers is not None and not layers(name, layer):
        return "left out"
    if layer.fp8_auto:
        return "auto decides with each input what is in 8 bits"
    if recipe.weight != "tensor":
        return f"its weight has a scale for each {recipe.weight}"
    if needed:
        return f"{' and '.join(needed)} in high precision"
    reason: str | None = sharded.refusal
    return reason


class Shard:
    """This rank's part of the weight of a layer, as FSDP2 asks for it."""

    def __init__(self, layer: Float8Linear, sharded: Any, together: Together, index: int) -> None:
        self.layer, self.sharded, self.together, self.index = layer, sharded, together, index
        self.recipe = layer.fp8_recipe
        self.in_8_bits = True
        self.seen: tuple[Any, int] | None = None
        """The parameter and its version when its magnitude was last taken; None where it may have changed."""

    @property
    def parameter(self) -> Any:
        """The DTensor that optimizers see."""
        return self.sharded.record.sharded_param

    def rounded(self) -> torch.Tensor:
        """In the format that FSDP2 would gather."""
        local: torch.Tensor = self.parameter._local_tensor.detach()
        return local.to(self.sharded.group.mp_policy.param_dtype or local.dtype)

    def amax(self) -> torch.Tensor:
        """The largest magnitude of this part; 0 where nobody asks."""
        part = self.rounded()
        return amax_of_part(part if self.in_8_bits else part[:0])

    def kind(self, where: torch.device) -> tuple[str, bool]:
        """The format of the codes on a device, and whether the scale is a power of two."""
        recipe = self.recipe
        number_format, _ = formats_on(where.type, where.index, recipe.gradient_format)
        return number_format, weight_power_of_two(recipe.weight, recipe.power_of_two)

    # What FSDP2 calls.

    def size(self) -> torch.Size:
        size: torch.Size = self.parameter._local_tensor.size()
        return size

    @torch.no_grad()
    def fsdp_pre_all_gather(
        self,
        mesh: Any,  # noqa: ARG002
        outer_size: torch.Size,  # noqa: ARG002
        outer_stride: tuple[int, ...],  # noqa: ARG002
        module: nn.Module,  # noqa: ARG002
        mp_policy: Any,  # noqa: ARG002
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        together, layer = self.together, self.layer
        if layer.fp8_recipe != self.recipe:
            raise ValueError(
                f"a layer has the recipe {layer.fp8_recipe} now and had {self.recipe} when FSDP2 began to gather its "
                f"weight in 8 bits: call kp.fp8.gather(model) again"
            )
        parameter, seen = self.parameter, self.seen
        unchanged = seen is not None and seen[0] is parameter and seen[1] == parameter._version
        if not unchanged or self.sharded.by_hand:
            together.refresh()
        part = self.rounded()
        amax, kind = together.amaxes[self.index], self.kind(part.device)
        codes = cast_of_part(part, amax, *kind, layer.fp8_forward_counts, 1)
        sent = codes.view(torch.uint8)
        missing = self.sharded.record.padded_sharded_param_size[0] - part.shape[0]
        if missing:
            sent = nn.functional.pad(sent, (0, 0, 0, missing))
        # The scale is the same on all ranks already: it need not be gathered.
        return (sent,), together.inverses[self.index]

    @torch.no_grad()
    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: torch.Tensor,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        if out is not None:  # its codes are the memory that has just been filled
            with _unsafe_preserve_version_counter(out.inverse_scale):  # as FSDP2 does for the codes
                out.inverse_scale.copy_(metadata)
            return None
        n, k = self.sharded.record._orig_size
        sent = all_gather_outputs[0]
        number_format, _ = self.kind(sent.device)
        codes = sent.view(-1)[: n * k].view(n, k).view(FORMATS[number_format].dtype)
        return GatheredWeight(codes, metadata.clone(), param_dtype), []


class Together:
    """The layers inside one outermost module of FSDP2: their largest magnitudes go around together."""

    def __init__(self, root: nn.Module, served: dict[Float8Linear, Any]) -> None:
        from kernel_pytorch.fp8 import fsdp2

        self.root = root
        self.shards = [Shard(layer, sharded, self, i) for i, (layer, sharded) in enumerate(served.items())]
        self.amaxes = self.inverses = torch.empty(0)
        self._kept: tuple[torch.Tensor, ...] = ()
        self._fallen: tuple[torch.Tensor, torch.Event | None] | None = None
        self._seen: dict[int, Shard] = {}
        for shard in self.shards:
            shard.layer.fp8_gather = shard
            fsdp2.take_over(shard.sharded, shard)
        inside = fsdp2.parts(root)[1:]
        self._hooks = [root.register_forward_pre_hook(self._before_forward, prepend=True)]
        self._hooks += [part.register_forward_pre_hook(self._before_part, prepend=True) for part in inside]
        _together.add(self)

    def stop(self) -> None:
        """Make FSDP2's records what they were."""
        from kernel_pytorch.fp8 import fsdp2

        for hook in self._hooks:
            hook.remove()
        _together.discard(self)
        fsdp2.reshard(self.root)
        for shard in self.shards:
            fsdp2.hand_back(shard.sharded)
            shard.layer.fp8_gather = None

    def changed(self, parameters: Iterable[Any]) -> None:
        """These may have changed."""
        for parameter in parameters:
            shard = self._seen.get(id(parameter))
            if shard is not None:
                shard.seen = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, *_: Any) -> None:
        # Who writes weights past their versions, through ``.data``, tells nobody.
        for shard in self.shards:
            shard.seen = None
        self._follow_fallbacks()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_part(self, part: nn.Module, *_: Any) -> None:
        from kernel_pytorch.fp8 import fsdp2

        if fsdp2.begins_forward(part):
            self._before_forward()

    @torch.no_grad()
    def refresh(self) -> None:
        """Find the largest magnitudes over all shards, and which layers have fallen back on any rank."""
        # Whoever uses the last ones on another stream is done before these are let go of.
        self._kept = (self.amaxes, self.inverses)
        both = torch.stack([shard.amax() for shard in self.shards]).repeat(2, 1)
        fallen = [float(shard.layer.fp8_fallback is not None) for shard in self.shards]
        both[1] = torch.tensor(fallen, device=both.device) if any(fallen) else 0.0
        for group, indices in self._by_group().items():
            if group.size() > 1:
                own = both if len(indices) == len(self.shards) else both[:, indices]
                torch.distributed.all_reduce(own, torch.distributed.ReduceOp.MAX, group)
                if own is not both:
                    both[:, indices] = own
        self.amaxes = both[0]
        inverses = torch.empty_like(self.amaxes)
        kinds = [shard.kind(both.device) for shard in self.shards]
        for kind in dict.fromkeys(kinds):
            chosen = [i for i, other in enumerate(kinds) if other == kind]
            if len(chosen) == len(kinds):
                inverses = inverses_from(self.amaxes, *kind)
            else:
                inverses[chosen] = inverses_from(self.amaxes[chosen], *kind)
        self.inverses = inverses
        self._fetch(both[1])
        for shard in self.shards:
            shard.seen = (shard.parameter, shard.parameter._version)
        self._seen = {id(shard.parameter): shard for shard in self.shards}

    def _by_group(self) -> dict[Any, list[int]]:
        found: dict[Any, list[int]] = {}
        for shard in self.shards:
            found.setdefault(shard.sharded.record.mesh_info.shard_process_group, []).append(shard.index)
        return found

    def _fetch(self, fallen: torch.Tensor) -> None:
        """Copy to the host without waiting."""
        if fallen.device.type == "cpu":
            self._fallen = (fallen.clone(), None)
            return
        host = torch.empty(fallen.shape, dtype=fallen.dtype, pin_memory=True)
        host.copy_(fallen, non_blocking=True)
        event = torch.Event(fallen.device.type)
        event.record()
        self._fallen = (host, event)

    def _follow_fallbacks(self) -> None:
        """Gather in their own precision what has fallen back on any rank by the last forward: all ranks alike."""
        if self._fallen is None:
            return
        from kernel_pytorch.fp8 import fsdp2

        fallen, event = self._fallen
        if event is not None:
            event.synchronize()
        for shard, in_8_bits in zip(self.shards, (fallen == 0).tolist(), strict=True):
            if shard.in_8_bits and not in_8_bits and shard.sharded.idle:
                shard.in_8_bits = False
                fsdp2.restart(shard.sharded)


_together: weakref.WeakSet[Together] = weakref.WeakSet()


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if _together:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for each in list(_together):
            each.changed(parameters)


register_optimizer_step_post_hook(_after_step)
