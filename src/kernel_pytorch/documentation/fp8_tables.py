"""Tables of a backend's architectures and of FP8 training on them, for its pages."""

from __future__ import annotations

import torch

from kernel_pytorch.fp8.recipe import RECIPES
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.formats import for_device
from kernel_pytorch.hardware_abstraction.op import registered_op
from kernel_pytorch.hardware_abstraction.registry import Backend
from kernel_pytorch.hardware_abstraction.selection import Policy, select

__all__ = ["architecture_rows", "matmul_rows", "matrix_rows", "recipe_rows"]

_SCALES = {"tensor": "the tensor", "row": "a row", "block": "1x128", "square": "128x128"}
_M, _K, _N = 512, 512, 512


def architecture_rows(record: Backend) -> list[list[str]]:
    """Return a row per architecture of a backend's catalogue: its devices, and the facts that kernels check."""
    return [
        [
            f"`{device.arch}`",
            ", ".join(f"`{known.name}`" for known in record.catalogue if known.arch == device.arch),
            f"{device.shared_memory_bytes // 1024} KiB" if device.shared_memory_bytes else "-",
            str(device.warp_size),
            ", ".join(sorted(device.features)) or "-",
        ]
        for device in _one_of_each(record)
    ]


def matrix_rows(record: Backend) -> list[list[str]]:
    """Return a row per architecture of a backend's catalogue: its matrix units and their formats."""
    return [
        [
            f"`{device.arch}`",
            ", ".join(sorted(device.matrix_units)) or "-",
            ", ".join(sorted(device.matrix_formats)) or "-",
            ", ".join(sorted(device.mx_formats)) or "-",
        ]
        for device in _one_of_each(record)
    ]


def _one_of_each(record: Backend) -> list[Device]:
    """Return the first device of each architecture, in the catalogue's order."""
    return list({device.arch: device for device in reversed(record.catalogue)}.values())[::-1]


def recipe_rows() -> list[list[str]]:
    """Return a row per FP8 recipe: granularities, formats, source of scales, and GEMMs in the layer's dtype."""
    return [
        [
            f"`{recipe.name}`",
            _SCALES[recipe.input],
            _SCALES[recipe.weight],
            f"{_SCALES[recipe.gradient]}, {recipe.gradient_format}",
            "the last 16 steps" if recipe.delayed else "the tensor itself",
            "the weight gradient" if recipe.high_precision else "-",
        ]
        for recipe in RECIPES.values()
    ]


def matmul_rows(record: Backend) -> list[list[str]]:
    """Return a row per architecture: FP8 formats, and the matmul kernel for each granularity, with the reason."""
    if not any(kernel.op == "fp8_matmul" for kernel in record.kernels):
        return []
    return [
        [
            f"`{device.arch}`",
            ", ".join(one.dtype_name for one in (for_device(device).e4m3, for_device(device).e5m2)),
            *(_multiplied(device, pair) for pair in (("tensor", "tensor"), ("row", "row"), ("block", "square"))),
        ]
        for device in _one_of_each(record)
    ]


def _multiplied(device: Device, pair: tuple[str, str]) -> str:
    dtype = for_device(device).e4m3.dtype
    a, b = (torch.empty(rows, _K, dtype=dtype, device="meta") for rows in (_M, _N))
    scales: dict[str, tuple[int, ...]] = {
        "tensor": (),
        "row": (_M, 1),
        "block": (_M, _K // 128),
        "square": (_N // 128, _K // 128),
    }
    inverse = (torch.empty(scales[one], device="meta") for one in pair)
    op = registered_op("fp8_matmul")
    choice = select(function_of(op).call("forward", (a, b, *inverse, "bfloat16", "promoted")), device, Policy())
    refused = [
        verdict.reason for verdict in choice.verdicts if verdict.kernel == "scaled-mm" and not verdict.chosen
    ]
    return f"`{choice.kernel.name}`" + (f": {refused[0]}" if refused else "")
