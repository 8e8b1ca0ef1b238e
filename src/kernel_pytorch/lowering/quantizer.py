"""The PT2E quantizer of the ``int8-static`` and ``int8-dynamic`` recipes; also usable without ``kp.lower``."""

from __future__ import annotations

from typing import Any

import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)

from kernel_pytorch.lowering.recipes import find_recipe

__all__ = ["KernelQuantizer"]

_ANNOTATION = "quantization_annotation"


class KernelQuantizer(XNNPACKQuantizer):  # type: ignore[misc]
    """Annotates the operators that a recipe quantizes and XNNPACK runs, and skips integer tensors.

    XNNPACK's own quantizer converts integers that are added to positions to floats, and observes masks and indices.

    Args:
        recipe: ``"int8-static"`` or ``"int8-dynamic"``. ``kp.lower`` uses torchao's ``quantize_`` for all other
            recipes and for ``"int8-dynamic"``.

    Example:
        >>> import torch
        >>> from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 4)).eval(), torch.randn(2, 8)
        >>> prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), KernelQuantizer("int8-dynamic"))
        >>> _ = prepared(x)
        >>> convert_pt2e(prepared)(x).shape
        torch.Size([2, 4])
    """

    def __init__(self, recipe: str = "int8-static") -> None:
        super().__init__()
        self.recipe = find_recipe(recipe)
        if self.recipe.weight_bits != 8 or self.recipe.activations == "float":
            raise ValueError(
                f"recipe={recipe!r} is made by torchao's quantize_ and needs no quantizer: pass it to kp.lower, or "
                f"use 'int8-static' or 'int8-dynamic'"
            )
        dynamic = self.recipe.activations == "dynamic"
        self.set_global(get_symmetric_quantization_config(is_per_channel=True, is_dynamic=dynamic))

    def transform_for_annotation(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        kept = {node: node.args for node in model.graph.nodes if not _is_float(node)}
        model = super().transform_for_annotation(model)
        for node, arguments in kept.items():
            added = [
                argument for argument in node.all_input_nodes if argument not in kept and argument.op == "get_attr"
            ]
            if node.args != arguments:
                node.args = arguments
                for constant in added:
                    if not constant.users:
                        model.graph.erase_node(constant)
                        delattr(model, str(constant.target))
        model.recompile()
        return model

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        model = super().annotate(model)
        for node in model.graph.nodes:
            found = node.meta.get(_ANNOTATION)
            if found is not None and not all(_is_float(each) for each in (node, *found.input_qspec_map)):
                del node.meta[_ANNOTATION]
        return model


def _is_float(node: Any) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.is_floating_point()
