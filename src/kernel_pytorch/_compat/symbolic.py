"""The integer functions of symbolic shapes. Importing this module imports sympy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_pytorch._compat.private import private

if TYPE_CHECKING:
    from torch.utils._sympy.functions import FloorDiv, Mod
else:
    _NEEDED = "programs with dynamic shapes cannot be lowered"
    FloorDiv = private("torch.utils._sympy.functions.FloorDiv", test=lambda f: int(f(7, 2)) == 3, without=_NEEDED)
    Mod = private("torch.utils._sympy.functions.Mod", test=lambda f: int(f(7, 2)) == 1, without=_NEEDED)

__all__ = ["FloorDiv", "Mod"]
