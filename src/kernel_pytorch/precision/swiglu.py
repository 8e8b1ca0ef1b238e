"""``down(silu(gate(x)) * up(x))`` in 8 bits as one function, under the modules that a model already has.

Between the products nothing is written in high precision that is only read to be cast: the activation goes straight
into 8 bits, and its gradients into 8 bits in both layouts. h is not kept for the backward, which has what it takes to
make its transposed copy again in passing.

A module is taken for a SwiGLU by what it computes, not by its name: it must have three linear layers and nothing else
to learn, and give the same as the formula with small random weights in their place.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import torch
from torch import nn

from kernel_pytorch.ops.fp8_swiglu import fp8_swiglu, fp8_swiglu_grad
from kernel_pytorch.precision.gathered_weight import transposed_codes
from kernel_pytorch.precision.kept_cast import NAMES, Kept, product
from kernel_pytorch.precision.layer import Float8Linear
from kernel_pytorch.precision.linear import (
    cast_of_gradient,
    cast_of_input,
    cast_of_weight,
    formats_on,
    refuse_second,
    working_dtype,
)
from kernel_pytorch.precision.recipe import Recipe

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
            setattr(module, _MARK, roles)
            module.forward = partial(_forward, module)
            found.append(name)
    return found


def unfuse(model: nn.Module) -> None:
    """Give the modules their own forward back."""
    for module in model.modules():
        if hasattr(module, _MARK):
            delattr(module, _MARK)
            del module.__dict__["forward"]


def fused_in(model: nn.Module) -> dict[str, str]:
    """The names of the layers inside fused modules, each with the name of its module."""
    return {
        f"{name}.{role}".lstrip("."): name
        for name, module in model.named_modules()
        for role in getattr(module, _MARK, ())
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
    """Whether the module gives the formula's result, in training and outside, for small and for large numbers."""
    modes = {child: child.training for child in module.modules()}
    layers: list[Any] = [getattr(module, name) for name in (gate, up, down)]
    before = [layer.fp8_fallback for layer in layers]
    try:
        for layer in layers:
            layer.fp8_fallback = "being tried"
        return all(
            _agrees(module.train(training), gate, up, down, size)
            for training in (True, False)
            for size in (1.0, 300.0)
        )
    except Exception:  # whatever it needs that is not there, it is no SwiGLU
        return False
    finally:
        for layer, reason in zip(layers, before, strict=True):
            layer.fp8_fallback = reason
        for child, mode in modes.items():
            child.training = mode


def _agrees(module: nn.Module, gate: str, up: str, down: str, size: float) -> bool:
    width, hidden = 8, 12
    generator = torch.Generator().manual_seed(0)
    shapes = {gate: (hidden, width), up: (hidden, width), down: (width, hidden)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    x = torch.randn(3, width, generator=generator) * size
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        found = torch.func.functional_call(module, {f"{n}.weight": weight for n, weight in weights.items()}, (x,))
    h = nn.functional.silu(x @ weights[gate].t()) * (x @ weights[up].t())
    expected = h @ weights[down].t()
    same_shape = isinstance(found, torch.Tensor) and found.shape == expected.shape
    return same_shape and torch.allclose(found, expected, rtol=1e-4)


# Running them.


def _forward(module: Any, *others: Any, **named: Any) -> Any:
    """The forward of a fused module: the fused function where the three layers agree on how, else its own."""
    layers = [getattr(module, name) for name in getattr(module, _MARK)]
    given = (*others, *named.values())
    x = given[0] if len(given) == 1 else None
    recipe = _common_recipe(layers, x)
    if recipe is None or x is None:
        return type(module).forward(module, *others, **named)
    gate, up, down = layers
    return fp8_swiglu_mlp(x, gate, up, down, recipe)


def _common_recipe(layers: list[Any], x: Any) -> Recipe | None:
    if not isinstance(x, torch.Tensor) or not all(isinstance(layer, Float8Linear) for layer in layers):
        return None
    # A hook on a layer (of FSDP2, or a user's) wants the layer to be called.
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(layer, kind) for layer in layers for kind in hooks):
        return None
    first, second, third = (layer.recipe_for(x) for layer in layers)
    if first is None or first != second or first != third or first.high_precision:
        return None
    whole = first.input == first.weight == first.gradient == "tensor"
    return first if whole and all(layer.bias is None for layer in layers) else None


def fp8_swiglu_mlp(
    x: torch.Tensor, gate: Float8Linear, up: Float8Linear, down: Float8Linear, recipe: Recipe
) -> torch.Tensor:
    """``down(silu(gate(x)) * up(x))`` with everything between the layers in 8 bits, gradients too."""
    kind = x.device.type
    recording = torch.is_grad_enabled()
    layers = (gate, up, down)
    needs_dw = [recording and layer.weight.requires_grad for layer in layers]
    needs_dx = recording and x.requires_grad
    needs_dh = needs_dx or needs_dw[0] or needs_dw[1]
    forward_format, gradient_format = formats_on(kind, x.device.index, recipe.gradient_format)
    x_8 = cast_of_input(
        x,
        recipe,
        forward_format,
        transposed=needs_dw[0] or needs_dw[1],
        memory=gate.fp8_memory(recipe),
    )
    weights = []
    for layer, turned in ((gate, needs_dx), (up, needs_dx), (down, needs_dh)):
        kept = layer.weight_cast(recipe, forward_format, turned)
        if kept is None:
            kept = cast_of_weight(
                layer.weight, recipe, forward_format, transposed=turned, counts=layer.fp8_forward_counts
            )
        weights.append(kept)
    y_MN = _SwiGLU.apply(  # type: ignore[no-untyped-call]
        x.reshape(math.prod(x.shape[:-1]), x.shape[-1]),
        *(layer.weight for layer in layers),
        x_8.data,
        x_8.inverse,
        x_8.data_t,
        *(tensor for cast in weights for tensor in _tensors(cast)),
        down.fp8_forward_counts,
        down.fp8_history if recipe.delayed else None,
        *(layer.fp8_gradient_counts for layer in layers),
        *(layer.fp8_gradient_history if recipe.delayed else None for layer in layers),
        NAMES[working_dtype(x)],
        forward_format,
        gradient_format,
        recipe.power_of_two,
        x_8.direct,
        needs_dx,
        needs_dh,
        *needs_dw,
    )
    y: torch.Tensor = y_MN.reshape(*x.shape[:-1], y_MN.shape[-1])
    return y


def _tensors(cast: Kept) -> tuple[torch.Tensor | None, ...]:
    """data, inverse, and data_t where it is another: torch.compile wants each tensor once."""
    return (cast.data, cast.inverse, None if cast.data_t is cast.data else cast.data_t)


def _count(counts: torch.Tensor, lost: torch.Tensor, numbers: int) -> None:
    """Add the losses of an input or a gradient, the same in both copies."""
    counts[0, :, :3].add_(lost)
    counts[0, :, 3].add_(numbers)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: torch.Tensor,
        gate_weight: torch.Tensor,
        up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        x_8: torch.Tensor,
        x_inverse: torch.Tensor,
        x_8t: torch.Tensor,
        gate_8: torch.Tensor,
        gate_inverse: torch.Tensor,
        gate_8t: torch.Tensor | None,
        up_8: torch.Tensor,
        up_inverse: torch.Tensor,
        up_8t: torch.Tensor | None,
        down_8: torch.Tensor,
        down_inverse: torch.Tensor,
        down_8t: torch.Tensor | None,
        h_counts: torch.Tensor,
        h_history: torch.Tensor | None,
        gate_counts: torch.Tensor,
        up_counts: torch.Tensor,
        down_counts: torch.Tensor,
        gate_history: torch.Tensor | None,
        up_history: torch.Tensor | None,
        down_history: torch.Tensor | None,
        dtype: str,
        forward_format: str,
        gradient_format: str,
        power_of_two: bool,
        direct: bool,
        needs_dx: bool,
        needs_dh: bool,
        needs_dgate: bool,
        needs_dup: bool,
        needs_ddown: bool,
    ) -> torch.Tensor:
        gate_MF = product(x_8, gate_8, x_inverse, gate_inverse, dtype, "fast", direct)
        up_MF = product(x_8, up_8, x_inverse, up_inverse, dtype, "fast", direct)
        h = fp8_swiglu(gate_MF, up_MF, forward_format, history=h_history, power_of_two=power_of_two)
        _count(h_counts, h.counts, h.data.numel())
        if h_history is not None:
            h_history.copy_(h.next_history)
        y = product(h.data, down_8, h.inverse, down_inverse, dtype, "fast", direct)
        keep = needs_dh or needs_ddown
        ctx.to_turn = [weight_8t is None for weight_8t in (gate_8t, up_8t, down_8t)]
        gate_8t, up_8t, down_8t = (
            weight_8 if weight_8t is None else weight_8t
            for weight_8, weight_8t in ((gate_8, gate_8t), (up_8, up_8t), (down_8, down_8t))
        )
        saved = (gate_MF, up_MF, h.inverse, x_inverse, x_8t, gate_inverse, gate_8t, up_inverse, up_8t)
        ctx.save_for_backward(*((*saved, down_inverse, down_8t) if keep else ()))
        ctx.counts = (gate_counts, up_counts, down_counts)
        ctx.histories = (gate_history, up_history, down_history)
        ctx.formats = (forward_format, gradient_format, power_of_two)
        ctx.needs = (needs_dx, needs_dh, needs_dgate, needs_dup, needs_ddown)
        ctx.dtypes = (x_MK.dtype, gate_weight.dtype, up_weight.dtype, down_weight.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor) -> Any:
        gate_MF, up_MF, h_inverse, x_inverse, x_8t, gate_inverse, gate_8t, up_inverse, up_8t, *rest = (
            ctx.saved_tensors
        )
        down_inverse, down_8t = rest
        gate_8t, up_8t, down_8t = (
            transposed_codes(weight_8) if late else weight_8
            for weight_8, late in zip((gate_8t, up_8t, down_8t), ctx.to_turn, strict=True)
        )
        forward_format, gradient_format, power_of_two = ctx.formats
        needs_dx, needs_dh, needs_dgate, needs_dup, needs_ddown = ctx.needs
        gate_counts, up_counts, down_counts = ctx.counts
        gate_history, up_history, down_history = ctx.histories
        x_dtype, gate_dtype, up_dtype, down_dtype = ctx.dtypes
        name = NAMES[dy_MN.dtype]
        dx = dgate = dup = ddown = None
        dy = cast_of_gradient(
            dy_MN,
            gradient_format,
            "tensor",
            transposed=needs_ddown,
            power_of_two=power_of_two,
            counts=down_counts,
            history=down_history,
        )
        if needs_dh:
            dh_MF = product(dy.data, down_8t, dy.inverse, down_inverse, name, "promoted", dy.direct)
            hidden = fp8_swiglu_grad(
                dh_MF,
                gate_MF,
                up_MF,
                gradient_format,
                forward_format,
                h_inverse=h_inverse if needs_ddown else None,
                gate_history=gate_history,
                up_history=up_history,
                power_of_two=power_of_two,
            )
            del dh_MF
            _count(gate_counts, hidden.counts[0], hidden.dgate.numel())
            _count(up_counts, hidden.counts[1], hidden.dup.numel())
            if gate_history is not None and up_history is not None:
                gate_history.copy_(hidden.gate_next_history)
                up_history.copy_(hidden.up_next_history)
            if needs_dx:
                dx = product(hidden.dgate, gate_8t, hidden.dgate_inverse, gate_inverse, name, "promoted", dy.direct)
                dx.add_(product(hidden.dup, up_8t, hidden.dup_inverse, up_inverse, name, "promoted", dy.direct))
                dx = dx.to(x_dtype)
            if needs_dgate:
                dgate = product(hidden.dgate_t, x_8t, hidden.dgate_inverse, x_inverse, name, "promoted", dy.direct)
                dgate = dgate.to(gate_dtype)
            if needs_dup:
                dup = product(hidden.dup_t, x_8t, hidden.dup_inverse, x_inverse, name, "promoted", dy.direct).to(
                    up_dtype
                )
            h_t = hidden.h_t
        elif needs_ddown:  # the layers before are frozen: h alone is needed once more
            h = fp8_swiglu(gate_MF, up_MF, forward_format, power_of_two=power_of_two)
            h_t, h_inverse = h.data.view(torch.uint8).t().contiguous().view(h.data.dtype), h.inverse
        if needs_ddown:
            ddown = product(dy.data_t, h_t, dy.inverse, h_inverse, name, "promoted", dy.direct).to(down_dtype)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            dx, dgate, dup, ddown = (refuse_second(gradient, dy_MN) for gradient in (dx, dgate, dup, ddown))
        return (dx, dgate, dup, ddown, *[None] * 30)
