"""Checks of output files before minutes of work."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["check_writable"]


def check_writable(argument: str, file: Path, example: str) -> None:
    """Raise an error if a file cannot be written; ``example`` is a name that it could have in a folder."""
    if file.is_dir():
        raise IsADirectoryError(f"{argument}={str(file)!r} is a folder: name a file, such as {file / example}")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{argument}={str(file)!r}: there is no folder {str(file.parent)!r}; make it first")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise PermissionError(
            f"{argument}={str(file)!r} cannot be written: choose another place, or change its permissions"
        )
