"""Kernels of other libraries, where they are installed: quack, FlashAttention, torchao, the kernel hub.

They are held to the same verification as ours. One that is not installed is refused with that reason.
"""

from __future__ import annotations

import importlib
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
    quack = importlib.import_module("quack")
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
)


# FlashAttention through the attention interface of transformers.


def _match_flash(model: nn.Module, context: Context) -> Sites | str:
    reason = unusable("flash_attn", "flash-attn", context)
    if reason:
        return reason
    models = pretrained_models(model)
    names = tuple(name for name, one in models.items() if getattr(one, "_supports_flash_attn", False))
    kinds = {parameter.dtype for parameter in model.parameters()}
    if not kinds <= {torch.bfloat16, torch.float16}:
        return "flash_attn computes in bfloat16 and float16, and the model has other parameters"
    return Sites(names) if names else "the model is none of transformers that supports flash_attn"


def _apply_flash(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    for name in sites:
        config: Any = model.get_submodule(name).config
        edits.set(config, "_attn_implementation", "flash_attention_2")


FLASH_ATTENTION = Candidate(
    "flash-attention",
    "attention of Hugging Face models on flash_attn",
    "exact",
    Stage.MODULE,
    _match_flash,
    _apply_flash,
    conflicts=frozenset({"hf-attention"}),
)


# torchao's FP8 training swaps modules; the weights stay the same objects.


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
    conflicts=frozenset({"fp8-training"}),
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
