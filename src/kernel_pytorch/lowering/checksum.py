"""Checksums of ``.pte`` files: written when a program is made, verified before ExecuTorch reads it.

The checksum is in a footer of 512 bytes behind the program. ExecuTorch's loaders ignore it, so any runner loads the
file. The footer ends with a record of 64 bytes: a magic string, the length of the program, its SHA-256, and another
magic string. The zeros before the record keep one damaged range from covering both the program and its record.
"""

from __future__ import annotations

import hashlib
import mmap
import secrets
import struct
from pathlib import Path

__all__ = ["add_checksum", "content", "damage", "digest_of", "verify", "write_whole"]

_FIRST_MAGIC, _LAST_MAGIC = b"KernelPyTorch.pt", b"e.sha256"
_RECORD = struct.Struct("<16sQ32s8s")
_FOOTER_BYTES = 512
_HEADER = struct.Struct(
    "<4sIQQQ"
)  # ExecuTorch's, at byte 8: magic, length, program size, segments' offset and size


def add_checksum(program: bytes) -> bytes:
    """Return the program with a checksum footer, or unchanged where it has one.

    Example:
        >>> whole = add_checksum(b"program")
        >>> len(whole) - len(b"program"), add_checksum(whole) == whole
        (512, True)
    """
    if _record(program) is not None:
        return program
    record = _RECORD.pack(_FIRST_MAGIC, len(program), hashlib.sha256(program).digest(), _LAST_MAGIC)
    return program + record.rjust(_FOOTER_BYTES, b"\0")


def verify(data: bytes | mmap.mmap) -> str | None:
    """Return why a file must not be loaded, or None.

    A file with a footer must match its checksum. For a file without one, which other tools write, the sizes in
    ExecuTorch's header are checked here; ExecuTorch verifies its tables when it loads it.

    Example:
        >>> whole = add_checksum(b"program")
        >>> verify(whole)
        'it has no ExecuTorch header'
        >>> verify(b"P" + whole[1:])
        'it is damaged: its checksum is wrong'
    """
    return damage(data) or _header_fault(data)


def damage(data: bytes | mmap.mmap) -> str | None:
    """Return how a file with a footer differs from what was written, or None; also where it has no footer.

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
    """Return what a file has before its footer.

    Example:
        >>> content(add_checksum(b"session"))
        b'session'
    """
    return data if _record(data) is None else data[:-_FOOTER_BYTES]


def digest_of(data: bytes | mmap.mmap) -> str:
    """Return the SHA-256 of a program, from its footer where it has one.

    Example:
        >>> digest_of(add_checksum(b"program")) == digest_of(b"program")
        True
    """
    record = _record(data)
    return hashlib.sha256(data).hexdigest() if record is None else record[2].hex()


def _record(data: bytes | mmap.mmap) -> tuple[bytes, int, bytes, bytes] | None:
    """Return the fields of the footer, or None where neither magic string is there."""
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


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; a program that is loaded from an earlier file there goes on with that."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
