"""Probes on fake drivers: facts are those that the driver reports, and a broken driver gives no device."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction import probe, registry
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.rates import measure_rates

OCP = {"float8_e4m3fn", "float8_e5m2"}
FNUZ = {"float8_e4m3fnuz", "float8_e5m2fnuz"}

H200 = {
    "name": "NVIDIA H200",
    "major": 9,
    "minor": 0,
    "total_memory": 150_109_880_320,
    "multi_processor_count": 132,
    "warp_size": 32,
    "shared_memory_per_block_optin": 232448,
}
A100 = H200 | {
    "name": "NVIDIA A100-SXM4-80GB",
    "major": 8,
    "total_memory": 84_987_740_160,
    "multi_processor_count": 108,
    "shared_memory_per_block_optin": 166912,
}
MI300X = {
    "name": "AMD Instinct MI300X",
    "gcnArchName": "gfx942:sramecc+:xnack-",
    "total_memory": 206_141_652_992,
    "multi_processor_count": 304,
    "warp_size": 64,
    "shared_memory_per_block": 65536,
}
MAX1550 = {
    "name": "Intel(R) Data Center GPU Max 1550",
    "architecture": 0x000000030F000700,
    "total_memory": 68_719_476_736,
    "max_compute_units": 512,
    "gpu_subslice_count": 64,
    "sub_group_sizes": [16, 32],
    "local_mem_size": 131072,
    "has_fp16": True,
    "has_fp64": True,
    "has_bfloat16_conversions": True,
    "has_subgroup_matrix_multiply_accumulate": True,
}
B580 = MAX1550 | {
    "name": "Intel(R) Arc(TM) B580 Graphics",
    "architecture": 0x0000000500400400,
    "total_memory": 12_168_933_376,
    "max_compute_units": 160,
    "gpu_subslice_count": 20,
}


def float8(device: Device) -> set[str]:
    return {name for name in device.formats if name.startswith("float8")}


def driver_error(*arguments: object) -> None:
    raise RuntimeError("CUDA driver initialization failed")


def fake_cuda(monkeypatch: pytest.MonkeyPatch, *cards: dict[str, object], hip: str | None = None) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**cards[index]))


def fake_xpu(monkeypatch: pytest.MonkeyPatch, *cards: dict[str, object]) -> None:
    xpu = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: len(cards),
        get_device_properties=lambda index: SimpleNamespace(**cards[index]),
    )
    monkeypatch.setattr(torch, "xpu", xpu)


def test_nvidia_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, H200)
    (device,) = probe.probe_nvidia()
    assert (device.name, device.backend, device.vendor, device.arch) == (
        "NVIDIA H200",
        "nvidia",
        "nvidia",
        "sm_90",
    )
    assert (device.memory_bytes, device.compute_units) == (150_109_880_320, 132)
    assert (device.warp_size, device.shared_memory_bytes) == (32, 232448)
    assert float8(device) == OCP
    assert device.matrix_units == {"mma", "wgmma"}
    assert "tma" in device.features
    assert (device.torch_device, device.present, device.rates) == ("cuda:0", True, None)


def test_nvidia_a100_has_no_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, A100)
    (device,) = probe.probe_nvidia()
    assert (device.arch, device.compute_units, device.shared_memory_bytes) == ("sm_80", 108, 166912)
    assert float8(device) == set()
    assert device.matrix_units == {"mma"}
    assert "tma" not in device.features


def test_each_nvidia_gpu_has_its_own_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, A100, H200)
    assert [(device.arch, device.torch_device) for device in probe.probe_nvidia()] == [
        ("sm_80", "cuda:0"),
        ("sm_90", "cuda:1"),
    ]


def test_an_unknown_nvidia_capability_keeps_what_the_driver_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, H200 | {"major": 13, "minor": 7, "shared_memory_per_block_optin": 300_000})
    (device,) = probe.probe_nvidia()
    assert (device.arch, device.shared_memory_bytes, device.compute_units) == ("sm_137", 300_000, 132)
    assert device.matrix_units == {"mma"}
    assert not device.supports("float4_e2m1fn_x2")


def test_amd_mi300x(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, MI300X, hip="6.4.0")
    (device,) = probe.probe_amd()
    assert (device.name, device.backend, device.vendor, device.arch) == (
        "AMD Instinct MI300X",
        "amd",
        "amd",
        "gfx942",
    )
    assert (device.memory_bytes, device.compute_units) == (206_141_652_992, 304)
    assert (device.warp_size, device.shared_memory_bytes) == (64, 65536)
    assert float8(device) == FNUZ
    assert device.matrix_units == {"mfma"}
    assert device.torch_device == "cuda:0"


def test_amd_shared_memory_where_torch_does_not_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    older = {name: value for name, value in MI300X.items() if name != "shared_memory_per_block"}
    fake_cuda(monkeypatch, older | {"gcnArchName": "gfx950"}, hip="6.4.0")
    (device,) = probe.probe_amd()
    assert (device.arch, device.shared_memory_bytes) == ("gfx950", 160 * 1024)
    assert float8(device) == OCP


def test_a_build_of_torch_is_for_one_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, H200)
    assert probe.probe_amd() == ()
    fake_cuda(monkeypatch, MI300X, hip="6.4.0")
    assert probe.probe_nvidia() == ()


@pytest.mark.parametrize(("card", "arch", "cores"), [(MAX1550, "xe-hpc", 64), (B580, "xe2-hpg", 20)])
def test_intel(monkeypatch: pytest.MonkeyPatch, card: dict[str, object], arch: str, cores: int) -> None:
    fake_xpu(monkeypatch, card)
    (device,) = probe.probe_intel()
    assert (device.backend, device.vendor, device.arch) == ("intel", "intel", arch)
    assert device.compute_units == cores, "Xe cores are counted, not their vector engines"
    assert (device.warp_size, device.shared_memory_bytes) == (16, 131072)
    assert device.formats == {"float64", "float32", "float16", "bfloat16", "int8"}
    assert device.matrix_formats == {"float16", "bfloat16", "int8"}
    assert device.matrix_units == {"xmx"}
    assert device.torch_device == "xpu:0"


def test_intel_probe_and_catalogue_count_the_same_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_xpu(monkeypatch, B580)
    (device,) = probe.probe_intel()
    assert device.compute_units == kp.device("intel/b580").compute_units


def test_intel_without_the_flags_claims_less(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("has_fp64", "has_bfloat16_conversions", "has_subgroup_matrix_multiply_accumulate")
    fake_xpu(monkeypatch, B580 | dict.fromkeys(flags, False) | {"architecture": 0, "sub_group_sizes": [8]})
    (device,) = probe.probe_intel()
    assert device.arch == "xe"
    assert device.formats == {"float32", "float16", "int8"}
    assert not device.matrix_formats | device.matrix_units
    assert device.warp_size == 8


def without_name(device: Device) -> Device:
    return dataclasses.replace(device, name="")


def test_facts_do_not_come_from_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for card, hip in ((H200, None), (MI300X, "6.4.0")):
        probe_it = probe.probe_amd if hip else probe.probe_nvidia
        fake_cuda(monkeypatch, card, hip=hip)
        (honest,) = probe_it()
        fake_cuda(monkeypatch, card | {"name": "GeForce A100 MI250X Arc"}, hip=hip)
        (renamed,) = probe_it()
        assert renamed.name == "GeForce A100 MI250X Arc"
        assert without_name(renamed) == without_name(honest)
    fake_xpu(monkeypatch, B580)
    (honest,) = probe.probe_intel()
    fake_xpu(monkeypatch, B580 | {"name": "NVIDIA H200"})
    (renamed,) = probe.probe_intel()
    assert without_name(renamed) == without_name(honest)


@pytest.mark.parametrize("function", ["is_available", "device_count", "get_device_properties"])
@pytest.mark.parametrize("vendor", ["nvidia", "amd", "intel"])
def test_a_driver_that_fails_is_no_device(monkeypatch: pytest.MonkeyPatch, vendor: str, function: str) -> None:
    if vendor == "intel":
        fake_xpu(monkeypatch, B580)
        monkeypatch.setattr(torch.xpu, function, driver_error)
    else:
        fake_cuda(monkeypatch, H200 | MI300X, hip="6.4.0" if vendor == "amd" else None)
        monkeypatch.setattr(torch.cuda, function, driver_error)
    assert getattr(probe, f"probe_{vendor}")() == ()


X86 = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: {name}
flags\t\t: fpu sse4_2 {flags}

processor\t: 1
model name\t: {name}
flags\t\t: fpu
"""
ARM = """\
processor\t: 0
BogoMIPS\t: 2000.00
Features\t: fp asimd fphp asimdhp sve i8mm bf16
CPU implementer\t: 0x41
"""
AVX512 = "avx avx2 f16c avx512f avx512bw avx512vl avx512dq"


def fake_cpu(monkeypatch: pytest.MonkeyPatch, text: str, machine: str) -> Device:
    monkeypatch.setattr(probe, "_cpuinfo", lambda: text)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    (device,) = probe.probe_cpu()
    return device


@pytest.mark.parametrize(
    ("flags", "arch", "features"),
    [
        ("avx avx2 f16c", "avx2", set()),
        (AVX512, "avx512", set()),
        (AVX512 + " avx512_vnni avx512_bf16", "avx512", {"vnni", "avx512_bf16"}),
        ("avx2 avx512f", "avx2", set()),  # without BW, DQ and VL it is not what we call avx512
        (AVX512 + " amx_tile amx_bf16 amx_int8", "amx", {"vnni", "avx512_bf16", "avx512_fp16"}),
        (AVX512 + " amx_tile", "avx512", set()),  # tiles with nothing that multiplies them
        ("sse4_1", "scalar", set()),
    ],
)
def test_x86(monkeypatch: pytest.MonkeyPatch, flags: str, arch: str, features: set[str]) -> None:
    device = fake_cpu(monkeypatch, X86.format(name="Some Xeon", flags=flags), "x86_64")
    assert (device.name, device.backend, device.arch, device.torch_device) == ("Some Xeon", "cpu", arch, "cpu")
    assert device.features == features
    assert device.matrix_units == ({"amx"} if arch == "amx" else set())
    assert device.supports("float16") == (arch != "scalar")
    assert not float8(device)


def test_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_cpu(monkeypatch, ARM, "aarch64")
    assert (device.vendor, device.arch, device.warp_size) == ("arm", "neon", 1)
    assert device.features == {"sve", "i8mm", "bf16"}
    assert device.supports("float16")
    assert device.name, "there is no model name in an Arm machine's text; the device still has one"


def test_x86_flags_on_an_arm_machine_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fake_cpu(monkeypatch, X86.format(name="odd", flags=AVX512), "arm64").arch == "neon"


@pytest.mark.parametrize(("capability", "arch"), [("AVX512", "avx512"), ("AVX2", "avx2"), ("DEFAULT", "scalar")])
def test_a_system_without_cpuinfo_asks_torch(monkeypatch: pytest.MonkeyPatch, capability: str, arch: str) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert fake_cpu(monkeypatch, "", "x86_64").arch == arch


def test_a_cpu_is_here_although_the_system_files_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*arguments: object, **keywords: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    (device,) = probe.probe_cpu()
    assert device.compute_units >= 1
    assert device.torch_device == "cpu"


def test_this_machine() -> None:
    device = kp.device("cpu")
    assert device in kp.devices()
    assert device.present
    assert device.memory_bytes > 1 << 28
    assert 1 <= device.compute_units <= 4096
    assert kp.device("cpu:0") is device


def test_measured_rates_are_plausible() -> None:
    rates = kp.device("cpu", measure=True).rates
    assert rates is not None
    assert rates.source == "measured"
    assert 1e8 < rates.bandwidth < 5e12
    assert "float32" in rates.matmul
    for rate in rates.matmul.values():
        assert 1e8 < rate < 1e15
    assert kp.device("cpu").rates is None, "measuring must not change what the probe found"


def test_rates_where_the_system_does_not_tell_its_memory() -> None:
    unknown = dataclasses.replace(kp.device("cpu"), memory_bytes=0, formats=frozenset(), matrix_formats=frozenset())
    assert measure_rates(unknown).bandwidth > 1e8


@pytest.mark.parametrize("name", ["nvidia/h200", "cpu/avx512"])
def test_a_catalogue_device_cannot_be_measured(name: str) -> None:
    with pytest.raises(ValueError, match=f"device='{name}' is not here"):
        kp.device(name, measure=True)


def test_unknown_catalogue_name() -> None:
    with pytest.raises(ValueError, match="name='nvidia/h2000': not in the catalogue; did you mean 'nvidia/h200'"):
        kp.device("nvidia/h2000")


@pytest.mark.parametrize("name", ["banana", "h20", ""])
def test_a_name_that_is_neither_torchs_nor_the_catalogues(name: str) -> None:
    with pytest.raises(ValueError, match=f"name='{name}': not in the catalogue.* It has nvidia/a100, "):
        kp.device(name)


@pytest.mark.parametrize("name", ["meta", "hpu", "mps:0", "cuda:97", torch.device("meta")])
def test_a_torch_device_that_is_not_here(name: str | torch.device) -> None:
    with pytest.raises(ValueError, match=f"device='{name}': torch has no such device here; it has .*cpu. For"):
        kp.device(name)


def test_cuda_without_an_index_is_the_device_that_is_current_now(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, A100, H200)
    found = probe.probe_nvidia()
    monkeypatch.setattr(registry, "devices", lambda: found)
    registry._present.cache_clear()
    try:
        for index, arch in enumerate(("sm_80", "sm_90")):
            monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
            assert kp.device("cuda").arch == arch
    finally:
        registry._present.cache_clear()
