"""Build the C++ runtime of a platform wheel, and determine the wheel's platform tag.

``hatch_build.py`` runs it during a wheel build: ``python -m kernel_pytorch.lowering.wheel FOLDER`` prints the tag.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kernel_pytorch.lowering.build import (
    SOURCES,
    BuildError,
    Runtime,
    check_tools,
    configure_and_install,
    executorch_root,
    sources_digest,
)

__all__ = ["carried_runtime", "platform_tag"]

_RPATH = "$ORIGIN/../../../executorch/lib"  # from kernel_pytorch/_runtime/lib and bin, in one site-packages folder
_OLDEST = 28  # of glibc 2: ExecuTorch's own wheels need it
# The newest symbols of libstdc++ and of its ABI that a glibc 2.N of manylinux comes with (auditwheel's policies).
_STANDARD_LIBRARY = {28: ((3, 4, 24), (1, 3, 11)), 31: ((3, 4, 28), (1, 3, 12)), 34: ((3, 4, 29), (1, 3, 13))}
_STANDARD_LIBRARY |= {35: ((3, 4, 30), (1, 3, 13)), 39: ((3, 4, 33), (1, 3, 15))}


def platform_tag(versions: str, machine: str) -> str:
    """Return the oldest manylinux tag that has all symbol versions listed by ``readelf --version-info``.

    Example:
        >>> platform_tag("Name: GLIBC_2.14 Name: GLIBCXX_3.4.21 Name: CXXABI_1.3", "x86_64")
        'manylinux_2_28_x86_64'
        >>> platform_tag("Name: GLIBC_2.34 Name: GLIBCXX_3.4.30", "aarch64")
        'manylinux_2_35_aarch64'
        >>> platform_tag("Name: GLIBCXX_3.4.99", "x86_64")
        'linux_x86_64'
    """

    def newest(name: str) -> tuple[int, ...]:
        found = re.findall(rf"\b{name}_(\d+(?:\.\d+)*)", versions)
        return max((tuple(map(int, text.split("."))) for text in found), default=(0,))

    glibc = max(_OLDEST, newest("GLIBC")[1] if len(newest("GLIBC")) > 1 else 0)
    for offered, (library, abi) in _STANDARD_LIBRARY.items():
        if newest("GLIBCXX") <= library and newest("CXXABI") <= abi:
            return f"manylinux_2_{max(glibc, offered)}_{machine}"
    return f"linux_{machine}"


def carried_runtime(folder: Path, *, machine: str | None = None, executorch: Path | None = None) -> str:
    """Build the runtime into a folder, with the record that is checked on loading, and return the platform tag.

    Args:
        folder: the destination, which becomes ``kernel_pytorch/_runtime`` in the wheel.
        machine: ``"x86_64"`` or ``"aarch64"``; by default, this machine's. Another one needs a cross compiler.
        executorch: an ExecuTorch wheel for that machine; by default, the installed one.
    """
    if sys.platform != "linux":
        raise BuildError(f"platform wheels are made on Linux; this is {sys.platform}")
    machine = machine or platform.machine()
    check_tools()
    definitions: tuple[str, ...] = (f"-DKERNEL_PYTORCH_RPATH={_RPATH}",)
    if machine != platform.machine():
        toolchain = SOURCES / "cmake" / f"{machine}-linux-gnu.cmake"
        if not toolchain.is_file():
            known = sorted(
                file.name.removesuffix("-linux-gnu.cmake") for file in toolchain.parent.glob("*-linux-gnu.cmake")
            )
            raise BuildError(
                f"machine={machine!r}: use {platform.machine()} or, cross-compiled, {', '.join(known)}"
            )
        if executorch is None:
            raise BuildError(
                f"machine={machine!r}: name ExecuTorch's wheel for it in KERNEL_PYTORCH_EXECUTORCH; make cross "
                "downloads the one for aarch64"
            )
        definitions += (f"-DCMAKE_TOOLCHAIN_FILE={toolchain}",)
    with tempfile.TemporaryDirectory() as scratch:
        root = executorch_root()
        if executorch is not None:
            root = _unpacked(executorch, Path(scratch) / "wheel", machine)
        made = Path(scratch) / "build"
        configure_and_install(made, folder.absolute(), executorch=root, definitions=definitions)
        (record,) = root.parent.glob("executorch-*.dist-info")
    built = {
        "executorch": re.fullmatch(r"executorch-(.+)\.dist-info", record.name)[1],  # type: ignore[index]
        "sources": sources_digest(),
        "machine": machine,
    }
    (folder / "runtime.json").write_text(json.dumps(built, indent=2) + "\n", encoding="utf-8")
    runtime = Runtime(folder)
    asked = ["readelf", "--version-info", "--wide", str(runtime.library), str(runtime.runner)]
    return platform_tag(subprocess.run(asked, capture_output=True, text=True, check=True).stdout, machine)


def _unpacked(wheel: Path, folder: Path, machine: str) -> Path:
    """Unpack a wheel of ExecuTorch for this machine, and return its package's folder."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    except (OSError, zipfile.BadZipFile) as error:
        raise BuildError(f"executorch={str(wheel)!r} is no wheel that can be read: {error}") from error
    tags = [file.read_text(encoding="utf-8") for file in folder.glob("executorch-*.dist-info/WHEEL")]
    if not tags or not re.search(rf"^Tag: .*_{re.escape(machine)}$", tags[0], re.MULTILINE):
        raise BuildError(f"executorch={str(wheel)!r} is no wheel of ExecuTorch for {machine}")
    return folder / "executorch"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine")
    parser.add_argument("--executorch", type=Path, help="a wheel for that machine")
    given = parser.parse_args()
    try:
        print(carried_runtime(given.folder, machine=given.machine, executorch=given.executorch))
    except (BuildError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
