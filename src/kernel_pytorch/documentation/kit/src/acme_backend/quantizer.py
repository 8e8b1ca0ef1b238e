"""Quantization recipes and their PT2E quantizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torchao.quantization.pt2e.observer import PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

from kernel_pytorch.lowering import QuantizationRecipe

RECIPES = {
    recipe.name: recipe
    for recipe in (
        QuantizationRecipe(
            name="int8-weight",
            weight_bits=8,
            weight_granularity="channel",
            weight_symmetric=True,
            activation_bits=32,
            activations="float",
            operators=("linear",),
            flow="pt2e",
        ),
    )
}
_WEIGHT = QuantizationSpec(
    dtype=torch.int8,
    observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(eps=2**-24),
    quant_min=-127,
    quant_max=127,
    qscheme=torch.per_channel_symmetric,
    ch_axis=0,
    is_dynamic=False,
)


class AcmeQuantizer(Quantizer):
    """Quantizes the weights of linears to int8 with one scale per output channel; the rest stays in float32."""

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        for node in model.graph.nodes:
            if node.target is torch.ops.aten.linear.default:
                annotation = QuantizationAnnotation(input_qspec_map={node.args[1]: _WEIGHT}, _annotated=True)
                node.meta["quantization_annotation"] = annotation
        return model

    def validate(self, model: torch.fx.GraphModule) -> None:
        pass


def quantize(
    recipe: QuantizationRecipe,
    model: torch.nn.Module,
    inputs: Mapping[str, tuple[Any, ...]],
    dynamic_shapes: Mapping[str, Any],
) -> tuple[dict[str, ExportedProgram], dict[str, torch.nn.Module]]:
    """Return each method of the quantized model, exported, and as a module that runs in eager mode."""
    exported, eager = {}, {}
    with torch.no_grad():
        for name, given in inputs.items():
            shapes = dynamic_shapes.get(name)
            prepared = prepare_pt2e(
                torch.export.export(model, given, dynamic_shapes=shapes).module(), AcmeQuantizer()
            )
            prepared(*given)
            eager[name] = convert_pt2e(prepared)
            exported[name] = torch.export.export(eager[name], given, dynamic_shapes=shapes)
    return exported, eager
