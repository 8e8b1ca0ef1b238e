"""Hardware abstraction: devices as facts, backends as records, selection as a pure function."""

from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE
from kernel_pytorch.hardware_abstraction.device import Device, Rates
from kernel_pytorch.hardware_abstraction.op import (
    Call,
    Case,
    Kernel,
    Op,
    TensorSpec,
    registered_op,
    registered_ops,
)
from kernel_pytorch.hardware_abstraction.registry import (
    ENTRY_POINT_GROUP,
    KERNEL_ENTRY_POINT_GROUP,
    AddedKernel,
    Backend,
    BrokenBackend,
    backend,
    backends,
    broken_backends,
    devices,
)
from kernel_pytorch.hardware_abstraction.selection import (
    Choice,
    Policy,
    UnsupportedCallError,
    Verdict,
    select,
)

__all__ = [
    "CATALOGUE",
    "ENTRY_POINT_GROUP",
    "KERNEL_ENTRY_POINT_GROUP",
    "AddedKernel",
    "Backend",
    "BrokenBackend",
    "Call",
    "Case",
    "Choice",
    "Device",
    "Kernel",
    "Op",
    "Policy",
    "Rates",
    "TensorSpec",
    "UnsupportedCallError",
    "Verdict",
    "backend",
    "backends",
    "broken_backends",
    "devices",
    "registered_op",
    "registered_ops",
    "select",
]
