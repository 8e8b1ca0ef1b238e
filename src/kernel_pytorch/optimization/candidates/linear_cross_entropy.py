"""The language-model head and its cross-entropy in chunks of rows, so that the logits are never whole in memory.

Legend: R rows (tokens), H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kernel_pytorch.optimization.candidate import Candidate, Context, Sites, Stage
from kernel_pytorch.optimization.candidates.attention import pretrained_models
from kernel_pytorch.optimization.candidates.modules import has_hooks, left_alone
from kernel_pytorch.optimization.edits import Edits, Forward

__all__ = ["CHUNKED_CROSS_ENTROPY", "linear_cross_entropy"]

_CHUNK_ELEMENTS = 1 << 25  # of logits at once: 128 MiB in float32


class _Chunked(torch.autograd.Function):
    """The sum of the losses; the gradients are computed in the forward pass, while the logits of a chunk exist."""

    @staticmethod
    def forward(
        ctx: Any, x_RH: torch.Tensor, weight_VH: torch.Tensor, target_R: torch.Tensor, ignore: int, rows: int
    ) -> torch.Tensor:
        wide = torch.float64 if x_RH.dtype is torch.float64 else torch.float32
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        total = torch.zeros((), dtype=wide, device=x_RH.device)
        dx = torch.empty_like(x_RH) if needs_x else None
        dweight = torch.zeros_like(weight_VH, dtype=wide) if needs_weight else None
        for start in range(0, x_RH.shape[0], rows):
            x, target = x_RH[start : start + rows], target_R[start : start + rows]
            logits = functional.linear(x, weight_VH).to(wide)
            total = total + functional.cross_entropy(logits, target, ignore_index=ignore, reduction="sum")
            if needs_x or needs_weight:
                known = target != ignore
                dlogits = logits.softmax(dim=-1)
                hit = torch.where(known, target, 0).unsqueeze(1)
                dlogits = dlogits.scatter_add(1, hit, -torch.ones_like(hit, dtype=wide)) * known.unsqueeze(1)
                dlogits = dlogits.to(x.dtype)  # as autograd rounds it behind a cast of the logits
                if dx is not None:
                    dx[start : start + rows] = dlogits @ weight_VH
                if dweight is not None:
                    dweight += dlogits.t() @ x
        ctx.save_for_backward(dx, dweight)
        ctx.weight_dtype = weight_VH.dtype
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dweight = ctx.saved_tensors
        return (
            None if dx is None else dx * gradient.to(dx.dtype),
            None if dweight is None else (dweight * gradient).to(ctx.weight_dtype),
            None,
            None,
            None,
        )


def linear_cross_entropy(
    x_RH: torch.Tensor, weight_VH: torch.Tensor, target_R: torch.Tensor, *, ignore_index: int = -100
) -> torch.Tensor:
    """Return the sum of ``cross_entropy(x @ weight.T, target)`` over rows, in float32, without whole logits.

    Example:
        >>> import torch
        >>> x, weight, target = torch.randn(5, 8), torch.randn(11, 8), torch.randint(11, (5,))
        >>> expected = torch.nn.functional.cross_entropy(x @ weight.T, target, reduction="sum")
        >>> torch.allclose(linear_cross_entropy(x, weight, target), expected, rtol=1e-5)
        True
    """
    rows = max(1, min(x_RH.shape[0], _CHUNK_ELEMENTS // weight_VH.shape[0]))
    total: torch.Tensor = _Chunked.apply(x_RH, weight_VH, target_R, ignore_index, rows)  # type: ignore[no-untyped-call]
    return total


class _Fusion:
    """Whether the call that runs now leaves out its logits; shared by the three places that take part."""

    def __init__(self, head: nn.Linear) -> None:
        self.head, self.active = head, False


def _model_forward(call: Forward, *args: Any, **kwargs: Any) -> Any:
    fusion = call.settings
    if not call.module.training or kwargs.get("labels") is None or kwargs.get("return_dict") is False:
        return call.original(*args, **kwargs)
    fusion.active = True
    try:
        out = call.original(*args, **kwargs)
    finally:
        fusion.active = False
    out.logits = None
    return out


def _head_forward(call: Forward, x: torch.Tensor) -> Any:
    return x if call.settings.active else call.original(x)  # the loss multiplies


class _Loss:
    """The model's loss function: gets the input of the head instead of logits while the fusion is active."""

    def __init__(self, fusion: _Fusion, original: Any) -> None:
        self.fusion, self.original = fusion, original

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if not self.fusion.active:
            return self.original(
                logits, labels, vocab_size, num_items_in_batch=num_items_in_batch, ignore_index=ignore_index,
                shift_labels=shift_labels, **kwargs,
            )  # fmt: skip
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.flatten().to(logits.device)
        total = linear_cross_entropy(
            logits.flatten(0, -2), self.fusion.head.weight, target, ignore_index=ignore_index
        )
        return total / ((target != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch)


def _plain(head: Any) -> bool:
    return type(head) is nn.Linear and head.bias is None


def _match(model: nn.Module, context: Context) -> Sites | str:
    if "" not in pretrained_models(model):
        return "the model is not a language model of transformers"
    whole: Any = model
    head: Any = whole.get_output_embeddings()
    if getattr(whole, "loss_type", None) != "ForCausalLM" or head is None:
        return "the model has no causal language-model loss"
    if not _plain(head):
        return f"the head is a {type(head).__name__} that is no nn.Linear without bias"
    if has_hooks(head):
        return "the head has hooks, which would be skipped"
    if context.examples and not any("labels" in example.kwargs for example in context.examples):
        return "the inputs have no labels, so that the model computes no loss"
    return left_alone(head) or Sites(("",))


def _apply(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    whole: Any = model
    fusion = _Fusion(whole.get_output_embeddings())
    edits.replace_forward(model, _model_forward, fusion)
    edits.replace_forward(fusion.head, _head_forward, fusion)
    edits.set(whole, "loss_function", _Loss(fusion, whole.loss_function))


CHUNKED_CROSS_ENTROPY = Candidate(
    "chunked-cross-entropy",
    "language-model head and cross-entropy in chunks, logits never whole",
    "exact",
    Stage.MODULE,
    _match,
    _apply,
    goals=frozenset({"training", "memory"}),
    drops=frozenset({"logits"}),
)
