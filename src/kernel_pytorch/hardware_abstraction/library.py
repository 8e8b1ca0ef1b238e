"""Optional libraries whose kernels are adopted: whether they are installed, in a tested version."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from functools import cache

__all__ = ["CUDNN_FRONTEND", "FLASH_ATTENTION_4", "Library"]


@dataclass(frozen=True)
class Library:
    """A library on PyPI, and the versions whose kernels passed the backend contract."""

    distribution: str
    module: str
    tested: tuple[str, ...]
    extra: str
    """The extra of this package that installs it."""

    def missing(self) -> str | None:
        """Return why the library cannot be used, or None. Reads package metadata only; imports nothing."""
        return _missing(self)


@cache
def _missing(library: Library) -> str | None:
    try:
        version = importlib.metadata.version(library.distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"needs {library.distribution}: pip install 'kernel-pytorch[{library.extra}]'"
    if version not in library.tested:
        return (
            f"was tested with {library.distribution} {' and '.join(library.tested)}, and {version} is installed: "
            f"pip install '{library.distribution}=={library.tested[-1]}'"
        )
    return None


FLASH_ATTENTION_4 = Library("flash-attn-4", "flash_attn.cute", ("4.0.0b36",), "hopper")
CUDNN_FRONTEND = Library("nvidia-cudnn-frontend", "cudnn", ("1.32.0",), "hopper")
