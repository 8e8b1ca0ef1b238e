"""Tensorwise FP8 quantization of a shard by the amax of the whole matrix, for FSDP2's FP8 all-gather.

Each rank computes the amax of its shard, the ranks reduce it, and each quantizes its shard with the result. Together
the shards are byte for byte ``fp8_cast`` of the whole matrix.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_pytorch.hardware_abstraction import dispatch
from kernel_pytorch.hardware_abstraction.formats import FORMATS
from kernel_pytorch.hardware_abstraction.registry import device_preferring
from kernel_pytorch.ops.fp8_cast import KERNEL_TRITON
from kernel_pytorch.ops.fp8_cast.torch_kernel import _quantised, group_amax, scale_from_amax

__all__ = ["amax_of_part", "cast_of_part", "inverses_from"]


def amax_of_part(x_RC: torch.Tensor) -> torch.Tensor:
    """Return the amax of the finite elements as a float32 scalar; 0 if there are none."""
    prepared = _prepared(x_RC, "e4m3fn", False)
    if prepared is not None:
        from kernel_pytorch.ops.fp8_cast.triton_part import amax

        found: torch.Tensor = dispatch.placed(x_RC.device, amax)(prepared, x_RC)
        return found
    wide = x_RC.float()
    return group_amax(torch.where(wide.isfinite(), wide.abs(), 0.0), "tensor")


def inverses_from(amaxes: torch.Tensor, number_format: str, power_of_two: bool) -> torch.Tensor:
    """Return the ``inverse`` of ``fp8_cast`` for the amax of each matrix."""
    scales = scale_from_amax(amaxes, FORMATS[number_format].largest, power_of_two)
    return scales.double().reciprocal().float()


def cast_of_part(
    x_RC: torch.Tensor, amax: torch.Tensor, number_format: str, power_of_two: bool, counts: torch.Tensor, row: int
) -> torch.Tensor:
    """Return the quantized data of some rows or columns of a matrix, byte for byte as in ``fp8_cast`` of all of it.

    Args:
        amax: the amax of the finite elements of the whole matrix, a float32 scalar.
        counts: int64 (rows, 2, 4), contiguous; the counts are added to ``counts[row, 0]``.

    Example:
        >>> import torch
        >>> from kernel_pytorch.ops.fp8_cast import fp8_cast
        >>> x = torch.arange(-96.0, 96.0).view(6, 32)
        >>> whole, counts = fp8_cast(x), torch.zeros(1, 2, 4, dtype=torch.int64)
        >>> codes = cast_of_part(x[4:], whole.amax, "e4m3fn", False, counts, 0)
        >>> torch.equal(codes.view(torch.uint8), whole.data[4:].view(torch.uint8)), counts[0, 0].tolist()
        (True, [0, 0, 0, 64])
    """
    data: torch.Tensor
    prepared = _prepared(x_RC, number_format, power_of_two)
    if prepared is not None:
        from kernel_pytorch.ops.fp8_cast.triton_part import cast_by_amax
        from kernel_pytorch.ops.triton_launch import Place

        place = Place(counts, torch.int64, 64 * row)
        data = dispatch.placed(x_RC.device, cast_by_amax)(prepared, x_RC, amax, place)
        return data
    chosen = FORMATS[number_format]
    wide = x_RC.float()
    scale = scale_from_amax(amax, chosen.largest, power_of_two)
    data, lost = _quantised(wide, wide.isfinite(), scale, "tensor", chosen)
    counts[row, 0].add_(lost)
    return data


def _prepared(x_RC: torch.Tensor, number_format: str, power_of_two: bool) -> Any:
    """Return Triton's cast of such matrices if its kernel would be selected, else None."""
    device = device_preferring(KERNEL_TRITON, x_RC.device, "float64")
    if device is None or x_RC.numel() == 0 or not dispatch.plain_call(x_RC):
        return None
    from kernel_pytorch.ops.fp8_cast.triton_kernel import prepared

    return prepared(device, x_RC, number_format, "tensor", False, 0, power_of_two)
