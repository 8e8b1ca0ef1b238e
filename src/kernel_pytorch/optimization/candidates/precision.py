"""Lower precision for inference and training: bf16 and int8 linear layers, autocast, TF32.

The parameters and the state dict are unchanged. A linear layer caches its weight in the lower precision in addition.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kernel_pytorch._compat.memory import int8_matmul
from kernel_pytorch.optimization.candidate import Candidate, Context, Sites, Stage
from kernel_pytorch.optimization.candidates.modules import is_linear, matrix_of, sites_of
from kernel_pytorch.optimization.candidates.weights import WeightCache, needs_gradients
from kernel_pytorch.optimization.compiler import map_tensors
from kernel_pytorch.optimization.edits import Edits, Forward
from kernel_pytorch.optimization.fallbacks import fell_back

__all__ = ["BF16_AUTOCAST", "BF16_LINEAR", "FLOAT16_AUTOCAST", "INT8_LINEAR", "TF32", "cached"]

_INFERENCE = frozenset({"latency", "throughput"})
_LEAST_ELEMENTS = 1 << 10  # for smaller weights, the conversion of inputs costs more than the GEMM gains


def _bf16(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (weight.to(torch.bfloat16).contiguous(),)


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Quantize per channel to symmetric int8; return the data and the scales."""
    scale = weight.float().abs().amax(dim=1).clamp_min(1e-12) / 127
    return (weight.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8).contiguous(), scale


def _name(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _bf16_forward(call: Forward, x: torch.Tensor) -> Any:
    if needs_gradients(call, x) or x.dtype is not torch.float32:
        fell_back(f"bf16-linear: a call with {_name(x)} inputs runs the original layer")
        return call.original(x)
    (weight,) = call.settings.tensors()
    bias: Any = call.module.bias
    out = functional.linear(x.to(torch.bfloat16), weight).float()
    return out if bias is None else out + bias


def _int8_forward(call: Forward, x: torch.Tensor) -> Any:
    if needs_gradients(call, x) or x.dtype not in (torch.float32, torch.bfloat16) or x.numel() == 0:
        fell_back(f"int8-linear: a call with {_name(x)} inputs runs the original layer")
        return call.original(x)
    weight, scale = call.settings.tensors()
    rows = x.reshape(-1, x.shape[-1]).float()
    row_scale = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    quantized = (rows / row_scale).round().to(torch.int8)
    out = int8_matmul(quantized, weight.t()).float() * row_scale * scale
    bias: Any = call.module.bias
    if bias is not None:
        out = out + bias
    return out.to(x.dtype).reshape(*x.shape[:-1], -1)


def _linears(model: nn.Module, dtypes: tuple[torch.dtype, ...]) -> Sites | str:
    called = {
        id(child)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.children()
    }

    def wanted(module: nn.Module) -> str | bool:
        if not isinstance(module, nn.Linear) and not is_linear(module):
            return False
        if not is_linear(module):
            return f"is a {type(module).__name__}, not an nn.Linear" if id(module) not in called else False
        weight = module.get_parameter("weight")
        if weight.dtype not in dtypes:
            return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
        if weight.numel() < _LEAST_ELEMENTS:
            return f"its weight has only {weight.numel()} elements"
        return True

    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return sites_of(model, wanted, f"the model has no nn.Linear in {names} that is large enough")


def _match_bf16(model: nn.Module, context: Context) -> Sites | str:
    return _linears(model, (torch.float32,))


def _match_int8(model: nn.Module, context: Context) -> Sites | str:
    if context.device.type != "cpu":
        return f"has a kernel for CPUs only, and the model is on {context.device.type}"
    return _linears(model, (torch.float32, torch.bfloat16))


def _of_weight(
    convert: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], module: nn.Module
) -> tuple[torch.Tensor, ...]:
    return convert(matrix_of(module))


def cached(
    forward: Callable[..., Any], convert: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
) -> Callable[[nn.Module, tuple[str, ...], Edits], None]:
    """Return an ``apply`` function that gives linear layers a forward with a ``WeightCache``."""

    def apply(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
        for name in sites:
            module = model.get_submodule(name)
            if not is_linear(module):
                raise ValueError(f"module {name!r} ({type(module).__name__}) is no linear layer")
            around = model.get_submodule(name.rpartition(".")[0])
            owner = around if hasattr(around, "merged_adapters") else None  # a PEFT layer
            cache = WeightCache(partial(_of_weight, convert), module, owner=owner)
            edits.replace_forward(module, forward, cache)

    return apply


# Autocast and TF32, around the whole model.


def _autocast_forward(call: Forward, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(*call.settings):
        out = call.original(*args, **kwargs)
    return map_tensors(_widened, out)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _match_autocast(model: nn.Module, context: Context) -> Sites | str:
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if kinds != {torch.float32}:
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds)) or "none"
        return f"needs parameters in float32 only; these are {names}"
    return sites_of(model, lambda module: module is model, "the model cannot be wrapped")


def _match_float16(model: nn.Module, context: Context) -> Sites | str:
    if context.device.type == "cpu":
        return "CPUs gain nothing over bfloat16"
    return _match_autocast(model, context)


def _apply_autocast(dtype: torch.dtype, model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    device = next(parameter.device for parameter in model.parameters())
    edits.replace_forward(model, _autocast_forward, (device.type, dtype))


_switching = threading.Lock()


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with _switching:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _tf32_forward(call: Forward, *args: Any, **kwargs: Any) -> Any:
    with _tf32():
        return call.original(*args, **kwargs)


def _match_tf32(model: nn.Module, context: Context) -> Sites | str:
    if context.device.type != "cuda":
        return f"is a format of NVIDIA's matrix units, and the model is on {context.device.type}"
    return _match_autocast(model, context)


def _apply_tf32(model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    edits.replace_forward(model, _tf32_forward)


_OTHERS = frozenset({"bf16-linear", "bf16-autocast", "float16-autocast", "int8-linear", "tf32"})


def _approximate(name: str, summary: str, match: Any, apply: Any, goals: frozenset[str] = _INFERENCE) -> Candidate:
    return Candidate(
        name, summary, "approximate", Stage.PRECISION, match, apply, goals=goals, conflicts=_OTHERS - {name}
    )


BF16_LINEAR = _approximate(
    "bf16-linear", "linear layers in bf16, with a cached bf16 weight", _match_bf16, cached(_bf16_forward, _bf16)
)
INT8_LINEAR = _approximate(
    "int8-linear",
    "linear layers in int8: per-channel weights, per-row activations",
    _match_int8,
    cached(_int8_forward, _int8),
)
BF16_AUTOCAST = _approximate(
    "bf16-autocast",
    "the model under torch.autocast in bf16, outputs in float32",
    _match_autocast,
    partial(_apply_autocast, torch.bfloat16),
    goals=frozenset({"latency", "throughput", "training", "memory"}),
)
FLOAT16_AUTOCAST = _approximate(
    "float16-autocast",
    "the model under torch.autocast in float16, outputs in float32",
    _match_float16,
    partial(_apply_autocast, torch.float16),
)
TF32 = _approximate("tf32", "float32 GEMMs on TF32 matrix units", _match_tf32, _apply_tf32)
