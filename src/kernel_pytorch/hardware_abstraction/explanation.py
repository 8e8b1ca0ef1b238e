"""``kp.explain``: the choice of a kernel for a call that does not run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.selection import Choice

__all__ = ["asked_device", "explain", "explained", "explaining"]


class _Explained(BaseException):
    """Carries the choice out of a call that is only being explained; BaseException so that no caller eats it."""

    def __init__(self, choice: Any) -> None:
        self.choice = choice


_asking: dict[int, Device | None] = {}  # thread inside explain() -> the device it asks about, None for the tensors'


def explaining() -> bool:
    """Whether this thread is inside ``explain``."""
    return bool(_asking) and threading.get_ident() in _asking


def asked_device() -> Device | None:
    """The device that ``explain`` was asked about on this thread; None for the tensors' own."""
    return _asking.get(threading.get_ident())


def explained(choice: Any) -> NoReturn:
    """End the call that ``explain`` made, with what it is to return."""
    raise _Explained(choice)


def explain(
    function: Callable[..., Any],
    *arguments: Any,
    device: str | torch.device | Device | None = None,
    **keywords: Any,
) -> Choice:
    """Which kernel a call would use, and why not each other one. Runs no kernel.

    Args:
        function: a function of ours, such as ``kp.rms_norm``.
        device: ask for another device, by catalogue name, as torch names it or as facts, instead of the tensors' own.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> print(kp.explain(kp.rms_norm, torch.ones(2, 64), device="nvidia/h200"))
        rms_norm.forward(x=float32[2, 64], weight=None, eps=1e-06)
        on nvidia/h200 (sm_90)
        -> triton  the first in the backend's order that fits
           torch   fits; ranked after triton
    """
    from kernel_pytorch.hardware_abstraction.registry import device as find_device

    if not callable(function):
        raise TypeError(f"function={function!r}: explain takes the function itself, such as kp.rms_norm")
    # Of this thread alone: what other threads call meanwhile must run.
    thread = threading.get_ident()
    _asking[thread] = device if device is None or isinstance(device, Device) else find_device(device)
    try:
        function(*arguments, **keywords)
    except _Explained as ended:
        choice: Choice = ended.choice
        return choice
    finally:
        del _asking[thread]
    name = getattr(function, "__name__", repr(function))
    raise TypeError(f"function={name}: it called no op of the table; explain takes functions such as kp.rms_norm")
