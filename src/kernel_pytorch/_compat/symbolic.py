"""The integer functions and bounds of symbolic shapes. Importing this module imports sympy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_pytorch._compat.private import private

if TYPE_CHECKING:
    from torch.utils._sympy.functions import FloorDiv, Mod
    from torch.utils._sympy.value_ranges import ValueRanges
else:
    _NEEDED = "programs with dynamic shapes cannot be lowered"
    FloorDiv = private("torch.utils._sympy.functions.FloorDiv", test=lambda f: int(f(7, 2)) == 3, without=_NEEDED)
    Mod = private("torch.utils._sympy.functions.Mod", test=lambda f: int(f(7, 2)) == 1, without=_NEEDED)
    ValueRanges = private(
        "torch.utils._sympy.value_ranges.ValueRanges", test=lambda f: f(1, 2).lower == 1, without=_NEEDED
    )

__all__ = ["FloorDiv", "Mod", "ValueRanges"]
