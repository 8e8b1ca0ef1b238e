"""On-disk cache of measured choices, in the user's cache directory.

One small file per choice, named by a digest of its key and written by an atomic rename: any number of processes may
read and write at once without locks, and a corrupt file costs one choice.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
import warnings
from pathlib import Path

import msgspec
import platformdirs
import torch

import kernel_pytorch
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.op import Call

__all__ = ["ChoiceCacheWarning", "MeasuredChoice", "choice_key", "directory", "load", "store", "surroundings"]

ENVIRONMENT_VARIABLE = "KERNEL_PYTORCH_CACHE"


class ChoiceCacheWarning(UserWarning):
    """A measured choice could not be read or written. The current process is not affected."""


class MeasuredChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The timings of one call on one device with one set of versions."""

    key: str
    timings: dict[str, float]
    """Median seconds by the name of the candidate, such as a kernel."""


def directory() -> Path:
    """Return the cache directory: ``$KERNEL_PYTORCH_CACHE``, or the platform's cache directory for users."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    return (Path(named) if named else Path(platformdirs.user_cache_dir("kernel_pytorch"))) / "choices"


def surroundings(device: Device) -> str:
    """Return the part of the key that every measurement shares: device and versions, as readable text."""
    versions = f"kernel_pytorch {kernel_pytorch.__version__}, torch {torch.__version__}, triton {triton_version()}"
    facts = f"{device.name} {device.arch} {device.compute_units} units {device.memory_bytes} bytes"
    return f"on {facts} with {versions}"


def choice_key(call: Call, device: Device, kernels: tuple[str, ...]) -> str:
    """Return the key of a measured choice of kernels: device, versions, call and candidates."""
    return f"{call} {surroundings(device)} of {' '.join(kernels)}"


def triton_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def _path(key: str) -> Path:
    return directory() / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def load(key: str) -> MeasuredChoice | None:
    """Return the cached choice for this key, or None. A corrupt file is renamed, with a warning."""
    path = _path(key)
    try:
        choice = msgspec.json.decode(path.read_bytes(), type=MeasuredChoice)
        if choice.key != key or not choice.timings or min(choice.timings.values()) <= 0:
            raise ValueError("its content does not belong to its name")
        return choice
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.warn(f"cannot read {path}: {error}; measuring again", ChoiceCacheWarning, stacklevel=2)
        return None
    except (msgspec.DecodeError, ValueError) as error:
        aside = path.with_suffix(f".corrupt-{time.time_ns()}")
        try:
            path.replace(aside)
            where = f"set aside as {aside.name}"
        except OSError as move_error:
            where = f"could not be set aside ({move_error})"
        warnings.warn(
            f"measured choice {path} is corrupt ({error}); {where}, measuring again",
            ChoiceCacheWarning,
            stacklevel=2,
        )
        return None


def store(choice: MeasuredChoice) -> None:
    """Write a choice for later processes. A full or read-only disk gives a warning, not an error."""
    path = _path(choice.key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".writing")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(choice))
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        warnings.warn(
            f"cannot keep the measured choice in {path.parent}: {error}; set {ENVIRONMENT_VARIABLE} to a "
            f"writable directory to keep it between runs",
            ChoiceCacheWarning,
            stacklevel=2,
        )
