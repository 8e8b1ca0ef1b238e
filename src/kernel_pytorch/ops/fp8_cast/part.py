"""The cast of a part of a matrix by the largest magnitude of the whole: together the parts are its cast.

``fp8_cast`` of a matrix with one scale for the tensor takes two steps, its amax and the codes; where the matrix lies
in parts on several devices, the amax has to go around between them.
"""

from __future__ import annotations

import torch

from kernel_pytorch.ops.fp8_cast.torch_kernel import group_amax, quantised, scale_from_amax
from kernel_pytorch.precision.formats import FORMATS

__all__ = ["amax_of_part", "cast_of_part", "inverses_from"]


def amax_of_part(x_RC: torch.Tensor) -> torch.Tensor:
    """The largest magnitude among its finite numbers, float32 without dimensions; 0 where there is none."""
    wide = x_RC.float()
    return group_amax(torch.where(wide.isfinite(), wide.abs(), 0.0), "tensor")


def inverses_from(amaxes: torch.Tensor, number_format: str, power_of_two: bool) -> torch.Tensor:
    """For the largest magnitude of each matrix, what ``fp8_cast`` gives as its ``inverse``."""
    scales = scale_from_amax(amaxes, FORMATS[number_format].largest, power_of_two)
    return scales.double().reciprocal().float()


def cast_of_part(
    x_RC: torch.Tensor, amax: torch.Tensor, number_format: str, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of some rows or columns of a matrix, byte for byte as in ``fp8_cast`` of all of it.

    Args:
        amax: the largest magnitude among the finite numbers of the whole matrix, float32 without dimensions.

    Returns:
        The codes, and int64 (4): numbers that were larger than amax and saturated, became zero, were not finite; and
        all.

    Example:
        >>> import torch
        >>> from kernel_pytorch.ops.fp8_cast import fp8_cast
        >>> x = torch.randn(6, 32)
        >>> whole = fp8_cast(x)
        >>> codes, counts = cast_of_part(x[4:], whole.amax, "e4m3fn", False)
        >>> torch.equal(codes.view(torch.uint8), whole.data[4:].view(torch.uint8)), counts.tolist()
        (True, [0, 0, 0, 64])
    """
    chosen = FORMATS[number_format]
    scale = scale_from_amax(amax, chosen.largest, power_of_two)
    wide = x_RC.float()
    finite = wide.isfinite()
    data, counts = quantised(wide, finite, scale, "tensor", chosen)
    counts[0] = (finite & (wide.abs() > amax)).count_nonzero()
    return data, counts
