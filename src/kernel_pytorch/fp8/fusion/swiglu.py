"""Run ``down(silu(gate(x)) * up(x))`` of three converted layers as one function, inside the model's own modules.

Nothing between the GEMMs is written in high precision: the activation is quantized as it is computed, its gradients
in both layouts. h is not saved; the backward recomputes its transposed data from gate and up.

A module is matched by what it computes, not by its name: it must have three linear layers, no other parameters, and
agree with the formula on small random weights. If another attribute of it changes later, its own forward runs.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from kernel_pytorch.fp8.autograd import (
    compute_dtype,
    formats_on,
    quantize_input,
    quantize_layer_weight,
    refuse_double_backward,
)
from kernel_pytorch.fp8.fsdp import GatheredWeight
from kernel_pytorch.fp8.fusion.matching import SETTINGS, module_settings, request_cast, unchanged
from kernel_pytorch.fp8.fusion.swiglu_ops import (
    MLPBuffers,
    MLPSpec,
    Needs,
    Saved,
    swiglu_backward,
    swiglu_forward,
)
from kernel_pytorch.fp8.module import Float8Linear
from kernel_pytorch.fp8.quantize import NAMES, transpose_data
from kernel_pytorch.fp8.recipe import Recipe
from kernel_pytorch.fp8.scaled_tensor import ScaledTensor, unflatten

__all__ = ["fp8_swiglu_mlp", "fuse", "fused_in", "unfuse"]

_MARK = "_fp8_swiglu"
"""The attribute of a module that is fused: the names of its gate, up and down layers."""


# Finding them.


def fuse(model: nn.Module) -> list[str]:
    """Give every module that computes a SwiGLU of three converted layers the fused forward; their names."""
    found = []
    for name, module in model.named_modules():
        roles = _roles(module)
        if roles is not None:
            setattr(module, SETTINGS, module_settings(module))
            setattr(module, _MARK, roles)
            module.forward = partial(_forward, module)
            found.append(name)
    return found


def unfuse(model: nn.Module) -> None:
    """Give the modules their own forward back."""
    for module in model.modules():
        if hasattr(module, _MARK):
            delattr(module, _MARK)
            delattr(module, SETTINGS)
            del module.__dict__["forward"]


def fused_in(model: nn.Module) -> dict[str, str]:
    """The names of the layers inside modules that run fused, each with the name of its module."""
    return {
        f"{name}.{role}".lstrip("."): name
        for name, module in model.named_modules()
        if hasattr(module, _MARK) and unchanged(getattr(module, SETTINGS))
        for role in getattr(module, _MARK)
    }


def _roles(module: nn.Module) -> tuple[str, str, str] | None:
    """The names of the gate, up and down layers of a module that computes a SwiGLU; None for any other module."""
    linears = {name: child for name, child in module.named_children() if isinstance(child, Float8Linear)}
    learnt = [name for name, _ in module.named_parameters()]
    if sorted(learnt) != sorted(f"{name}.weight" for name in linears) or len(linears) != 3:
        return None
    drops = any(isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0 for child in module.modules())
    if drops or "forward" in module.__dict__:
        return None
    shapes = {name: tuple(layer.weight.shape) for name, layer in linears.items()}
    agreeing = []
    for gate, up, down in itertools.permutations(linears):
        if shapes[gate] == shapes[up] == shapes[down][::-1] and _computes(module, gate, up, down):
            agreeing.append((gate, up, down))
    return agreeing[0] if len(agreeing) == 1 else None


def _computes(module: nn.Module, gate: str, up: str, down: str) -> bool:
    """Whether the module gives the formula's result, in training and outside, for small and for large elements."""
    modes = {child: child.training for child in module.modules()}
    layers: list[Any] = [getattr(module, name) for name in (gate, up, down)]
    before = [layer.fp8_fallback for layer in layers]
    try:
        for layer in layers:
            layer.fp8_fallback = "being tried"
        return all(
            _agrees(module.train(training), gate, up, down, size, rows)
            for training in (True, False)
            for size, rows in ((1.0, 3), (300.0, 3), (1.0, 300))
        )
    except Exception:  # whatever it needs that is not there, it is no SwiGLU
        return False
    finally:
        for layer, reason in zip(layers, before, strict=True):
            layer.fp8_fallback = reason
        for child, mode in modes.items():
            child.training = mode


def _agrees(module: nn.Module, gate: str, up: str, down: str, size: float, rows: int) -> bool:
    width, hidden = 8, 12
    generator = torch.Generator().manual_seed(0)
    shapes = {gate: (hidden, width), up: (hidden, width), down: (width, hidden)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    x = torch.randn(rows, width, generator=generator) * size
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        found = torch.func.functional_call(module, {f"{n}.weight": weight for n, weight in weights.items()}, (x,))
    h = nn.functional.silu(x @ weights[gate].t()) * (x @ weights[up].t())
    expected = h @ weights[down].t()
    same_shape = isinstance(found, torch.Tensor) and found.shape == expected.shape
    return same_shape and torch.allclose(found, expected, rtol=1e-4)


# Running them.


def _forward(module: Any, *others: Any, **named: Any) -> Any:
    """The forward of a fused module: the fused function where the three layers agree on how, else its own."""
    given = (*others, *named.values())
    x = given[0] if len(given) == 1 else None
    if isinstance(x, torch.Tensor):
        gate, *rest = getattr(module, _MARK)
        layer = getattr(module, gate)
        known = not torch.compiler.is_compiling() and isinstance(layer, Float8Linear) and layer.fp8_gains_nothing(x)
        if not known:
            layers = [layer, *(getattr(module, name) for name in rest)]
            recipe = _common_recipe(layers, x) if unchanged(getattr(module, SETTINGS)) else None
            if recipe is not None:
                return fp8_swiglu_mlp(x, layers[0], layers[1], layers[2], recipe)
    return type(module).forward(module, *others, **named)


def _common_recipe(layers: list[Any], x: torch.Tensor) -> Recipe | None:
    if x.dtype not in NAMES or not all(isinstance(layer, Float8Linear) for layer in layers):
        return None  # the layers have an error for a format that cannot be cast
    # A hook on a layer (of FSDP2, or a user's) wants the layer to be called.
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(layer, kind) for layer in layers for kind in hooks):
        return None
    first, second, third = (layer.recipe_for(x) for layer in layers)
    if first is None or second is None or third is None:
        return None
    if first.high_precision or second.high_precision or third.high_precision:
        return None
    # Compared by their texts, for torch 2.11 cannot compile the comparison of two recipes.
    gate, up, down = layers
    same = gate.fp8_text == up.fp8_text == down.fp8_text and first.delayed == second.delayed == third.delayed
    whole = first.input == first.weight == first.gradient == "tensor"
    return first if same and whole and all(layer.bias is None for layer in layers) else None


def fp8_swiglu_mlp(
    x: torch.Tensor, gate: Float8Linear, up: Float8Linear, down: Float8Linear, recipe: Recipe
) -> torch.Tensor:
    """``down(silu(gate(x)) * up(x))`` with activations and gradients between the layers in FP8."""
    recording = torch.is_grad_enabled()
    layers = (gate, up, down)
    weights = [layer.weight for layer in layers]
    of_gate, of_up, of_down = (layer.fp8_buffers(recipe) for layer in layers)
    needs_dw = [recording and weight.requires_grad for weight in weights]
    needs_dx = recording and x.requires_grad
    needs_dh = needs_dx or needs_dw[0] or needs_dw[1]
    needs = Needs(needs_dx, needs_dh, *needs_dw)
    forward_format, gradient_format = formats_on(x.device.type, x.device.index, recipe.gradient_format)
    spec = MLPSpec(NAMES[compute_dtype(x)], forward_format, gradient_format, recipe.dx_sums, recipe.power_of_two)
    buffers = MLPBuffers(
        of_gate.history,
        of_gate.counts,  # type: ignore[arg-type]
        of_up.counts,  # type: ignore[arg-type]
        of_down.counts,  # type: ignore[arg-type]
        of_down.history,
        of_gate.gradient_counts,  # type: ignore[arg-type]
        of_up.gradient_counts,  # type: ignore[arg-type]
        of_down.gradient_counts,  # type: ignore[arg-type]
        of_gate.gradient_history,
        of_up.gradient_history,
        of_down.gradient_history,
    )
    y_MN: torch.Tensor
    if torch.compiler.is_compiling() and all(needs) and not any(isinstance(w, GatheredWeight) for w in weights):
        from kernel_pytorch.fp8.fusion.compiled import revision, swiglu_in_graph

        y_MN = swiglu_in_graph(revision(), x, *weights, *buffers, *spec)
        return y_MN.reshape(*x.shape[:-1], y_MN.shape[-1])
    x_MK = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    x_transposed = needs_dw[0] or needs_dw[1]
    if not torch.compiler.is_compiling():
        request_cast(x, gate, recipe, forward_format, x_transposed)
    x_quantized = quantize_input(x, recipe, forward_format, transposed=x_transposed, buffers=of_gate)
    quantized = []
    for layer, own, transposed in zip(
        layers, (of_gate, of_up, of_down), (needs_dx, needs_dx, needs_dh), strict=True
    ):
        found = layer.quantized_weight(recipe, forward_format, transposed)
        if found is None:
            found = quantize_layer_weight(
                layer.weight, recipe, forward_format, transposed=transposed, counts=own.counts
            )
        quantized.append(found)
    weights_8: Any = [tensor for each in quantized for tensor in _flat(each)]
    operands = _Operands(x_quantized.data, x_quantized.inverse, x_quantized.data_t, *weights_8)
    spec = spec._replace(direct=x_quantized.direct)
    y_MN = _SwiGLU.apply(x_MK, *weights, *operands, *buffers, *spec, *needs)  # type: ignore[no-untyped-call]
    return y_MN.reshape(*x.shape[:-1], y_MN.shape[-1])


class _Operands(NamedTuple):
    """Quantized x and weights; data_t is None where the backward transposes data: torch.compile wants each tensor
    once."""

    x_data: torch.Tensor
    x_inverse: torch.Tensor
    x_data_t: torch.Tensor
    gate_data: torch.Tensor
    gate_inverse: torch.Tensor
    gate_data_t: torch.Tensor | None
    up_data: torch.Tensor
    up_inverse: torch.Tensor
    up_data_t: torch.Tensor | None
    down_data: torch.Tensor
    down_inverse: torch.Tensor
    down_data_t: torch.Tensor | None


def _flat(found: ScaledTensor) -> tuple[torch.Tensor | None, ...]:
    return found.data, found.inverse, None if found.data_t is found.data else found.data_t


def _scaled(data: torch.Tensor, inverse: torch.Tensor, data_t: torch.Tensor | None) -> ScaledTensor:
    return ScaledTensor(data, data if data_t is None else data_t, inverse, inverse)


class _SwiGLU(torch.autograd.Function):
    """Of quantized operands, in eager mode and traced by Dynamo, which takes no records."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *values: Any
    ) -> torch.Tensor:
        given, buffers, spec, needs = unflatten(values, *_RECORDS)
        y, saved = swiglu_forward(
            ScaledTensor(given.x_data, given.x_data_t, given.x_inverse, given.x_inverse, spec.direct),
            _scaled(given.gate_data, given.gate_inverse, given.gate_data_t),
            _scaled(given.up_data, given.up_inverse, given.up_data_t),
            _scaled(given.down_data, given.down_inverse, given.down_data_t),
            spec,
            buffers,
        )
        transposed = {"gate_t": given.gate_data_t, "up_t": given.up_data_t, "down_t": given.down_data_t}
        ctx.to_transpose = [name for name, data_t in transposed.items() if data_t is None]
        ctx.save_for_backward(*(saved if needs.dh or needs.ddown else ()))
        ctx.buffers, ctx.spec, ctx.needs = tuple(buffers), tuple(spec), tuple(needs)
        ctx.dtypes = (x_MK.dtype, gate.dtype, up.dtype, down.dtype)
        y_MN: torch.Tensor = y
        return y_MN

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor) -> Any:
        saved = Saved(*ctx.saved_tensors)
        saved = saved._replace(**{name: transpose_data(getattr(saved, name)) for name in ctx.to_transpose})
        dx, dx_of_up, *dweights = swiglu_backward(
            dy_MN, saved, MLPSpec(*ctx.spec), Needs(*ctx.needs), MLPBuffers(*ctx.buffers)
        )
        if dx is not None and dx_of_up is not None:
            dx = dx.add_(dx_of_up)
        gradients = [
            None if found is None else found.to(dtype)
            for found, dtype in zip((dx, *dweights), ctx.dtypes, strict=True)
        ]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            gradients = [refuse_double_backward(gradient, dy_MN) for gradient in gradients]
        return (*gradients, *[None] * _VALUES)


_RECORDS = (_Operands, MLPBuffers, MLPSpec, Needs)
_VALUES = sum(len(record._fields) for record in _RECORDS)
