"""Find the SwiGLU and RMSNorm modules of a converted model, and run them fused with quantization.

A module is matched by what it computes, not by its name: it must agree with the formula on small random inputs. A
SwiGLU has three converted layers and no other parameters; an RMSNorm has a weight or none. If another attribute of a
fused module changes later, its own forward runs.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from kernel_pytorch._compat.compiler import constant_in_graph
from kernel_pytorch._compat.modes import backward_running, forward_ad_active, transform_active
from kernel_pytorch.fp8.module import Float8Linear
from kernel_pytorch.fp8.quantize import NAMES
from kernel_pytorch.fp8.recipe import Recipe
from kernel_pytorch.fp8.rms_norm import CastingNorm, recorded_rms_norm, rms_norm
from kernel_pytorch.fp8.swiglu import fp8_swiglu_mlp
from kernel_pytorch.fp8.transforms import compiled_transforms_active
from kernel_pytorch.ops.rms_norm.definition import RMS_NORM

__all__ = ["fuse_norms", "fuse_swiglus", "fused_in", "norms_in", "unfuse_norms", "unfuse_swiglus"]

_MARK = "_fp8_swiglu"
"""The attribute of a fused SwiGLU: the names of its gate, up and down layers."""
_CASTER = "_fp8_norm"
"""The attribute of a fused norm, a ``CastingNorm``."""
_TENSORS = (torch.Tensor, nn.Parameter)


# Attributes of a matched module that its forward may read.


_SETTINGS = "_fp8_settings"
"""The attribute of a module that is fused."""
_PLAIN = (bool, int, float, str, type(None))


def _module_settings(module: nn.Module, *apart: str) -> list[tuple[nn.Module, str, Any]]:
    """Numbers, texts, flags and children of a module and of its parts, but for its linear layers.

    Args:
        apart: attributes that whoever runs the module reads himself.
    """
    found: list[tuple[nn.Module, str, Any]] = []
    for part in module.modules():
        if isinstance(part, nn.Linear):
            continue
        plain = [(name, value) for name, value in vars(part).items() if type(value) in _PLAIN]
        children = [(name, child) for name, child in part.named_children() if not isinstance(child, nn.Linear)]
        found += [(part, name, value) for name, value in plain + children if name not in ("training", *apart)]
    return found


def _unchanged(settings: list[tuple[nn.Module, str, Any]]) -> bool:
    """Whether all of them are what they were. Read so that torch.compile looks at them before each call."""
    for part, name, value in settings:
        now = getattr(part, name, settings)
        if now is not value and (isinstance(value, nn.Module) or now != value):
            return False
    return True


# SwiGLU


def fuse_swiglus(model: nn.Module) -> list[str]:
    """Give every module that computes a SwiGLU of three converted layers the fused forward; their names."""
    found = []
    for name, module in model.named_modules():
        roles = _roles(module)
        if roles is not None:
            setattr(module, _SETTINGS, _module_settings(module))
            setattr(module, _MARK, roles)
            module.forward = partial(_run_swiglu, module)
            found.append(name)
    return found


def unfuse_swiglus(model: nn.Module) -> None:
    """Give the modules their own forward back."""
    for module in model.modules():
        if hasattr(module, _MARK):
            delattr(module, _MARK)
            delattr(module, _SETTINGS)
            del module.__dict__["forward"]


def fused_in(model: nn.Module) -> dict[str, str]:
    """The names of the layers inside modules that run fused, each with the name of its module."""
    return {
        f"{name}.{role}".lstrip("."): name
        for name, module in model.named_modules()
        if hasattr(module, _MARK) and _unchanged(getattr(module, _SETTINGS))
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
        if shapes[gate] == shapes[up] == shapes[down][::-1] and _computes_swiglu(module, gate, up, down):
            agreeing.append((gate, up, down))
    return agreeing[0] if len(agreeing) == 1 else None


def _computes_swiglu(module: nn.Module, gate: str, up: str, down: str) -> bool:
    """Whether the module gives the formula's result, in training and outside, for small and for large elements."""
    modes = {child: child.training for child in module.modules()}
    layers: list[Any] = [getattr(module, name) for name in (gate, up, down)]
    before = [layer.fp8_fallback for layer in layers]
    try:
        for layer in layers:
            layer.fp8_fallback = "being tried"
        return all(
            _agrees_swiglu(module.train(training), gate, up, down, size, rows)
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


def _agrees_swiglu(module: nn.Module, gate: str, up: str, down: str, size: float, rows: int) -> bool:
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


def _run_swiglu(module: Any, *others: Any, **named: Any) -> Any:
    """The forward of a fused module: the fused function where the three layers agree on how, else its own."""
    given = (*others, *named.values())
    x = given[0] if len(given) == 1 else None
    if isinstance(x, torch.Tensor):
        gate, *rest = getattr(module, _MARK)
        layer = getattr(module, gate)
        known = not torch.compiler.is_compiling() and isinstance(layer, Float8Linear) and layer.fp8_gains_nothing(x)
        if not known:
            layers = [layer, *(getattr(module, name) for name in rest)]
            recipe = _common_recipe(layers, x) if _unchanged(getattr(module, _SETTINGS)) else None
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


# RMSNorm


def fuse_norms(model: nn.Module, recipe: Recipe, auto: bool) -> list[str]:
    """Give every RMSNorm that may stand before a converted layer the fused forward; their names."""
    if recipe.input != "tensor" or "y" in recipe.high_precision:
        return []
    widths = {layer.in_features for layer in model.modules() if isinstance(layer, Float8Linear)}
    found = []
    for name, module in model.named_modules():
        if "forward" in module.__dict__:
            continue
        # Only a history has a scale before all of a norm is there, and auto leaves norms as they are at first.
        caster = _caster(module, auto, recipe.delayed and not auto)
        if caster is not None and caster.width in widths:
            setattr(module, _SETTINGS, _module_settings(module, caster.eps))
            setattr(module, _CASTER, caster)
            module.forward = partial(_run_norm, module)
            found.append(name)
    return found


def unfuse_norms(model: nn.Module) -> None:
    """Give the modules their own forward back."""
    for module in model.modules():
        if hasattr(module, _CASTER):
            delattr(module, _CASTER)
            delattr(module, _SETTINGS)
            module.__dict__.pop("forward", None)


def norms_in(model: nn.Module) -> dict[str, nn.Module | None]:
    """The names of the fused norms, each with the layer that it casts for, or None."""
    return {
        name: getattr(module, _CASTER).layer() for name, module in model.named_modules() if hasattr(module, _CASTER)
    }


def _caster(module: nn.Module, auto: bool, traced: bool) -> CastingNorm | None:
    """How a module computes that is an RMSNorm; None for any other."""
    if type(module) is nn.RMSNorm:
        one = len(module.normalized_shape) == 1
        return CastingNorm(module.normalized_shape[0], "eps", True, auto, traced) if one else None
    names = [name for name, _ in module.named_parameters()]
    nothing_else = next(module.children(), None) is None and next(module.buffers(), None) is None
    weight = module._parameters.get("weight")
    if names != ["weight"] or not nothing_else or weight is None or weight.ndim != 1:
        return None
    width = weight.shape[0]
    for name, eps in vars(module).items():
        if type(eps) is float and 0 < eps < 1 and _computes_norm(module, width, eps):
            return CastingNorm(width, name, False, auto, traced)
    return None


def _computes_norm(module: nn.Module, width: int, eps: float) -> bool:
    """Whether the module gives the formula's result, in training and outside, for elements of all magnitudes."""
    training = module.training
    try:
        # Of the size of sqrt(eps), every other eps gives something else.
        sizes = (1.0, 300.0, math.sqrt(eps))
        return all(_agrees_norm(module.train(mode), width, eps, size) for mode in (True, False) for size in sizes)
    except Exception:  # whatever it needs that is not there, it is no RMSNorm
        return False
    finally:
        module.train(training)


def _agrees_norm(module: nn.Module, width: int, eps: float, size: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width, generator=generator)
    x = torch.randn(3, width, generator=generator) * size
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        found = torch.func.functional_call(module, {"weight": weight}, (x,))
    expected = RMS_NORM.reference(x.double(), weight.double(), eps)[0].float()
    same_shape = isinstance(found, torch.Tensor) and found.shape == expected.shape
    return same_shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


@lru_cache
def _default_eps(dtype: torch.dtype) -> float:
    """The eps of an ``nn.RMSNorm`` that has none: of the dtype, or of the float32 that it computes in."""
    x = torch.full((1, 1), 2.0**-12, dtype=dtype)
    found = float(nn.functional.rms_norm(x, (1,)))
    known = {torch.finfo(kind).eps: 0.0 for kind in (torch.float32, dtype)}
    return min(known, key=lambda eps: abs(found - 2.0**-12 / math.sqrt(2.0**-24 + eps)))


@constant_in_graph
def _constant_default_eps(dtype: torch.dtype) -> float:
    """The same, which a compiler does not look into."""
    return _default_eps(dtype)


def _run_norm(module: Any, *others: Any, **named: Any) -> Any:
    """The forward of a fused norm: by our op where that is the same function, else its own."""
    if torch.compiler.is_compiling():
        return _traced_norm(module, *others, **named)
    caster: CastingNorm = getattr(module, _CASTER)
    again = backward_running()  # recomputed for activation checkpointing
    given = (*others, *named.values())
    x = given[0] if len(given) == 1 else None
    weight = module.weight
    if not _unchanged(getattr(module, _SETTINGS)):
        return type(module).forward(module, *others, **named)
    if not caster.used():
        y: torch.Tensor = type(module).forward(module, *others, **named)
        if type(y) is torch.Tensor and y.requires_grad:
            if caster.declined and not _takes(caster, x, weight):
                caster.forget()
            else:
                caster.mark(y, again, None)
        return y
    if x is None or not _takes(caster, x, weight):
        caster.declined = True
        return type(module).forward(module, *others, **named)
    recording = torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
    eps = getattr(module, caster.eps)
    eps = _default_eps(x.dtype) if eps is None else float(eps)
    if not recording:
        return rms_norm(x, weight, eps)
    request = caster.request(x, again)
    y = recorded_rms_norm(x, weight, eps, request)
    caster.mark(y, again, request)
    return y


def _traced_norm(module: Any, *others: Any, **named: Any) -> Any:
    """Inside torch.compile: ``traced_norm``, where it is the same function and the layers behind it could gain."""
    caster: CastingNorm = getattr(module, _CASTER)
    given, weight = (*others, *named.values()), module.weight
    known = len(given) == 1 and caster.traced and _unchanged(getattr(module, _SETTINGS))
    if not known or compiled_transforms_active() or not _is_the_norm_of(caster, given[0], weight):
        return type(module).forward(module, *others, **named)
    from kernel_pytorch.fp8.operators import revision, rms_norm_in_graph

    x, eps = given[0], getattr(module, caster.eps)
    return rms_norm_in_graph(revision(), x, weight, _constant_default_eps(x.dtype) if eps is None else float(eps))


def _takes(caster: CastingNorm, x: Any, weight: torch.Tensor | None) -> bool:
    """Whether our op computes what the module would."""
    if not _is_the_norm_of(caster, x, weight):
        return False
    # What transforms functions must see torch's own operators.
    return not transform_active() and not forward_ad_active()


def _is_the_norm_of(caster: CastingNorm, x: Any, weight: torch.Tensor | None) -> bool:
    """Whether the module computes what the formula gives in x's dtype."""
    if type(x) not in _TENSORS or x.dtype not in NAMES or x.ndim == 0 or x.shape[-1] != caster.width or x.is_meta:
        return False
    if weight is not None:
        if type(weight) not in _TENSORS or weight.device != x.device or weight.shape != x.shape[-1:]:
            return False
        rounds = caster.rounds_to_input and weight.dtype == torch.float32
        if weight.dtype != x.dtype and not rounds:
            return False
    # Autocast may let a norm of 16 bits give 32.
    return bool(x.dtype == torch.float32 or not torch.is_autocast_enabled(x.device.type))
