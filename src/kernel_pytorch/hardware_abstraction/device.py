"""Facts about one device: probed from hardware, or named from the catalogue. Facts only, never policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Device", "Rates"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Memory bandwidth and matmul rates of a device, with their source.

    Example:
        >>> Rates(bandwidth=4.8e12, matmul={"bfloat16": 989e12}, source="datasheet").matmul["bfloat16"]
        989000000000000.0
    """

    bandwidth: float
    """Bytes per second through device memory, read plus written."""
    matmul: dict[str, float] = field(default_factory=dict, hash=False)
    """Dense multiply-add rate in FLOP/s by number format."""
    unknown: dict[str, str] = field(default_factory=dict, hash=False)
    """Number formats without a rate, each with the reason."""
    source: str = "datasheet"
    """``"datasheet"`` (the vendor's peak) or ``"measured"`` (on this device)."""

    def __post_init__(self) -> None:
        if self.source not in ("datasheet", "measured"):
            raise ValueError(f"source={self.source!r}: use 'datasheet' or 'measured'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Frozen facts about one device.

    Example:
        >>> import kernel_pytorch as kp
        >>> h200 = kp.device("nvidia/h200")
        >>> h200.arch, h200.supports("float8_e4m3fn"), h200.present
        ('sm_90', True, False)
    """

    name: str
    """``"nvidia/h200"`` in the catalogue; the driver's name when probed."""
    backend: str
    """The name of the ``Backend`` record whose kernels it runs."""
    vendor: str
    """``"nvidia"``, ``"amd"``, ``"intel"``, ``"arm"`` ..."""
    arch: str
    """The instruction set that kernels are built for: ``"sm_90"``, ``"gfx942"``, ``"xe2-hpg"``, ``"avx512"``."""
    memory_bytes: int
    """Device memory; for a CPU, the machine's RAM. 0 if it depends on the machine."""
    compute_units: int
    """Multiprocessors, compute units, Xe cores or physical CPU cores. 0 if it depends on the machine."""
    warp_size: int
    """Threads that execute together (warp, wavefront, sub-group); 1 on a CPU."""
    shared_memory_bytes: int
    """Maximum shared memory of one thread block; 0 on a CPU."""
    l2_bytes: int | None = None
    """Size of the second-level cache of the whole device; None if unknown."""
    interconnect: str | None = None
    """The interconnect to its peers, or to the host if there is none; None if unknown."""
    interconnect_bandwidth: float | None = None
    """Bytes per second of the interconnect over all links, sent plus received; None if unknown."""
    power_watts: int | None = None
    """Maximum power; None if unknown."""
    formats: frozenset[str]
    """Number formats the hardware computes with or converts, by torch dtype name."""
    matrix_formats: frozenset[str] = frozenset()
    """The subset of ``formats`` that the matrix units multiply."""
    mx_formats: frozenset[str] = frozenset()
    """Block-scaled formats that the matrix units multiply: ``"mxfp8"``, ``"mxfp6"``, ``"mxfp4"``, ``"nvfp4"``."""
    matrix_units: frozenset[str] = frozenset()
    """``"mma"``, ``"wgmma"``, ``"tcgen05"``, ``"mfma"``, ``"wmma"``, ``"xmx"``, ``"amx"`` ..."""
    features: frozenset[str] = frozenset()
    """Other features that kernels check for: ``"tma"``, ``"cp_async"``, ``"avx512_bf16"`` ..."""
    torch_device: str | None = None
    """Its torch device (``"cuda:0"``); None for a device that is not present."""
    rates: Rates | None = None
    """Bandwidth and matmul rates; None for a probed device that was not measured (see ``measure_rates``)."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """For a catalogue device, by field: the source of the fact, or why it is None."""

    def __post_init__(self) -> None:
        unknown = self.matrix_formats - self.formats
        if unknown:
            raise ValueError(f"{self.name}: matrix_formats {sorted(unknown)} are not in formats")

    def __hash__(self) -> int:
        return hash((self.name, self.backend, self.arch, self.torch_device, self.memory_bytes))

    @property
    def present(self) -> bool:
        """Whether the device is in this machine, so that torch can place a tensor on it."""
        return self.torch_device is not None

    def supports(self, number_format: str) -> bool:
        """Return whether the hardware computes with this number format (a torch dtype name).

        Example:
            >>> import kernel_pytorch as kp
            >>> kp.device("nvidia/a100").supports("float8_e4m3fn")
            False
        """
        return number_format in self.formats
