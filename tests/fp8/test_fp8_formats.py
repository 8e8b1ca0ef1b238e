"""FP8 formats: every code, tie and edge against the specifications, in exact fractions."""

from __future__ import annotations

import bisect
import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE
from kernel_pytorch.hardware_abstraction.formats import (
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    FORMATS,
    Format,
    for_device,
    format_named,
)

every_format = pytest.mark.parametrize("form", FORMATS.values(), ids=str)

# Bits of exponent and mantissa, bias, and the codes of NaN and infinity, from the specifications.
SPECIFIED = {
    "e4m3fn": (4, 3, 7, {0x7F, 0xFF}, set()),
    "e5m2": (5, 2, 15, {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}, {0x7C, 0xFC}),
    "e4m3fnuz": (4, 3, 8, {0x80}, set()),
    "e5m2fnuz": (5, 2, 16, {0x80}, set()),
}


def exact_value(form: Format, code: int) -> Fraction | None:
    """The value of a code by the specification; None for NaN and infinity."""
    _, mantissa_bits, bias, nans, infinities = SPECIFIED[form.name]
    if code in nans | infinities:
        return None
    exponent, mantissa = divmod(code & 0x7F, 1 << mantissa_bits)
    fraction = Fraction(mantissa, 1 << mantissa_bits)
    value = (
        (Fraction(2) ** (exponent - bias) * (1 + fraction)) if exponent else Fraction(2) ** (1 - bias) * fraction
    )
    return -value if code & 0x80 else value


POSITIVE = {
    name: [value for code in range(0x80) if (value := exact_value(form, code)) is not None]
    for name, form in FORMATS.items()
}


def exact_code(form: Format, number: float) -> int:
    """Nearest of all values by comparing distances, ties to the even code."""
    fnuz = form.name.endswith("fnuz")
    if not math.isfinite(number):
        return 0x80 if fnuz else 0x7F
    values, size = POSITIVE[form.name], abs(Fraction(number))
    above = bisect.bisect_left(values, size)
    near = [code for code in (above - 1, above) if 0 <= code < len(values)]
    code = min(near, key=lambda code: (abs(values[code] - size), code % 2))
    negative = math.copysign(1, number) < 0 and not (fnuz and code == 0)
    return code | 0x80 if negative else code


def exact_codes(form: Format, numbers: np.ndarray) -> list[int]:
    return [exact_code(form, float(number)) for number in numbers.flat]


def float32(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


# Decoding


@every_format
def test_every_code_has_the_value_of_the_definition_and_of_torch(form: Format) -> None:
    assert form.values.shape == (256,)
    nans, infinities = SPECIFIED[form.name][3:]
    for code in range(256):
        value, exact = float(form.values[code]), exact_value(form, code)
        if code in nans:
            assert math.isnan(value)
        elif code in infinities:
            assert value == (-math.inf if code & 0x80 else math.inf)
        else:
            assert Fraction(value) == exact
            assert math.copysign(1, value) == (-1 if code & 0x80 else 1)
    decoded = torch.arange(256).to(torch.uint8).view(form.dtype).double().numpy()
    np.testing.assert_array_equal(decoded, form.values)
    numbers = ~np.isnan(decoded)
    np.testing.assert_array_equal(np.signbit(decoded)[numbers], np.signbit(form.values)[numbers])


def test_the_facts_of_the_formats() -> None:
    facts = {
        form.name: (form.largest, form.smallest_normal, form.smallest_subnormal, form.has_infinities, form.nan_code)
        for form in FORMATS.values()
    }
    assert facts == {
        "e4m3fn": (448.0, 2.0**-6, 2.0**-9, False, 0x7F),
        "e5m2": (57344.0, 2.0**-14, 2.0**-16, True, 0x7F),
        "e4m3fnuz": (240.0, 2.0**-7, 2.0**-10, False, 0x80),
        "e5m2fnuz": (57344.0, 2.0**-15, 2.0**-17, False, 0x80),
    }
    for form in FORMATS.values():
        assert set(form.nan_codes) == SPECIFIED[form.name][3]
        assert form.dtype_name == f"float8_{form.name}" == f"float8_{form}"
        assert torch.finfo(form.dtype).max == form.largest
        assert torch.finfo(form.dtype).smallest_normal == form.smallest_normal


@every_format
def test_decode_takes_any_shape_and_the_table_is_not_writable(form: Format) -> None:
    assert form.decode(np.zeros((2, 3), dtype=np.uint8)).shape == (2, 3)
    with pytest.raises(ValueError, match="read-only"):
        form.values[0] = 1


# Encoding


@every_format
def test_every_value_encodes_to_its_code(form: Format) -> None:
    numbers = np.isfinite(form.values)
    codes = form.encode(form.values)
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(codes[numbers], np.flatnonzero(numbers))
    assert (codes[~numbers] == form.nan_code).all()  # including infinities, if the format has them


@every_format
def test_between_neighbours_the_middle_goes_to_the_even_code_and_the_rest_to_the_nearer(form: Format) -> None:
    values = np.array([float(value) for value in POSITIVE[form.name]])
    low = np.arange(len(values) - 1)
    middle = (values[:-1] + values[1:]) / 2
    for kind in (np.float64, np.float32):
        exact = middle.astype(kind)
        assert (exact == middle).all()
        for sign in (1, -1):
            bit = 0x80 if sign < 0 else 0
            zero = 0 if form.name.endswith("fnuz") else bit  # the code of a negative underflow
            expected = [
                (exact, low + low % 2),
                (np.nextafter(exact, kind(0)), low),
                (np.nextafter(exact, kind(np.inf)), low + 1),
            ]
            for numbers, codes in expected:
                signed = np.where(codes == 0, zero, codes | bit)
                np.testing.assert_array_equal(form.encode(sign * numbers), signed)


@every_format
def test_zeros_nan_infinities_and_saturation(form: Format) -> None:
    largest = form.encode(form.largest).item()
    assert largest == {"e4m3fn": 0x7E, "e5m2": 0x7B}.get(form.name, 0x7F)
    minus_zero = 0x00 if form.name.endswith("fnuz") else 0x80
    assert form.encode([0.0, -0.0]).tolist() == [0x00, minus_zero]
    nans = [math.nan, -math.nan, math.inf, -math.inf, float32(0x7F800001), float32(0xFFFFFFFF)]
    assert form.encode(nans).tolist() == [form.nan_code] * 6
    step = form.largest - form.values[largest - 1]
    beyond = [form.largest * (1 + 1e-12), form.largest + step / 2, form.largest + step, 1e30, 1.7e308]
    assert form.encode(beyond).tolist() == [largest] * 5
    assert form.encode([-number for number in beyond]).tolist() == [largest | 0x80] * 5
    half = form.smallest_subnormal / 2
    assert form.encode([half, -half, math.nextafter(half, 1), 5e-324]).tolist() == [0, minus_zero, 1, 0]


@every_format
def test_encode_takes_any_shape_and_any_float(form: Format) -> None:
    assert form.encode(1.0).shape == ()
    assert form.encode(np.zeros((0, 3))).shape == (0, 3)
    for kind in (np.float16, np.float32, np.float64):
        numbers = np.array([[1.0, -0.3], [7.0, 1e4]], dtype=kind)
        assert form.encode(numbers).flatten().tolist() == exact_codes(form, numbers)


@every_format
@settings(max_examples=300, deadline=None)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=16))
@example(bits=[0, 1, 0x80000000, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000] * 2)
def test_encode_is_the_slow_definition_on_any_bits(form: Format, bits: list[int]) -> None:
    numbers = np.array(bits, dtype=np.uint32).view(np.float32)
    assert form.encode(numbers).tolist() == exact_codes(form, numbers)


@every_format
@settings(max_examples=150, deadline=None)
@given(numbers=st.lists(st.floats(-5e2, 5e2) | st.floats(-1e5, 1e5) | st.floats(-0.1, 0.1), min_size=8, max_size=8))
def test_encode_is_the_slow_definition_in_range(form: Format, numbers: list[float]) -> None:
    assert form.encode(numbers).tolist() == exact_codes(form, np.array(numbers))


# By name and by device


def test_formats_by_name() -> None:
    assert format_named("e5m2fnuz") is E5M2FNUZ
    for wrong in ("float8", None, ["e5m2"]):
        with pytest.raises(ValueError, match=r"number_format=.*: use one of e4m3fn, e5m2, e4m3fnuz, e5m2fnuz"):
            format_named(wrong)


def test_formats_by_device() -> None:
    fnuz = {name for name, device in CATALOGUE.items() if for_device(device).e4m3 is E4M3FNUZ}
    assert fnuz == {name for name, device in CATALOGUE.items() if device.arch == "gfx942"}
    assert fnuz
    for device in CATALOGUE.values():
        pair = for_device(device)
        assert pair.e5m2 is (E5M2FNUZ if pair.e4m3 is E4M3FNUZ else E5M2)
        has = {form.name for form in FORMATS.values() if device.supports(form.dtype_name)}
        assert not has or {pair.e4m3.name, pair.e5m2.name} <= has
    assert for_device(kp.device("cpu")).e4m3 is E4M3FN
