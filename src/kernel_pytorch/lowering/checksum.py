"""Checksums of ``.pte`` files: written when a program is made, verified before ExecuTorch reads it.

The checksum is in a footer of 512 bytes behind the program. ExecuTorch's loaders ignore it, so any runner loads the
file. The footer ends with a record of 64 bytes: a magic string, the length of the program, its SHA-256, and another
magic string. The zeros before the record keep one damaged range from covering both the program and its record.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import shutil
import struct
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["ProgramFile", "add_checksum", "content", "damage", "digest_of", "has_checksum", "verify", "write_whole"]

_FIRST_MAGIC, _LAST_MAGIC = b"KernelPyTorch.pt", b"e.sha256"
_RECORD = struct.Struct("<16sQ32s8s")
_FOOTER_BYTES = 512
_HEADER = struct.Struct(
    "<4sIQQQ"
)  # ExecuTorch's, at byte 8: magic, length, program size, segments' offset and size


def add_checksum(program: bytes) -> bytes:
    """Return the program with a checksum footer, or unchanged if it already has one.

    Example:
        >>> whole = add_checksum(b"program")
        >>> len(whole) - len(b"program"), add_checksum(whole) == whole
        (512, True)
    """
    if _record(program) is not None:
        return program
    return program + _footer(len(program), hashlib.sha256(program).digest())


def _footer(length: int, digest: bytes) -> bytes:
    return _RECORD.pack(_FIRST_MAGIC, length, digest, _LAST_MAGIC).rjust(_FOOTER_BYTES, b"\0")


def verify(data: bytes | mmap.mmap) -> str | None:
    """Return why a file must not be loaded, or None.

    A file with a footer must match its checksum. For a file without one, as other tools write, only the sizes in
    ExecuTorch's header are checked here; ExecuTorch verifies the tables when it loads the file.

    Example:
        >>> whole = add_checksum(b"program")
        >>> verify(whole)
        'it has no ExecuTorch header'
        >>> verify(b"P" + whole[1:])
        'it is damaged: its checksum is wrong'
    """
    return damage(data) or _header_fault(data)


def damage(data: bytes | mmap.mmap) -> str | None:
    """Return how a file differs from what was written according to its footer; None if intact or without footer.

    Example:
        >>> damage(add_checksum(b"session")), damage(b"session")
        (None, None)
    """
    record = _record(data)
    if record is None:
        return None
    first, length, digest, last = record
    if (first, last) != (_FIRST_MAGIC, _LAST_MAGIC):
        return "it is damaged: its footer is broken"
    if length != len(data) - _FOOTER_BYTES:
        return f"it is damaged: it has {len(data) - _FOOTER_BYTES:,} bytes and was written with {length:,}"
    with memoryview(data) as whole, whole[:length] as program:
        found = hashlib.sha256(program).digest()
    return None if found == digest else "it is damaged: its checksum is wrong"


def content(data: bytes) -> bytes:
    """Return the contents of a file without its footer.

    Example:
        >>> content(add_checksum(b"session"))
        b'session'
    """
    return data if _record(data) is None else data[:-_FOOTER_BYTES]


def digest_of(data: bytes | mmap.mmap) -> str:
    """Return the SHA-256 of a program, from its footer if it has one.

    Example:
        >>> digest_of(add_checksum(b"program")) == digest_of(b"program")
        True
    """
    record = _record(data)
    return hashlib.sha256(data).hexdigest() if record is None else record[2].hex()


def has_checksum(data: bytes | mmap.mmap) -> bool:
    """Return whether a file ends with a footer that ``damage`` verifies.

    Example:
        >>> has_checksum(add_checksum(b"program")), has_checksum(b"program")
        (True, False)
    """
    return _record(data) is not None


def _record(data: bytes | mmap.mmap) -> tuple[bytes, int, bytes, bytes] | None:
    """Return the fields of the footer, or None if neither magic string is present."""
    if len(data) < _FOOTER_BYTES:
        return None
    found = _RECORD.unpack_from(data, len(data) - _RECORD.size)
    return found if found[0] == _FIRST_MAGIC or found[3] == _LAST_MAGIC else None


def _header_fault(data: bytes | mmap.mmap) -> str | None:
    if data[4:6] != b"ET":
        return "it has no ExecuTorch header"
    if len(data) < 8 + _HEADER.size:
        return f"it ends after {len(data)} bytes"
    magic, _, program, base, segments = _HEADER.unpack_from(data, 8)
    if magic != b"eh00":
        return None  # a program without segments has no sizes in its header
    if program > len(data) or base + segments > len(data):
        return f"it is cut: it has {len(data):,} bytes and needs {max(program, base + segments):,}"
    return None


def write_whole(path: Path, data: bytes | Path) -> None:
    """Write bytes, or a copy of a file, atomically; a program loaded from an earlier file at this path keeps using
    that file."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if isinstance(data, Path):
            shutil.copyfile(data, beside)
        else:
            beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


class ProgramFile:
    """A temporary file with a program and its checksum, written incrementally and deleted with the object.

    Example:
        >>> made = ProgramFile(lambda file: file.write(b"program"))
        >>> made.path.read_bytes() == add_checksum(b"program")
        True
    """

    def __init__(self, write: Callable[[Any], object]) -> None:
        handle, path = tempfile.mkstemp(prefix="kernel_pytorch_", suffix=".pte")
        self.path = Path(path)
        self._finalizer = weakref.finalize(self, self.path.unlink, missing_ok=True)
        with os.fdopen(handle, "wb") as file:
            hashed = _HashedFile(file)
            write(hashed)
            file.write(_footer(hashed.length, hashed.digest.digest()))

    @property
    def size(self) -> int:
        return self.path.stat().st_size


class _HashedFile:
    """A file wrapper that hashes what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest, self.length = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.length += len(data)
        return self._file.write(data)
