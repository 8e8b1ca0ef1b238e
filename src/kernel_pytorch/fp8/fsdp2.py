"""What of FSDP2's inside the 8-bit all-gather touches, in one place.

FSDP2 asks the local tensor of a sharded parameter for ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, and sends
what the first gives. Attributes on that tensor would be lost whenever it is replaced (by ``.to``, by loading with
``assign=True``) and would travel in pickles; a tensor subclass would be seen by optimizers and checkpoints. So it is
FSDP2's own record of the parameter that answers with another object, and the parameter stays what FSDP2 made it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

__all__ = ["Sharded", "outermost", "restart", "sharded_weights", "take_over", "hand_back"]

_NEEDED = ("_sharded_local_tensor", "_init_extensions", "init_unsharded_param", "reset_sharded_param")


class Sharded(NamedTuple):
    """A parameter as FSDP2 has it: its own record, and the group that it is gathered with."""

    record: Any
    group: Any

    @property
    def idle(self) -> bool:
        """Whether it is neither gathered nor being gathered."""
        resting: bool = self.record.sharded_state == ShardedState.SHARDED
        return resting and self.group._all_gather_result is None

    @property
    def by_hand(self) -> bool:
        """Whether it is being gathered by a call of ``unshard``, and neither by a forward nor by a backward."""
        idle: bool = self.group._training_state == TrainingState.IDLE
        return idle

    @property
    def refusal(self) -> str | None:
        """Why it cannot be gathered in 8 bits; None where it can."""
        record, info = self.record, self.record._module_info
        if record.is_dtensor:
            return "its weight is split over another mesh too"
        if record.offload_to_cpu:
            return "its weight is offloaded to the CPU"
        if info.shared_modules:
            return "other modules share its weight"
        if self.group.post_forward_mesh_info not in (None, self.group.mesh_info):
            return "reshard_after_forward is a number"
        if not hasattr(record.mesh_info, "shard_process_group"):
            return "its weight is replicated"
        return None


class _Record(FSDPParam):
    """FSDP2's record of a parameter that may be gathered in 8 bits."""

    fp8_shard: Any
    """Has ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, ``size``, and says whether it is to be asked."""

    @property
    def _sharded_local_tensor(self) -> Any:
        return self.fp8_shard if self.fp8_shard.in_8_bits else FSDPParam._sharded_local_tensor.fget(self)  # type: ignore[attr-defined]


def check_torch() -> None:
    """An error where FSDP2 is not as this module knows it."""
    missing = [name for name in _NEEDED if not hasattr(FSDPParam, name)]
    if missing or not isinstance(FSDPParam.__dict__["_sharded_local_tensor"], property):
        raise RuntimeError(
            f"torch {torch.__version__} has another FSDP2 inside ({', '.join(missing) or '_sharded_local_tensor'}): "
            f"leave out kp.fp8.gather, and weights are gathered in their own precision"
        )


def outermost(model: nn.Module) -> list[nn.Module]:
    """The modules given to ``fully_shard`` that lie in no other."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # parents come first
        if isinstance(module, FSDPModule) and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def reshard(model: nn.Module) -> None:
    """Free whatever is gathered, or being gathered."""
    for group in _groups(model):
        group.wait_for_unshard()
        group.reshard()


def begins_forward(module: nn.Module) -> bool:
    """Of a module inside the outermost, whose forward is about to run: whether nothing around it is running."""
    state: Any = _state(module)
    recomputing = state._training_state == TrainingState.PRE_BACKWARD
    return state._state_ctx.iter_forward_root is None and not recomputing


def parts(root: nn.Module) -> list[nn.Module]:
    """The modules given to ``fully_shard`` inside the outermost, itself first."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def _state(module: Any) -> Any:
    return module._get_fsdp_state()


def sharded_weights(model: nn.Module) -> dict[nn.Module, Sharded]:
    """For each module with a parameter named weight that FSDP2 has sharded."""
    found = {}
    for group in _groups(model):
        for record in group.fsdp_params:
            info = record._module_info
            if info.param_name == "weight":
                found[info.module] = Sharded(record, group)
            for shared, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                if name == "weight":
                    found[shared] = Sharded(record, group)
    return found


def _groups(model: nn.Module) -> Iterator[Any]:
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = _state(module)
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group]  # before torch 2.12
        for group in groups:
            if group is not None and id(group) not in seen:
                seen.add(id(group))
                yield group


def take_over(sharded: Sharded, shard: Any) -> None:
    """From the next all-gather on, ``shard`` is asked what to send."""
    record = sharded.record
    record.fp8_shard = shard
    record.__class__ = _Record
    restart(sharded)


def hand_back(sharded: Sharded) -> None:
    """Make the record what it was."""
    record = sharded.record
    record.__class__ = FSDPParam
    del record.fp8_shard
    restart(sharded)


def restart(sharded: Sharded) -> None:
    """Let FSDP2 make its memory for the gathered parameter anew: it may be of another format from now on."""
    record = sharded.record
    assert sharded.idle
    gathered = record.__dict__.pop("_unsharded_param", None)
    record.all_gather_outputs = []
    record._init_extensions()
    gradient = None if gathered is None else gathered.grad
    if gradient is not None:  # accumulated without being reduced
        before = record.unsharded_accumulated_grad
        record.unsharded_accumulated_grad = gradient if before is None else before + gradient
