"""``down(silu(gate(x)) * up(x))`` in 8 bits as one function, under the modules that a model already has.

Between the products nothing is written in high precision that is only read to be cast: the activation goes straight
into 8 bits, and its gradients into 8 bits in both layouts. h is not kept for the backward, which has what it takes to
make its transposed copy again in passing.

A module is taken for a SwiGLU by what it computes, not by its name: it must have three linear layers and nothing else
to learn, and give the same as the formula with small random weights in their place. Where its other attributes are no
longer what they were then, it runs as it is.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import torch
from torch import nn

from kernel_pytorch.fp8.fsdp import GatheredWeight
from kernel_pytorch.fp8.in_graph import kept_unchecked, revision
from kernel_pytorch.fp8.kept_cast import NAMES, Kept, transposed_codes
from kernel_pytorch.fp8.kept_swiglu import (
    Needs,
    Saved,
    in_parts,
    swiglu_backward,
    swiglu_backward_hidden_op,
    swiglu_backward_products_op,
    swiglu_forward,
    swiglu_forward_op,
)
from kernel_pytorch.fp8.layer import Float8Linear
from kernel_pytorch.fp8.linear import (
    cast_of_input,
    cast_of_weight,
    formats_on,
    refuse_second,
    working_dtype,
)
from kernel_pytorch.fp8.offer import meet
from kernel_pytorch.fp8.recipe import Recipe
from kernel_pytorch.fp8.settings import SETTINGS, settings_of, unchanged
from kernel_pytorch.fp8.traced_norm import unwritten

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
            setattr(module, SETTINGS, settings_of(module))
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
    """Whether the module gives the formula's result, in training and outside, for small and for large numbers."""
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
    """``down(silu(gate(x)) * up(x))`` with everything between the layers in 8 bits, gradients too."""
    kind = x.device.type
    recording = torch.is_grad_enabled()
    layers = (gate, up, down)
    memories = [layer.fp8_memory(recipe) for layer in layers]
    needs_dw = [recording and layer.weight.requires_grad for layer in layers]
    needs_dx = recording and x.requires_grad
    needs_dh = needs_dx or needs_dw[0] or needs_dw[1]
    forward_format, gradient_format = formats_on(kind, x.device.index, recipe.gradient_format)
    needs = Needs(needs_dx, needs_dh, *needs_dw)
    dtype = NAMES[working_dtype(x)]
    of_gradients = (
        *(memory.gradient_counts for memory in memories),
        *(memory.gradient_history for memory in memories),
    )
    y_MN: torch.Tensor
    gathered = any(isinstance(layer.weight, GatheredWeight) for layer in layers)
    turned = (needs_dx, needs_dx, needs_dh)
    kept = [layer.weight_cast(recipe, forward_format, each) for layer, each in zip(layers, turned, strict=True)]
    if torch.compiler.is_compiling() and all(needs) and not gathered:
        y_MN = _whole(
            revision(),
            x,
            memories[0].history,
            *(layer.weight for layer in layers),
            *(memory.counts for memory in memories),
            memories[2].history,
            *of_gradients,
            dtype,
            forward_format,
            gradient_format,
            recipe.dx_sums,
            recipe.power_of_two,
        )
        return y_MN.reshape(*x.shape[:-1], y_MN.shape[-1])
    x_MK = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    turned_x = needs_dw[0] or needs_dw[1]
    if not torch.compiler.is_compiling():
        meet(x, gate, recipe, forward_format, turned_x)
    x_8 = cast_of_input(x, recipe, forward_format, transposed=turned_x, memory=memories[0])
    casts = []
    for layer, memory, each, cast in zip(layers, memories, turned, kept, strict=True):
        if cast is None:
            counts = memory.counts
            cast = cast_of_weight(layer.weight, recipe, forward_format, transposed=each, counts=counts)
        casts.append(cast)
    y_MN = _SwiGLU.apply(  # type: ignore[no-untyped-call]
        x_MK,
        *(layer.weight for layer in layers),
        x_8.data,
        x_8.inverse,
        x_8.data_t,
        *(tensor for cast in casts for tensor in _tensors(cast)),
        memories[2].counts,
        memories[2].history,
        *of_gradients,
        dtype,
        forward_format,
        gradient_format,
        recipe.dx_sums,
        recipe.power_of_two,
        x_8.direct,
        *needs,
    )
    return y_MN.reshape(*x.shape[:-1], y_MN.shape[-1])


def _tensors(cast: Kept) -> tuple[torch.Tensor | None, ...]:
    """data, inverse, and data_t where it is another: torch.compile wants each tensor once."""
    return (cast.data, cast.inverse, None if cast.data_t is cast.data else cast.data_t)


class _SwiGLU(torch.autograd.Function):
    """Of casts that were made before."""

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
        dx_sums: str,
        power_of_two: bool,
        direct: bool,
        *needs: bool,
    ) -> torch.Tensor:
        y, saved = swiglu_forward(
            Kept(x_8, x_8t, x_inverse, x_inverse, direct),
            Kept(gate_8, gate_8 if gate_8t is None else gate_8t, gate_inverse, gate_inverse),
            Kept(up_8, up_8 if up_8t is None else up_8t, up_inverse, up_inverse),
            Kept(down_8, down_8 if down_8t is None else down_8t, down_inverse, down_inverse),
            dtype,
            forward_format,
            power_of_two,
            h_counts,
            h_history,
        )
        wanted = Needs(*needs)
        ctx.to_turn = [
            name for name, data_t in (("gate_t", gate_8t), ("up_t", up_8t), ("down_t", down_8t)) if data_t is None
        ]
        ctx.save_for_backward(*(saved if wanted.dh or wanted.ddown else ()))
        ctx.counts = (gate_counts, up_counts, down_counts)
        ctx.histories = (gate_history, up_history, down_history)
        ctx.how = (forward_format, gradient_format, dx_sums, power_of_two)
        ctx.needs = needs
        ctx.dtypes = (x_MK.dtype, gate_weight.dtype, up_weight.dtype, down_weight.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor) -> Any:
        forward_format, gradient_format, dx_sums, power_of_two = ctx.how
        saved = Saved(*ctx.saved_tensors)
        saved = saved._replace(**{name: transposed_codes(getattr(saved, name)) for name in ctx.to_turn})
        formats, needs = (forward_format, gradient_format), Needs(*ctx.needs)
        dx, dx_of_up, *others = swiglu_backward(
            dy_MN, saved, formats, dx_sums, power_of_two, needs, ctx.counts, ctx.histories
        )
        if dx is not None and dx_of_up is not None:
            dx = dx.add_(dx_of_up)
        gradients = _as((dx, *others), ctx.dtypes)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            gradients = [refuse_second(gradient, dy_MN) for gradient in gradients]
        return (*gradients, *[None] * 31)


def _as(gradients: Any, dtypes: tuple[torch.dtype, ...]) -> list[torch.Tensor | None]:
    return [None if found is None else found.to(dtype) for found, dtype in zip(gradients, dtypes, strict=True)]


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _whole(_: str, x: torch.Tensor, x_history: torch.Tensor | None, *others: Any) -> torch.Tensor:
    """For torch.compile, where all is asked for; ``traced_norm`` has why Dynamo does not look into it."""
    x_MK, norm = x.reshape(-1, x.shape[-1]), unwritten(x, x_history)
    y_MN: torch.Tensor = _Whole.apply(x_MK, *norm, x_history, *others)  # type: ignore[no-untyped-call]
    return y_MN


class _Whole(torch.autograd.Function):
    """Few operators, for a compiled step may wait for each of them."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: torch.Tensor,
        norm_x: torch.Tensor | None,
        rstd: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        x_history: torch.Tensor | None,
        gate_weight: torch.Tensor,
        up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        gate_counts: torch.Tensor,
        up_counts: torch.Tensor,
        down_counts: torch.Tensor,
        h_history: torch.Tensor | None,
        gate_gradient_counts: torch.Tensor,
        up_gradient_counts: torch.Tensor,
        down_gradient_counts: torch.Tensor,
        gate_history: torch.Tensor | None,
        up_history: torch.Tensor | None,
        down_history: torch.Tensor | None,
        dtype: str,
        forward_format: str,
        gradient_format: str,
        dx_sums: str,
        power_of_two: bool,
    ) -> torch.Tensor:
        kept_unchecked(gate_counts, up_counts, down_counts, x_history, h_history)  # as in traced_linear
        y, *saved = swiglu_forward_op(
            x_MK if norm_x is None else norm_x, gate_weight, up_weight, down_weight, dtype, forward_format,
            power_of_two, gate_counts, up_counts, down_counts, x_history, h_history, rstd, norm_weight,
        )  # fmt: skip
        ctx.save_for_backward(*saved)
        ctx.how = (forward_format, gradient_format, dx_sums, power_of_two)
        ctx.counts = kept_unchecked(gate_gradient_counts, up_gradient_counts, down_gradient_counts)
        ctx.histories = kept_unchecked(gate_history, up_history, down_history)
        ctx.dtypes = (x_MK.dtype, gate_weight.dtype, up_weight.dtype, down_weight.dtype)
        found: torch.Tensor = y
        return found

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor) -> Any:
        saved = Saved(*ctx.saved_tensors)
        parted = in_parts(saved.gate, ctx.histories[0])
        between = swiglu_backward_hidden_op(dy_MN, list(saved), *ctx.how, parted, *ctx.counts, *ctx.histories)
        dx, dx_of_up, *others = swiglu_backward_products_op(
            list(between), list(saved[2:]), NAMES[dy_MN.dtype], ctx.how[2]
        )
        # Their sum is left to the compiler, which has work of its own on it.
        dx, *others = _as((dx + dx_of_up, *others), ctx.dtypes)
        return (dx, *[None] * 4, *others, *[None] * 15)
