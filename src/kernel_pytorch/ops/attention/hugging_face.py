"""``attn_implementation="kernel_pytorch"`` for Hugging Face transformers: the attention and mask functions.

``register_with_transformers`` is called when ``kernel_pytorch`` is imported. If transformers is already imported, it
adds both functions to transformers' registries; otherwise it installs an import hook that does so after
``transformers.modeling_utils`` is imported. This module never imports transformers.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import zlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from kernel_pytorch.masks import Mask, causal, full
from kernel_pytorch.masks.mask import from_code
from kernel_pytorch.ops.attention.tensor_mask import mask_and_bias

__all__ = ["NAME", "attention_forward", "carried", "carried_mask", "register_with_transformers"]

NAME = "kernel_pytorch"
_WATCHED = "transformers.modeling_utils"  # defines AttentionInterface
_NO_HEADS = 1009  # a number of heads that no model has
_NOT_SERVED = ("cache", "indices", "block_indices")


def register_with_transformers() -> None:
    """Register ``attn_implementation="kernel_pytorch"`` now, or as soon as transformers is imported."""
    module = sys.modules.get(_WATCHED)
    if module is not None and hasattr(module, "AttentionInterface"):
        _register()
    elif not any(isinstance(finder, _Hook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Hook())


class _Hook(importlib.abc.MetaPathFinder):
    """Import hook that runs ``_register`` after one module is imported, and ignores all others."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register() -> None:
    module = sys.modules[_WATCHED]
    masking = importlib.import_module("transformers.masking_utils")
    module.AttentionInterface.register(NAME, attention_forward)
    masking.AttentionMaskInterface.register(NAME, _make_mask)


def _make_mask(**arguments: Any) -> torch.Tensor:
    from kernel_pytorch.ops.attention.hugging_face_masks import make_mask

    found: torch.Tensor = make_mask(**arguments)
    return found


def carried(mask: Mask) -> torch.Tensor:
    """Return a 4-D tensor that carries the encoded mask through transformers' models.

    Its shape is (1, 1009, 1, n), which does not broadcast with any model's scores. So a model with its own attention,
    which does not use transformers' registry, raises an error instead of adding the code to its scores.
    """
    numbers = torch.cat([torch.tensor([mask.code.numel(), _checksum(mask.code)]), mask.code])
    whole = torch.nn.functional.pad(numbers, (0, -numbers.numel() % _NO_HEADS))
    found = whole.view(torch.uint64).view(1, _NO_HEADS, 1, -1)
    found.kernel_pytorch_mask = mask  # type: ignore[attr-defined]
    return found


def carried_mask(tensor: torch.Tensor, name: str) -> Mask:
    """Return the mask of a tensor made by ``carried``; ``name`` is the module that attends, for the error."""
    known: Mask | None = getattr(tensor, "kernel_pytorch_mask", None)
    if known is not None:
        return known
    numbers = tensor.reshape(-1).view(torch.int64).cpu()
    if torch.compiler.is_compiling():
        raise RuntimeError("a mask that was made outside the compiled model lost its expression on the way into it")
    size, checksum = numbers[:2].tolist() if len(numbers) > 1 else (-1, 0)
    code = numbers[2 : 2 + size].contiguous()
    if size < 1 or code.numel() != size or _checksum(code) != checksum:
        raise NotImplementedError(
            f'attn_implementation="{NAME}": {name} computes with its attention mask before it attends, and here the '
            'mask is not a tensor of tokens by tokens; use attn_implementation="eager"'
        )
    return from_code(code)


def _checksum(code: torch.Tensor) -> int:
    return zlib.crc32(code.numpy().tobytes())


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function for transformers' registry, by ``kp.attention``; see docs/attention.md."""
    from kernel_pytorch.ops.attention import attention

    if dropout:
        raise ValueError(
            f"{type(module).__name__} trains with an attention dropout of {dropout}, which kp.attention does not "
            "have: set it to 0.0 in the config (attention_dropout, attention_probs_dropout_prob or dropout_rate)"
        )
    if options.get("output_attentions"):
        raise ValueError(
            'output_attentions=True: kp.attention keeps no attention weights; use attn_implementation="eager"'
        )
    for name in _NOT_SERVED:
        if options.get(name) is not None:
            raise NotImplementedError(
                f'{type(module).__name__} passes {name}, which attn_implementation="{NAME}" does not serve; use '
                '"eager" or "sdpa"'
            )
    q_len, kv_len = query.shape[2], key.shape[2]
    bias = position_bias
    if attention_mask is None:
        causes = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = causal() if causes and q_len > 1 else full()
        if causes and 1 < q_len < kv_len:
            # Empty static cache: the queries are aligned to the first keys, as with is_causal of SDPA.
            key, value = key[:, :, :q_len], value[:, :, :q_len]
            bias = None if bias is None else bias[..., :q_len]
    elif attention_mask.dtype == torch.uint64:
        mask = carried_mask(attention_mask, type(module).__name__)
    else:
        mask, added = mask_and_bias(attention_mask, q_len, kv_len)
        bias = added if bias is None else bias if added is None else bias + added
    out = attention(query, key, value, mask, scale=scaling, softcap=softcap or None, bias=bias, sink_logits=s_aux)
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2).contiguous(), None
