"""Building the C++ runtime: read-only folders, full disks, no compiler, several processes at once, and in a wheel."""

import errno
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch.lowering import build as building
from kernel_pytorch.lowering import wheel as wheel_module
from kernel_pytorch.lowering.build import BuildError, Runtime, runtime_prefix
from kernel_pytorch.lowering.wheel import carried_runtime


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder without a runtime in it; what was found elsewhere is forgotten."""
    monkeypatch.setenv("KERNEL_PYTORCH_RUNTIME", str(tmp_path / "runtime"))
    runtime_prefix.cache_clear()
    yield tmp_path / "runtime"
    runtime_prefix.cache_clear()


def fake_tool(folder: Path, text: str) -> Path:
    """A program that stands for cmake and ninja."""
    tool = folder / "tool"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)
    return tool


# What a build leaves behind, where --install names the prefix; a second one waits so that both are seen at once.
INSTALLS = """
for argument in "$@"; do
  case "$argument" in -DCMAKE_INSTALL_PREFIX=*) echo "${argument#*=}" > "$0.prefix.$PPID";; esac
  if [ "$argument" = --install ]; then
    prefix=$(cat "$0.prefix.$PPID"); sleep 0.3; mkdir -p "$prefix/lib" "$prefix/bin"
    touch "$prefix/lib/libkernel_pytorch_backend.so" "$prefix/bin/kernel_pytorch_runner"
    echo built >> "$0.built"
  fi
done
"""


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    made = Path.mkdir

    def mkdir(self: Path, *arguments: object, **keywords: object) -> None:
        if self == empty_cache:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        made(self, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(BuildError, match=r"which cannot be written \(Read-only file system\): name another folder"):
        building.build()
    empty_cache.write_text("a file where the folder should be")
    monkeypatch.setattr(Path, "mkdir", made)
    with pytest.raises(BuildError, match=f"kept in {empty_cache}, which cannot be written"):
        building.build()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    tool = fake_tool(tmp_path, "cat /dev/zero > /dev/full")
    monkeypatch.setattr(building, "_tool", lambda _: str(tool))
    with pytest.raises(BuildError, match=f"the disk of {empty_cache} is full: free some space, or name another"):
        building.build()
    assert [path.suffix for path in empty_cache.iterdir()] == [".lock"]


def test_a_runtime_that_was_not_built_whole_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    tool = fake_tool(tmp_path, "echo no such header >&2; exit 1")
    monkeypatch.setattr(building, "_tool", lambda _: str(tool))
    killed = empty_cache / f"building-{runtime_prefix().name}-killed"
    killed.mkdir(parents=True)
    with pytest.raises(BuildError, match="no such header"):
        building.build()
    assert not runtime_prefix().exists()
    assert not killed.exists(), "what a killed builder left is removed"


def test_without_a_compiler_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    monkeypatch.setattr(building, "_tool", lambda name: name)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler was found: install g\+\+ or clang\+\+"):
        building.build()
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "runtime.json").write_text(json.dumps({"executorch": "0.1", "sources": "", "machine": "x86_64"}))
    monkeypatch.setattr(building, "BUNDLED", bundle)
    with pytest.raises(
        BuildError, match=r"brings a runtime for ExecuTorch 0\.1, and .* pip install executorch==0\.1, or"
    ):
        building.build()


@pytest.mark.parametrize(
    ("machine", "wheel", "message"),
    [
        ("riscv64", None, "machine='riscv64': use .* or, cross-compiled, aarch64"),
        ("aarch64", None, "machine='aarch64': name ExecuTorch's wheel for it in KERNEL_PYTORCH_EXECUTORCH"),
        ("aarch64", "missing.whl", r"missing\.whl' is no wheel that can be read"),
        ("aarch64", "text.whl", r"text\.whl' is no wheel that can be read"),
        ("aarch64", "other.whl", r"other\.whl' is no wheel of ExecuTorch for aarch64"),
    ],
)
def test_wheels_for_machines_that_cannot_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, wheel: str | None, message: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(building, "_tool", lambda name: name)
    (tmp_path / "text.whl").write_text("no archive")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("executorch-1.5.1.dist-info/WHEEL", "Tag: cp311-cp311-manylinux_2_28_x86_64\n")
    with pytest.raises(BuildError, match=message):
        carried_runtime(tmp_path / "out", machine=machine, executorch=tmp_path / wheel if wheel else None)


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
def test_the_runtime_of_another_machines_wheel_names_its_executorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is replaced; the wheel of ExecuTorch is another version than the installed one."""
    given: list[Path] = []

    def install(made: Path, installed: Path, *, executorch: Path, definitions: tuple[str, ...]) -> None:
        given.append(executorch)
        assert (executorch / "lib.txt").read_text() == "theirs"
        assert any(text.endswith("aarch64-linux-gnu.cmake") for text in definitions)
        for place in (Runtime(installed).library, Runtime(installed).runner):
            place.parent.mkdir(parents=True)
            shutil.copy(sys.executable, place)

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(building, "_tool", lambda name: name)
    monkeypatch.setattr(wheel_module, "configure_and_install", install)
    with zipfile.ZipFile(tmp_path / "executorch.whl", "w") as archive:
        archive.writestr("executorch-9.8.7.dist-info/WHEEL", "Tag: cp311-cp311-manylinux_2_28_aarch64\n")
        archive.writestr("executorch/lib.txt", "theirs")
    tag = carried_runtime(tmp_path / "out", machine="aarch64", executorch=tmp_path / "executorch.whl")
    assert tag.endswith("_aarch64")
    record = json.loads((tmp_path / "out" / "runtime.json").read_text())
    assert (record["executorch"], record["machine"]) == ("9.8.7", "aarch64")


def test_the_tools_of_installed_packages_come_before_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's CMake can be older than ExecuTorch needs."""
    system = tmp_path / "cmake"
    system.write_text("#!/bin/sh\n")
    system.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    assert building._tool("cmake") != str(system)
    monkeypatch.setattr(importlib.metadata, "files", lambda _name: None)
    assert building._tool("cmake") == str(system)


BUILD = """
import sys
from kernel_pytorch.lowering import build as building
from kernel_pytorch.lowering import wheel as wheel_module
building._tool = lambda name: sys.argv[1]
said = []
print(building.build(tell=said.append).prefix)
print("waited" if any("waiting" in line for line in said) else "did not wait")
"""


def test_two_processes_build_it_once(tmp_path: Path, empty_cache: Path) -> None:
    tool = fake_tool(tmp_path, INSTALLS)
    command = [sys.executable, "-c", BUILD, str(tool)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0].split("\n") for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert {lines[0] for lines in said} == {str(runtime_prefix())}
    assert Runtime(runtime_prefix()).present
    assert (tmp_path / "tool.built").read_text() == "built\n"
    assert not list(empty_cache.glob("building-*"))


def test_the_runtime_of_the_wheel_is_used_where_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tmp_path / "bundle"
    for name in ("lib/libkernel_pytorch_backend.so", "bin/kernel_pytorch_runner"):
        (bundle / name).parent.mkdir(parents=True)
        (bundle / name).touch()
    built = {"executorch": importlib.metadata.version("executorch"), "sources": building.sources_digest()}
    monkeypatch.setattr(building, "BUNDLED", bundle)
    try:
        for record, wanted in (
            (built, True),
            ({**built, "executorch": "1.0"}, False),
            ({**built, "sources": "others"}, False),
        ):
            (bundle / "runtime.json").write_text(json.dumps(record))
            runtime_prefix.cache_clear()
            assert (runtime_prefix() == bundle) is wanted
            assert (building.bundle_refusal() is None) is wanted
    finally:
        runtime_prefix.cache_clear()


LOADS = """
import sys, torch, kernel_pytorch as kp
from kernel_pytorch.lowering import build
print(kp.load(sys.argv[1])(torch.ones(2, 4)).tolist() == torch.full((2, 4), 0.25).tolist())
print(build.runtime_prefix() == build.BUNDLED)
"""


def test_a_wheel_carries_the_runtime(tmp_path: Path) -> None:
    """Build the wheel, install it in a folder of its own, and load a program with no compiler on the path."""
    root = Path(building.__file__).parents[3]
    if not (root / "hatch_build.py").exists() or not shutil.which("g++") or sys.platform != "linux":
        pytest.skip("needs a checkout, Linux and g++")
    wheels = tmp_path / "wheels"
    pip = [sys.executable, "-m", "pip", "--quiet"]
    variables = {**os.environ, "KERNEL_PYTORCH_WHEEL": "platform"}
    made = subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(root)],
        env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "No matching distribution found for hatchling" in made.stderr:
        pytest.skip("needs hatchling from a package index")
    assert made.returncode == 0, made.stderr[-3000:]
    (wheel,) = wheels.iterdir()
    assert re.fullmatch(r"kernel_pytorch-.+-py3-none-(manylinux_2_\d+|linux)_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        for name in ("lib/libkernel_pytorch_backend.so", "bin/kernel_pytorch_runner"):
            binary = archive.read(f"kernel_pytorch/_runtime/{name}")
            assert str(building.executorch_root()).encode() not in binary, (
                f"{name} has a path of this machine in it"
            )
            assert b"$ORIGIN/../../../executorch/lib" in binary

    site = tmp_path / "site"
    install = [*pip, "install", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, capture_output=True, check=True)
    program = tmp_path / "softmax.pte"
    kp.lower(torch.nn.Softmax(-1).eval(), (torch.ones(2, 4),)).save(program)
    variables = {**os.environ, "PYTHONPATH": str(site), "PATH": str(tmp_path)}
    variables["KERNEL_PYTORCH_RUNTIME"] = str(tmp_path / "nothing")
    command = [sys.executable, "-c", LOADS, str(program)]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "True\nTrue\n", done.stderr
    assert not (tmp_path / "nothing").exists()

    record = site / "kernel_pytorch" / "_runtime" / "runtime.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "executorch": "1.0.0"}))
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "brings a runtime for ExecuTorch 1.0.0, and" in done.stderr
    assert "pip install executorch==1.0.0, or let the runtime be built here: no C++ compiler" in done.stderr
