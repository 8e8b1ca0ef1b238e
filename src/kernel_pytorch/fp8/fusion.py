"""Find the SwiGLU and RMSNorm modules of a converted model, and run them fused with quantization.

A module is matched by its results, not by its name: they must equal the formula's on small random inputs. A SwiGLU
has three converted layers and no other parameters. An RMSNorm has a weight or no parameters. If another attribute of
a fused module changes later, its own forward runs.
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
"""The attribute of a fused SwiGLU with the names of its gate, up and down layers."""
_CASTER = "_fp8_norm"
"""The attribute of a fused norm with its ``CastingNorm``."""
_TENSORS = (torch.Tensor, nn.Parameter)


# Attributes of a matched module that its forward may read.


_SETTINGS = "_fp8_settings"
"""The attribute of a fused module with its settings when it was matched, see ``_module_settings``."""
_PLAIN = (bool, int, float, str, type(None))


def _module_settings(module: nn.Module, *apart: str) -> list[tuple[nn.Module, str, Any]]:
    """Return (module, name, value) of the plain attributes and children of a module and its submodules.

    Linear layers, ``training`` and the names in ``apart``, which the fused forward reads itself, are left out.
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
    """Return whether no setting has changed. Uses getattr, so that torch.compile guards on each."""
    for part, name, value in settings:
        now = getattr(part, name, settings)
        if now is not value and (isinstance(value, nn.Module) or now != value):
            return False
    return True


# SwiGLU


def fuse_swiglus(model: nn.Module) -> list[str]:
    """Set the fused forward on every module that computes a SwiGLU of three converted layers; return their names."""
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
    """Undo ``fuse_swiglus``."""
    for module in model.modules():
        if hasattr(module, _MARK):
            delattr(module, _MARK)
            delattr(module, _SETTINGS)
            del module.__dict__["forward"]


def fused_in(model: nn.Module) -> dict[str, str]:
    """Map the names of the layers inside fused SwiGLU modules to the names of the modules."""
    return {
        f"{name}.{role}".lstrip("."): name
        for name, module in model.named_modules()
        if hasattr(module, _MARK) and _unchanged(getattr(module, _SETTINGS))
        for role in getattr(module, _MARK)
    }


def _roles(module: nn.Module) -> tuple[str, str, str] | None:
    """Return the names of the gate, up and down layers if the module computes a SwiGLU, else None."""
    linears = {name: child for name, child in module.named_children() if isinstance(child, Float8Linear)}
    parameters = [name for name, _ in module.named_parameters()]
    if sorted(parameters) != sorted(f"{name}.weight" for name in linears) or len(linears) != 3:
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
    """Return whether the module equals the formula in training and eval mode, for small and large elements."""
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
    except Exception:  # a forward that cannot run on these inputs is not a SwiGLU
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
    """Run the fused function if the three layers use the same recipe for this call, else the module's own forward."""
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
        return None  # the layers raise the error for a dtype that cannot be quantized
    # Hooks on a layer (FSDP2's or a user's) run only if the layer itself is called.
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(layer, kind) for layer in layers for kind in hooks):
        return None
    first, second, third = (layer.recipe_for(x) for layer in layers)
    if first is None or second is None or third is None:
        return None
    if first.high_precision or second.high_precision or third.high_precision:
        return None
    # Compare the texts: torch 2.11 cannot compile the comparison of two dataclasses.
    gate, up, down = layers
    same = gate.fp8_text == up.fp8_text == down.fp8_text and first.delayed == second.delayed == third.delayed
    whole = first.input == first.weight == first.gradient == "tensor"
    return first if same and whole and all(layer.bias is None for layer in layers) else None


# RMSNorm


def fuse_norms(model: nn.Module, recipe: Recipe, auto: bool) -> list[str]:
    """Set the fused forward on every RMSNorm that may feed a converted layer; return their names."""
    if recipe.input != "tensor" or "y" in recipe.high_precision:
        return []
    widths = {layer.in_features for layer in model.modules() if isinstance(layer, Float8Linear)}
    found = []
    for name, module in model.named_modules():
        if "forward" in module.__dict__:
            continue
        # Only delayed scaling has a scale before the whole output is computed, and auto starts with unfused norms.
        caster = _caster(module, auto, recipe.delayed and not auto)
        if caster is not None and caster.width in widths:
            setattr(module, _SETTINGS, _module_settings(module, caster.eps))
            setattr(module, _CASTER, caster)
            module.forward = partial(_run_norm, module)
            found.append(name)
    return found


def unfuse_norms(model: nn.Module) -> None:
    """Undo ``fuse_norms``."""
    for module in model.modules():
        if hasattr(module, _CASTER):
            delattr(module, _CASTER)
            delattr(module, _SETTINGS)
            module.__dict__.pop("forward", None)


def norms_in(model: nn.Module) -> dict[str, nn.Module | None]:
    """Map the names of the fused norms to the layer that each quantizes for, or None."""
    return {
        name: getattr(module, _CASTER).layer() for name, module in model.named_modules() if hasattr(module, _CASTER)
    }


def _caster(module: nn.Module, auto: bool, traced: bool) -> CastingNorm | None:
    """Return the ``CastingNorm`` of a module that computes an RMSNorm, None for any other module."""
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
    """Return whether the module equals the formula in training and eval mode, for elements of all magnitudes."""
    training = module.training
    try:
        # Elements near sqrt(eps) tell a different eps apart.
        sizes = (1.0, 300.0, math.sqrt(eps))
        return all(_agrees_norm(module.train(mode), width, eps, size) for mode in (True, False) for size in sizes)
    except Exception:  # a forward that cannot run on these inputs is not an RMSNorm
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
    """Return the eps of an ``nn.RMSNorm`` with eps=None: of the input dtype or of float32, depending on torch."""
    x = torch.full((1, 1), 2.0**-12, dtype=dtype)
    found = float(nn.functional.rms_norm(x, (1,)))
    known = {torch.finfo(kind).eps: 0.0 for kind in (torch.float32, dtype)}
    return min(known, key=lambda eps: abs(found - 2.0**-12 / math.sqrt(2.0**-24 + eps)))


@constant_in_graph
def _constant_default_eps(dtype: torch.dtype) -> float:
    """``_default_eps`` as a constant of torch.compile's graph."""
    return _default_eps(dtype)


def _run_norm(module: Any, *others: Any, **named: Any) -> Any:
    """Run ``fp8_rms_norm`` if it computes the same function, else the module's own forward."""
    if torch.compiler.is_compiling():
        return _traced_norm(module, *others, **named)
    caster: CastingNorm = getattr(module, _CASTER)
    recomputed = backward_running()  # recomputed for activation checkpointing
    given = (*others, *named.values())
    x = given[0] if len(given) == 1 else None
    weight = module.weight
    if not _unchanged(getattr(module, _SETTINGS)):
        return type(module).forward(module, *others, **named)
    if not caster.used():
        y: torch.Tensor = type(module).forward(module, *others, **named)
        if type(y) is torch.Tensor and y.requires_grad:
            if caster.declined and not _takes(caster, x, weight):
                caster.drop_requests()
            else:
                caster.tag(y, recomputed, None)
        return y
    if x is None or not _takes(caster, x, weight):
        caster.declined = True
        return type(module).forward(module, *others, **named)
    recording = torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
    eps = getattr(module, caster.eps)
    eps = _default_eps(x.dtype) if eps is None else float(eps)
    if not recording:
        return rms_norm(x, weight, eps)
    request = caster.request(x, recomputed)
    y = recorded_rms_norm(x, weight, eps, request)
    caster.tag(y, recomputed, request)
    return y


def _traced_norm(module: Any, *others: Any, **named: Any) -> Any:
    """Run ``traced_rms_norm`` under torch.compile if it computes the same function and FP8 may be faster."""
    caster: CastingNorm = getattr(module, _CASTER)
    given, weight = (*others, *named.values()), module.weight
    known = len(given) == 1 and caster.traced and _unchanged(getattr(module, _SETTINGS))
    if not known or compiled_transforms_active() or not _is_the_norm_of(caster, given[0], weight):
        return type(module).forward(module, *others, **named)
    from kernel_pytorch.fp8.operators import revision, rms_norm_in_graph

    x, eps = given[0], getattr(module, caster.eps)
    return rms_norm_in_graph(revision(), x, weight, _constant_default_eps(x.dtype) if eps is None else float(eps))


def _takes(caster: CastingNorm, x: Any, weight: torch.Tensor | None) -> bool:
    """Return whether ``fp8_rms_norm`` computes the module's result for this call."""
    if not _is_the_norm_of(caster, x, weight):
        return False
    # torch.func transforms need torch's own operators.
    return not transform_active() and not forward_ad_active()


def _is_the_norm_of(caster: CastingNorm, x: Any, weight: torch.Tensor | None) -> bool:
    """Return whether the module computes the formula's result in x's dtype."""
    if type(x) not in _TENSORS or x.dtype not in NAMES or x.ndim == 0 or x.shape[-1] != caster.width or x.is_meta:
        return False
    if weight is not None:
        if type(weight) not in _TENSORS or weight.device != x.device or weight.shape != x.shape[-1:]:
            return False
        rounds = caster.rounds_to_input and weight.dtype == torch.float32
        if weight.dtype != x.dtype and not rounds:
            return False
    # Under autocast a norm of a 16-bit input may return float32.
    return bool(x.dtype == torch.float32 or not torch.is_autocast_enabled(x.device.type))
