"""Find or build the C++ runtime for the installed ExecuTorch.

A platform wheel contains one, which is used if it was built against the installed ExecuTorch. Otherwise the runtime
is built once for each version of this package and of ExecuTorch, and cached for the user. Building needs a C++17
compiler; CMake and Ninja come with the extra ``lowering``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import platformdirs

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "BUNDLED",
    "BuildError",
    "Runtime",
    "build",
    "bundle_refusal",
    "check_tools",
    "configure_and_install",
    "executorch_root",
    "runtime_prefix",
    "sources_digest",
]

SOURCES = Path(__file__).parent / "native"
BUNDLED = Path(__file__).parents[1] / "_runtime"
"""The runtime in a platform wheel, with ``runtime.json``, which names what it was built against."""
_ELSEWHERE = "name another folder in KERNEL_PYTORCH_RUNTIME"
_INSTALL = "pip install 'kernel-pytorch[lowering]'"


class BuildError(RuntimeError):
    """The C++ runtime cannot be built; the message names what is missing."""


@dataclass(frozen=True)
class Runtime:
    """Paths of a built runtime."""

    prefix: Path
    name: str = "kernel_pytorch"
    """Name in the CMake project: the library is ``NAME_backend``, the runner ``NAME_runner``."""

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
    """Return the folder of the installed ExecuTorch wheel."""
    try:
        files = importlib.metadata.distribution("executorch")
    except importlib.metadata.PackageNotFoundError:
        raise BuildError(f"ExecuTorch is not installed: {_INSTALL}") from None
    return Path(str(files.locate_file("executorch")))


def _tokenizers() -> str:
    """Return the folder with the sources of pytorch/tokenizers, which the runner needs for text; empty if none."""
    folder = os.environ.get("KERNEL_PYTORCH_TOKENIZERS", "")
    if folder and not (Path(folder) / "CMakeLists.txt").is_file():
        raise BuildError(
            f"KERNEL_PYTORCH_TOKENIZERS={folder!r} has no CMakeLists.txt: name the unpacked source package of "
            "pytorch-tokenizers (pip download --no-deps --no-binary :all: pytorch-tokenizers)"
        )
    return folder and str(Path(folder).resolve())


def sources_digest(sources: Path = SOURCES) -> str:
    """Return the SHA-256 of the runtime's source files and their names."""
    digest = hashlib.sha256()
    for source in sorted(sources.rglob("*")):
        if source.is_file():
            digest.update(str(source.relative_to(sources)).encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def bundle_refusal() -> str | None:
    """Return why the wheel's runtime is not used, or None; its ABI matches one version of ExecuTorch only."""
    record = BUNDLED / "runtime.json"
    if not record.is_file():
        return "this installation brings no runtime"
    built = json.loads(record.read_text(encoding="utf-8"))
    installed = importlib.metadata.version("executorch")
    if built["executorch"] != installed:
        return (
            f"this installation brings a runtime for ExecuTorch {built['executorch']}, and {installed} is installed: "
            f"pip install executorch=={built['executorch']}"
        )
    if not Runtime(BUNDLED).present or built["sources"] != sources_digest():
        return "the runtime of this installation is incomplete or of other sources: install the package again"
    return None


@cache
def runtime_prefix(sources: Path = SOURCES) -> Path:
    """Return the cache folder of the runtime for these sources, this ExecuTorch and this machine."""
    installed = executorch_root()
    if sources == SOURCES and not _tokenizers() and bundle_refusal() is None:
        return BUNDLED
    digest = hashlib.sha256(sources_digest(sources).encode())
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
    """Return the runtime; build it if it is not cached. Concurrent builds of the same runtime wait for the first.

    Args:
        sources: the folder with the runtime's ``CMakeLists.txt``; by default, this package's.
        name: the project's name, as in ``libNAME_backend``.
        tell: called with a line for each step, because the first build takes about half a minute.
        jobs: number of parallel compiler processes; by default, the number of processors.
    """
    ready = Runtime(runtime_prefix(sources), name)
    if ready.present:
        return ready
    check_tools(sources)
    folder = ready.prefix.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(ready.prefix, tell):
            if not ready.present:  # another process may have built it in the meantime
                _build(ready, sources, tell, jobs)
    except OSError as error:
        raise _no_room(folder, error) from error
    tell(f"the runtime is in {ready.prefix}")
    return ready


def _build(ready: Runtime, sources: Path, tell: Callable[[str], None], jobs: int | None) -> None:
    # Build in a sibling folder and rename it, so that other processes never see an incomplete runtime.
    prefix = f"building-{ready.prefix.name}-"
    with tempfile.TemporaryDirectory(dir=ready.prefix.parent, prefix=prefix) as folder:
        installed = Path(folder) / "installed"
        text = (f"-DKERNEL_PYTORCH_TOKENIZERS={_tokenizers()}",) if _tokenizers() else ()
        configure_and_install(
            Path(folder) / "build", installed, sources=sources, definitions=text, tell=tell, jobs=jobs
        )
        try:
            installed.rename(ready.prefix)
        except OSError:
            if not ready.present:  # without locks, another process may have finished first: use its build
                raise


def configure_and_install(
    made: Path,
    installed: Path,
    *,
    sources: Path = SOURCES,
    executorch: Path | None = None,
    definitions: tuple[str, ...] = (),
    tell: Callable[[str], None] = lambda text: None,
    jobs: int | None = None,
) -> None:
    """Build the CMake project in ``made`` and install it into ``installed``.

    Args:
        executorch: the folder of the ExecuTorch wheel to link; by default, the installed one.
        definitions: further ``-D`` arguments.
    """
    tell("configuring the runtime")
    _run(
        [
            _tool("cmake"),
            *("-S", str(sources), "-B", str(made), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
            f"-DCMAKE_PREFIX_PATH={executorch or executorch_root()}",
            f"-DCMAKE_INSTALL_PREFIX={installed}",
            "-DCMAKE_INSTALL_LIBDIR=lib",
            "-DCMAKE_BUILD_TYPE=Release",
            *definitions,
        ]
    )
    tell("compiling the runtime (about half a minute, once)")
    _run([_tool("cmake"), "--build", str(made), "--parallel", str(jobs or os.cpu_count() or 1)])
    _run([_tool("cmake"), "--install", str(made)])


@contextlib.contextmanager
def _alone(prefix: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a runtime, and remove files left by a killed build; continue without file locks."""
    with prefix.with_name(f"{prefix.name}.lock").open("wb") as file:
        try:
            if fcntl is None:
                raise OSError(errno.ENOTSUP, "no locks")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another process builds the runtime: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # some network file systems have no locks; the rename at the end is atomic anyway
            yield
            return
        for left in prefix.parent.glob(f"building-{prefix.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def check_tools(sources: Path = SOURCES) -> None:
    """Raise an error with what to install if CMake, Ninja or a C++ compiler is missing."""
    brought = bundle_refusal() if sources == SOURCES and BUNDLED.is_dir() else None
    try:
        _tool("cmake"), _tool("ninja")
        if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
            raise BuildError("no C++ compiler was found: install g++ or clang++, or name one in CXX")
    except BuildError as error:
        if brought is None:
            raise
        raise BuildError(f"{brought}, or let the runtime be built here: {error}") from error


def _no_room(folder: Path, error: OSError) -> BuildError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BuildError(f"the disk of {folder} is full: free some space, or {_ELSEWHERE}")
    return BuildError(
        f"the runtime is kept in {folder}, which cannot be written ({error.strerror or error}): {_ELSEWHERE}"
    )


def _tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else _of_package(name) or shutil.which(name)
    if found is None:
        raise BuildError(f"{name} was not found: {_INSTALL}")
    return found


def _of_package(name: str) -> str | None:
    """Return the program of the Python package of this name; the system's CMake can be too old for ExecuTorch."""
    try:
        files = importlib.metadata.files(name) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    programs = (Path(str(file.locate())) for file in files if file.name == name and file.parent.name == "bin")
    return next((str(program) for program in programs if os.access(program, os.X_OK)), None)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        text = (done.stdout + done.stderr).strip()
        if os.strerror(errno.ENOSPC) in text:
            raise OSError(errno.ENOSPC, text[-400:])
        raise BuildError(f"{Path(command[0]).name} failed:\n{text[-4000:]}")
