"""Facts about architectures and catalogue devices are complete and consistent."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction.architectures import (
    ARCHITECTURES,
    Architecture,
    amd_architecture,
    architecture,
    nvidia_architecture,
)
from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE, catalogue_device
from kernel_pytorch.hardware_abstraction.device import Device

NAMES = {
    "nvidia/a100",
    "nvidia/l4",
    "nvidia/h100",
    "nvidia/h200",
    "nvidia/b200",
    "nvidia/rtx5090",
    "nvidia/b300",
    "nvidia/gb200",
    "nvidia/gh200",
    "nvidia/rtx4090",
    "nvidia/l40s",
    "nvidia/rtxpro6000",
    "amd/mi325x",
    "amd/mi350x",
    "amd/rx9070xt",
    "intel/a770",
    "intel/gaudi3",
    "apple/m4max",
    "cpu/grace",
    "cpu/graviton4",
    "amd/mi250x",
    "amd/mi300x",
    "amd/mi355x",
    "amd/rx7900xtx",
    "intel/max1550",
    "intel/b580",
    "cpu/avx2",
    "cpu/avx512",
    "cpu/amx",
    "cpu/neon",
}

OCP = {"float8_e4m3fn", "float8_e5m2"}
FNUZ = {"float8_e4m3fnuz", "float8_e5m2fnuz"}
FLOAT8 = {
    "sm_80": set(),
    "sm_86": set(),
    "sm_89": OCP,
    "sm_90": OCP,
    "sm_100": OCP,
    "sm_103": OCP,
    "sm_120": OCP,
    "gfx90a": set(),
    "gfx942": FNUZ,
    "gfx950": OCP,
    "gfx1100": set(),
    "gfx1201": OCP,
    "xe-hpc": set(),
    "xe-hpg": set(),
    "xe2-hpg": set(),
    "scalar": set(),
    "avx2": set(),
    "avx512": set(),
    "amx": set(),
    "neon": set(),
}
SHARED_KIB = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_103": 227,
    "sm_120": 99,
    "gfx90a": 64,
    "gfx942": 64,
    "gfx950": 160,
    "gfx1100": 64,
    "gfx1201": 64,
    "xe-hpc": 128,
    "xe-hpg": 64,
    "xe2-hpg": 128,
}
MATRIX_UNITS = {
    "sm_80": {"mma"},
    "sm_86": {"mma"},
    "sm_89": {"mma"},
    "sm_90": {"mma", "wgmma"},
    "sm_100": {"mma", "tcgen05"},
    "sm_103": {"mma", "tcgen05"},
    "sm_120": {"mma"},
    "gfx90a": {"mfma"},
    "gfx942": {"mfma"},
    "gfx950": {"mfma"},
    "gfx1100": {"wmma"},
    "gfx1201": {"wmma"},
    "xe-hpc": {"xmx"},
    "xe-hpg": {"xmx"},
    "xe2-hpg": {"xmx"},
    "amx": {"amx"},
}

every_architecture = pytest.mark.parametrize("known", ARCHITECTURES.values(), ids=lambda known: known.name)
CLASSES = {"cpu/avx2", "cpu/avx512", "cpu/amx", "cpu/neon"}
"""Of machines, whose memory, cores and rates differ."""
MX = {"sm_100": "fp8 fp6 fp4 nv", "sm_103": "fp8 fp6 fp4 nv", "sm_120": "fp8 fp6 fp4 nv", "gfx950": "fp8 fp6 fp4"}
SOURCED = ("memory_bytes", "compute_units", "l2_bytes", "interconnect", "power_watts", "rates")

every_device = pytest.mark.parametrize("device", CATALOGUE.values(), ids=lambda device: device.name)


def test_the_tables_here_cover_every_architecture() -> None:
    assert set(FLOAT8) == set(ARCHITECTURES)
    gpus = {name for name, known in ARCHITECTURES.items() if known.backend != "cpu"}
    assert set(SHARED_KIB) == gpus


@every_architecture
def test_float8(known: Architecture) -> None:
    # Both sets at once: a format that only the vector units, or only the matrix units, have would show.
    assert {name for name in known.formats if name.startswith("float8")} == FLOAT8[known.name]
    assert {name for name in known.matrix_formats if name.startswith("float8")} == FLOAT8[known.name]


@every_architecture
def test_shared_memory(known: Architecture) -> None:
    assert known.shared_memory_bytes == SHARED_KIB.get(known.name, 0) * 1024


@every_architecture
def test_matrix_units(known: Architecture) -> None:
    assert known.matrix_units == MATRIX_UNITS.get(known.name, set())
    assert bool(known.matrix_units) == bool(known.matrix_formats)


@every_architecture
def test_formats_are_dtypes_of_torch(known: Architecture) -> None:
    # tfloat32 has no dtype: it is how float32 is multiplied.
    for name in known.formats - {"tfloat32"}:
        assert isinstance(getattr(torch, name), torch.dtype), name
    assert known.matrix_formats <= known.formats
    assert "float32" in known.formats


@every_architecture
def test_tfloat32_is_a_matter_of_matrix_units(known: Architecture) -> None:
    assert ("tfloat32" in known.formats) == ("tfloat32" in known.matrix_formats)


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("sm_80", True),
        ("sm_120", True),
        ("gfx90a", False),
        ("gfx942", True),
        ("gfx950", False),
        ("xe-hpg", False),
    ],
)
def test_tfloat32(name: str, has: bool) -> None:
    assert ("tfloat32" in ARCHITECTURES[name].matrix_formats) == has


@every_architecture
def test_warp_size(known: Architecture) -> None:
    expected = {"xe-hpc": 16, "xe-hpg": 8, "xe2-hpg": 16}.get(known.name)
    if expected is None and known.vendor == "amd":
        expected = 64 if known.name.startswith("gfx9") else 32
    assert known.warp_size == (expected or {"nvidia": 32}.get(known.vendor, 1))


def test_tensor_memory_accelerator_features() -> None:
    assert {name for name, known in ARCHITECTURES.items() if "tma" in known.features} == {
        "sm_90",
        "sm_100",
        "sm_103",
        "sm_120",
    }
    assert "tma_multicast" not in ARCHITECTURES["sm_120"].features


def test_base_cpu_records_claim_no_optional_extension() -> None:
    for name in ("scalar", "avx2", "avx512", "neon"):
        assert not ARCHITECTURES[name].features
    assert {"vnni", "avx512_bf16"} <= ARCHITECTURES["amx"].features


def test_architectures_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        ARCHITECTURES["sm_90"] = ARCHITECTURES["sm_80"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        ARCHITECTURES["sm_90"].warp_size = 64  # type: ignore[misc]


def test_architecture_is_an_exact_look_up() -> None:
    assert architecture("sm_90") is ARCHITECTURES["sm_90"]
    for name in ("sm_90a", "SM_90", "sm_87", "gfx942:sramecc+:xnack-", ""):
        assert architecture(name) is None


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name.startswith("sm_")])
def test_known_nvidia_capability(name: str) -> None:
    number = name.removeprefix("sm_")
    assert nvidia_architecture(int(number[:-1]), int(number[-1])) == ARCHITECTURES[name]


@pytest.mark.parametrize(
    ("major", "minor", "like"),
    [(8, 7, "sm_86"), (8, 8, "sm_86"), (10, 1, "sm_100"), (10, 7, "sm_103"), (12, 1, "sm_120")],
)
def test_unknown_nvidia_capability_of_a_known_major(major: int, minor: int, like: str) -> None:
    expected = dataclasses.replace(ARCHITECTURES[like], name=f"sm_{major}{minor}")
    assert nvidia_architecture(major, minor) == expected


@pytest.mark.parametrize(("major", "minor", "like"), [(11, 0, "sm_103"), (13, 0, "sm_120"), (20, 5, "sm_120")])
def test_unknown_nvidia_major_keeps_only_the_baseline(major: int, minor: int, like: str) -> None:
    found = nvidia_architecture(major, minor)
    older = ARCHITECTURES[like]
    assert found.name == f"sm_{major}{minor}"
    assert found.matrix_units == {"mma"}
    assert found.formats == older.formats - {"float4_e2m1fn_x2"}
    assert found.matrix_formats == older.matrix_formats - {"float4_e2m1fn_x2"}
    assert found.features == older.features - {"mx_scale"}
    assert found.shared_memory_bytes == older.shared_memory_bytes


@pytest.mark.parametrize(("major", "minor"), [(7, 5), (6, 0)])
def test_nvidia_capability_older_than_all_known(major: int, minor: int) -> None:
    found = nvidia_architecture(major, minor)
    assert (found.name, found.backend, found.warp_size) == (f"sm_{major}{minor}", "nvidia", 32)
    assert found.shared_memory_bytes == 48 * 1024
    assert "bfloat16" not in found.formats
    assert not found.matrix_units | found.matrix_formats | found.features


@pytest.mark.parametrize("suffix", ["", ":sramecc+:xnack-", ":xnack+"])
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name.startswith("gfx")])
def test_known_amd_architecture(name: str, suffix: str) -> None:
    assert amd_architecture(name + suffix) is ARCHITECTURES[name]


@pytest.mark.parametrize(
    ("given", "name", "warp_size"), [("gfx908:sramecc+", "gfx908", 64), ("gfx1250", "gfx1250", 32)]
)
def test_unknown_amd_architecture(given: str, name: str, warp_size: int) -> None:
    found = amd_architecture(given)
    assert (found.name, found.vendor, found.backend, found.warp_size) == (name, "amd", "amd", warp_size)
    assert found.formats == {"float32", "float16", "bfloat16"}
    assert not found.matrix_units | found.matrix_formats | found.features


def test_another_vendors_name_is_not_an_amd_architecture() -> None:
    assert not amd_architecture("sm_90").matrix_units


def test_the_catalogue_names() -> None:
    assert set(CATALOGUE) == NAMES


@every_device
def test_device_agrees_with_its_architecture(device: Device) -> None:
    assert CATALOGUE[device.name] is device
    assert not device.present
    if device.backend == "generic":  # as a device that is present and that no backend describes
        assert device.arch not in ARCHITECTURES
        assert device.name.partition("/")[0] == device.vendor
        return
    assert device.name.partition("/")[0] == device.backend
    known = ARCHITECTURES[device.arch]
    for field in dataclasses.fields(Architecture):
        if field.name == "features":
            assert device.features >= known.features
        elif field.name not in ("name", "vendor"):
            assert getattr(device, field.name) == getattr(known, field.name), field.name


@every_device
def test_every_fact_has_a_source_or_a_reason(device: Device) -> None:
    if device.name in CLASSES:
        assert not device.sources
        return
    assert set(device.sources) == set(SOURCED)
    for field, source in device.sources.items():
        assert len(source) > 10, field
        assert source.startswith("unknown: ") == (not getattr(device, field)), (field, source)
    assert device.interconnect_bandwidth or not device.interconnect or "bandwidth" in device.sources["interconnect"]


@every_device
def test_every_format_has_a_rate_or_a_reason(device: Device) -> None:
    if device.name in CLASSES:
        return
    assert device.rates is not None
    assert set(device.rates.matmul) | set(device.rates.unknown) == device.formats
    assert not set(device.rates.matmul) & set(device.rates.unknown)
    assert all(device.rates.unknown.values())


@every_architecture
def test_block_scaled_formats(known: Architecture) -> None:
    expected = {f"mx{name}" if name.startswith("fp") else "nvfp4" for name in MX.get(known.name, "").split()}
    assert known.mx_formats == expected
    assert bool(known.mx_formats) == ("mx_scale" in known.features)


@pytest.mark.parametrize("name", ["intel/gaudi3", "apple/m4max"])
def test_devices_that_no_backend_describes_get_the_kernels_in_plain_torch(name: str) -> None:
    x = torch.zeros(1, 1, 4, 8)
    assert kp.explain(kp.attention, x, x, x, device=name).kernel.language == "torch"
    assert kp.device(name.partition("/")[2]) is CATALOGUE[name]


@pytest.mark.parametrize(
    ("name", "backend", "vendor"),
    [
        ("nvidia/h200", "nvidia", "nvidia"),
        ("amd/mi300x", "amd", "amd"),
        ("intel/b580", "intel", "intel"),
        ("cpu/amx", "cpu", "x86"),
        ("cpu/neon", "cpu", "arm"),
    ],
)
def test_backend_and_vendor(name: str, backend: str, vendor: str) -> None:
    assert (CATALOGUE[name].backend, CATALOGUE[name].vendor) == (backend, vendor)


@every_device
def test_rates_are_a_data_sheets(device: Device) -> None:
    if device.name in CLASSES:
        assert (device.memory_bytes, device.compute_units, device.rates) == (0, 0, None)
        return
    assert device.rates is not None
    assert device.rates.source == "datasheet"
    # Coarse bounds that find a wrong power of ten, or bits in place of bytes.
    assert 0.1e12 < device.rates.bandwidth < 20e12
    for number_format, rate in device.rates.matmul.items():
        assert 1e12 < rate < 20e15, number_format
    assert device.l2_bytes is None or 4 << 20 <= device.l2_bytes <= 256 << 20
    assert device.interconnect_bandwidth is None or 30e9 <= device.interconnect_bandwidth <= 2e12
    assert device.power_watts is None or 60 < device.power_watts < 2000


@every_device
def test_fewer_bits_are_never_slower(device: Device) -> None:
    if device.rates is None:
        return
    rate = device.rates.matmul
    half = rate.get("bfloat16", 0.0)
    assert half == rate.get("float16", half)
    assert half > rate.get("float32", 0.0) or not half
    for name in rate:
        if name.startswith("float8") or (
            name == "int8" and device.arch != "sm_103"
        ):  # Blackwell Ultra gave int8 up
            assert rate[name] >= half, name
        if name.startswith("float4"):
            assert rate[name] >= rate.get("float8_e4m3fn", 0.0), name


def test_h200_is_an_h100_with_more_memory() -> None:
    h100, h200 = CATALOGUE["nvidia/h100"].rates, CATALOGUE["nvidia/h200"].rates
    assert h100 is not None
    assert h200 is not None
    assert h100.matmul == h200.matmul
    assert h100.bandwidth < h200.bandwidth


def test_catalogue_device() -> None:
    for name in NAMES:
        assert catalogue_device(name).name == name
        assert catalogue_device(name.upper()).name == name
        assert catalogue_device(name.partition("/")[2]).name == name


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("nvidia/h20", "nvidia/h200"),
        ("h20", "nvidia/h200"),
        ("gfx942", "amd/mi300x"),
        ("SM_90", "nvidia/gh200"),
        ("amd", "amd/mi250x"),
    ],
)
def test_unknown_name_suggests_and_lists(wrong: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"^name='{wrong}': ") as caught:
        catalogue_device(wrong)
    message = str(caught.value)
    assert repr(meant) in message.partition("?")[0]
    for name in NAMES:
        assert name in message.partition("?")[2]


def test_unknown_name_that_resembles_nothing() -> None:
    with pytest.raises(ValueError, match=r"^name='zzz': not in the catalogue\. It has nvidia/a100, "):
        catalogue_device("zzz")
