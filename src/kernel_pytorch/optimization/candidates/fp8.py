"""FP8 of linear layers with ``kp.fp8``: training, and inference with cached weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from kernel_pytorch.fp8.autograd import formats_on
from kernel_pytorch.fp8.quantize import NAMES, QuantizeSpec, quantize, scaled_matmul
from kernel_pytorch.hardware_abstraction.registry import device
from kernel_pytorch.optimization.candidate import Candidate, Context, Sites, Stage
from kernel_pytorch.optimization.candidates.modules import sites_of
from kernel_pytorch.optimization.candidates.precision import cached
from kernel_pytorch.optimization.candidates.weights import needs_gradients
from kernel_pytorch.optimization.edits import Edits, Forward

__all__ = ["FP8_LINEAR", "FP8_TRAINING", "FP8_TRAINING_DELAYED"]

_FAST_COLUMNS = 16384  # fast accumulation is used up to this reduction dimension


def _layers(model: nn.Module, context: Context, dtypes: tuple[torch.dtype, ...]) -> Sites | str:
    here = device(context.device)
    if not {"float8_e4m3fn", "float8_e4m3fnuz"} & here.matrix_formats:
        return f"{here.name} has no 8-bit matrix units"
    last = _head(model)

    def wanted(module: nn.Module) -> str | bool:
        if type(module) is not nn.Linear:
            return False
        if module is last:
            return "the logits are sensitive to rounding"
        if module.weight.dtype not in dtypes:
            return f"its weight is {str(module.weight.dtype).removeprefix('torch.')}"
        return True

    return sites_of(model, wanted, "the model has no nn.Linear to convert")


def _match(model: nn.Module, context: Context) -> Sites | str:
    return _layers(model, context, (torch.float32, torch.float16, torch.bfloat16))


def _head(model: Any) -> nn.Module | None:
    found = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return found if isinstance(found, nn.Module) else None


def _convert(model: nn.Module, sites: tuple[str, ...], recipe: str) -> None:
    from kernel_pytorch.fp8 import convert

    convert(model, recipe, layers=lambda name, _: name in sites)


def _revert(model: nn.Module, *_: Any) -> None:
    from kernel_pytorch.fp8 import revert

    revert(model)


def _apply(recipe: str, model: nn.Module, sites: tuple[str, ...], edits: Edits) -> None:
    edits.call(_convert, _revert, model, sites, recipe)


def _training(name: str, summary: str, recipe: str) -> Candidate:
    others = {"fp8-training", "fp8-training-delayed", "torchao-float8"}
    return Candidate(
        name,
        summary,
        "approximate",
        Stage.PRECISION,
        _match,
        partial(_apply, recipe),
        goals=frozenset({"training", "memory"}),
        conflicts=frozenset(others - {name}),
        adds_state=frozenset({"fp8_state"}),
    )


FP8_TRAINING = _training(
    "fp8-training", "linear layers trained in FP8 with kp.fp8, where that is measured to gain", "auto"
)
FP8_TRAINING_DELAYED = _training(
    "fp8-training-delayed", "every linear layer trained in FP8 with kp.fp8, delayed scaling", "delayed"
)


# Inference: the weight is quantized once, each input with one scale from its own amax.


def _quantized(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    number_format, _ = formats_on(matrix.device.type, matrix.device.index, "e4m3")
    found = quantize(matrix, QuantizeSpec(number_format, "tensor", False, False), None, 0)
    return found.data, found.inverse


def _linear_forward(call: Forward, x: torch.Tensor) -> Any:
    if needs_gradients(call, x) or x.dtype not in NAMES or x.numel() == 0:
        return call.original(x)
    weight, weight_inverse = call.settings.tensors()
    data, inverse = _quantized(x.reshape(-1, x.shape[-1]))
    accumulation = "fast" if x.shape[-1] <= _FAST_COLUMNS else "promoted"
    out = scaled_matmul(data, weight, inverse, weight_inverse, NAMES[x.dtype], accumulation)
    bias: Any = call.module.bias
    out = out if bias is None else out + bias
    return out.reshape(*x.shape[:-1], -1)


def _match_linear(model: nn.Module, context: Context) -> Sites | str:
    return _layers(model, context, (torch.bfloat16,))


FP8_LINEAR = Candidate(
    "fp8-linear",
    "linear layers in FP8 for inference: cached weights, inputs scaled by their amax",
    "approximate",
    Stage.PRECISION,
    _match_linear,
    cached(_linear_forward, _quantized),
    goals=frozenset({"latency", "throughput"}),
)
