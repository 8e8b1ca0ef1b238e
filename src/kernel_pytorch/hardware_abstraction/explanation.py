"""``kp.explain``: select the kernel of a call, with a reason for every other kernel, without running it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.selection import Choice

__all__ = ["asked_device", "explain", "explained", "explaining"]


class _Explained(BaseException):
    """Carries the choice out of the call. A BaseException, so that no ``except Exception`` catches it."""

    def __init__(self, choice: Any) -> None:
        self.choice = choice


_asking: dict[int, Device | None] = {}
"""By thread inside ``explain``: the requested device, or None for that of the tensors."""


def explaining() -> bool:
    """Return whether this thread is inside ``explain``."""
    return bool(_asking) and threading.get_ident() in _asking


def asked_device() -> Device | None:
    """Return the ``device`` argument of this thread's ``explain``; None for the device of the tensors."""
    return _asking.get(threading.get_ident())


def explained(choice: Any) -> NoReturn:
    """End the call that ``explain`` made; ``explain`` returns ``choice``."""
    raise _Explained(choice)


def explain(
    function: Callable[..., Any],
    *arguments: Any,
    device: str | torch.device | Device | None = None,
    **keywords: Any,
) -> Choice:
    """Return the kernel that a call would use, with the reason against every other one. Runs no kernel.

    Args:
        function: a public function that calls an op of the registry, such as ``kp.rms_norm``. Its first op is
            explained.
        device: a catalogue name (``"nvidia/h200"``, or ``"h200"`` if that is unique), a torch device or a
            ``kp.Device``; None for the device of the tensors. It need not be present.

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
    # By thread: calls of other threads must run.
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
    raise TypeError(
        f"function={name}: it called no op of the registry; explain takes functions such as kp.rms_norm"
    )
