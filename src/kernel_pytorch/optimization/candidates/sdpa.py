"""Replace ``scaled_dot_product_attention`` calls and ``nn.MultiheadAttention`` by ``kp.attention``.

Calls are intercepted inside the forward of one model; nothing is patched in torch or in the modules' files.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kernel_pytorch.masks import causal, full
from kernel_pytorch.ops.attention import attention
from kernel_pytorch.ops.attention.everywhere import attention_everywhere
from kernel_pytorch.ops.attention.tensor_mask import mask_and_bias
from kernel_pytorch.optimization.candidate import Candidate, Context, Sites, Stage
from kernel_pytorch.optimization.candidates.attention import pretrained_models
from kernel_pytorch.optimization.candidates.modules import left_alone, sites_of
from kernel_pytorch.optimization.edits import Edits, Forward
from kernel_pytorch.optimization.fallbacks import fell_back

__all__ = ["MULTIHEAD_ATTENTION", "SDPA_ATTENTION"]

_NAME = "scaled_dot_product_attention"


# Modules that call SDPA.


class _Traced(TorchFunctionMode):
    """``attention_everywhere`` for compiled models: no counts, and no mask tensors, whose contents are unknown."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _traced(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _traced(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    served = attn_mask is None and not dropout_p and query.ndim == key.ndim == value.ndim == 4
    served = served and query.dtype == key.dtype == value.dtype and query.shape[0] == key.shape[0]
    served = served and (enable_gqa or query.shape[1] == key.shape[1]) and key.shape[:3] == value.shape[:3]
    if served and (not is_causal or query.shape[2] == key.shape[2]):
        out = attention(query, key, value, causal() if is_causal else full(), scale=scale)
        assert isinstance(out, torch.Tensor)
        return out
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _forward(call: Forward, *args: Any, **kwargs: Any) -> Any:
    with _Traced() if torch.compiler.is_compiling() else attention_everywhere():
        return call.original(*args, **kwargs)


def _functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Yield the functions and methods that a file defines."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) == module.__name__:
            members = vars(value).values() if isinstance(value, type) else (value,)
            yield from (member for member in members if isinstance(member, types.FunctionType))


def _calls(model: nn.Module) -> bool:
    """Return whether a file that defines a class of the model's modules calls SDPA, directly or in a helper."""
    files = {type(module).__module__ for module in model.modules()}
    own = [sys.modules[name] for name in files if name in sys.modules and not name.startswith("torch.")]
    functions: list[Any] = [function for file in own for function in _functions(file)]
    functions += [type(module).forward for module in model.modules()]  # of local classes too
    return any(_NAME in getattr(getattr(one, "__code__", None), "co_names", ()) for one in functions)


def _match(model: nn.Module, context: Context) -> Sites | str:
    if pretrained_models(model):
        return "the model is from transformers, whose attention interface hf-attention uses"
    if not _calls(model):
        return f"no file that defines its modules calls {_NAME}"
    return left_alone(model) or Sites(("",))


def _apply(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    edits.replace_forward(model, _forward)


SDPA_ATTENTION = Candidate(
    "sdpa-attention",
    "calls of scaled_dot_product_attention in the model on kp.attention",
    "exact",
    Stage.MODULE,
    _match,
    _apply,
)


# nn.MultiheadAttention, whose call of SDPA a TorchFunctionMode does not intercept.


def _projected(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """Return queries, keys and values of shape (batch, heads, length, head_dim)."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return [
        functional.linear(x, weight, bias).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    ]


def _addend(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask of ``nn.MultiheadAttention``, where True excludes a key, as an additive mask."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)


def _multihead(
    call: Forward,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    module: Any = call.module
    batched = all(
        type(x) in (torch.Tensor, nn.Parameter) and x.ndim == 3 and not x.is_nested for x in (query, key, value)
    )
    hinted = is_causal and attn_mask is not None and key_padding_mask is None
    masked = (attn_mask is not None or key_padding_mask is not None) and not hinted
    served = batched and not need_weights and not (module.dropout and module.training)
    served = served and not (masked and torch.compiler.is_compiling())
    if not served or (hinted and query.shape != key.shape):
        fell_back("multihead-attention: a call with weights, dropout or unbatched inputs runs the original")
        return call.original(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )
    if not module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    q, k, v = _projected(module, query, key, value)
    mask, bias = causal() if hinted else full(), None
    if masked:
        scores, padding = _addend(attn_mask, q.dtype), _addend(key_padding_mask, q.dtype)
        if scores is not None and scores.ndim == 3:
            scores = scores.unflatten(0, (q.shape[0], module.num_heads))
        if padding is not None:
            padding = padding[:, None, None, :]
            scores = padding if scores is None else scores + padding
        assert scores is not None
        mask, bias = mask_and_bias(scores, q.shape[2], k.shape[2])
    out = attention(q, k, v, mask, bias=bias)
    assert isinstance(out, torch.Tensor)
    out = functional.linear(out.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
    return out if module.batch_first else out.transpose(0, 1), None


def _multihead_wanted(module: nn.Module) -> str | bool:
    if not isinstance(module, nn.MultiheadAttention):
        return False
    if type(module) is not nn.MultiheadAttention:
        return f"is a {type(module).__name__}, not an nn.MultiheadAttention"
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return "it adds keys of its own: add_bias_kv or add_zero_attn"
    return left_alone(module.out_proj) or True


def _match_multihead(model: nn.Module, context: Context) -> Sites | str:
    return sites_of(model, _multihead_wanted, "the model has no nn.MultiheadAttention")


def _apply_multihead(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    for name in sites:
        edits.replace_forward(model.get_submodule(name), _multihead)


MULTIHEAD_ATTENTION = Candidate(
    "multihead-attention",
    "nn.MultiheadAttention without attention weights on kp.attention",
    "exact",
    Stage.MODULE,
    _match_multihead,
    _apply_multihead,
)
