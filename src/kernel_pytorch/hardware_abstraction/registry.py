"""Registry of backends: the four built-in ones, and third parties' backends and kernels through entry points."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from kernel_pytorch.hardware_abstraction.catalogue import catalogue_device, catalogue_of
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.op import Kernel, registered_op

__all__ = [
    "AddedKernel",
    "Backend",
    "BrokenBackend",
    "ENTRY_POINT_GROUP",
    "KERNEL_ENTRY_POINT_GROUP",
    "backend",
    "backends",
    "broken_backends",
]

ENTRY_POINT_GROUP = "kernel_pytorch.backends"
KERNEL_ENTRY_POINT_GROUP = "kernel_pytorch.kernels"

# Best first. This order, with third parties before the CPU, decides which present device `device()` returns.
_BUILT_IN = ("nvidia", "amd", "intel", "cpu")


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One vendor's devices and kernels: a record, not a class to inherit from.

    Example:
        >>> from kernel_pytorch.hardware_abstraction import backend
        >>> [kernel.name for kernel in backend("cpu").kernels if kernel.op == "rms_norm"]
        ['torch']
    """

    name: str
    title: str
    """One line that describes the hardware."""
    probe: Callable[[], tuple[Device, ...]]
    """Returns the devices of this machine; never raises."""
    kernels: tuple[Kernel, ...]
    """Best first. Without a record that applies, selection takes the first kernel that can serve a call."""
    catalogue: tuple[Device, ...] = ()
    """Devices that can be asked about without the hardware."""
    install_hint: str = ""
    """What to install if the machine has a device of this vendor that torch does not see."""
    evidence: Path | None = None
    """Folder with the backend's records, or None; recorded times order the kernels."""
    lowering: str | None = None
    """``"package.module:NAME"`` of the ``Lowering`` record that makes ``.pte`` programs, imported at first use; None
    if the backend has none."""
    notes: Path | None = None
    """Hand-written sections for the backend's generated pages (``kernel-pytorch backend docs``)."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name != self.name.lower():
            raise ValueError(f"name={self.name!r}: a backend's name is one lower-case word, such as 'acme'")
        seen = set()
        for kernel in self.kernels:
            if (kernel.op, kernel.name) in seen:
                raise ValueError(f"backend {self.name!r} lists kernel {kernel.name!r} of {kernel.op!r} twice")
            seen.add((kernel.op, kernel.name))
        for device in self.catalogue:
            if device.backend != self.name:
                raise ValueError(
                    f"backend {self.name!r} lists {device.name!r}, whose backend is {device.backend!r}"
                )
        if self.lowering is not None and not re.fullmatch(r"[\w.]+:\w+", self.lowering):
            raise ValueError(f"lowering={self.lowering!r}: use 'package.module:NAME' of a Lowering record")


@dataclass(frozen=True, kw_only=True)
class AddedKernel:
    """A third party's kernel for an existing backend; an entry point of ``kernel_pytorch.kernels`` names one.

    Example:
        >>> import dataclasses
        >>> from kernel_pytorch.ops.rms_norm import KERNEL_TORCH
        >>> mine = dataclasses.replace(KERNEL_TORCH, name="mine", module="my_package.rms_norm")
        >>> AddedKernel(backend="cpu", kernel=mine, before="torch").kernel.name
        'mine'
    """

    backend: str
    kernel: Kernel
    before: str | None = None
    """The kernel of the same op to insert it before. None for last: it then runs if pinned or measured fastest."""

    def added_to(self, record: Backend) -> Backend:
        """Return the backend with this kernel added."""
        kernels = list(record.kernels)
        names = [kernel.name if kernel.op == self.kernel.op else "" for kernel in kernels]
        if self.before is not None and self.before not in names:
            known = ", ".join(filter(None, names)) or "none"
            raise ValueError(
                f"before={self.before!r}: {self.kernel.op} has no such kernel on {self.backend}; it has {known}"
            )
        kernels.insert(len(kernels) if self.before is None else names.index(self.before), self.kernel)
        return replace(record, kernels=tuple(kernels))


@dataclass(frozen=True)
class BrokenBackend:
    """A backend or kernel that could not be loaded or probed, with the traceback."""

    name: str
    origin: str
    error: str
    traceback: str


@dataclass
class _Loaded:
    backends: dict[str, Backend]
    broken: list[BrokenBackend]


def _broken(name: str, origin: str, error: Exception) -> BrokenBackend:
    text = "".join(traceback.format_exception(error))
    return BrokenBackend(name, origin, f"{type(error).__name__}: {error}", text)


@cache
def _load() -> _Loaded:
    loaded = _Loaded({}, [])
    for name in _BUILT_IN:
        loaded.backends[name] = importlib.import_module(f"kernel_pytorch.backends.{name}").BACKEND
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            record = entry.load()
            if not isinstance(record, Backend):
                raise TypeError(f"{entry.value} is a {type(record).__name__}; the entry point must name a Backend")
            if record.name != entry.name:
                raise ValueError(f"entry point {entry.name!r} names a backend that calls itself {record.name!r}")
            if record.name in loaded.backends:
                raise ValueError(f"a backend called {record.name!r} is already there; choose another name")
            for kernel in record.kernels:
                registered_op(kernel.op)  # a kernel of a misspelled op would never be selected
            loaded.backends[record.name] = record
        except Exception as error:  # a plug-in may fail in any way; the built-in backends must still load
            loaded.broken.append(_broken(entry.name, entry.value, error))
    for entry in importlib.metadata.entry_points(group=KERNEL_ENTRY_POINT_GROUP):
        try:
            added = entry.load()
            if not isinstance(added, AddedKernel):
                raise TypeError(
                    f"{entry.value} is a {type(added).__name__}; the entry point must name an AddedKernel"
                )
            if added.backend not in loaded.backends:
                known = ", ".join(loaded.backends)
                raise ValueError(f"backend={added.backend!r}: no such backend; there are {known}")
            registered_op(added.kernel.op)
            loaded.backends[added.backend] = added.added_to(loaded.backends[added.backend])
        except Exception as error:
            loaded.broken.append(_broken(entry.name, entry.value, error))
    return loaded


@cache
def _generic() -> Backend:
    """Return the backend of devices that torch runs and no backend describes (mps, hpu, npu ...).

    It has the kernels that all built-in backends list."""
    ours = [_load().backends[name].kernels for name in _BUILT_IN]
    return Backend(
        name="generic",
        title="Devices that PyTorch runs and no backend describes",
        probe=tuple,
        catalogue=catalogue_of("generic"),
        kernels=tuple(kernel for kernel in ours[0] if all(kernel in kernels for kernels in ours)),
    )


def backends() -> tuple[Backend, ...]:
    """Return every backend that loads: the built-in ones, then third parties'.

    Example:
        >>> [b.name for b in backends()][:4]
        ['nvidia', 'amd', 'intel', 'cpu']
    """
    return tuple(_load().backends.values())


def backend(name: str) -> Backend:
    """Return the backend of this name; raise an error that lists the names if there is none."""
    if name == "generic":
        return _generic()
    try:
        return _load().backends[name]
    except KeyError:
        raise ValueError(f"backend={name!r}: no such backend; there are {', '.join(_load().backends)}") from None


def device_preferring(kernel: Kernel, where: torch.device, *formats: str) -> Device | None:
    """Return the device if its backend lists this kernel first for its op and the device supports these formats.

    Returns None otherwise. ``Kernel.supports`` is not called.
    """
    device = device_of(where)
    first = next(known for known in backend(device.backend).kernels if known.op == kernel.op)
    return device if first is kernel and all(map(device.supports, formats)) else None


def broken_backends() -> tuple[BrokenBackend, ...]:
    """Return the plug-ins that failed to load or probe, with tracebacks; ``kernel-pytorch doctor`` shows them."""
    devices()
    return tuple(_load().broken)


@cache
def devices() -> tuple[Device, ...]:
    """Return the devices of this machine, best first.

    Example:
        >>> import kernel_pytorch as kp
        >>> kp.devices()[-1].backend
        'cpu'
    """
    found: dict[str, tuple[Device, ...]] = {}
    owners: dict[str, str] = {}  # torch device -> its backend
    for record in backends():  # built-in first, so that a third party cannot claim their torch devices
        try:
            probed = tuple(record.probe())
            for device in probed:
                if device.backend != record.name:
                    raise ValueError(f"probe() returned {device.name!r} of backend {device.backend!r}")
                owner = owners.get(_torch_name(device), record.name)
                if owner != record.name:
                    raise ValueError(
                        f"probe() returned {device.name!r} as torch device {device.torch_device!r}, which is "
                        f"the {owner} backend's already; register a torch device of your own"
                    )
            owners |= {_torch_name(device): record.name for device in probed}
            found[record.name] = probed
        except Exception as error:  # a vendor's probe may fail in any way; keep the other devices
            _load().broken.append(_broken(record.name, f"{record.name}.probe", error))
    last = found.pop("cpu", ())  # third parties' devices come before the CPU
    return (*(device for probed in found.values() for device in probed), *last)


def _torch_name(device: Device) -> str:
    """Return the device's torch name with its index, so that "cpu" and "cpu:0" are equal."""
    kind, _, index = str(device.torch_device).partition(":")
    return f"{kind}:{index or 0}"


def device(name: str | torch.device | None = None, *, measure: bool = False) -> Device:
    """Return the best device of this machine, a torch device, or a device of the catalogue.

    Args:
        name: None for the best device of this machine, a torch device (``"cuda:0"``), or a catalogue name
            (``"nvidia/h200"``, or ``"H200"`` if that is unique), which need not be present.
        measure: also measure bandwidth and matmul rates (about a second). The device must be present. Raises
            BusyMachineError if other programs are running.

    Example:
        >>> import kernel_pytorch as kp
        >>> kp.device("amd/mi300x").warp_size
        64
    """
    if name is not None and not isinstance(name, (str, torch.device)):
        raise TypeError(f"name={name!r}: use a torch device, a name of the catalogue, or None")
    if name is None:
        chosen = devices()[0]
    else:
        wanted = None
        with contextlib.suppress(RuntimeError):  # torch cannot parse it: a catalogue name
            wanted = torch.device(name)
        chosen = _catalogued(str(name)) if wanted is None else device_of(wanted)
    if not measure:
        return chosen
    from kernel_pytorch.hardware_abstraction.rates import measure_rates

    return replace(chosen, rates=measure_rates(chosen))


def _catalogued(name: str) -> Device:
    """Return the device of this name in the backends' catalogues."""
    return catalogue_device(
        name, {known.name: known for record in (*backends(), _generic()) for known in record.catalogue}
    )


_DESCRIBED = frozenset({"cpu", "cuda", "xpu", "meta"})
"""The torch device types that the built-in backends probe."""


def _runs(kind: str) -> bool:
    """Return whether torch can place a tensor on a device of this type."""
    try:
        return bool(torch.get_device_module(kind).is_available())
    except (AttributeError, RuntimeError):
        return False


_pretended: dict[str, Device] = {}  # torch device type -> the device tests pretend it is


@cache
def _present(torch_device: torch.device) -> Device:
    names = {f"{torch_device.type}:{torch_device.index or 0}"} | ({"cpu"} if torch_device.type == "cpu" else set())
    for known in devices():
        if known.torch_device in names:
            return known
    if torch_device.type not in _DESCRIBED and _runs(torch_device.type):
        return Device(
            name=str(torch_device),
            backend="generic",
            vendor="unknown",
            arch=torch_device.type,
            memory_bytes=0,
            compute_units=0,
            warp_size=1,
            shared_memory_bytes=0,
            formats=frozenset({"float32", "float16", "bfloat16"}),
            torch_device=str(torch_device),
        )
    here = ", ".join(str(known.torch_device) for known in devices())
    raise ValueError(
        f"device={str(torch_device)!r}: torch has no such device here; it has {here}. For hardware that is absent "
        "name a device of the catalogue, such as 'nvidia/h200'"
    )


def device_of(torch_device: torch.device) -> Device:
    """Return the facts about a torch device."""
    if _pretended and torch_device.type in _pretended:
        return _pretended[torch_device.type]
    index: int | None = torch_device.index
    if index is None and torch_device.type != "cpu":  # "cuda" is the current device
        with contextlib.suppress(Exception):  # a type that this torch cannot run: the lookup raises the error
            current = torch.get_device_module(torch_device.type).current_device()
            torch_device = torch.device(torch_device.type, current)
    return _present(torch_device)
