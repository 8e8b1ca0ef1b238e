"""Acme's backend: the record that KernelPyTorch finds through the entry point ``kernel_pytorch.backends``."""

from pathlib import Path

from kernel_pytorch import Backend, Device
from kernel_pytorch.hardware_abstraction import Call, Kernel

__all__ = ["A1", "BACKEND"]

# Facts from the data sheet: kp.device("acme/a1") works without the hardware.
A1 = Device(
    name="acme/a1",
    backend="acme",
    vendor="acme",
    arch="a1",
    memory_bytes=1 << 30,
    compute_units=4,
    warp_size=1,
    shared_memory_bytes=0,
    formats=frozenset({"float32", "float16", "bfloat16", "int8"}),
)


def probe() -> tuple[Device, ...]:
    """Return the devices of this machine. Query your driver, set ``torch_device`` such as "acme:0"; never raise."""
    return ()


def _supports(call: Call, device: Device) -> str | None:
    number_format = call["x"].format
    return None if device.supports(number_format) else f"{device.arch} does not compute in {number_format}"


BACKEND = Backend(
    name="acme",
    title="Acme accelerators",
    probe=probe,
    catalogue=(A1,),
    kernels=(
        # "torch": the kernel consists of torch operations and can be tested on a CPU. A kernel that calls your own
        # library is "native": its tests skip without the device.
        Kernel(
            op="rms_norm",
            name="acme",
            module="acme_backend.rms_norm",
            supports=_supports,
            language="torch",
        ),
    ),
    install_hint="Acme's driver",
    evidence=Path(__file__).with_name("evidence"),
    lowering="acme_backend.lowering:LOWERING",
    notes=Path(__file__).with_name("notes.md"),
)
