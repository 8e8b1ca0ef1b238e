"""Keep packed weights in temporary files during lowering, so that only one copy of the model is in memory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from executorch.exir._serialize._cord import FileBackedData

__all__ = ["LEAST_BYTES", "Spool", "Spooled", "content_name", "spool_folder"]

LEAST_BYTES = 1 << 20
"""Smaller tensors stay in memory."""

_folder: ContextVar[str | None] = ContextVar("spool folder", default=None)

T = TypeVar("T")


@dataclass(frozen=True)
class Spooled:
    """The bytes of a tensor in a temporary file, which is deleted with this object."""

    data: FileBackedData
    name: str
    """Name of a constant that methods share, derived from its content."""
    crc: int


def content_name(digest: bytes) -> str:
    """Return the name of a constant outside the payload.

    Example:
        >>> content_name(bytes(2))
        'kernel_pytorch_0000'
    """
    return f"kernel_pytorch_{digest.hex()}"


@contextlib.contextmanager
def spool_folder() -> Iterator[None]:
    """Delete files that are spooled inside the block at its end, because ExecuTorch keeps references for longer."""
    with tempfile.TemporaryDirectory(prefix="kernel_pytorch_") as folder:
        token = _folder.set(folder)
        try:
            yield
        finally:
            _folder.reset(token)


def _write(handle: int, content: Any) -> None:
    with os.fdopen(handle, "wb") as file:
        file.write(content)


class Spool:
    """Temporary files for large tensors.

    Example:
        >>> spool = Spool()
        >>> kept = spool.keep(torch.ones(LEAST_BYTES))
        >>> len(spool.found(kept).data) == kept.nbytes
        True
        >>> spool.found(torch.ones(2)) is None
        True
    """

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], Spooled] = {}

    def keep(self, value: T) -> T:
        """Return a large tensor, or a dataclass with such fields, mapped from a file; return others unchanged."""
        if is_dataclass(value) and not isinstance(value, type):
            tensors = {own.name: getattr(value, own.name) for own in fields(value)}
            kept = {name: self.keep(one) for name, one in tensors.items() if isinstance(one, torch.Tensor)}
            return replace(value, **kept)
        if not isinstance(value, torch.Tensor) or value.nbytes < LEAST_BYTES or self.found(value) is not None:
            return value
        return self._written(value)  # type: ignore[return-value]

    def found(self, tensor: torch.Tensor) -> Spooled | None:
        """Return the file of a tensor that ``keep`` returned; None for other tensors."""
        return self._files.get((tensor.data_ptr(), tensor.nbytes))

    def _written(self, tensor: torch.Tensor) -> torch.Tensor:
        handle, path = tempfile.mkstemp(prefix="kernel_pytorch_", suffix=".weights", dir=_folder.get())
        content: Any = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        try:
            _write(handle, content)
        except OSError as error:
            Path(path).unlink()
            raise OSError(
                f"no room for {tensor.nbytes / 1e9:.1f} GB of packed weights in {tempfile.gettempdir()}: free some, "
                f"or name another folder in TMPDIR ({error})"
            ) from error
        digest = hashlib.sha256(content).digest()
        data = FileBackedData(path, cleanup=True, sha256=digest)
        # Nothing is read from the mapping unless a rule accesses its elements.
        mapped = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        self._files[mapped.data_ptr(), mapped.nbytes] = Spooled(data, content_name(digest), zlib.crc32(content))
        return mapped
