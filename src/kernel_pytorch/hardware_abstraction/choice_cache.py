"""Measured choices, kept in the user's cache directory.

One small file per choice, named by a digest of what it was measured for and written by an atomic rename:
any number of processes may read and write at once without locks, and a corrupt file costs one choice.
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
    """A measured choice could not be read or written; the choice itself is unharmed."""


class MeasuredChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured for one call on one device with one set of versions."""

    key: str
    timings: dict[str, float]
    """Median seconds by the name of what could be chosen, such as a kernel."""


def directory() -> Path:
    """Where choices are kept: ``$KERNEL_PYTORCH_CACHE``, or the platform's cache directory for users."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    return (Path(named) if named else Path(platformdirs.user_cache_dir("kernel_pytorch"))) / "choices"


def surroundings(device: Device) -> str:
    """What every measurement depends on, readable: device and versions."""
    versions = f"kernel_pytorch {kernel_pytorch.__version__}, torch {torch.__version__}, triton {triton_version()}"
    facts = f"{device.name} {device.arch} {device.compute_units} units {device.memory_bytes} bytes"
    return f"on {facts} with {versions}"


def choice_key(call: Call, device: Device, kernels: tuple[str, ...]) -> str:
    """Everything a measured choice of kernels depends on: surroundings, call and candidates."""
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
    """The choice measured before for this key. A corrupt file is reported, set aside and counts as none."""
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
    """Keep a choice for later processes. A full or read-only disk is a warning: this process goes on with it."""
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
