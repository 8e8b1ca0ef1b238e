"""The plug-in contract: a vendor's package, and broken ones, installed in environments of their own."""

from __future__ import annotations

import base64
import hashlib
import json
import textwrap
import zipfile
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import kernel_pytorch
from environments import Environment, make_environment
from kernel_pytorch.hardware_abstraction import ENTRY_POINT_GROUP, registry
from kernel_pytorch.hardware_abstraction.op import registered_op

ACME_ENTRY = "acme_kernels:BACKEND"
PYPROJECT = f"""
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "acme-kernels"
version = "1.0"
dependencies = ["kernel-pytorch"]

[project.entry-points."kernel_pytorch.backends"]
acme = "{ACME_ENTRY}"
"""

ACME_BACKEND = '''
"""Acme's accelerators for KernelPyTorch."""

from kernel_pytorch import Backend, Device
from kernel_pytorch.hardware_abstraction import Kernel


def a1(name, torch_device=None):
    return Device(
        name=name,
        backend="acme",
        vendor="acme",
        arch="a1",
        memory_bytes=1 << 30,
        compute_units=4,
        warp_size=1,
        shared_memory_bytes=0,
        formats=frozenset({"float64", "float32", "float16", "bfloat16"}),
        torch_device=torch_device,
    )


def probe():
    import acme_kernels.device  # makes torch know "acme"

    return (a1("Acme A1", "acme:0"),)


def supports(call, device):
    return None if device.supports(call["x"].format) else f"{device.arch} does not compute in {call['x'].format}"


BACKEND = Backend(
    name="acme",
    title="Acme accelerators",
    probe=probe,
    catalogue=(a1("acme/a1"),),
    kernels=(
        Kernel(
            op="rms_norm", name="acme", module="acme_kernels.rms_norm", supports=supports, language="native"
        ),
    ),
)
'''

# A device type of torch's own kind, without C++: its tensors are real ones, in host memory, that DLPack labels as
# lying on an extension device. What a vendor writes in C++ (allocator, fallback, generator) is here in Python.
ACME_DEVICE = '''
"""The torch device "acme": every operation without a kernel of its own runs on the host."""

import ctypes

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from torch.utils.dlpack import from_dlpack, to_dlpack

_HOST, _EXTENSION = 1, 12  # kDLCPU and kDLExtDev
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class Module(_DummyBackendModule):
    def get_rng_state(self, device="acme"):
        return torch.get_rng_state()

    def set_rng_state(self, state, device="acme"):
        torch.set_rng_state(state)


class Generator(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu" if torch.device(device).type == "acme" else device)


def _labelled(tensor, kind):
    capsule = to_dlpack(tensor.detach())
    ctypes.c_int32.from_address(_pointer(capsule, b"dltensor") + 8).value = kind  # after the data pointer
    return from_dlpack(capsule)


def on_host(tensor):
    """The same memory as a CPU tensor."""
    return _labelled(tensor, _HOST)


def on_acme(tensor):
    """A CPU tensor's memory as an Acme tensor."""
    return _labelled(tensor, _EXTENSION)


def is_acme(value):
    return isinstance(value, torch.Tensor) and value.device.type == "acme"


def fallback(operation, *arguments, **keywords):
    if operation._schema.name == "aten::_copy_from":
        source, target = arguments[:2]
        host = on_host(target) if is_acme(target) else target
        host.copy_(on_host(source) if is_acme(source) else source)
        return target
    pairs = []  # Acme tensors and the host tensors that stand for them

    def lower(value):
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not is_acme(value):
            return value
        # An empty out= tensor is there to be resized, which borrowed memory cannot be.
        grows = value.shape == (0,) and any(value is leaf for leaf in tree_leaves(keywords))
        pairs.append((value, torch.empty(0, dtype=value.dtype) if grows else on_host(value), grows))
        return pairs[-1][1]

    def lift(value):
        if not isinstance(value, torch.Tensor):
            return value
        for acme, host, _ in pairs:
            if host is value:
                return acme
        return on_acme(value)

    arguments, keywords_host = tree_map(lower, (arguments, keywords))
    result = operation(*arguments, **keywords_host)
    for acme, host, grows in pairs:
        if grows:
            acme.data = on_acme(host)
    return tree_map(lift, result)


torch.Generator = Generator
_setup_privateuseone_for_python_backend("acme", backend_module=Module())
LIBRARY = torch.library.Library("_", "IMPL")
LIBRARY.fallback(fallback, "PrivateUse1")
'''

ACME_RMS_NORM = '''
"""RMSNorm on the A1."""

import torch

from acme_kernels.device import on_acme, on_host

calls = []


def forward(device, x, weight, eps):
    calls.append(("forward", device.name))
    x_wide = _wide(x)
    rstd = (x_wide.square().mean(-1) + eps).rsqrt()
    y = x_wide * rstd.unsqueeze(-1)
    y = y if weight is None else y * _wide(weight)
    return on_acme(y.to(x.dtype).contiguous()), on_acme(rstd)


def backward(device, dy, x, weight, rstd):
    calls.append(("backward", device.name))
    dy, rstd = _wide(dy), on_host(rstd).unsqueeze(-1)
    x_hat = _wide(x) * rstd
    dweight = torch.empty(0, dtype=x.dtype)
    if weight is not None:
        dweight = (dy * x_hat).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        dy = dy * _wide(weight)
    dx = (dy - x_hat * (dy * x_hat).mean(-1, keepdim=True)) * rstd
    return on_acme(dx.to(x.dtype).contiguous()), on_acme(dweight)


def _wide(tensor):
    return on_host(tensor).to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
'''

ACME_TESTS = '''
"""Acme's own tests: the contract, and nothing else."""

from kernel_pytorch.testing import BackendContract


class TestAcme(BackendContract):
    backend_name = "acme"
'''

BROKEN_PACKAGE = {
    "raises_at_import.py": 'raise RuntimeError("the vendor library [/opt/acme.so] is missing")',
    "not_a_backend.py": "BACKEND = {'name': 'not_a_backend'}",
    "records.py": """
        from dataclasses import replace

        from kernel_pytorch.backends.cpu import BACKEND as OURS


        def record(name, probe):
            return replace(OURS, name=name, probe=probe, catalogue=(), evidence=None)


        def fails():
            raise OSError("the driver does not answer")


        def claims(name, torch_device):
            return lambda: tuple(replace(known, backend=name, torch_device=torch_device) for known in OURS.probe())


        CLASH = record("cpu", lambda: ())
        PROBE_RAISES = record("probe_raises", fails)
        OTHER_NAME = record("called_something_else", lambda: ())
        CLAIMS_CPU = record("claims_cpu", claims("claims_cpu", "cpu"))
        CLAIMS_CPU_0 = record("claims_cpu_0", claims("claims_cpu_0", "cpu:0"))
        WRONG_BACKEND = record("wrong_backend", claims("cpu", "acme:0"))
    """,
}
BROKEN_ENTRIES = {
    "raises_at_import": "broken_kernels.raises_at_import:BACKEND",
    "no_such_module": "broken_kernels.no_such_module:BACKEND",
    "not_a_backend": "broken_kernels.not_a_backend:BACKEND",
    "cpu": "broken_kernels.records:CLASH",
    "probe_raises": "broken_kernels.records:PROBE_RAISES",
    "other_name": "broken_kernels.records:OTHER_NAME",
    "claims_cpu": "broken_kernels.records:CLAIMS_CPU",
    "claims_cpu_0": "broken_kernels.records:CLAIMS_CPU_0",
    "wrong_backend": "broken_kernels.records:WRONG_BACKEND",
}
BROKEN_ERRORS = {
    "raises_at_import": "RuntimeError: the vendor library [/opt/acme.so] is missing",
    "no_such_module": "ModuleNotFoundError: No module named 'broken_kernels.no_such_module'",
    "not_a_backend": "TypeError: broken_kernels.not_a_backend:BACKEND is a dict; the entry point must name",
    "cpu": "ValueError: a backend called 'cpu' is already there; choose another name",
    "probe_raises": "OSError: the driver does not answer",
    "other_name": "ValueError: entry point 'other_name' names a backend that calls itself 'called_something_else'",
    "claims_cpu": "as torch device 'cpu', which is the cpu backend's already; register a torch device of your own",
    "claims_cpu_0": "as torch device 'cpu:0', which is the cpu backend's already",
    "wrong_backend": "of backend 'cpu'",
}


def write_tree(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())


def build_wheel(folder: Path, package: Path, entries: dict[str, str]) -> Path:
    """A wheel as any build backend would make it; by hand, for none is sure to be installed or to be reachable."""
    name = package.name
    info = f"{name}-1.0.dist-info"
    content = {str(path.relative_to(package.parent)): path.read_text() for path in sorted(package.rglob("*.py"))}
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n"
    content[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    lines = "".join(f"{entry} = {value}\n" for entry, value in entries.items())
    content[f"{info}/entry_points.txt"] = f"[{ENTRY_POINT_GROUP}]\n{lines}"
    record = ""
    for path, text in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text.encode())}\n"
    content[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return wheel


def installed(folder: Path, project: Path, wheel: Path) -> Environment:
    environment = make_environment(folder, project)
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    environment.run(*install, str(wheel))
    return environment


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the vendor's package, which nothing of ours knows of."""
    folder = tmp_path_factory.mktemp("acme")
    project = folder / "acme-kernels"
    files = {
        "pyproject.toml": PYPROJECT,
        "src/acme_kernels/__init__.py": ACME_BACKEND,
        "src/acme_kernels/device.py": ACME_DEVICE,
        "src/acme_kernels/rms_norm.py": ACME_RMS_NORM,
        "tests/test_acme.py": ACME_TESTS,
    }
    write_tree(project, files)
    wheel = build_wheel(folder, project / "src" / "acme_kernels", {"acme": ACME_ENTRY})
    return installed(folder, project, wheel)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with one plug-in for each way to be broken."""
    folder = tmp_path_factory.mktemp("broken")
    package = folder / "broken_kernels"
    write_tree(package, {"__init__.py": "", **BROKEN_PACKAGE})
    return installed(folder, folder, build_wheel(folder, package, BROKEN_ENTRIES))


@pytest.fixture(scope="module")
def broken_report(broken: Environment) -> dict[str, object]:
    report: dict[str, object] = json.loads(broken.run("-m", "kernel_pytorch.cli", "doctor", "--json"))
    return report


def test_the_vendors_device_is_found_and_comes_before_the_cpu(acme: Environment) -> None:
    found = acme.json(
        """
        import kernel_pytorch as kp
        from kernel_pytorch.hardware_abstraction import broken_backends
        result = [[known.name, known.backend] for known in kp.devices()]
        assert not broken_backends(), broken_backends()
        assert kp.device().name == kp.device("acme").name == kp.device("acme:0").name == "Acme A1"
        assert kp.device("acme/a1").arch == "a1" and not kp.device("acme/a1").present
        assert kp.device("cpu").backend == "cpu"
        """
    )
    assert isinstance(found, list)
    assert [backend for _, backend in found][-2:] == ["acme", "cpu"]


def test_selection_takes_the_vendors_kernel(acme: Environment) -> None:
    chosen = acme.json(
        """
        import torch, kernel_pytorch as kp
        x = torch.ones(2, 64)
        names = [kp.explain(kp.rms_norm, x, device=name).kernel.name for name in ("acme/a1", None)]
        try:
            kp.explain(kp.rms_norm, x, device="acme/a1", kernel="triton")
        except ValueError as error:
            names.append(str(error))
        result = names
        """
    )
    refusal = "kernel='triton': rms_norm has no such kernel on acme; it has acme"
    assert chosen == ["acme", "torch", refusal]


def test_a_call_on_the_vendors_device_runs_the_vendors_kernel(acme: Environment) -> None:
    result = acme.json(
        """
        import torch, kernel_pytorch as kp
        kp.devices()
        from acme_kernels import rms_norm
        host = torch.randn(8, 64, requires_grad=True)
        x = host.detach().to("acme").requires_grad_()
        y = kp.rms_norm(x)
        y.square().sum().backward()
        calls = list(rms_norm.calls)
        expected = kp.rms_norm(host)
        expected.square().sum().backward()
        assert rms_norm.calls == calls, "a CPU tensor reached the vendor's kernel"
        near = torch.allclose(y.cpu(), expected) and torch.allclose(x.grad.cpu(), host.grad, atol=1e-4)
        result = [str(y.device), calls, near]
        """
    )
    assert result == ["acme:0", [["forward", "Acme A1"], ["backward", "Acme A1"]], True]


def test_doctor_shows_the_vendor(acme: Environment) -> None:
    report = json.loads(acme.run("-m", "kernel_pytorch.cli", "doctor", "--json"))
    (device,) = [known for known in report["devices"] if known["backend"] == "acme"]
    assert (device["name"], device["torch_device"]) == ("Acme A1", "acme:0")
    chosen = {call: kernel for call, kernel in device["kernels"].items() if call.startswith("rms_norm ")}
    assert chosen
    assert set(chosen.values()) == {"acme"}
    assert report["broken_backends"] == []
    assert [row["status"] for row in report["support"] if row["backend"] == "acme"] == ["no record"]
    text = acme.run("-m", "kernel_pytorch.cli", "doctor")
    assert "acme:0: Acme A1" in text


def test_the_vendor_passes_the_contract(acme: Environment) -> None:
    report = acme.project / "report.xml"
    acme.run("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "tests/test_acme.py")
    counts = suite_counts(report)
    assert counts["failures"] == counts["errors"] == counts["skipped"] == 0
    small = [case for case in registered_op("rms_norm").cases if not case.benchmark]
    assert counts["tests"] > sum(len(case.formats) for case in small)


def test_the_contract_fails_a_wrong_vendor_kernel(acme: Environment, tmp_path: Path) -> None:
    """The passing run above would mean nothing if a wrong kernel passed as well."""
    wrong = """
        import acme_kernels.device
        from acme_kernels import rms_norm

        right = rms_norm.backward
        rms_norm.backward = lambda *arguments: tuple(gradient * 1.01 for gradient in right(*arguments))
    """
    write_tree(tmp_path, {"conftest.py": wrong, "test_acme.py": ACME_TESTS})
    report = tmp_path / "report.xml"
    only = "meets_its_budget and odd-hidden"
    output = acme.run("-m", "pytest", "-q", "-k", only, f"--junitxml={report}", str(tmp_path), expected=1)
    counts = suite_counts(report)
    assert counts["failures"] == counts["tests"] == 3
    assert "EXCEEDS its budget" in output


def suite_counts(report: Path) -> dict[str, int]:
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    return {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}


def test_the_support_table_has_the_vendor(acme: Environment) -> None:
    rows = acme.json(
        """
        from kernel_pytorch.documentation import support_table

        result = [(row.op, row.kernel, row.status.value) for row in support_table() if row.backend == "acme"]
        """
    )
    assert rows == [["rms_norm", "acme", "no record"]]


def test_broken_plug_ins_break_nothing_else(broken: Environment) -> None:
    seen = broken.json(
        """
        import torch, kernel_pytorch as kp
        from kernel_pytorch.hardware_abstraction import backends
        y = kp.rms_norm(torch.ones(2, 8))
        result = {
            "devices": sorted({known.backend for known in kp.devices()}),
            "of_cpu_tensors": kp.explain(kp.rms_norm, y).device.backend,
            "broken": sorted(set(BROKEN) & {record.name for record in backends()}),
        }
        """.replace("BROKEN", repr(["raises_at_import", "no_such_module", "not_a_backend", "other_name"]))
    )
    assert isinstance(seen, dict)
    assert set(seen["devices"]) <= {"nvidia", "amd", "intel", "cpu"}
    assert seen["of_cpu_tensors"] == "cpu"
    assert seen["broken"] == []


@pytest.mark.parametrize("name", BROKEN_ENTRIES)
def test_doctor_reports_each_broken_plug_in_with_its_traceback(
    broken_report: dict[str, list[dict[str, str]]], name: str
) -> None:
    (found,) = [row for row in broken_report["broken_backends"] if row["name"] == name]
    assert BROKEN_ERRORS[name] in found["error"]
    assert found["traceback"].startswith("Traceback (most recent call last)")
    assert BROKEN_ERRORS[name] in found["traceback"]
    assert found["origin"] in (BROKEN_ENTRIES[name], f"{name}.probe")


def test_doctor_text_shows_every_broken_plug_in(broken: Environment) -> None:
    text = broken.run("-m", "kernel_pytorch.cli", "doctor")
    for name, error in BROKEN_ERRORS.items():
        assert f"Broken backend {name} (" in text
        assert error in text
    assert text.count("Traceback (most recent call last)") >= len(BROKEN_ERRORS)


def test_a_third_party_cannot_take_a_built_in_torch_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: the built-in backend keeps its device although the third party would come first."""
    ours = registry.backend("cpu")
    theirs = tuple(replace(known, backend="grabber", torch_device="cpu:0") for known in ours.probe())
    record = replace(ours, name="grabber", probe=lambda: theirs, catalogue=())
    monkeypatch.setitem(registry._load().backends, "grabber", record)
    monkeypatch.setattr(registry._load(), "broken", [])
    registry.devices.cache_clear()
    try:
        assert "grabber" not in {known.backend for known in registry.devices()}
        (found,) = registry.broken_backends()
        assert found.name == "grabber"
        assert "which is the cpu backend's already" in found.error
    finally:
        registry.devices.cache_clear()
        registry._present.cache_clear()  # the devices are other objects from now on


def test_the_tree_has_no_trace_of_the_vendor() -> None:
    package = Path(kernel_pytorch.__file__).parent
    naming = [path.name for path in package.rglob("*.py") if "acme_kernels" in path.read_text()]
    assert naming == []
