"""Candidates with kernels of other installed libraries: quack, FlashAttention, torchao, the kernel hub.

They must pass the same verification as ours. A library that is not installed is refused with that reason.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from functools import partial
from typing import Any

import torch
from torch import nn

from kernel_pytorch.optimization.candidate import Candidate, Context, Sites, Stage, missing
from kernel_pytorch.optimization.candidates.attention import pretrained_models
from kernel_pytorch.optimization.candidates.fp8 import FP8_TRAINING
from kernel_pytorch.optimization.candidates.modules import unusable
from kernel_pytorch.optimization.candidates.norms import RMS_NORM, Norm, apply_norm
from kernel_pytorch.optimization.edits import Edits

__all__ = ["FLASH_ATTENTION", "HUB_KERNELS", "QUACK_RMS_NORM", "TORCHAO_FLOAT8"]


# RMSNorm of quack.


def _quack_norm(x: torch.Tensor, weight: torch.Tensor, norm: Norm) -> Any:
    import quack

    rows = x.reshape(-1, x.shape[-1])
    return quack.rmsnorm(rows, weight.float() + norm.offset, eps=norm.eps).reshape(x.shape)


def _match_quack(model: nn.Module, context: Context) -> Sites | str:
    return unusable("quack", "quack-kernels", context) or RMS_NORM.match(model, context)


QUACK_RMS_NORM = Candidate(
    "quack-rms-norm",
    "RMSNorm modules on quack",
    "exact",
    Stage.MODULE,
    _match_quack,
    partial(apply_norm, _quack_norm),
    conflicts=frozenset({"rms-norm", "liger-rms-norm"}),
    requires=frozenset({"quack-kernels"}),
)


# FlashAttention 2, 3 and 4 through the attention interface of transformers. Versions 2 and 4 share a module's name.

_VERSIONS = {
    2: ("flash_attn", "flash-attn"),
    3: ("flash_attn_interface", "flash-attn-3"),
    4: ("flash_attn", "flash-attn-4"),
}


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _match_flash(version: int, model: nn.Module, context: Context) -> Sites | str:
    library, distribution = _VERSIONS[version]
    reason = unusable(library, distribution, context)
    if reason is None and version != 3 and not _installed(distribution):
        reason = f"needs {distribution}; the {library} that is installed is another version"
    if reason:
        return reason
    models = pretrained_models(model)
    names = tuple(name for name, one in models.items() if getattr(one, "_supports_flash_attn", False))
    kinds = {parameter.dtype for parameter in model.parameters()}
    if not kinds <= {torch.bfloat16, torch.float16}:
        return f"{library} computes in bfloat16 and float16, and the model has other parameters"
    return Sites(names) if names else f"the model is none of transformers that supports {library}"


def _apply_flash(version: int, model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    for name in sites:
        config: Any = model.get_submodule(name).config
        edits.set(config, "_attn_implementation", f"flash_attention_{version}")


def _flash_attention(version: int) -> Candidate:
    names = {f"flash-attention-{other}" for other in _VERSIONS if other != version}
    return Candidate(
        f"flash-attention-{version}",
        f"attention of Hugging Face models on FlashAttention {version}",
        "exact",
        Stage.MODULE,
        partial(_match_flash, version),
        partial(_apply_flash, version),
        conflicts=frozenset({"hf-attention", *names}),
        requires=frozenset({_VERSIONS[version][1], "transformers"}),
    )


FLASH_ATTENTION = tuple(_flash_attention(version) for version in _VERSIONS)


# torchao's FP8 training replaces modules; the weights stay the same objects.


def _match_torchao(model: nn.Module, context: Context) -> Sites | str:
    return unusable("torchao", "torchao", context) or FP8_TRAINING.match(model, context)


def _to_float8(model: nn.Module, sites: tuple[str, ...], _: list[tuple[nn.Module, str, nn.Module]]) -> None:
    float8 = importlib.import_module("torchao.float8")
    float8.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in sites)


def _from_float8(_: nn.Module, __: tuple[str, ...], before: list[tuple[nn.Module, str, nn.Module]]) -> None:
    for parent, name, module in before:
        setattr(parent, name, module)


def _apply_torchao(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    before = []
    for site in sites:
        parent, _, name = site.rpartition(".")
        before.append((model.get_submodule(parent), name, model.get_submodule(site)))
    edits.call(_to_float8, _from_float8, model, sites, before)


TORCHAO_FLOAT8 = Candidate(
    "torchao-float8",
    "linear layers trained in FP8 with torchao, tensorwise scaling",
    "approximate",
    Stage.PRECISION,
    _match_torchao,
    _apply_torchao,
    goals=frozenset({"training", "memory"}),
    conflicts=frozenset({"fp8-training", "fp8-training-delayed"}),
    requires=frozenset({"torchao"}),
)


# The kernel hub.


def _match_hub(model: nn.Module, context: Context) -> Sites | str:
    return missing("kernels") or (
        "transformers cannot take kernels of the hub back once they are in a model, and a plan must be reversible"
    )


def _apply_hub(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    raise NotImplementedError("kernels of the hub cannot be taken back")


HUB_KERNELS = Candidate(
    "hub-kernels", "kernels of the Hugging Face hub", "exact", Stage.MODULE, _match_hub, _apply_hub
)
