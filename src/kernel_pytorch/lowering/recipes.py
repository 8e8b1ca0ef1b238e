"""Quantization recipes for lowering: named, frozen configurations of torchao.

Linears with dynamic or floating-point activations run in our delegate. Operators that ``int8-static`` quantizes run
in XNNPACK. Norms, attention and everything else stay in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.export import ExportedProgram

__all__ = ["RECIPES", "QuantizationRecipe", "find_recipe", "quantized"]


@dataclass(frozen=True)
class QuantizationRecipe:
    """One quantization scheme. The documentation prints every field.

    Example:
        >>> find_recipe("int8-dynamic").activations
        'dynamic'
    """

    name: str
    """The value of ``recipe`` in ``kp.lower``."""
    weight_bits: int
    """Bits per weight, without scales."""
    weight_granularity: str
    """``"channel"``: one scale per output channel; ``"group of N"``: one per N inputs of an output channel."""
    weight_symmetric: bool
    """Whether weights are symmetric; otherwise each scale has a zero point."""
    activation_bits: int
    """Bits of the activations in the GEMM; 32 if they are not quantized."""
    activations: Literal["static", "dynamic", "float"]
    """``"static"``: scales calibrated on the example inputs; ``"dynamic"``: computed in each run; ``"float"``: not
    quantized."""
    operators: tuple[str, ...]
    """The operators that the quantizer annotates; the table of operators has those that ran quantized."""
    flow: Literal["pt2e", "quantize_"]
    """The torchao API that applies it: PT2E or ``quantize_``."""

    @property
    def weight_group(self) -> int | None:
        """Number of inputs that share a scale; None for one scale per output channel."""
        _, found, size = self.weight_granularity.partition("group of ")
        return int(size) if found else None


RECIPES = {
    recipe.name: recipe
    for recipe in (
        QuantizationRecipe(
            "int8-static", 8, "channel", True, 8, "static", ("linear", "convolution", "add"), "pt2e"
        ),
        QuantizationRecipe("int8-dynamic", 8, "channel", True, 8, "dynamic", ("linear",), "quantize_"),
        QuantizationRecipe("int4-weight", 4, "group of 32", True, 8, "dynamic", ("linear",), "quantize_"),
        QuantizationRecipe("int4-weight-64", 4, "group of 64", True, 8, "dynamic", ("linear",), "quantize_"),
        QuantizationRecipe("int4-weight-128", 4, "group of 128", True, 8, "dynamic", ("linear",), "quantize_"),
        QuantizationRecipe("int8-weight", 8, "channel", True, 32, "float", ("linear",), "quantize_"),
    )
}


def find_recipe(name: str, recipes: Mapping[str, QuantizationRecipe] = RECIPES) -> QuantizationRecipe:
    """Return a recipe by its name; raise an error that lists the recipes if it is unknown."""
    if name not in recipes:
        raise ValueError(f"recipe={name!r}: use one of {', '.join(recipes)}, or None")
    return recipes[name]


def quantized(
    recipe: QuantizationRecipe,
    model: torch.nn.Module,
    inputs: Mapping[str, tuple[Any, ...]],
    dynamic_shapes: Mapping[str, Any],
) -> tuple[dict[str, ExportedProgram], dict[str, torch.nn.Module]]:
    """Return each method of the quantized model, exported, and as a module that runs in eager mode."""
    if recipe.flow == "quantize_":
        own = _by_quantize(recipe, model)
        with torch.no_grad():
            exported = {
                name: torch.export.export(own, given, dynamic_shapes=dynamic_shapes.get(name))
                for name, given in inputs.items()
            }
        return exported, dict.fromkeys(inputs, own)
    made = {name: _by_pt2e(recipe, model, given, dynamic_shapes.get(name)) for name, given in inputs.items()}
    return {name: pair[0] for name, pair in made.items()}, {name: pair[1] for name, pair in made.items()}


def _by_quantize(recipe: QuantizationRecipe, model: torch.nn.Module) -> torch.nn.Module:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup

    # The copy shares its weights with the model: quantization replaces them, and does not write to them.
    own = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    group = recipe.weight_group
    granularity = PerAxis(0) if group is None else PerGroup(group)
    for name, module in own.named_modules():
        if isinstance(module, torch.nn.Linear) and group is not None and module.in_features % group:
            raise ValueError(
                f"recipe={recipe.name!r}: {name} has {module.in_features} inputs, which is no multiple of the group "
                f"of {group}: use a smaller group, or int8-dynamic"
            )
    weights: torch.dtype = {4: torch.int4, 8: torch.int8}[recipe.weight_bits]  # type: ignore[attr-defined]
    if recipe.activations == "float":
        quantize_(own, IntxWeightOnlyConfig(weights, granularity))
    else:
        quantize_(own, Int8DynamicActivationIntxWeightConfig(weights, granularity))
    return own


def _by_pt2e(
    recipe: QuantizationRecipe, model: torch.nn.Module, inputs: tuple[Any, ...], dynamic_shapes: Any
) -> tuple[ExportedProgram, torch.nn.Module]:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    from kernel_pytorch.lowering.quantizer import KernelQuantizer

    with torch.no_grad():
        captured = torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes).module()
        prepared = prepare_pt2e(captured, KernelQuantizer(recipe.name))
        prepared(*inputs)
        converted = convert_pt2e(prepared)
        return torch.export.export(converted, inputs, dynamic_shapes=dynamic_shapes), converted
