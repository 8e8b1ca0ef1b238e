"""fp8_cast in plain torch operations, byte for byte as defined: runs wherever torch does.

torch's cast rounds to nearest even, but its result for values beyond the format's range and for infinities depends
on the format, the device and the version (torch 2.13 on a CPU converts infinity to 448 in e4m3fn). So values are
clamped to the range first, and non-finite ones replaced by one NaN.
"""

from __future__ import annotations

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.formats import FORMATS, Format
from kernel_pytorch.ops.fp8_cast.definition import BLOCK, LARGEST_SCALE, NORMAL_BINADES, empty_inverse


def group_amax(magnitude_RC: torch.Tensor, granularity: str) -> torch.Tensor:
    """Return the amax of each group, in the shape of the scales; 0 for an empty group."""
    rows, columns = magnitude_RC.shape
    if granularity == "tensor":
        return magnitude_RC.amax() if magnitude_RC.numel() else magnitude_RC.new_zeros(())
    if granularity == "row":
        return magnitude_RC.amax(dim=1, keepdim=True) if columns else magnitude_RC.new_zeros((rows, 1))
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    if magnitude_RC.numel() == 0:
        return magnitude_RC.new_zeros((rows if granularity == "block" else down, across))
    below = 0 if granularity == "block" else down * BLOCK - rows
    padded = torch.nn.functional.pad(magnitude_RC, (0, across * BLOCK - columns, 0, below))
    if granularity == "block":
        return padded.view(rows, across, BLOCK).amax(dim=2)
    return padded.view(down, BLOCK, across, BLOCK).amax(dim=(1, 3))


def scale_from_amax(amax: torch.Tensor, largest: float, power_of_two: bool) -> torch.Tensor:
    """Return the largest float32 s with s * amax <= largest, at most 2^126; 1 where amax is 0.

    Compares in float64, where the product is exact: the quotient rounded to float32 is s or the next float32 above.
    """
    exact = amax.double()
    scale = (largest / exact.clamp_min(largest / LARGEST_SCALE)).float()
    # The next smaller positive float32 has the next smaller bit pattern.
    scale = (scale.view(torch.int32) - (scale.double() * exact > largest).int()).view(torch.float32)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(amax == 0, 1.0, scale)


def _spread(scale: torch.Tensor, granularity: str, rows: int, columns: int) -> torch.Tensor:
    """Expand scales to a shape that broadcasts with the matrix."""
    if granularity in ("block", "square"):
        scale = scale.repeat_interleave(BLOCK, dim=1)[:, :columns]
    if granularity == "square":
        scale = scale.repeat_interleave(BLOCK, dim=0)[:rows]
    return scale


def _quantised(
    x_RC: torch.Tensor, finite_RC: torch.Tensor, scale: torch.Tensor, granularity: str, chosen: Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the contiguous quantized data, and (0, underflowed, non-finite, all) counts."""
    product = x_RC * _spread(scale, granularity, *x_RC.shape)
    magnitude = product.abs()
    underflowed = (magnitude <= chosen.smallest_subnormal / 2) & (x_RC != 0)  # ties round to zero, the even code
    lost = torch.stack([numbers.count_nonzero() for numbers in (underflowed, finite_RC.logical_not())])
    counts = torch.nn.functional.pad(torch.nn.functional.pad(lost, (1, 0)), (0, 1), value=x_RC.numel())
    # The format's NaN code, also for 0 times an infinite scale.
    number = finite_RC & (product == product)
    inside = torch.where(number, product.clamp(-chosen.largest, chosen.largest), torch.nan)
    return x_RC.new_empty(x_RC.shape, dtype=chosen.dtype).copy_(inside), counts


def _inverse(x: torch.Tensor, scale: torch.Tensor, granularity: str, rows: int, columns: int) -> torch.Tensor:
    return empty_inverse(x, granularity, rows, columns).copy_(scale.double().reciprocal())


def _transposed_copy(data_RC: torch.Tensor) -> torch.Tensor:
    """Return the contiguous transpose, copied as bytes: not every device copies strided FP8 tensors."""
    data_CR = data_RC.new_empty((data_RC.shape[1], data_RC.shape[0]), dtype=torch.uint8)
    return data_CR.copy_(data_RC.view(torch.uint8).t()).view(data_RC.dtype)


def forward(
    device: Device,
    x: torch.Tensor,
    number_format: str,
    granularity: str,
    transposed: bool,
    history: torch.Tensor | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, ...]:
    chosen = FORMATS[number_format]
    rows, columns = x.shape
    x_RC = x.float()
    finite_RC = x_RC.isfinite()
    magnitude_RC = torch.where(finite_RC, x_RC.abs(), 0.0)
    amax = group_amax(magnitude_RC, "tensor")
    groups = amax if granularity == "tensor" else group_amax(magnitude_RC, granularity)
    scale = scale_from_amax(groups, chosen.largest, power_of_two)
    saturated, next_history = None, amax.new_empty(0)
    if history is not None:
        before = torch.where(history.isfinite(), history, 0.0).amax().clamp_min(0.0)
        remembered = scale_from_amax(before, chosen.largest, power_of_two) / 2
        saturated = (magnitude_RC * remembered > chosen.largest).count_nonzero() * (before > 0)
        below = (amax * remembered < 2.0**NORMAL_BINADES * chosen.smallest_normal) & (amax > 0)
        scale = torch.where((before == 0) | (saturated > 0) | below, scale, remembered)
        next_history = torch.cat([amax.reshape(1), history[:-1]])
    data, counts = _quantised(x_RC, finite_RC, scale, granularity, chosen)
    inverse = _inverse(x, scale, granularity, rows, columns)
    data_t, inverse_t = data.new_empty((0, 0)), inverse.new_empty(0)
    counts_t = torch.zeros_like(counts)
    if transposed and granularity in ("tensor", "square"):
        data_t, counts_t = _transposed_copy(data), counts
        if granularity == "square":
            inverse_t = _inverse(x, scale.t(), granularity, columns, rows)
    elif transposed:
        # Transpose once: every operation below would otherwise read with large strides.
        x_CR, magnitude_CR, finite_CR = (matrix.t().contiguous() for matrix in (x_RC, magnitude_RC, finite_RC))
        own = scale_from_amax(group_amax(magnitude_CR, granularity), chosen.largest, power_of_two)
        data_t, counts_t = _quantised(x_CR, finite_CR, own, granularity, chosen)
        inverse_t = _inverse(x, own, granularity, columns, rows)
    both = torch.stack([counts, counts_t])
    if saturated is not None:
        both[: 1 + transposed, 0] = saturated
    return data, data_t, inverse, inverse_t, amax, both, next_history
