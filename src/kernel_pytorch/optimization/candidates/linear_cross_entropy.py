"""Linear cross-entropy of a language-model head in chunks of rows, without float32 logits in memory.

Shapes: R rows (tokens), H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kernel_pytorch.optimization.candidate import Candidate, Context, Sites, Stage
from kernel_pytorch.optimization.candidates.attention import pretrained_models
from kernel_pytorch.optimization.candidates.modules import has_hooks, left_alone
from kernel_pytorch.optimization.edits import Edits, Forward

__all__ = ["CHUNKED_CROSS_ENTROPY", "apply_loss", "linear_cross_entropy"]

_CHUNK_ELEMENTS = 1 << 27  # elements of log-probabilities per chunk: 512 MiB in float32
_ROWS_PER_WIDTH = 2  # gradients of this many rows per column of x are as large as the head's float32 gradient


class _Chunked(torch.autograd.Function):
    """The sum of the losses. The forward also computes the gradients, while a chunk's probabilities are in memory.

    The gradients of several chunks are collected, so that the GEMMs with them are large: with as many rows as fit in
    the memory of a float32 gradient of the head.
    """

    @staticmethod
    def forward(
        ctx: Any, x_RH: torch.Tensor, weight_VH: torch.Tensor, target_R: torch.Tensor, ignore: int
    ) -> torch.Tensor:
        (rows, width), vocabulary = x_RH.shape, weight_VH.shape[0]
        wide = torch.float64 if x_RH.dtype is torch.float64 else torch.float32
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        chunk = max(1, _CHUNK_ELEMENTS // vocabulary)
        block = max(chunk, _ROWS_PER_WIDTH * width)
        known = (target_R != ignore).unsqueeze(1)
        hit = target_R.unsqueeze(1).where(known, 0)
        minus = torch.full_like(hit, -1, dtype=wide)
        total = torch.zeros((), dtype=wide, device=x_RH.device)
        dx = torch.empty_like(x_RH) if needs_x else None
        dweight = None
        for first in range(0, rows, block):
            x = x_RH[first : first + block]
            dlogits = x.new_empty(x.shape[0], vocabulary) if needs_x or needs_weight else None
            for start in range(first, min(first + block, rows), chunk):
                piece = slice(start, min(start + chunk, first + block))
                logits = functional.linear(x_RH[piece], weight_VH)
                found = functional.log_softmax(logits, dim=-1, dtype=wide)
                total = total - found.gather(1, hit[piece]).where(known[piece], 0).sum()
                if dlogits is not None:
                    found = found.exp_().scatter_add_(1, hit[piece], minus[piece]).mul_(known[piece])
                    dlogits[start - first : piece.stop - first] = found  # rounded as by a cast of the logits
            if dx is not None and dlogits is not None:
                dx[first : first + block] = dlogits @ weight_VH
            if needs_weight and dlogits is not None:
                product = dlogits.t() @ x
                dweight = product if dweight is None else product + dweight.to(wide)
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
        )


def linear_cross_entropy(
    x_RH: torch.Tensor, weight_VH: torch.Tensor, target_R: torch.Tensor, *, ignore_index: int = -100
) -> torch.Tensor:
    """Return the sum of ``cross_entropy(x @ weight.T, target)`` over rows, in float32, in chunks of rows.

    Example:
        >>> import torch
        >>> x, weight, target = torch.randn(5, 8), torch.randn(11, 8), torch.randint(11, (5,))
        >>> expected = torch.nn.functional.cross_entropy(x @ weight.T, target, reduction="sum")
        >>> torch.allclose(linear_cross_entropy(x, weight, target), expected, rtol=1e-5)
        True
    """
    total: torch.Tensor = _Chunked.apply(x_RH, weight_VH, target_R, ignore_index)  # type: ignore[no-untyped-call]
    return total


class _Fusion:
    """State of the current call: whether its logits are omitted; shared by the three patched functions."""

    def __init__(self, head: nn.Linear, compute: Callable[..., torch.Tensor]) -> None:
        self.head, self.compute, self.active = head, compute, False


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
    return x if call.settings.active else call.original(x)  # the loss computes the GEMM


class _Loss:
    """The model's loss function; while the fusion is active, it receives the input of the head instead of logits."""

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
        weight = self.fusion.head.weight
        if type(weight.data).__name__ == "DTensor":
            raise ValueError(
                "the weight of the head is sharded when the loss is computed: shard the head with the whole model, "
                "in fully_shard(model), instead of on its own"
            )
        total = self.fusion.compute(logits.flatten(0, -2), weight, target, ignore_index=ignore_index)
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


def apply_loss(
    compute: Callable[..., torch.Tensor], model: nn.Module, sites: tuple[str, ...], edits: Edits
) -> None:
    """Let the model's loss call ``compute(x, weight, target, ignore_index=)``, a module-level function that sums."""
    whole: Any = model
    fusion = _Fusion(whole.get_output_embeddings(), compute)
    edits.replace_forward(model, _model_forward, fusion)
    edits.replace_forward(fusion.head, _head_forward, fusion)
    edits.set(whole, "loss_function", _Loss(fusion, whole.loss_function))


CHUNKED_CROSS_ENTROPY = Candidate(
    "chunked-cross-entropy",
    "language-model head and cross-entropy in chunks, without logits in float32",
    "exact",
    Stage.MODULE,
    _match,
    partial(apply_loss, linear_cross_entropy),
    goals=frozenset({"training", "memory"}),
    conflicts=frozenset({"liger-cross-entropy"}),
    requires=frozenset({"transformers"}),
    drops=frozenset({"logits"}),
)
