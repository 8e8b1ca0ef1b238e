"""Adapt Hugging Face models for ``parallelize``: no masks of their own, and a loss over the labels of all ranks."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kernel_pytorch.distributed.context import Context

__all__ = ["Prepared", "labels", "prepare", "sink_logits", "window"]

_IMPLEMENTATION = "kernel_pytorch_context_parallel"
_SHIFTED = ("ForCausalLM", "ForConditionalGeneration")
_TOKENWISE = (*_SHIFTED, "ForMaskedLM", "ForTokenClassification")
_DEFAULT_LOSS = "ForCausalLM"  # of transformers, for models without a loss_type, such as GPT-2
_NOT_SERVED = ("softcap", "position_bias")

Mean = Callable[[torch.Tensor, Any], torch.Tensor]


class _Local(threading.local):
    whole: torch.Tensor | None = None
    context: Context | None = None
    window: int | None = None
    sink_logits: torch.Tensor | None = None


_local = _Local()


@contextlib.contextmanager
def labels(whole: Any, context: Context) -> Iterator[None]:
    """Set the labels of the full sequence for the loss of models inside the block."""
    before = _local.whole, _local.context
    _local.whole, _local.context = whole if isinstance(whole, torch.Tensor) else None, context
    try:
        yield
    finally:
        _local.whole, _local.context = before


class _Loss:
    """The model's loss: the mean over the labels of all ranks, with next-token labels from the full sequence."""

    def __init__(self, kind: str, mean: Mean) -> None:
        self.kind, self.mean = kind, mean

    def __deepcopy__(self, _: Any) -> _Loss:
        return self  # holds a process group, which cannot be copied

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,  # noqa: ARG002  this rank's; the next label of its last token is on another rank
        vocab_size: int | None = None,  # noqa: ARG002
        num_items_in_batch: int | torch.Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        whole, context = _local.whole, _local.context
        if self.kind not in _TOKENWISE:
            raise NotImplementedError(
                f"labels: the loss of a model of kind {self.kind} is not a mean over tokens; drop labels, compute "
                "the loss from the outputs and average it with kp.context_parallel.token_mean"
            )
        if context is None or (whole is None and shift_labels is None):
            raise ValueError(
                "labels: pass the labels of the whole sequence, (batch, tokens), to the model's forward"
            )
        if shift_labels is None:
            assert whole is not None
            if self.kind in _SHIFTED:
                whole = functional.pad(whole, (0, 1), value=ignore_index)[..., 1:]
            shift_labels = context.shard(whole)
        targets = shift_labels.to(logits.device).flatten()
        losses = functional.cross_entropy(
            logits.float().flatten(0, 1), targets, ignore_index=ignore_index, reduction="none"
        )
        return self.mean(losses[targets != ignore_index], num_items_in_batch)


@dataclass(frozen=True)
class Prepared:
    """The changes that ``prepare`` made to a model, which can be undone temporarily, and the model's rotary limit."""

    changed: tuple[tuple[Any, str, Any, Any], ...] = ()
    """(module, attn_implementation before, loss function before or None, loss function now)."""
    longest: int | None = None
    """The number of tokens beyond which a rotary embedding of the model depends on the longest position."""

    @contextlib.contextmanager
    def undone(self, *, attention: bool) -> Iterator[None]:
        """Restore the model's own loss, and with ``attention`` its own attention, inside the block."""
        for module, implementation, loss, _ in self.changed:
            if attention:
                module.config._attn_implementation = implementation
            module._loss_function = loss
        try:
            yield
        finally:
            for module, _, _, loss in self.changed:
                module.config._attn_implementation = _IMPLEMENTATION
                module._loss_function = loss


def prepare(model: nn.Module, mean: Mean) -> Prepared:
    """Set attention that builds no mask and a loss over all ranks on a Hugging Face model; ignore other models."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not any(
        isinstance(module, transformers.PreTrainedModel) for module in model.modules()
    ):
        return Prepared()
    for name, module in model.named_modules():
        if not isinstance(module, transformers.PreTrainedModel):
            continue
        kind = getattr(module, "loss_type", None) or ""
        if kind.endswith("SequenceClassification"):
            raise NotImplementedError(
                f"model: {type(module).__name__} pools its tokens, and a rank has only some of them; parallelize its "
                "base model and pool what that returns"
            )
        if getattr(module.config, "is_encoder_decoder", False):
            raise NotImplementedError(
                f"model: {type(module).__name__} has cross-attention, which is not sharded; parallelize its encoder"
            )
        implementation = module.config._attn_implementation
        if implementation not in ("sdpa", "kernel_pytorch", _IMPLEMENTATION):
            raise ValueError(
                f"model: {name or type(module).__name__} has attn_implementation={implementation!r}, which sees only "
                'this rank\'s tokens; load or make the model with attn_implementation="sdpa"'
            )
    _register()
    changed, longest = [], None
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            before, loss = module.config._attn_implementation, module.loss_function
            # With "sdpa" the model takes a jump in this rank's positions for the start of another document, and
            # builds a dense (tokens, tokens) mask.
            module.config._attn_implementation = _IMPLEMENTATION
            module.loss_function = _Loss(getattr(module, "loss_type", None) or _DEFAULT_LOSS, mean)
            changed.append((module, before, loss, module.loss_function))
            limit = _rotary_limit(module.config)
            longest = limit if longest is None else longest if limit is None else min(longest, limit)
    # Several modules share one config: its original implementation is that of the first of them.
    own = {id(module.config): before for module, before, _, _ in reversed(changed)}
    return Prepared(tuple((m, own[id(m.config)], loss, now) for m, _, loss, now in changed), longest)


def _rotary_limit(config: Any) -> int | None:
    """Return the length beyond which the rotary embedding depends on the longest position, or None."""
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    every = [scaling, *(value for value in scaling.values() if isinstance(value, dict))]
    for one in every:
        if (one.get("rope_type") or one.get("type")) in ("dynamic", "longrope"):
            limit = one.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            return int(limit or config.max_position_embeddings)
    return None


def window() -> int | None:
    """Return the sliding window of the attending layer, or None."""
    return _local.window


def sink_logits() -> torch.Tensor | None:
    """Return the learned sinks of the attending layer, or None."""
    return _local.sink_logits


def _register() -> None:
    sdpa = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward

    def attend(
        module: nn.Module,
        *args: Any,
        sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        for name in _NOT_SERVED:
            if kwargs.get(name) is not None:
                raise NotImplementedError(
                    f"model: {type(module).__name__} attends with {name}, which attention across ranks does not "
                    "have; use this model on one device"
                )
        before = _local.window, _local.sink_logits
        _local.window, _local.sink_logits = sliding_window, s_aux
        try:
            return sdpa(module, *args, **kwargs)
        finally:
            _local.window, _local.sink_logits = before

    importlib.import_module("transformers").AttentionInterface.register(_IMPLEMENTATION, attend)
