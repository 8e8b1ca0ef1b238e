"""FP8 formats, computed from their definitions: the reference that casts are tested against.

A code is a sign bit s, then the exponent field E, then the mantissa field M of m bits. With the format's bias b:

    E = 0:  (-1)^s * 2^(1 - b) * (M / 2^m)          zero and subnormal numbers
    E > 0:  (-1)^s * 2^(E - b) * (1 + M / 2^m)      normal numbers

except for the codes that each encoding reserves:

    ``ieee``  (e5m2):                 E all ones: infinity where M = 0, otherwise NaN
    ``fn``    (e4m3fn):               E and M all ones: NaN; no infinity
    ``fnuz``  (e4m3fnuz, e5m2fnuz):   code 0x80, which would be -0: NaN; no infinity, one zero, bias one larger

e4m3fn and e5m2 are the formats of the OCP 8-bit floating point specification (OFP8), which most hardware has; AMD's
MI300 has the other two.

Encoding rounds to nearest, ties to the even code, subnormals included. A finite value beyond the largest saturates.
NaN **and both infinities** become NaN in every format. Hardware and torch disagree here: a saturating conversion
turns an infinity into 448, which hides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from kernel_pytorch.hardware_abstraction.device import Device

__all__ = [
    "E4M3FN",
    "E4M3FNUZ",
    "E5M2",
    "E5M2FNUZ",
    "FORMATS",
    "Format",
    "FormatPair",
    "for_device",
    "format_named",
]


@dataclass(frozen=True, kw_only=True)
class Format:
    """One 8-bit floating-point format.

    Example:
        >>> E4M3FN.largest, E4M3FN.smallest_normal, E4M3FN.smallest_subnormal
        (448.0, 0.015625, 0.001953125)
        >>> [hex(code) for code in E4M3FN.encode([1.0, -0.0, 1e6, float("inf")])]
        ['0x38', '0x80', '0x7e', '0x7f']
        >>> E4M3FN.decode([0x38, 0x7e, 0x01]).tolist()
        [1.0, 448.0, 0.001953125]
    """

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    bias: int
    encoding: Literal["ieee", "fn", "fnuz"]
    """Which codes are reserved for NaN and infinity; see the module's docstring."""

    @property
    def dtype_name(self) -> str:
        """The torch dtype name, as in ``Device.formats``."""
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def values(self) -> npt.NDArray[np.float64]:
        """The value of every code, from 0x00 to 0xff; not writable.

        Example:
            >>> E5M2.values[[0x3c, 0xc0, 0x7c]].tolist()
            [1.0, -2.0, inf]
        """
        table = np.array([self._value(code) for code in range(256)], dtype=np.float64)
        table.flags.writeable = False
        return table

    def _value(self, code: int) -> float:
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        ones = exponent == (1 << self.exponent_bits) - 1
        if self.encoding == "fnuz" and code == 0x80:
            return float("nan")
        if self.encoding == "fn" and ones and mantissa == (1 << self.mantissa_bits) - 1:
            return float("nan")
        if self.encoding == "ieee" and ones:
            return float("nan") if mantissa else sign * float("inf")
        fraction = mantissa / (1 << self.mantissa_bits)
        if exponent == 0:
            return sign * 2.0 ** (1 - self.bias) * fraction
        return sign * 2.0 ** (exponent - self.bias) * (1.0 + fraction)

    @cached_property
    def largest(self) -> float:
        """The largest finite value."""
        return float(self.values[np.isfinite(self.values)].max())

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with full precision."""
        return float(2.0 ** (1 - self.bias))

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value; values up to half of it round to zero."""
        return float(2.0 ** (1 - self.bias - self.mantissa_bits))

    @property
    def has_infinities(self) -> bool:
        return self.encoding == "ieee"

    @cached_property
    def nan_codes(self) -> tuple[int, ...]:
        """Every code that decodes to NaN.

        Example:
            >>> [hex(code) for code in E4M3FN.nan_codes], [hex(code) for code in E4M3FNUZ.nan_codes]
            (['0x7f', '0xff'], ['0x80'])
        """
        return tuple(int(code) for code in np.flatnonzero(np.isnan(self.values)))

    @property
    def nan_code(self) -> int:
        """The code of every NaN and infinity, whatever its sign or payload."""
        return 0x80 if self.encoding == "fnuz" else 0x7F

    def encode(self, numbers: npt.ArrayLike) -> npt.NDArray[np.uint8]:
        """Return the codes of values that are exact in float64.

        Rounds to nearest, ties to the even code; finite values saturate; NaN and infinities become ``nan_code``.

        Example:
            >>> E4M3FN.encode([17.0, 19.0, 2**-10, 464.0, 1e300]).tolist()  # two ties, an underflow, two overflows
            [88, 90, 0, 126, 126]
        """
        exact = np.asarray(numbers, dtype=np.float64)
        finite = np.isfinite(exact)
        magnitude = np.where(finite, np.minimum(np.abs(exact), 2 * self.largest), 0.0)
        # magnitude = f * 2^e with 1/2 <= f < 1. Neighbouring values of the format are 2^(e - 1 - m) apart, and at
        # least as far as subnormal numbers. Dividing by a power of two is exact.
        _, exponent = np.frexp(magnitude)
        step = np.ldexp(1.0, np.maximum(exponent - 1, 1 - self.bias) - self.mantissa_bits)
        rounded = np.minimum(np.rint(magnitude / step) * step, self.largest)  # rint takes ties to the even multiple
        positive = self.values[:0x80][np.isfinite(self.values[:0x80])]  # their codes are 0, 1, 2, ...
        codes = np.searchsorted(positive, rounded).astype(np.uint8)
        negative = np.signbit(exact) & ((codes != 0) | (self.encoding != "fnuz"))
        signed = np.where(negative, codes | np.uint8(0x80), codes)
        encoded: npt.NDArray[np.uint8] = np.where(finite, signed, np.uint8(self.nan_code)).astype(np.uint8)
        return encoded

    def decode(self, codes: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the values of codes in float64."""
        values: npt.NDArray[np.float64] = self.values[np.asarray(codes, dtype=np.uint8)]
        return values

    def __str__(self) -> str:
        return self.name


E4M3FN = Format(name="e4m3fn", dtype=torch.float8_e4m3fn, exponent_bits=4, mantissa_bits=3, bias=7, encoding="fn")
E5M2 = Format(name="e5m2", dtype=torch.float8_e5m2, exponent_bits=5, mantissa_bits=2, bias=15, encoding="ieee")
E4M3FNUZ = Format(
    name="e4m3fnuz", dtype=torch.float8_e4m3fnuz, exponent_bits=4, mantissa_bits=3, bias=8, encoding="fnuz"
)
E5M2FNUZ = Format(
    name="e5m2fnuz", dtype=torch.float8_e5m2fnuz, exponent_bits=5, mantissa_bits=2, bias=16, encoding="fnuz"
)
FORMATS: Mapping[str, Format] = MappingProxyType(
    {known.name: known for known in (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ)}
)


def format_named(number_format: Any) -> Format:
    """Return the format of this name; raise an error that lists the names if there is none.

    Example:
        >>> format_named("e5m2").largest
        57344.0
    """
    if not isinstance(number_format, str) or number_format not in FORMATS:
        raise ValueError(f"number_format={number_format!r}: use one of {', '.join(FORMATS)}")
    return FORMATS[number_format]


@dataclass(frozen=True)
class FormatPair:
    """The two formats of one family: e4m3 for precision, e5m2 for range."""

    e4m3: Format
    e5m2: Format


_OCP = FormatPair(E4M3FN, E5M2)
_FNUZ = FormatPair(E4M3FNUZ, E5M2FNUZ)


def for_device(device: Device) -> FormatPair:
    """Return the formats to use on a device: those of its hardware; the OCP ones if it has none or both.

    Example:
        >>> import kernel_pytorch as kp
        >>> for_device(kp.device("amd/mi300x")).e4m3.name, for_device(kp.device("nvidia/h200")).e4m3.name
        ('e4m3fnuz', 'e4m3fn')
    """
    if device.supports(_FNUZ.e4m3.dtype_name) and not device.supports(_OCP.e4m3.dtype_name):
        return _FNUZ
    return _OCP
