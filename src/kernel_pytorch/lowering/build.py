"""Builds the C++ runtime against the installed ExecuTorch: once for each version of both, kept in the user's cache.

Needs a C++17 compiler; CMake and Ninja come with the extra ``lowering``.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import platformdirs

__all__ = ["BuildError", "Runtime", "build", "executorch_root", "runtime_prefix"]

SOURCES = Path(__file__).parent / "native"
_INSTALL = "pip install 'kernel-pytorch[lowering]'"


class BuildError(RuntimeError):
    """The runtime could not be built; the message says what is missing."""


@dataclass(frozen=True)
class Runtime:
    """Where a built runtime is."""

    prefix: Path
    name: str = "kernel_pytorch"
    """What its CMake project calls it: the library is ``NAME_backend``, the runner ``NAME_runner``."""

    @property
    def library(self) -> Path:
        ending = "dylib" if sys.platform == "darwin" else "so"
        return self.prefix / "lib" / f"lib{self.name}_backend.{ending}"

    @property
    def runner(self) -> Path:
        return self.prefix / "bin" / f"{self.name}_runner"

    @property
    def present(self) -> bool:
        return self.library.exists() and self.runner.exists()


def executorch_root() -> Path:
    """The folder of the installed ExecuTorch wheel."""
    try:
        files = importlib.metadata.distribution("executorch")
    except importlib.metadata.PackageNotFoundError:
        raise BuildError(f"ExecuTorch is not installed: {_INSTALL}") from None
    return Path(str(files.locate_file("executorch")))


def _tokenizers() -> str:
    """The folder with the sources of pytorch/tokenizers, with which the runner takes and gives text; often none."""
    folder = os.environ.get("KERNEL_PYTORCH_TOKENIZERS", "")
    if folder and not (Path(folder) / "CMakeLists.txt").is_file():
        raise BuildError(
            f"KERNEL_PYTORCH_TOKENIZERS={folder!r} has no CMakeLists.txt: name the unpacked source package of "
            "pytorch-tokenizers (pip download --no-deps --no-binary :all: pytorch-tokenizers)"
        )
    return folder and str(Path(folder).resolve())


@cache
def runtime_prefix(sources: Path = SOURCES) -> Path:
    """The folder for the runtime that belongs to these sources, this ExecuTorch and this machine."""
    installed = executorch_root()
    digest = hashlib.sha256()
    for source in sorted(sources.rglob("*")):
        if source.is_file():
            digest.update(str(source.relative_to(sources)).encode() + b"\0" + source.read_bytes())
    digest.update(importlib.metadata.version("executorch").encode())
    digest.update(str(installed).encode() + sysconfig.get_platform().encode())
    digest.update(_tokenizers().encode())
    root = os.environ.get("KERNEL_PYTORCH_RUNTIME") or platformdirs.user_cache_path("kernel_pytorch") / "runtime"
    return Path(root) / digest.hexdigest()[:16]


def build(
    *,
    sources: Path = SOURCES,
    name: str = "kernel_pytorch",
    tell: Callable[[str], None] = lambda text: None,
    jobs: int | None = None,
) -> Runtime:
    """The runtime, built now if it is not there yet.

    Args:
        sources: the folder with the runtime's ``CMakeLists.txt``; ours when left out.
        name: what that project calls itself, as in ``libNAME_backend``.
        tell: gets a line for each step, because the first build takes about half a minute.
        jobs: compilers at once; as many as there are processors when left out.
    """
    ready = Runtime(runtime_prefix(sources), name)
    if ready.present:
        return ready
    cmake, ninja = _tool("cmake"), _tool("ninja")
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        raise BuildError("no C++ compiler was found: install g++ or clang++, or name one in CXX")
    ready.prefix.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its place and moved there whole: another process sees all of it or nothing.
    with tempfile.TemporaryDirectory(dir=ready.prefix.parent, prefix="building-") as folder:
        made, installed = Path(folder) / "build", Path(folder) / "installed"
        tell("configuring the runtime")
        _run(
            [
                cmake,
                *("-S", str(sources), "-B", str(made), "-G", "Ninja"),
                f"-DCMAKE_MAKE_PROGRAM={ninja}",
                f"-DCMAKE_PREFIX_PATH={executorch_root()}",
                f"-DCMAKE_INSTALL_PREFIX={installed}",
                "-DCMAKE_INSTALL_LIBDIR=lib",
                "-DCMAKE_BUILD_TYPE=Release",
                f"-DKERNEL_PYTORCH_TOKENIZERS={_tokenizers()}",
            ]
        )
        tell("compiling the runtime (about half a minute, once)")
        _run([cmake, "--build", str(made), "--parallel", str(jobs or os.cpu_count() or 1)])
        _run([cmake, "--install", str(made)])
        try:
            installed.rename(ready.prefix)
        except OSError:
            if not ready.present:  # another process may have been first, and then its build is as good
                raise
    tell(f"the runtime is in {ready.prefix}")
    return ready


def _tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise BuildError(f"{name} was not found: {_INSTALL}")
    return found


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        text = (done.stdout + done.stderr).strip()
        raise BuildError(f"{Path(command[0]).name} failed:\n{text[-4000:]}")
